"""Walls between rooms: a room uses another through its public names alone. Modules are import-linter's affair."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nearveil

ROOT = Path(nearveil.__file__).parent


@cache
def find_nodes(path: Path) -> list[ast.AST]:
    """Return the imports and classes of a file."""
    kinds = (ast.ImportFrom, ast.ClassDef)
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]


def find_private_names(path: Path) -> Iterator[str]:
    """Yield the underscore names that a file imports from a room of this library."""
    for node in find_nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nearveil."):
            names = (name.name for name in node.names)
            yield from (f"{node.module}.{name}" for name in names if name.startswith("_") and name[:2] != "__")


def test_no_room_looks_behind_the_names_of_another() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        for name in find_private_names(path)
        if name.split(".")[1] != path.relative_to(ROOT).parts[0]
    }
    assert found == set()


_CLIENT = """
import sys
from nearveil import Client
ours = [name for name in sys.modules if name.split(".")[0] == "nearveil"]
theirs = {"fastapi", "sqlalchemy", "torch", "uvicorn"} & set(sys.modules)
print(len(ours), *theirs, *(name for name in ours if name.startswith(("nearveil.ledger", "nearveil.gallery.index"))))
"""


def test_a_client_loads_nothing_of_a_server_an_index_or_a_ledger() -> None:
    count, *others = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _CLIENT], capture_output=True, text=True, check=True
    ).stdout.split()
    assert others == []
    assert int(count) <= 60


def test_a_class_has_a_name_of_its_own() -> None:
    names: list[str] = []
    adapters: set[str] = set()  # one framework is one module, and its retriever has the same name as that of another
    for path in ROOT.rglob("*.py"):
        classes = [node.name for node in find_nodes(path) if isinstance(node, ast.ClassDef)]
        if path.parent.name == "integrations":
            assert len(classes) == len(set(classes))
            adapters.update(classes)
        else:
            names += classes
    assert [name for name, count in Counter([*names, *adapters]).items() if count > 1] == []
