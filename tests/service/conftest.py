from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nearveil.client.timing import Clock
from tests.clocks import hurry


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no client wait for the end of a private step: `test_client_clock.py` says when it would end."""
    hurry(monkeypatch)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no client pause before it asks again."""

    async def pause(self: Clock, seconds: float) -> None:
        del self, seconds

    monkeypatch.setattr(Clock, "pause", pause)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an index of birds with a map."""
    from tests.service.asking import make_index

    return make_index(tmp_path_factory.mktemp("made") / "birds")


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Iterator[Any]:
    """Return a scene: a server of that index, an account, and clients."""
    from tests.service.asking import scene

    with scene(made, tmp_path) as found:
        yield found
