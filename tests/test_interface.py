"""The public interface changes only where somebody means it to."""

import importlib

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
