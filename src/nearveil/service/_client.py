"""The client for programs that wait."""

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nearveil.features import Extractor
from nearveil.ledger import Ledger
from nearveil.privacy.noise import Source
from nearveil.protocol.wire import PublicPart
from nearveil.service._connect import Options, Where, address, asker, here, is_url
from nearveil.service._dummies import Payer
from nearveil.service._model import GalleryInfo
from nearveil.service._private_image import Image, Images
from nearveil.service._replies import Now, Pause, Steps, Until, Work
from nearveil.service._results import Classified, Nearest
from nearveil.service._schedule import Clock
from nearveil.service._steps_classify import classify, current_model
from nearveil.service._steps_nearest import Asked, nearest
from nearveil.service._transport import Transport

if TYPE_CHECKING:
    import httpx

    from nearveil.votes import PublicDiscriminant

T = TypeVar("T")


class Client:
    """Asks galleries, privately: it pays first, says one thing, and chooses at home.

    What a server, or whoever listens, learns is proved in ``docs/theory/service.md``. That you ask, when, how often and
    from where is not hidden.

    Parameters
    ----------
    where : str, Path, Index or Gallery
        The URL of a server (``https://host:8321``), or an index here: its folder, its PostgreSQL URL, or itself.
    token : str, optional
        For a server. It goes to that server alone and stands in no text that the client makes.
    account : Account, str or any object with `spend`, optional
        Who pays; a name needs `ledger`. Without, only what costs nothing can be asked.
    ledger : str, Path or Ledger, optional
        Where the account of that name is.
    extractor : Extractor, optional
        What makes features of images; found by the gallery's fingerprint where it is not given.
    retries : int, default=3
        How often a request is sent again where no reply came, or one that says "later". Each time the same bytes.
    timeout : float, default=60.0
        Seconds for one request with its reply.
    insecure : bool, default=False
        Whether plain HTTP to other machines is allowed.
    ca : str or Path, optional
        A PEM file of certificates to trust in place of the usual ones.
    certificate : str, Path or pair of them, optional
        The client's own certificate, with its key.
    proxies : bool, default=False
        Whether the proxies of the environment are used.
    transport : httpx.AsyncBaseTransport, optional
        In place of the network, for tests.

    Examples
    --------
    ``docs/howto/client.md`` asks an index and a server.
    """

    def __init__(
        self,
        where: Where,
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
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        options = Options(
            where,
            token,
            account,
            ledger,
            extractor,
            retries,
            timeout,
            insecure,
            ca,
            certificate,
            proxies,
            transport,
        )
        self._shown, self._clock = shown(where), Clock()
        self._transport = _transport(options)
        try:
            self._asker, self._ledger = asker(options)
        except BaseException:
            self._transport.close()
            raise

    def nearest(
        self,
        image: Image,
        k: int | None = 8,
        epsilon: float = 4.0,
        candidates: float | None = None,
        *,
        gallery: str | None = None,
        thumbnails: bool = False,
        originals: bool = False,
        dummies: Images = (),
        key: str | None = None,
        rng: Source | None = None,
    ) -> Nearest:
        """Find the nearest images of an open gallery.

        The account pays before the message exists. The message names one of a few sets of the gallery; all images of
        that set come back, and the choice is made here. Nothing is sent after it.

        Parameters
        ----------
        image : path, bytes, image of Pillow, or ndarray
            Private. An array is pixels, shape (height, width, 3), uint8; or a feature, shape (d,), floats.
        k : int or None, default=8
            How many; None for 8, or as many as an answer holds.
        epsilon : float, default=4.0
            Of the message, from 1e-6 to 40.
        candidates : float, optional
            The part of the gallery that an answer holds; there must be a map for it. The newest map otherwise.
        gallery : str, optional
            Its name; needed where there are several.
        thumbnails, originals : bool, default=False
            Whether all candidates come with their images. Never choose it by the image.
        dummies : sequence of images
            Public images, such as one of every class: their messages go with yours, in random order.
        key : str, optional
            Names this question. The same image with the same key sends the same again and pays nothing. Never derive
            it from the image: the ledger keeps it.
        rng : Source, optional
            For tests and studies; see :meth:`nearveil.mechanisms.Release.release`. No account pays for what is made
            with a seed.

        Returns
        -------
        Nearest

        Raises
        ------
        QuestionError, ReplyError, UnreachableError, ImageError, ValueError
            Nothing was paid. The last is about `epsilon`, `key` or a feature.
        OverBudgetError, LedgerError
            Of the account. Nothing was asked.
        UnansweredError
            It is paid for. Where its `again` is true, its `key` asks again, for nothing; else no answer will come.
        """
        asked = Asked(image, k, epsilon, candidates, gallery, thumbnails, originals, dummies, key, rng)
        return self._driven(nearest(self._asker, asked))

    def classify(self, image: Image, *, gallery: str | None = None) -> Classified:
        """Classify an image by the model of a protected gallery. Nothing is told about the image, and nothing is paid.

        The model is fetched once and kept; at most once an hour the gallery is asked whether it has a newer one. Both
        happen before the image is looked at, and nothing is sent afterwards.

        Parameters
        ----------
        image : path, bytes, image of Pillow, or ndarray
            Private; as of :meth:`nearest`.
        gallery : str, optional
            Its name; needed where there are several protected ones.

        Returns
        -------
        Classified

        Raises
        ------
        QuestionError, ReplyError, UnreachableError, ImageError
            The last is about the image; the others, but for a feature that does not fit, come before it is looked at.
        """
        return self._driven(classify(self._asker, image, gallery))

    def original_not_private(self, id: int, *, gallery: str | None = None) -> bytes:  # noqa: A002
        """Fetch one original by its id. NOT PRIVATE: the request tells the server which image you chose.

        No promise covers this call, and after it the promise of the question that found the id is worth nothing in
        practice: who knows the choice knows what was looked for. To see originals and stay private, ask with
        ``nearest(..., originals=True)``, which fetches those of all candidates alike.

        Parameters
        ----------
        id : int
        gallery : str, optional

        Returns
        -------
        bytes
            The file.
        """
        return self._driven(self._asker.original(id, gallery))

    def galleries(self) -> tuple[GalleryInfo, ...]:
        """Return what there is to ask.

        Returns
        -------
        tuple of GalleryInfo
        """
        return self._driven(self._asker.galleries())

    def map(self, candidates: float | None = None, *, gallery: str | None = None) -> PublicPart:
        """Return the public map of a gallery as it is now. Nothing private plays a part, and nothing is paid.

        Parameters
        ----------
        candidates : float, optional
            The part of the gallery that an answer holds; the newest map otherwise.
        gallery : str, optional
            Its name; needed where there are several.

        Returns
        -------
        PublicPart
        """
        return self._driven(self._asker.map(gallery, candidates))

    def model(self, *, gallery: str | None = None) -> "PublicDiscriminant":
        """Return the model of a protected gallery, as :meth:`classify` uses it. Nothing private plays a part.

        Parameters
        ----------
        gallery : str, optional
            Its name; needed where there are several protected ones.

        Returns
        -------
        PublicDiscriminant
            It classifies any number of rows at once, and can be saved.
        """
        return self._driven(current_model(self._asker, gallery)).model

    def close(self) -> None:
        """Close connections, and what the client itself has opened."""
        self._transport.close()
        if self._ledger is not None:
            self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._shown!r})"

    def _driven(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    found = self._done(step)
                except BaseException as error:  # the steps decide what it means
                    step = steps.throw(error)
                else:
                    step = steps.send(found)
        except StopIteration as end:
            result: T = end.value
            return result

    def _done(self, step: Any) -> Any:
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        if isinstance(step, Now):
            return self._clock.now()
        if isinstance(step, Until):
            return self._clock.until(step.moment)
        return step.run() if isinstance(step, Work) else self._transport.send(step)


def _transport(options: Options) -> Transport:
    if not is_url(options.where):
        return here(options.where)
    where = address(options)
    from nearveil.service._http import LoopTransport

    return LoopTransport(where)


def shown(where: Where) -> str:
    """Return a place without its password."""
    from sqlalchemy.engine import make_url

    text = str(where)
    if not isinstance(where, str) or "://" not in text:
        return text
    try:
        return make_url(text).render_as_string(hide_password=True)
    except Exception:
        return "a URL that cannot be read"
