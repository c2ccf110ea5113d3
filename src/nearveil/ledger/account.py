"""An account: a handle that is copied freely, on one budget that never is."""

import secrets
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast

import sqlalchemy as sa
from dp_accounting import DpEvent, SelfComposedDpEvent

from nearveil.ledger._spending import Core, Debit, SpendRequest, new_key, spend, take
from nearveil.ledger._store import (
    Book,
    Held,
    Receipt,
    append_entry,
    find_quota,
    insert_quota,
    load_book,
    load_quota,
    read_entries,
)
from nearveil.ledger.budget import (
    Budget,
    Charge,
    Events,
    FilterBudget,
    PlanBudget,
    PureBudget,
    UnpricedError,
    canonical_json,
    charge_guarantee,
    find_pld_epsilon,
    join_charges,
    make_charge,
    read_charge,
    repeat_charge,
)
from nearveil.ledger.errors import AccountError
from nearveil.ledger.history import (
    Balance,
    Entry,
    Preview,
    is_affordable,
    make_balance,
    make_entry,
    make_preview,
    make_refusal,
)
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import check_count, check_text
from nearveil.privacy.events import Budgeted
from nearveil.privacy.guarantee import FilterTerms, Protects, Relation

if TYPE_CHECKING:
    from nearveil.ledger._ledger import Ledger

Parts: TypeAlias = Iterable[tuple[Guarantee, int]]
"""Several releases, and how often each happens."""


class Account:
    """A budget that lasts, and the way to spend it. Made by :class:`Ledger`, whose example shows one; never directly.

    Copies, deep copies, pickles and scikit-learn clones are handles on the same account.
    """

    def __init__(self, ledger: "Ledger", name: str) -> None:
        self._ledger, self.name = ledger, name

    @property
    def owner(self) -> str:
        """Whose account it is."""
        return str(self._about["owner"])

    @property
    def protects(self) -> Protects:
        """Whose record is protected, "query" or "database"."""
        return cast("Protects", self._about["protects"])

    @property
    def unit(self) -> str:
        """What one record is."""
        return str(self._about["unit"])

    @property
    def relation(self) -> Relation:
        """How two inputs that shall look alike differ, "replace" or "add-remove"."""
        return cast("Relation", self._about["relation"])

    @property
    def kind(self) -> str:
        """Plan, filter or pure."""
        return self._budget.kind

    @property
    def epsilon(self) -> float:
        """The budget."""
        return self._budget.epsilon

    @property
    def delta(self) -> float:
        """The budget."""
        return self._budget.delta

    @property
    def guarantee(self) -> Guarantee:
        """What holds for everything that is ever paid from it: all of a plan, or whatever a filter lets pass.

        Samplers of finite precision may add to delta, at most 1e-5 of it (or 1e-20, if that is more) with each
        mechanism; screenings more, where the account's epsilon is above their plan's. See docs/theory/ledger.md.
        """
        events, within = (Budgeted(self.epsilon, self.delta),), None
        if isinstance(self._budget, PlanBudget):
            charge = tuple(zip(self._budget.plan, self._budget.limits, strict=True))
            events = tuple(SelfComposedDpEvent(event, times) for event, times in read_charge(charge))
        else:
            orders = self._budget.orders if isinstance(self._budget, FilterBudget) else ()
            within = FilterTerms(self.epsilon, self.delta, orders)
        return Guarantee(
            epsilon=self.epsilon,
            delta=self.delta,
            protects=self.protects,
            unit=self.unit,
            relation=self.relation,
            basis=Basis(f"a budget ({self.kind}) that is debited before each release", "docs/theory/ledger.md"),
            events=events,
            within=within,
        )

    def balance(self, *, client: str | None = None) -> Balance:
        """Return what is spent and what is left, of the account or of a client's quota."""
        return make_balance(self.name, client, self._held(client))

    def remaining(self, cap: str | None = None) -> tuple[tuple[DpEvent, int], ...]:
        """Return what may still be taken of the account's plan, or of a cap; empty for accounts without a plan."""
        held = self._held(cap)
        return read_charge(held.budget.left(held.totals)) if isinstance(held.budget, PlanBudget) else ()

    def assert_affordable(self, guarantee: Guarantee | Parts) -> None:
        """Raise OverBudgetError, with figures, unless all of it could be paid now. Nothing is spent."""
        charge, held = self._charge(guarantee), self._held(None)
        if not is_affordable(held, charge):
            raise make_refusal(make_preview(self.name, None, held, charge))

    def preview(self, guarantee: Guarantee | Parts, *, client: str | None = None) -> Preview:
        """Return what a spend would cost and leave, spending nothing.

        With a `client`, whose quota would pay too, the figures are of whichever refuses, else of the quota.
        """
        charge = self._charge(guarantee)
        whole = make_preview(self.name, None, self._held(None), charge)
        if client is None or not whole.allowed:
            return whole
        return make_preview(self.name, client, self._held(client), charge)

    def spend(
        self, guarantee: Guarantee, key: str | None = None, *, client: str | None = None, cap: str | None = None
    ) -> Debit:
        """Pay, *before* the mechanism runs: when this returns, the debit is durable and stays.

        Parameters
        ----------
        guarantee : Guarantee
            Of what is about to be released: sound, and about what the account protects. Its events are what is paid.
        key : str, optional
            Names this release; :func:`new_key` by default. The same key with the same events never pays twice: it
            gives back the stored message. Never derive it from the record: the ledger keeps it in the clear.
        client : str, optional
            Whose quota pays as well, in the same transaction.
        cap : str, optional
            The cap that counts it as well, in the same transaction; see :meth:`open_cap`.

        Returns
        -------
        Debit
            A context; see there.

        Raises
        ------
        OverBudgetError
            With figures; nothing is spent.
        KeySpentError
            The key was spent and no message stored.
        KeyConflictError
            The key was used for something else.
        LedgerUnavailableError
            Whether a debit stands is not known; release nothing.
        """
        key = new_key() if key is None else check_text(key, "key")
        if client is not None:
            check_text(client, "client")
        request = SpendRequest(self.name, self._charge_once(guarantee), key, client, cap)
        return spend(self._core, request, self._book.held.terms)

    def take(self, guarantee: Guarantee, most: int, *, cap: str | None = None) -> int:
        """Pay for a release as often as a cap, and the account's plan if it has one, still allow, at most `most` times.

        Returns how many are paid for, and may happen. Raises as :meth:`spend`: an account without a plan pays for all
        that the cap allows, or for nothing.
        """
        check_count(most, "most")
        return take(self._core, SpendRequest(self.name, self._charge_once(guarantee), new_key(), None, cap), most)

    def quota(
        self, client: str, *, epsilon: float | None = None, delta: float | None = None, plan: Events | None = None
    ) -> Balance:
        """Give a client a part of the budget. Quotas may add up to more than the account: its own limit always holds.

        Accounts without a plan need an `epsilon` (`delta` is the account's by default), accounts with one a part of it.
        """
        check_text(client, "client")
        part = self._part(epsilon, delta, plan)
        if not self._budget.contains(part):
            raise ValueError("quota must be a part of the account's budget: smaller, and at no larger delta")
        return make_balance(self.name, client, self._give("quota", client, part.terms()))

    def open_cap(self, plan: Events) -> str | None:
        """Open a cap: how often each mechanism may happen at all, for whoever knows its name.

        An estimator opens one when it is fitted. Its copies, its pickles and the processes that it forks take from the
        same counts, so together they do what one estimator stated, whatever else the account could pay. Returns its
        name, for :meth:`spend` and :meth:`remaining`, or None where the account has this very plan and caps it itself.
        """
        if self.has_plan(plan):
            return None
        name = f"cap {new_key()}"
        self._give("cap", name, self._plan_budget(plan).terms())
        return name

    def has_plan(self, plan: Events) -> bool:
        """Return whether the account was opened with this very plan."""
        return self._budget == self._plan_budget(plan)

    def _plan_budget(self, plan: Events) -> PlanBudget:
        return PlanBudget.open(self.epsilon, self.delta, make_charge(plan, self.relation))

    def _give(self, kind: Literal["quota", "cap"], name: str, terms: str) -> Held:
        """Write a quota or a cap that is not there yet."""
        nonce, core = secrets.token_hex(16), self._core

        def work(connection: sa.Connection) -> tuple[Held, Receipt | None]:
            book = load_book(connection, self.name, core.witness, lock=True)
            there = find_quota(connection, self.name, name)
            if there is not None:
                if there.terms == terms:
                    return there, book.receipt  # given already, perhaps by an attempt of ours whose answer was lost
                raise AccountError(f"client {name!r} has another quota already: quotas do not change")
            held, payload = insert_quota(connection, self.name, name, terms), canonical_json({"terms": terms})
            book = append_entry(
                connection, book, kind=kind, time=core.now(), nonce=nonce, payload=payload, client=name, quota=held
            )
            return held, book.receipt

        return core.write(work)

    def receipt(self) -> Receipt:
        """Return how far the account has come, to be kept elsewhere and shown to :meth:`Ledger.verify`."""
        return self._load().receipt

    def history(self) -> list[Entry]:
        """Return all entries, in their order."""
        return self._core.read(lambda connection: [make_entry(*line) for line in read_entries(connection, self.name)])

    def _charge(self, guarantee: Guarantee | Parts) -> Charge:
        if isinstance(guarantee, Guarantee) or not isinstance(guarantee, Iterable):
            return self._charge_once(guarantee)
        pairs = [part if isinstance(part, tuple) and len(part) == 2 else (part, 1) for part in guarantee]
        return join_charges(
            repeat_charge(self._charge_once(one), check_count(times, "times", least=1)) for one, times in pairs
        )

    def _charge_once(self, guarantee: Guarantee) -> Charge:
        return charge_guarantee(guarantee, self.protects, self.unit, self.relation, self.delta)

    @property
    def _core(self) -> Core:
        return self._ledger._core

    @cached_property
    def _book(self) -> Book:
        """The account when it was first asked for; only what never changes is read from it."""
        return self._load()

    @property
    def _about(self) -> dict[str, Any]:
        return self._book.about

    @property
    def _budget(self) -> Budget:
        return self._book.held.budget

    def _load(self) -> Book:
        # What a reader finds out of step with the witness is told by verify; only spending is refused.
        return self._core.read(lambda connection: load_book(connection, self.name, None))

    def _held(self, client: str | None) -> Held:
        if client is None:
            return self._load().held
        name = check_text(client, "client")
        return self._core.read(lambda connection: load_quota(connection, self.name, name))

    def _part(self, epsilon: float | None, delta: float | None, plan: Events | None) -> Budget:
        if isinstance(self._budget, PlanBudget):
            if plan is None or epsilon is not None or delta is not None:
                raise ValueError("quota of an account with a plan must be a part of it: give plan, and nothing else")
            return self._plan_budget(plan)
        if plan is not None or epsilon is None:
            raise ValueError("quota of an account without a plan must have an epsilon, and no plan")
        return open_budget(epsilon, self.delta if delta is None else delta, None, self.relation)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., "Account"], tuple[Any, ...]]:
        return Account, (self._ledger, self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Account) and (self.name, self._ledger) == (other.name, other._ledger)

    def __hash__(self) -> int:
        return hash((self.name, self._ledger))

    def __repr__(self) -> str:
        return f"Account({self.name!r} of {self._ledger!r})"


def open_budget(epsilon: float, delta: float, plan: Events | None, relation: Relation) -> Budget:
    """Return the budget of an account: a plan, a filter, or pure epsilons."""
    if plan is not None:
        return PlanBudget.open(epsilon, delta, make_charge(plan, relation))
    return PureBudget.open(epsilon) if delta == 0 else FilterBudget.open(epsilon, delta)


def find_plan_cost(budget: Budget) -> float | None:
    """Return what a plan costs at its delta, by PLD; None where there is no plan."""
    if not isinstance(budget, PlanBudget):
        return None
    try:
        return find_pld_epsilon(tuple(zip(budget.plan, budget.limits, strict=True)), budget.delta)
    except UnpricedError as refused:
        raise ValueError(f"plan cannot be composed: {refused}") from refused
