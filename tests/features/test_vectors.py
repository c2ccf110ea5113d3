"""Vectors of files: what is read, and what is wrong with a file, in words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil.features.vectors import VectorFile, read_vector

ROWS = np.arange(12.0, dtype=np.float32).reshape(4, 3)
IDS = ["a", "b", "c", "d"]


def write(folder: Path, kind: str) -> Path:
    place = folder / f"emb.{kind}"
    if kind == "npy":
        np.save(place, ROWS)
    elif kind == "npz":
        np.savez(place, vectors=ROWS, ids=np.array(IDS), text=np.array(IDS))
    else:
        pa, csv, parquet = (pytest.importorskip(f"pyarrow{one}") for one in ("", ".csv", ".parquet"))
        columns = {f"x{n}": ROWS[:, n] for n in range(3)} if kind == "csv" else {"v": ROWS.tolist()}
        table = pa.table({"ids": IDS, "text": IDS, **columns})
        (csv.write_csv if kind == "csv" else parquet.write_table)(table, place)
    return place


@pytest.mark.parametrize("kind", ["npz", "parquet", "csv"])
def test_columns_of_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    found = VectorFile(write(tmp_path, kind), ids="ids", names="text", metadata=("text",)).read()
    assert found.rows.tolist() == ROWS.tolist()
    assert (found.ids, found.names) == (IDS, IDS)
    assert found.metadata == [{"text": one} for one in IDS]


def test_rows_alone(tmp_path: Path) -> None:
    found = VectorFile(write(tmp_path, "npy")).read()
    assert found.rows.tolist() == ROWS.tolist()
    assert found.ids is found.names is found.metadata is None
    np.save(tmp_path / "one.npy", ROWS[1])
    assert read_vector(tmp_path / "one.npy").tolist() == ROWS[1].tolist()
    with pytest.raises(ValueError, match="holds 4 rows"):
        read_vector(tmp_path / "emb.npy")


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("nowhere.npy", None, {}, "there is no file at"),
        ("a.txt", b"text", {}, "must end in .npy"),
        ("a.npy", b"text", {}, "cannot be read"),
        ("a.npy", b"", {}, "cannot be read"),
        ("a.npz", b"text", {}, "cannot be read"),
        ("emb.npz", b"", {"ids": "id"}, "ids: there is no 'id' in emb.npz; there are vectors, ids, text"),
        ("emb.npz", b"", {"vectors": "ids"}, "vectors must be numbers"),
    ],
)
def test_what_is_wrong_with_a_file(
    tmp_path: Path, name: str, content: bytes | None, options: dict[str, Any], words: str
) -> None:
    if name.startswith("emb"):
        write(tmp_path, "npz")
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        VectorFile(tmp_path / name, **options).read()
