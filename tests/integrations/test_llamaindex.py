"""The retriever for LlamaIndex works in LlamaIndex's own engines, and asks as a client does."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import MockEmbedding, PromptTemplate
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, QueryBundle

from nearveil import Client, Index
from nearveil.integrations.llamaindex import NearveilRetriever
from nearveil.ledger import Ledger, OverBudgetError

ROWS = np.random.default_rng(0).standard_normal((60, 8))


class Embedding(BaseEmbedding):
    """The text is the number of a row."""

    def _get_query_embedding(self, query: str) -> list[float]:
        return [float(value) for value in ROWS[int(query)]]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_query_embedding(text)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    place = tmp_path_factory.mktemp("texts")
    with Index.create(place / "texts", dimension=8) as index:
        texts = [{"text": f"sentence {n}", "even": n % 2 == 0} for n in range(60)]
        index.add_table(ROWS, ids=[f"s{n}" for n in range(60)], metadata=texts)
        index.publish(4.0, 0.2, n_sets=4, reach=0.0)
    with Ledger(place / "budget.db") as ledger:
        terms: dict[str, Any] = {"owner": "me", "protects": "query", "unit": "text", "relation": "replace"}
        account = ledger.open_account("me", epsilon=8.0, delta=0.0, **terms)
        with Client(place / "texts", account=account) as found:
            yield found


@pytest.mark.parametrize("embed", [Embedding(), lambda text: ROWS[int(text)]], ids=["embedding", "function"])
def test_nodes_hold_text_id_scores_and_metadata(client: Client, embed: Any) -> None:
    retriever: BaseRetriever = NearveilRetriever(client, embed, k=3, where={"even": True})
    nodes = retriever.retrieve("4")
    assert [node.text for node in nodes[:1]] == ["sentence 4"]
    assert nodes == asyncio.run(retriever.aretrieve("4"))
    assert len(nodes) == 3
    for node in nodes:
        assert node.node.node_id.startswith("s")
        assert node.metadata["even"] is True
        assert node.score == pytest.approx((1 + node.metadata["similarity"]) / 2)
    shown = nodes[0].node.get_content(MetadataMode.LLM)
    assert "even" in shown
    assert "similarity" not in shown


def test_a_bundle_with_an_embedding_uses_it(client: Client) -> None:
    retriever = NearveilRetriever(client, MockEmbedding(8), k=1)
    found = retriever.retrieve(QueryBundle("anything", embedding=ROWS[7].tolist()))
    assert [node.node.node_id for node in found] == ["s7"]


def test_query_engines_postprocessors_and_callbacks_work(client: Client) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    retriever = NearveilRetriever(client, Embedding(), k=5, callback_manager=CallbackManager([debug]))
    engine = RetrieverQueryEngine.from_args(
        retriever,
        llm=MockLLM(),
        node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.99)],
        text_qa_template=PromptTemplate("{context_str} {query_str}"),
    )
    response = engine.query("9")
    assert [node.node.node_id for node in response.source_nodes] == ["s9"]
    assert "sentence 9" in str(response)
    assert debug.get_event_pairs()


def test_only_an_epsilon_pays_and_the_account_is_the_cap(client: Client) -> None:
    NearveilRetriever(client, Embedding()).retrieve("1")
    assert client.balance().left == 8
    paid = NearveilRetriever(client, Embedding(), epsilon=4.0)
    paid.retrieve("1")
    paid.retrieve("1")
    assert client.balance().left == 0
    with pytest.raises(OverBudgetError):
        paid.retrieve("2")


def test_what_is_no_embedding_is_an_error(client: Client) -> None:
    with pytest.raises(ValueError, match="embed must be a function of a text, or an embedding"):
        NearveilRetriever(client, "a model")  # type: ignore[arg-type]


def test_items_keep_numbers_where_the_gallery_has_no_ids(tmp_path: Path) -> None:
    with Index.create(tmp_path / "rows", dimension=8) as index:
        index.add_table(ROWS)
        index.publish(4.0, 0.2, n_sets=4, reach=0.0)
        with Client(index) as local:
            nodes = NearveilRetriever(local, lambda text: ROWS[int(text)], k=2).retrieve("3")
    assert len({node.node.node_id for node in nodes}) == 2
