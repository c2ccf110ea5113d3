"""All studies, in the order in which they are made."""

import importlib

from studies._study import Study

NAMES = (
    "label-leak",
    "privatemail-recall",
    "privatemail-convergence",
    "privatemail-parameters",
    "privatemail-embeddings",
    "label-weight",
    "retrieval",
    "covers",
    "codes",
    "sensitivity",
    "latent-ome",
    "screening",
    "accounting",
    "private-knn",
    "bridge",
    "cost",
)
STUDIES: dict[str, Study] = {name: importlib.import_module(f"studies.{name.replace('-', '_')}").STUDY for name in NAMES}
