"""The public interface changes only where somebody means it to."""

import importlib
import pydoc
import subprocess
import sys

import nearveil
from nearveil import NearveilError
from tests.interface import FILE, interface


def test_it_is_the_one_that_is_written_down() -> None:
    assert interface().splitlines() == FILE.read_text().splitlines(), "python -m tests.interface writes it anew"


def test_errors_have_one_base() -> None:
    for line in FILE.read_text().splitlines():
        name, _, what = line.partition(": ")
        if what == "error":
            room, _, word = name.rpartition(".")
            assert issubclass(getattr(importlib.import_module(room), word), NearveilError), name


def test_importing_a_client_loads_no_heavy_library() -> None:
    heavy = "{'numpy', 'scipy', 'sklearn', 'faiss', 'httpx', 'pydantic', 'sqlalchemy', 'dp_accounting', 'torch'}"
    see = f"import sys; print(sorted({heavy} & set(sys.modules)))"
    for what in ("from nearveil import AsyncClient, Client", "import nearveil; dir(nearveil)"):
        command = [sys.executable, "-c", f"{what}; {see}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
        assert found.stdout.strip() == "[]", what


def test_help_begins_with_what_to_begin_with() -> None:
    text = nearveil.__doc__ or ""
    places = [text.index(name) for name in ("Client", "PrivateKNeighborsClassifier", "SupervisedManifold")]
    assert places == sorted(places)
    assert pydoc.plain(pydoc.render_doc(nearveil)).index("Start with these") < 200
    assert [name for name in dir(nearveil) if name[0] != "_"][:2] == ["AsyncClient", "Client"]
