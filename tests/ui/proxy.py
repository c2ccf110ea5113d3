"""A proxy that writes down all that goes to a server, to the byte, and can go away."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Seen = tuple[str, str, tuple[tuple[str, str], ...], bytes]
"""Method, path, headers and body."""


@dataclass
class Recorder:
    """Where the proxy is, and what it has seen."""

    url: str
    seen: list[Seen] = field(default_factory=list)
    only_get: bool = False  # whether questions are cut off, as if the server were gone

    @property
    def posts(self) -> list[Seen]:
        return [one for one in self.seen if one[0] == "POST"]


@contextmanager
def recording(target: str) -> Iterator[Recorder]:
    """Pass everything on to a server, and write it down."""
    to = urlsplit(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def log_message(self, *_: Any) -> None:
            pass

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            recorder.seen.append((self.command, self.path, tuple(self.headers.items()), body))
            if recorder.only_get and self.command != "GET":
                self.close_connection = True
                return
            there = http.client.HTTPConnection(to.hostname or "", to.port, timeout=30)
            try:
                headers = {**dict(self.headers.items()), "Host": to.netloc}
                there.request(self.command, self.path, body or None, headers)
                reply = there.getresponse()
                content = reply.read()
            except OSError:  # the server is gone
                self.close_connection = True
                return
            finally:
                there.close()
            self.send_response_only(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _pass  # noqa: N815

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    with Quiet(("127.0.0.1", 0), Handler) as server:
        recorder = Recorder(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join(10)
