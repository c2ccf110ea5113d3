"""PrivateMail (Vepakomma, Balla and Raskar, 2021 and 2022): private retrieval by supervised manifold embeddings.

Read :mod:`~nearveil.privatemail.graph` first, which builds the two graphs, then :mod:`~nearveil.privatemail.manifold`
(the query on them, and the alignment), :mod:`~nearveil.privatemail.sensitivity` (the effect of one record), and
:mod:`~nearveil.privatemail.mechanism`, which releases the target's row with noise.
"""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.privatemail.manifold import SupervisedManifold
    from nearveil.privatemail.mechanism import PrivateMail

__all__ = ["PrivateMail", "SupervisedManifold"]

__getattr__ = import_later(__name__, {".manifold": "SupervisedManifold", ".mechanism": "PrivateMail"})
