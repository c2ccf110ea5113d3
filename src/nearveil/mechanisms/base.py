"""The interface of all releases (fit public rows, release private rows, rank a gallery), and their messages."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Literal, Self

import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import NotFittedError

from nearveil.mechanisms.messages import Floats, Message, MessageError, fingerprint, make_guarantee, read_vector
from nearveil.metrics import scale_to_unit
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_numbers, check_rows
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, secure_source
from nearveil.privacy.parameters import Parameters

CODE_BYTES = 128  # size of a candidate in an answer with compact codes, including its id


class Release(Parameters, ABC):
    """A mechanism with messages that reveal no more about a private record than its guarantee says.

    Both sides fit the same public rows. The client calls :meth:`release` and sends the message; the server calls
    :meth:`rank`. Both first centre features by the public mean and scale them to norm one.

    `fit` returns a fitted copy, which is immutable so that it always matches its guarantee
    (``docs/theory/guarantee.md``). To change a parameter, use ``clone(release).set_params(...)`` and fit the clone.

    Subclasses implement the abstract methods and pass the suite of ``tests/mechanisms/conformance.py``.

    Examples
    --------
    >>> from nearveil.mechanisms import PrivUnit
    >>> rows = np.random.default_rng(0).standard_normal((50, 8))
    >>> mechanism = PrivUnit(4.0).fit(rows[:20])
    >>> mechanism.rank(mechanism.release(rows[20]), rows[21:]).shape
    (29,)
    """

    name: ClassVar[str]
    _public_names: ClassVar[tuple[str, ...]]  # parameters that both sides must share
    _guarantee: Guarantee

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "guarantee" in vars(cls):
            raise TypeError(f"{cls.__name__} must define _make_guarantee, not guarantee: fit stores its result")

    def fit(self, public_X: ArrayLike, public_y: ArrayLike | None = None) -> Self:
        """Return a copy that has learned the data that both sides share from public rows.

        Some mechanisms use integer labels. Never fit private rows: messages and maps reveal them.
        """
        rows = check_rows(public_X, "public_X")
        labels = None if public_y is None else check_labels(public_y, len(rows), "public_y")
        # A digest of the input, not of results: sums differ in their last bits between machines.
        return self._fit_public(rows, labels, fingerprint(rows, labels))

    def _fit_public(self, rows: Floats, labels: NDArray[np.int64] | None, public_digest: str) -> Self:
        """Return a fitted copy; it has deep copies of the parameters, so no caller can change them."""
        learner: Self = object.__new__(type(self))
        learner.__dict__.update(copy.deepcopy(self.get_params(deep=False)))
        learner.n_features_in_ = rows.shape[1]
        with np.errstate(over="ignore"):  # _unit_rows raises an error
            learner.mean_ = rows.mean(axis=0)
        learner._public_digest = public_digest
        learner._fit(learner._unit_rows(rows, "public_X", lenient=True), labels)
        return learner._with_attributes(_guarantee=learner._make_guarantee())

    def _with_attributes(self, **attributes: Any) -> Self:
        """Return a copy with more attributes, without cached properties, and with read-only arrays."""
        extended: Self = object.__new__(type(self))
        extended.__dict__.update(self.__getstate__(), **attributes)
        _make_read_only(tuple(extended.__dict__.values()))
        return extended

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise an error if the release is fitted: its guarantee would no longer match."""
        self._refuse_change(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Raise an error if the release is fitted, as for an assignment."""
        self._refuse_change(name)
        super().__delattr__(name)

    def set_params(self, **params: Any) -> Self:
        """Set parameters, also of nested estimators. Raises an error if the release is fitted."""
        for name in params:
            self._refuse_change(name)
        super().set_params(**params)
        return self

    def _refuse_change(self, name: str) -> None:
        if "_guarantee" in vars(self):
            raise AttributeError(
                f"{name} of a fitted {type(self).__name__} cannot change, because its guarantee would not match. "
                "Use clone(release).set_params(...) and fit the clone."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached properties: a release that was used is pickled as before."""
        state = super().__getstate__().items()
        return {
            name: value for name, value in state if not isinstance(getattr(type(self), name, None), cached_property)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make arrays read-only again: pickles and deep copies do not preserve the flag."""
        super().__setstate__(state)
        if "_guarantee" in vars(self):
            _make_read_only(tuple(vars(self).values()))

    def features(self, X: ArrayLike, name: str = "X", *, lenient: bool = False) -> Floats:
        """Centre rows by the public mean and scale them to norm one.

        Errors call them `name`. If `lenient`, for public rows only, a row that equals the mean becomes zeros.
        """
        self._check_fitted()
        return self._unit_rows(check_rows(X, name), name, lenient=lenient)

    def _unit_rows(self, finite: Floats, name: str, *, lenient: bool) -> Floats:
        if finite.shape[1] != self.n_features_in_:
            raise ValueError(f"{name} must have {self.n_features_in_} columns, as public_X had")
        with np.errstate(over="ignore"):
            rows: Floats = finite - self.mean_
        if not np.isfinite(rows).all():
            raise ValueError(f"{name} contains numbers so large that their differences overflow; scale them down")
        if not lenient and not rows.any(axis=1).all():
            raise ValueError(f"{name} must not contain a row that equals the public mean: it has no direction")
        return scale_to_unit(rows)

    def release(self, X: ArrayLike, *, rng: Source | None = None) -> Any:
        """Make a message from a private row, or one from each row of a batch. Each row uses the guarantee once.

        `rng` is the operating system's by default; :func:`nearveil.privacy.noise.unsafe_seeded` voids the guarantee.
        """
        self._check_fitted()
        source = choose_source(rng)
        rows = check_numbers(X, "X")
        single = rows.ndim == 1
        features = self._unit_rows(check_rows(rows[None] if single else rows, "X"), "X", lenient=False)
        messages = self._release(features, source)
        return messages[0] if single else messages

    def rank(self, message: Message, gallery: ArrayLike) -> Floats:
        """Score the server's items by a message, shape (n,); a higher score means nearer.

        Both sides fit the same public rows.
        """
        self._check_messages([message])
        return self._rank(message, self._prepare(self.gallery_features(gallery)))

    def gallery_features(self, gallery: ArrayLike) -> NDArray[Any]:
        """Return the features of public rows, by which the server ranks; those without a direction are zero."""
        return self.features(gallery, "gallery", lenient=True)

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee of one message with randomness from the operating system, as computed by :meth:`fit`."""
        self._check_fitted()
        return self._guarantee

    def guarantee_of(self, message: Message) -> Guarantee:
        """Return the guarantee of a message of this mechanism; a message from a seed has none."""
        self._check_messages([message])
        return self.guarantee.as_seeded() if message.seeded else self.guarantee

    @property
    def gallery_guarantee(self) -> Guarantee:
        """Guarantee for the server's items: none, because answers and the public map reveal them."""
        protected = {"protects": "database", "unit": "item"}
        return make_guarantee(math.inf, 0.0, "an open gallery", "docs/theory/covers.md", **protected)

    @cached_property
    def public_id(self) -> str:
        """Fingerprint of the data that both sides share; a field of every message."""
        self._check_fitted()
        return fingerprint(self.name, self._public_digest, *self._public_parts())

    @abstractmethod
    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        """Learn from public features of norm one (or zero); may set attributes."""

    @abstractmethod
    def _make_guarantee(self) -> Guarantee:
        """Return the guarantee of one message; called once, after :meth:`_fit`."""

    @abstractmethod
    def _release(self, features: Floats, source: Source) -> list[Message]:
        """Make a message from each row; rows have norm one."""

    def _prepare(self, features: NDArray[Any]) -> Any:
        """Precompute the input of :meth:`_rank` from a gallery's features of norm one (or zero)."""
        return features

    @abstractmethod
    def _rank(self, message: Message, prepared: Any) -> Floats:
        """Score the items of a prepared gallery."""

    def _public_parts(self) -> tuple[object, ...]:
        """Return what the server needs to read a message besides the fitted rows: by default, `_public_names`."""
        return self._list_parameters(*self._public_names)

    def _list_parameters(self, *names: str) -> tuple[object, ...]:
        """Return constrained parameters as plain numbers, for the fingerprint."""
        rules = self._parameter_constraints
        kinds = [int if rules[name][0].type is Integral else float for name in names]
        values = [getattr(self, name) for name in names]
        return tuple(None if value is None else kind(value) for kind, value in zip(kinds, values, strict=True))

    def _messages(self, source: Source, /, **batches: NDArray[Any]) -> list[Message]:
        """Make one message from the first entries of all batches, one from the second, and so on."""
        public_id = self.public_id
        rows = zip(*batches.values(), strict=True)
        return [
            Message(self.name, public_id, dict(zip(batches, row, strict=True)), seeded=not source.sound) for row in rows
        ]

    def _check_messages(self, messages: Sequence[Message]) -> None:
        public_id = self.public_id
        for message in messages:
            if not isinstance(message, Message):
                raise MessageError("message must be a Message; parse bytes with Message.from_bytes")
            if message.mechanism != self.name:
                raise MessageError(f"message must come from {self.name!r}; it comes from {message.mechanism!r}")
            if message.public_id != public_id:
                raise MessageError(
                    "message was made with other public rows, parameters or map: fetch the map and query again"
                )

    def _check_fitted(self) -> None:
        if "_guarantee" not in vars(self):
            raise NotFittedError(f"{type(self).__name__} must be fitted: fit(public_X) returns the fitted object")


class TractableRelease(Release):
    """A release with a density of messages that can be computed."""

    def log_density(self, messages: Message | Sequence[Message], X: ArrayLike) -> Floats:
        """Return the log-density of messages given each possible row, shape (n_messages, n_rows).

        Up to a constant: the difference between two rows is a message's evidence for one against the other.
        """
        checked = [messages] if isinstance(messages, Message) else list(messages)
        features = self.features(X)
        self._check_messages(checked)
        return self._log_density(checked, features)

    @abstractmethod
    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        """Return the log-density of checked messages given features of norm one."""


class VectorRelease(Release):
    """A release with messages that are one vector; the server ranks by inner products with it."""

    _kind: ClassVar[Literal["int8", "float32"]] = "float32"
    _unit: ClassVar[float] = 1.0

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        return np.asarray(prepared @ self._read_vectors([message], prepared.shape[1])[0], dtype=np.float64)

    def _read_vectors(self, messages: Sequence[Message], size: int) -> Floats:
        """Return the vectors of messages, one row for each."""
        vectors = [read_vector(message, "vector", self._kind, size) for message in messages]
        return self._unit * np.array(vectors).reshape(-1, size)


def make_noise_guarantee(
    epsilon: float, delta: float, noises: Sequence[GaussianNoise | LaplaceNoise], theorem: str, link: str
) -> Guarantee:
    """Return the guarantee of a message with noises that compose; what samplers add to delta is included."""
    events, extra_delta = tuple(noise.event for noise in noises), sum(noise.extra_delta for noise in noises)
    costs = {"events": events, "extra_delta": extra_delta}
    return make_guarantee(float(epsilon), max(float(delta), extra_delta), theorem, link, **costs)


def _make_read_only(value: Any) -> None:
    """Make arrays read-only, also inside dataclasses, tuples and sparse arrays."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif isinstance(value, scipy.sparse.csr_array):
        _make_read_only((value.data, value.indices, value.indptr))
    elif isinstance(value, tuple):
        for part in value:
            _make_read_only(part)
    elif is_dataclass(value):
        _make_read_only(tuple(vars(value).values()))


def check_labels(y: ArrayLike, n_rows: int, name: str) -> NDArray[np.int64]:
    """Check integer labels, one for each row."""
    labels = np.asarray(y)
    if labels.shape != (n_rows,):
        raise ValueError(f"{name} must hold one label for each of the {n_rows} rows")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers; encode names with numpy.unique(..., return_inverse=True)")
    return labels.astype(np.int64)


def choose_source(rng: Source | None) -> Source:
    """Return `rng` after a check, or the operating system's source."""
    if rng is None:
        return secure_source()
    if not (hasattr(rng, "words") and hasattr(rng, "sound")):
        raise ValueError("rng must be secure_source(), or unsafe_seeded(seed) in tests")
    return rng
