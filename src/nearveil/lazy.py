"""Import public names when they are first asked for: no program needs all of them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_later(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose modules define the names that are listed with them."""
    later = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name in later:
            return getattr(import_module(f"{package}.{later[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
