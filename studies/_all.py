"""All studies, in the order in which they are made."""

from studies import (
    accounting,
    bridge,
    codes,
    cost,
    covers,
    label_leak,
    label_weight,
    latent_ome,
    private_knn,
    privatemail_convergence,
    privatemail_embeddings,
    privatemail_parameters,
    privatemail_recall,
    retrieval,
    screening,
    sensitivity,
)
from studies._study import Study

_ALL: tuple[Study, ...] = (
    label_leak.STUDY,
    privatemail_recall.STUDY,
    privatemail_convergence.STUDY,
    privatemail_parameters.STUDY,
    privatemail_embeddings.STUDY,
    label_weight.STUDY,
    retrieval.STUDY,
    covers.STUDY,
    codes.STUDY,
    sensitivity.STUDY,
    latent_ome.STUDY,
    screening.STUDY,
    accounting.STUDY,
    private_knn.STUDY,
    bridge.STUDY,
    cost.STUDY,
)
STUDIES: dict[str, Study] = {study.name: study for study in _ALL}
