"""Spending: before, once, never again, never too much; on both databases."""

import copy
import math
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
)
from sklearn.base import BaseEstimator, clone

from nearveil.ledger import (
    Account,
    AccountError,
    KeyConflictError,
    KeySpentError,
    Ledger,
    LedgerError,
    OverBudgetError,
    new_key,
)
from nearveil.ledger.errors import RolledBackError
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.accounting import BudgetExceededError, PldAccountant, RenyiFilter
from nearveil.privacy.events import PureDp

from .conftest import ABOUT
from .stating import stated

Open = Callable[..., Account]


def debits(account: Account) -> list[str | None]:
    return [entry.key for entry in account.history() if entry.kind == "debit"]


def test_the_debit_is_there_before_the_body_and_stays_when_it_raises(open_account: Open) -> None:
    account = open_account()
    seen = []

    def body() -> None:
        with account.spend(stated(GaussianDpEvent(8.0)), "k"):
            seen.extend(debits(account))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert seen == ["k"]
    assert debits(account) == ["k"]
    assert account.balance().spent > 0


def test_a_spend_that_is_not_used_as_a_context_is_paid_all_the_same(open_account: Open) -> None:
    account = open_account(delta=0.0)
    account.spend(stated(PureDp(0.5)))
    assert account.balance().spent == 0.5


def test_the_same_key_returns_the_message_and_pays_once(open_account: Open) -> None:
    account = open_account(delta=0.0)
    with account.spend(stated(PureDp(0.5)), "k") as first:
        assert not first.repeated
        assert first.message is None
        first.store(b"\x00public")
    with account.spend(stated((PureDp(0.25), 1), PureDp(0.25)), "other") as other:
        other.store(b"")
    with account.spend(stated(PureDp(0.5)), "k") as again:
        assert again.repeated
        assert again.message == b"\x00public"
        assert again.nonce == first.nonce != other.nonce
        assert len(again.nonce) == 32
        with pytest.raises(LedgerError, match="stored already"):
            again.store(b"another")
    with account.spend(stated((PureDp(0.25), 2)), "other") as empty:
        assert empty.message == b""
    assert account.balance().spent == 1.0
    assert [entry.kind for entry in account.history()] == ["opened", "debit", "message", "debit", "message"]


def test_nonces_and_keys_do_not_follow_a_seed(open_account: Open) -> None:
    """Request keys are made of nonces: one that a seed repeats could be guessed, or stand for two debits."""
    account, state = open_account(), random.getstate()
    try:
        drawn = []
        for name in ("a", "b"):
            random.seed(1)
            np.random.seed(1)  # noqa: NPY002
            drawn.append({new_key(), account.spend(stated(GaussianDpEvent(80.0)), name).nonce})
    finally:
        random.setstate(state)
    assert len(drawn[0] | drawn[1]) == 4


def test_a_key_without_a_message_never_opens_again(open_account: Open) -> None:
    account = open_account()
    with account.spend(stated(GaussianDpEvent(8.0)), "k") as debit:
        pass
    with pytest.raises(KeySpentError):
        account.spend(stated(GaussianDpEvent(8.0)), "k")
    with pytest.raises(LedgerError, match="owner of a debit"):
        debit.store(b"late")
    with pytest.raises(KeySpentError):
        account.spend(stated(GaussianDpEvent(8.0)), "k")


def test_the_same_key_with_other_events_is_an_error(open_account: Open) -> None:
    account = open_account()
    with account.spend(stated(GaussianDpEvent(8.0)), "k") as debit:
        debit.store(b"m")
    for other in (GaussianDpEvent(9.0), (GaussianDpEvent(8.0), 2), LaplaceDpEvent(8.0)):
        with pytest.raises(KeyConflictError):
            account.spend(stated(other), "k")
    same = ComposedDpEvent([GaussianDpEvent(8), NoOpDpEvent()])
    assert account.spend(stated(same), "k").message == b"m"
    assert len(debits(account)) == 1


def test_a_debit_is_neither_copied_nor_stored_twice(open_account: Open) -> None:
    account = open_account()
    with account.spend(stated(GaussianDpEvent(8.0))) as debit:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="belongs to the process"):
                duplicate(debit)
        with pytest.raises(ValueError, match="message must be bytes"):
            debit.store("text")  # type: ignore[arg-type]
        debit.store(b"m")
        with pytest.raises(LedgerError, match="once"):
            debit.store(b"n")
        assert debit.message == b"m"


def test_a_debit_that_is_over_stores_nothing(open_account: Open) -> None:
    account = open_account()
    with account.spend(stated(GaussianDpEvent(8.0)), "k") as debit:
        pass
    with pytest.raises(LedgerError, match="inside the context"):
        debit.store(b"m")
    with pytest.raises(KeySpentError):
        account.spend(stated(GaussianDpEvent(8.0)), "k")


@pytest.mark.parametrize("key", ["", " ", "x" * 201, "a\nb", "\ud800", 7])
def test_keys_are_printable_texts(key: Any, open_account: Open) -> None:
    account = open_account()
    with pytest.raises(ValueError, match="key must be"):
        account.spend(stated(GaussianDpEvent(8.0)), key)
    assert debits(account) == []


def test_any_printable_key_is_kept_apart(open_account: Open) -> None:
    account = open_account(epsilon=50.0)
    keys = ["k", "K", "k ", "'; DROP TABLE nearveil_entry; --", "\u00e9", "e\u0301", "x" * 200, "\U0001f511", new_key()]
    for key in keys:
        account.spend(stated(GaussianDpEvent(8.0)), key)
    assert debits(account) == keys


def test_pure_epsilons_add_up_to_the_last_digit(open_account: Open) -> None:
    account = open_account(delta=0.0)
    for _ in range(10):
        account.spend(stated(PureDp(0.1)))
    assert account.balance().spent == 1.0
    assert account.balance().left == 0.0
    with pytest.raises(
        OverBudgetError, match=r"budget epsilon 1 at delta 0, spent 1, left 0; this costs 1e-12"
    ) as error:
        account.spend(stated(PureDp(1e-12)))
    assert (error.value.epsilon, error.value.spent, error.value.cost, error.value.left) == (1.0, 1.0, 1e-12, 0.0)
    assert isinstance(error.value, BudgetExceededError)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)  # noqa: S301
    account.spend(stated(PureDp(0.0)))
    with pytest.raises(OverBudgetError, match="not pure"):
        account.spend(stated(GaussianDpEvent(100.0)))
    assert len(debits(account)) == 11


def test_a_filter_stops_where_the_filter_of_the_accountants_stops(open_account: Open) -> None:
    account, gate = open_account(), RenyiFilter(1.0, 1e-5)
    steps = [GaussianDpEvent(30.0), PureDp(0.02), LaplaceDpEvent(60.0)]
    allowed = 0
    for step in steps * 40:
        assert account.preview(stated(step)).allowed == gate.may_spend(step)
        if gate.may_spend(step):
            gate.spend(step)
            account.spend(stated(step))
            allowed += 1
        else:
            with pytest.raises(OverBudgetError):
                account.spend(stated(step))
    assert 10 < allowed < 120
    assert 0.8 < account.balance().spent <= 1.0
    assert len(debits(account)) == allowed


def test_a_plan_is_taken_in_any_order_and_no_further(open_account: Open) -> None:
    few, many = GaussianDpEvent(12.0), PureDp(0.01)
    account = open_account(plan=[(few, 2), (many, 50)])
    whole = PldAccountant().compose(few, 2).compose(many, 50).epsilon(1e-5)
    account.spend(stated((many, 20), few))
    account.spend(stated(many))
    part = PldAccountant().compose(few).compose(many, 21).epsilon(1e-5)
    assert account.balance().spent == pytest.approx(part, rel=1e-9)
    assert {repr(event): left for event, left in account.balance().remaining} == {repr(few): 1, repr(many): 29}
    with pytest.raises(OverBudgetError, match="planned 50, taken 21, this takes 30, left 29"):
        account.spend(stated((many, 30), few))
    with pytest.raises(OverBudgetError, match="not in the plan"):
        account.spend(stated(PureDp(0.001)))
    account.spend(stated((many, 29), few))
    assert account.balance().spent == pytest.approx(whole, rel=1e-9)
    assert account.balance().remaining == ()
    with pytest.raises(OverBudgetError, match="left 0"):
        account.spend(stated(few))


def test_a_plan_that_costs_more_than_the_budget_is_refused_with_figures(ledger: Ledger, open_account: Open) -> None:
    with pytest.raises(OverBudgetError, match=r"plan costs epsilon 4\.378 at delta 1e-05.*budget of 1") as error:
        open_account(plan=GaussianDpEvent(1.0))
    assert error.value.cost == pytest.approx(4.3776, abs=1e-3)
    assert ledger.accounts() == []
    with pytest.raises(OverBudgetError, match="infinity"):
        open_account(plan=GaussianDpEvent(1.0), delta=0.0)
    account = open_account(plan=[(PureDp(0.1), 10)], delta=0.0)
    account.spend(stated((PureDp(0.1), 10)))
    assert account.balance().spent == 1.0


def test_a_plan_that_costs_a_little_more_than_the_budget_is_refused(open_account: Open) -> None:
    cost = PldAccountant().compose(GaussianDpEvent(5.0)).epsilon(1e-5)
    with pytest.raises(OverBudgetError, match="plan costs epsilon"):
        open_account(plan=GaussianDpEvent(5.0), epsilon=0.99 * cost)
    assert open_account(plan=GaussianDpEvent(5.0), epsilon=1.01 * cost).kind == "plan"


def test_preview_spends_nothing_and_says_what_spend_then_does(open_account: Open) -> None:
    account = open_account(delta=0.0)
    account.spend(stated(PureDp(0.25)))
    seen = account.preview(stated(PureDp(0.5)))
    assert (seen.spent, seen.cost, seen.total, seen.left, seen.alone, seen.allowed) == (
        0.25,
        0.5,
        0.75,
        0.25,
        0.5,
        True,
    )
    assert str(seen) == (
        "Allowed: this costs 0.5 of epsilon 1; then 0.75 is spent and 0.25 left "
        "(alone it would be epsilon 0.5 at delta 0)."
    )
    refused = account.preview([(stated(PureDp(0.5)), 2)])
    assert not refused.allowed
    assert str(refused) == f"Refused: {refused.reason}"
    with pytest.raises(OverBudgetError) as error:
        account.spend(stated((PureDp(0.5), 2)))
    assert str(error.value) == refused.reason
    assert account.balance().spent == 0.25
    account.spend(stated(PureDp(0.5)))
    assert account.balance().left == 0.25


def test_what_nobody_can_price_is_refused_in_preview_and_spend(open_account: Open) -> None:
    inside = PoissonSampledDpEvent(0.5, ComposedDpEvent([LaplaceDpEvent(2.0), GaussianDpEvent(1.0)]))
    gate, pure = open_account(), open_account("pure", delta=0.0)
    assert pure.preview(stated(GaussianDpEvent(1.0))).alone == math.inf
    assert not pure.preview(stated(GaussianDpEvent(1.0))).allowed
    with pytest.raises(OverBudgetError, match="this costs infinity"):
        pure.spend(stated(GaussianDpEvent(1.0)))
    for event in (inside, NonPrivateDpEvent()):
        with pytest.raises(ValueError, match="what the events cost: epsilon Infinity"):
            stated(event)
        for ask in (gate.preview, gate.spend):
            with pytest.raises(ValueError, match="guarantees nothing"):
                ask(stated(event, epsilon=math.inf))
    with pytest.raises(ValueError, match="plan cannot be composed"):
        open_account("planned", plan=inside)
    assert debits(gate) + debits(pure) == []


def test_colluding_clients_gain_nothing(open_account: Open) -> None:
    account = open_account(delta=0.0)
    for client in ("ann", "bob", "cy"):
        account.quota(client, epsilon=0.5)
    account.spend(stated(PureDp(0.5)), client="ann")
    with pytest.raises(OverBudgetError, match=r"client ann in account images: budget epsilon 0\.5"):
        account.spend(stated(PureDp(0.1)), client="ann")
    account.spend(stated(PureDp(0.25)), client="bob")
    account.spend(stated(PureDp(0.25)))  # the owner's own
    with pytest.raises(OverBudgetError, match="account images: budget epsilon 1 "):
        account.spend(stated(PureDp(0.25)), client="bob")
    assert not account.preview(stated(PureDp(0.25)), client="cy").allowed
    assert account.balance(client="bob").left == 0.25
    assert account.balance().left == 0.0
    with pytest.raises(AccountError, match="no quota"):
        account.spend(stated(PureDp(0.0)), client="dee")
    assert len(debits(account)) == 3


def test_a_client_cannot_read_the_message_of_another(open_account: Open) -> None:
    account = open_account(delta=0.0)
    account.quota("ann", epsilon=0.5)
    account.quota("bob", epsilon=0.5)
    with account.spend(stated(PureDp(0.1)), "k", client="ann") as debit:
        debit.store(b"hers")
    words = set()
    for client, event in (("bob", PureDp(0.1)), ("bob", PureDp(0.2)), (None, PureDp(0.1)), ("ann", PureDp(0.2))):
        with pytest.raises(KeyConflictError) as error:
            account.spend(stated(event), "k", client=client)
        words.add(str(error.value))
    assert len(words) == 1
    assert account.spend(stated(PureDp(0.1)), "k", client="ann").message == b"hers"


def test_quotas_are_parts_of_the_budget(open_account: Open) -> None:
    gate, planned = open_account(), open_account("planned", plan=[(PureDp(0.1), 3)])
    assert gate.quota("ann", epsilon=0.5).epsilon == 0.5
    assert gate.quota("ann", epsilon=0.5).spent == 0.0
    for wrong in ({"epsilon": 2.0}, {"epsilon": 0.5, "delta": 1e-3}, {"epsilon": 0.5, "delta": 0.0}):
        with pytest.raises(ValueError, match="part of the account"):
            gate.quota("bob", **wrong)
    with pytest.raises(AccountError, match="do not change"):
        gate.quota("ann", epsilon=0.6)
    with pytest.raises(ValueError, match="must be a part of it"):
        planned.quota("ann", epsilon=0.1)
    with pytest.raises(ValueError, match="part of the account"):
        planned.quota("ann", plan=[(PureDp(0.1), 4)])
    planned.quota("ann", plan=[(PureDp(0.1), 2)])
    planned.spend(stated((PureDp(0.1), 2)), client="ann")
    with pytest.raises(OverBudgetError, match=r"client ann .*planned 2, taken 2"):
        planned.spend(stated(PureDp(0.1)), client="ann")
    planned.spend(stated(PureDp(0.1)))


class Estimator(BaseEstimator):  # type: ignore[misc]
    def __init__(self, account: Account | None = None) -> None:
        self.account = account


def test_copies_and_clones_share_the_account(ledger: Ledger, open_account: Open) -> None:
    account = open_account(delta=0.0)
    handles = [
        copy.copy(account),
        copy.deepcopy({"deep": [account]})["deep"][0],
        pickle.loads(pickle.dumps(account)),  # noqa: S301
        clone(Estimator(account)).account,
        clone(clone(Estimator(account))).account,
        copy.deepcopy(Estimator(account)).account,
    ]
    for handle in handles:
        assert handle == account
        handle.spend(stated(PureDp(0.125)))
    assert account.balance().left == 0.25
    assert len(ledger.accounts()) == 1
    pickle.loads(pickle.dumps(ledger)).close()  # noqa: S301


def test_order_is_the_sequence_and_a_clock_that_jumps_changes_nothing(url: str, tmp_path: Path) -> None:
    hours = iter([0, 5, -100, 2, -3])
    start = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)
    with Ledger(url, witness=tmp_path / "w", clock=lambda: start + timedelta(hours=next(hours, 0))) as ledger:
        account = ledger.open_account("images", **{**ABOUT, "epsilon": 1.0, "delta": 0.0})
        for key in ("a", "b", "c", "d"):
            account.spend(stated(PureDp(0.25)), key)
        history = account.history()
        assert [entry.sequence for entry in history] == [1, 2, 3, 4, 5]
        assert [entry.key for entry in history] == [None, "a", "b", "c", "d"]
        assert history[2].time == "2026-03-24T20:30:00.000000+00:00"
        with pytest.raises(OverBudgetError):
            account.spend(stated(PureDp(0.25)))
        assert ledger.verify()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": float("inf")}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"delta": -1e-9}, "delta"),
        ({"delta": float("nan")}, "delta"),
        ({"owner": ""}, "owner"),
        ({"unit": " "}, "unit"),
        ({"protects": "me"}, "protects"),
        ({"relation": "same"}, "relation"),
        ({"name": "x" * 201}, "name"),
        ({"plan": []}, "events"),
        ({"plan": [(PureDp(0.1), 0)]}, "count"),
        ({"plan": "text"}, "events"),
    ],
)
def test_terms_that_mean_nothing_are_refused(tmp_path: Path, wrong: dict[str, Any], field: str) -> None:
    with Ledger(tmp_path / "l.db") as ledger:
        terms = {"name": "images", **ABOUT, "epsilon": 1.0, "delta": 1e-5, **wrong}
        with pytest.raises(ValueError, match=field):
            ledger.open_account(**terms)
        assert ledger.accounts() == []


def test_accounts_are_found_and_never_opened_twice(ledger: Ledger, open_account: Open) -> None:
    account = open_account()
    open_account("a second", epsilon=2.0)
    with pytest.raises(AccountError, match="exists already"):
        open_account(epsilon=100.0)
    with pytest.raises(AccountError, match="No account"):
        ledger.account("third")
    assert [each.name for each in ledger.accounts()] == ["a second", "images"]
    loaded = ledger.account("images")
    assert (loaded.owner, loaded.protects, loaded.unit, loaded.relation) == (
        "the archive",
        "database",
        "image",
        "add-remove",
    )
    assert (loaded.kind, loaded.epsilon, loaded.delta) == ("filter", 1.0, 1e-5)
    assert loaded == account
    assert len({loaded, account}) == 1


def test_events_of_another_relation_are_refused(open_account: Open) -> None:
    account = open_account(relation="replace")
    with pytest.raises(ValueError, match="replace"):
        account.spend(stated(PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0))))
    with pytest.raises(ValueError, match="replace"):
        open_account("planned", relation="replace", plan=PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)))
    for nothing in ([], [NoOpDpEvent()], [(GaussianDpEvent(2.0), 0)]):
        with pytest.raises(ValueError, match="events"):
            account.spend(stated(*nothing, relation="replace"))
    assert debits(account) == []


def test_a_guarantee_is_checked_before_it_is_paid(ledger: Ledger) -> None:
    account = ledger.open_account(
        "mine", owner="me", protects="query", unit="image", relation="replace", epsilon=3.0, delta=0.0
    )
    stated: dict[str, Any] = {"epsilon": 1.0, "delta": 0.0, "protects": "query", "unit": "image", "relation": "replace"}
    promise = Guarantee(basis=Basis("a test"), events=(PureDp(1.0),), **stated)
    assert account.preview(promise).allowed
    with account.spend(promise, new_key()):
        pass
    assert account.balance().spent == 1.0
    for changed, words in (
        ({"protects": "database"}, "protects a database"),
        ({"relation": "add-remove"}, "this account for"),
        ({"sound": False, "reason": "it leaks"}, "not sound"),
        ({"events": (NoOpDpEvent(),)}, "at least one mechanism"),
        ({"epsilon": math.inf}, "guarantees nothing"),
        ({"delta": 1.0}, "guarantees nothing"),
    ):
        with pytest.raises(ValueError, match=words):
            account.spend(replace(promise, **changed), new_key())
    with pytest.raises(ValueError, match="no text for Budgeted"):
        account.spend(account.guarantee)
    assert account.balance().spent == 1.0


def test_a_witness_that_vanishes_is_noticed_on_both_databases(url: str, tmp_path: Path) -> None:
    witness = tmp_path / "elsewhere"
    with Ledger(url, witness=witness) as ledger:
        ledger.open_account("mine", **ABOUT, epsilon=3.0, delta=0.0)
    witness.unlink()
    with pytest.raises(RolledBackError, match="is missing"):
        Ledger(url, witness=witness)
    witness.touch()
    Ledger(url, witness=witness).close()


def test_receipts_may_be_given_as_they_were_written_down(open_account: Open, ledger: Ledger) -> None:
    account = open_account()
    assert ledger.verify(receipts=[str(account.receipt())]).ok


@pytest.mark.parametrize(
    "raw",
    [None, 4.0, "4", PureDp(0.1), [(PureDp(0.1), 2)], [PureDp(0.1)], [(stated(PureDp(0.1)), 0)]],
)
def test_nothing_but_a_guarantee_is_paid_for(raw: Any, open_account: Open) -> None:
    """Raw events say nothing about what they protect, whether they are sound, and whose figures they are."""
    account = open_account()
    asks: list[Callable[[], object]] = [
        lambda: account.preview(raw),
        lambda: account.assert_affordable(raw),
        lambda: account.spend(raw),
        lambda: account.take(raw, 1),
    ]
    for ask in asks:
        with pytest.raises((TypeError, ValueError), match=r"must be a Guarantee.*compose_events|times must be"):
            ask()
    assert debits(account) == []


def test_what_samplers_cost_is_a_tiny_share_of_delta(open_account: Open) -> None:
    """An account with a delta of 1e-5 paid for an extra_delta of 0.29, which no event tells of."""
    noisy = GaussianDpEvent(100.0)
    account, pure = open_account(), open_account("pure", delta=0.0)
    for extra in (0.29, 1.01e-10):
        costly = stated(noisy, epsilon=60.0, extra_delta=extra)
        for pay in (
            account.spend,
            account.preview,
            lambda guarantee: account.take(guarantee, 1),
            account.assert_affordable,
        ):
            with pytest.raises(ValueError, match="extra_delta is above 1e-05 of this account's delta"):
                pay(costly)
            with pytest.raises(ValueError, match="extra_delta is above"):
                pay(costly.part(noisy))
    with pytest.raises(ValueError, match="extra_delta is above"):
        pure.spend(stated(PureDp(0.1), epsilon=60.0, extra_delta=1e-19))
    assert not debits(account)
    assert not debits(pure)
    account.spend(stated(noisy, epsilon=60.0, extra_delta=0.99e-10))
    account.spend(stated((noisy, 10), epsilon=60.0, extra_delta=0.99e-9).part(noisy))
    pure.spend(stated(PureDp(0.1), epsilon=60.0, extra_delta=1e-27))
