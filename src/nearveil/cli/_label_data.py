"""Read what ``nearveil label`` is given: .npz, .csv, or folders of images. No error holds anything private."""

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

Role = Literal["PRIVATE", "PUBLIC"]
Progress = Callable[[int], object]

LABEL = "label"  # the column of a .csv
_NO_PLACE = "not in the folder of a class"


class InputError(NearveilError, ValueError):
    """What was given cannot be used; says which part and what to do, and nothing that is private."""


@dataclass(frozen=True)
class Records:
    """What was read.

    `labels`: One for each record of a private set; none of a public one.
    `names`: File names, relative to the folder; none where there are no files.
    """

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


def read(
    path: Path, role: Role, *, side: int, columns: Sequence[str] = (), progress: Progress | None = None
) -> Records:
    """Read records.

    `path`: A .npz or .csv file, or a folder.
    `role`: Only private records need labels; only public ones may be named in errors.
    `side`: To how many pixels a side the images of a folder are resized.
    `columns`: Which columns of a .csv are the features. By default all of a private one, and of a public one those
    that begin with a number.
    `progress`: Called with the number of files of a folder that were read since it was called last.
    Returns: At least one. Values are numbers, and not checked further.
    """
    try:
        if not path.exists():
            raise InputError(f"{role}: there is nothing at this path")
        if path.is_dir():
            records = _read_folder(path, role, side, progress)
        elif path.suffix.lower() == ".npz":
            records = _read_npz(path, role)
        elif path.suffix.lower() == ".csv":
            records = _read_csv(path, role, columns)
        else:
            raise InputError(f"{role} must be a .npz file, a .csv file or a folder of images")
    except OSError as error:  # its own words may name a file of a private folder
        raise InputError(f"{role} cannot be read: {error.strerror or 'it is damaged'}") from None
    if not len(records.values):
        raise InputError(f"{role} holds no records")
    if not records.are_images and not records.values.shape[1]:
        raise InputError(f"{role} has no features: columns of numbers, besides {LABEL!r}")
    if role == "PRIVATE" and not all(records.labels):
        raise InputError("PRIVATE: some labels are empty; give every record a label, or leave it out")
    return records


def _read_npz(path: Path, role: Role) -> Records:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            values = _one_of(arrays, ("X", "images"), role)
            labels = _one_of(arrays, ("y", "labels"), role) if role == "PRIVATE" else None
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{role} is no .npz file of plain arrays: write it by numpy.savez") from None
    if values.dtype.kind not in "buif" or not 2 <= values.ndim <= 4:
        raise InputError(f"{role}: X must hold numbers, a row for each record, or an image for each")
    if labels is None:
        return Records(values)
    if labels.shape != values.shape[:1]:
        raise InputError("PRIVATE: y must hold one label for each row of X")
    return Records(values, labels=_texts(labels))


def _one_of(arrays: Any, names: tuple[str, str], role: Role) -> NDArray[Any]:
    there = [name for name in names if name in arrays]
    if len(there) != 1:
        raise InputError(f"{role}: the .npz file must hold an array named {names[0]} or {names[1]}, one of the two")
    return np.asarray(arrays[there[0]])


def _texts(labels: NDArray[Any]) -> tuple[str, ...]:
    if labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == np.floor(labels)).all():
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "buiU":
        raise InputError("PRIVATE: y must hold whole numbers or text")
    return tuple(str(label).strip() for label in labels.tolist())


def _read_csv(path: Path, role: Role, columns: Sequence[str]) -> Records:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _parse(file, role, columns)
    except UnicodeDecodeError:
        raise InputError(f"{role} is no text in UTF-8: save it as CSV in that encoding") from None
    except csv.Error:
        raise InputError(f"{role} is no CSV: a quote is not closed, or a cell is too long") from None


def _parse(file: TextIO, role: Role, columns: Sequence[str]) -> Records:
    lines = (line for line in csv.reader(file) if line)
    header = [name.strip() for name in next(lines, [])]
    if len(set(header)) < len(header):
        raise InputError(f"{role}: two columns have the same name; the first line must name every column")
    if role == "PRIVATE" and LABEL not in header:
        raise InputError(f"PRIVATE: there must be a column named {LABEL!r}; the first line names the columns")
    first = next(lines, None)
    if first is None:
        raise InputError(f"{role} holds no records")
    if not columns:  # no private record decides what is a feature
        cells = zip(header, first, strict=False)
        columns = [name for name, cell in cells if name != LABEL and (role == "PRIVATE" or _is_number(cell))]
    missing = [name for name in columns if name not in header]
    if missing:
        raise InputError(f"{role} has no column {missing[0]!r}, which PUBLIC has: the features must be the same")
    numbers, labels = array("d"), []
    picked, label_at = [header.index(name) for name in columns], header.index(LABEL) if role == "PRIVATE" else None
    for count, line in enumerate(_chained(first, lines), start=1):
        try:
            numbers.extend([float(line[at]) for at in picked])
            if len(line) != len(header):
                raise IndexError
        except (ValueError, IndexError):
            where = f", record {count}" if role == "PUBLIC" else ""
            raise InputError(f"{role}{where}: a cell is missing, is one too many, or is no number") from None
        if label_at is not None:
            labels.append(line[label_at].strip())
    values = np.frombuffer(numbers, dtype=np.float64) if numbers else np.empty(0)
    ignored = [name for name in header if name not in columns and name != LABEL]
    return Records(
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


def _read_folder(path: Path, role: Role, side: int, progress: Progress | None) -> Records:
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
        raise InputError(
            f"{role} holds no image that can be read"
            + (": put the images of each class into a folder of its name" if role == "PRIVATE" else "")
        )
    if role == "PUBLIC":
        return Records(np.stack(images), names=tuple(name.as_posix() for name in names), skipped=skipped)
    folders = sorted(one.name for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
    labels = tuple(name.parts[0] for name in names)
    return Records(np.stack(images), labels=labels, folders=tuple(folders), skipped=skipped)


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
        raise InputError("folders of images need Pillow: pip install nearveil[images]") from None
    try:
        image = Image.fromarray(load_image(file))
    except ImageError as refused:
        return refused.reason
    return np.asarray(image.convert("L").resize((side, side)), dtype=np.uint8)
