"""A retriever for LangChain: documents nearest to a private text. Needs the extra ``langchain``."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.config import run_in_executor
from pydantic import ConfigDict, Field, field_validator

from nearveil.client.errors import UnansweredError
from nearveil.client.questions import Way
from nearveil.ledger import KeyConflictError, KeySpentError, new_key

if TYPE_CHECKING:
    from nearveil.client import Nearest

__all__ = ["NearveilRetriever"]

_MAX_UNANSWERED = 1000  # questions that are remembered

_Question: TypeAlias = tuple[UUID, int, str, float, str | None]  # run, identity of the client, text, epsilon, gallery


class NearveilRetriever(BaseRetriever):
    """Finds documents of an open gallery privately: the text and its vector stay here, a server sees one message.

    Every answer pays `epsilon` from the client's account. ``retriever.with_retry()`` pays once for all attempts: they
    send the same message. A chain that is retried as a whole pays for each attempt, so retry the retriever. Calls that
    do not belong together never share a message: that would show the server that their texts are equal. How often a
    chain or an agent asks is seen by the server; where that depends on the private text, no guarantee covers it.

    Parameters
    ----------
    client : nearveil.Client
        Of a gallery whose vectors were made by the same `embed`; it must offer metadata for texts to come back.
    embed : object with `embed_query`, or callable
        What makes a vector of a text: embeddings of LangChain, or any function.
    k : int, default=4
    by : {"auto", "message", "home", "sealed"}, default="auto"
        The way to ask, as of :meth:`nearveil.Client.nearest`.
    epsilon : float, optional
        Of each question. By default 0 for "home" and "sealed", which cost nothing, and 4.0 otherwise.
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

    # A misspelt `epsilon` must not be paid for at the default, and errors must not quote a private filter.
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", hide_input_in_errors=True)

    client: Any
    embed: Any
    k: int = 4
    by: Way = "auto"
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

    def _search(self, query: str, k: int | None, key: str) -> list[Document]:
        row = getattr(self.embed, "embed_query", self.embed)(query)
        result: Nearest = self.client.nearest(
            row,
            self.k if k is None else k,
            self._find_epsilon(),
            gallery=self.gallery,
            where=self.where,
            by=self.by,
            key=key,
        )
        return [_make_document(match, self.text_key) for match in result.matches]

    def _find_epsilon(self) -> float:
        if self.epsilon is not None:
            return self.epsilon
        return 0.0 if self.by in ("home", "sealed") else 4.0

    @contextmanager
    def _choose_key(self, query: str, run: UUID | None) -> Iterator[str]:
        """Yield a new key, or that of an earlier attempt of the same run if it has no answer yet.

        `run`: The run that asks, if there is one: with ``with_retry`` the same for all attempts. Without it, or in
        another run, a text is never looked up. A server that withholds an answer would see that two texts are equal.
        """
        if run is None:
            yield new_key()
            return
        question = (run, id(self.client), query, self._find_epsilon(), self.gallery)
        key = _UNANSWERED.take(question) or new_key()
        try:
            yield key
        except (KeySpentError, KeyConflictError):  # the key gives no message any more
            raise
        except BaseException as error:
            if not (isinstance(error, UnansweredError) and not error.again):
                _UNANSWERED.add(question, key)
            raise


class _UnansweredKeys:
    """Idempotency keys of questions that may be paid for and have no answer; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: deque[tuple[_Question, str]] = deque(maxlen=_MAX_UNANSWERED)

    def add(self, question: _Question, key: str) -> None:
        with self._lock:
            self._keys.append((question, key))

    def take(self, question: _Question) -> str | None:
        """Remove and return a key of a question; two calls at once never get the same."""
        with self._lock:
            entry = next((entry for entry in self._keys if entry[0] == question), None)
            if entry is None:
                return None
            self._keys.remove(entry)
            return entry[1]


# Not in the retriever: LangChain copies retrievers whose fields are configurable, with every call.
_UNANSWERED = _UnansweredKeys()


def _make_document(match: Any, text_key: str) -> Document:
    """Return a match as a document; its similarity stands beside its metadata."""
    metadata = {name: value for name, value in match.metadata.items() if name != text_key}
    text = match.metadata.get(text_key, match.name)
    return Document(
        page_content=text if isinstance(text, str) else match.name,
        metadata={**metadata, "similarity": match.similarity},
        id=match.external_id,
    )
