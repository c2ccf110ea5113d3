"""Tables and figures: of the papers, and of this library; and the data they are made from."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from studies._report import table, write
    from studies._study import Case, Mean, Measured, Row, Study, mean, run, summarise

__all__ = ["Case", "Mean", "Measured", "Row", "Study", "mean", "run", "summarise", "table", "write"]

NAMES = (
    "label-leak",
    "privatemail-recall",
    "privatemail-convergence",
    "privatemail-parameters",
    "privatemail-embeddings",
    "label-weight",
    "retrieval",
    "covers",
    "ceiling",
    "growth",
    "codes",
    "sensitivity",
    "latent-ome",
    "screening",
    "accounting",
    "private-knn",
    "bridge",
    "cost",
)
"""All studies, in the order in which they are made: each is the ``STUDY`` of the module of its name."""


def load_studies() -> "dict[str, Study]":
    """Import all studies."""
    return {name: importlib.import_module(f"studies.{name.replace('-', '_')}").STUDY for name in NAMES}


def __getattr__(name: str) -> Any:
    """Import what makes a study when it is asked for: demonstrations run without pandas and Jinja."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"studies._{'report' if name in ('table', 'write') else 'study'}"), name)


def __dir__() -> list[str]:
    """Name what can be imported, for the documentation."""
    return sorted({*globals(), *__all__})
