"""Checks of a mechanism in normal use."""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nearveil.audit.report import Check, judge
from nearveil.privacy.noise import Source

CheckRun = Callable[[Source, float], Check]

_STRENGTHS = ("epsilon", "delta", "nominal_epsilon", "vote_noise")


def make_check(name: str, find: Callable[[Source, float], str | None]) -> CheckRun:
    """Return a check that fails if ``find(source, alpha)`` returns a problem."""
    return lambda source, alpha: judge(name, find(source, alpha))


def make_frozen_check(estimator: Any) -> CheckRun:
    """Return a check that parameters set after `fit` do not change the guarantee."""
    return make_check("parameters set later", lambda *_: _find_unfrozen(estimator))


def _find_unfrozen(estimator: Any) -> str | None:
    """Describe a parameter that changes the guarantee of a fitted estimator."""
    before = estimator.guarantee
    parameters = estimator.get_params(deep=False)
    for name in (strength for strength in _STRENGTHS if parameters.get(strength)):
        with suppress(AttributeError, ValueError):  # a fitted release refuses every change
            after = copy.deepcopy(estimator).set_params(**{name: parameters[name] / 64}).guarantee
            if (after.epsilon, after.delta) != (before.epsilon, before.delta):
                return f"setting {name} after fit changes the guarantee, but not the noise"
    return None
