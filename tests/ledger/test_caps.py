"""Caps: how often something may happen at all, counted with the debits; and ledgers that were stored before."""

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from nearveil.ledger import Account, AccountError, Ledger, OverBudgetError
from nearveil.ledger.errors import CorruptLedgerError
from nearveil.privacy.events import PureDp

from .stating import stated
from .test_crashes import lose_answers
from .test_verify import by_hand

Open = Callable[..., Account]
NOISY, OTHER = GaussianDpEvent(30.0), GaussianDpEvent(40.0)
STORED = Path(__file__).parents[1] / "stored" / "ledger-0001.sql"


def kinds(account: Account) -> list[str]:
    return [entry.kind for entry in account.history()]


def test_a_cap_is_counted_with_the_debit_and_not_passed(ledger: Ledger, open_account: Open) -> None:
    account = open_account(epsilon=9.0)
    cap = account.open_cap([(NOISY, 5), (OTHER, 2)])
    assert [account.take(stated(NOISY), most, cap=cap) for most in (2, 0, 7, 1)] == [2, 0, 3, 0]
    assert account.remaining(cap) == ((OTHER, 2),)
    account.spend(stated(OTHER), "k", cap=cap)
    before, spent = kinds(account), account.balance().spent
    with pytest.raises(OverBudgetError, match="taken 5, this takes 1, left 0"):
        account.spend(stated(NOISY), "l", cap=cap)
    with pytest.raises(OverBudgetError, match="not in the plan"):
        account.spend(stated(PureDp(0.1)), cap=cap)
    assert account.take(stated(PureDp(0.1)), 3, cap=cap) == 0
    assert kinds(account) == before == ["opened", "cap", *["debit", "take"] * 3]
    assert account.balance().spent == spent
    assert account.spend(stated(NOISY)).receipt.sequence == 9  # without the cap the account pays for what it can
    assert account.remaining() == ()
    assert ledger.verify()


def test_a_cap_a_client_and_an_account_all_bind(ledger: Ledger, open_account: Open) -> None:
    account = open_account(delta=0.0)
    account.quota("ann", epsilon=0.5)
    cap = account.open_cap([(PureDp(0.25), 3)])
    account.spend(stated(PureDp(0.25)), "a", client="ann", cap=cap)
    account.spend(stated(PureDp(0.25)), "b", client="ann", cap=cap)
    with pytest.raises(OverBudgetError, match="client ann"):
        account.spend(stated(PureDp(0.25)), "c", client="ann", cap=cap)
    assert account.take(stated(PureDp(0.25)), 9, cap=cap) == 1
    account.spend(stated(PureDp(0.125)))
    other = account.open_cap([(PureDp(0.125), 3)])
    with pytest.raises(OverBudgetError, match=r"left 0\.125"):
        account.take(stated(PureDp(0.125)), 2, cap=other)
    assert account.remaining(other) == ((PureDp(0.125), 3),)
    assert ledger.verify()


def test_a_plan_grants_what_it_has_left(open_account: Open) -> None:
    account = open_account(plan=[(NOISY, 4)])
    assert account.open_cap([(NOISY, 4)]) is None
    cap = account.open_cap([(NOISY, 3)])
    assert account.take(stated(NOISY), 3) == 3
    assert account.take(stated(NOISY), 3, cap=cap) == 1
    assert account.remaining() == ()
    assert account.remaining(cap) == ((NOISY, 2),)
    assert account.take(stated(NOISY), 3, cap=cap) == 0


def test_caps_have_names_of_their_own(open_account: Open) -> None:
    account = open_account()
    assert account.open_cap([(NOISY, 1)]) != account.open_cap([(NOISY, 1)])
    with pytest.raises(AccountError, match="no cap"):
        account.take(stated(NOISY), 1, cap="nobody's")
    with pytest.raises(AccountError, match="no cap"):
        account.spend(stated(NOISY), cap="nobody's")
    with pytest.raises(ValueError, match="most must be"):
        account.take(stated(NOISY), -1)
    assert kinds(account) == ["opened", "cap", "cap"]


def test_threads_take_no_more_than_the_cap(ledger: Ledger, open_account: Open) -> None:
    account = open_account(epsilon=9.0)
    cap = account.open_cap([(NOISY, 23)])
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: account.take(stated(NOISY), 2, cap=cap), range(24))) == 23
    assert ledger.verify()


def test_a_take_whose_answer_is_lost_is_found_again(
    url: str, ledger: Ledger, open_account: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = open_account(epsilon=9.0)
    cap = account.open_cap([(NOISY, 5)])
    lose_answers(url, monkeypatch)
    assert [account.take(stated(NOISY), 2, cap=cap) for _ in range(4)] == [2, 2, 1, 0]
    monkeypatch.undo()
    assert kinds(account) == ["opened", "cap", *["debit", "take"] * 3]
    assert ledger.verify()


ENTRY = "UPDATE nearveil_entry SET {} WHERE sequence = {}"
TAMPERING = {
    "price": ENTRY.format("payload = '{\"price\":[1]}'", 4),
    "cap": ENTRY.format("client = 'cap 1'", 4),
    "removed": "DELETE FROM nearveil_entry WHERE sequence = 4",
    "terms": ENTRY.format("payload = replace(payload, '[5]', '[9]')", 2),
    "row: totals": "UPDATE nearveil_quota SET totals = '[0]'",
    "row: terms": "UPDATE nearveil_quota SET terms = replace(terms, '[5]', '[9]')",
    "row: removed": "DELETE FROM nearveil_quota",
}


@pytest.mark.parametrize("what", TAMPERING)
def test_tampering_with_a_cap_is_found(what: str, url: str, ledger: Ledger, open_account: Open) -> None:
    account = open_account()
    cap = account.open_cap([(NOISY, 5)])
    account.take(stated(NOISY), 2, cap=cap)
    assert ledger.verify()
    by_hand(url, TAMPERING[what])
    assert not ledger.verify()
    if what.startswith("row"):
        with pytest.raises((CorruptLedgerError, AccountError)):
            account.take(stated(NOISY), 1, cap=cap)


def test_a_ledger_that_was_stored_before_caps_opens_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "stored.db"
    connection = sqlite3.connect(path)
    connection.executescript(STORED.read_text())
    connection.close()
    Path(f"{path}.witness").touch()
    with Ledger(path, read_only=True) as ledger:
        assert str(ledger.verify()) == "8 entries of 3 accounts checked: all is well."
    with Ledger(path) as ledger:
        account = ledger.account("filter")
        assert [entry.key for entry in account.history() if entry.kind == "debit"] == ["second"]
        cap = account.open_cap([(NOISY, 2)])
        assert account.take(stated(NOISY), 3, cap=cap) == 2
        assert ledger.account("pure").spend(stated(PureDp(0.25)), "first", client="ann").message == b"kept"
        assert ledger.verify()
