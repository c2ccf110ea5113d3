"""What things cost in time and memory: embeddings, releases, votes; each beside a rival in the same run."""

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from studies import _cost_graph as graph
from studies import _cost_release as release
from studies import _cost_votes as votes
from studies._cost_figures import embedding_figure, release_figure, votes_figure
from studies._report import table
from studies._study import Case, Mean, Row, Study, grouped, mean
from studies._timing import in_new_process, timed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DENSE = "dense NumPy (the authors' way)"
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
LARGEST = {  # rows of a contender in single precision, and of the authors' in double: what takes seconds
    (DENSE, "float64"): 10_000,
    ("row tiles, NumPy", "float32"): 10_000,
    ("fused attention, torch", "float32"): 10_000,
    ("pyKeOps", "float32"): 3_000,
    ("exact (ours, NumPy)", "float64"): 10_000,
    ("exact (ours, NumPy)", "float32"): 30_000,
    ("15 nearest neighbours (ours)", "float32"): 30_000,
    ("series (ours)", "float32"): 100_000,
}
SAME = ("exact (ours, NumPy)", "series (ours)")  # ours that compute what the dense way does
GALLERY = 2_000
PRIVATE = (15_000, 60_000)
VOTERS = {  # contenders, and how many queries are asked at once
    votes.RIVAL: 64,
    "floor: one product, NumPy": 1024,
    "rate 0.15, k 300 (ours, numpy)": 1024,
    "rate 1, k 2000 (ours, numpy)": 1024,
}
REPEATS = graph.REPEATS


def cases() -> list[Case]:
    """Return every measurement; rivals stand beside ours, in the same run."""
    places = {(one.name, one.dtype): place for place, one in enumerate(graph.CPU)}
    embeddings = [
        {"part": "embedding", "way": name, "dtype": dtype, "rows": n, "place": places[name, dtype]}
        for n in SIZES
        for (name, dtype), largest in LARGEST.items()
        if n <= largest
    ]
    releases = [{"part": "release", "way": way} for way in (release.AUTHORS, *release.releases())]
    voting = [{"part": "votes", "way": way, "queries": count} for way, count in VOTERS.items()]
    return [*embeddings, *releases, *voting]


def measure(case: Case) -> list[Row]:
    """Measure one thing, several times."""
    load = os.getloadavg()[0]
    return [{**row, "load": round(load, 2)} for row in _measured(case)]


def _measured(case: Case) -> list[Row]:
    if case["part"] == "embedding":
        return _embedding(case)
    if case["part"] == "release":
        found = release.speed(case["way"], GALLERY, repeats=REPEATS, seconds=0.25)
        both = zip(found["single"], found["batched"], strict=True)
        return [
            {**case, "repeat": i, "single": one, "batched": many, "bytes": found["bytes"]}
            for i, (one, many) in enumerate(both)
        ]
    return _voting(case)


def _embedding(case: Case) -> list[Row]:
    shown = {name: value for name, value in case.items() if name != "place"}
    try:
        found = in_new_process("studies._cost_graph:embedding_cost", index=case["place"], n=case["rows"])
    except RuntimeError as reason:
        if "ModuleNotFoundError" in str(reason):  # a rival that is not installed
            return [{**shown, "left_out": str(reason)}]
        raise
    return [
        {**shown, "repeat": i, "seconds": seconds, "peak_gib": found["peak_gib"]}
        for i, seconds in enumerate(found["seconds"])
    ]


@functools.cache
def _rows() -> tuple[Any, str]:
    return votes.rows()


def _voting(case: Case) -> list[Row]:
    contender = next(one for one in votes.CPU if one.name == case["way"])
    found, data = _rows()
    rows: list[Row] = []
    for n in PRIVATE:
        private, queries = votes.split(found, n, case["queries"])
        work = contender.prepare(private)
        work(queries[:2])
        times = timed(functools.partial(work, queries), least=REPEATS, most=REPEATS)
        rows += [
            {**case, "rows": len(private), "data": data, "repeat": i, "per_second": case["queries"] / seconds}
            for i, seconds in enumerate(times)
        ]
    return rows


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw time and memory of embeddings, releases a second, and votes a second."""
    parts = grouped([row for row in rows if "left_out" not in row], "part")
    return {
        "embedding": embedding_figure(parts["embedding",], DENSE),
        "release": release_figure(parts["release",], release.AUTHORS),
        "votes": votes_figure(parts["votes",], votes.RIVAL),
    }


def tell(rows: Sequence[Row]) -> str:
    """Say what was measured; every number is one of the rows, or a ratio of two of the same run."""
    parts = grouped([row for row in rows if "left_out" not in row], "part")
    missing = {row["way"]: row["left_out"] for row in rows if "left_out" in row}
    words = [f"{way} is left out: {reason}." for way, reason in missing.items()]
    return "\n\n".join(
        [
            *_tell_embedding(parts["embedding",]),
            *words,
            *_tell_release(parts["release",]),
            *_tell_votes(parts["votes",]),
            _tell_load(rows),
            "More sizes, one step, errors and a GPU: [graphs](../graph.md). More engines and a GPU: "
            "[voters](../votes-speed.md).",
        ]
    )


def _tell_load(rows: Sequence[Row]) -> str:
    """Say whether the machine did other things as well."""
    loads, cores = sorted(row["load"] for row in rows), os.cpu_count() or 1
    middle = loads[len(loads) // 2]
    busy = middle > cores + 0.5  # what is measured here uses all cores itself
    words = "other work ran beside this, so times are too long and intervals wide" if busy else "little else ran"
    return f"The load of the machine before each measurement was {middle:.1f} in the median, on {cores} cores: {words}."


def _tell_embedding(rows: Sequence[Row]) -> list[str]:
    rival = {
        n: mean(_of(group, "seconds")).value for (way, n), group in grouped(rows, "way", "rows").items() if way == DENSE
    }
    lines: list[list[str]] = []
    best: dict[int, list[tuple[float, str, str]]] = {}
    for (way, dtype, n), group in grouped(rows, "way", "dtype", "rows").items():
        found = mean(_of(group, "seconds"))
        ratio = mean(rival[n] / seconds for seconds in _of(group, "seconds")) if n in rival else None
        if ratio is not None and way in SAME:
            best.setdefault(n, []).append((ratio.value, way, dtype))
        cells = [f"{n:,}", way, dtype, _span(found), "" if ratio is None else _span(ratio)]
        lines.append([*cells, f"{group[0]['peak_gib']:.2f}"])
    largest = max(best)
    top = max(best[largest])
    return [
        "## Embedding",
        "![Seconds and peak memory of one embedding over the number of rows, for the authors' dense way, ours and "
        "rivals](cost-embedding.svg)",
        f"One embedding: build the graph, {graph.STEPS} steps with labels of {graph.CLASSES} classes. Unit rows, "
        f"{graph.FEATURES} dimensions, bandwidth {graph.BANDWIDTH:g}, {graph.COLUMNS} columns, tolerance "
        f"{graph.TOLERANCE:g}. Each figure comes from a process of its own, whose peak memory includes Python and the "
        "data. *Times* is the speed over the authors' dense way at the same size.",
        table(["rows", "way", "dtype", "seconds (95% interval)", "times the dense way", "peak GiB"], lines),
        f"At {largest:,} rows the fastest of ours over the same graph is {top[1]}, {top[0]:.3g} times as "
        "fast as the dense way. The graph of nearest neighbours is another graph, not an approximation within the "
        "tolerance: most edges are missing.",
    ]


def _tell_release(rows: Sequence[Row]) -> list[str]:
    groups = {way: group for (way,), group in grouped(rows, "way").items()}
    rival = mean(_of(groups[release.AUTHORS], "single")).value
    lines = []
    for way, group in groups.items():
        single, batched = (mean(_of(group, column)) for column in ("single", "batched"))
        times = [_plain(mean(value / rival for value in _of(group, name)).value) for name in ("single", "batched")]
        lines.append([way, _span(single), _span(batched), *times, f"{group[0]['bytes']:,}"])
    slower = [way for way, group in groups.items() if mean(_of(group, "single")).value < rival]
    return [
        "## Releases",
        "![Messages a second of every release, one by one and in batches, beside the authors' procedure]"
        "(cost-release.svg)",
        f"Messages a second, {release.DIMENSION:,} dimensions, {release.PUBLIC:,} public rows, epsilon "
        f"{release.EPSILON:g}, answers of a tenth of {GALLERY:,} items. The rival is what the authors of PrivateMail "
        f"do for each query: {release.PUBLIC + 1:,} rows, dense weights of features and labels, five steps.",
        table(
            ["release", "one by one", f"{release.BATCH:,} at a time", "times the authors', single", "batched", "bytes"],
            lines,
        ),
        f"Slower than the authors' procedure, one by one: {', '.join(slower)}."
        if slower
        else "All of them are faster than the authors' procedure, one by one.",
    ]


def _tell_votes(rows: Sequence[Row]) -> list[str]:
    groups = grouped(rows, "rows", "way")
    rival = {n: mean(_of(group, "per_second")).value for (n, way), group in groups.items() if way == votes.RIVAL}
    lines = [
        [
            f"{n:,}",
            way,
            f"{group[0]['queries']:,}",
            _span(mean(_of(group, "per_second"))),
            _plain(mean(value / rival[n] for value in _of(group, "per_second")).value),
        ]
        for (n, way), group in sorted(groups.items(), key=lambda item: item[0][0])
    ]
    most = max(rival)
    ours = {way: mean(_of(g, "per_second")).value / rival[most] for (n, way), g in groups.items() if n == most}
    named = " and ".join(f"{ratio:.3g} ({way.partition(' (')[0]})" for way, ratio in ours.items() if "ours" in way)
    return [
        "## Votes of Private-kNN",
        "![Queries a second by private rows: ours, the published loop, and one product](cost-votes.svg)",
        f"A query is done when the records that vote on it are known. The published loop draws {votes.RATE:.0%} of the "
        "private rows for each query, subtracts, takes norms, sorts and keeps 300. Ours lists the nearest of all rows "
        "in their exact order, then tosses the coins of the same sampling (rate 0.15, k 300), or takes the list as it "
        "is (rate 1, k 2,000). The floor is the float32 product of queries and rows alone. "
        f"Rows: {rows[0]['data']}, {votes.FEATURES} features.",
        table(["private rows", "way", "queries", "queries a second (95% interval)", "times the published loop"], lines),
        f"At {most:,} private rows ours is {named} times as fast as the published loop.",
    ]


def _of(rows: Sequence[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def _span(found: Mean) -> str:
    low = max(found.low, 0.0)  # no time is below it, whatever the interval of three repeats says
    return f"{_plain(found.value)} ({_plain(low)} to {_plain(found.high)})"


def _plain(value: float) -> str:
    """Return three digits of a number, without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"


STUDY = Study(
    name="cost",
    title="What it costs in time and memory",
    about=(
        "Embedding time and peak memory over the number of rows, messages a second of every release, and queries a "
        "second of Private-kNN, each beside a named rival in the same run. Cases run one after another, in one process "
        f"or in new ones, and may use all cores. Every time is taken {REPEATS} times after a first run that does not "
        "count; intervals are 95% over these. They say how much a time varies in one run, not between machines."
    ),
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=("drawn at random, but for the votes: HOG of MNIST where it is there",),
    parameters={
        "rows embedded": list(SIZES),
        "repeats": REPEATS,
        "items of the releases' gallery": GALLERY,
        "private rows": list(PRIVATE),
    },
    alone=True,
)
