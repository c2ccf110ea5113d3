"""``nearveil ui``: the client's page, on this machine."""

import os
import threading
import webbrowser
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearveil.cli._asking import (
    AccountName,
    describe_question_error,
    find_payer,
    join_certificate,
    list_public_images,
    open_client,
    read_token,
)
from nearveil.cli._shared import (
    AUTO,
    PATIENCE,
    Authorities,
    ExtractorName,
    IndexPlace,
    Insecure,
    LedgerPlace,
    OwnCertificate,
    OwnKey,
    TokenFile,
    TokenText,
    Witness,
    find_ledger,
    name_extra,
    report_errors,
)

if TYPE_CHECKING:
    from nearveil.ledger import Account

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
    extractor: ExtractorName = AUTO,
    ledger: LedgerPlace = None,
    account: AccountName = None,
    witness: Witness = None,
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
    with report_errors(extractor="--extractor"), ExitStack() as stack:
        from nearveil.features.backbones import make_extractor
        from nearveil.gallery.folder import describe_place, find_index
        from nearveil.ledger import Ledger

        others = list_public_images(dummies)
        common: dict[str, Any] = {"extractor": None if extractor == AUTO else make_extractor(extractor)}
        tls: dict[str, Any] = {
            "ca": ca,
            "certificate": join_certificate(certificate, certificate_key),
            "insecure": insecure,
        }
        if server is not None:
            tls |= {"timeout": _TIMEOUT, "retries": _RETRIES}
        with name_extra("images,service"):
            from nearveil.service import QuestionError
            from nearveil.ui import serve_page
            from nearveil.ui.session import PageSession, Purse
        purse = Purse()
        secret, common["account"] = read_token(token_file, token, server), purse
        try:
            client, _ = stack.enter_context(open_client(server, index, gallery, secret, common, tls))
        except QuestionError as error:
            raise ValueError(describe_question_error(error, others, local=server is None)) from None
        book = stack.enter_context(Ledger(find_ledger(ledger, make=account is None), witness=witness, timeout=PATIENCE))
        purse.account = payer = find_payer(book, account)[0]
        where = server if server is not None else describe_place(find_index(index))
        session = PageSession(client, purse, book, where, gallery=gallery, dummies=others)
        serve_page(session, port=port, ready=lambda address: _say(address, payer, browser=browser), stopping=_end_soon)


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
