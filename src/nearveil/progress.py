"""Progress of long work: the callable that reports it, and a spinner for functions that start such work themselves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console

Tick = Callable[[int], object]
"""Called with the number of units that were done since the last call."""

Progress = Callable[[str, int | None], Tick]
"""``progress(text, total)`` starts a stage of `total` units, None if unknown, and returns its :data:`Tick`."""

_PERCENT = 100
_has_display: ContextVar[bool] = ContextVar("has_display", default=False)


def no_progress(_text: str, _total: int | None) -> Tick:
    """Start a stage that nobody watches."""
    return lambda _: None


def tick_percent(tick: Tick) -> Callable[[str, float], None]:
    """Return a function of a stage and the fraction done, from 0 to 1, that ticks in percent."""
    done = 0

    def report(_stage: str, fraction: float) -> None:
        nonlocal done
        step = max(0, int(fraction * _PERCENT) - done)
        done += step
        tick(step)

    return report


@contextmanager
def show_spinner(text: str) -> Iterator[None]:
    """Show a spinner on a terminal's standard error, unless a command shows its own progress."""
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
