"""Accountants with one interface: what events cost together.

* :class:`RdpAccountant`: Renyi divergences add up, and a conversion gives (epsilon, delta);
* :class:`PldAccountant`: privacy loss distributions are convolved, screenings by Bellman's equation; the tightest;
* :class:`AdditionAccountant`: basic composition, for comparison;
* :class:`RenyiFilter`: a budget for mechanisms that are chosen after seeing earlier answers;
* :func:`calibrate`: the least noise, or the largest count, for a budget.

The first three take mechanisms whose parameters are *fixed beforehand*; the queries may depend on earlier answers.
Where noise or number depend on earlier answers too, only the filter's guarantee holds. An event is priced as one
change of the relation that its sensitivity was computed for; Poisson sampling and votes mean "add or remove one
record". Proofs: ``docs/theory/accounting.md``.
"""

from nearveil.privacy.accounting.accountants import (
    Accountant,
    AdditionAccountant,
    BudgetExceededError,
    PldAccountant,
    RdpAccountant,
    RenyiFilter,
    calibrate,
)
from nearveil.privacy.accounting.screening import (
    screening_curve,
    screening_epsilon,
)

__all__ = [
    "Accountant",
    "AdditionAccountant",
    "BudgetExceededError",
    "PldAccountant",
    "RdpAccountant",
    "RenyiFilter",
    "calibrate",
    "screening_curve",
    "screening_epsilon",
]
