"""What things cost in time and memory: embeddings, releases, votes; each beside a rival in the same run."""

import functools
import os
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from studies import _cost_graph as graph
from studies import _cost_release as release
from studies import _cost_votes as votes
from studies import _figures as draw
from studies._report import plain
from studies._study import Case, Row, Study, list_cases, select, summarise
from studies._timing import run_in_new_process, time_repeatedly

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
_BARS = {  # of the contenders: face, edge and hatch
    votes.RIVAL: ("white", draw.COLOURS["red"], "///"),
    "floor: one product, NumPy": ("0.85", "0.4", ""),
    "rate 0.15, k 300 (ours, numpy)": (draw.COLOURS["blue"], "black", ""),
    "rate 1, k 2000 (ours, numpy)": (draw.COLOURS["sky"], "black", ""),
}


def cases() -> list[Case]:
    """Return every measurement; rivals stand beside ours, in the same run."""
    return [
        *(
            {"part": "embedding", "way": name, "dtype": dtype, "rows": n}
            for n in SIZES
            for (name, dtype), largest in LARGEST.items()
            if n <= largest
        ),
        *list_cases(part=["release"], way=(release.AUTHORS, *release.list_releases())),
        *({"part": "votes", "way": way, "queries": count} for way, count in VOTERS.items()),
    ]


def measure(case: Case) -> list[Row]:
    """Measure one thing, several times."""
    load = round(os.getloadavg()[0], 2)
    parts = {"embedding": _measure_embedding, "release": _measure_release, "votes": _measure_votes}
    return [{**case, **row, "load": load} for row in parts[case["part"]](case)]


def _measure_embedding(case: Case) -> list[Row]:
    arguments = {"name": case["way"], "dtype": case["dtype"], "n": case["rows"]}
    try:
        results = run_in_new_process("studies._cost_graph:measure_embedding", **arguments)
    except RuntimeError as reason:
        if "ModuleNotFoundError" in str(reason):  # a rival that is not installed
            return [{"left_out": str(reason)}]
        raise
    peak = results["peak_gib"]
    return [{"repeat": i, "seconds": seconds, "peak_gib": peak} for i, seconds in enumerate(results["seconds"])]


def _measure_release(case: Case) -> list[Row]:
    results = release.measure_speed(case["way"], GALLERY, repeats=REPEATS, seconds=0.25)
    rates = enumerate(zip(results["single"], results["batched"], strict=True))
    size = results["bytes"]
    return [{"repeat": i, "single": single, "batched": batched, "bytes": size} for i, (single, batched) in rates]


@functools.cache
def _load_rows() -> tuple[Any, str]:
    return votes.load_rows()


def _measure_votes(case: Case) -> list[Row]:
    contender = next(entry for entry in votes.CPU if entry.name == case["way"])
    images, data = _load_rows()
    rows: list[Row] = []
    for n in PRIVATE:
        private, queries = votes.split(images, n, case["queries"])
        work = contender.prepare(private)
        work(queries[:2])
        times = time_repeatedly(functools.partial(work, queries), least=REPEATS, most=REPEATS)
        common = {"rows": len(private), "data": data}
        rows += [{**common, "repeat": i, "per_second": len(queries) / seconds} for i, seconds in enumerate(times)]
    return rows


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw time and memory of embeddings, releases a second, and votes a second."""
    return {
        "embedding": _draw_embeddings(_select_measured(rows, "embedding")),
        "release": _draw_releases(_select_measured(rows, "release")),
        "votes": _draw_votes(_select_measured(rows, "votes")),
    }


def _select_measured(rows: pd.DataFrame, part: str) -> pd.DataFrame:
    """Return the rows of a part, but those that say why a rival was left out."""
    return select(rows[rows["left_out"].isna()] if "left_out" in rows else rows, part=part)


def _draw_embeddings(rows: pd.DataFrame) -> Figure:
    """Draw seconds and peak memory of an embedding over rows; double precision for the rival alone."""
    figure, (panels,) = draw.make_panels(1, 2, (10.5, 4.8))
    shown = rows[(rows["dtype"] == "float32") | (rows["way"] == DENSE)]
    for axes, column in zip(panels, ("seconds", "peak_gib"), strict=True):
        for position, ((way, dtype), group) in enumerate(shown.groupby(["way", "dtype"], sort=False)):
            draw.curve(axes, way, summarise(group, column, "rows"), index=position, label=f"{way}, {dtype}")
        axes.set(xscale="log", yscale="log", xlabel="rows")
        draw.set_ticks(axes, [1_000, 10_000, 100_000], ["1,000", "10,000", "100,000"])
    panels[1].set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    panels[1].minorticks_off()
    panels[1].set_ylabel("peak memory of the process, GiB")
    draw.finish(figure, panels, "seconds for one embedding")
    return figure


def _draw_releases(rows: pd.DataFrame) -> Figure:
    """Draw messages a second as dots on a logarithmic axis, the rival as a line."""
    rest = rows[rows["way"] != release.AUTHORS]
    figure, ((axes,),) = draw.make_panels(1, 1, (8.5, 0.28 * rest["way"].nunique() + 1.6))
    base = select(rows, way=release.AUTHORS)["single"].mean()
    axes.axvline(base, color=draw.COLOURS["red"], linestyle=(0, (4, 2)), label=release.AUTHORS)
    axes.set(xscale="log", xlabel="messages a second")
    draw.dots(axes, summarise(rest, "single", "way"), color=draw.COLOURS["blue"], marker="o", label="one by one")
    batched: Any = {"color": draw.COLOURS["orange"], "marker": "s", "label": "1,000 at a time"}
    draw.dots(axes, summarise(rest, "batched", "way"), **batched)
    draw.finish(figure, axes)
    return figure


def _draw_votes(rows: pd.DataFrame) -> Figure:
    """Draw queries a second as bars, a group for each number of private rows; ratios to the rival are written."""
    figure, ((axes,),) = draw.make_panels(1, 1, (8.5, 3.8))
    results = summarise(rows, "per_second", "way", "rows")
    sizes = sorted(rows["rows"].unique())
    for position, (way, (face, edge, hatch)) in enumerate(_BARS.items()):
        here = results.loc[way].loc[sizes]
        x = np.arange(len(sizes)) + (position - (len(_BARS) - 1) / 2) * 0.2
        below = (here["value"] - here["low"].clip(lower=0)).clip(upper=0.99 * here["value"])
        spread = [below, here["high"] - here["value"]]
        bar: Any = {"color": face, "edgecolor": edge, "hatch": hatch, "capsize": 2, "label": way}
        axes.bar(x, here["value"], 0.18, yerr=spread, **bar)
        times = here["value"] / results.loc[votes.RIVAL].loc[sizes, "value"]
        for *top, ratio in zip(x, here["value"], times, strict=True):
            axes.annotate(f"x{ratio:.3g}", top, (3, 4), textcoords="offset points", fontsize=8.5)
    axes.set(yscale="log", xlabel="private rows")
    axes.set_xticks(range(len(sizes)), [f"{n:,}" for n in sizes])
    axes.grid(visible=False, axis="x")
    draw.finish(figure, axes, "queries a second", ncols=2)
    return figure


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what was measured; every number is one of the rows, or a ratio of two of the same run."""
    missing = rows.dropna(subset=["left_out"]).set_index("way")["left_out"].to_dict() if "left_out" in rows else {}
    load, cores = sorted(rows["load"])[len(rows) // 2], os.cpu_count() or 1
    return {
        "graph": graph,
        "release": release,
        "votes": votes,
        "missing": missing,
        "load": load,
        "cores": cores,
        "busy": load > cores + 0.5,  # what is measured here uses all cores itself
        **_compare_embeddings(_select_measured(rows, "embedding")),
        **_compare_releases(_select_measured(rows, "release")),
        **_compare_votes(_select_measured(rows, "votes")),
    }


def _compare_embeddings(rows: pd.DataFrame) -> dict[str, Any]:
    keys = ["rows", "way", "dtype"]
    dense = select(rows, way=DENSE).groupby("rows")["seconds"].mean()
    ratio = summarise(rows.assign(ratio=rows["rows"].map(dense) / rows["seconds"]), "ratio", *keys)
    ratios = ratio["value"].dropna()
    ratios = ratios[ratios.index.isin(SAME, level="way")]
    largest = ratios.index.get_level_values("rows").max()
    lines = pd.DataFrame(
        {
            "seconds (95% interval)": _show(summarise(rows, "seconds", *keys)),
            "times the dense method": _show(ratio),
            "peak GiB": rows.groupby(keys, sort=False)["peak_gib"].first().map("{:.2f}".format),
        }
    ).reset_index()
    return {
        "embeddings": lines.assign(rows=lines["rows"].map("{:,}".format)).rename(columns={"way": "method"}),
        "largest": largest,
        "fastest": ratios[largest].idxmax()[0],
        "fastest_times": ratios[largest].max(),
    }


def _compare_releases(rows: pd.DataFrame) -> dict[str, Any]:
    means = rows.groupby("way", sort=False)[["single", "batched"]].mean()
    rival = means.loc[release.AUTHORS, "single"]
    times = (means / rival).map(plain)
    lines = {
        "one by one": _show(summarise(rows, "single", "way")),
        f"{release.BATCH:,} at a time": _show(summarise(rows, "batched", "way")),
        "times the authors', single": times["single"],
        "batched": times["batched"],
        "bytes": rows.groupby("way", sort=False)["bytes"].first().map("{:,}".format),
    }
    return {
        "releases": pd.DataFrame(lines).rename_axis("release").reset_index(),
        "slower": list(means.index[means["single"] < rival]),
    }


def _compare_votes(rows: pd.DataFrame) -> dict[str, Any]:
    rows = rows.sort_values("rows", kind="stable")
    groups = rows.groupby(["rows", "way"], sort=False)
    results = summarise(rows, "per_second", "rows", "way")
    times = results["value"] / results["value"].xs(votes.RIVAL, level="way").reindex(results.index, level="rows")
    lines = {
        "queries": groups["queries"].first().map("{:,}".format),
        "queries a second (95% interval)": _show(results),
        "times the published loop": times.map(plain),
    }
    table = pd.DataFrame(lines).reset_index().rename(columns={"rows": "private rows", "way": "method"})
    most = rows["rows"].max()
    ours = [f"{ratio:.3g} ({way.partition(' (')[0]})" for way, ratio in times[most].items() if "ours" in way]
    return {
        "queries": table.assign(**{"private rows": table["private rows"].map("{:,}".format)}),
        "voted": rows["data"].iloc[0],
        "most": most,
        "ours": " and ".join(ours),
    }


def _show(results: pd.DataFrame) -> pd.Series:
    """Return means with their intervals; no time is below zero, whatever the interval of three repeats says."""
    low = results["low"].clip(lower=0).map(plain)
    text = results["value"].map(plain) + " (" + low + " to " + results["high"].map(plain) + ")"
    return text.where(results["value"].notna(), "")


PARAMETERS = {
    "rows embedded": list(SIZES),
    "repeats": REPEATS,
    "items of the releases' gallery": GALLERY,
    "private rows": list(PRIVATE),
}
DATA = ("drawn at random; for the votes HOG of MNIST, if it is available",)
STUDY = Study("cost", cases, measure, figures, facts, DATA, PARAMETERS, alone=True)
