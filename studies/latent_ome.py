"""LATENT and OME: the budget that is claimed, the one that was corrected in print, and the exact one."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from nearveil.privacy.noise import unsafe_seeded
from nearveil.release import OME, Latent
from studies import _latent_ome_figures as draw
from studies._finding import Search, find, search_of, unasked
from studies._latent_ome_text import told
from studies._rivals import SETTINGS, Public
from studies._study import Case, Row, Study
from studies._trial import FILES, QUERIES, split
from studies.retrieval import SEEDS, SPLIT, asked, recall_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOMINALS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
ALPHAS = (0.5, 1.0, 2.0, 4.0, 7.0, 20.0, 100.0)
DELTA = 1e-5
CODES: dict[str, dict[str, int]] = {
    "LATENT": {"values": 16, "integer_bits": 4, "fraction_bits": 5},
    "OME": {"values": 16, "integer_bits": 4, "fraction_bits": 5},
    draw.DEFAULT: {"values": 50, "integer_bits": 5, "fraction_bits": 5},  # as its paper has it: 550 bits
}
DATA = "cub200_cropped_lite0"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
FRACTION = 0.1
METHODS = ("covers", "PrivUnit", "unary, symmetric", "unary, optimised", "LATENT", "OME")
CLAIMED_ALPHA = 100.0  # of OME's paper


def cases() -> list[Case]:
    """Return all settings of a budget, then what is found at equal exact epsilon, and at OME's claimed one."""
    prices = [{"part": "budget", "mechanism": name, "alpha": alpha} for name in CODES for alpha in ALPHAS]
    recalls = [
        {"part": "recall", "data": DATA, "method": method, "epsilons": [epsilon], "fractions": [FRACTION]}
        for method in METHODS
        for epsilon in EPSILONS
    ]
    return [*prices, *recalls, {"part": "claimed", "data": DATA}]


@cache
def _search() -> tuple[Search, Public]:
    found = split(DATA, SPLIT)
    return search_of(found), Public(found.public, found.public_y)


def measure(case: Case) -> list[Row]:
    """Compute or measure one case."""
    if case["part"] == "budget":
        return [_budget(case["mechanism"], case["alpha"], nominal) for nominal in NOMINALS]
    search, public = _search()
    return recall_rows(search, public, case) if case["part"] == "recall" else _claimed(search, public)


def _budget(name: str, alpha: float, nominal: float) -> Row:
    code = {key: value for key, value in CODES[name].items() if key != "values"}
    kind: Any = Latent if name == "LATENT" else OME
    values = CODES[name]["values"]
    # Budgets depend on the number of values alone, whatever the public rows are.
    public = np.random.default_rng(0).standard_normal((values + 1, values))
    found = kind(nominal_epsilon=nominal, alpha=alpha, **code).fit(public).budgets(DELTA)
    return {
        "part": "budget",
        "mechanism": name,
        "bits": found.n_bits,
        "alpha": alpha,
        "claimed": nominal,
        "correction": found.published_correction,
        "exact": found.exact.per_vector,
        "exact_code_words": found.exact_code_words.per_vector,
        "at_delta": found.exact.per_vector_at_delta,
        "code_words_at_delta": found.exact_code_words.per_vector_at_delta,
        "claim_holds": found.claim_holds,
    }


def _claimed(search: Search, public: Public) -> list[Row]:
    """Ask with OME as its paper has it, at epsilons that it claims."""
    rows: list[Row] = []
    values = CODES[draw.DEFAULT]["values"]
    for epsilon in EPSILONS:
        mechanism = OME(nominal_epsilon=epsilon, alpha=CLAIMED_ALPHA, projection=public.directions(values))
        mechanism.fit(public.rows, public.labels)
        for seed in SEEDS:
            which = asked(seed, len(search.trial.queries))
            found = find(mechanism, search, which, [FRACTION], unsafe_seeded(seed))[FRACTION]
            rows.append(
                {
                    "part": "claimed",
                    "data": DATA,
                    "method": "OME",
                    "f": FRACTION,
                    "epsilon": epsilon,
                    "exact": mechanism.guarantee.epsilon,
                    "seed": seed,
                    "nn_recall": float(found.neighbours.mean()),
                    "floor": float(unasked(search, which, FRACTION).neighbours.mean()),
                }
            )
    return rows


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw the budgets, and what is found."""
    return {"latent": draw.latent(rows), "ome": draw.ome(rows), "recall": draw.recall(rows)}


ABOUT = f"""
Both methods write a vector as bits and randomise every bit by itself. *Claimed* is the epsilon of their papers, for
the whole vector. *Corrected* is that of Theorems 8 and 9 of a later paper. They divide by an expected distance, and a
likelihood ratio knows no expectation: what they state is **not an LDP bound**. *Exact* is the [largest log-likelihood
ratio](../../theory/latent-ome.md) over all pairs of bit strings, a theorem and reached; *at delta 1e-5* is what the
bits compose to, exact for LATENT and at most a grid cell above for OME. All are computed, not measured; no seed
enters.

What is found at equal *exact* epsilon is measured on CUB as in [the study of retrieval](retrieval.md): answers of
{FRACTION:.0%}, {QUERIES // len(SEEDS)} held-out queries a seed, {len(SEEDS)} seeds, the ceiling of Theorem D and the
floor of popular items.
"""

STUDY = Study(
    name="latent-ome",
    title="LATENT and OME: claimed, corrected, exact",
    about=ABOUT,
    cases=cases,
    measure=measure,
    figures=figures,
    tell=told,
    data=FILES[:1],
    parameters={
        "nominal epsilons": NOMINALS,
        "alphas": ALPHAS,
        "delta": DELTA,
        "codes": CODES,
        "epsilons": EPSILONS,
        "f": FRACTION,
        "methods": {name: SETTINGS[name] for name in METHODS},
        "OME as claimed": f"PCA to 50, 550 bits, alpha {CLAIMED_ALPHA:g}",
    },
    seeds=SEEDS,
)
