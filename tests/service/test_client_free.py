"""Without an epsilon nothing is paid: an index or a copy is searched, a sealed question sent, or the ways are named."""

import asyncio
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from nearveil import AsyncClient, Client
from nearveil.client.errors import QuestionError
from nearveil.gallery import Index
from nearveil.gallery._directory import DirectoryIndex
from nearveil.ledger import Debit, Ledger
from nearveil.server.galleries import OpenGallery
from tests.service.asking import COUNT, DIMENSION, QUERIES, make_index, new_account, scene

pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("made") / "birds")


def endpoints(wire: Any) -> list[str]:
    return [url.rpartition("/")[2] for _, url, _, _ in wire.requests]


def test_a_gallery_without_a_free_way_names_the_price_and_is_not_paid(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, offers=("names",)) as here:
        client, wire = here.client(home=tmp_path / "home")
        for epsilon in (None, 0):
            with pytest.raises(
                QuestionError, match=r"no free way.*epsilon=4, for example, costs 4, from the account 'me'"
            ):
                client.nearest(QUERIES[0], epsilon=epsilon)
        with pytest.raises(QuestionError, match="no free way"):
            client.nearest_many(QUERIES[:3])
        nobody, _ = here.client(account=None)
        with pytest.raises(QuestionError, match="costs 4, `nearveil budget create"):
            nobody.nearest(QUERIES[0])
        assert (here.paid, wire.posts, endpoints(wire)) == (0, [], ["galleries"])  # the list, for any query


def test_a_copy_is_searched_once_it_is_here(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, offers=("names", "codes")) as here:
        client, wire = here.client(home=tmp_path / "home")
        with pytest.raises(QuestionError, match=r"no local copy of birds: client.sync\(\).*which has 100 left"):
            client.nearest(QUERIES[0])
        client.sync()
        before = len(wire.requests)
        results = [client.nearest(QUERIES[0]), *client.nearest_many(QUERIES[:2])]
        assert {(result.way, result.paid, result.remaining) for result in results} == {("home", 0.0, None)}
        assert (here.paid, len(wire.requests)) == (0, before)


def test_a_sealed_question_is_sent_where_there_is_no_copy(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with scene(made, tmp_path, offers=("names", "sealed")) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, wire = here.client(home=tmp_path / "home")
        result = client.nearest(QUERIES[0], 3)
        assert (result.way, result.paid, result.remaining) == ("sealed", 0.0, None)
        questions = [url for _, url, _, _ in wire.posts if url.endswith("/sealed")]
        assert (here.paid, len(questions)) == (0, 2)
        with pytest.raises(QuestionError, match=r"client.sync\(\), or pass an epsilon"):
            client.nearest(QUERIES[0], where={"colour": "red"})


def test_a_message_says_what_it_cost_and_what_is_left(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path) as here:
        client, _ = here.client()
        results = [client.nearest(QUERIES[0], 3, epsilon=4.0, key="mine") for _ in range(2)]
        assert [(one.way, one.paid, one.remaining) for one in results] == [
            ("message", 4.0, 96.0),
            ("message", 0.0, 96.0),
        ]
        assert (client.balance().spent, client.balance().left) == (4.0, 96.0)
        with pytest.raises(QuestionError, match="no account"):
            here.client(account=None)[0].balance()

        class Mute:
            """Pays, and fails to say what is left."""

            def spend(self, *args: Any) -> Debit:
                debit = here.account.spend(*args)
                debit.balance = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
                return debit

        paid = here.client(account=Mute())[0].nearest(QUERIES[0], 3, epsilon=4.0)
        assert (paid.paid, paid.remaining, len(paid.matches)) == (4.0, None, 3)


def test_a_local_index_is_searched_itself(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with new_account(tmp_path / "budget.db") as account, Client(made, account=account) as client:
        assert client.index is not None
        rows = client.index.features(client.index.ids())
        for query in QUERIES[:5]:
            result = client.nearest(query, 5, originals=query is QUERIES[0])
            scores = rows @ query
            assert [match.id for match in result.matches] == np.argsort(-scores)[:5].tolist()
            assert np.allclose([match.similarity for match in result.matches], np.sort(-scores)[:5] * -1, atol=1e-6)
            assert (result.way, result.paid, result.n_candidates) == ("index", 0.0, COUNT)
            assert result.matches[0].image
        assert "exactly" in result.quality_summary
        assert (result.guarantee.epsilon, result.guarantee.sound) == (0.0, True)
        assert account.balance().spent == 0
        with pytest.raises(QuestionError, match=f"at most {COUNT}, the items of the index"):
            client.nearest(QUERIES[0], COUNT + 1)
        with pytest.raises(QuestionError, match="none named 'cars'"):
            client.nearest(QUERIES[0], gallery="cars")
        with pytest.raises(QuestionError, match="query: its feature must not be all zeros"):
            client.nearest(np.zeros(DIMENSION))
    assert not (tmp_path / "data").exists()  # no copy is made


def test_an_index_without_a_map_is_searched_and_filtered(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((400, DIMENSION))
    with Index.create(tmp_path / "texts", dimension=DIMENSION) as index, Client(index) as client:
        with pytest.raises(QuestionError, match="empty"):
            client.nearest(rows[0])
        index.add_table(
            rows, ids=[f"doc-{n}" for n in range(400)], metadata=[{"n": n, "last": n == 399} for n in range(400)]
        )
        assert client.nearest(rows[7], 1).matches[0].external_id == "doc-7"
        order = np.argsort(-(rows / np.linalg.norm(rows, axis=1)[:, None]) @ rows[0])
        expected = [int(number) for number in order if number % 3 == 0][:5]
        matches = client.nearest(rows[0], 5, where=lambda match: match.metadata["n"] % 3 == 0).matches
        assert [match.metadata["n"] for match in matches] == expected
        assert [match.id for match in client.nearest(rows[0], 5, where={"last": True}).matches] == [399]
        with pytest.raises(QuestionError, match="no item has 'colour'"):
            client.nearest(rows[0], where={"colour": "red"})


@pytest.mark.parametrize(("metric", "name"), [("dot", "dot product"), ("euclidean", "Euclidean distance")])
def test_every_way_ranks_by_the_metric_and_names_it(
    tmp_path: Path, metric: Literal["dot", "euclidean"], name: str
) -> None:
    pytest.importorskip("cryptography")
    rows = np.random.default_rng(0).standard_normal((60, DIMENSION)) * np.linspace(0.2, 3, 60)[:, None]
    query = np.random.default_rng(1).standard_normal(DIMENSION)
    values = rows @ query if metric == "dot" else np.linalg.norm(rows - query, axis=1)
    order = np.argsort(-values if metric == "dot" else values)
    with Index.create(tmp_path / "texts", dimension=DIMENSION, metric=metric) as index:
        index.add_table(rows)
        recall = index.publish(4.0, 0.1, code_bytes=None).code_recall
        assert recall is not None
        gallery = OpenGallery(index, "texts", offers=("codes", "sealed"))
        account = Ledger(tmp_path / "budget.db").open_account(
            "me", owner="me", protects="query", unit="text", relation="replace", epsilon=40.0, delta=0.0
        )
        with Client(gallery, home=tmp_path / "home", account=account) as client, Client(index) as local:
            assert [info.metric for info in client.galleries()] == [metric]
            home, exact = client.nearest(query), local.nearest(query)
            sealed, paid = client.nearest(query, by="sealed"), client.nearest(query, epsilon=30.0)
    for result in (home, exact, sealed, paid):
        assert result.metric == metric
        assert f" by the {name}" in result.quality_summary
        assert ("10 nearest" in result.quality_summary) == (result.way != "index")
        found = [match.value for match in result.matches]
        assert found == pytest.approx([values[match.id] for match in result.matches], abs=0.02)
        assert [match.distance is None for match in result.matches] == [metric == "dot"] * len(found)
    for result in (home, exact):
        assert [match.id for match in result.matches] == order[:8].tolist()
    assert len(paid.matches) == paid.n_candidates == 6  # fewer than 8 are compared


def test_an_index_behind_a_database_server_is_copied_and_not_searched_there(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL may be on another machine, and would see the query and the chosen items."""
    monkeypatch.setattr(DirectoryIndex, "sealed_file", None)
    monkeypatch.setattr(Index, "search", lambda *_: pytest.fail("the database was asked about the query"))
    with Client(made, home=tmp_path / "home") as client:
        assert client.index is None
        result = client.nearest(QUERIES[0], 5)
    assert (result.way, result.paid, result.n_candidates) == ("home", 0.0, COUNT)


def test_the_asynchronous_client_pays_nothing_either(made: Path, tmp_path: Path) -> None:
    async def ask(account: Any) -> tuple[str, float]:
        async with AsyncClient(made, account=account) as client:
            results = [await client.nearest(QUERIES[0], 3), *await client.nearest_many(QUERIES[:2], 3)]
            assert {result.way for result in results} == {"index"}
            return results[0].way, (await client.balance()).left

    with new_account(tmp_path / "budget.db") as account:
        assert asyncio.run(ask(account)) == ("index", 100.0)


@pytest.mark.parametrize(
    ("where", "url"),
    [
        ("127.0.0.1:8321", "http://127.0.0.1:8321"),
        ("birds.example:8321/", "https://birds.example:8321"),
        ("birds.example", "https://birds.example"),
        ("localhost", "http://localhost"),
    ],
)
def test_a_url_without_a_scheme_is_recognized(where: str, url: str) -> None:
    with pytest.raises(QuestionError, match=f"begins with its scheme: {url}"):
        Client(where, "token")
