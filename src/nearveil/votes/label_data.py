"""Read private and public records for labelling: .npz, .csv, or folders of images. Errors hold nothing private."""

import csv
import os
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.features import ImageError, load_image
from nearveil.features.extractor import hog

Role = Literal["PRIVATE", "PUBLIC"]
ImageFeatures = Literal["auto", "hog", "none"]  # how images become vectors
Tick = Callable[[int], None]
Progress = Callable[[str, int | None], Tick]

LABEL = "label"  # the column of a .csv
_NO_PLACE = "not in the folder of a class"


class LabelInputError(NearveilError, ValueError):
    """What was given cannot be used; the text says which part and what to do, and nothing private."""


@dataclass(frozen=True)
class RecordTable:
    """RecordTable as they were read: labels of a private set only, names of the files of a folder only."""

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
            values = _one_of(arrays, ("X", "images"), role)
            labels = _one_of(arrays, ("y", "labels"), role) if role == "PRIVATE" else None
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
    return RecordTable(values, labels=_texts(labels))


def _one_of(arrays: Any, names: tuple[str, str], role: Role) -> NDArray[Any]:
    there = [name for name in names if name in arrays]
    if len(there) != 1:
        raise LabelInputError(
            f"{role}: the .npz file must hold an array named {names[0]} or {names[1]}, one of the two"
        )
    return np.asarray(arrays[there[0]])


def _texts(labels: NDArray[Any]) -> tuple[str, ...]:
    if labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == np.floor(labels)).all():
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "buiU":
        raise LabelInputError("PRIVATE: y must hold whole numbers or text")
    return tuple(str(label).strip() for label in labels.tolist())


def _read_csv(path: Path, role: Role, columns: Sequence[str]) -> RecordTable:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _parse(file, role, columns)
    except UnicodeDecodeError:
        raise LabelInputError(f"{role} is no text in UTF-8: save it as CSV in that encoding") from None
    except csv.Error:
        raise LabelInputError(f"{role} is no CSV: a quote is not closed, or a cell is too long") from None


def _parse(file: TextIO, role: Role, columns: Sequence[str]) -> RecordTable:
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
    for count, line in enumerate(_chained(first, lines), start=1):
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


def _chained(first: list[str], others: Iterator[list[str]]) -> Iterator[list[str]]:
    yield first
    yield from others


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_folder(path: Path, role: Role, side: int, progress: Tick | None) -> RecordTable:
    images, names, skipped = [], [], Counter[str]()
    for name in sorted(_files(path)):
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


def _files(path: Path) -> Iterator[Path]:
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
        _vectors(one, features, role, progress(f"features of {role}", len(one.values)))
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
        codes=_codes(held.labels, known),
        classes=known,
        notes=_notes(asked, listed is None),
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


def _vectors(records: RecordTable, features: ImageFeatures, role: str, tick: Tick) -> NDArray[np.floating]:
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


def _codes(labels: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64]:
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        return np.array([numbers[one] for one in labels], dtype=np.int64)
    except KeyError:
        raise LabelInputError(
            "PRIVATE: some labels are not in `classes`; add them, or leave these records out"
        ) from None


def _notes(asked: RecordTable, classes_leak: bool) -> tuple[str, ...]:
    notes = []
    if classes_leak:
        notes.append("The list of classes is PRIVATE's own and is not protected; `classes` gives one that is public.")
    if asked.skipped:
        reasons = "; ".join(f"{count} {reason}" for reason, count in sorted(asked.skipped.items()))
        notes.append(f"Files of PUBLIC that were left out: {reasons}.")
    if asked.ignored:
        notes.append(f"Columns of PUBLIC that hold no numbers and were left out: {', '.join(asked.ignored)}.")
    return tuple(notes)
