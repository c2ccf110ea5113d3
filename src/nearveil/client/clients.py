"""Clients of galleries: the asynchronous one, which does the work, and the blocking one, which waits for it.

The portal of anyio is not used: an interrupt while it starts hangs, and a finalizer cannot end it from its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import wraps
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from nearveil.client.errors import QuestionError, UnansweredError, UnfinishedError

# Importing a client is fast: all else is imported when one is made.
if TYPE_CHECKING:
    import httpx
    from numpy.typing import NDArray

    from nearveil.client.copies import HomeCopy
    from nearveil.client.home import Progress
    from nearveil.client.images import Image, Images
    from nearveil.client.questions import Filter, Method, NearestQuestion, Outcome
    from nearveil.client.results import Classified, Nearest
    from nearveil.client.sealed import CachedSeal
    from nearveil.client.session import Payer
    from nearveil.client.transport import HttpTransport, LocalTransport
    from nearveil.features.extractor import Extractor
    from nearveil.gallery import Index
    from nearveil.ledger import Ledger
    from nearveil.ledger.history import Balance
    from nearveil.privacy.noise import Source
    from nearveil.private_knn import PublicDiscriminant
    from nearveil.server.galleries import Gallery
    from nearveil.telemetry import Telemetry
    from nearveil.wire.messages import PublicPart
    from nearveil.wire.schema import GalleryInfo

MOST_COPIED = 2 << 30  # bytes of a copy
T = TypeVar("T")
P = ParamSpec("P")


class _Answer(Future[T], Generic[T]):
    """The result of a coroutine. An interrupt of a thread that waits for `arrived` leaves no lock behind."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = arrived = SimpleQueue[None]()
        self.add_done_callback(lambda _: arrived.put(None))


class Portal:
    """Runs coroutines on an event loop in another thread. Any thread may use it; `last` runs when it is closed."""

    def __init__(self, last: Callable[[], Awaitable[None]]) -> None:
        self._last, self._process = last, os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stopped, self._ended = asyncio.Event(), Future[None]()
        self._asked: dict[_Answer[Any], asyncio.Task[None] | None] = {}
        self._thread = threading.Thread(target=self._serve, name="nearveil", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # an interrupt may come when it has started
            self.stop()
            raise

    def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine on the loop, and wait for it. An interrupt cancels it, and waits until it has ended."""
        if os.getpid() != self._process:
            raise RuntimeError("a client belongs to the process that made it: make another one here")
        if asyncio._get_running_loop() is self._loop:
            raise RuntimeError("a client cannot wait for itself: this is the thread that would answer")
        answer = _Answer[T]()
        try:
            self._asked[answer] = None
            try:
                self._loop.call_soon_threadsafe(self._begin, answer, ask)
            except RuntimeError:  # the loop has ended
                answer.cancel()
            answer.arrived.get()
        except BaseException as interrupt:
            self._cancel(answer)
            if answer.done() and not answer.cancelled():
                for note in getattr(answer.exception(), "__notes__", ()):  # how to resume a paid question
                    interrupt.add_note(note)
            raise
        try:
            if answer.cancelled():
                raise RuntimeError("the client is closed: make another one")
            return answer.result()
        finally:
            del answer  # the error holds this frame: it would hold itself, and the question, until a collection

    def stop(self) -> None:
        """Let the loop end when its coroutines have ended. Nobody is waited for: a finalizer may run anywhere."""
        if os.getpid() == self._process:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stopped.set)

    def close(self) -> None:
        """End the loop, and wait for it."""
        if os.getpid() == self._process:
            self.stop()
            self._thread.join()
            self._ended.result()

    def _cancel(self, answer: _Answer[Any]) -> None:
        """Cancel a coroutine and wait for its end, however often that is interrupted: it may be paying."""

        def cancel() -> None:
            if (task := self._asked.get(answer)) is not None:
                task.cancel()
            else:  # it has ended, or never began
                self._asked.pop(answer, None)
                answer.cancel()

        while not (answer.done() or self._ended.done()):
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                self._loop.call_soon_threadsafe(cancel)
                answer.arrived.get()

    def _serve(self) -> None:
        """Run the loop until it is stopped."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._wait_for_end())
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
        for answer in list(self._asked):  # too late
            answer.cancel()

    async def _wait_for_end(self) -> None:
        await self._stopped.wait()
        while tasks := [task for task in list(self._asked.values()) if task]:  # other threads may add some
            await asyncio.wait(tasks)
        await self._last()

    def _begin(self, answer: _Answer[T], ask: Callable[[], Awaitable[T]]) -> None:
        def end(_: asyncio.Task[None]) -> None:
            self._asked.pop(answer, None)
            answer.cancel()  # one that was cancelled before it began; the others are done

        if self._stopped.is_set():
            answer.cancel()
        else:
            self._asked[answer] = task = asyncio.get_running_loop().create_task(_run(answer, ask))
            task.add_done_callback(end)


async def _run(answer: _Answer[T], ask: Callable[[], Awaitable[T]]) -> None:
    """Run a coroutine; its error goes to the caller, and never ends the loop."""
    try:
        answer.set_result(await ask())
    except BaseException as error:
        answer.set_exception(error)
    finally:
        del answer  # as above


Location: TypeAlias = "str | os.PathLike[str] | Index | Gallery"
_URL = re.compile(r"https?://", re.IGNORECASE)
_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?/?")


class AsyncClient:
    """The asynchronous client. :class:`nearveil.Client` is derived from it and sends the same requests.

    Features, debits and rankings are made in threads. A question that is cancelled during its debit finishes the debit
    first; the error then has a note with the key for a retry. The name of a `gallery` is required if there are several.

    All parameters are those of :class:`nearveil.Client`.
    """

    def __init__(
        self,
        location: Location,
        token: str | None = None,
        *,
        account: Payer | str | None = None,
        ledger: str | Path | Ledger | None = None,
        extractor: Extractor | None = None,
        retries: int = 3,
        timeout: float = 60.0,
        insecure: bool = False,
        ca: str | Path | None = None,
        certificate: str | Path | tuple[str | Path, str | Path] | None = None,
        proxies: bool = False,
        home: str | Path | None = None,
        telemetry: Telemetry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise QuestionError("retries", "it must be a whole number from 0 upwards")
        from nearveil.client.home import HomeCopies
        from nearveil.client.images import FeatureMaker
        from nearveil.client.session import RetryPolicy, Session
        from nearveil.client.transport import HttpTransport, LocalTransport
        from nearveil.telemetry import get_client_telemetry

        is_remote = _is_remote(location, token)
        self._shown = _hide_password(location)
        payer, self._ledger = _open_account(account, ledger)
        self._transport: HttpTransport | LocalTransport
        try:
            if is_remote:
                self._transport = HttpTransport(
                    str(location),
                    token,
                    insecure=insecure,
                    timeout=timeout,
                    ca=ca,
                    certificate=certificate,
                    proxies=proxies,
                    transport=transport,
                )
            else:
                self._transport = LocalTransport(location)
        except BaseException:
            if self._ledger is not None:
                self._ledger.close()
            raise
        retry_policy = RetryPolicy(retries if is_remote else 0)
        self._sealed: dict[str, CachedSeal] = {}
        self._copies = HomeCopies(home, self._shown)
        self._telemetry = telemetry or get_client_telemetry()
        self._session = Session(
            self._transport, payer, FeatureMaker(extractor), retry_policy, token or "", pad_timing=is_remote
        )

    async def nearest(
        self,
        query: Image,
        k: int | None = None,
        epsilon: float | None = None,
        candidates: float | None = None,
        *,
        gallery: str | None = None,
        thumbnails: bool = False,
        originals: bool = False,
        key: str | None = None,
        by: Method = "auto",
        where: Filter | None = None,
        label: str | None = None,
        allow_unsound: bool = False,
        rng: Source | None = None,
    ) -> Nearest:
        """Find the items nearest by the gallery's metric, as :class:`Nearest`. Nothing is paid without an epsilon.

        Without an epsilon, a local index itself is searched, or the copy that :meth:`sync` fetched, and nothing is
        sent; without either, a sealed question is sent if the gallery answers them; else an error names the ways and
        their prices. With an epsilon, the account pays before a message exists. The message names one of a few sets of
        the gallery; all items of that set come back, and the choice is made here. Nothing is sent after it. The way is
        chosen by public facts, never by the query.

        Parameters
        ----------
        query : path, bytes, Pillow image, or array-like
            Private. An array is pixels, shape (height, width, 3), uint8; or a feature, shape (d,) or (1, d): of NumPy,
            torch, pandas or pyarrow, a list, or a ``.npy`` file.
        k : int, optional
            How many; 8 by default, or as many as there are to compare if that is less.
        epsilon : float, optional
            The price of a message, from 1e-6 to 40. None and 0 pay nothing: only free ways.
        candidates : float, optional
            The fraction of the gallery in an answer; there must be a map for it. By default that of the newest map.
        gallery : str, optional
            The gallery's name; required if there are several.
        thumbnails, originals : bool, default=False
            Whether all candidates come with their images. Never choose it by the image.
        key : str, optional
            Names this question. The same image with the same key sends the same again and pays nothing. Never derive
            it from the image: the ledger keeps it.
        by : {"auto", "message", "home", "sealed"}, default="auto"
            The way to ask. By default a message with an epsilon, else a free way.
        where : mapping or callable, optional
            Keep only matches with these metadata values, or for which the function is true. Applied locally: sending
            the filter would reveal it. There may be fewer than `k`.
        label : str, optional
            The class of the query, for galleries published for a mechanism as published: it reveals the class.
        allow_unsound : bool, default=False
            Whether to send a message that has no guarantee, for comparison. No account pays for it.
        rng : Source, optional
            For tests and studies; see :meth:`nearveil.mechanisms.Release.release`. Accounts refuse to pay
            for seeded noise.

        Raises
        ------
        QuestionError, ReplyError, UnreachableError, ImageError, ValueError
            Nothing was paid. The last is about `epsilon`, `key` or a feature.
        OverBudgetError, LedgerError
            Of the account. Nothing was asked.
        UnansweredError
            It is paid for. If `again` is true, repeat with its `key` at no cost; otherwise it cannot be answered.
        """
        from nearveil.client.questions import NearestQuestion

        keys = None if key is None else [key]
        question = NearestQuestion(
            [query], k, epsilon, candidates, gallery, thumbnails, originals, keys, rng, by, where, label, allow_unsound
        )
        results, error = await self._ask(question)
        if error is not None:
            raise error
        return results[0]

    async def _ask(self, question: NearestQuestion) -> Outcome:
        """Ask a question about one query or many, by the way that public facts choose."""
        started, way = time.monotonic(), await self._choose_way(question)
        try:
            if way == "message":
                from nearveil.client.questions import ask_messages

                return await ask_messages(self._session, question)
            if way == "sealed":
                from nearveil.client.sealed import ask_sealed

                return await ask_sealed(self._session, question, self._sealed, self._copies)
            from nearveil.client.home import search_home, search_index

            if self.index is not None:
                return await search_index(self._session, question, self.index)
            if not self._session.pad_timing:  # a gallery in this process: nobody sees when it is read
                await self.sync(gallery=question.gallery)
            return await search_home(self._session, question, self._copies)
        finally:
            if self._telemetry is not None:  # of a local index, which has no deadlines, not even the duration
                seconds = time.monotonic() - started if self._session.pad_timing else 0.0
                attributes = {"nearveil.way": way, "nearveil.gallery": question.gallery or ""}
                self._telemetry.record("nearest", seconds, attributes)

    async def nearest_many(
        self,
        rows: Any,
        k: int | None = None,
        epsilon: float | None = None,
        candidates: float | None = None,
        *,
        gallery: str | None = None,
        keys: Sequence[str] | None = None,
        by: Method = "auto",
        where: Filter | None = None,
    ) -> list[Nearest]:
        """Find the nearest of many rows, faster than one by one; with an epsilon, one key and one debit for each.

        The result is a list of :class:`Nearest`. All rows are checked before the first is asked about. Up to 64
        messages, or 16 sealed questions, are made, sent and ranked together, each time at moments that public sizes and
        the number of rows fix. The server sees that number.

        Parameters
        ----------
        rows : array-like of shape (n, d)
            Private; of NumPy, torch, pandas or pyarrow, or lists. Other arguments are those of :meth:`nearest`.
        keys : sequence of str, optional
            One for each row; new ones by default. Paid questions are free to repeat: keep the keys to
            resume after an interruption.

        Raises
        ------
        UnfinishedError
            If a question fails after others were answered. It holds their answers, and all keys.
        """
        from nearveil.client.questions import NearestQuestion, check_many

        features, names = check_many(rows, keys)
        question = NearestQuestion(features, k, epsilon, candidates, gallery, keys=names, by=by, where=where)
        results, error = await self._ask(question)
        if error is None:
            return results
        if not results and not isinstance(error, UnansweredError):
            raise error  # nothing was paid yet
        raise UnfinishedError(str(error).rstrip("."), tuple(results), tuple(names)) from error

    async def _choose_way(self, question: NearestQuestion) -> Method:
        """Choose by public facts, before the query is read: the arguments, a copy, and what the gallery offers."""
        if question.by != "auto":
            return question.by
        if question.epsilon:
            return "message"
        if self.index is not None or await asyncio.to_thread(self._copies.find, question.gallery) is not None:
            return "home"
        info = await self._session.find_gallery(question.gallery, "open")
        if "codes" in info.offers and not self._session.pad_timing:  # it is read in this process
            return "home"
        if "sealed" in info.offers:
            return "sealed"
        from nearveil.client.questions import describe_ways

        raise QuestionError("epsilon", await describe_ways(info, self._session.account))

    @property
    def index(self) -> Index | None:
        """The local index that questions without an epsilon search itself; None for a server or PostgreSQL."""
        return self._transport.index

    async def balance(self) -> Balance:
        """Return the :class:`~nearveil.ledger.history.Balance` of the account. Nothing is sent or paid."""
        from nearveil.client.session import OPEN_ACCOUNT, read_balance

        balance = await asyncio.to_thread(read_balance, self._session.account)
        if balance is None:
            raise QuestionError("account", f"this client has no account with a balance: {OPEN_ACCOUNT}")
        return balance

    def home(self, *, gallery: str | None = None) -> HomeCopy | None:
        """Return the copy of a gallery that :meth:`sync` fetched, or None. Nothing is sent."""
        return self._copies.find(gallery)

    async def sync(
        self, *, gallery: str | None = None, most: int = MOST_COPIED, progress: Progress | None = None
    ) -> HomeCopy:
        """Download all codes of a gallery, or the changes since the last sync, for local search.

        Everybody downloads the same, so the request reveals nothing; it is free. Never call it because of an image: the
        server sees when you do. Call it on a schedule, or when a program is installed.

        At most `most` bytes are downloaded; `progress` is called with the number of groups received, and in total.
        After an error the copy is as before.
        """
        from nearveil.client.home import sync_codes

        return await sync_codes(self._session, self._copies, gallery, most, progress)

    async def prepare_sealed(self, n_questions: int = 1, *, gallery: str | None = None) -> None:
        """Download what sealed questions of a gallery need, and do the part of their work that needs no image.

        Such a question then takes a fraction of the time. Without this call the first question does all of it, and
        each prepares the next when it has ended. A prepared question is used once, stays in the memory of this
        process, and is prepared again when the gallery changes; it takes a few megabytes. Never call it because of an
        image: call it when a program starts, or is idle.
        """
        from nearveil.client.sealed import prepare_sealed

        await prepare_sealed(self._session, n_questions, gallery, self._sealed, self._copies)

    async def classify(self, query: Image, *, gallery: str | None = None) -> Classified:
        """Classify an image by the model of a protected gallery, at no cost. Nothing is revealed about the image.

        The result is a :class:`~nearveil.client.results.Classified`. The model is downloaded once and cached; at most
        once an hour the client checks for a newer one. Both happen before the image is read, and nothing is sent
        afterwards: all errors but those of the image or its feature occur before. `query` is private, and an image or a
        feature as of :meth:`nearest`.
        """
        from nearveil.client.questions import classify_image

        return await classify_image(self._session, query, gallery)

    async def prepare(self, images: Images, *, gallery: str | None = None) -> tuple[GalleryInfo, list[NDArray[Any]]]:
        """Compute features of images, as :meth:`nearest` does first. Nothing private is sent, and nothing is paid."""
        return await self._session.prepare_features(images, gallery)

    async def original_not_private(self, id: int, *, gallery: str | None = None) -> bytes:  # noqa: A002
        """Fetch the file of one original by its id. NOT PRIVATE: the server sees which image you chose.

        No guarantee covers this call, and after it the guarantee of the question that found the id is worth nothing in
        practice: anyone who knows your choice knows what you searched for. To see originals and stay private, use
        ``nearest(..., originals=True)``, which downloads those of all candidates.
        """
        return await self._session.fetch_original(id, gallery)

    async def galleries(self) -> tuple[GalleryInfo, ...]:
        """List the galleries that you may query, each a :class:`GalleryInfo`."""
        return await self._session.fetch_galleries()

    async def map(self, candidates: float | None = None, *, gallery: str | None = None) -> PublicPart:
        """Return the current map of a gallery for a fraction of `candidates`, by default the newest. It is public."""
        from nearveil.client.session import Traffic

        info = await self._session.find_gallery(gallery, "open")
        return await self._session.fetch_map(info, candidates, Traffic())

    async def model(self, *, gallery: str | None = None) -> PublicDiscriminant:
        """Return the model of a protected gallery, as :meth:`classify` uses it. No private data is used.

        It is a :class:`~nearveil.private_knn.PublicDiscriminant`: it classifies many rows at once, and can be saved.
        """
        return (await self._session.fetch_model(gallery)).model

    async def close(self) -> None:
        """Close connections, and the ledger and index if the client opened them."""
        for seal in self._sealed.values():
            await seal.finish()
        await self._transport.close()
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self._shown!r})"


def _blocking(method: Callable[Concatenate[AsyncClient, P], Awaitable[T]]) -> Callable[Concatenate[Client, P], T]:
    """Return a method of the blocking client: it runs `method` on the event loop and waits for the result."""

    @wraps(method)
    def wait(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        client = self._client  # no reference to `self`: the loop's thread would hold it
        return self._portal.run(lambda: method(client, *args, **kwargs))

    wait.__qualname__ = method.__qualname__.replace("AsyncClient", "Client")
    return wait


def _same_parameters(
    method: Callable[Concatenate[AsyncClient, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Client, P], None]]:
    """Give a constructor the parameters of another."""

    def copy_parameters(constructor: Callable[..., None]) -> Callable[Concatenate[Client, P], None]:
        constructor.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return constructor

    return copy_parameters


class Client:
    """Search galleries privately: at no cost if possible; otherwise pay first, send one message, rank locally.

    ``docs/theory/service.md`` proves what a server or an observer of the network learns. Your address and the times of
    your questions are not hidden. Methods need the name of a `gallery` if there are several.

    Parameters
    ----------
    location : str, Path, Index or Gallery
        The URL of a server (``https://host:8321``), or an index here: its folder, its PostgreSQL URL, or itself.
    token : str, optional
        For a server. It is sent to that server only, and never appears in errors or representations.
    account : Account, str or any object with `spend`, optional
        Who pays for messages; a name needs `ledger`. Only a question with an epsilon pays.
    ledger : str, Path or Ledger, optional
        The ledger with that account. A file must exist: `nearveil budget create` makes one.
    extractor : Extractor, optional
        The feature extractor; by default chosen by the gallery's fingerprint.
    retries : int, default=3
        How often to retry a request without a reply, or with one that says "later". Each time the same bytes.
    timeout : float, default=60.0
        Seconds for each request with its whole reply. A question makes two or three requests.
    insecure : bool, default=False
        Whether plain HTTP to other machines is allowed.
    ca : str or Path, optional
        A PEM file of certificates to trust instead of the system's.
    certificate : str, Path or pair of them, optional
        The client's own certificate, with its key.
    proxies : bool, default=False
        Whether the proxies of the environment are used.
    home : str or Path, optional
        The folder for copies of galleries (:meth:`sync`); in the user's data folder by default. From the URL of an
        uploaded folder, `sync` reads copies without asking the server: see ``docs/howto/storage.md``.
    telemetry : Telemetry, optional
        Exports a span for each question, without anything of the query; see ``docs/howto/telemetry.md``.
    transport : httpx.AsyncBaseTransport, optional
        Replaces the network, for tests.

    Examples
    --------
    ``docs/howto/client.md`` asks an index and a server.
    """

    @_same_parameters(AsyncClient.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = AsyncClient(*args, **kwargs)
        self._portal = Portal(self._client.close)
        weakref.finalize(self, self._portal.stop).atexit = False  # a program that ends waits for no loop

    nearest = _blocking(AsyncClient.nearest)
    nearest_many = _blocking(AsyncClient.nearest_many)
    sync = _blocking(AsyncClient.sync)
    prepare_sealed = _blocking(AsyncClient.prepare_sealed)
    classify = _blocking(AsyncClient.classify)
    prepare = _blocking(AsyncClient.prepare)
    original_not_private = _blocking(AsyncClient.original_not_private)
    galleries = _blocking(AsyncClient.galleries)
    map = _blocking(AsyncClient.map)
    model = _blocking(AsyncClient.model)
    balance = _blocking(AsyncClient.balance)

    @property
    def index(self) -> Index | None:
        """The local index that questions without an epsilon search itself; None for a server or PostgreSQL."""
        return self._client.index

    def home(self, *, gallery: str | None = None) -> HomeCopy | None:
        return self._client.home(gallery=gallery)

    home.__doc__ = AsyncClient.home.__doc__

    def close(self) -> None:
        """Wait for questions in flight; then close connections, and the ledger and index if the client opened them."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._client._shown!r})"


def _is_remote(location: Location, token: str | None) -> bool:
    """Return whether a location is the URL of a server. Refuse a host without a scheme, if it has a port or a token."""
    host = _HOST_AND_PORT.fullmatch(location) if isinstance(location, str) else None
    if host and (host[2] or token) and isinstance(location, str) and not Path(location).exists():
        scheme = "http" if location.startswith(("127.", "localhost", "[::1]")) else "https"
        raise QuestionError("location", f"the URL of a server begins with its scheme: {scheme}://{location}")
    return isinstance(location, str) and _URL.match(location) is not None


def _hide_password(location: Location) -> str:
    """Return a location as text without its password."""
    text = str(location)
    if not isinstance(location, str) or "://" not in text:
        return text
    try:
        parts = urlsplit(text)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return "a URL that cannot be read"
    user = f"{parts.username}:***@" if parts.password else f"{parts.username}@" if parts.username else ""
    return parts._replace(netloc=f"{user}{parts.hostname or ''}{port}", query="").geturl()


def _open_account(
    account: Payer | str | None, ledger: str | Path | Ledger | None
) -> tuple[Payer | None, Ledger | None]:
    """Return who pays, and the ledger that was opened for that, if one was."""
    if not isinstance(account, str):
        if ledger is not None:
            raise QuestionError("ledger", "pass it only with the name of an account")
        return account, None
    if ledger is None:
        raise QuestionError("account", "a name needs the ledger that it is in: give ledger, or an Account")
    from nearveil.ledger import Ledger
    from nearveil.storage import find_file, parse_url

    opened = None
    if not isinstance(ledger, Ledger):
        file = find_file(parse_url(ledger, "ledger"))
        if file is not None and not file.exists():  # a mistyped path would make an empty ledger
            command = f"`nearveil budget create {account} --owner me --epsilon 40 --delta 0 --ledger {file}`"
            raise QuestionError("ledger", f"there is none at {file}. Correct the path, or create one: {command}")
        ledger = opened = Ledger(ledger)
    try:
        return ledger.account(account), opened
    except BaseException:
        if opened is not None:
            opened.close()
        raise
