"""Progress in percent, from fractions of stages."""

from nearveil.progress import tick_percent


def test_fractions_become_percent_that_never_go_back() -> None:
    ticks: list[int] = []
    report = tick_percent(ticks.append)
    for stage, fraction in (("first", 0.25), ("second", 0.2), ("second", 1.0)):
        report(stage, fraction)
    assert ticks == [25, 0, 75]
