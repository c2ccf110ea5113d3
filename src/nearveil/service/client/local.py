"""Transport to a gallery in this process: the same replies as over HTTP."""

import asyncio
import hashlib
import os

from nearveil.gallery.index import Index
from nearveil.service.client.transport import BYTES, JSON, Request, Response
from nearveil.service.schema import FRAME, Galleries, Problem
from nearveil.service.server.errors import ServiceError
from nearveil.service.server.galleries import Gallery, Offer, OpenGallery, frame_status

_NAME = "local"
_OFFERS: tuple[Offer, ...] = ("names", "thumbnails", "originals")  # of an index here: its owner asks


class LocalTransport:
    """Carries requests to a gallery in this process, in threads.

    `owned`: Whether closing closes the gallery.
    """

    def __init__(self, gallery: Gallery, *, owned: bool) -> None:
        self._gallery, self._owned = gallery, owned

    @classmethod
    def open(cls, where: "str | os.PathLike[str] | Index | Gallery") -> "LocalTransport":
        """Open an index by its folder or URL; an index or a gallery that is open stays its owner's."""
        if isinstance(where, Index):
            return cls(OpenGallery(where, _NAME, offers=_OFFERS), owned=False)
        if isinstance(where, (str, os.PathLike)):
            return cls(OpenGallery(Index.open(os.fspath(where)), _NAME, offers=_OFFERS), owned=True)
        return cls(where, owned=False)

    async def send(self, request: Request) -> Response:
        """Ask the gallery, and return what a server would."""
        return await asyncio.to_thread(self._reply, request)

    async def close(self) -> None:
        """Close the gallery if it is the transport's own."""
        if self._owned:
            await asyncio.to_thread(self._gallery.close)

    def _reply(self, request: Request) -> Response:
        try:
            return self._answer(request)
        except ServiceError as error:
            said = Problem(code=error.code, message=str(error))
            return Response(error.status, JSON, said.model_dump_json().encode(), retry_after=error.retry_after)

    def _answer(self, request: Request) -> Response:
        if request.what == "galleries":
            return Response(200, JSON, Galleries(galleries=(self._gallery.info(),)).model_dump_json().encode())
        if request.what == "map":
            data = self._gallery.map(request.candidates)
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            return Response(304, FRAME, b"", etag) if etag == request.etag else Response(200, FRAME, data, etag)
        if request.what == "query":
            data = self._gallery.query(request.body)
            return Response(frame_status(data), FRAME, data)
        if request.what == "model":
            return Response(200, BYTES, self._gallery.model())
        return Response(200, BYTES, self._gallery.original(request.number))
