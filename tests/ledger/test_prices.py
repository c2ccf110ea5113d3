"""What accounts charge: messages by the number of their sets, Gaussian noise by a filter of its own."""

import json
import sqlite3
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent

from nearveil.ledger import Account, KeyConflictError, Ledger, OverBudgetError
from nearveil.ledger.budget import (
    UNITS,
    FilterBudget,
    GaussianBudget,
    PureBudget,
    UnpricedError,
    count_affordable,
    make_charge,
    parse_budget,
)
from nearveil.privacy.accounting import GaussianFilter
from nearveil.privacy.events import NamedSets, NoisyScreening, PureDp, VoteHistogram

from .stating import stated

Open = Callable[..., Account]
ANSWER = GaussianDpEvent(100.0)
STORED = Path(__file__).parents[1] / "stored"


def test_an_account_buys_149_messages_where_it_bought_40(open_account: Open, ledger: Ledger) -> None:
    account = open_account(epsilon=40.0, delta=1e-6)
    account.spend(stated(NamedSets(1.0, 20)), times=149)
    with pytest.raises(OverBudgetError):
        account.spend(stated(NamedSets(1.0, 20)))
    account = open_account("worst case", epsilon=40.0, delta=1e-6)
    account.spend(stated(PureDp(1.0)), times=40)
    with pytest.raises(OverBudgetError):
        account.spend(stated(NamedSets(1.0, 2)))
    assert ledger.verify()


def test_an_account_without_delta_charges_every_message_its_epsilon(open_account: Open) -> None:
    account = open_account(epsilon=0.7, delta=0.0)
    for n_sets in (2, 20, 1000, 3, 4, 5, 6):
        account.spend(stated(NamedSets(0.1, n_sets)))
    assert account.balance().left == 0.0
    assert count_affordable(PureBudget.open(40.0), NamedSets(1.0, 20)) == 40
    assert count_affordable(FilterBudget.open(40.0, 1e-6), NamedSets(1.0, 20)) == 149
    assert count_affordable(FilterBudget.open(40.0, 1e-6), NamedSets(60.0, 20)) == 0


def test_a_retry_finds_its_message_whatever_the_number_of_sets(open_account: Open) -> None:
    """The map may have changed, or an earlier version may have paid the same message as a pure event."""
    account = open_account(delta=0.0)
    for key, first in (("old", PureDp(0.25)), ("new", NamedSets(0.25, 20))):
        with account.spend(stated(first), key) as debit:
            debit.store(b"sent")
        assert account.spend(stated(NamedSets(0.25, 12)), key).message == b"sent"
        with pytest.raises(KeyConflictError):
            account.spend(stated(NamedSets(0.125, 20)), key)
    assert account.balance().spent == 0.5


def test_a_plan_pays_for_messages_with_as_many_sets_or_more(open_account: Open) -> None:
    """Theorem 1 of docs/theory/ledger.md: a payer dominates what it pays for."""
    plan = [(NamedSets(1.0, 20), 3), (NamedSets(1.0, 50), 1), (PureDp(2.0), 2), (NamedSets(0.5, 30, 3), 1)]
    account = open_account(epsilon=12.0, delta=1e-6, plan=plan)
    account.spend(stated(NamedSets(1.0, 30)))  # the planned one with the most sets that dominates it
    account.spend(stated(NamedSets(1.0, 999)))
    account.spend(stated(NamedSets(2.0, 7, 3)))
    assert account.count_left(stated(NamedSets(1.0, 30)), 99) == 2
    assert dict(account.remaining()) == {NamedSets(1.0, 20): 2, PureDp(2.0): 1, NamedSets(0.5, 30, 3): 1}
    unplanned = (NamedSets(1.0, 19), PureDp(1.0), NamedSets(1.0, 40, 2), NamedSets(0.5, 60, 3), NamedSets(0.9, 20))
    for event in unplanned:
        assert account.count_left(stated(event), 9) == 0
        with pytest.raises(OverBudgetError, match="not in the plan"):
            account.spend(stated(event))
    with pytest.raises(OverBudgetError, match="planned 1, taken 1"):
        account.spend(stated(NamedSets(1.0, 50)))


def test_an_account_of_gaussian_noise(open_account: Open, ledger: Ledger) -> None:
    account = open_account(delta=1e-6, releases="gaussian")
    assert (account.kind, account.guarantee.within and account.guarantee.within.orders) == ("gaussian", ())
    account.quota("ann", epsilon=0.5)
    account.spend(stated(ANSWER), client="ann", times=100)
    with pytest.raises(OverBudgetError, match="client ann"):
        account.spend(stated(ANSWER), client="ann", times=100)
    account.spend(stated(ANSWER), times=459)
    account.spend(stated(NoisyScreening(141.5, 3.0, 9), VoteHistogram(201.0)))  # as much as another answer
    assert 0 < account.balance().left < 1e-3
    with pytest.raises(OverBudgetError):
        account.spend(stated(ANSWER))
    for event in (PureDp(0.001), NamedSets(0.001, 50), LaplaceDpEvent(1e4), PoissonSampledDpEvent(0.1, ANSWER)):
        with pytest.raises(OverBudgetError, match="is not Gaussian noise without sampling"):
            account.spend(stated(event))
    assert ledger.verify()
    assert ledger.account(account.name).balance() == account.balance()


def test_its_prices_are_exact_and_round_against_the_spender() -> None:
    budget, gate = GaussianBudget.open(1.0, 1e-6), GaussianFilter(1.0, 1e-6)
    assert 0 <= gate.limit - Fraction(budget.limits[0], UNITS) < Fraction(1, UNITS)
    for multiplier in (3.0, 0.1, 1e-9, 12345.678, 1e12):
        ((price,), (often,)) = (
            budget.price(make_charge([(GaussianDpEvent(multiplier), times)], "replace")) for times in (1, 7)
        )
        exact = 1 / Fraction(multiplier) ** 2
        assert price is not None
        assert 0 <= Fraction(price, UNITS) - exact < Fraction(1, UNITS)
        assert often == 7 * price
    assert parse_budget(budget.terms()) == budget
    assert json.loads(budget.terms())["kind"] == "gaussian"
    assert count_affordable(budget, ANSWER) == 560
    with pytest.raises(UnpricedError):
        budget.price(make_charge(PureDp(0.1), "replace"))


def test_the_kind_of_an_account_is_fixed_when_it_is_opened(open_account: Open) -> None:
    """Whether an account is mixed never depends on an answer: a mixed one is a Renyi filter from the start."""
    mixed, gaussian = FilterBudget.open(1.0, 1e-6), GaussianBudget.open(1.0, 1e-6)
    assert not mixed.contains(gaussian)
    assert not gaussian.contains(mixed)
    assert count_affordable(mixed, ANSWER) == 394
    for terms in ({"plan": [ANSWER]}, {"delta": 0.0}, {"releases": "laplace"}, {"epsilon": 80.0}):
        with pytest.raises(ValueError, match=r"releases|delta|epsilon"):
            open_account("wrong", **{"delta": 1e-6, "releases": "gaussian", **terms})


@pytest.mark.parametrize("name", sorted(path.name for path in STORED.glob("ledger-*.sql")))
def test_a_stored_ledger_is_priced_as_before_and_buys_more(name: str, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "l.db")
    connection.executescript((STORED / name).read_text())
    connection.close()
    (tmp_path / "l.db").chmod(0o600)
    (tmp_path / "l.db.witness").touch()
    with Ledger(tmp_path / "l.db") as ledger:
        assert ledger.verify()
        for account in [each for each in ledger.accounts() if each.kind != "plan"]:
            about: dict[str, Any] = {name: getattr(account, name) for name in ("protects", "unit", "relation")}
            once = stated(NamedSets(0.25, 20), **about)
            before, after = account.preview(stated(PureDp(0.25), **about)).cost, account.preview(once).cost
            assert 0 < after < before if account.kind == "filter" else before == after == 0.25
            account.spend(once, "today")
        assert ledger.verify()
