"""``nearveil ui``, and what `query`, `classify` and `sync` share with it: whom to ask, which token, and who pays."""

import html
import os
import shlex
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    find_account,
    find_ledger,
    name_extra,
    place_ledger,
    report_errors,
)

if TYPE_CHECKING:
    from nearveil.client import QuestionError
    from nearveil.client.clients import Client
    from nearveil.gallery import Index
    from nearveil.ledger import Account, Debit, Ledger
    from nearveil.ledger.history import Balance
    from nearveil.privacy import Guarantee

ACCOUNT, BUDGET = "queries", 100.0
AccountName = Annotated[
    str | None,
    typer.Option(help=f"Account that pays; {ACCOUNT!r} by default, opened with epsilon {BUDGET:g} on first use."),
]
_NO_INDEX = "`nearveil index DIR` makes one; --index or NEARVEIL_INDEX names another"
_LONGEST_TOKEN = 1000
_OPTIONS = {"k": "-k", "url": "--server", "image": "IMAGE"}  # where an option has another name than its field
_MORE = "`nearveil index DIR --candidates` makes them more"


@contextmanager
def open_client(
    server: str | None,
    index: str | None,
    gallery: str | None,
    token: str | None,
    common: dict[str, Any],
    tls: dict[str, Any],
) -> Iterator[tuple["Client", "Index | None"]]:
    """Yield who asks, and the index where it is here."""
    from nearveil import Client

    if server is not None:
        if "://" not in server:
            raise ValueError("--server: it must look like https://host:8321")
        with Client(server, token, **tls, **common) as client:
            yield client, None
        return
    if gallery is not None:
        raise ValueError("--gallery: an index here has one gallery: leave it out, or name a --server")
    with _open_index(index) as held, Client(held, **common) as client:
        yield client, held


@contextmanager
def _open_index(index: str | None) -> Iterator["Index"]:
    from nearveil.gallery.errors import NotAnIndexError, NotPublishedError
    from nearveil.gallery.folder import describe_place, find_index
    from nearveil.gallery.index import Index

    where = find_index(index)
    try:
        held = Index.open(where)
    except NotAnIndexError:
        raise NotAnIndexError(f"there is no index at {describe_place(where)}: {_NO_INDEX}") from None
    with held:
        try:
            held.current()
        except NotPublishedError:
            raise NotPublishedError(
                f"the index at {describe_place(where)} has no map yet: run `nearveil index DIR` again"
            ) from None
        yield held


def read_token(file: Path | None, given: str | None, server: str | None) -> str | None:
    """Return the token: of the file if there is one, else as given."""
    if server is None or file is None:
        return given
    if os.name == "posix" and file.stat().st_mode & 0o077:
        typer.echo(f"Warning: others on this machine may read the token in {file}: chmod 600 it", err=True)
    with file.open("rb") as content:
        return content.read(_LONGEST_TOKEN).decode("ascii", "replace").strip()


def join_certificate(file: Path | None, key: Path | None) -> Path | tuple[Path, Path] | None:
    if file is None and key is not None:
        raise ValueError("--certificate-key: it goes with --certificate")
    return file if file is None or key is None else (file, key)


def describe_question_error(error: "QuestionError", *, local: bool) -> str:
    text = error.words.replace("`insecure`", "--insecure")
    more = f"; {_MORE}" if local and error.field == "k" else ""
    return f"{_OPTIONS.get(error.field, f'--{error.field}')}: {text}{more}"


class LazyAccount:
    """Opens the ledger and the account when there is something to pay: what is refused before leaves no trace."""

    def __init__(self, ledger: str | None, account: str | None, witness: Path | None) -> None:
        self._where, self._name, self._witness = ledger, account, witness
        self._book: Ledger | None = None
        self.opened = ""
        self.has_paid = False

    def spend(self, guarantee: "Guarantee", key: str, /) -> "Debit":
        """Debit the account."""
        from nearveil.ledger import OverBudgetError

        self.account = self._open()
        try:
            found = self.account.spend(guarantee, key)
        except OverBudgetError as refused:
            raise ValueError(
                f"{refused}. Nothing was asked. Ask with a lower --epsilon, or open another account "
                "(`nearveil budget create`) and name it with --account"
            ) from None
        self.has_paid = True
        return found

    def _open(self) -> "Account":
        from nearveil.gallery.folder import describe_place
        from nearveil.ledger import Ledger

        where = find_ledger(self._where, make=self._name is None)
        self._book = book = Ledger(where, witness=self._witness, timeout=PATIENCE)
        found, opened = find_payer(book, self._name)
        self.opened = describe_place(where) if opened else ""
        return found

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        if self._book is not None:
            self._book.close()


def find_payer(ledger: "Ledger", name: str | None) -> tuple["Account", bool]:
    """Return the account that pays, and whether it was opened now: the one named, or the usual one."""
    if name is not None:
        return find_account(ledger, name), False
    if any(one.name == ACCOUNT for one in ledger.accounts()):
        return ledger.account(ACCOUNT), False
    return _open_first(ledger), True


def describe_opening(balance: "Balance", place: str) -> str:
    """Say that an account was opened, where, and what it holds."""
    where = "" if place == place_ledger(None) else f" --ledger {shlex.quote(place)}"
    return (
        f"Opened the account {balance.account!r} in {place}: epsilon {balance.epsilon:g} at delta {balance.delta:g} "
        f"for all questions together. See `nearveil budget show{where}`."
    )


def _open_first(ledger: "Ledger") -> "Account":
    from nearveil.ledger import AccountError

    try:
        return ledger.open_account(
            ACCOUNT, owner="me", protects="query", unit="image", relation="replace", epsilon=BUDGET, delta=0.0
        )
    except AccountError:  # another process was faster
        return ledger.account(ACCOUNT)


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

        common: dict[str, Any] = {"extractor": None if extractor == AUTO else make_extractor(extractor)}
        tls: dict[str, Any] = {
            "ca": ca,
            "certificate": join_certificate(certificate, certificate_key),
            "insecure": insecure,
        }
        if server is not None:
            tls |= {"timeout": _TIMEOUT, "retries": _RETRIES}
        with name_extra("images,service"):
            from nearveil.client import QuestionError
            from nearveil.ui import serve_page
            from nearveil.ui.session import PageSession, RecordingPayer
        page_payer = RecordingPayer()
        secret, common["account"] = read_token(token_file, token, server), page_payer
        try:
            client, _ = stack.enter_context(open_client(server, index, gallery, secret, common, tls))
        except QuestionError as error:
            raise ValueError(describe_question_error(error, local=server is None)) from None
        place = find_ledger(ledger, make=account is None)
        book = stack.enter_context(Ledger(place, witness=witness, timeout=PATIENCE))
        payer, opened = find_payer(book, account)
        if opened:
            typer.echo(describe_opening(payer.balance(), describe_place(place)))
        page_payer.account = payer
        where = server if server is not None else describe_place(find_index(index))
        session = PageSession(client, page_payer, book, where, gallery=gallery)
        files = stack.enter_context(ExitStack())

        def announce(address: str) -> None:
            _say(address, payer)
            if browser:
                _open_browser(address, files)

        serve_page(session, port=port, ready=announce, stopping=lambda: _end_soon(files))


def _say(address: str, payer: "Account") -> None:
    """Say where the page is: for people, and for programs that wait for this line."""
    typer.echo(f"{payer.balance()}")
    typer.echo("The page is on this machine alone. Its address works once; Ctrl-C ends it:")
    typer.echo(address)


_REDIRECT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={address}">
<title>nearveil: opening the page</title>
</head>
<body><p><a href="{address}">Open the page</a></p></body>
</html>
"""


def _open_browser(address: str, files: ExitStack) -> None:
    """Open a browser by a private file that leads to the address; `files` removes it.

    All users of the machine can read the command line of the browser, and the address holds the token.
    """
    from nearveil.storage import make_data_folder

    try:
        descriptor, name = tempfile.mkstemp(".html", "ui-", make_data_folder())  # created with mode 0600
        path = Path(name)
        files.callback(path.unlink, missing_ok=True)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_REDIRECT.format(address=html.escape(address)))
    except OSError as error:
        typer.echo(f"No browser was opened: {error.strerror}. Open the address yourself.", err=True)
        return
    # In another thread: some browsers return when they have the page, or when they end.
    threading.Thread(target=webbrowser.open, args=(path.as_uri(),), daemon=True).start()


def _end_soon(files: ExitStack) -> None:
    """End this process, also where a server never answers: what was paid is on the disk, and can be asked again."""
    files.close()
    timer = threading.Timer(_END, os._exit, (130,))
    timer.daemon = True
    timer.start()
