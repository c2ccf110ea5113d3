"""Every public name stands in the reference, and is seen at work there or in its own docstring."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from tests.interface import ROOMS

PAGES = {path.stem: path.read_text() for path in (Path(__file__).parents[1] / "docs" / "reference").glob("*.md")}
PUBLIC = {
    word: getattr(importlib.import_module(room), word)
    for room in ROOMS
    for word in importlib.import_module(room).__all__
    if not word.startswith("__")
}


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(PAGES.values())
    named = {name.rpartition(".")[2] for name in re.findall(r"auto(?:class|function|exception|data):: (\S+)", text)}
    for module, names in re.findall(r"automodule:: (\S+)\n   :members:(.*)", text):
        told = names.split(", ") if names.strip() else vars(importlib.import_module(module))
        named.update(one.strip() for one in told)
    assert sorted(set(PUBLIC) - named) == []


def test_every_public_name_is_seen_at_work() -> None:
    shown = "\n".join(re.sub(r"```\{eval-rst\}.*?```", "", page, flags=re.DOTALL) for page in PAGES.values())
    hidden = [name for name, found in PUBLIC.items() if not _has_example(found)]
    assert [name for name in hidden if not re.search(rf"\b{name}\b", shown)] == []


def _has_example(found: Any) -> bool:
    if inspect.isclass(found) and issubclass(found, BaseException):
        return True
    members = vars(found).values() if inspect.isclass(found) else ()
    own = [found, *(one for one in members if inspect.isroutine(one) or isinstance(one, property))]
    return any(">>>" in (inspect.getdoc(one) or "") for one in own)
