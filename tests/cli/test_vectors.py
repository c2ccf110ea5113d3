"""``nearveil index`` and ``nearveil query`` of vectors that a user brings, from every kind of file."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil.cli._options import ClusterOptions
from nearveil.cluster import Cluster
from nearveil.gallery import Index
from nearveil.ledger import Ledger
from tests.cli.galleries import fine, refused, told

COUNT = 60
ROWS = np.random.default_rng(3).standard_normal((COUNT, 8)).astype(np.float32)
IDS = [f"doc-{number}" for number in range(COUNT)]
TERMS = ("--sets", 3, "--candidates", 0.2, "--reach", 0)


def write(kind: str, rows: Any = ROWS, ids: list[str] = IDS, name: str = "emb") -> Path:
    place = Path(f"{name}.{kind}")
    text = [f"text of {one}" for one in ids]
    if kind == "npy":
        np.save(place, rows)
    elif kind == "npz":
        np.savez(place, vectors=rows, key=np.array(ids), text=np.array(text))
    else:
        pa, csv, parquet = (pytest.importorskip(f"pyarrow{one}") for one in ("", ".csv", ".parquet"))
        columns = {f"x{n}": rows[:, n] for n in range(rows.shape[1])} if kind == "csv" else {"v": rows.tolist()}
        table = pa.table({"key": ids, "text": text, **columns})
        (csv.write_csv if kind == "csv" else parquet.write_table)(table, place)
    return place


def stored(*ids: str) -> list[tuple[str | None, Any]]:
    with Index.open("texts") as index:
        return [(item.external_id, item.metadata) for item in index.items(list(ids))]


@pytest.mark.parametrize("kind", ["npz", "parquet", "csv"])
def test_a_file_becomes_a_gallery_with_the_users_own_ids(kind: str) -> None:
    words = ("index", write(kind), "--into", "texts", "--ids", "key", "--metadata", "text", *TERMS)
    found = told(*words)
    assert (found["vectors"], found["added"], found["deleted"], found["dimension"]) == (COUNT, COUNT, 0, 8)
    assert (found["sets"], found["candidates"], found["map_learned"]) == (3, 12, True)
    assert stored("doc-7") == [("doc-7", {"text": "text of doc-7"})]
    with Index.open("texts") as index:
        unit = ROWS[7] / np.linalg.norm(ROWS[7])
        np.testing.assert_allclose(index.features(["doc-7"])[0], unit, atol=1e-6)
    assert found["reach"] < 1
    assert "of the vectors and never the others; --reach 1 includes all" in fine(*words)
    again = told(*words)
    assert (again["added"], again["map_learned"], again["revision"]) == (0, False, found["revision"])
    assert "Nothing new: the index is unchanged." in fine(*words)


def test_rows_alone_are_called_by_their_file_and_number() -> None:
    assert "60 (60 added, 0 deleted), 8 dimensions" in fine("index", write("npy"), "--into", "texts", *TERMS)
    assert stored("emb.npy:59") == [("emb.npy:59", {})]


def test_vectors_are_replaced_and_deleted_by_their_ids() -> None:
    common = ("--into", "texts")
    first = told("index", write("npz"), *common, "--ids", "key", "--metadata", "text", *TERMS)
    changed = ROWS[:2].copy()
    changed[0] = -changed[0]
    found = told("index", write("npz", changed, ["doc-0", "new"]), *common, "--ids", "key", "--metadata", "text")
    assert (found["vectors"], found["map_learned"]) == (COUNT + 1, True)
    assert (found["sets"], found["epsilon"]) == (first["sets"], first["epsilon"])
    with Index.open("texts") as index:
        np.testing.assert_allclose(index.features(["doc-0"])[0], -ROWS[0] / np.linalg.norm(ROWS[0]), atol=1e-6)
    gone = told("index", *common, "--delete", "new", "--delete", "doc-1")
    assert (gone["vectors"], gone["added"], gone["deleted"]) == (COUNT - 1, 0, 2)
    said = refused("index", *common, "--delete", "doc-2", "--delete", "nobody")
    assert "--delete: the index does not hold nobody; nothing was changed" in said
    assert stored("doc-2") == [("doc-2", {"text": "text of doc-2"})]


def test_metadata_that_changes_replaces_items_and_stays_if_it_is_not_given() -> None:
    words = ("index", write("npz"), "--into", "texts", "--ids", "key")
    fine(*words, "--metadata", "text", *TERMS)
    kept = told(*words)
    assert (kept["added"], kept["replaced"], kept["deleted"]) == (0, 0, 0)
    assert stored("doc-7") == [("doc-7", {"text": "text of doc-7"})]
    assert "60 (0 added, 60 replaced, 0 deleted)" in fine(*words, "--metadata", "key")
    assert stored("doc-7") == [("doc-7", {"key": "doc-7"})]


def test_a_query_shows_texts_metadata_ids_and_the_metric() -> None:
    with Index.create("texts", dimension=8, metric="euclidean") as index:
        details = [{"text": f"a  text of {n}", "lang": "en", "long": "word " * 200} for n in range(COUNT)]
        index.add_table(ROWS, [f"doc-{n}" for n in range(COUNT)], metadata=details)
        index.publish(4.0)
    np.save("q.npy", ROWS[7] + 0.01)
    distances = np.linalg.norm(ROWS - ROWS[7] - 0.01, axis=1)
    found, text = told("query", "q.npy", "--index", "texts", "-k", 3), fine("query", "q.npy", "--index", "texts")
    best = np.argsort(distances)[:3]
    assert [one["external_id"] for one in found["found"]] == [f"doc-{n}" for n in best]
    assert [one["metadata"] for one in found["found"]] == [details[n] for n in best]
    assert [one["distance"] for one in found["found"]] == pytest.approx(distances[best], abs=1e-4)
    assert (found["metric"], found["code_recall"]) == ("euclidean", 1.0)
    assert "compared with your query by the Euclidean distance, exactly" in text
    assert re.search(r"doc-7 +│ +0\.028 │ a text of 7", text)
    assert "lang: en, " in text
    assert "[...]" in text


def test_a_filter_compares_values_as_json_or_text() -> None:
    with Index.create("texts", dimension=8) as index:
        details = [{"year": 2000 + n % 2, "lang": "en" if n < 10 else "fr"} for n in range(COUNT)]
        index.add_table(ROWS, [f"doc-{n}" for n in range(COUNT)], metadata=details)
        index.publish(4.0)
    np.save("q.npy", ROWS[7])
    words = ("query", "q.npy", "--index", "texts", "-k", COUNT, "--where", "year=2001")
    assert len(told(*words)["found"]) == COUNT // 2
    found = told(*words, "--where", "lang=en")["found"]
    assert sorted(match["external_id"] for match in found) == [f"doc-{n}" for n in range(1, 10, 2)]
    for wrong in ("lang", "=en", "year=2001"):
        assert f"--where: '{wrong}' must be KEY=VALUE" in refused(*words, "--where", wrong)
    assert "--where" in refused(*words[:4], "--by", "sealed", "--where", "lang=en")


def test_what_cannot_be_indexed_is_said_and_makes_nothing() -> None:
    bad = ROWS.copy()
    bad[4] = 0
    empty = Path("empty.npy")
    empty.touch()
    for words, said in (
        ((write("npz"), "--ids", "nothing"), "nothing"),
        ((write("npy", bad, name="zeros"),), "must not be all zeros"),
        ((write("npy", np.where(np.arange(COUNT)[:, None] == 5, np.nan, ROWS), name="nan"),), "NaN"),
        ((empty,), "empty.npy"),
        ((Path("none.npy"),), "none.npy"),
        (("--delete", "doc-1"), "there is no index at"),
        (("--sealed",), "there is no index at"),
        ((), "name a folder or a file"),
        ((write("npy"), "--private"), "only for images"),
    ):
        assert said in refused("index", *words, "--into", "texts")
        assert not Path("texts").exists()
    fine("index", write("npy"), "--into", "texts", *TERMS)
    assert "dimension" in refused("index", write("npy", ROWS[:, :5]), "--into", "texts")


def test_all_that_sealed_questions_need_is_made_on_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    stages: list[str] = []

    class Watched(Cluster):
        def map(self, *given: Any, stage: str, **options: Any) -> Iterator[Any]:
            stages.append(stage)
            return super().map(*given, stage=stage, **options)

    monkeypatch.setattr(ClusterOptions, "connect", lambda _: nullcontext(Watched()))
    fine("index", write("npy"), "--into", "texts", "--sealed", *TERMS)
    assert {"reading", "making codes", "making hints"} <= set(stages)


def test_the_sealed_index_of_an_existing_index_is_built() -> None:
    pytest.importorskip("cryptography")
    fine("index", write("npy"), "--into", "texts", *TERMS)
    with Index.open("texts") as index:
        revision = index.revision
    fine("index", "--into", "texts", "--sealed")
    with Index.open("texts") as index:
        assert index.revision == revision
        assert index.sealed_file is not None
        assert index.sealed_file.exists()


def test_a_vector_is_asked_for_and_paid_once(here: Path) -> None:
    fine("index", write("npz"), "--into", "texts", "--ids", "key", *TERMS)
    np.save("q.npy", 3 * ROWS[7])  # its norm plays no part
    words = ("query", "q.npy", "--index", "texts", "--ledger", "budget.db", "--epsilon", 40)
    found = told(*words)
    assert found["found"][0]["name"] == "doc-7"
    assert found["found"][0]["similarity"] == pytest.approx(1, abs=1e-3)
    assert found["paid"] == 40
    again = told(*words, "--key", found["key"])
    assert (again["found"], again["paid"]) == (found["found"], 0)
    np.save("row.npy", ROWS[7][None])
    other = told("query", "row.npy", "--epsilon", 4, *words[2:])["found"]
    assert [one["id"] for one in other] == [one["id"] for one in found["found"]]

    def spent() -> float:
        with Ledger("budget.db", read_only=True) as book:
            return sum(account.balance().spent for account in book.accounts())

    before = spent()
    assert before == 80
    for name, row, said in (
        ("zeros", np.zeros(8), "all zeros"),
        ("nan", np.full(8, np.nan), "finite"),
        ("short", ROWS[7][:5], "8"),
        ("many", ROWS, "holds 60 rows, and a query needs one"),
    ):
        np.save(f"{name}.npy", row)
        assert said in refused("query", f"{name}.npy", "--epsilon", 4, *words[2:])
    assert "--sheet: it shows the answer to a message about an image" in refused(*words, "--sheet", "found.png")
    assert spent() == before


def test_a_key_is_good_until_the_map_changes() -> None:
    words = ("index", write("npz"), "--into", "texts", "--ids", "key", *TERMS)
    fine(*words)
    np.save("q.npy", ROWS[7])
    asked = ("query", "q.npy", "--epsilon", 4, "--index", "texts", "--ledger", "budget.db", "--key", "my question")
    first = told(*asked)
    fine(*words)  # nothing has changed
    again = told(*asked)
    assert (again["found"], again["paid"], again["left"]) == (first["found"], 0, first["left"])
    fine("index", "--into", "texts", "--delete", "doc-1")
    said = refused(*asked)
    assert "the gallery has another map than when this key was paid for" in said
    assert (
        told(*asked[:-1], "another question")["left"] == first["left"] - first["paid"]
    )  # it paid, the refusal did not


def test_a_gallery_for_a_mechanism_of_the_papers_is_made_and_queried() -> None:
    file = write("npz")
    words = ("index", file, "--into", "texts", "--ids", "key", "--metadata", "text", "--candidates", 0.2)
    made = told(*words, "--mechanism", "privunit", "--epsilon", 8)
    assert (made["mechanism"], made["sets"], made["candidates"]) == ("privunit", None, 12)
    assert "60 public rows for privunit" in fine("index", "--into", "texts", "--mechanism", "privunit")
    np.save("q.npy", ROWS[7])
    query = ("query", "q.npy", "--index", "texts", "--epsilon", 8)
    found, text = told(*query), fine(*query)
    assert (found["paid"], found["candidates"], found["server_saw"]["mechanism"]) == (8.0, 12, "privunit")
    assert "The server saw a message of privunit, ranked its gallery by it and sent 12 items" in text
    assert "at epsilon 8: pay that" in refused(*query[:-1], 4)
    published = "privatemail (as published 2022)"
    assert "add --allow-unsound" in refused("index", "--into", "texts", "--mechanism", published)
    fine("index", "--into", "texts", "--mechanism", published, "--labels", "text", "--allow-unsound")
    assert "--allow-unsound" in refused(*query)
    told(*query, "--label", "text of doc-7", "--allow-unsound")
    assert told("index", "--into", "texts", "--mechanism", "covers", "--sets", 5)["sets"] == 5
    worth = fine("plan", "--items", 1000, "--epsilon", 4, "--mechanism", "privunit")
    assert "privunit finds 39% of the 8 nearest" in " ".join(worth.split())
