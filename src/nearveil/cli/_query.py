"""``nearveil query``: the nearest images of the local index, asked for privately."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from nearveil.cli import _budget
from nearveil.cli import _query_view as view
from nearveil.cli._index import AUTO, Which, chosen, home, make_home, place, shown, words
from nearveil.features import load_image
from nearveil.ledger import Account, AccountError, Debit, Ledger, OverBudgetError, new_key
from nearveil.privacy import Guarantee
from nearveil.retrieval import (
    ClientProtocol,
    Index,
    NotAnIndexError,
    NotPublishedError,
    ProtocolError,
    Query,
    ServerProtocol,
    WireError,
    served,
)
from nearveil.retrieval._wire_schema import read

ACCOUNT, BUDGET = "queries", 100.0
_USUAL = 8  # neighbours
_GALLERY = "local"
_NO_INDEX = "`nearveil index DIR` makes one; --index or NEARVEIL_INDEX names another"


def query(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="The private image.")],
    epsilon: Annotated[float, typer.Option(help="What the question may cost.")] = 4.0,
    k: Annotated[
        int | None, typer.Option("-k", min=1, help="How many to find; 8, or as many as an answer holds.")
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            envvar="NEARVEIL_INDEX",
            metavar="PATH_OR_URL",
            help="As `nearveil index --into`; ~/.local/share/nearveil/index by default.",
        ),
    ] = None,
    extractor: Which = AUTO,
    ledger: Annotated[
        str | None,
        typer.Option(
            "--ledger",
            envvar="NEARVEIL_LEDGER",
            metavar="PATH_OR_URL",
            help="Where the account is kept; ~/.local/share/nearveil/ledger.db by default.",
        ),
    ] = None,
    account: Annotated[
        str | None, typer.Option(help=f"Who pays; {ACCOUNT!r} by default, opened with epsilon {BUDGET:g} on first use.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Names this question: again with the same image and key, nothing is paid.")
    ] = None,
    sheet: Annotated[Path | None, typer.Option(help="Where a contact sheet goes; a .png.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the contact sheet if there is one.")] = False,
    witness: _budget.Watch = None,
    as_json: _budget.Json = False,
) -> None:
    """Find the images nearest to a private one. The index's side sees the name of one set, and nothing else.

    The account pays before the question exists. The image and its feature stay in memory: neither is written down,
    unless you ask for a contact sheet.

    [bold]Examples[/bold]

    nearveil query me.jpg

    nearveil query me.jpg --epsilon 2 -k 4 --sheet found.png

    nearveil query me.jpg --account holiday --ledger budget.db --json
    """
    where, number = place(index), key or new_key()
    with words():
        client = ClientProtocol(epsilon)
        if sheet is not None:
            view.check_sheet(sheet, force=force)
        pixels = load_image(image)
        with _opened(where) as held:
            server = _server(held, where)
            public = client.take_public(server.reply(client.public_request()))
            count = _count(k, client.candidates)
            feature = chosen(extractor, public.fingerprint).extract([pixels])[0]
            with _payer(ledger, account, witness) as (payer, opened):
                question, debit = _ask(client, feature, payer, number, thumbnails=sheet is not None)
                try:
                    found = client.take_answer(server.reply(question), count)
                except (ProtocolError, WireError) as error:
                    raise ProtocolError(f"{error}. It is paid for: --key {number} asks the same again") from None
                balance = payer.balance()
            # Of all candidates alike: what is looked up must not tell which of them were chosen.
            names = {item.id: item.name for item in held.items(found.answer.ids, lenient=True)}
            stale = held.current().stale
    outcome = view.Outcome(
        names=[names.get(one, "(deleted)") for one in found.ids.tolist()],
        similarities=found.scores.tolist(),
        found=found,
        named=int(read(question, Query).message["sets"][0]),
        n_sets=public.map.n_sets,
        promise=client.guarantee,
        repeated=debit.repeated,
        key=number,
        balance=balance,
        opened=opened,
        stale=stale,
    )
    # What was paid for is shown first: a sheet that cannot be written must not lose it.
    view.show(outcome, sheet, as_json=as_json)
    if sheet is not None:
        with words():
            view.write_sheet(outcome, pixels, sheet, force=force)


@contextmanager
def _opened(where: str) -> Iterator[Index]:
    try:
        held = Index.open(where)
    except NotAnIndexError:
        raise NotAnIndexError(f"there is no index at {shown(where)}: {_NO_INDEX}") from None
    with held:
        yield held


def _server(held: Index, where: str) -> ServerProtocol:
    try:
        return ServerProtocol(*served(held, _GALLERY))
    except NotPublishedError:
        raise NotPublishedError(f"the index at {shown(where)} has no map yet: run `nearveil index DIR` again") from None


def _count(k: int | None, candidates: int) -> int:
    """Return how many to find. Checked before anything is paid."""
    if k is None:
        return min(_USUAL, candidates)
    if k > candidates:
        raise ValueError(
            f"-k: at most {candidates}, the images of an answer; `nearveil index DIR --candidates` makes them more"
        )
    return k


@contextmanager
def _payer(ledger: str | None, account: str | None, witness: Path | None) -> Iterator[tuple[Account, str]]:
    """Yield who pays, and where it was opened if it was not there."""
    if ledger is None:
        make_home()
        ledger = str(home() / "ledger.db")
    if account is not None:
        _budget._must_exist(ledger)
    with Ledger(ledger, witness=witness, timeout=_budget._PATIENCE) as book:
        if account is not None:
            yield _budget._account(book, account), ""
        elif any(one.name == ACCOUNT for one in book.accounts()):
            yield book.account(ACCOUNT), ""
        else:
            yield _first(book), shown(ledger)


def _first(book: Ledger) -> Account:
    try:
        return book.open_account(
            ACCOUNT, owner="me", protects="query", unit="image", relation="replace", epsilon=BUDGET, delta=0.0
        )
    except AccountError:  # another process was faster
        return book.account(ACCOUNT)


def _ask(
    client: ClientProtocol, feature: NDArray[np.float32], payer: Account, key: str, *, thumbnails: bool
) -> tuple[bytes, Debit]:
    """Pay and make the question; return it with the debit."""
    debits: list[Debit] = []

    def spend(promise: Guarantee) -> Debit:
        debits.append(payer.spend(promise, key))
        return debits[-1]

    try:
        question = client.ask(feature, spend=spend, extras="thumbnails" if thumbnails else "none")
    except OverBudgetError as refused:
        raise ValueError(
            f"{refused}. Nothing was asked. Ask with a lower --epsilon, or open another account "
            "(`nearveil budget create`) and name it with --account"
        ) from None
    return question, debits[0]
