import matplotlib as mpl
import pandas as pd
import pytest

from studies import _report
from studies._figures import STYLE
from studies._study import Study


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the figures of a page, but write none: their layout and two files take most of a study in miniature."""

    def draw(study: Study, frame: pd.DataFrame, _: object) -> list[str]:
        with mpl.rc_context(STYLE):
            figures = study.figures(frame)
            for figure in figures.values():
                figure.set_layout_engine("none")
                figure.draw_without_rendering()
        return [f"{study.name}-{name}" for name in figures]

    monkeypatch.setattr(_report, "_draw", draw)
