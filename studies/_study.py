"""What a study is: cases that are measured one by one and kept, so that a study that was stopped goes on."""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from joblib import Memory, Parallel, delayed
from scipy import stats

import nearveil
from nearveil.cluster import connect
from studies.data import VARIABLE, DataMissingError, data_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
Row = dict[str, Any]
Case = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """One question, what is measured to answer it, and how the answer is shown.

    `measure` is a function of a module, because it runs in other processes. The page is a Jinja template in Markdown,
    by default the file ``templates/NAME.md``. Its first line is the title. It shows every figure as
    ``![what it shows](STUDY-FIGURE.svg)``, and the command that makes the study as ``{{ command }}``; it sees the
    facts, and the constants of the module that holds the function `facts`.
    """

    name: str  # on the command line, and of all its files
    cases: Callable[[], Sequence[Case]]  # plain values, with all that tells a case from the others
    measure: Callable[[Case], list[Row]]  # from a case to its rows, plain values again
    figures: Callable[[pd.DataFrame], "dict[str, Figure]"]  # from all rows
    facts: Callable[[pd.DataFrame], Mapping[str, Any]]  # from all rows: numbers, and data frames for tables
    data: tuple[str, ...] = ()  # files of real data, relative to the data folder, or words for what is made
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of all cases
    seeds: tuple[int, ...] = (0,)
    alone: bool = False  # whether cases run one after another in this process, because they measure time
    template: str = ""
    note: str = ""  # what differs where the data is not what the page was written for; the command says it

    @property
    def page(self) -> str:
        """The template."""
        return self.template or (TEMPLATES / f"{self.name}.md").read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        """The title of the page."""
        return self.page.partition("\n")[0].removeprefix("# ")


@dataclass(frozen=True)
class Measured:
    """All rows of a study, in the order of its cases.

    `seconds` is what the study takes at once on as many processes, whatever else runs: of the processor, also in
    earlier runs, divided by their number; by the clock for studies that run alone.
    """

    rows: list[Row]
    seconds: float


class Mean(NamedTuple):
    """A mean over seeds with its 95% interval, by Student's t; of one seed alone, without."""

    value: float
    low: float
    high: float


def mean(values: Iterable[float]) -> Mean:
    """Return a mean over seeds and its interval.

    Examples
    --------
    >>> mean([0.5, 0.5, 0.8])
    Mean(value=0.6, low=0.16973..., high=1.03026...)
    >>> mean([0.5])
    Mean(value=0.5, low=nan, high=nan)
    """
    (results,) = summarise(pd.DataFrame({"all": 0, "value": list(values)}), "value", "all").itertuples(index=False)
    return Mean(*map(float, results))


def summarise(frame: pd.DataFrame, column: str, *by: str) -> pd.DataFrame:
    """Return the mean of a column with its 95% interval over seeds, for all values of other columns.

    The result has the columns ``value``, ``low`` and ``high``; groups are in the order in which they come first.

    Examples
    --------
    >>> frame = pd.DataFrame({"f": [1, 2, 1], "recall": [0.5, 0.7, 0.7]})
    >>> summarise(frame, "recall", "f")["value"].to_dict()
    {1: 0.6, 2: 0.7}
    """
    groups = frame.astype({column: float}).groupby(list(by), sort=False, dropna=False)[column]
    value, count = groups.mean(), groups.count()
    half = stats.t.ppf(0.975, count - 1) * groups.sem()
    return pd.DataFrame({"value": value, "low": value - half, "high": value + half})


def list_cases(**values: Iterable[Any]) -> list[Case]:
    """Return a case for every combination of values; the last varies first.

    Examples
    --------
    >>> list_cases(f=(0.1, 0.2), seed=(0, 1))[:2]
    [{'f': 0.1, 'seed': 0}, {'f': 0.1, 'seed': 1}]
    """
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def as_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows as a data frame. Columns with gaps stay objects: counts would become floats."""
    frame = pd.DataFrame(rows, dtype=object)
    return frame.assign(**{name: frame[name].infer_objects() for name in frame.columns[frame.notna().all()]})


def select(frame: pd.DataFrame, /, **values: Any) -> pd.DataFrame:
    """Return the rows that have these values, without the columns that none of them has."""
    for name, value in values.items():
        frame = frame[frame[name] == value]
    return as_frame(frame.dropna(axis=1, how="all"))


def run(
    study: Study,
    folder: Path,
    *,
    jobs: int = 2,
    fresh: bool = False,
    advance: Callable[[int, int], None] | None = None,
    cluster: Any = None,
) -> Measured:
    """Measure what was not measured before.

    Parameters
    ----------
    folder : Path
        Where the cases of the study are kept.
    jobs : int, default=2
        Processes; one for studies that measure time.
    fresh : bool, default=False
        Whether to forget what was measured before.
    advance : callable, optional
        Called with the number of cases that are done, and of all.
    cluster : str or dask.distributed.Client, optional
        Whose workers measure cases, each as a task; they must reach `folder` under the same path. Studies that measure
        time run here.

    Raises
    ------
    DataMissingError
        If a file of `study.data` is missing. Nothing was measured.
    """
    for name in study.data:
        if "/" in name and not (data_folder() / name).exists():  # the others are words
            remedy = f"set {VARIABLE} to the folder that holds {name}, or use --quick"
            raise DataMissingError(f"no real data at {data_folder() / name}: {remedy}")
    memory = Memory(folder / "cases", verbose=0)
    if fresh:
        memory.clear(warn=False)
    measure = memory.cache(_measure_case, ignore=["measure", "clock"])
    # A case is measured again when the parameters of its study or any source file changes.
    common = json.dumps([study.name, hash_sources(), dict(study.parameters)], sort_keys=True)
    processes, clock = (1, time.perf_counter) if study.alone else (jobs, time.process_time)
    calls = [(common, dict(case), study.measure, clock) for case in study.cases()]
    missing = [call for call in calls if not measure.check_call_in_cache(*call)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Persisting input arguments")  # a busy disk is no error
        each = _measure_each(measure, missing, processes, study.name, None if study.alone else cluster)
        for done, _ in enumerate(chain([None], each), len(calls) - len(missing)):
            if advance is not None:
                advance(done, len(calls))
        results = [measure(*call) for call in calls]  # one that cannot be read is measured again
    return Measured([row for rows, _ in results for row in rows], sum(seconds for _, seconds in results) / processes)


@cache
def hash_sources() -> str:
    """Return a digest of the source files of nearveil and of the studies: rows of other code are not mixed in."""
    digest = hashlib.sha256()
    for package in (Path(nearveil.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _measure_each(
    measure: Callable[..., Any], calls: Sequence[tuple[Any, ...]], jobs: int, name: str, cluster: Any
) -> Iterator[Any]:
    """Measure cases, and yield as each is done."""
    if cluster is not None:
        with connect(cluster) as workers:
            yield from workers.map(_call, calls, measure, stage=name, names=[f"case {call[1]}" for call in calls])
    elif jobs == 1 or len(calls) <= 1:
        yield from (measure(*call) for call in calls)
    else:
        yield from Parallel(n_jobs=jobs, return_as="generator_unordered")(delayed(measure)(*call) for call in calls)


def _call(call: tuple[Any, ...], measure: Callable[..., Any]) -> Any:
    return measure(*call)


def _measure_case(common: str, case: Case, measure: Any, clock: Callable[[], float]) -> tuple[list[Row], float]:  # noqa: ARG001
    """Measure a case, and take the time; `common` is a part of the key."""
    start = clock()
    rows = measure(case)
    return rows, clock() - start
