"""Checks of private input whose errors show no value of it."""

import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# What scikit-learn says without quoting data. Of the others only the part before the first colon or line end, if known.
_SAFE = re.compile(
    r"Input [Xy] contains |Found array with (0|\d+) (sample|feature)|Found array with dim|Found input variables with "
    r"inconsistent|X has \d+ features|Sparse data was passed|The feature names should match|y should be a 1d array|"
    r"Input contains NaN|Unknown label type: |bad input shape|This \w+ estimator requires y to be passed|"
    r"float\(\) argument must be "
)
_TRIMMED = ("Complex data not supported", "Expected 2D array, got 1D array instead", "Expected 2D array, got scalar")


def shielded(check: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Run a check on private input; where it fails, say why without a value.

    Examples
    --------
    >>> shielded(float, "a private word")
    Traceback (most recent call last):
    ...
    ValueError: X and y must hold real numbers of the right shape: what was found is not shown, since it is private
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The number of unique classes")  # tells of the labels
        try:
            return check(*arguments, **options)
        except (TypeError, ValueError) as error:
            kind, words = (TypeError if isinstance(error, TypeError) else ValueError), _clean(str(error))
    raise kind(words)  # outside of the handler: the first error's context holds what must not be shown


def _clean(words: str) -> str:
    if _SAFE.match(words.partition("\n")[0]):
        return words
    for known in _TRIMMED:
        if words.startswith(known):
            return f"{known}: X must have a row for each record"
    return "X and y must hold real numbers of the right shape: what was found is not shown, since it is private"
