"""Progress of long work: the callable that reports it, and the display of the running command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console

Tick = Callable[[int], object]
"""Called with the number of units that were done since the last call."""

Progress = Callable[[str, int | None], Tick]
"""``progress(text, total)`` starts a stage of `total` units, None if unknown, and returns its :data:`Tick`."""

_PERCENT = 100
_display: ContextVar[Progress | None] = ContextVar("display", default=None)


def no_progress(_text: str, _total: int | None) -> Tick:
    """Start a stage that nobody watches."""
    return lambda _: None


def start_stage(text: str, total: int | None = None) -> Tick:
    """Start a stage of the running command; of a program that shows no progress, nobody watches it."""
    return (_display.get() or no_progress)(text, total)


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
    """Show a spinner on a terminal's standard error, or a stage of the running command."""
    console = Console(stderr=True)
    if _display.get() or not console.is_terminal:
        start_stage(text)
        yield
        return
    with console.status(text):
        yield


@contextmanager
def use_display(display: Progress) -> Iterator[Progress]:
    """Show the stages of all functions, also of those that take no progress, in this display."""
    previous = _display.get()
    _display.set(display)
    try:
        yield display
    finally:
        _display.set(previous)  # not by a token: a server ends its display in another context
