"""Parameters of estimators, each declared once with the values that it may have."""

from dataclasses import field
from numbers import Integral, Real
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.utils._param_validation import Interval


def allow_integers(least: int, most: int | None = None) -> Interval:
    """Return the constraint of an integer parameter."""
    return Interval(Integral, least, most, closed="left" if most is None else "both")


def allow_reals(least: float, most: float | None = None) -> Interval:
    """Return the constraint of a real parameter; without `most`, finite and above `least`."""
    return Interval(Real, least, most, closed="neither" if most is None else "both")


EPSILON = allow_reals(1e-6, 64.0)  # what finite tables of noise add to delta is proved up to there
DELTA = allow_reals(1e-18, 0.999)
SEED = allow_integers(0, (1 << 32) - 1)
COMPONENTS = allow_integers(1, 4096)
WEIGHT = Interval(Real, 0, None, closed="left")
PROBABILITY = Interval(Real, 0, 1, closed="neither")


def parameter(default: Any, *constraints: Any) -> Any:
    """Return a dataclass field for a parameter, with scikit-learn's constraints on its values; MISSING: no default."""
    return field(default=default, metadata={"constraints": list(constraints)})


class Parameters(BaseEstimator):  # type: ignore[misc]
    """An estimator with parameters that are fields of :func:`parameter`; `_validate_params` checks them."""

    @property
    def _parameter_constraints(self) -> dict[str, list[Any]]:
        described = getattr(self, "__dataclass_fields__", {})
        return {name: item.metadata["constraints"] for name, item in described.items() if item.metadata}
