"""The ledger against a model of a few lines: whatever is done, in whatever order, both say the same."""

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nearveil.ledger import AccountError, KeyConflictError, KeySpentError, Ledger, OverBudgetError
from nearveil.ledger.history import Balance
from nearveil.privacy.events import PureDp

from .chaos_worker import KILLS
from .conftest import ABOUT
from .stating import stated

AMOUNTS = ("0.1", "0.2", "0.3", "0.7")
PLAN = {"0.1": 5, "0.2": 3, "0.7": 1}
Charge = dict[str, int]

charges = st.dictionaries(st.sampled_from(AMOUNTS), st.integers(1, 3), min_size=1, max_size=2)
accounts = st.sampled_from(["pure", "plan"])
clients = st.sampled_from([None, None, "ann", "bob"])
keys = st.sampled_from("abcdefgh")


@dataclass
class Pot:
    """A budget: of epsilons or, with a plan, of counts."""

    epsilon: Fraction
    plan: Charge | None = None
    spent: Fraction = Fraction(0)
    taken: Counter[str] = field(default_factory=Counter)

    def affords(self, charge: Charge) -> bool:
        if self.plan is not None:
            return all(self.taken[epsilon] + count <= self.plan.get(epsilon, 0) for epsilon, count in charge.items())
        return self.spent + price(charge) <= self.epsilon

    def pay(self, charge: Charge) -> None:
        self.spent += price(charge)
        self.taken.update(charge)


@dataclass
class Model:
    """An account."""

    pot: Pot
    quotas: dict[str, Pot] = field(default_factory=dict)
    debits: dict[str, tuple[Charge, str | None]] = field(default_factory=dict)
    messages: dict[str, bytes] = field(default_factory=dict)
    entries: int = 1

    def expected(self, charge: Charge, key: str, client: str | None) -> type[Exception] | None:
        """What a spend raises, or nothing."""
        if client is not None and client not in self.quotas:
            return AccountError
        if key in self.debits:
            if self.debits[key] != (charge, client):
                return KeyConflictError
            return None if key in self.messages else KeySpentError
        pots = [self.pot] + ([] if client is None else [self.quotas[client]])
        return None if all(pot.affords(charge) for pot in pots) else OverBudgetError


def price(charge: Charge) -> Fraction:
    return sum((Fraction(epsilon) * count for epsilon, count in charge.items()), Fraction(0))


def events(charge: Charge) -> list[tuple[PureDp, int]]:
    return [(PureDp(float(epsilon)), count) for epsilon, count in charge.items()]


class Ledgers(RuleBasedStateMachine):
    """Two accounts without delta, so that the model's sums are exact: one of epsilons, one with a plan."""

    url: str | None = None

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.place = self.url or str(Path(self.folder.name) / "ledger.db")
        self.witness = Path(self.folder.name) / "witness"
        self.witness.touch()  # the database may have accounts of earlier runs
        self.ledger = Ledger(self.place, witness=self.witness)
        self.tail = len(self.ledger.accounts())  # of earlier examples, in a database that they share
        self.models = {"pure": Model(Pot(Fraction(2))), "plan": Model(Pot(Fraction(2), plan=PLAN))}
        for kind, model in self.models.items():
            plan = None if model.pot.plan is None else events(model.pot.plan)
            self.ledger.open_account(self.name(kind), **ABOUT, epsilon=2.0, delta=0.0, plan=plan)

    def name(self, kind: str) -> str:
        return f"{kind} {self.tail}"

    def account(self, kind: str) -> Any:
        return self.ledger.account(self.name(kind))

    @rule(kind=accounts, charge=charges, key=keys, client=clients, message=st.none() | st.binary(max_size=9))
    def spend(self, kind: str, charge: Charge, key: str, client: str | None, message: bytes | None) -> None:
        model, account = self.models[kind], self.account(kind)
        error = model.expected(charge, key, client)
        if error is not None:
            with pytest.raises(error):
                account.spend(stated(*events(charge)), key, client=client)
            return
        with account.spend(stated(*events(charge)), key, client=client) as debit:
            assert debit.repeated == (key in model.debits)
            assert debit.message == model.messages.get(key)
            if debit.repeated:
                return
            model.pot.pay(charge)
            if client is not None:
                model.quotas[client].pay(charge)
            model.debits[key], model.entries = (charge, client), model.entries + 1
            if message is not None:
                debit.store(message)
                model.messages[key], model.entries = message, model.entries + 1

    @rule(kind=accounts, client=st.sampled_from(["ann", "bob"]), charge=charges)
    def give(self, kind: str, client: str, charge: Charge) -> None:
        model, account = self.models[kind], self.account(kind)
        terms: dict[str, Any] = {"plan": events(charge)} if kind == "plan" else {"epsilon": float(price(charge))}
        pot = Pot(price(charge), plan=charge if kind == "plan" else None)
        if not (model.pot.plan is None and pot.epsilon <= 2) and not fits(charge, model.pot.plan):
            with pytest.raises(ValueError, match="part of the account"):
                account.quota(client, **terms)
            return
        before = model.quotas.get(client)
        if before is not None and (before.plan if kind == "plan" else before.epsilon) != (pot.plan or pot.epsilon):
            with pytest.raises(AccountError):
                account.quota(client, **terms)
            return
        account.quota(client, **terms)
        if before is None:
            model.quotas[client], model.entries = pot, model.entries + 1

    @rule(kind=accounts, charge=charges)
    def preview(self, kind: str, charge: Charge) -> None:
        assert self.account(kind).preview(stated(*events(charge))).allowed == self.models[kind].pot.affords(charge)

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.place, witness=self.witness)

    @precondition(lambda self: hasattr(self, "models"))
    @invariant()
    def same(self) -> None:
        for kind, model in self.models.items():
            self.compare(self.account(kind).balance(), model.pot)

    def compare(self, balance: Balance, pot: Pot) -> None:
        assert Fraction(repr(balance.spent)) == pot.spent
        assert Fraction(repr(balance.left)) == max(Fraction(0), Fraction(repr(balance.epsilon)) - pot.spent)

    def teardown(self) -> None:
        if not hasattr(self, "models"):
            return
        for kind, model in self.models.items():
            history = self.account(kind).history()
            assert {e.key: e.message for e in history if e.kind == "message"} == model.messages
            paid = {
                e.key: ({repr(event.epsilon): n for event, n in e.events}, e.client)
                for e in history
                if e.kind == "debit"
            }
            assert paid == model.debits
            assert [e.sequence for e in history] == list(range(1, model.entries + 1))
            for client, pot in model.quotas.items():
                self.compare(self.account(kind).balance(client=client), pot)
            assert self.ledger.verify(self.name(kind))
        self.ledger.close()
        self.folder.cleanup()


def fits(charge: Charge, plan: Charge | None) -> bool:
    return plan is not None and all(count <= plan.get(epsilon, 0) for epsilon, count in charge.items())


def run(machine: type[Ledgers], examples: int) -> None:
    chosen = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=chosen)


def test_the_ledger_is_what_its_model_is() -> None:
    run(Ledgers, max(15, KILLS // 4))


def test_the_ledger_is_what_its_model_is_on_postgresql(postgres_url: str) -> None:
    run(type("OnPostgres", (Ledgers,), {"url": postgres_url}), max(5, KILLS // 10))
