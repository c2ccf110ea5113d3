"""Mechanisms that the papers are compared with: older ones, and embeddings without protection.

``docs/theory/baselines.md`` has their proofs. ``nearveil mechanisms`` and ``nearveil audit`` list them where the
studies are installed.
"""

from nearveil.mechanisms.base import Release
from nearveil.mechanisms.catalog import MAIL, REGISTRY, UNSOUND, MechanismEntry
from nearveil.mechanisms.messages import Floats
from studies.baselines.cells import Cells
from studies.baselines.embeddings import DPdSNE, PlainLDA, PlainManifold, PlainTSNE, RawFeatures
from studies.baselines.fisher import VonMisesFisher
from studies.baselines.neighbors import neighbors_graph
from studies.baselines.pca import PrivatePCA, PrivatePCARelease
from studies.baselines.projection import RandomProjection
from studies.baselines.solvers import ReferenceManifold
from studies.baselines.unary import Unary

__all__ = [
    "BASELINES",
    "Cells",
    "DPdSNE",
    "PlainLDA",
    "PlainManifold",
    "PlainTSNE",
    "PrivatePCA",
    "PrivatePCARelease",
    "RandomProjection",
    "RawFeatures",
    "ReferenceManifold",
    "Unary",
    "VonMisesFisher",
    "find_mechanism",
    "neighbors_graph",
]


class PcaEntry(MechanismEntry):
    """A private PCA, which learns its directions from private rows."""

    def make_release(self, private: Floats) -> Release:
        """Return an unfitted release of queries by directions of `private`."""
        return PrivatePCARelease(self.make().fit(private))


_PCA = {"n_components": 8, "n_sweeps": 2, **UNSOUND}

BASELINES = (
    MechanismEntry(Cells, "this library; Warner 1965", "randomized"),
    MechanismEntry(Cells, "this library; Ye, Barg 2018", "subset", {"response": "subset"}),
    MechanismEntry(Unary, "Erlingsson et al. 2014", "symmetric", {"kind": "symmetric"}),
    MechanismEntry(Unary, "Wang et al. 2017", "optimised", {"kind": "optimised"}),
    MechanismEntry(RandomProjection, "Kenthapadi et al. 2012, for a record"),
    MechanismEntry(RandomProjection, "Kenthapadi et al. 2012", "as published", {"as_published": True, **UNSOUND}),
    MechanismEntry(VonMisesFisher, "Weggenmann, Kerschbaum 2021"),
    MechanismEntry(DPdSNE, "Saha et al. 2021", parameters={"n_anchors": 60}),
    *(
        PcaEntry(PrivatePCA, source, method, {"method": method, **_PCA})
        for method, source in (
            ("gaussian", "Dwork et al. 2014"),
            ("bingham", "Chaudhuri, Sarwate, Sinha 2013; Kent et al. 2013"),
            ("gibbs", "Chaudhuri, Sarwate, Sinha 2013"),
        )
    ),
    MechanismEntry(RawFeatures, "none"),
    MechanismEntry(PlainManifold, f"{MAIL} 2022"),
    MechanismEntry(PlainTSNE, "van der Maaten, Hinton 2008; openTSNE", needs="openTSNE"),
    MechanismEntry(PlainLDA, "Fisher 1936"),
)
"""All baselines, in the order of ``nearveil mechanisms``."""


def find_mechanism(name: str) -> MechanismEntry:
    """Return a mechanism of the library, or a baseline, by its name."""
    entries = {entry.name: entry for entry in (*REGISTRY, *BASELINES)}
    if name not in entries:
        raise ValueError(f"name must be one of {', '.join(entries)}")
    return entries[name]
