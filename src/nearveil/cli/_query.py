"""``nearveil query``: the nearest images of an index here or of a server, asked for privately."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearveil.cli import _budget
from nearveil.cli import _query_view as view
from nearveil.cli._asking import Authorities, IndexPlace, Insecure, OwnCertificate, OwnKey, TokenFile, TokenText
from nearveil.cli._index import AUTO, Which, named, place, shown, words
from nearveil.cli._index_sync import files_below
from nearveil.features import load_image
from nearveil.gallery import Index, NotPublishedError
from nearveil.gallery.errors import NotAnIndexError
from nearveil.ledger import Account, AccountError, Debit, Ledger, OverBudgetError, new_key
from nearveil.privacy import Guarantee

if TYPE_CHECKING:
    from nearveil.service import Client
    from nearveil.service._client_errors import QuestionError

ACCOUNT, BUDGET = "queries", 100.0
_NO_INDEX = "`nearveil index DIR` makes one; --index or NEARVEIL_INDEX names another"
_LONGEST_TOKEN = 1000
_OPTIONS = {"k": "-k", "url": "--server"}  # where an option has another name than its field
_DUMMY = re.compile(r"dummies\[(\d+)\]")
_MORE = "`nearveil index DIR --candidates` makes them more"


def query(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="The private image.")],
    epsilon: Annotated[float, typer.Option(help="What the question may cost.")] = 4.0,
    k: Annotated[
        int | None, typer.Option("-k", min=1, help="How many to find; 8, or as many as an answer holds.")
    ] = None,
    index: IndexPlace = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask a server instead of an index here: https://host:8321.")
    ] = None,
    token_file: TokenFile = None,
    token: TokenText = None,
    gallery: Annotated[str | None, typer.Option(help="Of the server; needed where it has several.")] = None,
    ca: Authorities = None,
    certificate: OwnCertificate = None,
    certificate_key: OwnKey = None,
    insecure: Insecure = False,
    candidates: Annotated[
        float | None, typer.Option(help="The part of the gallery that the answer holds; there must be a map for it.")
    ] = None,
    dummies: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Public images, one of every class: questions about them go with yours, unpaid."
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
    """Find the images nearest to a private one. The other side sees the name of one set, and nothing else.

    The account pays before the question exists. The image and its feature stay in memory: neither is written down,
    unless you ask for a contact sheet. With --server, an index here plays no part.

    [bold]Examples[/bold]

    nearveil query me.jpg

    nearveil query me.jpg --epsilon 2 -k 4 --sheet found.png

    nearveil query me.jpg --account holiday --ledger budget.db --json

    nearveil query me.jpg --server https://birds.example:8321 --token-file token.txt --gallery birds
    """
    number = key or new_key()
    purse = _Purse(ledger, account, witness)
    with words():
        view.check_sheet(sheet, force=force, among_dummies=dummies is not None)
        others = _public_images(dummies)
    with words(), purse, _in_options(number, purse, others, local=server is None):
        pixels = load_image(image)
        common: dict[str, Any] = {"account": purse, "extractor": None if extractor == AUTO else named(extractor)}
        tls = {"ca": ca, "certificate": _certificate(certificate, certificate_key), "insecure": insecure}
        with _client(server, index, gallery, _token(token_file, token, server), common, tls) as (client, held):
            nearest = client.nearest(
                pixels,
                k,
                epsilon,
                candidates,
                gallery=gallery,
                thumbnails=sheet is not None,
                dummies=others,
                key=number,
            )
            stale = held is not None and held.current().stale
        outcome = view.Outcome(nearest, purse.account.balance(), purse.opened, stale, server)
    # What was paid for is shown first: a sheet that cannot be written must not lose it.
    view.show(outcome, sheet, as_json=as_json)
    if sheet is not None:
        with words():
            view.write_sheet(outcome, pixels, sheet, force=force)


@contextmanager
def _client(
    server: str | None,
    index: str | None,
    gallery: str | None,
    token: str | None,
    common: dict[str, Any],
    tls: dict[str, Any],
) -> Iterator[tuple["Client", Index | None]]:
    """Yield who asks, and the index where it is here."""
    from nearveil.service import Client

    if server is not None:
        if "://" not in server:
            raise ValueError("--server: it must look like https://host:8321")
        with Client(server, token, **tls, **common) as client:
            yield client, None
        return
    if gallery is not None:
        raise ValueError("--gallery: an index here has one gallery: leave it out, or name a --server")
    where = place(index)
    with _opened(where) as held, Client(held, **common) as client:
        yield client, held


@contextmanager
def _opened(where: str) -> Iterator[Index]:
    try:
        held = Index.open(where)
    except NotAnIndexError:
        raise NotAnIndexError(f"there is no index at {shown(where)}: {_NO_INDEX}") from None
    with held:
        try:
            held.current()
        except NotPublishedError:
            raise NotPublishedError(
                f"the index at {shown(where)} has no map yet: run `nearveil index DIR` again"
            ) from None
        yield held


def _token(file: Path | None, given: str | None, server: str | None) -> str | None:
    """Return the token: of the file if there is one, else as given."""
    if server is None or file is None:
        return given
    if os.name == "posix" and file.stat().st_mode & 0o077:
        typer.echo(f"Warning: others on this machine may read the token in {file}: chmod 600 it", err=True)
    with file.open("rb") as content:
        return content.read(_LONGEST_TOKEN).decode("ascii", "replace").strip()


def _certificate(file: Path | None, key: Path | None) -> Path | tuple[Path, Path] | None:
    if file is None and key is not None:
        raise ValueError("--certificate-key: it goes with --certificate")
    return file if file is None or key is None else (file, key)


def _public_images(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    if not folder.is_dir():
        raise ValueError(f"--dummies: there is no folder at {folder}")
    found, refused = files_below(folder)
    if refused:  # one dummy less hides less: it is not left out in silence
        raise ValueError(f"--dummies: {refused[0][0]}: {refused[0][1]}")
    if not found:
        raise ValueError(f"--dummies: there is no image below {folder}")
    return found


@contextmanager
def _in_options(key: str, purse: "_Purse", dummies: Sequence[Path], *, local: bool) -> Iterator[None]:
    """Say what is wrong in the words of the command line."""
    from nearveil.service._client_errors import QuestionError, UnansweredError

    try:
        yield
    except QuestionError as error:
        raise ValueError(_in_words(error, dummies, local=local)) from None
    except UnansweredError as error:
        again = f"{error.reason}. It is paid for: --key {error.key} asks the same again"
        raise ValueError(again if error.again else str(error)) from None
    except KeyboardInterrupt:
        if purse.has_paid:
            typer.echo(f"It is paid for: --key {key} asks the same again", err=True)
        raise


def _in_words(error: "QuestionError", dummies: Sequence[Path], *, local: bool) -> str:
    text = error.words.replace("`insecure`", "--insecure")
    if one := _DUMMY.fullmatch(error.field):
        return f"--dummies: {dummies[int(one[1])]}: {text}"
    more = f"; {_MORE}" if local and error.field == "k" else ""
    return f"{_OPTIONS.get(error.field, f'--{error.field}')}: {text}{more}"


class _Purse:
    """Opens the ledger and the account when there is something to pay: what is refused before leaves no trace."""

    def __init__(self, ledger: str | None, account: str | None, witness: Path | None) -> None:
        self._where, self._name, self._witness = ledger, account, witness
        self._book: Ledger | None = None
        self.opened = ""
        self.has_paid = False

    def spend(self, promise: Guarantee, key: str, /) -> Debit:
        """Debit the account."""
        self.account = self._account()
        try:
            found = self.account.spend(promise, key)
        except OverBudgetError as refused:
            raise ValueError(
                f"{refused}. Nothing was asked. Ask with a lower --epsilon, or open another account "
                "(`nearveil budget create`) and name it with --account"
            ) from None
        self.has_paid = True
        return found

    def _account(self) -> Account:
        if self._name is not None:
            _budget._must_exist(self._where)
        ledger = _budget.made_place(self._where)
        self._book = book = Ledger(ledger, witness=self._witness, timeout=_budget._PATIENCE)
        if self._name is not None:
            return _budget._account(book, self._name)
        if any(one.name == ACCOUNT for one in book.accounts()):
            return book.account(ACCOUNT)
        found, self.opened = _first(book), shown(ledger)
        return found

    def __enter__(self) -> None:
        return None

    def __exit__(self, *told: object) -> None:
        if self._book is not None:
            self._book.close()


def _first(book: Ledger) -> Account:
    try:
        return book.open_account(
            ACCOUNT, owner="me", protects="query", unit="image", relation="replace", epsilon=BUDGET, delta=0.0
        )
    except AccountError:  # another process was faster
        return book.account(ACCOUNT)
