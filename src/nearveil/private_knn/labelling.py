"""Label a public file from a private one: read and check everything, pay, answer, write.

Records come from .npz files, .csv files or folders of images. Errors contain nothing private.
"""

import csv
import os
import warnings
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedRandom, StringIO
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.features import ImageError, load_image
from nearveil.features.extractor import hog
from nearveil.ledger import Account
from nearveil.privacy import Guarantee
from nearveil.private_knn._knn import PrivateKNeighborsClassifier
from nearveil.private_knn.individual import LEAST_PUBLIC, VoteForecast
from nearveil.private_knn.plan import NoiseWarning, VotePlan, find_needed_votes
from nearveil.private_knn.spending import ExhaustedError
from nearveil.progress import Progress, Tick
from nearveil.storage import flush_folder, replace_file

Role = Literal["PRIVATE", "PUBLIC"]
ImageFeatures = Literal["auto", "hog", "none"]

_LABEL = "label"  # column of a .csv
_NOISE_RATIO = 2.0  # expected votes for each unit of noise: fewer are noise
_BATCH = 1024  # queries per call: answers of earlier calls are kept if a later one fails


class LabelInputError(NearveilError, ValueError):
    """An input cannot be used. The text says which one and why, and contains nothing private."""


@dataclass(frozen=True)
class LabelReport:
    """The result of labelling, all of it public."""

    names: Sequence[str]  #: of the public rows
    labels: Sequence[str]  #: of the first rows, or of all; empty if a row was declined
    guarantee: Guarantee
    notes: tuple[str, ...]  #: remarks for the user
    text: str  #: the labels as CSV
    lost: str  #: why the file could not be written; empty if it was
    stopped: str  #: why there are fewer labels than rows; empty if there are not


def label_file(
    private: str | os.PathLike[str],
    public: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    epsilon: float,
    delta: float = 1e-5,
    max_answered: int | None = None,
    n_neighbors: int | None = None,
    classes: Sequence[str] | None = None,
    features: ImageFeatures = "auto",
    side: int = 32,
    force: bool = False,
    unit: str = "record",
    account: Account | None = None,
    allow_noise: bool = False,
    progress: Progress | None = None,
    warn: Callable[[str], object] = warnings.warn,
) -> LabelReport:
    """Label a public file from a private one: the nearest private records vote, with noise.

    Everything is read and checked first, then paid, then answered. Rows without a clear majority get no label.

    Parameters
    ----------
    private, public : path
        A .npz or .csv file, or a folder of images; the private ones in one folder for each class.
    out : path
        The CSV file to write; with `force`, an existing one is replaced.
    epsilon, delta : float
        Cost of all labels together.
    max_answered : int, optional
        Label at most this many rows; all public rows by default.
    n_neighbors : int, optional
        Number of private records that vote.
    classes : sequence of str, optional
        Public list of the classes. The default, the classes of the private records, is not protected.
    features : {"auto", "hog", "none"}
        Turn images into histograms of gradients, or use their pixels, of folders ``side`` x ``side``.
    unit : str
        The meaning of one private row.
    account : Account, optional
        The account that pays.
    allow_noise : bool
        Ask even if every class has too few records for more than noise.
    progress, warn : callable
        ``progress(text, total)`` returns a function that is called with the number of rows done. ``warn`` is called
        with texts that only the owner of the private records should read.
    """
    bars, target = progress or (lambda _, __: lambda ___: None), Path(out)
    check_writable(target, force=force)
    if any(target.resolve().is_relative_to(Path(path).resolve()) for path in (private, public)):
        raise ValueError("out: it is PRIVATE or PUBLIC, or a path inside; give another path")
    task = _prepare(Path(private), Path(public), classes, features, side, bars, warn)
    n_rows = len(task.queries)
    most = min(max_answered or n_rows, n_rows)
    bars("planning", None)
    voter = PrivateKNeighborsClassifier(
        epsilon,
        delta,
        most,
        n_neighbors=n_neighbors,
        max_screened=n_rows if 2 * most >= n_rows and n_rows < LEAST_PUBLIC else None,  # no row is screened twice
        classes=np.arange(len(task.classes)) if classes else None,  # otherwise the guarantee says so
        unit=unit,
        account=account,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoiseWarning)  # refused below, or allowed
        voter = voter.fit(task.records, task.class_numbers, public=task.queries)
    if not (allow_noise or voter.plan_.individual):
        _check_agreement(voter.plan_, task.class_numbers)
    preview = None if account is None else account.preview(voter.guarantee)
    if preview is not None and not preview.allowed:  # screenings alone would be wasted
        raise ValueError(f"account: {preview.reason}; lower `epsilon`, or name another")
    if voter.plan_.individual:
        _check_forecast(voter.forecast(task.queries[:most]), warn, allow_noise=allow_noise)
    longest = max(task.classes, key=lambda name: len(_encode(name)))
    text, lost = "", ""
    try:
        with replace_file(target, private=False) as file:
            _fill(file, bytes(len(_encode(task.format_csv([longest] * n_rows)))))  # the disk is full: nothing was spent
            labels, stopped = _collect_labels(voter, task, bars("querying", n_rows))
            text = task.format_csv(labels)
            _fill(file, _encode(text))
            check_writable(target, force=force)  # another program may have created the file
        with suppress(OSError):  # some file systems cannot sync a folder
            flush_folder(target.absolute().parent)
    except (OSError, ValueError) as error:
        if not text:
            raise
        lost = getattr(error, "strerror", None) or str(error)  # the labels are paid for: report them instead
    return LabelReport(task.names, labels, voter.guarantee, task.notes, text, lost, stopped)


@dataclass(frozen=True)
class _LabelTask:
    """Checked input. `records` and `class_numbers` are private."""

    queries: NDArray[np.floating]
    heading: str  # of the column of names: "row" or "file"
    names: Sequence[str]  # of the queries
    records: NDArray[np.floating] = field(repr=False)
    class_numbers: NDArray[np.int64] = field(repr=False)  # indexes into `classes`
    classes: Sequence[str]
    notes: tuple[str, ...]  # public

    def format_csv(self, labels: Sequence[str]) -> str:
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([(self.heading, "label"), *zip(self.names, labels, strict=False)])
        return text.getvalue()


def _prepare(
    private: Path,
    public: Path,
    classes: Sequence[str] | None,
    features: ImageFeatures,
    side: int,
    bars: Progress,
    warn: Callable[[str], object],
) -> _LabelTask:
    """Read and check everything. The public file alone decides which columns are features."""
    if classes is not None and (len(classes) < 2 or len(set(classes)) < len(classes)):
        raise LabelInputError("classes must name at least two classes, each once: a,b,c, or a file with one per line")
    queries = _read_records(public, "PUBLIC", side, (), bars("reading PUBLIC", None))
    records = _read_records(private, "PRIVATE", side, queries.columns, bars("reading PRIVATE", None))
    if (queries.values.ndim > 2) != (records.values.ndim > 2):
        raise LabelInputError("PRIVATE and PUBLIC must be of one kind: images both, or vectors both")
    rows = _make_vectors(queries, features, "PUBLIC", bars("features of PUBLIC", len(queries.values)))
    private_rows = _make_vectors(records, features, "PRIVATE", bars("features of PRIVATE", len(records.values)))
    if rows.shape[1] != private_rows.shape[1]:
        raise LabelInputError(
            f"PRIVATE has {private_rows.shape[1]} features and PUBLIC {rows.shape[1]}: they must be the same"
        )
    if records.skipped:  # for the owner: the reasons, without counts
        share = "most" if records.skipped.total() > len(records.values) else "some"
        warn(f"PRIVATE: {share} files were left out: {'; '.join(sorted(records.skipped))}")
    names = tuple(classes or records.folders or sorted(set(records.labels)))
    if len(names) < 2:
        raise LabelInputError("PRIVATE must have at least two classes; `classes` names those that have no record")
    class_numbers = {name: code for code, name in enumerate(names)}
    if not class_numbers.keys() >= set(records.labels):
        raise LabelInputError("PRIVATE: some labels are not in `classes`; add them, or leave these records out")
    return _LabelTask(
        queries=rows,
        heading="file" if queries.names else "row",
        names=queries.names or tuple(map(str, range(len(rows)))),
        records=private_rows,
        class_numbers=np.array([class_numbers[label] for label in records.labels], dtype=np.int64),
        classes=names,
        notes=tuple(_list_notes(queries, inferred=classes is None)),
    )


def _make_vectors(records: "_Records", features: ImageFeatures, role: Role, tick: Tick) -> NDArray[np.floating]:
    if features == "hog" and records.values.ndim == 2:
        raise LabelInputError(f"features hog needs images, and {role} holds vectors; leave it out")
    if records.values.ndim > 2 and features != "none":
        try:
            return hog(records.values, tick=tick)
        except (ValueError, ModuleNotFoundError) as error:
            raise LabelInputError(f"{role}: {error}") from None
    rows = records.values.reshape(len(records.values), -1)
    rows = rows if rows.dtype == np.float32 else rows.astype(np.float64)
    if not np.isfinite(rows).all():
        raise LabelInputError(f"{role}: features must be finite; fill or drop missing values (NaN) first")
    return rows


def _list_notes(queries: "_Records", *, inferred: bool) -> Iterator[str]:
    if inferred:
        yield "The list of classes is PRIVATE's own and is not protected; `classes` gives one that is public."
    if queries.skipped:
        reasons = "; ".join(f"{count} {reason}" for reason, count in sorted(queries.skipped.items()))
        yield f"Files of PUBLIC that were left out: {reasons}."
    if queries.ignored:
        yield f"Columns of PUBLIC that hold no numbers and were left out: {', '.join(queries.ignored)}."


def _check_agreement(plan: VotePlan, class_numbers: NDArray[np.int64]) -> None:
    """Raise if only noise is expected. The error depends on the records: it is for their owner."""
    needed = find_needed_votes(plan)
    if np.bincount(class_numbers).max() < needed:
        raise ValueError(
            f"epsilon: only noise is to be expected, and nothing was paid. {plan.n_neighbors:,} records vote on a row, "
            f"so that their votes stand out from noise of {plan.vote_noise:.0f} on each count, and a label needs "
            f"{needed:,} of them. No class has so many records, so nearly every row would be declined. "
            "Give a larger epsilon, fewer rows (`max_answered`) or more records. `allow_noise` labels anyway"
        )


def _check_forecast(forecast: VoteForecast, warn: Callable[[str], object], *, allow_noise: bool) -> None:
    """Raise, before labels are paid for, if only noise is expected; warn if a discriminant would be better. Public."""
    text = f"{forecast.voters:,.0f} records may vote on a row, with noise {forecast.noise:.1f} on each count"
    if forecast.ratio < _NOISE_RATIO and not allow_noise:
        raise ValueError(
            f"epsilon: only noise is to be expected, and at most the number of records was paid for. {text}. Give a "
            "larger epsilon, fewer rows (`max_answered`) or more records. `allow_noise` labels anyway"
        )
    if not forecast.is_clear:
        warn(f"{text}: a PrivateDiscriminant is more accurate at this epsilon")


def _collect_labels(voter: PrivateKNeighborsClassifier, task: _LabelTask, tick: Tick) -> tuple[list[str], str]:
    """Return the labels, and why there are fewer than rows, if so."""
    labels: list[str] = []
    while len(labels) < len(task.queries):
        step = len(task.queries) if voter.plan_.individual else _BATCH  # votes are planned for one batch
        batch = task.queries[len(labels) : len(labels) + step]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoiseWarning)  # by `_check_forecast`
                answers = voter.answer(batch, progress=tick)
        except ExhaustedError:  # the remaining rows are declined
            return labels + [""] * (len(task.queries) - len(labels)), ""
        except (KeyboardInterrupt, Exception) as error:
            stopped = isinstance(error, KeyboardInterrupt)
            if labels:
                return labels, "stopped" if stopped else f"failed ({type(error).__name__})"
            if stopped:
                raise ValueError("stopped before the first answers; their cost may be spent") from None
            raise
        pairs = zip(answers.labels, answers.answered, strict=True)
        labels += [task.classes[code] if answered else "" for code, answered in pairs]
    return labels, ""


def parse_classes(text: str) -> list[str]:
    """Read the classes: a list with commas, or a file with one per line."""
    if "," in text or not Path(text).is_file():
        parts = text.split(",")
    else:
        try:
            parts = Path(text).read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise LabelInputError("classes: the file is not UTF-8 text") from None
    return [part.strip() for part in parts if part.strip()]


@dataclass(frozen=True)
class _Records:
    """Records of a file or folder: labels if private, names if files of a folder."""

    values: NDArray[Any] = field(repr=False)
    labels: tuple[str, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = field(default=(), repr=False)
    columns: tuple[str, ...] = ()  # names of the features of a .csv
    ignored: tuple[str, ...] = ()  # other columns of a .csv
    folders: tuple[str, ...] = ()  # classes that have a folder
    skipped: Counter[str] = field(default_factory=Counter, repr=False)  # files left out, by reason


def _read_records(path: Path, role: Role, side: int, columns: Sequence[str], tick: Tick) -> _Records:
    """Read a .npz or .csv file, or a folder of images, which are resized to `side` x `side` pixels."""
    try:
        if not path.exists():
            raise LabelInputError(f"{role}: there is nothing at this path; correct it")
        if path.is_dir():
            records = _read_folder(path, role, side, tick)
        elif path.suffix.lower() == ".npz":
            records = _read_npz(path, role)
        elif path.suffix.lower() == ".csv":
            records = _read_csv(path, role, columns)
        else:
            raise LabelInputError(f"{role} must be a .npz file, a .csv file or a folder of images")
    except OSError as error:  # its text may name a file of a private folder
        raise LabelInputError(f"{role} cannot be read: {error.strerror or 'it is corrupted'}") from None
    if not len(records.values):
        raise LabelInputError(f"{role} holds no records")
    if records.values.ndim == 2 and not records.values.shape[1]:
        raise LabelInputError(f"{role} has no features: columns of numbers, besides {_LABEL!r}")
    if role == "PRIVATE" and not all(records.labels):
        raise LabelInputError("PRIVATE: some labels are empty; give every record a label, or leave it out")
    return records


def _read_npz(path: Path, role: Role) -> _Records:
    arrays = []
    try:
        with np.load(path, allow_pickle=False) as file:
            for first, second in [("X", "images"), ("y", "labels")][: 1 + (role == "PRIVATE")]:
                if (first in file) == (second in file):
                    words = f"{first} or {second}, one of the two"
                    raise LabelInputError(f"{role}: the .npz file must hold an array named {words}")
                arrays.append(np.asarray(file[first if first in file else second]))
    except LabelInputError:
        raise
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile):
        raise LabelInputError(f"{role} is not a .npz file of plain arrays: write it with numpy.savez") from None
    values, *rest = arrays
    if values.dtype.kind not in "buif" or not 2 <= values.ndim <= 4:
        raise LabelInputError(f"{role}: X must hold numbers, a row for each record, or an image for each")
    if not rest:
        return _Records(values)
    labels = rest[0]
    if labels.shape != values.shape[:1]:
        raise LabelInputError("PRIVATE: y must hold one label for each row of X")
    if labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == np.floor(labels)).all():
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "buiU":
        raise LabelInputError("PRIVATE: y must hold whole numbers or text")
    return _Records(values, labels=tuple(str(label).strip() for label in labels.tolist()))


def _read_csv(path: Path, role: Role, columns: Sequence[str]) -> _Records:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _parse_csv(filter(None, csv.reader(file)), role, columns)
    except UnicodeDecodeError:
        raise LabelInputError(f"{role} is not UTF-8 text: save it as CSV in that encoding") from None
    except csv.Error:
        raise LabelInputError(f"{role} is not CSV: a quote is not closed, or a cell is too long") from None


def _parse_csv(lines: Iterator[list[str]], role: Role, columns: Sequence[str]) -> _Records:
    """Parse a table. Without `columns`, all are features, or of a public table those with a number in the first row."""
    header = [name.strip() for name in next(lines, [])]
    if len(set(header)) < len(header):
        raise LabelInputError(f"{role}: two columns have the same name; the first line must name every column")
    if role == "PRIVATE" and _LABEL not in header:
        raise LabelInputError(f"PRIVATE: there must be a column named {_LABEL!r}; the first line names the columns")
    first = next(lines, None)
    if first is None:
        raise LabelInputError(f"{role} holds no records")
    if not columns:  # no private record decides which columns are features
        cells = zip(header, first, strict=False)
        columns = [name for name, cell in cells if name != _LABEL and (role == "PRIVATE" or _is_number(cell))]
    missing = [name for name in columns if name not in header]
    if missing:
        raise LabelInputError(f"{role} has no column {missing[0]!r}, which PUBLIC has: the features must be the same")
    numbers, labels, indexes = array("d"), [], [header.index(name) for name in columns]
    for count, line in enumerate(chain([first], lines), start=1):
        try:
            numbers.extend([float(line[index]) for index in indexes])
            if len(line) != len(header):
                raise IndexError
        except (ValueError, IndexError):
            record = f", record {count}" if role == "PUBLIC" else ""
            raise LabelInputError(f"{role}{record}: a cell is missing, is one too many, or is no number") from None
        if role == "PRIVATE":
            labels.append(line[header.index(_LABEL)].strip())
    values = np.array(numbers, dtype=np.float64).reshape(count, len(columns))
    ignored = tuple(name for name in header if name not in columns and name != _LABEL)
    return _Records(values, labels=tuple(labels), columns=tuple(columns), ignored=ignored)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_folder(path: Path, role: Role, side: int, tick: Tick) -> _Records:
    images, names, skipped = [], [], Counter[str]()
    for name in sorted(_list_files(path)):
        try:
            if role == "PRIVATE" and len(name.parts) < 2:
                raise ImageError("not in the folder of a class")
            images.append(_load_gray(path / name, side))
            names.append(name)
        except ImageError as error:
            skipped[error.reason] += 1
        tick(1)
    if not images:
        hint = ": put the images of each class into a folder with its name" if role == "PRIVATE" else ""
        raise LabelInputError(f"{role} holds no image that can be read{hint}")
    if role == "PUBLIC":
        return _Records(np.stack(images), names=tuple(name.as_posix() for name in names), skipped=skipped)
    folders = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    labels = tuple(name.parts[0] for name in names)
    return _Records(np.stack(images), labels=labels, folders=tuple(folders), skipped=skipped)


def _list_files(path: Path) -> Iterator[Path]:
    """Yield relative paths of files, except hidden ones. Links to folders are not followed: a record counts once."""

    def fail(error: OSError) -> None:
        raise error  # a folder without read permission must not be left out silently

    for folder, folders, names in os.walk(path, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from ((Path(folder) / name).relative_to(path) for name in (*names, *links) if not name.startswith("."))


def _load_gray(file: Path, side: int) -> NDArray[np.uint8]:
    """Load an image in grey, of `side` x `side` pixels."""
    image = load_image(file)
    from PIL import Image  # installed, as load_image needs it

    return np.asarray(Image.fromarray(image).convert("L").resize((side, side)), dtype=np.uint8)


def _encode(text: str) -> bytes:
    """Encode as UTF-8; bytes of file names that are not UTF-8 stay unchanged."""
    return text.encode("utf-8", errors="surrogateescape")


def check_writable(path: Path, *, force: bool) -> None:
    """Raise unless a file may be written at `path`."""
    if path.is_dir():
        raise ValueError(f"out: {path} is a folder; give the path of a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"out: the folder of {path} does not exist; make it, or give another path")
    if path.exists() and not force:
        raise ValueError(f"out: {path} exists; `force` replaces it, or give another path")


def _fill(file: BufferedRandom, content: bytes) -> None:
    """Replace the content of a file, on the disk too. In place: reserved blocks are reused."""
    file.seek(0)
    file.write(content)
    file.truncate()
    file.flush()
    os.fsync(file.fileno())
