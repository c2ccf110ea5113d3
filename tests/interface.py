"""The public interface, a line for each name: what users can import, and how it is called.

``python -m tests.interface`` writes it to ``interface.txt``; the change is then seen in a diff and in the CHANGELOG.
"""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

FILE = Path(__file__).with_suffix(".txt")
ROOMS = (
    "nearveil", "nearveil.privatemail", "nearveil.privatemail.graph", "nearveil.privatemail.manifold",
    "nearveil.privatemail.sensitivity", "nearveil.privacy", "nearveil.privacy.accounting", "nearveil.privacy.events",
    "nearveil.privacy.noise", "nearveil.ledger", "nearveil.features", "nearveil.mechanisms", "nearveil.private_knn",
    "nearveil.gallery", "nearveil.wire", "nearveil.sealed", "nearveil.search", "nearveil.search.ceiling",
    "nearveil.client", "nearveil.server",
    "nearveil.audit", "nearveil.ui", "nearveil.datasets",
)  # fmt: skip
_PLAIN = (int, float, str, bool, tuple, type(None))


def interface() -> str:
    """Return the public interface as text."""
    return "".join(f"{line}\n" for room in ROOMS for line in _room(room))


def _room(name: str) -> Iterator[str]:
    room = importlib.import_module(name)
    own = [word for word, found in vars(room).items() if getattr(found, "__module__", None) == name]
    for word in sorted(getattr(room, "__all__", own)):
        if not word.startswith("_"):
            yield from _lines(f"{name}.{word}", getattr(room, word))


def _lines(name: str, found: Any) -> Iterator[str]:
    if not inspect.isclass(found):
        yield f"{name}{_signature(found)}"
        return
    is_error = issubclass(found, BaseException)
    kind = "warning" if issubclass(found, Warning) else "error"
    yield f"{name}: {kind}" if is_error else f"{name}{_signature(found)}"
    for word, member in sorted(inspect.getmembers_static(found)):
        if not is_error and not word.startswith("_") and not word.endswith("_request") and _is_ours(found, word):
            yield f"{name}.{word}{_signature(inspect.unwrap(getattr(found, word, member)))}"


def _is_ours(kind: type, word: str) -> bool:
    """Whether a class of this project defines a member that is no parameter."""
    if is_dataclass(kind) and word in (field.name for field in fields(kind) if field.init):
        return False
    return any(word in vars(one) and one.__module__.startswith("nearveil") for one in kind.__mro__)


def _signature(found: Any) -> str:
    if not callable(found) or get_args(found):
        return ""
    try:
        given = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return ""
    kept = [one.replace(annotation=one.empty, default=_default(one.default)) for one in given]
    return str(inspect.Signature(kept))


def _default(value: Any) -> Any:
    return value if value is inspect.Parameter.empty or isinstance(value, _PLAIN) else ...


if __name__ == "__main__":
    FILE.write_text(interface())
