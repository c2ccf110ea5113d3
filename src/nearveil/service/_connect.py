"""Where a client's galleries are: behind a URL, in an index here, or in a gallery that is given."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from nearveil.features import Extractor
from nearveil.gallery.index import Index
from nearveil.ledger import Ledger
from nearveil.service._client_errors import QuestionError
from nearveil.service._dummies import Payer
from nearveil.service._galleries import Gallery, Offer, OpenGallery
from nearveil.service._private_image import Features
from nearveil.service._replies import Patience
from nearveil.service._steps import Asker
from nearveil.service._transport import GalleryTransport

if TYPE_CHECKING:
    import httpx

    from nearveil.service._http import Address

Where: TypeAlias = "str | os.PathLike[str] | Index | Gallery"
_URL = re.compile(r"https?://", re.IGNORECASE)
_LOCAL = "local"
_OFFERS: tuple[Offer, ...] = ("names", "thumbnails", "originals")  # of an index here: its owner asks


@dataclass(frozen=True)
class Options:
    """All that a client is made with; see :class:`nearveil.Client`. What may hold a secret is not shown."""

    where: Where = field(repr=False)
    token: str | None = field(repr=False)
    account: Payer | str | None
    ledger: str | Path | Ledger | None = field(repr=False)
    extractor: Extractor | None
    retries: int
    timeout: float
    insecure: bool
    ca: str | Path | None
    certificate: str | Path | tuple[str | Path, str | Path] | None
    proxies: bool
    transport: "httpx.AsyncBaseTransport | None"


def is_url(where: Where) -> bool:
    """Return whether a place is a server's."""
    return isinstance(where, str) and _URL.match(where) is not None


def address(options: Options) -> "Address":
    """Return where the server is, checked."""
    try:
        import httpx  # noqa: F401

        from nearveil.service._http import Address
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError('a server is asked with httpx: pip install "nearveil[client]"') from missing
    if options.token is None:
        raise QuestionError("token", "a server needs one: `nearveil token create` makes it there")
    return Address(
        str(options.where),
        options.token,
        options.insecure,
        options.timeout,
        options.ca,
        options.certificate,
        options.proxies,
        options.transport,
    )


def here(where: Where) -> GalleryTransport:
    """Return the way to an index or a gallery in this process."""
    if isinstance(where, Index):
        return GalleryTransport(OpenGallery(where, _LOCAL, offers=_OFFERS), owned=False)
    if isinstance(where, (str, os.PathLike)):
        return GalleryTransport(OpenGallery(Index.open(os.fspath(where)), _LOCAL, offers=_OFFERS), owned=True)
    return GalleryTransport(where, owned=False)


def asker(options: Options) -> tuple[Asker, Ledger | None]:
    """Return what asks, and the ledger that was opened for it, if one was."""
    if isinstance(options.retries, bool) or not isinstance(options.retries, int) or options.retries < 0:
        raise QuestionError("retries", "it must be a whole number from 0 upwards")
    patience = Patience(options.retries if is_url(options.where) else 0)
    account, opened = _account(options)
    features = Features(options.extractor)
    return Asker(account, features, patience, options.token or "", watched=is_url(options.where)), opened


def _account(options: Options) -> tuple[Payer | None, Ledger | None]:
    account, ledger = options.account, options.ledger
    if not isinstance(account, str):
        if ledger is not None:
            raise QuestionError("ledger", "it goes with the name of an account in it")
        return account, None
    if ledger is None:
        raise QuestionError("account", "a name needs the ledger that it is in: give ledger, or an Account")
    if isinstance(ledger, Ledger):
        return ledger.account(account), None
    opened = Ledger(ledger)
    try:
        return opened.account(account), opened
    except BaseException:
        opened.close()
        raise
