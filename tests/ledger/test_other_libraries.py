"""Events of other libraries: which accounts pay for them, as docs/howto/ledger.md says."""

from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest

from nearveil.ledger import Ledger
from nearveil.privacy import Basis, compose_events
from nearveil.privacy.events import PureDp

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "ledger.md").read_text(encoding="utf-8")
ABOUT: Any = {"protects": "database", "unit": "patient", "relation": "add-remove"}
EVENTS = {
    "`PureDp` (of `nearveil.privacy.events`), `LaplaceDpEvent`": [PureDp(0.1), dp.LaplaceDpEvent(10.0)],
    "`GaussianDpEvent`": [dp.GaussianDpEvent(10.0)],
    "`ZCDpEvent`": [dp.ZCDpEvent(0.001)],
    "`PoissonSampledDpEvent` of `GaussianDpEvent`": [dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(3.0))],
    "`PoissonSampledDpEvent` of `LaplaceDpEvent`": [dp.PoissonSampledDpEvent(0.1, dp.LaplaceDpEvent(3.0))],
}
KINDS: dict[str, dict[str, Any]] = {
    "delta 0": {"delta": 0.0},
    "filter": {"delta": 1e-6},
    '`releases="gaussian"`': {"delta": 1e-6, "releases": "gaussian"},
    "plan": {"delta": 1e-6},
}


def pays(ledger: Ledger, event: dp.DpEvent, kind: str) -> bool:
    """Return whether an account of a kind can be opened for an event, and pays for it."""
    terms = KINDS[kind] | ({"plan": [event]} if kind == "plan" else {})
    try:
        account = ledger.open_account(f"{event} {kind}"[:200], owner="me", epsilon=2.0, **terms, **ABOUT)
        account.spend(compose_events([event], delta=1e-6, basis=Basis("its library"), **ABOUT))
    except ValueError:
        return False
    return True


def test_the_page_says_which_accounts_pay(tmp_path: Path) -> None:
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in PAGE.splitlines()]
    table = {row[0]: row[1:] for row in rows if len(row) == 1 + len(KINDS)}
    assert table["event"] == list(KINDS)
    with Ledger(tmp_path / "budget.db") as ledger:
        for name, events in EVENTS.items():
            for event in events:
                assert ["yes" if pays(ledger, event, kind) else "no" for kind in KINDS] == table[name], event
    assert set(table) - set(EVENTS) == {"event", "`SelfComposedDpEvent`, `ComposedDpEvent`"}


def test_an_event_without_a_price_is_refused_with_the_reason(tmp_path: Path) -> None:
    event = dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(1.0))
    stated = compose_events([event], delta=1e-6, basis=Basis("its library"), **ABOUT)
    with Ledger(tmp_path / "budget.db") as ledger:
        account = ledger.open_account("cohort", owner="me", epsilon=2.0, delta=1e-6, **ABOUT)
        with pytest.raises(ValueError, match="no accountant prices its events"):
            account.spend(stated)
        assert len(account.history()) == 1
