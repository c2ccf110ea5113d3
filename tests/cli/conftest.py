import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that commands run in, on a wide screen, told nothing by whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("nearveil.cli._output._PROGRESS_INTERVAL", 3600.0)  # no lines on a busy machine
    for name in [name for name in os.environ if name.startswith("NEARVEIL_") and name != "NEARVEIL_DATA"]:
        monkeypatch.delenv(name)
    return tmp_path
