"""The private search runs as a person runs it."""

import re
from pathlib import Path

import pytest

from studies import search


def test_the_search_stays_between_floor_and_ceiling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "EPSILONS", (2.0, 6.0))
    search.main(["--out", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "query 5 refused: account demo: budget epsilon 18 at delta 0, spent 16, left 2" in printed
    assert "all is well" in printed
    rows = re.findall(r"│ [26] │ (0\.\d{3}) │ (0\.\d{3}) │ (0\.\d{3}) │", printed)
    assert len(rows) == 2
    for found, ceiling, floor in (map(float, row) for row in rows):
        assert floor < found < ceiling + 0.03  # a few hundred queries: the sample may pass what its mean cannot
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
