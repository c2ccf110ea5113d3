"""Walls between rooms: a room uses another through its public names alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nearveil

ROOT = Path(nearveil.__file__).parent
MOST_THROUGH_WALLS = 0  # imports of another room's underscore module


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports from this library."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nearveil."):
            names = [name.name for name in node.names if name.name.startswith("_") and not name.name.startswith("__")]
            yield from [f"{node.module}.{name}" for name in names] or [node.module]


def test_no_room_looks_behind_the_names_of_another() -> None:
    found = []
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        for name in imported(path):
            other, *inside = name.split(".")[1:]
            if other != room and any(part.startswith("_") for part in inside):
                found.append(f"{path.relative_to(ROOT)}: {name}")
    assert len(found) <= MOST_THROUGH_WALLS, "\n".join(sorted(found))


_CLIENT = """
import sys
from nearveil import Client
ours = [name for name in sys.modules if name.split(".")[0] == "nearveil"]
theirs = {"alembic", "fastapi", "sqlalchemy", "torch", "uvicorn"} & set(sys.modules)
print(len(ours), *theirs, *(name for name in ours if name.startswith(("nearveil.ledger", "nearveil.gallery.index"))))
"""


def test_a_client_loads_nothing_of_a_server_an_index_or_a_ledger() -> None:
    count, *others = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _CLIENT], capture_output=True, text=True, check=True
    ).stdout.split()
    assert others == []
    assert int(count) <= 60
