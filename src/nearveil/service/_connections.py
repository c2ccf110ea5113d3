"""Connections that do not wait for ever: for headers, for a client that does not read, for one that says nothing."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from nearveil.service._model import Problem

_LARGEST_HEAD = 32 << 10  # bytes until the headers are complete
_BAD = Problem(code="http", message="this is not HTTP").model_dump_json().encode()
_HEAVY = Problem(code="headers", message="the headers are too large").model_dump_json().encode()
_PLAIN = b"content-type: application/json\r\nx-content-type-options: nosniff\r\ncache-control: no-store\r\n"


class Connection(HttpToolsProtocol):
    """A connection of uvicorn with limits of its own.

    Uvicorn closes one that is idle between two requests. These are closed here: one that does not get its headers
    done in time, or sends too many; one whose client does not read what it asked for; and all beyond a number.
    """

    header_seconds = 10.0
    send_seconds = 60.0
    most = 1000

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._in_head, self._head = True, 0  # bytes of headers that are not complete
        self._ended = False  # whether a request was complete in what came last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._stop_head()
        self._stop_send()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what comes while headers are not complete: what is not is kept by the parser, however long."""
        self._ended = False
        super().data_received(data)
        if self._in_head and not self._ended:
            self._head += len(data)
            if self._head > _LARGEST_HEAD:
                self._refuse(431, _HEAVY)

    def on_message_begin(self) -> None:
        """Begin to wait for headers, where that is not so yet."""
        super().on_message_begin()
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        """Wait for headers no more; the body has a time of its own."""
        self._stop_head()
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Count headers anew."""
        self._in_head, self._head, self._ended = True, 0, True
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self.send_seconds, self._abort)

    def resume_writing(self) -> None:
        """Wait no more: it reads."""
        self._stop_send()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Say that it is not HTTP, as all problems are said."""
        del msg
        self._refuse(400, _BAD)

    def _refuse(self, status: int, body: bytes) -> None:
        if self.transport.is_closing():
            return
        length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + _PLAIN + length + body)
        self.transport.close()

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_seconds, self._abort)

    def _stop_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_send(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _abort(self) -> None:
        # Not close(), which would first wait for the client to read what is left.
        self.transport.abort()
