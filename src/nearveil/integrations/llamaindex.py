"""A retriever for LlamaIndex: nodes nearest to a private text. Needs the extra ``llamaindex``."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nearveil.client.questions import Filter, Method
from nearveil.integrations.passages import make_passage
from nearveil.lazy import require_extra

with require_extra("llamaindex"):
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

    from nearveil.client import Client, Nearest

__all__ = ["NearveilRetriever"]


class NearveilRetriever(BaseRetriever):
    """Retrieves nodes of an open gallery privately: text and vector stay local.

    Nodes are the nearest by the gallery's metric. The score of a node is its "relevance", from 0 to 1 in the order of
    the metric; its metadata has the value as "similarity" or "distance". The language model is shown the owner's
    metadata without these scores.

    Without an epsilon nothing is paid: a local index or copy is searched, or a sealed query is sent. With an epsilon
    the server sees one message, and every call debits that epsilon from the client's account. The server sees the
    number of queries; if an engine or agent chooses it by the private text, no guarantee covers that.

    Parameters
    ----------
    client : nearveil.Client
        A client of a gallery of vectors from the same `embed`. It must offer metadata, or no texts are returned.
    embed : LlamaIndex embedding, or callable
        Converts a text to a vector. A query bundle that has an embedding uses that.
    k, by, epsilon, gallery, where
        As in :meth:`nearveil.Client.nearest`; `k` is 4 by default.
    text_key : str, default="text"
        Metadata key of the text. The name is the text of items without it.
    callback_manager : CallbackManager, optional
        LlamaIndex's own. It receives texts and nodes: use one that keeps them on this machine.

    Examples
    --------
    See ``docs/howto/language-models.md``, from a table to an answer.
    """

    def __init__(
        self,
        client: "Client",
        embed: "BaseEmbedding | Callable[[str], Any]",
        k: int = 4,
        *,
        by: Method = "auto",
        epsilon: float | None = None,
        gallery: str | None = None,
        where: Filter | None = None,
        text_key: str = "text",
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not callable(getattr(embed, "get_agg_embedding_from_queries", embed)):
            raise ValueError("embed must be a function of a text, or an embedding of LlamaIndex")
        super().__init__(callback_manager)
        self._client, self._embed, self._text_key = client, embed, text_key
        self._question: dict[str, Any] = {"k": k, "by": by, "epsilon": epsilon, "gallery": gallery, "where": where}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        row = query_bundle.embedding
        if row is None:
            embed: Any = self._embed  # an embedding of LlamaIndex is callable, too: it embeds nodes
            pool = getattr(embed, "get_agg_embedding_from_queries", None)
            row = pool(query_bundle.embedding_strs) if pool else embed(query_bundle.query_str)
        result: Nearest = self._client.nearest(row, **self._question)
        return [self._make_node(match, result) for match in result.matches]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _make_node(self, match: Any, result: "Nearest") -> NodeWithScore:
        text, name, metadata = make_passage(match, result.metric, self._text_key)
        scores = ["similarity", "relevance", "distance"]
        node = TextNode(
            id_=name or f"item {match.id}",
            text=text,
            metadata=metadata,
            excluded_llm_metadata_keys=scores,
            excluded_embed_metadata_keys=scores,
        )
        return NodeWithScore(node=node, score=metadata["relevance"])
