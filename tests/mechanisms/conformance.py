"""What every release must do. A mechanism's tests inherit `Contract` and say how to build it."""

import copy
import dataclasses
import pickle
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from numpy.typing import NDArray
from scipy.stats import beta
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from nearveil.mechanisms import Message, MessageError, Release
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import secure_source, unsafe_seeded

Floats = NDArray[np.float64]
_MISTAKE = 1e-6  # of a test that rejects a mechanism which keeps its promise


def shown_epsilon(first: Floats, second: Floats, delta: float, mistake: float = _MISTAKE) -> float:
    """Return an epsilon that two samples of one statistic disprove everything below of.

    The threshold is chosen on one half of each sample and measured on the other; both tails are tried.
    """
    best = 0.0
    for a, b in ((first, second), (second, first), (-first, -second), (-second, -first)):
        half = len(a) // 2
        grid = np.unique(np.quantile(np.concatenate([a[:half], b[:half]]), np.linspace(0, 1, 200)))
        hits, misses = ((x[:half, None] >= grid).mean(axis=0) for x in (a, b))
        floor = 40 / half
        threshold = grid[np.argmax(np.log(np.maximum(hits - delta, floor) / np.maximum(misses, floor)))]
        n = len(a) - half
        k, miss = int((a[half:] >= threshold).sum()), int((b[half:] >= threshold).sum())
        low = beta.ppf(mistake / 8, k, n - k + 1) if k else 0.0
        high = beta.ppf(1 - mistake / 8, miss + 1, n - miss) if miss < n else 1.0
        if low > delta:
            best = max(best, float(np.log((low - delta) / high)))
    return best


class _Unchecked(Message):
    """One of many thousand: its arrays are as they were drawn, neither checked nor copied nor frozen."""

    def __post_init__(self) -> None:
        pass


def sample_messages(release: Release, row: Any, count: int, seed: int) -> list[Message]:
    """Release one row many times. Most of the work would be what a message does with its fields: tested elsewhere."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nearveil.mechanisms.base.Message", _Unchecked)
        found: list[Message] = release.release(np.tile(row, (count, 1)), rng=unsafe_seeded(seed))
    return found


COPIES: list[Any] = [copy.copy, copy.deepcopy, lambda release: pickle.loads(pickle.dumps(release))]  # noqa: S301
REFUSAL = r"cannot change.* clone\(release\)\.set_params"


def attack_parameters(release: Release, row: Floats, labels: int | None = None) -> None:
    """Change each parameter of a fitted release in every way: nothing changes, and a clone must be fitted first."""
    options: dict[str, Any] = {} if labels is None else {"labels": labels}
    stated, public_id = release.guarantee, release.public_id
    message = release.release(row, rng=unsafe_seeded(7), **options)
    for name in release.get_params(deep=False):
        other: Any = 0.01 if name in ("epsilon", "nominal_epsilon") else object()
        for twin in (release, *(make_copy(release) for make_copy in COPIES)):
            with pytest.raises(AttributeError, match=f"{name} .*{REFUSAL}"):
                setattr(twin, name, other)
            with pytest.raises(AttributeError, match=f"{name} .*{REFUSAL}"):
                twin.set_params(**{name: other})
            assert (twin.guarantee, twin.public_id) == (stated, public_id)
            assert twin.release(row, rng=unsafe_seeded(7), **options) == message
        _refuses(clone(release).set_params(**{name: other}), message, row, options)
    for name in release.get_params(deep=True):
        with pytest.raises(AttributeError, match=f"{name} .*{REFUSAL}"):
            release.set_params(**{name: 0.01})


def _refuses(release: Release, message: Message, row: Floats, options: dict[str, Any]) -> None:
    for use in (
        lambda: release.guarantee,
        lambda: release.guarantee_of(message),
        lambda: release.public_id,
        lambda: release.release(row, **options),
        lambda: release.rank(message, row[None]),
        lambda: release.features(row[None]),
    ):
        with pytest.raises(NotFittedError, match="must be fitted"):
            use()


def attack_attributes(release: Release, row: Floats, labels: int | None = None) -> None:
    """Assign, delete and write to each attribute of a fitted release by hand: nothing of it may change."""
    options: dict[str, Any] = {} if labels is None else {"labels": labels}
    message = release.release(row, rng=unsafe_seeded(7), **options)
    attributes = dict(vars(release))
    assert {"mean_", "_guarantee", *release.get_params(deep=False)} <= set(attributes)
    # Itself first, before there is a copy: copies share arrays, and lock them.
    for make_copy in (lambda release: release, *COPIES):
        twin = make_copy(release)
        for name in (*attributes, "_release", "__dict__"):
            with pytest.raises(AttributeError, match=f"{name} .*{REFUSAL}"):
                setattr(twin, name, attributes.get(name, {}))
        for name in attributes:
            with pytest.raises(AttributeError, match=f"{name} .*{REFUSAL}"):
                delattr(twin, name)
            assert not [array for array in _arrays(getattr(twin, name)) if array.flags.writeable], name
        assert twin.release(row, rng=unsafe_seeded(7), **options) == message


def _arrays(value: Any) -> list[NDArray[Any]]:
    """Return the arrays that an attribute holds, also in tuples, dataclasses and sparse arrays."""
    if isinstance(value, np.ndarray):
        return [value]
    if scipy.sparse.issparse(value):
        return [value.data, value.indices, value.indptr]
    parts = value if isinstance(value, tuple) else vars(value).values() if dataclasses.is_dataclass(value) else ()
    return [array for part in parts for array in _arrays(part)]


class Contract(ABC):
    """Inherit as `class TestX(Contract)` and fill in what differs."""

    dimension = 3
    samples = 40_000
    power = 0.6  # the share of epsilon that the sampled attack must show, lest it tests nothing
    sound = True

    @abstractmethod
    def make(self, epsilon: float) -> Release:
        """Build the mechanism, unfitted."""

    @abstractmethod
    def statistic(self, release: Release, messages: list[Message], x: Floats, other: Floats) -> Floats:
        """Return a number for each message that is large where `x` is the likelier cause; the best attack known."""

    def public(self) -> tuple[Floats, NDArray[np.int64]]:
        generator = np.random.default_rng(5)
        return generator.standard_normal((60, self.dimension)), generator.integers(0, 4, 60)

    def gallery(self) -> Floats:
        return np.random.default_rng(6).standard_normal((40, self.dimension))

    def prepared(self, epsilon: float = 1.0) -> Release:
        """Fit; mechanisms with a map also index."""
        return self.make(epsilon).fit(*self.public())

    def pairs(self, release: Release) -> list[tuple[Floats, Floats]]:
        """Return worst-case pairs of private rows, in the space that `release` is given."""
        x = np.eye(self.dimension)[0]
        turned = np.roll(x, 1)
        return [(release.mean_ + x, release.mean_ - x), (release.mean_ + x, release.mean_ + turned)]

    @pytest.mark.parametrize("epsilon", [1.0, 2.0])
    def test_sampled_likelihood_ratios_keep_the_promise(self, epsilon: float) -> None:
        release = self.prepared(epsilon)
        promise = release.guarantee
        best = 0.0
        for number, (x, other) in enumerate(self.pairs(release)):
            drawn = [
                self.statistic(release, sample_messages(release, row, self.samples, seed), x, other)
                for seed, row in ((2 * number, x), (2 * number + 1, other))
            ]
            best = max(best, shown_epsilon(drawn[0], drawn[1], promise.delta))
        if self.sound:
            assert best <= promise.epsilon
        assert best >= self.power * epsilon

    def test_guarantee_is_that_of_a_query(self) -> None:
        promise = self.prepared(1.0).guarantee
        assert isinstance(promise, Guarantee)
        assert promise.protects == "query"
        assert promise.sound is self.sound
        assert promise.epsilon <= 1.0 + 1e-9 or not self.sound
        assert promise.events or not self.sound

    def test_messages_are_fresh_and_carry_nothing_else(self) -> None:
        release = self.prepared()
        x = self.pairs(release)[0][0]
        first, second = release.release(x), release.release(np.stack([x, x]))
        assert isinstance(first, Message)
        assert len(second) == 2
        assert not first.seeded
        assert first.mechanism == release.name
        assert first.public_id == release.public_id
        with pytest.raises((AttributeError, TypeError)):
            first.mechanism = "other"  # type: ignore[misc]
        with pytest.raises(ValueError, match="read-only"):
            next(iter(first.arrays.values()))[...] = 0

    def test_batch_agrees_with_single_rows(self) -> None:
        release = self.prepared()
        rows = np.stack([row for pair in self.pairs(release) for row in pair])
        batch = release.release(rows, rng=unsafe_seeded(3))
        assert len(batch) == len(rows)
        assert [message.nbytes for message in batch] == [
            release.release(row, rng=unsafe_seeded(3)).nbytes for row in rows
        ]

    def test_seeds_repeat_and_are_marked(self) -> None:
        release = self.prepared()
        x = self.pairs(release)[0][0]
        first, again = (release.release(x, rng=unsafe_seeded(9)) for _ in range(2))
        assert first == again
        assert first.seeded

    def test_global_random_state_plays_no_part(self) -> None:
        release = self.prepared()
        rows = np.tile(self.pairs(release)[0][0], (64, 1))
        first: list[Message] = []
        second: list[Message] = []
        for found in (first, second):
            np.random.seed(0)  # noqa: NPY002
            found.extend(release.release(rows))
            following = np.random.random()  # noqa: NPY002
            np.random.seed(0)  # noqa: NPY002
            assert following == np.random.random()  # noqa: NPY002
        assert first != second

    def test_serialisation(self) -> None:
        release = self.prepared()
        message = release.release(self.pairs(release)[0][0])
        data = message.to_bytes()
        read = Message.from_bytes(data)
        assert read == message
        assert pickle.loads(pickle.dumps(message)) == message  # noqa: S301
        assert copy.deepcopy(message) == message
        assert np.array_equal(release.rank(read, self.gallery()), release.rank(message, self.gallery()))
        for cut in {0, 3, 7, len(data) // 2, len(data) - 1}:
            with pytest.raises(MessageError):
                Message.from_bytes(data[:cut])
        with pytest.raises(MessageError):
            Message.from_bytes(data + b"\0")

    def test_rank_scores_every_item_and_agrees_with_the_message_alone(self) -> None:
        release = self.prepared()
        message = release.release(self.pairs(release)[0][0])
        scores = release.rank(message, self.gallery())
        assert scores.shape == (len(self.gallery()),)
        assert np.isfinite(scores).all()
        assert np.array_equal(scores, self.prepared().rank(message, self.gallery()))

    def test_strange_messages_are_refused(self) -> None:
        release = self.prepared()
        message = release.release(self.pairs(release)[0][0])
        for wrong in (
            Message("other", message.public_id, message.arrays),
            Message(message.mechanism, "0" * 32, message.arrays),
            Message(message.mechanism, message.public_id, {"unknown": np.zeros(2)}),
            *(
                Message(message.mechanism, message.public_id, {**message.arrays, name: np.zeros((5, 7, 2))})
                for name in message.arrays
            ),
            message.to_bytes(),
        ):
            with pytest.raises(MessageError):
                release.rank(wrong, self.gallery())

    @pytest.mark.parametrize(
        ("X", "words"),
        [
            ([[np.nan] * 3], "X must be finite"),
            ([[np.inf] * 3], "X must be finite"),
            (np.zeros((0, 3)), "X must have at least one row"),
            (np.ones((2, 9)), "X must have 3 columns"),
            (np.ones((2, 2, 3)), "X must have rows and columns"),
            ([["a", "b", "c"]], "X must be an array of real numbers"),
            (5.0, "X must have rows and columns"),
        ],
    )
    def test_bad_rows(self, X: Any, words: str) -> None:
        release = self.prepared()
        words = words.replace("3 columns", f"{self.dimension} columns")
        if isinstance(X, list) and self.dimension != 3:
            X = [(X[0] * self.dimension)[: self.dimension]]
        with pytest.raises(ValueError, match=words):
            release.release(X)

    def test_a_row_without_direction_is_refused(self) -> None:
        release = self.prepared()
        with pytest.raises(ValueError, match="equals the public mean"):
            release.release(release.mean_)

    def test_errors_hold_no_private_value(self) -> None:
        release = self.prepared()
        with pytest.raises(ValueError, match="X must") as caught:
            release.release(np.array([[123456.789] * (self.dimension + 1)]))
        assert "123456" not in str(caught.value)

    @pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf"), "1", None])
    def test_absurd_epsilon(self, epsilon: Any) -> None:
        with pytest.raises(ValueError, match="epsilon"):
            self.prepared(epsilon)

    def test_unfitted_is_an_error(self) -> None:
        release = self.make(1.0)
        with pytest.raises(NotFittedError):
            release.release(np.ones(self.dimension))
        with pytest.raises(NotFittedError):
            release.rank(Message("a", "b", {"c": np.zeros(1)}), self.gallery())

    def test_rng_must_be_a_source(self) -> None:
        release = self.prepared()
        with pytest.raises(ValueError, match="rng must be"):
            release.release(self.pairs(release)[0][0], rng=np.random.default_rng(0))  # type: ignore[arg-type]
        assert release.release(self.pairs(release)[0][0], rng=secure_source()).seeded is False

    def test_fitting_freezes_parameters_and_guarantee_together(self) -> None:
        release = self.prepared()
        attack_parameters(release, self.pairs(release)[0][0])

    def test_fitted_attributes_are_not_assigned_by_hand(self) -> None:
        release = self.prepared()
        attack_attributes(release, self.pairs(release)[0][0])

    def test_clones_as_scikit_learn_wants(self) -> None:
        release = self.make(1.5)
        twin = clone(release)
        assert twin.get_params() == release.get_params()
        assert not hasattr(twin, "mean_")

    def test_private_rows_leave_no_trace(self) -> None:
        release = self.prepared()
        before = pickle.dumps(release)
        release.release(self.pairs(release)[0][0])
        assert pickle.dumps(release) == before
