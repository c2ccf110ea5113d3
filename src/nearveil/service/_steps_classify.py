"""The class of an image, by the model of a protected gallery: fetched before the image is looked at, used at home."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from dp_accounting import NoOpDpEvent
from numpy.typing import NDArray

from nearveil.mechanisms import MessageError
from nearveil.privacy import Basis, Guarantee
from nearveil.service._client_errors import ReplyError
from nearveil.service._model import MOST_MODEL, GalleryInfo
from nearveil.service._private_image import Image, decoded
from nearveil.service._replies import Now, Steps, Tally, bytes_of, done, printed, replied
from nearveil.service._results import Classified
from nearveil.service._schedule import EXTRACTION_PERIOD
from nearveil.service._steps import Asker
from nearveil.service._transport import Request

if TYPE_CHECKING:
    from nearveil.votes import PublicDiscriminant

CHECK_AGAIN = 3600.0  # seconds that a model is used before the gallery is asked whether it has a newer one
CLASSIFYING_PERIOD = 0.1  # seconds: a matrix of at most 16 MiB and a row
_NOTHING_TOLD = Guarantee(
    epsilon=0.0,
    delta=0.0,
    protects="query",
    unit="record",
    relation="replace",
    basis=Basis("no request depends on the image", "docs/theory/service.md"),
    events=(NoOpDpEvent(),),
)


@dataclass(frozen=True)
class KeptModel:
    """A model, the gallery that it is of, and when that was last asked about it."""

    info: GalleryInfo
    model: "PublicDiscriminant"
    checked: float


def classify(asker: Asker, image: Image, gallery: str | None) -> Steps[Classified]:
    """Classify an image at home. All requests are sent before the image is looked at; most calls send none."""
    kept = yield from current_model(asker, gallery)
    since: float = yield Now()
    given = yield from done(lambda: decoded([image]))
    (row,) = yield from done(lambda: asker.features.extracted(given, kept.info))
    asker.features.check(given, [row], kept.info)
    chances = yield from done(lambda: _probabilities(kept.model, row))
    # Whatever the caller does next, such as hanging up, must not tell how long this took.
    yield from asker.end_slot(since, EXTRACTION_PERIOD if given[0].ndim > 1 else CLASSIFYING_PERIOD)
    found = dict(zip(kept.model.classes.tolist(), chances, strict=True))
    label = max(found, key=found.__getitem__)
    return Classified(label, found, _NOTHING_TOLD, kept.model.guarantee, _caution(kept.model))


def current_model(asker: Asker, gallery: str | None) -> Steps[KeptModel]:
    """Return the model of a gallery. It is asked for once, and whether there is a newer one at most once an hour."""
    now: float = yield Now()
    kept = asker.models.get(gallery)
    if kept is not None and 0 <= now - kept.checked < CHECK_AGAIN:
        return kept
    yield from asker.galleries()
    info = yield from asker.gallery(gallery, "protected")
    if kept is None or kept.info.version != info.version:
        model = yield from _fetched(asker, info)
    else:
        model = kept.model
    asker.models[gallery] = found = KeptModel(info, model, now)
    return found


def _caution(model: "PublicDiscriminant") -> str:
    """Return a warning of much noise, or nothing. It depends on the model alone."""
    noisy = len(model.noisy_classes)
    if not noisy:
        return ""
    return (
        f"The model has much noise: {noisy} of its {len(model.classes)} classes have fewer than five times as many "
        f"records as there is noise on their count (± {model.noise_per_class:.2g}). Expect wrong answers."
    )


def _probabilities(model: "PublicDiscriminant", row: NDArray[Any]) -> list[float]:
    with np.errstate(all="ignore"):  # a model of bad will may hold numbers of any size
        try:
            found = model.predict_proba(row[None])[0]
        except ValueError:
            found = np.array([np.nan])
    if not np.isfinite(found).all():
        raise ReplyError("the model gives no probabilities: its numbers are beyond all bounds")
    chances: list[float] = found.tolist()
    return chances


def _fetched(asker: Asker, info: GalleryInfo) -> Steps["PublicDiscriminant"]:
    request = Request("model", info.name, most=MOST_MODEL)
    body = bytes_of((yield from replied(request, asker.patience, Tally())))
    if hashlib.sha256(body).hexdigest() != info.version:
        raise ReplyError("the model is another than the gallery names: it may have published one just now; ask again")
    model = yield from done(lambda: _read(body))
    if model.n_features != info.dimension:
        raise ReplyError("the model is of other features than the gallery's")
    return model


def _read(body: bytes) -> "PublicDiscriminant":
    from nearveil.votes import PublicDiscriminant

    try:
        model = PublicDiscriminant.from_bytes(body)
    except MessageError as error:
        raise ReplyError(f"the model cannot be used: {printed(str(error))}") from None
    if model.classes.dtype.kind != "U":
        raise ReplyError("the model holds names that are no text")
    return model
