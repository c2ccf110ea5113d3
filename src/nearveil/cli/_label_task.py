"""From what ``nearveil label`` is given to vectors and classes, in order and checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from nearveil.cli._label_data import InputError, Records, read
from nearveil.features import hog

LEAST_SIDE = 8
Tick: TypeAlias = Callable[[int], None]
Bars: TypeAlias = Callable[[str, int | None], Tick]


class Features(StrEnum):
    """How images become vectors."""

    auto = "auto"
    hog = "hog"
    none = "none"


@dataclass(frozen=True)
class Task:
    """All that was read, and is in order."""

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


def prepare(private: Path, public: Path, classes: str | None, features: Features, side: int, bar: Bars) -> Task:
    """Read and check everything. The public set says what is a feature, so that no private record does."""
    listed = None if classes is None else _listed(classes)
    asked = read(public, "PUBLIC", side=side, progress=bar("reading PUBLIC", None))
    held = read(private, "PRIVATE", side=side, columns=asked.columns, progress=bar("reading PRIVATE", None))
    if asked.are_images != held.are_images:
        raise InputError("PRIVATE and PUBLIC must be of one kind: images both, or vectors both")
    queries, records = (
        _vectors(one, features, role, bar(f"features of {role}", len(one.values)))
        for one, role in ((asked, "PUBLIC"), (held, "PRIVATE"))
    )
    if queries.shape[1] != records.shape[1]:
        raise InputError(
            f"PRIVATE has {records.shape[1]} features and PUBLIC {queries.shape[1]}: they must be the same"
        )
    _warn(held)
    known = listed or held.folders or tuple(sorted(set(held.labels)))
    if len(known) < 2:
        raise InputError("PRIVATE must have at least two classes; --classes names those that have no record")
    return Task(
        queries=queries,
        heading="file" if asked.names else "row",
        names=asked.names or tuple(map(str, range(len(queries)))),
        records=records,
        codes=_codes(held.labels, known),
        classes=known,
        notes=_notes(asked, listed is None),
    )


def _listed(text: str) -> tuple[str, ...]:
    """Read the classes: a list with commas, or a file with one a line."""
    if "," not in text and Path(text).is_file():
        try:
            parts = Path(text).read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise InputError("--classes: the file is no text in UTF-8") from None
    else:
        parts = text.split(",")
    names = [part.strip() for part in parts if part.strip()]
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError("--classes must name at least two classes, each once: a,b,c, or a file with one a line")
    return tuple(names)


def _vectors(records: Records, features: Features, role: str, tick: Tick) -> NDArray[np.floating]:
    values = records.values
    if features == Features.hog and not records.are_images:
        raise InputError(f"--features hog needs images, and {role} holds vectors; leave it out")
    if records.are_images and features != Features.none:
        try:
            return hog(values, progress=tick)
        except (ValueError, ModuleNotFoundError) as error:
            raise InputError(f"{role}: {error}") from None
    flat = values.reshape(len(values), -1)
    flat = flat if flat.dtype == np.float32 else flat.astype(np.float64)
    if not np.isfinite(flat).all():
        raise InputError(f"{role}: features must be finite; fill or drop missing values (NaN) first")
    return flat


def _codes(labels: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64]:
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        return np.array([numbers[one] for one in labels], dtype=np.int64)
    except KeyError:
        raise InputError("PRIVATE: some labels are not in --classes; add them, or leave these records out") from None


def _warn(held: Records) -> None:
    """Tell the owner of files that were left out, on the error stream; how many is nobody's business."""
    if held.skipped:
        much = "most" if held.skipped.total() > len(held.values) else "some"
        text = f"PRIVATE: {much} files were left out: {'; '.join(sorted(held.skipped))}"
        Console(stderr=True).print(text, soft_wrap=True, highlight=False)


def _notes(asked: Records, classes_leak: bool) -> tuple[str, ...]:
    notes = []
    if classes_leak:
        notes.append("The list of classes is PRIVATE's own and is not protected; --classes gives one that is public.")
    if asked.skipped:
        reasons = "; ".join(f"{count} {reason}" for reason, count in sorted(asked.skipped.items()))
        notes.append(f"Files of PUBLIC that were left out: {reasons}.")
    if asked.ignored:
        notes.append(f"Columns of PUBLIC that hold no numbers and were left out: {', '.join(asked.ignored)}.")
    return tuple(notes)
