"""The page of the study of retrieval, in words."""

from collections.abc import Sequence

from studies._report import table
from studies._retrieval_budget import BUDGET
from studies._retrieval_figures import BUDGET_FRACTION, LACKS, LEAST_GAINING, SMALL, WAYS, differences, gains
from studies._rivals import SETTINGS
from studies._study import Row, grouped, mean, of
from studies._trial import NAMES

NEAR = 0.9  # of the ceiling: "within 10%"
_SLACK = 0.005  # seeds that all agree have an interval of no width
_SHOWN = (0.01, 1.0, 2.0, 4.0, 8.0, 16.0)


def told(rows: Sequence[Row]) -> str:
    """Return the page's text."""
    found = of(rows, part="recall")
    return "\n\n".join([_neighbours(found), _near(found), _by_class(found), _classes(rows), _budget(rows)])


def _neighbours(found: Sequence[Row]) -> str:
    sets = [NAMES.get(name, name) for (name,) in grouped(found, "data")]
    passing = _passing(found)
    above = _above(found)
    words = [
        "## Neighbours found",
        f"![NN-recall over epsilon on {' and '.join(sets)} for answers of three sizes: covers lie just below the "
        "ceiling, "
        "cells and directions below them, and most fall below the floor at small epsilon](retrieval-nn-recall.svg)",
        f"*The best releases.* {passing}",
        "![The same for the other releases, most of which stay below the floor at every epsilon](retrieval-others.svg)",
        f"*The others.* {_below(found)}",
        above,
        "NN-recall@8, and in brackets its share of the ceiling:",
        _table(found, 0.1),
        "What each was given: "
        + "; ".join(f"{name}: {words}" for name, words in SETTINGS.items())
        + ". LATENT's number "
        "of directions was chosen on such queries, so it is slightly favoured; the others have their defaults. "
        "For those with a delta of 1e-5 "
        "the bracket uses Theorem D', which is higher; the grey edge in the figures is that of delta 0.",
    ]
    return "\n\n".join(words)


def _table(found: Sequence[Row], fraction: float) -> str:
    here = of(found, f=fraction)
    shown = [epsilon for epsilon in _SHOWN if of(here, epsilon=epsilon)]
    lines = []
    for (data,), part in grouped(here, "data").items():
        name = NAMES.get(data, data)
        for (method,), some in grouped(part, "method").items():
            cells = [_cell(of(some, epsilon=epsilon)) for epsilon in shown]
            lines.append([name, method, *cells])
        first = of(part, method=part[0]["method"])
        ceilings = [mean(row["pure_ceiling"] for row in of(first, epsilon=epsilon)).value for epsilon in shown]
        lines.append([name, "*ceiling, delta 0*", *(f"{value:.3f}" for value in ceilings)])
        floor = mean(row["floor"] for row in first).value
        lines.append([name, "*floor*", *(f"{floor:.3f}" for _ in shown)])
    return table(["data", f"f {fraction:g}", *(f"eps {epsilon:g}" for epsilon in shown)], lines)


def _cell(some: Sequence[Row]) -> str:
    value = mean(row["nn_recall"] for row in some).value
    return f"{value:.3f} ({value / some[0]['ceiling']:.2f})"


def _passing(found: Sequence[Row]) -> str:
    """Say who is better than asking nothing, and where."""
    parts = []
    for (method,), some in grouped(found, "method").items():
        good = [key for key, group in grouped(some, "data", "f", "epsilon").items() if _gain(group) > 0]
        total = len(grouped(some, "data", "f", "epsilon"))
        parts.append((len(good), total, method))
    parts.sort(reverse=True)
    listed = ", ".join(f"{method} in {good}" for good, _, method in parts if good)
    return (
        f"Of {parts[0][1]} settings (set, f, epsilon) the mean is above the floor for {listed}"
        + ("; never for " + ", ".join(method for good, _, method in parts if not good) if not parts[-1][0] else "")
        + ". Below the floor a release is worth less than not asking."
    )


def _gain(group: Sequence[Row]) -> float:
    return mean(row["nn_recall"] - row["floor"] for row in group).value


def _below(found: Sequence[Row]) -> str:
    least = {}
    for (method,), some in grouped(found, "method").items():
        groups = {epsilon: group for (epsilon,), group in grouped(some, "epsilon").items()}
        for epsilon in sorted(groups, reverse=True):
            if any(_gain(part) <= 0 for part in grouped(groups[epsilon], "data", "f").values()):
                break
            least[method] = epsilon
    named = "; ".join(f"{method} from epsilon {epsilon:g} on" for method, epsilon in least.items())
    return f"Above the floor on every set and at every f: {named or 'none'}."


def _above(found: Sequence[Row]) -> str:
    """Say whether a mean is above the ceiling: for sound releases it must not be, beyond its interval."""
    over = [
        f"{key[1]} ({NAMES.get(key[0], key[0])}, f {key[2]:g}, epsilon {key[3]:g})"
        for key, group in grouped(found, "data", "method", "f", "epsilon").items()
        if mean(row["nn_recall"] for row in group).low > group[0]["ceiling"] + _SLACK
    ]
    if not over:
        return f"All of them are sound, and none is above the ceiling by more than its interval and {_SLACK:g}."
    return f"**Above the ceiling, which is a bug or a leak: {', '.join(over)}.**"


def _near(found: Sequence[Row]) -> str:
    lines, far, near, total = [], [], 0, 0
    epsilons = sorted({row["epsilon"] for row in found})
    for (data, fraction), some in grouped(of(found, method="covers"), "data", "f").items():
        cells = []
        for epsilon in epsilons:
            group = of(some, epsilon=epsilon)
            share = mean(row["nn_recall"] / row["ceiling"] for row in group)
            total += 1
            near += share.value >= NEAR
            cells.append(f"{share.value:.3f}" if share.value >= NEAR else f"*{share.value:.3f}*")
            if share.value < NEAR:
                far.append(f"{NAMES.get(data, data)} f {fraction:g} epsilon {epsilon:g}")
        lines.append([NAMES.get(data, data), f"{fraction:g}", *cells])
    head = ["data", "f", *(f"eps {epsilon:g}" for epsilon in epsilons)]
    missing = f" Not in: {'; '.join(far)} (in italics below)." if far else ""
    return "\n\n".join(
        [
            "## How near covers come to the ceiling",
            f"Within 10% of the ceiling in {near} of {total} settings.{missing} What is left there is "
            "[how neighbourhoods overlap](../../theory/covers.md); [what number of sets and learning are "
            "worth](covers.md). The ceiling itself may be too high: it lets "
            "every query have all its neighbours in one answer. At the smallest epsilons it, covers and floor "
            "are nearly one: there is nothing to gain by asking.",
            table(head, lines),
        ]
    )


def _by_class(found: Sequence[Row]) -> str:
    floors = [
        f"{mean(row['recall_floor'] for row in some).value:.2f} ({NAMES.get(data, data)}, f {fraction:g})"
        for (data, fraction), some in grouped(found, "data", "f").items()
    ]
    return "\n\n".join(
        [
            "## Recall by class",
            "![Recall@8 by class over epsilon: all releases lie close to the floor or between it and the search "
            "without privacy]"
            "(retrieval-recall.svg)",
            "One item of the query's class among eight is easily found, also without a message: popular items "
            f"alone give {', '.join(floors)}. "
            "The answer may hold items of every class, whoever asks, so Theorem C's ceiling for eight classes "
            "does not apply to re-ranked candidates, and no lower one than 1 is drawn. "
            f"{_covers_by_class(found)} Steer by NN-recall.",
        ]
    )


def _covers_by_class(found: Sequence[Row]) -> str:
    """Say where covers, which are learned for neighbours, find fewer classes than popular items do."""
    groups = grouped(of(found, method="covers"), "data", "f", "epsilon")
    below = [key for key, some in groups.items() if mean(row["recall"] - row["recall_floor"] for row in some).high < 0]
    return (
        "Covers, which are learned for neighbours and leave regions of the gallery out where epsilon is small, "
        "are below "
        f"that floor by more than the interval in {len(below)} of {len(groups)} settings."
    )


def _classes(rows: Sequence[Row]) -> str:
    found = differences(rows)
    lines = []
    shown = 4.0 if any(row["epsilon"] == 4.0 for row in found) else found[0]["epsilon"]
    for (data, lacks, method), some in grouped(of(found, epsilon=shown), "data", "lacks", "method").items():
        gap = mean(row["difference"] for row in some)
        cells = [
            f"{mean(row[name] for row in some).value:.3f}"
            for name in ("known", "known_ceiling", "known_floor", "lacking", "lacking_ceiling", "lacking_floor")
        ]
        lines.append(
            [NAMES.get(data, data), lacks, method, *cells, f"{gap.value:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"]
        )
    head = ["data", "lacking in", "method", "known", "ceiling", "floor", "lacking", "ceiling", "floor", "difference"]
    return "\n\n".join(
        [
            "## Classes that the public rows, or the gallery, have never seen",
            "Does it work for a class that the public data lacks? Images of all classes are the gallery, others "
            "are the queries, and a third part is public: of one half of the classes, "
            "then of the other. So every query is asked twice, once as one of a class that the public rows know "
            "and once as one of a class that they lack, and the same gallery answers. "
            "In a second pair of trials the gallery too has the public half alone: then queries of the other "
            "half have no item of their class anywhere, and only their nearest neighbours count.",
            "![The difference of NN-recall between classes that are lacking and classes that are known, over "
            "epsilon](retrieval-classes.svg)",
            _gaps(found),
            f"NN-recall@8 at epsilon {shown:g}, f {BUDGET_FRACTION:g}; the difference is one of the same queries "
            "where the gallery is whole, with its 95% interval over seeds:",
            table(head, lines),
            "Covers and cells take nothing but the mean from public rows; their map is one of the gallery. "
            "Directions, cells of public rows and anchors are "
            "made of the public rows themselves. Where the gallery lacks the class, popularity, and with it "
            "ceiling and floor, is that among other images of such classes.",
        ]
    )


def _gaps(found: Sequence[Row]) -> str:
    parts = []
    for lacks in LACKS:
        worst = {}
        for (method,), some in grouped(of(found, lacks=lacks), "method").items():
            groups = grouped(some, "data", "epsilon").values()
            worst[method] = min(mean(row["difference"] for row in group).value for group in groups)
        listed = ", ".join(f"{method} {value:+.3f}" for method, value in worst.items())
        parts.append(f"where {lacks} lack the class: {listed}")
    return f"The lowest difference over sets and epsilons, {'; '.join(parts)}."


def _budget(rows: Sequence[Row]) -> str:
    found = gains(rows)
    data = max(row["data"] for row in found)
    lines = []
    paid = {(row["method"], row["epsilon"]): row for row in of(rows, part="budget")}
    epsilons = sorted({row["epsilon"] for row in found})
    for epsilon in epsilons:
        pure = paid["a pure message", epsilon]
        gaussian = paid["analytic Gaussian", epsilon]
        cells = [f"{epsilon:g}", f"{pure['pure']:,}", f"{pure['plan']:,}", f"{gaussian['plan']:,}"]
        for way in ("pure", "plan"):
            one = mean(row["gain"] for row in of(found, data=data, method="covers", way=way, epsilon=epsilon))
            cells.append(f"{one.value:,.1f} ({one.low:,.1f} to {one.high:,.1f})")
        lines.append(cells)
    head = ["epsilon of a query", "queries, delta 0", f"queries, delta {SMALL}", f"Gaussian queries, delta {SMALL}",
            "covers find, delta 0", f"covers find, delta {SMALL}"]  # fmt: skip
    best = []
    certain = [row for row in of(found, method="covers") if row["epsilon"] >= LEAST_GAINING]
    for (name, way), some in grouped(certain, "data", "way").items():
        top = max(grouped(some, "epsilon").items(), key=lambda pair: mean(row["gain"] for row in pair[1]).value)
        gain = mean(row["gain"] for row in top[1])
        best.append(f"{NAMES.get(name, name)}, {WAYS[way]}: epsilon {top[0][0]:g} ({gain.value:,.1f} neighbours)")
    return "\n\n".join(
        [
            "## What a budget buys",
            f"An account holds epsilon {BUDGET:g} for all queries about one record. Small questions are cheap and "
            "tell little. How many does the [ledger](../../theory/ledger.md) let pass, and how "
            "many true neighbours do they find in all, beyond those that the popular items hold, which cost "
            f"nothing? With delta 0 epsilons are added. At delta {SMALL}, for a number of queries that is "
            "fixed beforehand, privacy loss distributions are composed.",
            "![Left: queries that a budget pays for, over the epsilon of one query. Middle and right: neighbours "
            "that covers, cells and the analytic Gaussian find beyond the floor, "
            f"without and with a delta]({'retrieval-budget.svg'})",
            f"Answers of {BUDGET_FRACTION:.0%}, {NAMES.get(data, data)}; in brackets the 95% interval over seeds:",
            table(head, lines),
            f"The epsilon of a query, from {LEAST_GAINING:g} on, that finds most in all: {'; '.join(best)}. At smaller "
            "ones the gain of one query is below what these seeds can tell from zero, and multiplied by thousands of "
            "queries it is mostly chance, as the intervals say. A curve that leaves the figure downwards finds less "
            "than the popular items do, which cost nothing. The grey area is that of pure messages, as many as "
            "are paid "
            "for; the Gaussian's are more.",
        ]
    )
