"""The retriever for LangChain passes LangChain's own suite, and asks as privately as a client does."""

import asyncio
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("langchain_core")

from langchain_core.embeddings import DeterministicFakeEmbedding

from nearveil import Client
from nearveil.gallery import Index
from nearveil.integrations.langchain import NearveilRetriever
from nearveil.ledger import Ledger

TEXTS = [f"sentence number {number}" for number in range(60)]
PACKAGES = {one.name for one in distributions()}
EMBED = DeterministicFakeEmbedding(size=16)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with Index.create(place / "texts", dimension=16) as index:
            index.add_table(
                EMBED.embed_documents(TEXTS),
                ids=[f"s{number}" for number in range(60)],
                metadata=[{"text": text, "even": number % 2 == 0} for number, text in enumerate(TEXTS)],
            )
            index.publish(4.0, 0.2, n_sets=4, reach=0.0)
        with Ledger(place / "budget.db") as ledger:
            account = ledger.open_account(
                "me", owner="me", protects="query", unit="text", relation="replace", epsilon=500.0, delta=0.0
            )
            with Client(place / "texts", account=account) as found:
                yield found


def test_documents_hold_text_metadata_and_id(client: Client) -> None:
    retriever = NearveilRetriever(client=client, embed=EMBED, k=3, where={"even": True})
    for found in (
        retriever.invoke("a private question"),
        asyncio.run(retriever.ainvoke("a private question")),
        NearveilRetriever(client=client, embed=lambda text: np.array(EMBED.embed_query(text))).invoke("another", k=5),
    ):
        assert found
        for one in found:
            number = int(str(one.id).removeprefix("s"))
            assert one.page_content == TEXTS[number]
            assert set(one.metadata) == {"even", "similarity", "relevance"}
            assert one.metadata["relevance"] == pytest.approx((1 + one.metadata["similarity"]) / 2)
            assert one.metadata["even"] == (number % 2 == 0)
    assert all(one.metadata["even"] for one in retriever.invoke("a private question"))


def test_items_without_the_text_are_warned_of(client: Client) -> None:
    retriever = NearveilRetriever(client=client, embed=EMBED, k=2, text_key="passage")
    with pytest.warns(UserWarning, match="set text_key"):
        documents = retriever.invoke("a private question")
    assert [document.page_content for document in documents] == ["", ""]


@pytest.mark.parametrize("metric", ["dot", "euclidean"])
def test_scores_are_in_the_order_of_the_metric(tmp_path: Path, metric: Literal["dot", "euclidean"]) -> None:
    rows = np.random.default_rng(3).standard_normal((60, 16)) * np.linspace(0.1, 3, 60)[:, None]
    question = np.random.default_rng(4).standard_normal(16)
    with Index.create(tmp_path / "texts", dimension=16, metric=metric) as index:
        index.add_table(rows, ids=[str(number) for number in range(60)])
        index.publish(4.0, 0.2)
        with Client(index) as client:
            found = NearveilRetriever(client=client, embed=lambda _: question, k=60).invoke("a private question")
    products, distances = rows @ question, np.linalg.norm(rows - question, axis=1)
    order = np.argsort(-products if metric == "dot" else distances)
    assert [one.id for one in found] == [str(number) for number in order]
    scores = [one.metadata for one in found]
    relevance = [one["relevance"] for one in scores]
    assert relevance == sorted(relevance, reverse=True)
    assert 0 <= relevance[-1] < relevance[0] <= 1
    if metric == "dot":
        assert [one["similarity"] for one in scores] == pytest.approx(products[order], abs=1e-4)
    else:
        assert [one["distance"] for one in scores] == pytest.approx(distances[order], abs=1e-4)
        assert relevance == pytest.approx(1 / (1 + distances[order]), abs=1e-4)


def test_plugins_that_come_along_do_not_run(pytestconfig: pytest.Config) -> None:
    come = {
        entry.name
        for package in ("langsmith", "pytest-asyncio", "pytest-benchmark", "pytest-codspeed", "pytest-recording",
                        "pytest-socket", "syrupy")
        if package in PACKAGES
        for entry in distribution(package).entry_points.select(group="pytest11")
    }  # fmt: skip
    assert come
    assert [name for name in come if pytestconfig.pluginmanager.has_plugin(name)] == []


try:
    from langchain_tests.integration_tests.retrievers import RetrieversIntegrationTests
except ImportError:

    @pytest.mark.skip(reason="langchain-tests is not installed")
    def test_the_suite_of_langchain() -> None: ...

else:

    class TestSuite(RetrieversIntegrationTests):  # type: ignore[misc, unused-ignore]
        """LangChain's own tests of retrievers."""

        @pytest.fixture(autouse=True)
        def _client(self, client: Client) -> None:
            self.client = client

        @property
        def retriever_constructor(self) -> type[NearveilRetriever]:
            return NearveilRetriever

        @property
        def retriever_constructor_params(self) -> dict[str, Any]:
            return {"client": self.client, "embed": EMBED, "k": 2}

        @property
        def retriever_query_example(self) -> str:
            return "a private question"
