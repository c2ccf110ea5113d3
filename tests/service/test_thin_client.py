"""The base install: a client that needs none of the extras, and errors that name the missing one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil.ledger import Ledger
from nearveil.privacy import Basis, compose_events
from nearveil.privacy.events import PureDp
from nearveil.server import TokenStore
from tests.programs import Program
from tests.service.asking import COUNT, QUERIES

# Modules of the base install besides the standard library. Others cannot be imported, as if they were not installed.
GUARD = """
import sys
ALLOWED = {*sys.stdlib_module_names, *"__main__ nearveil numpy httpx httpcore h11 anyio sniffio idna certifi click "
           "cryptography cffi _cffi_backend _argon2 annotated_doc annotated_types charset_normalizer mdurl "
           "markdown_it platformdirs pydantic pydantic_core pygments rich shellingham typer typing_extensions "
           "typing_inspection exceptiongroup _rust pycparser".split()}
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED and not name.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Guard())
"""
ABOUT: Any = {"protects": "query", "unit": "image", "relation": "replace"}
CLIENT = """
import numpy as np
from nearveil import Client
url, token, home, feature = sys.argv[1:]
with Client(url, token, home=home) as client:
    client.sync()
    for query in (feature, np.load(feature), np.load(feature).tolist()):
        found = client.nearest(query, 3)
        print(found.way, [match.id for match in found.matches])
    found = client.nearest(feature, 3, by="sealed")
    print(found.way, [match.id for match in found.matches])
"""
EXTRAS = """
for name in sys.argv[1:]:
    package, _, attribute = name.rpartition(".")
    try:
        exec(f"from {package} import {attribute}")
    except ModuleNotFoundError as error:
        print(name, error)
"""


def run_guarded(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", GUARD + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)  # noqa: S603


def run_command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_guarded("from nearveil.__main__ import main\nmain()", *arguments, **environment)


@pytest.fixture(scope="module")
def server(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Yield the URL of a server, and a file with a token, beside a ledger."""
    folder = tmp_path_factory.mktemp("server")
    with TokenStore(str(folder / "tokens.db")) as store:
        token = store.create("ann", scopes=["query"], galleries=["*"])[1]
    (folder / "token").write_text(token)
    (folder / "token").chmod(0o600)
    quarter = compose_events([PureDp(0.25)], delta=0.0, basis=Basis("a test"), **ABOUT)
    with Ledger(folder / "ledger.db") as ledger:
        ledger.open_account("camera", owner="me", epsilon=4, delta=0, **ABOUT).spend(quarter)
    (folder / "nearveil.toml").write_text(
        f'tokens = "{folder / "tokens.db"}"\nport = 0\n\n[[galleries]]\nname = "birds"\nindex = "{made}"\n'
        'offers = ["names", "codes", "sealed"]\n'
    )
    program = Program("-m", "nearveil", "serve", "--config", str(folder / "nearveil.toml"), quiet=True)
    yield program.stdout.readline().split()[-1], folder / "token"
    program.kill()
    program.stdout.close()
    program.wait(60)


@pytest.fixture
def feature(tmp_path: Path) -> Path:
    np.save(tmp_path / "feature.npy", QUERIES[0])
    return tmp_path / "feature.npy"


def test_a_client_searches_a_copy_and_asks_sealed_with_the_base_install(
    server: tuple[str, Path], feature: Path, tmp_path: Path
) -> None:
    url, token = server
    ended = run_guarded(CLIENT, url, token.read_text(), tmp_path / "home", feature)
    answers = [line.split(" ", 1) for line in ended.stdout.splitlines()]
    assert [way for way, _ in answers] == ["home", "home", "home", "sealed"], ended.stderr
    assert len({ids for _, ids in answers}) == 1


def test_commands_search_with_the_base_install(server: tuple[str, Path], feature: Path, tmp_path: Path) -> None:
    options = ["--server", server[0], "--token-file", server[1]]
    for way in ("sealed", "home"):
        if way == "home":
            synced = run_command("sync", *options, "--home", tmp_path, "--json")
            assert json.loads(synced.stdout)["items"] == COUNT, synced.stderr
        ended = run_command("query", feature, *options, "--home", tmp_path, "-k", 3, "--json")
        assert json.loads(ended.stdout)["way"] == way, ended.stderr


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("query {feature} --server {url} --token-file {token} --epsilon 4", "budget"),
        ("query {feature} --index {index}", "gallery"),
        ("query {picture} --server {url} --token-file {token}", "images"),
        ("budget show", "budget"),
        ("cost 500x0.5", "budget"),
        ("index {folder}", "gallery"),
        ("plan --items 1000 --epsilon 4", "gallery"),
        ("serve {index}", "service"),
        ("token list", "service"),
        ("ui --index {index}", "images,service"),
        ("audit all", "audit"),
        ("train {folder} --out model.nvm", "gallery"),
    ],
)
def test_a_command_names_the_extra_that_it_lacks(
    line: str, extra: str, made: Path, server: tuple[str, Path], feature: Path, tmp_path: Path
) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    names = {"feature": feature, "picture": tmp_path / "picture.png", "index": made, "folder": tmp_path}
    words = line.format(url=server[0], token=server[1], **names).split()
    ended = run_command(*words, XDG_DATA_HOME=str(tmp_path))
    assert ended.returncode == 1
    said = " ".join(ended.stderr.split())
    assert said.endswith(f'is not installed: pip install "nearveil[{extra}]"'), ended.stderr


def test_a_class_names_the_extra_that_it_lacks() -> None:
    extras = {
        "nearveil.Index": "gallery",
        "nearveil.Ledger": "budget",
        "nearveil.Covers": "knn",
        "nearveil.PrivateMail": "knn",
        "nearveil.PrivateKNeighborsClassifier": "knn",
        "nearveil.Retriever": "gallery",
        "nearveil.gallery.sync_folder": "gallery",
        "nearveil.server.serve": "service",
        "nearveil.audit.audit": "audit",
        "nearveil.privacy.accounting": "budget",
        "nearveil.integrations.langchain": "langchain",
        "nearveil.integrations.llamaindex": "llamaindex",
        "nearveil.integrations.mcp": "mcp",
    }
    ended = run_guarded(EXTRAS, *extras)
    said = dict(line.split(" ", 1) for line in ended.stdout.splitlines())
    assert {name: text.split(": ")[1] for name, text in said.items()} == {
        name: f'pip install "nearveil[{extra}]"' for name, extra in extras.items()
    }, ended.stderr


@pytest.mark.parametrize(
    "line",
    [
        "query {feature} --server {url} --token-file {token} --home {folder}",
        "query {feature} --index {index}",
        "sync {url} --token-file {token} --home {folder}",
        "token list --tokens {folder}/tokens.db",
        "plan --items 100000 --epsilon 4 --json",
        "budget show camera --ledger {folder}/ledger.db",
        "budget history --ledger {folder}/ledger.db --json",
        "budget create holiday --owner me --epsilon 4 --ledger {folder}/ledger.db --json",
    ],
)
def test_a_command_that_prices_nothing_imports_no_accountant(
    line: str, made: Path, server: tuple[str, Path], feature: Path
) -> None:
    names = {"url": server[0], "token": server[1], "feature": feature, "index": made, "folder": server[1].parent}
    code = "import sys\nfrom nearveil.cli import app\ntry: app(sys.argv[1:])\nfinally: print(*sys.modules)"
    command = [sys.executable, "-c", code, *line.format(**names).split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert not {"sklearn", "dp_accounting", "scipy", "pandas", "torch", "PIL"} & set(ended.stdout.split())
