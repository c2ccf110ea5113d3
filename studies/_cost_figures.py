"""How times and memory are drawn."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from studies._study import Row, grouped, mean
from studies._style import COLOURS, curve, legend_below


def embedding_figure(rows: Sequence[Row], rival: str) -> Figure:
    """Draw seconds and peak memory of an embedding over rows; double precision for the rival alone."""
    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    panels = figure.subplots(1, 2)
    shown = [row for row in rows if row["dtype"] == "float32" or row["way"] == rival]
    for axes, column in zip(panels, ("seconds", "peak_gib"), strict=True):
        for place, ((way, dtype), mine) in enumerate(grouped(shown, "way", "dtype").items()):
            groups = grouped(mine, "rows")
            points = [mean(row[column] for row in group) for group in groups.values()]
            curve(axes, way, [n for (n,) in groups], points, place=place, label=f"{way}, {dtype}")
        axes.set(xscale="log", yscale="log", xlabel="rows")
        axes.set_xticks([1_000, 10_000, 100_000], ["1,000", "10,000", "100,000"])
        axes.minorticks_off()
    panels[0].set_ylabel("seconds for one embedding")
    panels[1].set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    panels[1].minorticks_off()
    panels[1].set_ylabel("peak memory of the process, GiB")
    legend_below(figure, list(panels))
    return figure


def release_figure(rows: Sequence[Row], rival: str) -> Figure:
    """Draw messages a second as dots on a logarithmic axis, the rival as a line."""
    groups = {way: group for (way,), group in grouped(rows, "way").items()}
    base = mean(row["single"] for row in groups[rival]).value
    names = [way for way in groups if way != rival]
    figure = Figure(figsize=(8.5, 0.28 * len(names) + 1.6), layout="constrained")
    axes = figure.subplots()
    axes.axvline(base, color=COLOURS["red"], linestyle=(0, (4, 2)), label=rival)
    for column, colour, marker, label in (
        ("single", COLOURS["blue"], "o", "one by one"),
        ("batched", COLOURS["orange"], "s", "1,000 at a time"),
    ):
        found = [mean(row[column] for row in groups[way]) for way in names]
        errors = [
            [point.value - max(point.low, 1e-9) for point in found],
            [point.high - point.value for point in found],
        ]
        axes.errorbar(
            [point.value for point in found],
            range(len(names)),
            xerr=[[max(0.0, min(e, 0.99 * p.value)) for e, p in zip(errors[0], found, strict=True)], errors[1]],
            color=colour,
            marker=marker,
            linestyle="",
            capsize=2,
            label=label,
        )
    axes.set(xscale="log", xlabel="messages a second", ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names)
    legend_below(figure, [axes])
    return figure


def votes_figure(rows: Sequence[Row], rival: str) -> Figure:
    """Draw queries a second as bars, a group for each number of private rows; ratios to the rival are written."""
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    axes = figure.subplots()
    ways = list(dict.fromkeys(row["way"] for row in rows))
    sizes = sorted({row["rows"] for row in rows})
    groups = grouped(rows, "way", "rows")
    fills = {rival: ("white", COLOURS["red"], "///"), "floor": ("0.85", "0.4", "")}
    for place, way in enumerate(ways):
        for at, n in enumerate(sizes):
            found = mean(row["per_second"] for row in groups[way, n])
            ratio = found.value / mean(row["per_second"] for row in groups[rival, n]).value
            face, edge, hatch = fills.get("floor" if way.startswith("floor") else way, (COLOURS["blue"], "black", ""))
            x = at + (place - (len(ways) - 1) / 2) * 0.2
            low = min(found.value - max(found.low, 0.0), 0.99 * found.value)
            axes.bar(
                x,
                found.value,
                0.18,
                color=face if place < 3 else COLOURS["sky"],
                edgecolor=edge,
                hatch=hatch,
                yerr=[[low], [found.high - found.value]],
                capsize=2,
                label=way if at == 0 else None,
            )
            axes.annotate(f"x{ratio:.3g}", (x, found.value), (3, 4), textcoords="offset points", fontsize=8.5)
    axes.set(yscale="log", ylabel="queries a second", xlabel="private rows")
    axes.set_xticks(range(len(sizes)), [f"{n:,}" for n in sizes])
    axes.grid(visible=False, axis="x")
    legend_below(figure, [axes], ncols=2)
    return figure
