"""A small protected gallery: three directions, a class around each, and public images around the same."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.gallery import Index, Item
from nearveil.ledger import Ledger
from nearveil.server.protected import ProtectedGallery

CLASSES = ("benign", "malignant", "none")
DIMENSION = 6
TERMS: dict[str, Any] = {"classes": CLASSES, "epsilon": 30.0, "delta": 1e-6, "publications": 3}
PATIENT = "Jane Doe 771234"


def rows(n: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features around three directions, and which."""
    rng = np.random.default_rng(seed)
    which = np.arange(n) % 3
    found = np.eye(DIMENSION)[which] + 0.15 * rng.standard_normal((n, DIMENSION))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32), which


def make(place: Path, *, n_private: int = 240) -> Path:
    """Make both indexes in a folder."""
    features, which = rows(n_private, 0)
    with Index.create(place / "private", dimension=DIMENSION, extractor="toy") as private:
        records = (
            Item(row, f"{CLASSES[one]}/{PATIENT} {n}.png", original=PATIENT.encode())
            for n, (row, one) in enumerate(zip(features, which, strict=True))
        )
        private.add(records, row_exact=True)
        if n_private > 3:
            private.publish(4.0, 0.5, n_sets=3, reach=0.0)  # by mistake: it must never be served
    with Index.create(place / "public", dimension=DIMENSION, extractor="toy") as public:
        public.add(Item(row, f"public {n}") for n, row in enumerate(rows(60, 1)[0]))
    return place


def copied(made: Path, place: Path) -> Path:
    """Copy both indexes, and what lies beside them, so that a test may change them."""
    return Path(shutil.copytree(made, place / "gallery"))


def gallery(place: Path, ledger: Ledger | Path | None = None, **changed: Any) -> ProtectedGallery:
    """Open the gallery of a folder, with its ledger beside it."""
    private, public = Index.open(place / "private"), Index.open(place / "public")
    given = {**TERMS, "ledger": place / "ledger.db" if ledger is None else ledger, "account": "scans"} | changed
    return ProtectedGallery(private, public, "scans", **given)


def published(place: Path, **changed: Any) -> ProtectedGallery:
    """Open the gallery of a folder, and publish its model."""
    found = gallery(place, **changed)
    found.publish()
    return found


def debits(found: ProtectedGallery) -> int:
    """Return how often the account has paid."""
    return 0 if found.account is None else sum(entry.kind == "debit" for entry in found.account.history())
