"""Import public names on first use, so that no program loads all of them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_later(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    `modules` maps a module to the names that it defines; a module that begins with a dot is relative to `package`.
    """
    locations = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name in locations:
            return getattr(import_module(locations[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
