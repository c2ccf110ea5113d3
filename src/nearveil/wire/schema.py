"""The JSON models of the service, shared by both sides. Nothing in them is private."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from nearveil.metrics import CENTRED, Metric
from nearveil.wire.frames import LONGEST_KEY, MOST_FEATURES, MOST_KEYS

GalleryKind = Literal["open", "protected"]
Offer = Literal["names", "thumbnails", "originals", "codes", "metadata", "sealed"]
GALLERY_NAME = r"^[a-z0-9](?:[a-z0-9_.-]{0,62}[a-z0-9])?$"
KEY = r"^[A-Za-z0-9_.:-]{8,128}$"
KEY_HEADER = "Nearveil-Key"
BLOCKS = r"^(?:none|[0-9]{1,2}(?:,[0-9]{1,2}){0,63})$"  # of a group of codes
FRAME = "application/vnd.nearveil.frame"
MOST_GALLERIES = 1000  # of a server
MOST_MAPS = 100  # of a gallery
MOST_MODEL = 16 << 20  # bytes of a model
Fraction = Annotated[float, Field(gt=0, le=1)]
MetadataKey = Annotated[str, Field(max_length=LONGEST_KEY)]


class Model(BaseModel):
    """A frozen model that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GuaranteeInfo(Model):
    """A guarantee in JSON."""

    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(ge=0, le=1)]
    protects: Literal["query", "database"]
    unit: Annotated[str, Field(max_length=200)]
    sound: bool
    words: Annotated[str, Field(max_length=1000)]


class GalleryInfo(Model):
    """A gallery in the list of a server."""

    name: Annotated[str, Field(pattern=GALLERY_NAME)]
    kind: GalleryKind
    #: The fractions of its maps, the newest first.
    candidates: Annotated[tuple[Fraction, ...], Field(max_length=MOST_MAPS)]
    #: The extras of an open gallery for all candidates; whether it offers a copy of its codes, and sealed questions.
    offers: Annotated[tuple[Offer, ...], Field(max_length=8)]
    extractor: Annotated[str, Field(max_length=1000)]  #: of the features, as `fingerprint`
    fingerprint: Annotated[str, Field(max_length=1000)]
    dimension: Annotated[int, Field(ge=1, le=MOST_FEATURES)]
    #: Of the newest map; of a protected gallery the number of its published models.
    revision: Annotated[int, Field(ge=0, lt=1 << 64)]
    #: The SHA-256 of the published model of a protected gallery; empty without one.
    version: Annotated[str, Field(pattern=r"^(?:[0-9a-f]{64})?$")] = ""
    promise: GuaranteeInfo | None = None  #: the guarantee of a protected gallery to its records
    #: By which items of an open gallery are compared; servers of 0.2 do not send it.
    metric: Metric = CENTRED
    #: The keys of all metadata of an open gallery, if it offers metadata and they are few.
    metadata_keys: Annotated[tuple[MetadataKey, ...], Field(max_length=MOST_KEYS)] | None = None

    @property
    def is_published(self) -> bool:
        """Whether a map, or the model of a protected gallery, is published."""
        return bool(self.version if self.kind == "protected" else self.candidates)


class Galleries(Model):
    """All galleries that a token may use."""

    galleries: Annotated[tuple[GalleryInfo, ...], Field(max_length=MOST_GALLERIES)]


class Problem(Model):
    """The error of a request."""

    code: Annotated[str, Field(max_length=60)]
    message: Annotated[str, Field(max_length=1000)]


class Health(Model):
    """The liveness or readiness of a server."""

    status: Literal["ok", "unavailable"]
