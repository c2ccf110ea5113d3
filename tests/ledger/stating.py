"""Guarantees that say what happened and promise little: the ledger prices the events, and tests are about that."""

from typing import Any

from dp_accounting import DpEvent, SelfComposedDpEvent

from nearveil.privacy import Basis, Guarantee


def stated(*events: DpEvent | tuple[DpEvent, int], **changed: Any) -> Guarantee:
    """The guarantee of events, each perhaps with how often it happens."""
    happened = (event if isinstance(event, DpEvent) else SelfComposedDpEvent(*event) for event in events)
    about: dict[str, Any] = {"protects": "database", "unit": "image", "relation": "add-remove", "epsilon": 1e9}
    return Guarantee(delta=0.5, basis=Basis("a test"), events=tuple(happened), **about | changed)
