"""Label a public file from a private one. The file of labels appears whole, or not at all, and nothing paid is lost."""

import csv
import io
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearveil.ledger import Account
from nearveil.privacy import Guarantee
from nearveil.votes._classifier import PrivateKNeighborsClassifier
from nearveil.votes.label_data import ImageFeatures, LabelTask, Progress, Tick, prepare_labelling
from nearveil.votes.plan import VotePlan
from nearveil.votes.spending import ExhaustedError

_AT_ONCE = 1024  # queries: what was answered is kept if the rest fails


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
    insist: bool = False,
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
    insist : bool
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
    model = PrivateKNeighborsClassifier(
        epsilon,
        delta,
        most,
        n_neighbors=n_neighbors,
        max_screened=task.rows if 2 * most >= task.rows else None,  # no row is screened twice
        classes=np.arange(len(task.classes)) if classes else None,  # else the guarantee says so
        unit=unit,
        account=account,
    ).fit(task.records, task.codes)
    if not insist:
        _check_agreement(model.plan_, task.codes)
    _check_budget(account, model.guarantee)
    longest = max(task.classes, key=lambda name: len(encode_text(name)))
    with reserve_file(target, make_table(task.heading, task.names, [longest] * task.rows), force=force) as file:
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
    needed = math.ceil(plan.n_neighbors / 2 if plan.threshold is None else plan.threshold)
    if np.bincount(codes).max() < needed:
        raise ValueError(
            f"epsilon: only noise is to be expected, and nothing was paid. {plan.n_neighbors:,} records vote on a row, "
            f"so that their votes stand out from noise of {plan.vote_noise:.0f} on each count, and a label needs "
            f"{needed:,} of them. No class has so many records, so nearly every row would be declined. "
            "What helps: a larger epsilon, fewer rows (`max_answered`), more records. `insist` asks all the same"
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
    """Room on the disk for labels that are not known yet: at most `size` bytes."""

    def __init__(self, path: Path, size: int, *, force: bool) -> None:
        self._path, self._force = path, force
        self._part = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self._file = os.fdopen(os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "r+b", buffering=0)
        try:
            self._fill(bytes(size))
        except BaseException:
            self.close()
            raise

    def write(self, text: str) -> None:
        """Write, force it to the disk, and only then give it its name."""
        self._fill(encode_text(text))
        check_free(self._path, force=self._force)  # answers took a while: a file may have appeared
        self._part.replace(self._path)
        with suppress(OSError):  # the labels are on the disk; some file systems cannot sync a folder
            _sync(self._path.absolute().parent)

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


@contextmanager
def reserve_file(path: Path, largest: str, *, force: bool) -> Iterator[ReservedFile]:
    """Make room for a text at most as large as `largest`, before anything is spent.

    A full disk is found here, not when there are answers to keep. What is not written leaves nothing behind.
    """
    check_free(path, force=force)
    file = ReservedFile(path, len(encode_text(largest)), force=force)
    try:
        yield file
    finally:
        file.close()


def encode_text(text: str) -> bytes:
    """Return a text as UTF-8, where names of files that are no text come back as they were."""
    return text.encode("utf-8", errors="surrogateescape")


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
