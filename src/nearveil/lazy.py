"""Lazy imports of public names."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_later(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    `modules` maps a module, absolute or relative to `package`, to the names that it defines.
    """
    locations = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name in locations:
            return getattr(import_module(locations[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
