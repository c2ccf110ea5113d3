"""Checks that scikit-learn makes of estimators."""

import traceback
import warnings
from typing import Any
from unittest import SkipTest

from nearveil.private_knn import NoiseWarning, ScalingWarning


def run_check(check: Any, estimator: Any) -> None:
    """Run a check. One that fails says where in plain text: pytest would parse all checks to say it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalingWarning)  # scikit-learn standardises its rows
            warnings.simplefilter("ignore", NoiseWarning)  # and has few of them
            check(estimator)
    except SkipTest:
        raise
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        raise error.with_traceback(None) from None
