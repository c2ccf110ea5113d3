from pathlib import Path

import pytest

from tests.clocks import hurry


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an index of sixty small pictures with two maps."""
    from tests.ui.pages import make_index

    return make_index(tmp_path_factory.mktemp("ui") / "index")


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no client wait for the end of a private step."""
    hurry(monkeypatch)
