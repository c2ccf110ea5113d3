"""A spinner for work of some seconds that a function starts by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console

_has_display: ContextVar[bool] = ContextVar("has_display", default=False)


@contextmanager
def show_spinner(text: str) -> Iterator[None]:
    """Show a spinner on a terminal's standard error, unless a command shows its own progress.

    Examples
    --------
    >>> with show_spinner("Calibrating the noise"):
    ...     total = sum(range(10))
    """
    console = Console(stderr=True)
    if _has_display.get() or not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextmanager
def hide_spinners() -> Iterator[None]:
    """Show no spinners while a command shows its own progress: two displays would overwrite each other."""
    token = _has_display.set(True)
    try:
        yield
    finally:
        _has_display.reset(token)
