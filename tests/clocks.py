"""Clocks for tests: none depends on how fast a machine is."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from nearveil.client.timing import Clock


@dataclass
class SetClock(Clock):
    """Stands still but for what is waited for, and for what work is said to take."""

    time: float = 1000.0

    def now(self) -> float:
        return self.time

    async def until(self, moment: float) -> None:
        self.time = max(self.time, moment)

    async def pause(self, seconds: float) -> None:
        del seconds  # drawn anew each time: what is seen of the rest does not depend on it


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no client wait for the end of a private step."""

    async def at_once(self: Clock, moment: float) -> None:
        del self, moment

    monkeypatch.setattr(Clock, "until", at_once)


_REPLY = 0.03125  # seconds that a server takes


@dataclass
class Watched:
    """What somebody on the way sees of a client whose private work takes as long as it is told to.

    Attributes
    ----------
    clock : SetClock
    sent, heard : list of (str, float)
        What was requested, with the moments of request and reply.
    decoding, extracting, paying, choosing, ranking : float
        Seconds that they take from now on.
    """

    clock: SetClock = field(default_factory=SetClock)
    sent: list[tuple[str, float]] = field(default_factory=list)
    heard: list[tuple[str, float]] = field(default_factory=list)
    decoding: float = 0.0
    extracting: float = 0.0
    loading: float = 0.0  # of an extractor
    paying: float = 0.0
    choosing: float = 0.0
    ranking: float = 0.0

    def work(self, **seconds: float) -> None:
        """Say how long private work takes, and forget what was seen."""
        for name, value in seconds.items():
            setattr(self, name, value)
        self.sent.clear()
        self.heard.clear()

    def gaps(self) -> list[tuple[str, float]]:
        """Return what was requested, each with the seconds since the reply before."""
        before = [moment for _, moment in self.heard[:-1]]
        return [(what, round(at - since, 9)) for (what, at), since in zip(self.sent[1:], before, strict=True)]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return what is seen of all clients that are made from now on."""
    from nearveil.client import images, questions, session, transport
    from nearveil.ledger import Account
    from nearveil.mechanisms import PublicMap

    seen = Watched()

    def slow(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def worked(*given: Any, **options: Any) -> Any:
            seen.clock.time += getattr(seen, what)
            return real(*given, **options)

        monkeypatch.setattr(owner, name, worked)

    send = transport.HttpTransport.send

    async def seen_send(self: Any, request: Any) -> Any:
        seen.sent.append((request.endpoint, seen.clock.time))
        try:
            return await send(self, request)
        finally:
            seen.clock.time += _REPLY
            seen.heard.append((request.endpoint, seen.clock.time))

    monkeypatch.setattr(transport.HttpTransport, "send", seen_send)
    monkeypatch.setattr(session, "Clock", lambda: seen.clock)
    slow(images, "load_image", "decoding")
    slow(images.FeatureMaker, "load", "loading")
    extract = images.FeatureMaker.extract

    def extracted(self: Any, arrays: Any, fingerprint: str | None = None) -> Any:
        seen.clock.time += seen.extracting if any(array.ndim == 3 for array in arrays) else 0.0
        return extract(self, arrays, fingerprint)

    monkeypatch.setattr(images.FeatureMaker, "extract", extracted)
    slow(Account, "spend", "paying")
    slow(PublicMap, "choose", "choosing")
    slow(questions, "rank_answer", "ranking")
    return seen
