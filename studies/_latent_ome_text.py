"""The page of the study of LATENT and OME, in words."""

from collections.abc import Sequence

from studies._latent_ome_figures import DEFAULT
from studies._report import table
from studies._study import Row, grouped, mean, of

_SHOWN_ALPHAS = (1.0, 7.0, 100.0)
_SHOWN_NOMINALS = (0.1, 1.0, 10.0, 100.0)


def told(rows: Sequence[Row]) -> str:
    """Return the page's text."""
    return "\n\n".join([_budgets(rows), _recall(rows)])


def _budgets(rows: Sequence[Row]) -> str:
    latent = of(rows, part="budget", mechanism="LATENT")
    ratios = [row["correction"] / row["exact"] for row in latent]
    holds = sum(row["claim_holds"] for row in latent)
    parts = [
        "## LATENT: the claim holds, the correction wastes",
        "![LATENT's budgets over the claimed epsilon: the exact one is between half of the claim and the claim; the "
        "correction lies above](latent-ome-latent.svg)",
        f"The claim is at least the exact epsilon in {holds} of {len(latent)} settings, and at most twice as "
        f"large. The correction is {min(ratios):.1f} to {max(ratios):.1f} times the exact one: "
        "what was corrected was not wrong. Many bits with a small epsilon each compose to much less at a delta.",
        "## OME: the claim is false, and the correction is no bound either",
        "![OME's budgets over the claimed epsilon: the exact one hardly depends on the claim and lies far above; the "
        "correction is negative for alpha above 1](latent-ome-ome.svg)",
    ]
    for name in ("OME", DEFAULT):
        some = of(rows, part="budget", mechanism=name)
        false = sum(not row["claim_holds"] for row in some)
        below = sum(row["correction"] < row["exact"] for row in some)
        negative = sum(row["correction"] < 0 for row in some)
        parts.append(
            f"{name} ({some[0]['bits']} bits): the claim is false in {false} of {len(some)} settings, the "
            f"correction is below the truth in {below} and negative in {negative}."
        )
    default = of(rows, part="budget", mechanism=DEFAULT, alpha=100.0, claimed=10.0)
    if default:
        parts.append(
            "With the parameters of its paper (alpha 100, epsilon 10) the exact epsilon is "
            f"{default[0]['exact']:,.2f}, {default[0]['exact_code_words']:,.0f} over the code words that unit "
            "rows can have; "
            f"the correction states {default[0]['correction']:,.0f}."
        )
    return "\n\n".join([*parts, _table(rows)])


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for row in of(rows, part="budget"):
        if row["alpha"] not in _SHOWN_ALPHAS or row["claimed"] not in _SHOWN_NOMINALS:
            continue
        numbers = [row[column] for column in ("claimed", "correction", "exact", "exact_code_words", "at_delta")]
        lines.append(
            [row["mechanism"], str(row["bits"]), f"{row['alpha']:g}", *(f"{number:,.4g}" for number in numbers)]
        )
    head = ["method", "bits", "alpha", "claimed", "corrected (not an LDP bound)", "exact", "exact, code words"]
    return table([*head, "exact, at delta"], lines)


def _recall(rows: Sequence[Row]) -> str:
    found = of(rows, part="recall")
    epsilons = sorted({row["epsilon"] for row in found})
    lines = [
        [method, *(_cell(of(some, epsilon=epsilon)) for epsilon in epsilons)]
        for (method,), some in grouped(found, "method").items()
    ]
    claimed = of(rows, part="claimed")
    lines.append(["*OME at the epsilon it claims*", *(_cell(of(claimed, epsilon=epsilon)) for epsilon in epsilons)])
    ceilings = {row["epsilon"]: row["pure_ceiling"] for row in found}
    floor = mean(row["floor"] for row in of(found, method=found[0]["method"])).value
    lines.append(["*ceiling*", *(f"{ceilings[epsilon]:.3f}" for epsilon in epsilons)])
    lines.append(["*floor*", *(f"{floor:.3f}" for _ in epsilons)])
    above = [
        f"{epsilon:g}"
        for epsilon in epsilons
        if mean(row["nn_recall"] for row in of(claimed, epsilon=epsilon)).low > ceilings[epsilon]
    ]
    exact = sorted({round(row["exact"]) for row in claimed})
    leak = (
        f"It is above the ceiling at claimed epsilon {', '.join(above)}: no private message can be there, so this "
        "is a leak."
        if above
        else "It is not above the ceiling by more than its interval; what leaks tells little about neighbours."
    )
    return "\n\n".join(
        [
            "## What they find at equal exact epsilon",
            "![NN-recall at equal exact epsilon, between floor and ceiling, with OME's at the epsilon that it "
            "claims](latent-ome-recall.svg)",
            "NN-recall@8, with the 95% interval over seeds:",
            table(["method", *(f"eps {epsilon:g}" for epsilon in epsilons)], lines),
            "The dotted curve is OME as its paper has it (50 values, 550 bits, alpha 100), drawn at the epsilon "
            "that it claims. Its exact epsilon is "
            f"{' to '.join(f'{value:,}' for value in dict.fromkeys((exact[0], exact[-1])))}. {leak}",
        ]
    )


def _cell(some: Sequence[Row]) -> str:
    one = mean(row["nn_recall"] for row in some)
    return f"{one.value:.3f} ± {one.high - one.value:.3f}"
