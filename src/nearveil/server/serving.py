"""One process that serves: galleries are opened, a socket is bound, requests are answered, everything is closed."""

import gc
import logging
import math
import os
import signal
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import uvicorn

from nearveil.gallery.index import Index
from nearveil.server.app import HEARTBEAT_INTERVAL, create_app
from nearveil.server.connections import Connection, Slots
from nearveil.server.galleries import Gallery, OpenGallery
from nearveil.server.listener import Server
from nearveil.server.logs import install
from nearveil.server.metrics import drop_process, send_heartbeat
from nearveil.server.publications import check_apart
from nearveil.server.requests import SEALED, AppState
from nearveil.server.settings import GallerySettings, Settings, SettingsError
from nearveil.server.tokens import TokenStore

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    from nearveil.server.protected import ProtectedGallery

_LOG = logging.getLogger(__name__)
_MISSING = {
    "open": "no map yet: `nearveil index` makes one, of a folder of images or a file of vectors",
    "protected": "no model yet: `nearveil protect {name} --publish` makes one",
}
_LOOK = 0.2  # seconds between two looks at the processes
_PAUSE = 1.0  # seconds before a process that ended is started anew
_SILENT = 30.0  # seconds without a sign of life after which a process is ended
_STARTING = 300.0  # seconds more until the first: galleries are opened
_CLOSING = 2.0  # seconds that an index or a store has to be closed
_BACKLOG = 2048  # connections that wait to be accepted
_PROBES = 64  # connections to the management port


def open_galleries(settings: Settings, *, close: bool = False) -> list[Gallery]:
    """Open all galleries that a server is told of.

    Parameters
    ----------
    settings : Settings
    close : bool, default=False
        Whether they are closed again: to see that they can be opened.

    Returns
    -------
    list of Gallery
    """
    check_apart(settings.galleries)
    with ExitStack() as stack:
        found = []
        for told in settings.galleries:
            gallery = _opened(told, settings)
            stack.callback(gallery.close)
            if not gallery.info().is_published:
                raise SettingsError(f"galleries: {told.name} has {_MISSING[told.kind].format(name=told.name)}")
            if isinstance(gallery, OpenGallery):
                gallery.prepare()
            found.append(gallery)
        if not close:
            stack.pop_all()
        return found


def serve(settings: Settings, *, ready: Callable[[str], None] | None = None) -> None:
    """Serve until a signal says to stop (SIGTERM, SIGINT); then finish what is under way, and close everything.

    Parameters
    ----------
    settings : Settings
    ready : callable, optional
        Told the address when requests are answered.
    """
    if not settings.galleries:
        raise SettingsError("galleries: there is none: name a folder, or give [[galleries]] in the file")
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(_bound(settings)))]
        if settings.management_port is not None:
            fields = "management_host, management_port"
            sock = _listen(settings.management_host, settings.management_port, fields)
            sockets.append(stack.enter_context(closing(sock)))
        if settings.workers == 1:
            serve_on(sockets, settings, ready=ready)
        else:
            run_workers(sockets, settings, ready=ready)


def serve_on(
    sockets: list[socket.socket],
    settings: Settings,
    *,
    ready: Callable[[str], None] | None = None,
    send_heartbeat: Callable[[], None] = send_heartbeat,
) -> None:
    """Answer requests of sockets in this process until a signal says to stop.

    The first socket is for clients; a second one is the management port.
    """
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
        context = tls(settings) if settings.tls_cert else None
        server = Server(
            _config(app, settings, context),
            partial(_say_ready, address(settings, public), ready),
            state.stop,
            reload=partial(reload_certificate, context, settings),
            shutdown_delay=settings.shutdown_delay,
            management=(management[0], _make_management_class(settings)) if management else None,
        )
        stack.enter_context(server.signals())
        # What was loaded until now stays: going through all of it for garbage would stop requests for a while.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        server.run(sockets=[public])


def _warn_of_readable_key(path: Path | None) -> None:
    """Warn of a TLS key that every user of the machine can read; a group may: that of the server, say."""
    if path is not None and path.stat().st_mode & stat.S_IROTH:
        _LOG.warning("tls_key: every user of this machine can read %s: chmod o-rwx it", path)


def _say_ready(where: str, ready: Callable[[str], None] | None) -> None:
    _LOG.info("listening at %s", where)
    if ready is not None:
        ready(where)


@dataclass
class Worker:
    """A process that serves, and when it last gave a sign of life: that it can work, as `/health` says."""

    process: SpawnProcess
    beat: "Synchronized[float]"  # in memory that both share; 0 before the first
    began: float = field(default_factory=time.monotonic)

    def is_living(self) -> bool:
        """Return whether it gave a sign of life lately."""
        return self.process.is_alive() and time.monotonic() - self.beat.value < _SILENT

    def is_stuck(self) -> bool:
        """Return whether it should have given one since."""
        return time.monotonic() - (self.beat.value or self.began + _STARTING) > _SILENT

    def kill(self) -> None:
        """End it, whatever it does: one that was stopped hears no other signal. It is not stuck any more."""
        _LOG.error("a process gave no sign of life for %g seconds: it is started anew", _SILENT)
        self.process.kill()
        self.beat.value, self.began = 0.0, math.inf


def run_workers(
    sockets: list[socket.socket], settings: Settings, *, ready: Callable[[str], None] | None = None
) -> None:
    """Let several processes answer requests of a socket until a signal says to stop; start dead or silent ones anew.

    systemd hears from this process, while any of the others lives.
    """
    open_galleries(settings.model_copy(update={"cache": 0}), close=True)  # what is wrong is told once, here
    context = get_context("spawn")
    part, running = settings.of_one_worker(), False
    stopping: list[int] = []  # not an event: two signals at once would wait for each other
    with ExitStack() as stack:
        # Read when prometheus_client is imported: so it must stand there before a process begins.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = stack.enter_context(TemporaryDirectory(prefix="nearveil-metrics-"))
        stack.callback(os.environ.pop, "PROMETHEUS_MULTIPROC_DIR")

        start = partial(_start_worker, context, sockets, part)
        for one in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, one, signal.signal(one, lambda number, _: stopping.append(number)))
        workers: list[Worker] = []
        forward = partial(_forward_signal, workers)
        stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, forward))
        workers.extend(start() for _ in range(settings.workers))
        stack.callback(_end, workers, settings.shutdown_delay + settings.shutdown_grace)
        stack.callback(sockets[0].close)  # then the last process that stops closes it
        told = -math.inf
        while not stopping:
            if not running and all(worker.is_living() for worker in workers):
                # Not with the first: the others take its processors while they start.
                running = True
                if ready is not None:
                    ready(address(settings, sockets[0]))
            if time.monotonic() - told > HEARTBEAT_INTERVAL and any(worker.is_living() for worker in workers):
                send_heartbeat()
                told = time.monotonic()
            if not (dead := _find_dead(workers)):
                continue
            if not running:
                raise SettingsError("workers: a process ended before it could answer: see the log")
            time.sleep(_PAUSE)  # one that cannot start must not be started without end
            workers[:] = [start() if worker in dead else worker for worker in workers]


def _start_worker(context: SpawnContext, sockets: list[socket.socket], settings: Settings) -> Worker:
    beat = context.Value("d", lock=False)
    process = context.Process(target=_work, args=(sockets, settings, beat), daemon=True)
    # Ctrl-C reaches all processes of a terminal. These end when this one says so, and inherit what is blocked.
    # They unblock SIGHUP when they can handle it. Python's own helper must run before: to start it unblocks SIGINT.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGHUP))
    return Worker(process, beat)


def _forward_signal(workers: list[Worker], number: int, _: object) -> None:
    for worker in workers:
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, number)


def _find_dead(workers: list[Worker]) -> list[Worker]:
    """Wait a little; kill workers that are stuck, and return those that have ended."""
    connection.wait([worker.process.sentinel for worker in workers], timeout=_LOOK)
    for worker in workers:
        if worker.is_stuck():
            worker.kill()
    dead = [worker for worker in workers if not worker.process.is_alive()]
    for worker in dead:
        drop_process(worker.process.pid)
    return dead


def _work(sockets: list[socket.socket], settings: Settings, beat: "Synchronized[float]") -> None:
    """Serve in a process of its own, as long as the one that started it lives."""
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell_parent() -> None:
        beat.value = time.monotonic()  # which all processes of a machine share

    serve_on(sockets, settings, send_heartbeat=tell_parent)
    # All is closed and written. What is left is to go through all objects of this process, for a second or more.
    os._exit(0)


def _end_with_parent() -> None:
    """Stop this process when its parent has died: nobody else would."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _end(workers: list[Worker], grace: float) -> None:
    """Let processes finish what is under way, but not for ever."""
    for worker in workers:
        worker.process.terminate()
    until = time.monotonic() + grace + _CLOSING * 2
    for worker in workers:
        worker.process.join(max(0.1, until - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()


def address(settings: Settings, sock: socket.socket) -> str:
    """Return the URL of a socket."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{sock.getsockname()[1]}"


def _config(app: Any, settings: Settings, context: ssl.SSLContext | None = None) -> uvicorn.Config:
    limits = {
        **_make_timeouts(settings),
        "largest_body": settings.max_body,
        "larger_bodies": {SEALED: settings.max_sealed},
        "slots": Slots(settings.connections),
    }
    return uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), limits),
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


def _make_timeouts(settings: Settings) -> dict[str, Any]:
    return {
        "header_seconds": settings.header_timeout,
        "body_seconds": 2 * settings.body_timeout,  # who reads the body has the first turn, and says why
        "send_seconds": settings.send_timeout,
    }


def _make_management_class(settings: Settings) -> type[Connection]:
    """Return the connections of the management port, with slots of their own: no client takes them."""
    limits = {**_make_timeouts(settings), "slots": Slots(_PROBES), "is_management": True}
    return type("ManagementConnection", (Connection,), limits)


def reload_certificate(context: ssl.SSLContext | None, settings: Settings) -> None:
    """Load the certificate and its key again, for connections that are made from now on; keep the old ones if bad.

    Authorities of clients (`tls_client_ca`) are not loaded again: a context cannot forget one.
    """
    if context is None or settings.tls_cert is None:
        _LOG.info("SIGHUP: this server has no certificate to reload")
        return
    try:
        tls(settings)  # in a context of its own: a key that does not fit would break the live one
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (SettingsError, ssl.SSLError, OSError) as error:
        reason = str(error) if isinstance(error, SettingsError) else error.strerror
        _LOG.error("certificate not reloaded, the previous one stays in use: %s", reason)
    else:
        _LOG.info("certificate reloaded")


def tls(settings: Settings) -> ssl.SSLContext:
    """Return how connections are secured: TLS 1.2 or newer, with certificates of clients where that is asked for."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert settings.tls_cert is not None
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(f"tls_cert, tls_key, tls_client_ca: they cannot be used: {error.strerror}") from None
    return context


def _bound(settings: Settings) -> socket.socket:
    if settings.tls_cert is not None:
        tls(settings)  # what is wrong with it shall be told before anything is opened
    return _listen(settings.host, settings.port, "host, port")


def _listen(host: str, port: int, fields: str) -> socket.socket:
    with ExitStack() as stack:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)  # who else listens here is told now
        except OSError as error:
            raise SettingsError(f"{fields}: cannot listen at {host}:{port}: {error.strerror}") from None
        stack.pop_all()
        return sock


def _opened(told: GallerySettings, settings: Settings) -> Gallery:
    wait = settings.database_timeout
    index = Index.open(told.index, timeout=wait)
    try:
        if told.kind == "open":
            return OpenGallery(index, told.name, offers=told.offers, extractor=told.extractor, cache=settings.cache)
        return open_protected(told, index, wait)
    except BaseException:
        index.close()
        raise


def open_protected(told: GallerySettings, private: Index, wait: float) -> "ProtectedGallery":
    """Open a protected gallery as a server is told of it; it need not have published anything yet."""
    from nearveil.server.protected import ProtectedGallery

    assert told.public is not None
    assert told.classes is not None
    assert told.epsilon is not None
    assert told.delta is not None
    assert told.account is not None
    public = Index.open(told.public, timeout=wait)
    try:
        return ProtectedGallery(
            private,
            public,
            told.name,
            classes=told.classes,
            epsilon=told.epsilon,
            delta=told.delta,
            publications=told.publications or 1,
            unit=told.unit or "record",
            ledger=told.ledger,
            account=told.account,
            extractor=told.extractor,
        )
    except BaseException:
        public.close()
        raise


def _close(opened: Gallery | TokenStore) -> None:
    """Close something, unless that takes too long: a thread that hangs may hold it."""
    closing = threading.Thread(target=opened.close, daemon=True)
    closing.start()
    closing.join(_CLOSING)
