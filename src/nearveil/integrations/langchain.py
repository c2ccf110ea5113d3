"""A retriever for LangChain: documents nearest to a private text. Needs the extra ``langchain``."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from pydantic import ConfigDict, Field, field_validator

from nearveil.client.errors import UnansweredError
from nearveil.client.questions import Method
from nearveil.integrations.passages import make_passage
from nearveil.lazy import require_extra

with require_extra("langchain"):
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables.config import run_in_executor

if TYPE_CHECKING:
    from nearveil.client import Nearest

__all__ = ["NearveilRetriever"]

_MAX_UNANSWERED = 1000  # queries to remember

# Run, identity of the client, text, epsilon, gallery.
_Question: TypeAlias = tuple[UUID, int, str, float | None, str | None]


class NearveilRetriever(BaseRetriever):
    """Retrieves documents of an open gallery privately: text and vector stay local.

    Documents are the nearest by the gallery's metric. Their metadata has the value as "similarity" (times -1 for a
    distance, which is also there as "distance"), and as "relevance" a number from 0 to 1 in the same order.

    Without an epsilon nothing is paid: a local index or copy is searched, or a sealed query is sent. With an epsilon
    the server sees one message, and every query debits that epsilon from the client's account.
    ``retriever.with_retry()`` debits once for all attempts, which send the same message. A chain that is retried as a
    whole pays for each attempt, so retry the retriever. Unrelated calls never share a message: that would reveal that
    their texts are equal. The server sees the number of queries of a chain or an agent; if it depends on the private
    text, no guarantee covers that.

    Parameters
    ----------
    client : nearveil.Client
        A client of a gallery of vectors from the same `embed`. It must offer metadata, or no texts are returned.
    embed : object with `embed_query`, or callable
        Converts a text to a vector: LangChain embeddings, or any function.
    k : int, default=4
    by : {"auto", "message", "home", "sealed"}, default="auto"
        The search method, as in :meth:`nearveil.Client.nearest`.
    epsilon : float, optional
        Cost of each query. Without it only free ways are used, or an error names the ways and their prices.
    gallery : str, optional
        Required if the server has several.
    where : mapping or callable, optional
        Metadata filter, as in :meth:`nearveil.Client.nearest`: applied locally, after the answer.
    text_key : str, default="text"
        Metadata key of the text. The name is the text of items without it.

    Examples
    --------
    See ``docs/howto/language-models.md``, from a table to an answer.
    """

    # A misspelt `epsilon` must not use the default, and errors must not quote a private filter.
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", hide_input_in_errors=True)

    client: Any
    embed: Any
    k: int = 4
    by: Method = "auto"
    epsilon: float | None = None
    gallery: str | None = None
    where: Any = Field(default=None, repr=False)  # private: chains and tracers show `repr` of their parts
    text_key: str = "text"

    @field_validator("embed")
    @classmethod
    def _check_embed(cls, embed: Any) -> Any:
        if not callable(getattr(embed, "embed_query", embed)):
            raise ValueError("embed must be a function of a text, or an object with a method embed_query")
        return embed

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        with self._choose_key(query, run_manager.parent_run_id) as key:
            return self._search(query, k, key)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        with self._choose_key(query, run_manager.parent_run_id) as key:
            return await run_in_executor(None, self._search, query, k, key)

    def _search(self, query: str, k: int | None, key: str | None) -> list[Document]:
        row = getattr(self.embed, "embed_query", self.embed)(query)
        result: Nearest = self.client.nearest(
            row, self.k if k is None else k, self.epsilon, gallery=self.gallery, where=self.where, by=self.by, key=key
        )
        passages = (make_passage(match, result.metric, self.text_key) for match in result.matches)
        return [Document(page_content=text, metadata=metadata, id=name) for text, name, metadata in passages]

    @contextmanager
    def _choose_key(self, query: str, run: UUID | None) -> Iterator[str | None]:
        """Yield a new key, or that of an earlier attempt of the same run without an answer; None if nothing is paid.

        `run`: the parent run, if any; ``with_retry`` uses one for all attempts. Other runs never reuse a key: a server
        that withholds an answer would learn that two texts are equal.
        """
        if not self.epsilon:
            yield None
            return
        from nearveil.ledger import KeyConflictError, KeySpentError, new_key

        if run is None:
            yield new_key()
            return
        question = (run, id(self.client), query, self.epsilon, self.gallery)
        key = _UNANSWERED.take(question) or new_key()
        try:
            yield key
        except (KeySpentError, KeyConflictError):  # the key can no longer be used
            raise
        except BaseException as error:
            if not (isinstance(error, UnansweredError) and not error.again):
                _UNANSWERED.add(question, key)
            raise


class _UnansweredKeys:
    """Idempotency keys of queries that may be paid for and have no answer; the oldest are evicted first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: deque[tuple[_Question, str]] = deque(maxlen=_MAX_UNANSWERED)

    def add(self, question: _Question, key: str) -> None:
        with self._lock:
            self._keys.append((question, key))

    def take(self, question: _Question) -> str | None:
        """Remove and return a key of a query; concurrent calls never get the same."""
        with self._lock:
            entry = next((entry for entry in self._keys if entry[0] == question), None)
            if entry is None:
                return None
            self._keys.remove(entry)
            return entry[1]


# Not in the retriever: LangChain copies retrievers with configurable fields on every call.
_UNANSWERED = _UnansweredKeys()
