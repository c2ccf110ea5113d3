"""Run the queries of the page. The image stays in memory during its query, the feature row until it is answered."""

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import BytesIO
from typing import Any

import numpy as np

from nearveil.client import GalleryInfo, UnansweredError
from nearveil.client.clients import Client
from nearveil.client.questions import Method
from nearveil.client.session import fit_protocol
from nearveil.features.images import load_image, thumbnail
from nearveil.gallery.answers import encode_name
from nearveil.gallery.codes import Singles
from nearveil.gallery.errors import UnknownItemError
from nearveil.ledger import Account, Debit, KeyConflictError, KeySpentError, Ledger, new_key
from nearveil.ledger.budget import format_up
from nearveil.ledger.history import Balance, make_refusal
from nearveil.mechanisms import Covers
from nearveil.mechanisms.covers.channels import check_channel_epsilon, set_guarantee
from nearveil.metrics import METRIC_NAMES
from nearveil.privacy import Basis, Guarantee, compose_events
from nearveil.privacy.events import NamedSets, PureDp
from nearveil.privacy.noise import Source
from nearveil.search.outlook import EPSILONS, make_outlook
from nearveil.ui._views import (
    NOTHING,
    PageError,
    describe_balance,
    preview_cost,
    view_classified,
    view_entry,
    view_item,
    view_nearest,
)
from nearveil.wire.client import K, ProtocolError
from nearveil.wire.messages import PublicPart


class RecordingPayer:
    """Pay from one account and keep the last debit, which has the message that was sent."""

    account: Account  # set before the first debit, not earlier: a command that fails creates no ledger
    debit: Debit | None = None

    def spend(self, guarantee: Guarantee, key: str, /) -> Debit:
        """Debit the account."""
        self.debit = self.account.spend(guarantee, key)
        return self.debit

    def balance(self) -> Balance:
        """Return the balance of the account."""
        return self.account.balance()


_NEW_LISTING = f"The gallery changed its extractor. The list of galleries is up to date now; search again. {NOTHING}"
_SPOILED = (  # it hides an error after the debit
    "The query is paid for, but an unexpected error occurred before its answer could be shown. It is listed below; "
    "repeating it is free."
)
_MAX_THUMBNAILS = 4000  # candidates of one answer
_MAX_UNANSWERED = 16  # paid queries without an answer
_MAX_OUTLOOKS = 8  # maps
_MAX_WARMED = 4  # galleries
_N_EXAMPLES = 12  # items
_NPY = b"\x93NUMPY"  # the first bytes of a vector file
_MAX_SIDE = 2048  # pixels of a picture
_MAX_ENTRIES = 100  # of a listed history
_MAX_PLANNED = 10**6  # queries
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class UnansweredQuery:
    """A query that is paid for and has no answer yet."""

    info: GalleryInfo  # of the gallery, as listed at the time
    row: Singles = field(repr=False)  # the feature row. Private
    epsilon: float
    candidates: float | None  # None for the newest map
    sent_at: int  # time of the query, in seconds since 1970


class PageSession:
    """Query a server or a local index for the page, one query at a time. `payer` is the account of `client`."""

    def __init__(
        self,
        client: Client,
        payer: RecordingPayer,
        ledger: Ledger,  # of the account
        location: str,  # shown on the page: the URL without secrets, or the folder of the index
        *,
        gallery: str | None = None,  # the only one to offer
        rng: Source | None = None,  # for tests; the operating system's by default
    ) -> None:
        self.client, self.payer, self.ledger, self.location = client, payer, ledger, location
        self._gallery, self._rng = gallery, rng
        self._lock = threading.Lock()
        self._find_outlook = lru_cache(maxsize=_MAX_OUTLOOKS)(make_outlook)
        self._unanswered: dict[str, UnansweredQuery] = {}  # by key
        self._maps: dict[tuple[str, float | None], PublicPart] = {}  # the latest; a query fetches none to be priced
        self._extractor_lock = threading.Lock()
        self._preparing: dict[str, Any] | None = None  # the stage of `warm_up`

    def warm_up(self) -> None:
        """Load the extractor, index or copy, and prepare a sealed query: the first query then pays for none of them."""
        # No query plays a part. An error appears again with the first query, where the page shows it.
        with suppress(Exception):
            steps = [step for info in self._list_galleries()[:_MAX_WARMED] for step in self._plan_warm_up(info)]
            for number, (words, run) in enumerate(steps):
                self._preparing = {"words": words, "done": number, "total": len(steps)}
                with suppress(Exception):
                    run()
        self._preparing = None

    def _plan_warm_up(self, info: GalleryInfo) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield a text and a function for each stage."""
        noise: Any = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)

        def prepare() -> None:
            nonlocal noise
            with self._extractor_lock:
                _, (noise,) = self.client.prepare([noise], gallery=info.name)

        if info.kind == "protected":
            yield "Loading the model", partial(self.client.classify, noise, gallery=info.name)
            return
        if info.fingerprint:
            yield "Loading the feature network", prepare
        else:
            noise = noise.ravel()[: info.dimension].astype(float)
        if self._count_copy(info):
            yield "Loading the gallery", lambda: self.client.nearest(noise, gallery=info.name)
        elif "sealed" in info.offers:
            yield "Preparing a sealed query", partial(self.client.prepare_sealed, gallery=info.name)

    def about(self) -> dict[str, Any]:
        """Return the location, the balance and the unanswered queries, without a request to the server."""
        waiting = [
            {"key": key, "sent_at": entry.sent_at, "epsilon": entry.epsilon, "gallery": entry.info.name}
            for key, entry in list(self._unanswered.items())
        ]
        about = {"location": self.location, "balance": self.balance(), "waiting": waiting}
        return {**about, "preparing": self._preparing}

    def galleries(self) -> dict[str, Any]:
        """Return the galleries that can be queried."""
        return {
            "galleries": [
                {
                    **info.model_dump(include={"name", "kind", "extractor", "offers", "dimension"}),
                    "candidates": sorted(set(info.candidates)),
                    "newest": info.candidates[0] if info.candidates else None,
                    "published": info.is_published,
                    "takes_images": bool(info.fingerprint),
                    "metric": METRIC_NAMES[info.metric],
                    "copy": self._count_copy(info),
                    "is_local": self.client.index is not None,
                    "promise": None if info.promise is None else info.promise.words,
                }
                for info in self._list_galleries()
            ]
        }

    def _list_galleries(self) -> list[GalleryInfo]:
        infos = [info for info in self.client.galleries() if self._gallery in (None, info.name)]
        if not infos:
            raise PageError(404, "question", "No gallery is available.")
        return infos

    def examples(self) -> dict[str, Any]:
        """Return some items of a local index, to search for others like them."""
        if (index := self.client.index) is None or not len(index):
            return {"items": []}
        ids = index.ids()
        chosen = ids[np.linspace(0, len(ids) - 1, min(len(ids), _N_EXAMPLES)).astype(int)]
        return {"items": [view_item(item, item.thumbnail) for item in index.items(chosen, lenient=True)]}

    def picture(self, item: int, side: int) -> bytes:
        """Return the original of an item of a local index as WebP, at most `side` pixels wide and high."""
        items = [] if self.client.index is None else self.client.index.items([item], lenient=True)
        content = items[0].read_original() if items else None
        if content is None:
            raise PageError(404, "path", "The original of this item is not on this machine.")
        return thumbnail(load_image(content), min(max(side, 1), _MAX_SIDE))

    def balance(self) -> dict[str, Any]:
        """Return the balance of the account that pays."""
        return describe_balance(self.payer.account)

    def budget(self) -> dict[str, Any]:
        """Return all accounts, starting with the one that pays for queries."""
        paying = self.payer.account.name
        accounts = [
            {
                **describe_balance(account),
                **{name: getattr(account, name) for name in ("owner", "protects", "unit", "kind")},
                "pays": account.name == paying,
            }
            for account in self.ledger.accounts()
        ]
        return {"accounts": sorted(accounts, key=lambda row: (not row["pays"], row["account"])), "paying": paying}

    def history(self, account: str) -> dict[str, Any]:
        """Return the latest entries of an account, newest first."""
        entries = self.ledger.account(account).history()
        latest = [view_entry(entry) for entry in reversed(entries[-_MAX_ENTRIES:])]
        return {"account": account, "total": len(entries), "entries": latest}

    def plan(self, account: str, count: int, epsilon: float) -> dict[str, Any]:
        """Return whether `count` queries fit into an account, and how many of them do."""
        if not 1 <= count <= _MAX_PLANNED or not 1e-6 <= epsilon <= 40:
            words = "A plan has 1 to 1,000,000 queries, each with an epsilon from 0.000001 to 40."
            raise PageError(422, "question", words)
        payer = self.ledger.account(account)
        subject: Any = {"protects": payer.protects, "unit": payer.unit, "relation": payer.relation}
        query = compose_events([PureDp(epsilon)], delta=0.0, basis=Basis("a query", "docs/theory/covers.md"), **subject)
        preview = preview_cost(payer, query, count)
        # The number of queries that fit: those before the first that does not.
        fits = bisect_left(range(1, count + 1), True, key=lambda n: not payer.preview([(query, n)]).allowed)
        words = f"{count:,} quer{'y' if count == 1 else 'ies'} at epsilon {epsilon:g} "
        if preview["allowed"]:
            words += f"fit: they cost {preview['cost']}, and {preview['after']} would be left."
        else:
            words += f"do not fit: they cost {preview['cost']}, and {preview['before']} is left. {fits:,} would fit."
        return {**preview, "fits": fits, "words": words}

    def verify(self) -> dict[str, Any]:
        """Return whether the history of all accounts is unchanged."""
        report = self.ledger.verify()
        return {"ok": report.ok, "words": str(report)}

    def map(self, gallery: str, candidates: float | None = None) -> dict[str, Any]:
        """Return the figures of a public map, and the recall to expect at each epsilon."""
        public = self._fetch_map(gallery, candidates)
        facts = {
            name: getattr(public, name) for name in ("gallery", "mechanism", "candidates", "epsilon", "code_recall")
        }
        facts |= {"items": public.map.n_items, "set_size": public.map.set_size}
        if public.mechanism != Covers.name:
            return {**facts, "refused": self._explain_refusal(public)}
        outlook = self._find_outlook(public)
        return {
            **facts,
            "map": public.map.map_id,
            "n_sets": public.map.n_sets,
            "reach": round(outlook.reach, 4),
            "k": K,
            "curve": {
                "epsilon": EPSILONS,
                "expected": [round(outlook.expected(epsilon), 4) for epsilon in EPSILONS],
                "ceiling": [round(outlook.ceiling(epsilon), 4) for epsilon in EPSILONS],
                "floor": round(outlook.floor, 4),
                "whole": outlook.whole,
            },
        }

    def _fetch_map(self, gallery: str, candidates: float | None) -> PublicPart:
        public = self._maps[gallery, candidates] = self.client.map(candidates, gallery=gallery)
        for oldest in list(self._maps)[:-_MAX_OUTLOOKS]:
            del self._maps[oldest]
        return public

    def _explain_refusal(self, public: PublicPart) -> str:
        """Return why no message can be sent to a gallery of another mechanism than covers; empty if one can."""
        try:
            fit_protocol(public, public.epsilon)
        except ProtocolError as error:
            return str(error).partition(". To send")[0] + ". `nearveil query --allow-unsound` sends one for comparison."
        return ""

    def _find_guarantee(self, epsilon: float, gallery: str, candidates: float | None) -> Guarantee:
        """Return the guarantee of a message, by the latest map."""
        public = self._maps.get((gallery, candidates))
        if public is None or public.mechanism == Covers.name:
            return set_guarantee(NamedSets(epsilon, 2 if public is None else public.map.n_sets))
        return fit_protocol(public, epsilon).guarantee

    def preview(self, epsilon: float, gallery: str = "", candidates: float | None = None) -> dict[str, Any]:
        """Return the cost and the guarantee of a message. Nothing is spent, and no map is fetched."""
        guarantee = self._find_guarantee(epsilon, gallery, candidates)
        return {**preview_cost(self.payer.account, guarantee), "promise": str(guarantee)}

    def ask(
        self,
        query: bytes | int | str,
        gallery: str,
        epsilon: float | None = None,
        candidates: float | None = None,
        by: Method = "auto",
        is_connected: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        """Search with a new key for an image file, a .npy file, or an item by its id; free without an epsilon."""
        # The same image asked again is a new query, and is charged. An answer that the browser did not receive, by
        # `is_connected`, waits for `again`.
        if epsilon:
            check_channel_epsilon(epsilon)
        with self._take_turn(gallery):
            content = self._read_query(query)
            if not epsilon:  # search the local index or copy, or send a sealed query
                return view_nearest(self.client.nearest(content, gallery=gallery, by=by), self.balance())
            info, (row,) = self.client.prepare([content], gallery=gallery)
            preview = self.payer.account.preview(self._find_guarantee(epsilon, gallery, candidates))
            if not preview.allowed:  # before anything is sent; the debit checks again
                raise make_refusal(preview)
            entry = UnansweredQuery(info, row, epsilon, candidates, int(time.time()))
            return {**self._answer(new_key(), entry, is_connected), "cost": format_up(preview.cost)}

    def _read_query(self, query: bytes | int | str) -> Any:
        """Return the content of an image file, the vector of a .npy file, or the feature of an item of the index."""
        if not isinstance(query, bytes):
            return self._find_item(query)
        if query.startswith(_NPY):
            return np.lib.format.read_array(BytesIO(query), allow_pickle=False)
        with self._extractor_lock:  # loaded once: by `warm_up` if that is loading it
            return query

    def _find_item(self, key: int | str) -> Singles:
        """Return the feature of an item of the local index, shape (1, d), by its id, external id or name."""
        if (index := self.client.index) is None:
            raise PageError(422, "question", "Only a local index can be searched by an item. Choose a file.")
        try:
            return index.features([key])
        except UnknownItemError:
            if encode_name(str(key)) not in (names := index.texts(ids := index.ids(), "names")):
                raise PageError(422, "question", f"No item of the gallery has this id or name. {NOTHING}") from None
            return index.features(ids[[names.index(encode_name(str(key)))]])

    def sync(self, gallery: str) -> dict[str, Any]:
        """Download a gallery's codes, or their changes. A button does this, never a query."""
        with self._take_turn(gallery):
            copy = self.client.sync(gallery=gallery)
            return {"items": len(copy), "fetched": copy.fetched}

    def _count_copy(self, info: GalleryInfo) -> int:
        """Return the number of items that a free search compares on this machine."""
        if self.client.index is not None:
            return len(self.client.index)
        copy = self.client.home(gallery=info.name) if "codes" in info.offers else None
        return 0 if copy is None else len(copy)

    def classify(self, image: bytes, gallery: str) -> dict[str, Any]:
        """Classify an image file with the model of a protected gallery, which is free."""
        with self._take_turn(gallery):
            return view_classified(self.client.classify(image, gallery=gallery), self.balance())

    def again(self, key: str, is_connected: Callable[[], bool] = lambda: True) -> dict[str, Any]:
        """Send the message of an unanswered query again, which is free. :meth:`about` lists the keys."""
        with self._take_turn():
            if key not in self._unanswered:
                raise PageError(404, "question", "This query is not waiting for an answer. Reload the page.")
            return {**self._answer(key, self._unanswered[key], is_connected), "cost": "0"}

    def _answer(self, key: str, entry: UnansweredQuery, is_connected: Callable[[], bool]) -> dict[str, Any]:
        """Send a query and return its answer. Keep the query if it is paid for and the browser has no answer."""
        self.payer.debit = None
        failure: Exception | None = None
        try:
            answer = self._send(entry, key)
            is_unanswered = not is_connected()
        except Exception as error:
            failure, is_unanswered = self._judge_failure(error, was_unanswered=key in self._unanswered)
        self._unanswered.pop(key, None)
        if is_unanswered:
            self._unanswered[key] = entry
            for oldest in list(self._unanswered)[:-_MAX_UNANSWERED]:
                del self._unanswered[oldest]
        if failure is not None:
            raise failure
        return answer

    def _send(self, entry: UnansweredQuery, key: str) -> dict[str, Any]:
        info = entry.info
        public = self._fetch_map(info.name, entry.candidates)
        if public.fingerprint != info.fingerprint:  # the row is useless there, and may have the same width
            self.galleries()
            raise PageError(409, "listing", _NEW_LISTING)
        # Depends on the gallery alone, never on the image.
        images = "thumbnails" in public.offers and public.map.set_size <= _MAX_THUMBNAILS
        nearest = self.client.nearest(
            entry.row,
            min(K, public.map.set_size),
            entry.epsilon,
            entry.candidates,
            gallery=info.name,
            thumbnails=images,
            key=key,
            rng=self._rng,
        )
        # The gallery may have published a new map in between; then the share of this one means nothing.
        same_map = (
            nearest.set is not None
            and public.mechanism == Covers.name
            and nearest.answer is not None
            and (nearest.n_sets, nearest.answer.codes.shape[1]) == (public.map.n_sets, public.table.width)
        )
        share = round(nearest.expected_share or 0.0, 4) if same_map else None
        debit = self.payer.debit
        message = b"" if debit is None or debit.message is None else debit.message  # as stored in the ledger
        view = view_nearest(nearest, self.balance(), message, images=images)
        return {**view, "map": getattr(public.map, "map_id", ""), "share": share}

    def _judge_failure(self, error: Exception, *, was_unanswered: bool) -> tuple[Exception, bool]:
        """Return the error to raise, and whether the query is paid for and can be retried."""
        if isinstance(error, (KeySpentError, KeyConflictError)):
            return error, False
        if isinstance(error, UnansweredError):
            return error, error.again
        if self.payer.debit is None:  # not charged now: an older query stays, unless its gallery has changed
            return error, was_unanswered and not isinstance(error, PageError)
        _LOG.error("a query failed: %s", type(error).__name__)
        return PageError(500, "failed", _SPOILED, paid=True, again=True), True

    @contextmanager
    def _take_turn(self, gallery: str | None = None) -> Iterator[None]:
        """Run one query at a time, of a gallery that the page offers."""
        if not self._lock.acquire(blocking=False):
            raise PageError(409, "busy", "Another query is in flight. Wait for its answer.", again=True)
        try:
            if gallery is not None and self._gallery not in (None, gallery):
                raise PageError(404, "question", "No gallery with this name. Reload the page.")
            yield
        finally:
            self._lock.release()
