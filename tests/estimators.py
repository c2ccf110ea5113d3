"""Checks that scikit-learn makes of estimators."""

import traceback
from typing import Any
from unittest import SkipTest


def run_check(check: Any, estimator: Any) -> None:
    """Run a check. One that fails says where in plain text: pytest would parse all checks to say it."""
    try:
        check(estimator)
    except SkipTest:
        raise
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        raise error.with_traceback(None) from None
