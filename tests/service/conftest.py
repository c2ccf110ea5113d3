import pytest

from tests.clocks import hurry


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no client wait for the end of a slot: what it does is the same, and `test_client_clock.py` says when."""
    hurry(monkeypatch)
