"""Label a public file from a private one. The file of labels appears whole, or not at all, and nothing paid is lost.

Records are read from .npz, .csv, or folders of images. Errors hold nothing private.
"""

import csv
import io
import os
import secrets
import warnings
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.features import ImageError, load_image
from nearveil.features.extractor import hog
from nearveil.ledger import Account
from nearveil.privacy import Guarantee
from nearveil.private_knn._knn import PrivateKNeighborsClassifier
from nearveil.private_knn.plan import NoiseWarning, VotePlan, find_needed_votes
from nearveil.private_knn.spending import ExhaustedError
from nearveil.storage import flush_folder

Role = Literal["PRIVATE", "PUBLIC"]
ImageFeatures = Literal["auto", "hog", "none"]  # how images become vectors
Tick = Callable[[int], None]
Progress = Callable[[str, int | None], Tick]

LABEL = "label"  # the column of a .csv
_AT_ONCE = 1024  # queries: what was answered is kept if the rest fails
_NO_PLACE = "not in the folder of a class"


class LabelInputError(NearveilError, ValueError):
    """What was given cannot be used; the text says which part and what to do, and nothing private."""


@dataclass(frozen=True)
class RecordTable:
    """Records as they were read: labels of a private set only, names of the files of a folder only."""

    values: NDArray[Any] = field(repr=False)
    labels: tuple[str, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = field(default=(), repr=False)
    columns: tuple[str, ...] = ()  # the features of a .csv, by name
    folders: tuple[str, ...] = ()  # the classes that have a folder
    skipped: Counter[str] = field(default_factory=Counter, repr=False)  # files that were left out, by reason
    ignored: tuple[str, ...] = ()  # columns that hold no numbers

    @property
    def are_images(self) -> bool:
        """Whether they are images, not vectors."""
        return self.values.ndim > 2


def read_records(
    path: Path, role: Role, *, side: int, columns: Sequence[str] = (), progress: Tick | None = None
) -> RecordTable:
    """Read a .npz or .csv file, or a folder whose images are resized to `side` x `side` pixels.

    Only private records need labels; only public ones may be named in errors. `columns` are the features of a .csv: by
    default all of a private one, and of a public one those that begin with a number.
    """
    try:
        if not path.exists():
            raise LabelInputError(f"{role}: there is nothing at this path")
        if path.is_dir():
            records = _read_folder(path, role, side, progress)
        elif path.suffix.lower() == ".npz":
            records = _read_npz(path, role)
        elif path.suffix.lower() == ".csv":
            records = _read_csv(path, role, columns)
        else:
            raise LabelInputError(f"{role} must be a .npz file, a .csv file or a folder of images")
    except OSError as error:  # its own words may name a file of a private folder
        raise LabelInputError(f"{role} cannot be read: {error.strerror or 'it is damaged'}") from None
    if not len(records.values):
        raise LabelInputError(f"{role} holds no records")
    if not records.are_images and not records.values.shape[1]:
        raise LabelInputError(f"{role} has no features: columns of numbers, besides {LABEL!r}")
    if role == "PRIVATE" and not all(records.labels):
        raise LabelInputError("PRIVATE: some labels are empty; give every record a label, or leave it out")
    return records


def _read_npz(path: Path, role: Role) -> RecordTable:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            values = _take_one_of(arrays, ("X", "images"), role)
            labels = _take_one_of(arrays, ("y", "labels"), role) if role == "PRIVATE" else None
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, LabelInputError):
            raise
        raise LabelInputError(f"{role} is no .npz file of plain arrays: write it by numpy.savez") from None
    if values.dtype.kind not in "buif" or not 2 <= values.ndim <= 4:
        raise LabelInputError(f"{role}: X must hold numbers, a row for each record, or an image for each")
    if labels is None:
        return RecordTable(values)
    if labels.shape != values.shape[:1]:
        raise LabelInputError("PRIVATE: y must hold one label for each row of X")
    return RecordTable(values, labels=_read_labels(labels))


def _take_one_of(arrays: Any, names: tuple[str, str], role: Role) -> NDArray[Any]:
    there = [name for name in names if name in arrays]
    if len(there) != 1:
        raise LabelInputError(
            f"{role}: the .npz file must hold an array named {names[0]} or {names[1]}, one of the two"
        )
    return np.asarray(arrays[there[0]])


def _read_labels(labels: NDArray[Any]) -> tuple[str, ...]:
    if labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == np.floor(labels)).all():
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "buiU":
        raise LabelInputError("PRIVATE: y must hold whole numbers or text")
    return tuple(str(label).strip() for label in labels.tolist())


def _read_csv(path: Path, role: Role, columns: Sequence[str]) -> RecordTable:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _parse_csv(file, role, columns)
    except UnicodeDecodeError:
        raise LabelInputError(f"{role} is no text in UTF-8: save it as CSV in that encoding") from None
    except csv.Error:
        raise LabelInputError(f"{role} is no CSV: a quote is not closed, or a cell is too long") from None


def _parse_csv(file: TextIO, role: Role, columns: Sequence[str]) -> RecordTable:
    lines = (line for line in csv.reader(file) if line)
    header = [name.strip() for name in next(lines, [])]
    if len(set(header)) < len(header):
        raise LabelInputError(f"{role}: two columns have the same name; the first line must name every column")
    if role == "PRIVATE" and LABEL not in header:
        raise LabelInputError(f"PRIVATE: there must be a column named {LABEL!r}; the first line names the columns")
    first = next(lines, None)
    if first is None:
        raise LabelInputError(f"{role} holds no records")
    if not columns:  # no private record decides what is a feature
        cells = zip(header, first, strict=False)
        columns = [name for name, cell in cells if name != LABEL and (role == "PRIVATE" or _is_number(cell))]
    missing = [name for name in columns if name not in header]
    if missing:
        raise LabelInputError(f"{role} has no column {missing[0]!r}, which PUBLIC has: the features must be the same")
    numbers, labels = array("d"), []
    picked, label_at = [header.index(name) for name in columns], header.index(LABEL) if role == "PRIVATE" else None
    for count, line in enumerate(chain([first], lines), start=1):
        try:
            numbers.extend([float(line[at]) for at in picked])
            if len(line) != len(header):
                raise IndexError
        except (ValueError, IndexError):
            where = f", record {count}" if role == "PUBLIC" else ""
            raise LabelInputError(f"{role}{where}: a cell is missing, is one too many, or is no number") from None
        if label_at is not None:
            labels.append(line[label_at].strip())
    values = np.frombuffer(numbers, dtype=np.float64) if numbers else np.empty(0)
    ignored = [name for name in header if name not in columns and name != LABEL]
    return RecordTable(
        values.reshape(count, len(columns)), labels=tuple(labels), columns=tuple(columns), ignored=tuple(ignored)
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_folder(path: Path, role: Role, side: int, progress: Tick | None) -> RecordTable:
    images, names, skipped = [], [], Counter[str]()
    for name in sorted(_list_files(path)):
        found = _NO_PLACE if role == "PRIVATE" and len(name.parts) < 2 else _open_image(path / name, side)
        if isinstance(found, str):
            skipped[found] += 1
        else:
            images.append(found)
            names.append(name)
        if progress is not None:
            progress(1)
    if not images:
        raise LabelInputError(
            f"{role} holds no image that can be read"
            + (": put the images of each class into a folder of its name" if role == "PRIVATE" else "")
        )
    if role == "PUBLIC":
        return RecordTable(np.stack(images), names=tuple(name.as_posix() for name in names), skipped=skipped)
    folders = sorted(one.name for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
    labels = tuple(name.parts[0] for name in names)
    return RecordTable(np.stack(images), labels=labels, folders=tuple(folders), skipped=skipped)


def _list_files(path: Path) -> Iterator[Path]:
    """Yield all files, relative to the folder, but hidden ones, and links to folders: a record may count once alone."""

    def stop(error: OSError) -> None:
        raise error  # a folder that may not be read would be left out silently

    for folder, folders, names in os.walk(path, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(folder).relative_to(path)
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from (inside / name for name in (*names, *linked) if not name.startswith("."))


def _open_image(file: Path, side: int) -> NDArray[np.uint8] | str:
    """Return an image in grey, of `side` x `side` pixels, or why there is none."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise LabelInputError("folders of images need Pillow: pip install nearveil[images]") from None
    try:
        image = Image.fromarray(load_image(file))
    except ImageError as refused:
        return refused.reason
    return np.asarray(image.convert("L").resize((side, side)), dtype=np.uint8)


@dataclass(frozen=True)
class LabelTask:
    """Everything that was read, in order and checked."""

    queries: NDArray[np.floating]
    heading: str  # what `names` are: "row" or "file"
    names: Sequence[str]  # of the queries
    records: NDArray[np.floating] = field(repr=False)  # private, as are `codes`
    codes: NDArray[np.int64] = field(repr=False)  # which of the classes
    classes: Sequence[str]
    notes: tuple[str, ...]  # what the user should know; public

    @property
    def rows(self) -> int:
        """How many queries there are."""
        return len(self.queries)


def prepare_labelling(
    private: Path,
    public: Path,
    classes: Sequence[str] | None,
    features: ImageFeatures,
    side: int,
    *,
    progress: Progress,
    warn: Callable[[str], object],
) -> LabelTask:
    """Read and check everything. The public set says what is a feature, so that no private record does."""
    listed = None if classes is None else _check_classes(classes)
    asked = read_records(public, "PUBLIC", side=side, progress=progress("reading PUBLIC", None))
    held = read_records(
        private, "PRIVATE", side=side, columns=asked.columns, progress=progress("reading PRIVATE", None)
    )
    if asked.are_images != held.are_images:
        raise LabelInputError("PRIVATE and PUBLIC must be of one kind: images both, or vectors both")
    queries, records = (
        _make_vectors(one, features, role, progress(f"features of {role}", len(one.values)))
        for one, role in ((asked, "PUBLIC"), (held, "PRIVATE"))
    )
    if queries.shape[1] != records.shape[1]:
        raise LabelInputError(
            f"PRIVATE has {records.shape[1]} features and PUBLIC {queries.shape[1]}: they must be the same"
        )
    if held.skipped:  # the owner may know; how many is nobody's business
        much = "most" if held.skipped.total() > len(held.values) else "some"
        warn(f"PRIVATE: {much} files were left out: {'; '.join(sorted(held.skipped))}")
    known = listed or held.folders or tuple(sorted(set(held.labels)))
    if len(known) < 2:
        raise LabelInputError("PRIVATE must have at least two classes; `classes` names those that have no record")
    return LabelTask(
        queries=queries,
        heading="file" if asked.names else "row",
        names=asked.names or tuple(map(str, range(len(queries)))),
        records=records,
        codes=_encode_labels(held.labels, known),
        classes=known,
        notes=_make_notes(asked, listed is None),
    )


def parse_classes(text: str) -> list[str]:
    """Read the classes: a list with commas, or a file with one a line."""
    if "," not in text and Path(text).is_file():
        try:
            parts = Path(text).read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise LabelInputError("classes: the file is no text in UTF-8") from None
    else:
        parts = text.split(",")
    return [part.strip() for part in parts if part.strip()]


def _check_classes(names: Sequence[str]) -> tuple[str, ...]:
    if len(names) < 2 or len(set(names)) < len(names):
        raise LabelInputError("classes must name at least two classes, each once: a,b,c, or a file with one a line")
    return tuple(names)


def _make_vectors(records: RecordTable, features: ImageFeatures, role: str, tick: Tick) -> NDArray[np.floating]:
    values = records.values
    if features == "hog" and not records.are_images:
        raise LabelInputError(f"features hog needs images, and {role} holds vectors; leave it out")
    if records.are_images and features != "none":
        try:
            return hog(values, progress=tick)
        except (ValueError, ModuleNotFoundError) as error:
            raise LabelInputError(f"{role}: {error}") from None
    flat = values.reshape(len(values), -1)
    flat = flat if flat.dtype == np.float32 else flat.astype(np.float64)
    if not np.isfinite(flat).all():
        raise LabelInputError(f"{role}: features must be finite; fill or drop missing values (NaN) first")
    return flat


def _encode_labels(labels: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64]:
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        return np.array([numbers[one] for one in labels], dtype=np.int64)
    except KeyError:
        raise LabelInputError(
            "PRIVATE: some labels are not in `classes`; add them, or leave these records out"
        ) from None


def _make_notes(asked: RecordTable, classes_leak: bool) -> tuple[str, ...]:
    notes = []
    if classes_leak:
        notes.append("The list of classes is PRIVATE's own and is not protected; `classes` gives one that is public.")
    if asked.skipped:
        reasons = "; ".join(f"{count} {reason}" for reason, count in sorted(asked.skipped.items()))
        notes.append(f"Files of PUBLIC that were left out: {reasons}.")
    if asked.ignored:
        notes.append(f"Columns of PUBLIC that hold no numbers and were left out: {', '.join(asked.ignored)}.")
    return tuple(notes)


@dataclass(frozen=True)
class LabelReport:
    """What came of labelling, all of it public.

    Attributes
    ----------
    names : sequence of str
        Of the public rows.
    labels : sequence of str
        Of the first rows, or of all; empty where the votes did not agree.
    guarantee : Guarantee
    notes : tuple of str
        What the user should know.
    text : str
        The labels as CSV.
    lost : str
        Why the file could not be written; empty if it was.
    stopped : str
        Why there are fewer labels than rows; empty if there are not.
    """

    names: Sequence[str]
    labels: Sequence[str]
    guarantee: Guarantee
    notes: tuple[str, ...]
    text: str
    lost: str
    stopped: str


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

    Everything is read and checked first, then paid, then answered. Rows on which the votes do not agree have no label.

    Parameters
    ----------
    private : path
        A .npz or .csv file with labels, or a folder with one folder of images for each class.
    public : path
        A .npz or .csv file, or a folder of images.
    out : path
        Where the labels go, as CSV.
    epsilon, delta : float
        What all labels together may cost.
    max_answered : int, optional
        Label at most so many; by default all public rows.
    n_neighbors : int, optional
        How many private records vote.
    classes : sequence of str, optional
        Public list of the classes; otherwise that of the private records is used, which is not protected.
    features : {"auto", "hog", "none"}
        How images become vectors: histograms of gradients, or their pixels.
    side : int
        Images of folders are resized to ``side`` x ``side`` pixels.
    force : bool
        Whether to replace the file `out`.
    unit : str
        What one private row is.
    account : Account, optional
        Who pays.
    allow_noise : bool
        Whether to ask also where the classes have too few records for more than noise.
    progress : callable, optional
        ``progress(text, total)`` returns a function that is called with the number of rows done.
    warn : callable
        Called with what only the owner of the private records should read.

    Returns
    -------
    LabelReport

    Examples
    --------
    >>> label_file("patients.npz", "public.npz", "labels.csv", epsilon=0.5)  # doctest: +SKIP
    """
    start, target = progress or (lambda _, __: lambda ___: None), Path(out)
    _check_target(target, (Path(private), Path(public)), force=force)
    task = prepare_labelling(Path(private), Path(public), classes, features, side, progress=start, warn=warn)
    most = min(max_answered or task.rows, task.rows)
    start("planning", None)
    voter = PrivateKNeighborsClassifier(
        epsilon,
        delta,
        most,
        n_neighbors=n_neighbors,
        max_screened=task.rows if 2 * most >= task.rows else None,  # no row is screened twice
        classes=np.arange(len(task.classes)) if classes else None,  # else the guarantee says so
        unit=unit,
        account=account,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoiseWarning)  # refused below, or allowed
        model = voter.fit(task.records, task.codes)
    if not allow_noise:
        _check_agreement(model.plan_, task.codes)
    _check_budget(account, model.guarantee)
    longest = max(task.classes, key=lambda name: len(encode_text(name)))
    largest = make_table(task.heading, task.names, [longest] * task.rows)
    with closing(ReservedFile(target, largest, force=force)) as file:
        labels, stopped = _ask(model, task, start("asking", task.rows))
        text = make_table(task.heading, task.names[: len(labels)], labels)
        return LabelReport(task.names, labels, model.guarantee, task.notes, text, _write(file, text), stopped)


def _check_target(out: Path, inputs: tuple[Path, Path], *, force: bool) -> None:
    check_free(out, force=force)
    where = out.resolve()
    if any(where.is_relative_to(one.resolve()) for one in inputs):
        raise ValueError("out: it lies where PRIVATE or PUBLIC is; give another path")


def _check_agreement(plan: VotePlan, codes: NDArray[np.int64]) -> None:
    """Raise where noise alone is to be expected. Only the owner may read that: it depends on the records."""
    needed = find_needed_votes(plan)
    if np.bincount(codes).max() < needed:
        raise ValueError(
            f"epsilon: only noise is to be expected, and nothing was paid. {plan.n_neighbors:,} records vote on a row, "
            f"so that their votes stand out from noise of {plan.vote_noise:.0f} on each count, and a label needs "
            f"{needed:,} of them. No class has so many records, so nearly every row would be declined. "
            "What helps: a larger epsilon, fewer rows (`max_answered`), more records. `allow_noise` asks anyway"
        )


def _check_budget(payer: Account | None, guarantee: Guarantee) -> None:
    """Raise unless everything can be paid: the first screenings must not be bought for answers that cannot be."""
    preview = None if payer is None else payer.preview(guarantee)
    if preview is not None and not preview.allowed:
        raise ValueError(f"account: {preview.reason}; lower `epsilon`, or name another")


def _ask(model: PrivateKNeighborsClassifier, task: LabelTask, tick: Tick) -> tuple[list[str], str]:
    """Return labels, and why there are fewer than rows if so."""
    labels: list[str] = []
    while len(labels) < len(task.queries):
        some = task.queries[len(labels) : len(labels) + _AT_ONCE]
        try:
            answers = model.answer(some, progress=tick)
        except ExhaustedError:  # the rest is declined
            return labels + [""] * (len(task.queries) - len(labels)), ""
        except KeyboardInterrupt:
            if labels:
                return labels, "stopped"
            raise ValueError("stopped before there were answers; what they cost may be spent") from None
        except Exception as error:
            if labels:
                return labels, f"failed ({type(error).__name__})"
            raise
        names = zip(answers.labels, answers.answered, strict=True)
        labels += [task.classes[code] if answered else "" for code, answered in names]
    return labels, ""


def _write(file: "ReservedFile", text: str) -> str:
    """Write the labels; return what went wrong, if so, because they must not be lost."""
    try:
        file.write(text)
    except OSError as error:
        return error.strerror or "it could not be written"
    except ValueError as error:
        return str(error)
    return ""


def make_table(heading: str, names: Sequence[str], labels: Sequence[str]) -> str:
    """Return labels as CSV.

    Examples
    --------
    >>> make_table("row", ["0", "1"], ["cat", ""]).splitlines()
    ['row,label', '0,cat', '1,']
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([heading, "label"])
    writer.writerows(zip(names, labels, strict=True))
    return text.getvalue()


def check_free(path: Path, *, force: bool) -> None:
    """Raise unless a file may be written here."""
    if path.is_dir():
        raise ValueError(f"out: {path} is a folder; give the path of a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"out: the folder of {path} does not exist; make it, or give another path")
    if path.exists() and not force:
        raise ValueError(f"out: {path} exists; `force` replaces it, or give another path")


class ReservedFile:
    """Room on disk for a text of at most the size of `largest`, taken before anything is spent; freed if unused."""

    def __init__(self, path: Path, largest: str, *, force: bool) -> None:
        check_free(path, force=force)
        self._path, self._force = path, force
        self._part = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self._file = os.fdopen(os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "r+b", buffering=0)
        try:
            self._fill(bytes(len(encode_text(largest))))
        except BaseException:
            self.close()
            raise

    def write(self, text: str) -> None:
        """Write, force it to the disk, and only then give it its name."""
        self._fill(encode_text(text))
        check_free(self._path, force=self._force)  # answers took a while: a file may have appeared
        self._part.replace(self._path)
        with suppress(OSError):  # the labels are on the disk; some file systems cannot sync a folder
            flush_folder(self._path.absolute().parent)

    def close(self) -> None:
        """Remove what was not written."""
        self._file.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)

    def _fill(self, content: bytes) -> None:
        self._file.seek(0)  # in place, not anew: the blocks of the placeholder are there already
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]
        self._file.truncate(len(content))
        os.fsync(self._file.fileno())


def encode_text(text: str) -> bytes:
    """Return a text as UTF-8, where names of files that are no text come back as they were."""
    return text.encode("utf-8", errors="surrogateescape")
