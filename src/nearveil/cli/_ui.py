"""``nearveil ui``: the client's page, on this machine."""

import os
import threading
import webbrowser
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearveil.cli import _budget, _query
from nearveil.cli._asking import Authorities, IndexPlace, Insecure, OwnCertificate, OwnKey, TokenFile, TokenText
from nearveil.cli._index import AUTO, Which, named, place, shown, words
from nearveil.ledger import Ledger

if TYPE_CHECKING:
    from nearveil.ledger import Account

_INSTALL = 'the page needs FastAPI and uvicorn: pip install "nearveil[images,service]"'
_TIMEOUT, _RETRIES = 20.0, 2  # somebody looks at the page and waits
_END = 5.0  # seconds after Ctrl-C, before uvicorn cancels what is under way and says so at length


def ui(
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask a server instead of an index here: https://host:8321.")
    ] = None,
    index: IndexPlace = None,
    token_file: TokenFile = None,
    token: TokenText = None,
    gallery: Annotated[str | None, typer.Option(help="Of the server: the only one to offer.")] = None,
    ca: Authorities = None,
    certificate: OwnCertificate = None,
    certificate_key: OwnKey = None,
    insecure: Insecure = False,
    dummies: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Public images, one of every class: the page offers to hide among them."),
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
        str | None,
        typer.Option(
            help=f"Who pays; {_query.ACCOUNT!r} by default, opened with epsilon {_query.BUDGET:g} on first use."
        ),
    ] = None,
    witness: _budget.Watch = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0 takes a free one.")] = 8322,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Whether to open the page at once.")] = True,
) -> None:
    """Open a page on this machine: drop an image, see what the server saw and what you got.

    The page answers at 127.0.0.1 alone. Its address has a token that lets one browser in, once. The image stays on
    this machine, and is not written to a disk. Ctrl-C ends it.

    [bold]Examples[/bold]

    nearveil ui

    nearveil ui --index gallery/ --account holiday

    nearveil ui --server https://birds.example:8321 --token-file token.txt
    """
    with words(), ExitStack() as stack:
        others = _query._public_images(dummies)
        common: dict[str, Any] = {"extractor": None if extractor == AUTO else named(extractor)}
        tls: dict[str, Any] = {
            "ca": ca,
            "certificate": _query._certificate(certificate, certificate_key),
            "insecure": insecure,
        }
        if server is not None:
            tls |= {"timeout": _TIMEOUT, "retries": _RETRIES}
        try:
            from nearveil.service import QuestionError
            from nearveil.ui import PageSession, serve_page
            from nearveil.ui.session import Purse
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(_INSTALL) from missing
        purse = Purse()
        secret, common["account"] = _query._token(token_file, token, server), purse
        try:
            client, _ = stack.enter_context(_query._client(server, index, gallery, secret, common, tls))
        except QuestionError as error:
            raise ValueError(_query._in_words(error, others, local=server is None)) from None
        if account is not None:
            _budget._must_exist(ledger)
        book = stack.enter_context(Ledger(_budget.made_place(ledger), witness=witness, timeout=_budget._PATIENCE))
        purse.account = payer = _payer(book, account)
        where = server if server is not None else shown(place(index))
        session = PageSession(client, purse, book, where, gallery=gallery, dummies=others)
        serve_page(session, port=port, ready=lambda address: _say(address, payer, browser=browser), stopping=_end_soon)


def _payer(book: Ledger, name: str | None) -> "Account":
    """Return the account that pays: the one that is named, or the usual one, opened on first use."""
    if name is not None:
        return _budget._account(book, name)
    if any(one.name == _query.ACCOUNT for one in book.accounts()):
        return book.account(_query.ACCOUNT)
    return _query._first(book)


def _say(address: str, payer: "Account", *, browser: bool) -> None:
    """Say where the page is: for people, and for programs that wait for this line."""
    typer.echo(f"{payer.balance()}")
    typer.echo("The page is on this machine alone. Its address works once; Ctrl-C ends it:")
    typer.echo(address)
    if browser:  # beside the page: some wait until the browser has the page, or until it ends
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def _end_soon() -> None:
    """End this process, also where a server never answers: what was paid is on the disk, and can be asked again."""
    timer = threading.Timer(_END, os._exit, (130,))
    timer.daemon = True
    timer.start()
