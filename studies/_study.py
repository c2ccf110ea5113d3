"""What a study is: cases that are measured one by one, and kept, so that a study can be stopped and taken up again."""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joblib import Parallel, delayed
from scipy import stats

from nearveil import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Case = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """One question, what is measured to answer it, and how the answer is shown.

    Attributes
    ----------
    name : str
        On the command line, and of all its files.
    title : str
        Of its page.
    about : str
        Markdown: what is asked, how it is measured, how to read it.
    cases : callable
        Returns what is measured: dictionaries of plain values, each with all that tells it from the others.
    measure : callable
        From a case to its rows, plain values again. A function of a module: it runs in other processes.
    figures : callable
        From all rows to figures, by name. They are drawn in the one style of all studies.
    tell : callable
        From all rows to Markdown that shows every figure as ``![what it shows](NAME.svg)``, with
        ``NAME`` being that of the study, a dash, and that of the figure.
    data : tuple of str
        Files of real data, relative to the data folder, or words for what is made.
    parameters : mapping
        What holds for all cases.
    seeds : tuple of int
    alone : bool
        Whether cases run one after another in this process, because they measure time.
    """

    name: str
    title: str
    about: str
    cases: Callable[[], Sequence[Case]]
    measure: Callable[[Case], list[Row]]
    figures: Callable[[Sequence[Row]], "dict[str, Figure]"]
    tell: Callable[[Sequence[Row]], str]
    data: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    alone: bool = False


@dataclass(frozen=True)
class Measured:
    """All rows of a study.

    Attributes
    ----------
    rows : list of dict
        In the order of the cases.
    seconds : float
        What the study takes at once on as many processes, whatever else runs: of the processor, also in earlier runs,
        divided by their number; by the clock for studies that run alone.
    """

    rows: list[Row]
    seconds: float


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its 95% interval, by Student's t; of one seed alone, without."""

    value: float
    low: float
    high: float


def mean(values: Iterable[float]) -> Mean:
    """Return a mean over seeds and its interval.

    Parameters
    ----------
    values : iterable of float
        One a seed.

    Returns
    -------
    Mean

    Examples
    --------
    >>> mean([0.5, 0.6, 0.7])
    Mean(value=0.6, low=0.3515862..., high=0.8484137...)
    >>> mean([0.5])
    Mean(value=0.5, low=nan, high=nan)
    """
    found = [float(value) for value in values]
    middle = math.fsum(found) / len(found)
    if len(found) == 1:
        return Mean(middle, math.nan, math.nan)
    deviation = math.sqrt(math.fsum((value - middle) ** 2 for value in found) / (len(found) - 1))
    half = float(stats.t.ppf(0.975, len(found) - 1)) * deviation / math.sqrt(len(found))
    return Mean(middle, middle - half, middle + half)


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return rows by the values of some columns, in the order in which these come first.

    Parameters
    ----------
    rows : iterable of dict
    *keys : str

    Returns
    -------
    dict of tuple to list of dict

    Examples
    --------
    >>> grouped([{"f": 1, "seed": 0}, {"f": 2, "seed": 0}, {"f": 1, "seed": 1}], "f")
    {(1,): [{'f': 1, 'seed': 0}, {'f': 1, 'seed': 1}], (2,): [{'f': 2, 'seed': 0}]}
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def of(rows: Iterable[Row], /, **wanted: Any) -> list[Row]:
    """Return the rows that have all of these values.

    Parameters
    ----------
    rows : iterable of dict
    **wanted
        A value for each of some columns.

    Returns
    -------
    list of dict

    Examples
    --------
    >>> of([{"f": 1, "seed": 0}, {"f": 2}, {"f": 1, "seed": 1}], f=1, seed=1)
    [{'f': 1, 'seed': 1}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


class Kept:
    """The cases that were measured before: a line each in a file that only grows.

    Parameters
    ----------
    path : Path
    study : Study
    """

    def __init__(self, path: Path, study: Study) -> None:
        self._path = path
        common = {"study": study.name, "version": __version__, "parameters": dict(study.parameters)}
        self._common = json.dumps(common, sort_keys=True)
        self._lines = {line["key"]: line for line in _lines(path)}

    def key(self, case: Case) -> str:
        """Return the name of a case: it changes with the case, the parameters of its study, and the version."""
        text = self._common + json.dumps(case, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def get(self, case: Case) -> tuple[list[Row], float] | None:
        """Return the rows of a case and its seconds, if it was measured."""
        line = self._lines.get(self.key(case))
        return None if line is None else (line["rows"], line["seconds"])

    def put(self, case: Case, rows: list[Row], seconds: float) -> None:
        """Keep the rows of a case; a crash loses at most a line that was being written."""
        line = {"key": self.key(case), "case": case, "rows": rows, "seconds": seconds}
        text = json.dumps(line)
        self._lines[line["key"]] = json.loads(text)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if text and not text.endswith("\n"):  # cut short: what follows must begin a line of its own
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    for line in text.splitlines():
        try:
            found = json.loads(line)
            yield {"key": found["key"], "rows": list(found["rows"]), "seconds": float(found["seconds"])}
        except (ValueError, KeyError, TypeError):
            continue


def run(study: Study, folder: Path, *, jobs: int = 2, advance: Callable[[int, int], None] | None = None) -> Measured:
    """Measure what was not measured before.

    Parameters
    ----------
    study : Study
    folder : Path
        Where its cases are kept.
    jobs : int, default=2
        Processes; one for studies that measure time.
    advance : callable, optional
        Called with the number of cases that are done, and of all.

    Returns
    -------
    Measured
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = Kept(folder / "cases.jsonl", study)
    cases = list(study.cases())
    missing = [case for case in cases if kept.get(case) is None]
    done = len(cases) - len(missing)
    tell = advance or (lambda _done, _all: None)
    tell(done, len(cases))
    processes = 1 if study.alone else jobs
    clock = time.perf_counter if study.alone else time.process_time
    for case, rows, seconds in _measure(study.measure, missing, processes, clock):
        kept.put(case, rows, seconds)
        done += 1
        tell(done, len(cases))
    found = [kept.get(case) for case in cases]
    rows = [row for one in found if one is not None for row in one[0]]
    return Measured(rows, sum(one[1] for one in found if one is not None) / processes)


def _measure(
    measure: Callable[[Case], list[Row]], cases: list[Case], jobs: int, clock: Callable[[], float]
) -> Iterator[tuple[Case, list[Row], float]]:
    if jobs == 1 or len(cases) <= 1:
        yield from (_timed(measure, case, clock) for case in cases)
    else:
        yield from Parallel(n_jobs=jobs, return_as="generator_unordered")(
            delayed(_timed)(measure, one, clock) for one in cases
        )


def _timed(
    measure: Callable[[Case], list[Row]], case: Case, clock: Callable[[], float]
) -> tuple[Case, list[Row], float]:
    start = clock()
    rows = measure(dict(case))
    return case, rows, clock() - start
