"""Tables and figures: of the papers, and of this library; and the data they are made from."""

import importlib
from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from studies._report import table, write
    from studies._study import Case, Mean, Measured, Row, Study, mean, run, summarise

__all__ = ["Case", "Mean", "Measured", "Row", "Study", "mean", "run", "summarise", "table", "write"]
# Demonstrations run without pandas and Jinja.
__getattr__ = import_later(
    "studies", {"._report": "table write", "._study": "Case Mean Measured Row Study mean run summarise"}
)

NAMES = (
    "label-leak",
    "privatemail-recall",
    "privatemail-convergence",
    "privatemail-parameters",
    "privatemail-embeddings",
    "label-weight",
    "manifold-theorems",
    "retrieval",
    "covers",
    "ceiling",
    "growth",
    "codes",
    "sensitivity",
    "smooth-sensitivity",
    "latent-ome",
    "screening",
    "data-dependent",
    "accounting",
    "private-knn",
    "individual",
    "abstention",
    "svhn-student",
    "multi-label",
    "bridge",
    "cost",
)
"""All studies, in the order in which they are made: each is the ``STUDY`` of the module of its name."""


def load_studies() -> "dict[str, Study]":
    """Import all studies."""
    return {name: importlib.import_module(f"studies.{name.replace('-', '_')}").STUDY for name in NAMES}


def __dir__() -> list[str]:
    """Name what can be imported, for the documentation."""
    return sorted({*globals(), *__all__})
