"""A retriever for LangChain: documents nearest to a private text. Needs the extra ``langchain``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.config import run_in_executor
from pydantic import ConfigDict

if TYPE_CHECKING:
    from nearveil.service import Nearest

__all__ = ["NearveilRetriever"]


class NearveilRetriever(BaseRetriever):
    """Finds documents of an open gallery privately: the text and its vector stay here, a server sees one message.

    Every call is one question: it pays `epsilon` from the client's account. How often a chain or an agent asks is seen
    by the server; where that depends on the private text, no guarantee covers it.

    Parameters
    ----------
    client : nearveil.Client
        Of a gallery whose vectors were made by the same `embed`; it must offer metadata for texts to come back.
    embed : Embeddings or callable
        What makes a vector of a text: an object of LangChain, or any function.
    k : int, default=4
    epsilon : float, default=4.0
        Of each question; 0 to search a copy at home.
    gallery : str, optional
        Needed where the server has several.
    where : mapping or callable, optional
        As of :meth:`nearveil.Client.nearest`: applied here, after the answer.
    text_key : str, default="text"
        The entry of an item's metadata that is its text. Items without it have their names as texts.

    Examples
    --------
    ``docs/howto/vectors.md`` indexes sentences and asks for them.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: Any
    embed: Embeddings | Callable[[str], Any]
    k: int = 4
    epsilon: float = 4.0
    gallery: str | None = None
    where: Any = None
    text_key: str = "text"

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        del run_manager  # callbacks are LangChain's own affair: nothing private goes to them from here
        row = self.embed.embed_query(query) if isinstance(self.embed, Embeddings) else self.embed(query)
        found: Nearest = self.client.nearest(
            row, self.k if k is None else k, self.epsilon, gallery=self.gallery, where=self.where
        )
        return [_make_document(match, self.text_key) for match in found.matches]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return await run_in_executor(None, self._get_relevant_documents, query, run_manager=run_manager.get_sync(), k=k)


def _make_document(match: Any, text_key: str) -> Document:
    """Return a match as a document; its similarity stands beside its metadata."""
    metadata = {name: value for name, value in match.metadata.items() if name != text_key}
    text = match.metadata.get(text_key, match.name)
    return Document(
        page_content=text if isinstance(text, str) else match.name,
        metadata={**metadata, "similarity": match.similarity},
        id=match.external_id,
    )
