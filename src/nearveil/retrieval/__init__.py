"""The protocol: a message goes out, candidates come back, the client chooses; and how good that can be."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearveil.retrieval._answer import Answer, AnswerError
    from nearveil.retrieval._client import Client
    from nearveil.retrieval._evaluate import Estimate, Evaluation, evaluate
    from nearveil.retrieval._index import Index
    from nearveil.retrieval._index_errors import (
        DamagedIndexError,
        IndexExistsError,
        IndexFullError,
        IndexStoreError,
        IndexUnavailableError,
        InexactRowsError,
        MapChangedError,
        NewerIndexError,
        NotAnIndexError,
        NotPublishedError,
        PrivateIndexError,
        StaleMapError,
        UnknownItemError,
    )
    from nearveil.retrieval._index_items import Item, Snapshot, StoredItem
    from nearveil.retrieval._index_served import Served, served
    from nearveil.retrieval._index_shelf import Current
    from nearveil.retrieval._plan import Plan, plan
    from nearveil.retrieval._protocol_client import ClientProtocol
    from nearveil.retrieval._protocol_errors import OutdatedMapError, ProtocolError, RefusedError
    from nearveil.retrieval._protocol_parts import Found
    from nearveil.retrieval._protocol_server import Gallery, ServerProtocol
    from nearveil.retrieval._published import Published
    from nearveil.retrieval._retriever import Retriever
    from nearveil.retrieval._server import Server
    from nearveil.retrieval._wire import HEADER_BYTES, Limits, WireError, WireSizeError, WireVersionError, frame_bytes
    from nearveil.retrieval._wire_public import PublicPart
    from nearveil.retrieval._wire_schema import MapChanged, Query, Refusal, RefusalCode

__all__ = [
    "HEADER_BYTES",
    "Answer",
    "AnswerError",
    "Client",
    "ClientProtocol",
    "Current",
    "DamagedIndexError",
    "Estimate",
    "Evaluation",
    "Found",
    "Gallery",
    "Index",
    "IndexExistsError",
    "IndexFullError",
    "IndexStoreError",
    "IndexUnavailableError",
    "InexactRowsError",
    "Item",
    "Limits",
    "MapChanged",
    "MapChangedError",
    "NewerIndexError",
    "NotAnIndexError",
    "NotPublishedError",
    "OutdatedMapError",
    "Plan",
    "PrivateIndexError",
    "ProtocolError",
    "PublicPart",
    "Published",
    "Query",
    "Refusal",
    "RefusalCode",
    "RefusedError",
    "Retriever",
    "Served",
    "Server",
    "ServerProtocol",
    "Snapshot",
    "StaleMapError",
    "StoredItem",
    "UnknownItemError",
    "WireError",
    "WireSizeError",
    "WireVersionError",
    "evaluate",
    "frame_bytes",
    "plan",
    "served",
]

_PLACES = {
    "_answer": (
        "Answer",
        "AnswerError",
    ),
    "_client": ("Client",),
    "_evaluate": (
        "Estimate",
        "Evaluation",
        "evaluate",
    ),
    "_index": ("Index",),
    "_index_errors": (
        "DamagedIndexError",
        "IndexExistsError",
        "IndexFullError",
        "IndexStoreError",
        "IndexUnavailableError",
        "InexactRowsError",
        "MapChangedError",
        "NewerIndexError",
        "NotAnIndexError",
        "NotPublishedError",
        "PrivateIndexError",
        "StaleMapError",
        "UnknownItemError",
    ),
    "_index_items": (
        "Item",
        "Snapshot",
        "StoredItem",
    ),
    "_index_served": (
        "Served",
        "served",
    ),
    "_index_shelf": ("Current",),
    "_plan": (
        "Plan",
        "plan",
    ),
    "_protocol_client": ("ClientProtocol",),
    "_protocol_errors": (
        "OutdatedMapError",
        "ProtocolError",
        "RefusedError",
    ),
    "_protocol_parts": ("Found",),
    "_protocol_server": (
        "Gallery",
        "ServerProtocol",
    ),
    "_published": ("Published",),
    "_retriever": ("Retriever",),
    "_server": ("Server",),
    "_wire": (
        "HEADER_BYTES",
        "Limits",
        "WireError",
        "WireSizeError",
        "WireVersionError",
        "frame_bytes",
    ),
    "_wire_public": ("PublicPart",),
    "_wire_schema": (
        "MapChanged",
        "Query",
        "Refusal",
        "RefusalCode",
    ),
}
_LATER = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: a client needs neither a database nor the server's half."""
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
