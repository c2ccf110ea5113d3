"""The state that all requests of a server share, and the answer to a question."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from nearveil.gallery.answers import EXTRAS
from nearveil.lazy import require_extra
from nearveil.ledger import LedgerError
from nearveil.server.errors import ServiceError
from nearveil.server.galleries import Gallery, OpenGallery
from nearveil.server.keys import IdempotencyStore
from nearveil.server.limits import ByteBudget, TokenBuckets, check_length, read_body
from nearveil.server.logs import JsonLog
from nearveil.server.metrics import Metrics, read_gallery_metrics, send_heartbeat
from nearveil.server.middleware import CONTEXT, RequestContext
from nearveil.server.settings import Settings
from nearveil.server.tokens import TokenStore
from nearveil.server.workers import POLL_TIMEOUT, Poller, Workers
from nearveil.telemetry import Telemetry
from nearveil.wire.frames import peek_header
from nearveil.wire.messages import frame_status
from nearveil.wire.schema import FRAME, MOST_GALLERIES, GalleryInfo

if TYPE_CHECKING:
    from nearveil.server.identity import IdentityProvider

MESSAGE, SEALED, TOKENS = "query", "sealed", "sealed/tokens"  # the last part of the path of a question
_SHARED_THREADS = 4
_SMALL = 1 << 16  # bytes of an answer that a connection takes without waiting, and that are not counted
_ORIGINALS = EXTRAS.index("originals")


class LargeResponse(Response):
    """A response that ends when its client has read all but its end: until then, the request is in flight."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send the response."""
        del scope, receive
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class AppState:
    """The state of one server. `create_app` makes it."""

    def __init__(self, galleries: Sequence[Gallery], tokens: TokenStore, settings: Settings) -> None:
        self.galleries = {gallery.name: gallery for gallery in galleries}
        if len(self.galleries) != len(galleries):
            raise ValueError("galleries must have different names")
        if len(galleries) > MOST_GALLERIES:
            raise ValueError(f"galleries must be at most {MOST_GALLERIES}")
        telemetry = Telemetry("nearveil-server", is_server=True) if settings.telemetry else None
        self.tokens, self.settings, self.metrics = tokens, settings, Metrics(telemetry)
        self.send_heartbeat: Callable[[], None] = send_heartbeat
        self.is_stopping = False  # whether every connection is closed after its next answer
        timeout = settings.work_timeout
        self.log = JsonLog(settings.log_file)
        self.keys = IdempotencyStore(settings.tokens, settings.database_timeout)
        self.identity = _open_identity(settings)
        self.rate = TokenBuckets(settings.rate, settings.burst)
        self.in_flight: Counter[str] = Counter()  # requests of each token
        self.sending = ByteBudget(settings.sending, "Too many answers wait to be read by clients. Try again later.")
        self.receiving = {  # neither kind of question keeps the other out
            kind: ByteBudget(settings.receiving, "The server is receiving too many bytes. Try again later.")
            for kind in (MESSAGE, SEALED, TOKENS)
        }
        self.token_workers, self.key_workers = (Workers(_SHARED_THREADS, settings.queue, timeout) for _ in range(2))
        # No gallery waits for the database of another, and no message for files or sealed questions.
        threads = {"answers": settings.concurrency, "files": max(1, settings.concurrency // 4)}
        threads["sealed"] = settings.concurrency
        self.pools = {
            name: {pool: Workers(count, settings.queue, timeout) for pool, count in threads.items()}
            for name in self.galleries
        }
        self.token_poller = Poller("token store", tokens.list, timeout)  # which revokes expired ones
        named = self.galleries.items()
        self._pollers = {name: Poller(f"gallery {name}", gallery.refresh, timeout) for name, gallery in named}
        self._answer_sizes: dict[tuple[str, int], int] = {}  # of large answers: expected size of the next one
        for gallery in self.galleries.values():
            if isinstance(gallery, OpenGallery):
                gallery.on_cache_miss = self.metrics.answers_made.inc

    async def answer_question(self, request: Request, name: str, key: str, kind: str) -> Response:
        """Answer a private question: a message, a sealed question, or a request for its tokens."""
        # `GuardMiddleware` has checked the token, its rate and its requests in flight. The body is counted before it is
        # read, and its key is stored before the gallery sees it: another request under the same key is never answered.
        context: RequestContext = request.scope[CONTEXT]
        token, gallery, pools = context.require("query").id, context.get_gallery(name), self.pools[name]
        media_type = context.headers.get(b"content-type", b"").partition(b";")[0]
        if media_type.strip().lower() != FRAME.encode():
            raise ServiceError("media_type", f"The body must have the media type {FRAME}.")

        is_sealed, tokens = kind != MESSAGE, kind == TOKENS
        lengths = gallery.sealed_lengths(tokens=tokens) if is_sealed else range(self.settings.max_body + 1)
        context.body = context.reserve(self.receiving[kind])
        length = check_length(context.length, lengths)
        context.body.resize(length)
        body = await read_body(request.receive, length, self.settings.body_timeout)
        context.has_read_body = True
        _, extras = peek_header(body)
        if extras == _ORIGINALS:
            context.require("originals")

        data = await self.key_workers.run(partial(self.keys.store, key, token, f"{name}/{kind}", body))

        if is_sealed:
            self.rate.charge(token, gallery.sealed_pass_bytes(tokens=tokens) + len(data))
            answer = await pools["sealed"].run(partial(gallery.ask_sealed, data), is_canceled=context.is_disconnected)
            return self.respond(context, answer, FRAME)
        context.answer = context.reserve(self.sending)
        context.answer.resize(self._answer_sizes.get((name, extras), 0))  # before the answer is made
        workers = pools["files" if extras == _ORIGINALS else "answers"]
        answer = await workers.run(partial(gallery.query, data), is_canceled=context.is_disconnected)
        if len(answer) > _SMALL:
            self._answer_sizes[name, extras] = len(answer)
        status = frame_status(answer)
        return self.respond(context, answer, FRAME, status, {"retry-after": "2"} if status == 503 else None)

    def respond(
        self,
        context: RequestContext,
        body: bytes,
        media_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return a response; ServiceError if it is large and too many bytes wait for clients to read them."""
        if context.body is not None:
            context.body.resize(0)
        is_large = len(body) > _SMALL
        context.answer = context.answer or context.reserve(self.sending)
        context.answer.resize(len(body) if is_large else 0)
        if is_large and context.token is not None:
            self.rate.charge(context.token.id, len(body))
        return (LargeResponse if is_large else Response)(body, status, headers, media_type)

    async def send(
        self,
        request: Request,
        name: str,
        read: Callable[[Gallery], bytes],
        *,
        media_type: str = FRAME,
        pool: str = "files",
        cacheable: bool = False,
    ) -> Response:
        """Return bytes that a thread reads; if `cacheable`, with an ETag, or 304 if the client has them."""
        context: RequestContext = request.scope[CONTEXT]
        gallery = context.get_gallery(name)

        def read_and_hash() -> tuple[bytes, str]:
            content = read(gallery)
            return content, f'"{hashlib.sha256(content).hexdigest()}"' if cacheable else ""

        content, etag = await self.pools[name][pool].run(read_and_hash, is_canceled=context.is_disconnected)
        if not cacheable:
            return self.respond(context, content, media_type)
        tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if etag in tags or "*" in tags:
            return Response(status_code=304, headers={"etag": etag})
        return self.respond(context, content, media_type, headers={"etag": etag})

    async def load_infos(self, context: RequestContext) -> list[GalleryInfo]:
        """Return the public information of all galleries that a token may use, without those that do not answer."""
        token = context.require("query")
        names = [name for name in self.galleries if token.may_use(name)]
        calls = (self.pools[name]["answers"].run(self.galleries[name].info, timeout=POLL_TIMEOUT) for name in names)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        infos = [reply for reply in replies if isinstance(reply, GalleryInfo)]
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        unexpected = [error for error in errors if not isinstance(error, ServiceError)]
        if unexpected or (errors and not infos):
            raise (unexpected or errors)[0]
        return infos

    async def load_metrics(self, gallery: Gallery) -> dict[str, float]:
        """Return the metrics of a gallery by name."""
        try:
            workers = self.pools[gallery.name]["answers"]
            return await workers.run(partial(read_gallery_metrics, gallery), timeout=POLL_TIMEOUT)
        except (ServiceError, LedgerError):
            return {"up": 0.0}

    def is_alive(self) -> bool:
        """Return whether every pool still has a thread that can start work."""
        pollers = (self.token_poller, *self._pollers.values())
        shared = (self.token_workers, self.key_workers, *(poller.workers for poller in pollers))
        of_galleries = (workers for pools in self.pools.values() for workers in pools.values())
        return not any(workers.is_stuck() for workers in (*shared, *of_galleries))

    def stop(self) -> None:
        """Report that the server is not ready, and close connections after their next answer."""
        self.is_stopping = True

    def is_ready(self) -> bool:
        """Return whether tokens and open galleries could be read, all are published, and the log can be written."""
        # The last poll counts: it has separate threads, while those of requests may all be busy.
        if self.is_stopping:
            return False
        galleries = self.galleries.values()
        polled = [self._pollers[gallery.name] for gallery in galleries if isinstance(gallery, OpenGallery)]
        can_read = all(poller.outages.is_up for poller in (self.token_poller, *polled))
        return can_read and not self.log.failing and all(gallery.is_published for gallery in galleries)

    async def refresh(self) -> None:
        """Poll the token store and all galleries; the log says which are down."""
        pollers = (self.token_poller, *self._pollers.values())
        polls = [poller.poll() for poller in pollers]
        if self.identity is not None:
            polls.append(self.identity.poll())
        await asyncio.gather(*polls, return_exceptions=True)

    def close(self) -> None:
        """Close the keys, the log and the telemetry."""
        self.keys.close()
        if self.metrics.telemetry is not None:
            self.metrics.telemetry.close()
        self.log.close()


def _open_identity(settings: Settings) -> "IdentityProvider | None":
    if settings.oidc is None:
        return None
    with require_extra("oidc"):
        from nearveil.server import identity
    account_key = identity.load_account_key(settings.tokens, settings.database_timeout)
    return identity.IdentityProvider(settings.oidc, account_key, settings.work_timeout)
