"""An MCP server: an assistant searches a gallery, free or from a capped budget. Needs the extra ``mcp``.

The assistant and its model see texts and matches. The gallery's server sees what the way to search shows it, and that
is part of every answer.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

import nearveil
from nearveil.client.errors import UnansweredError
from nearveil.client.questions import DEFAULT_K
from nearveil.errors import NearveilError
from nearveil.lazy import require_extra

with require_extra("mcp"):
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations

if TYPE_CHECKING:
    from nearveil.client import Client

_MOST_MATCHES = 100
_FREE = "It is free: nothing is paid."
_INSTRUCTIONS = (
    "Search a gallery by nearest neighbours without revealing the query to its server. Prefer the free tools. Paid "
    "ones charge a budget that cannot be refilled from here; never repeat one because its matches disappoint."
)


class FoundItem(BaseModel):
    """A match."""

    id: int
    external_id: str | None = Field(description="The owner's id, if the gallery offers it.")
    name: str
    similarity: float = Field(description="By the metric; a distance times -1.")
    metadata: dict[str, Any]


class Findings(BaseModel):
    """The matches of a search, and its cost."""

    matches: list[FoundItem] = Field(description="Best first.")
    metric: str
    way: str = Field(description="home: a local copy; index: a local index; sealed: encrypted; message: paid.")
    server_saw: str
    paid: float = Field(description="Epsilon.")
    remaining: float | None = Field(description="Of the budget; null if nothing was paid.")
    guarantee: str


class AccountBudget(BaseModel):
    """The account that pays."""

    account: str
    epsilon: float
    left: float
    price: float = Field(description="Of one paid search.")


class _Kind(NamedTuple):
    """A kind of query."""

    name: str
    type: Any
    words: str
    read: Callable[[Any], Any]  # to what a client searches for


def load_embedding(path: str) -> Callable[[str], Any]:
    """Import the function, or the object with `embed_query`, at ``module:name``."""
    module, _, name = path.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} cannot be imported ({error}): name a function as module:function") from None
    embed = getattr(function, "embed_query", function)
    if not callable(embed):
        raise ValueError(f"{path} must be a function of a text, or an object with embed_query")
    return embed  # type: ignore[no-any-return]


def make_server(
    client: "Client",
    *,
    embed: Callable[[str], Any] | None = None,
    images: Path | None = None,
    epsilon: float | None = None,
    gallery: str | None = None,
) -> MCPServer[Any]:
    """Return an MCP server that searches the gallery of a client.

    Parameters
    ----------
    client : nearveil.Client
        With an account if `epsilon` is given. The account's total is the cap of all paid searches.
    embed : callable, optional
        Converts a text to a vector: adds tools that search by text. Without it they search by a vector.
    images : Path, optional
        Adds tools that search by an image of this folder, and of no other.
    epsilon : float, optional
        The price of a paid search, fixed by the owner. Without it there is no tool that pays.
    gallery : str, optional
        Required if the client's server has several.
    """
    server = MCPServer[Any]("nearveil", instructions=_INSTRUCTIONS, version=nearveil.__version__, log_level="WARNING")
    kinds = [_Kind("vector", list[float], "The vector, of the gallery's dimension.", list)]
    if embed is not None:
        kinds = [_Kind("text", str, "The text to search for. It is not sent to the gallery's server.", embed)]
    if images is not None:
        folder = images.resolve(strict=True)
        words = "Name of an image in the owner's folder."
        kinds.append(_Kind("image", str, words, lambda name: _find_image(folder, name)))
    for kind in kinds:
        server.add_tool(
            _make_search(client, kind, None, gallery),
            f"search_{kind.name}",
            description=f"Find the items nearest to a private {kind.name}. {_FREE}",
            annotations=ToolAnnotations(read_only_hint=True),
        )
        if epsilon:
            server.add_tool(
                _make_search(client, kind, epsilon, gallery),
                f"pay_to_search_{kind.name}",
                description=f"Find the items nearest to a private {kind.name} by a message that costs {epsilon:g}.",
                annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=False),
            )
    if epsilon:
        price = epsilon

        def budget() -> AccountBudget:
            balance = client.balance()
            return AccountBudget(account=balance.account, epsilon=balance.epsilon, left=balance.left, price=price)

        words = f"Show the budget of paid searches, which its owner caps. {_FREE}"
        server.add_tool(budget, description=words, annotations=ToolAnnotations(read_only_hint=True))
    return server


def _find_image(folder: Path, name: str) -> Path:
    """Return the path of an image in a folder; a file outside is as absent as one that does not exist."""
    path = (folder / name).resolve()
    if not (path.is_relative_to(folder) and path.is_file()):
        raise ToolError("query: the owner's folder has no image of this name; use another")
    return path


def _make_search(client: "Client", kind: _Kind, epsilon: float | None, gallery: str | None) -> Callable[..., Findings]:
    """Return a tool that searches for queries of a kind at a fixed price."""
    Count = Annotated[int, Field(ge=1, le=_MOST_MATCHES, description="Number of matches.")]
    Where = Annotated[dict[str, Any] | None, Field(description="Keep only matches with this metadata.")]
    words = "Of a search that was paid and not answered: repeats it, free."
    Key = Annotated[str | None, Field(pattern="^[0-9a-f]{32}$", description=words)]

    def search(query: Any, k: int = DEFAULT_K, where: dict[str, Any] | None = None) -> Findings:
        return find(query, k, where)

    def pay(query: Any, k: int = DEFAULT_K, where: dict[str, Any] | None = None, key: str | None = None) -> Findings:
        return find(query, k, where, key)

    def find(query: Any, k: int, where: dict[str, Any] | None, key: str | None = None) -> Findings:
        try:
            result = client.nearest(kind.read(query), k, epsilon, gallery=gallery, where=where, key=key)
        except UnansweredError as error:
            retry = f" Repeat it free of charge with the key {error.key}." if error.again else ""
            raise ToolError(f"{error}{retry}") from None
        except (NearveilError, ToolError, ModuleNotFoundError) as error:
            raise ToolError(str(error)) from None
        except Exception as error:  # its text may hold the query, and the SDK would log it
            raise ToolError(f"unexpected {type(error).__name__} on this machine") from None
        return Findings(
            matches=[FoundItem.model_validate(match, from_attributes=True) for match in result.matches],
            metric=result.metric,
            way=result.way,
            server_saw=result.server_view,
            paid=result.paid,
            remaining=result.remaining,
            guarantee=str(result.guarantee),
        )

    tool: Callable[..., Findings] = pay if epsilon else search
    hints = {"query": Annotated[kind.type, Field(description=kind.words)], "k": Count, "where": Where, "key": Key}
    tool.__annotations__ |= {name: hint for name, hint in hints.items() if name in tool.__annotations__}
    return tool
