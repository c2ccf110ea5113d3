"""Models and local copies as a version stored them: how they are made, and what they must answer."""

import asyncio
import zipfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from nearveil import Client, PrivateDiscriminant
from nearveil.gallery import Index
from nearveil.server import OpenGallery, Settings, TokenStore, create_app

URL = "https://texts.example:8321"
ROWS = np.random.default_rng(7).standard_normal((40, 6)).astype(np.float32)
_QUERY = ROWS[0] + 0.1


def write_copy(path: Path, folder: Path) -> None:
    """Write a local copy of a small gallery with metadata to a zip file."""
    with Index.create(folder / "texts", dimension=ROWS.shape[1]) as index:
        index.add_table(
            ROWS, ids=[f"doc-{n}" for n in range(len(ROWS))], metadata=[{"even": n % 2 == 0} for n in range(len(ROWS))]
        )
        index.publish(4.0, 0.1, n_sets=4, reach=0.0)
    with Index.open(folder / "texts") as index, TokenStore(folder / "copy-tokens.db") as tokens:
        settings = Settings(tokens=str(folder / "copy-tokens.db"), trusted_hosts=("*",), rate=None)
        gallery = OpenGallery(index, "texts", offers=("names", "metadata", "codes"))
        app = create_app([gallery], tokens, settings)
        transport: Any = httpx.ASGITransport(app)
        with Client(URL, tokens.create("ann")[1], home=folder / "home", transport=transport) as client:
            client.sync()
        asyncio.run(asyncio.to_thread(app.state.nearveil.close))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((folder / "home").rglob("*")):
            archive.write(file, file.relative_to(folder / "home"))


def search_copy(path: Path, folder: Path) -> list[list[Any]]:
    """Return the nearest items of a local copy: external id, metadata and rounded similarity."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "home")
    with Client(URL, "unused", home=folder / "home") as client:
        matches = [
            *client.nearest(_QUERY, 5, epsilon=0, by="home").matches,
            *client.nearest(_QUERY, 3, epsilon=0, by="home", where={"even": False}).matches,
        ]
    return [[match.external_id, dict(match.metadata), round(match.similarity, 4)] for match in matches]


def write_discriminant(path: Path) -> None:
    """Write a published discriminant."""
    labels = np.where(ROWS[:, 0] > 0, "right", "left")
    public = np.random.default_rng(8).standard_normal(ROWS.shape)
    model = PrivateDiscriminant(epsilon=50.0, delta=1e-6, classes=["left", "right"]).fit(ROWS, labels, public=public)
    model.export().save(path)


def describe_discriminant(model: Any) -> dict[str, Any]:
    """Return what a published discriminant predicts and promises."""
    return {
        "labels": model.predict(ROWS).tolist(),
        "probabilities": np.round(model.predict_proba(ROWS), 6).tolist(),
        "guarantee": [model.guarantee.epsilon, model.guarantee.delta],
    }
