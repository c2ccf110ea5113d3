"""Late imports, and the extra that installs a missing library."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import resolve_name
from typing import Any

_EXTRAS = {  # of packages, by module
    "nearveil.gallery": "gallery",
    "nearveil.mechanisms": "knn",
    "nearveil.privatemail": "knn",
    "nearveil.sealed.index": "sealed",
    "nearveil.search": "gallery",
    "nearveil.server": "service",
    "studies": "studies",
}


_NAMES = {"PIL": "Pillow", "skimage": "scikit-image", "sklearn": "scikit-learn"}  # of packages
_SIZES = ("budget", "knn", "gallery", "audit", "service")  # each extra has what those before it have


class MissingLibraryError(ModuleNotFoundError):
    """A library of an extra is not installed."""

    extra = ""


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Name the extra to install if a library is missing; of nested blocks, the largest extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        inner = error.extra if isinstance(error, MissingLibraryError) else ""
        is_larger = not inner or (inner in _SIZES and extra in _SIZES[_SIZES.index(inner) :])
        if not (extra and error.name and is_larger) or error.name.startswith("nearveil"):
            raise
        library = error.name.partition(".")[0]
        package = "nearveil-studies" if library == "studies" else f'"nearveil[{extra}]"'
        words = f"{_NAMES.get(library, library)} is not installed: pip install {package}"
        missing = MissingLibraryError(words, name=library)
        missing.extra = extra
        raise missing from None


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
