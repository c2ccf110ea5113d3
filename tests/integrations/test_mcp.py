"""The MCP server, tested by the SDK's own client: free tools, a capped budget, and nothing paid without its owner."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mcp")

from mcp import Client as McpClient
from mcp import StdioServerParameters
from PIL import Image
from typer.testing import CliRunner

from nearveil import Client, Index
from nearveil.cli import app
from nearveil.integrations.mcp import load_embedding, make_server
from nearveil.ledger import Account, Ledger

ROWS = np.random.default_rng(0).standard_normal((60, 8))


def embed(text: str) -> Any:
    """Return the row whose number is the text."""
    return ROWS[int(text)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    with Index.create(folder / "texts", dimension=8) as index:
        texts = [{"text": f"sentence {n}", "even": n % 2 == 0} for n in range(60)]
        index.add_table(ROWS, ids=[f"s{n}" for n in range(60)], metadata=texts)
        index.publish(4.0, 0.2, n_sets=4, reach=0.0)
    return folder


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    with Ledger(tmp_path / "budget.db") as ledger:
        terms: dict[str, Any] = {"owner": "me", "protects": "query", "unit": "text", "relation": "replace"}
        yield ledger.open_account("assistant", epsilon=8.0, delta=0.0, **terms)


def call(server: Any, use: Callable[[McpClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with McpClient(server) as client:
            return await use(client)

    return asyncio.run(run())


def ask(server: Any, tool: str, **arguments: Any) -> Any:
    """Return the structured answer of a tool, or its error."""
    result = call(server, lambda client: client.call_tool(tool, arguments))
    return result.content[0].text if result.is_error else result.structured_content


def list_tools(server: Any) -> dict[str, Any]:
    return {tool.name: tool for tool in call(server, lambda client: client.list_tools()).tools}


def test_free_searches_return_matches_and_what_the_server_saw(place: Path) -> None:
    with Client(place / "texts") as client:
        server = make_server(client, embed=embed)
        found = ask(server, "search_text", query="4", k=2, where={"even": True})
        assert found["matches"][0]["external_id"] == "s4"
        assert found["matches"][0]["metadata"] == {"text": "sentence 4", "even": True}
        assert (found["way"], found["paid"], found["remaining"]) == ("index", 0, None)
        assert found["server_saw"].startswith("Nothing was sent.")
        tools = list_tools(server)
        assert set(tools) == {"search_text"}
        assert tools["search_text"].annotations.read_only_hint
        assert "server_saw" in tools["search_text"].output_schema["properties"]


def test_vectors_are_searched_without_an_embedding(place: Path) -> None:
    with Client(place / "texts") as client:
        found = ask(make_server(client), "search_vector", query=ROWS[7].tolist(), k=1)
    assert found["matches"][0]["external_id"] == "s7"


def test_paid_searches_debit_the_owners_account_and_stop_at_its_total(place: Path, account: Account) -> None:
    with Client(place / "texts", account=account) as client:
        server = make_server(client, embed=embed, epsilon=4.0)
        assert set(list_tools(server)) == {"search_text", "pay_to_search_text", "budget"}
        ask(server, "search_text", query="4")
        assert ask(server, "budget") == {"account": "assistant", "epsilon": 8, "left": 8, "price": 4}
        found = ask(server, "pay_to_search_text", query="4", k=2)
        assert (found["way"], found["paid"], found["remaining"]) == ("message", 4, 4)
        assert "set " in found["server_saw"]
        assert {"named_best_set", "expected_share"}.isdisjoint(found)
        ask(server, "pay_to_search_text", query="4", k=2)
        assert "budget" in ask(server, "pay_to_search_text", query="5", k=2)
        assert ask(server, "budget")["left"] == account.balance().left == 0


def test_no_argument_of_an_assistant_makes_a_free_tool_pay(place: Path, account: Account) -> None:
    with Client(place / "texts", account=account) as client:
        for server in (make_server(client, embed=embed), make_server(client, embed=embed, epsilon=4.0)):
            ask(server, "search_text", query="4", epsilon=4, by="message", key="0" * 32, candidates=1)
            assert "epsilon" not in list_tools(server)["search_text"].input_schema["properties"]
    assert account.balance().left == 8


def test_images_come_from_the_owners_folder_alone(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(12):
        noise = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).save(photos / f"{number}.png")
    (tmp_path / "secret.png").write_bytes((photos / "3.png").read_bytes())
    (photos / "link.png").symlink_to(tmp_path / "secret.png")
    command = ["index", str(photos), "--into", str(tmp_path / "index"), "--extractor", "hog", "--candidates", "0.5"]
    assert CliRunner().invoke(app, command).exit_code == 0
    with Client(tmp_path / "index") as client:
        server = make_server(client, images=photos)
        assert ask(server, "search_image", query="3.png", k=1)["matches"][0]["name"].endswith("3.png")
        errors = {
            ask(server, "search_image", query=name)
            for name in ("../secret.png", str(tmp_path / "secret.png"), "link.png", "absent.png")
        }
    words = "query: the owner's folder has no image of this name; use another"
    assert errors == {f"Error executing tool search_image: {words}"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": [float("nan")] * 8}, "valid number"),
        ({"query": [1.0] * 5}, "8"),
        ({"query": []}, "one row of numbers"),
        ({"query": [1.0] * 8, "k": 0}, "greater than or equal to 1"),
        ({"query": [1.0] * 8, "where": "even"}, "dict"),
        ({}, "query"),
    ],
)
def test_wrong_arguments_are_named(place: Path, arguments: dict[str, Any], words: str) -> None:
    with Client(place / "texts") as client:
        assert words in ask(make_server(client), "search_vector", **arguments)


def test_a_missing_library_names_its_extra(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    with Client(place / "texts") as client:
        server = make_server(client, images=tmp_path)
        monkeypatch.setitem(sys.modules, "PIL", None)
        assert 'pip install "nearveil[images]"' in ask(server, "search_image", query="photo.png")


def test_embeddings_are_named_by_module_and_function() -> None:
    assert load_embedding("tests.integrations.test_mcp:embed")("3") is not None
    for path in ("nothing", "absent:embed", "math:absent", "math:pi"):
        with pytest.raises(ValueError, match="function"):
            load_embedding(path)


def serve(place: Path, folder: Path, *options: str) -> StdioServerParameters:
    """Return how to start `nearveil mcp` in a folder; like the installed command, without the folder in the path."""
    command = ["-P", "-m", "nearveil", "mcp", "--index", str(place / "texts"), *options]
    return StdioServerParameters(command=sys.executable, args=command, cwd=folder, env=dict(os.environ))


def test_the_command_serves_on_standard_input_and_output(place: Path, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("def embed(text):\n    print(text)\n    return [float(text)] * 8\n")
    found = ask(serve(place, tmp_path, "--embed", "my_model:embed"), "search_text", query="1", k=3)
    assert len(found["matches"]) == 3


def test_standard_output_has_messages_of_the_protocol_alone(place: Path, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("print('loading')\ndef embed(text):\n    return [1.0] * 8\n")
    server = serve(place, tmp_path, "--embed", "my_model:embed")
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    first = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client})
    result = subprocess.run(  # noqa: S603
        [server.command, *server.args], cwd=tmp_path, input=f"{first}\n", capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [1]
    assert "loading" in result.stderr


@pytest.mark.parametrize("options", [(), ("--embed", "my_model:embed")], ids=["vectors", "texts"])
def test_no_file_of_the_current_folder_replaces_a_library(
    place: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The current folder is the workspace of an assistant, which writes files there."""
    (tmp_path / "my_model.py").write_text("def embed(text):\n    return [float(text)] * 8\n")
    for name in ("faiss", "PIL", "httpx", "json"):
        (tmp_path / f"{name}.py").write_text("raise ValueError('replaced')\n")
    tool, query = ("search_text", "1") if options else ("search_vector", [1.0] * 8)
    assert len(ask(serve(place, tmp_path, *options), tool, query=query, k=3)["matches"]) == 3


def test_no_query_is_logged(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Client(place / "texts") as client:
        error = ask(make_server(client, embed=embed), "search_text", query="a secret")
    assert error == "Error executing tool search_text: unexpected ValueError on this machine"
    assert "a secret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("key", ["", "k", "0" * 31, "a\n", "0" * 10_000])
def test_an_assistant_makes_up_no_key(place: Path, account: Account, key: str) -> None:
    with Client(place / "texts", account=account) as client:
        error = ask(make_server(client, embed=embed, epsilon=4.0), "pay_to_search_text", query="4", key=key)
    assert "key" in error
    assert account.balance().left == 8


def test_the_command_pays_from_named_accounts_only(place: Path) -> None:
    result = CliRunner().invoke(app, ["mcp", "--index", str(place / "texts"), "--epsilon", "4"])
    assert result.exit_code != 0
    assert "--account" in result.output
