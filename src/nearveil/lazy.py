"""Late imports, and the extra that installs a missing library."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import resolve_name
from typing import Any

_EXTRAS = {
    "nearveil.gallery": "gallery",
    "nearveil.mechanisms": "knn",
    "nearveil.privatemail": "knn",
    "nearveil.server": "service",
}


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Name the extra to install if a library is missing. Of nested blocks, the outermost with an extra counts."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not extra or error.name is None or error.name.startswith("nearveil"):
            raise
        words = f'{error.name.partition(".")[0]} is not installed: pip install "nearveil[{extra}]"'
        raise ModuleNotFoundError(words, name=error.name) from None


def import_later(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    `modules` maps a module, absolute or relative to `package`, to the names that it defines.
    """
    locations = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in locations:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = resolve_name(locations[name], package)
        with require_extra(next((extra for prefix, extra in _EXTRAS.items() if module.startswith(prefix)), "")):
            return getattr(import_module(module), name)

    return load


class LateModule:
    """A library that is imported when it is first used."""

    def __init__(self, name: str, extra: str) -> None:
        self._name, self._extra = name, extra

    def __getattr__(self, name: str) -> Any:
        with require_extra(self._extra):
            value = getattr(import_module(self._name), name)
        setattr(self, name, value)
        return value
