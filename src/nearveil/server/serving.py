"""Serve: open galleries, bind sockets, answer requests, close everything."""

import gc
import logging
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from nearveil.gallery.index import Index
from nearveil.progress import start_stage
from nearveil.server.app import create_app
from nearveil.server.galleries import Gallery, OpenGallery
from nearveil.server.listener import MAX_HEADER_BYTES, Connection, Server, Slots
from nearveil.server.logs import install
from nearveil.server.metrics import send_heartbeat
from nearveil.server.requests import AppState
from nearveil.server.settings import GallerySettings, Settings, SettingsError
from nearveil.server.supervisor import CLOSE_TIMEOUT, run_workers
from nearveil.server.tokens import TokenStore

if TYPE_CHECKING:
    from nearveil.server.protected import ProtectedGallery

_LOG = logging.getLogger(__name__)
_UNPUBLISHED = {
    "open": "no map yet: `nearveil index` makes one from a folder of images or a file of vectors",
    "protected": "no model yet: `nearveil protect {name} --publish` makes one",
}
_TERMS = {"classes", "epsilon", "delta", "publications", "unit", "group", "ledger", "account", "extractor"}
_BACKLOG = 2048  # connections that wait to be accepted
_MANAGEMENT_CONNECTIONS = 64


def open_galleries(settings: Settings) -> list[Gallery]:
    """Open all galleries of a server; the caller closes them."""
    with ExitStack() as stack:
        galleries: list[Gallery] = []
        for entry in settings.galleries:
            start_stage(f"Loading {entry.name}")
            gallery = _open_gallery(entry, settings)
            stack.callback(gallery.close)
            if not gallery.info().is_published:
                raise SettingsError(f"galleries: {entry.name} has {_UNPUBLISHED[entry.kind].format(name=entry.name)}")
            if isinstance(gallery, OpenGallery):
                gallery.prepare()
            galleries.append(gallery)
        stack.pop_all()
        return galleries


def _open_gallery(entry: GallerySettings, settings: Settings) -> Gallery:
    if entry.kind == "protected":
        return open_protected(entry, settings.database_timeout)
    with ExitStack() as stack:
        index = stack.enter_context(closing(Index.open(entry.index, timeout=settings.database_timeout)))
        gallery = OpenGallery(index, entry.name, offers=entry.offers, extractor=entry.extractor, cache=settings.cache)
        stack.pop_all()
        return gallery


def open_protected(entry: GallerySettings, timeout: float) -> "ProtectedGallery":
    """Open a protected gallery, which may have published nothing yet."""
    from nearveil.server.protected import ProtectedGallery

    with ExitStack() as stack:
        private = stack.enter_context(closing(Index.open(entry.index, timeout=timeout)))
        public = stack.enter_context(closing(Index.open(str(entry.public), timeout=timeout)))
        terms = entry.model_dump(include=_TERMS, exclude_none=True)
        gallery = ProtectedGallery(private, public, entry.name, **terms)
        stack.pop_all()
        return gallery


def serve(settings: Settings, *, ready: Callable[[str], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT; then finish requests in flight, and close everything.

    When the server answers requests, `ready` is called with its URL.
    """
    if not settings.galleries:
        raise SettingsError("galleries: none given. Name a folder, or add [[galleries]] to the file")
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(bind_socket(settings)))]
        if settings.management_port is not None:
            fields = "management_host, management_port"
            sock = _listen(settings.management_host, settings.management_port, fields)
            sockets.append(stack.enter_context(closing(sock)))
        if settings.workers == 1:
            serve_on(sockets, settings, ready=ready)
            return
        for gallery in open_galleries(settings.model_copy(update={"cache": 0})):  # report errors once, here
            gallery.close()
        run_workers(serve_on, sockets, settings, partial(ready, make_url(settings, sockets[0])))


def serve_on(
    sockets: list[socket.socket],
    settings: Settings,
    *,
    ready: Callable[[str], None] = lambda _: None,
    send_heartbeat: Callable[[], None] = send_heartbeat,
) -> None:
    """Answer requests of clients at the first socket, of the management port at a second, until a signal."""
    public, *management = sockets
    with ExitStack() as stack:
        tokens = TokenStore(settings.tokens, timeout=settings.database_timeout)
        stack.callback(_close, tokens)
        galleries = open_galleries(settings)
        for gallery in galleries:
            stack.callback(_close, gallery)
        app = create_app(galleries, tokens, settings)
        state: AppState = app.state.nearveil
        state.send_heartbeat = send_heartbeat
        install(state.log, settings.log_level)
        _warn_of_readable_key(settings.tls_key)
        context, url = make_tls_context(settings) if settings.tls_cert else None, make_url(settings, public)

        def report_ready() -> None:
            _LOG.info("listening at %s", url)
            ready(url)

        # Clients cannot take the slots of the management port.
        limited = _limit_connections(settings, _MANAGEMENT_CONNECTIONS, is_management=True)
        server = Server(
            make_config(app, settings, context),
            report_ready,
            state.stop,
            reload=partial(reload_certificate, context, settings),
            shutdown_delay=settings.shutdown_delay,
            management=(management[0], limited) if management else None,
        )
        stack.enter_context(server.signals())
        # Everything loaded so far stays: a garbage collection of it would block requests for a while.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        server.run(sockets=[public])


def _warn_of_readable_key(path: Path | None) -> None:
    """Warn of a TLS key that every user of the machine can read; its group may, such as the server's."""
    if path is not None and path.stat().st_mode & stat.S_IROTH:
        _LOG.warning("tls_key: every user of this machine can read %s: chmod o-rwx it", path)


def make_url(settings: Settings, sock: socket.socket) -> str:
    """Return the URL of a socket."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{sock.getsockname()[1]}"


def make_config(app: Any, settings: Settings, context: ssl.SSLContext | None = None) -> uvicorn.Config:
    """Return the configuration of uvicorn, with our limits on connections."""
    return uvicorn.Config(
        app,
        http=_limit_connections(settings, settings.connections),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=round(settings.idle_timeout) or 1,
        timeout_graceful_shutdown=round(settings.shutdown_grace),
        ssl_context_factory=(lambda *_: context) if context is not None else None,
    )


def _limit_connections(settings: Settings, maximum: int, *, is_management: bool = False) -> type[Connection]:
    """Return a class of at most `maximum` connections, with the timeouts of the settings."""
    limits = {
        "header_timeout": settings.header_timeout,
        "body_timeout": 2 * settings.body_timeout,  # `read_body` times out first, with a response
        "send_timeout": settings.send_timeout,
        "slots": Slots(maximum),
        "is_management": is_management,
    }
    return type("LimitedConnection", (Connection,), limits)


def reload_certificate(context: ssl.SSLContext | None, settings: Settings) -> None:
    """Load the certificate and its key again, for new connections; keep the current ones if the files are invalid."""
    # `tls_client_ca` is not loaded again: a context cannot drop an authority.
    if context is None or settings.tls_cert is None:
        _LOG.info("SIGHUP: this server has no certificate to reload")
        return
    try:
        make_tls_context(settings)  # a separate context first: a wrong key would break the live one
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (SettingsError, ssl.SSLError, OSError) as error:
        reason = str(error) if isinstance(error, SettingsError) else error.strerror
        _LOG.error("certificate not reloaded, the previous one stays in use: %s", reason)
    else:
        _LOG.info("certificate reloaded")


def make_tls_context(settings: Settings) -> ssl.SSLContext:
    """Return a context for TLS 1.2 or newer, with client certificates if `tls_client_ca` is set."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert settings.tls_cert is not None
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(f"tls_cert, tls_key, tls_client_ca: cannot load them: {error.strerror}") from None
    return context


def bind_socket(settings: Settings) -> socket.socket:
    """Return a listening socket; report an invalid certificate before anything is opened."""
    if settings.tls_cert is not None:
        make_tls_context(settings)
    return _listen(settings.host, settings.port, "host, port")


def _listen(host: str, port: int, fields: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise SettingsError(f"{fields}: cannot listen at {host}:{port}: {error.strerror}") from None


def _close(resource: Gallery | TokenStore) -> None:
    """Close a resource, unless that takes too long: a thread that hangs may use it."""
    closer = threading.Thread(target=resource.close, daemon=True)
    closer.start()
    closer.join(CLOSE_TIMEOUT)
