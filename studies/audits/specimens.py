"""Mechanisms that are broken on purpose by misuse of public interfaces. An audit must catch each of them."""

from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any, Self

import faiss
import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr
from scipy.stats import binom

from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.audit._releases import make_release_experiment
from nearveil.mechanisms import OME, Message, PrivUnit, PublicMap
from nearveil.mechanisms.covers.maps import DECAY, NEIGHBORS
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import NoisyScreening, VoteHistogram
from nearveil.privacy.noise import GaussianNoise, Source, choose_gaussian_grid, compute_classical_scale
from nearveil.private_knn import Answers, PrivateDiscriminant, PrivateKNeighborsClassifier
from nearveil.private_knn.plan import Part, VotePlan
from nearveil.private_knn.spending import MemorySpending, Spending
from nearveil.privatemail import PrivateMail
from nearveil.progress import Tick
from nearveil.wire.messages import PublicPart
from studies.audits.clock import (
    DIMENSION,
    ETAG,
    QuestionTimer,
    TimedQuestion,
    ask_through_client,
    make_clock_experiment,
    make_hostile_parts,
    time_choice,
)
from studies.audits.conduct import compute_epsilon
from studies.audits.wire import Send, ask_question
from studies.baselines import Cells

DELTA = 1e-5
_ONE_IN = np.uint64(2000)
_UNCAPPED = 1_000_000  # prototypes that a server may send without a limit
_SCALE = (1.0, 2.0**-8, 2.0**-16)  # of the digits of a prototype number


def make_claim(epsilon: float, delta: float, why_not: str, events: tuple[DpEvent, ...] = ()) -> Guarantee:
    """Return a false claim; `events` are the charged events."""
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        protects="database" if events else "query",
        unit="record",
        relation="add-remove" if events else "replace",
        basis=Basis("a claim", "docs/theory/audit.md"),
        sound=False,
        reason=why_not,
        events=events,
    )


_PROGRAM: dict[str, Any] = {"as_published": "2022-code", "allow_unsound": True, "n_anchors": 60}  # of the authors


def make_label_after_noise() -> PrivateMail:
    """Return PrivateMail like the authors' program, which uses the target's label after the noise."""
    return PrivateMail(1.0, **_PROGRAM, n_public_steps=5, start_scale=1e-8)


def make_variance_as_deviation() -> Experiment:
    """Return the noise of the authors' program, which uses a variance as a deviation, with a fixed label."""
    experiment = make_release_experiment(PrivateMail(1.0, **_PROGRAM, n_public_steps=0, start_scale=1e-12))
    return replace(experiment, pairs=tuple(pair for pair in experiment.pairs if "one label" in pair.name))


def make_ome_claim() -> tuple[OME, Guarantee]:
    """Return OME at alpha 7, and the claim of its paper."""
    release = OME(nominal_epsilon=1.0, alpha=7.0)
    return release, make_claim(1.0, 0.0, "the claim lets the losses of even and odd bits cancel")


def make_quiet_privunit() -> tuple[PrivUnit, Guarantee]:
    """Return PrivUnit at twice the epsilon that it claims."""
    return PrivUnit(8.0), make_claim(4.0, 0.0, "half of the noise is missing")


def make_classical_gaussian() -> tuple[GaussianNoise, Guarantee]:
    """Return the classical calibration at epsilon 12, where it is not valid: 11% too little noise."""
    delta = 1e-3
    scale = compute_classical_scale(1.0, 12.0, delta)
    noise = GaussianNoise(sensitivity=1.0, scale=scale, size=1, grid=choose_gaussian_grid(1.0, 1))
    return noise, make_claim(12.0, delta, "the classical calibration is only valid for epsilon below 1")


def make_fixed_size_sample() -> Experiment:
    """Return votes of a sample of fixed size, drawn with replacement, charged as Poisson sampling."""
    n_records, size, noise = 20, 4, 1.0
    times = np.arange(size + 1)
    weights = binom.logpmf(times, size, 1 / n_records)

    def run(present: bool, runs: int, source: Source) -> Floats:
        generator = _make_generator(source)
        drawn = generator.binomial(size, 1 / n_records, runs) if present else np.zeros(runs, dtype=np.int64)
        return np.column_stack([drawn, size - drawn]) + generator.normal(0, noise, (runs, 2))

    def log_ratio(outcomes: Floats, pair: Pair) -> Floats:
        del pair
        off = ((outcomes[:, None] - np.column_stack([times, size - times])) ** 2).sum(axis=2) / (2 * noise**2)
        return np.asarray(np.logaddexp.reduce(weights - off, axis=1) + off[:, 0])

    event = PoissonSampledDpEvent(size / n_records, VoteHistogram(noise))
    claim = _claim_price(DELTA, "a record may be drawn more than once", event)
    return _make_membership_experiment(claim, run=run, log_ratio=log_ratio)


def make_shared_sample() -> Experiment:
    """Return a screening and a vote on the same sample, charged as independent samples."""
    rate, threshold, screening_noise, noise, delta = 0.03, 1.0, 0.4, 0.6, 1e-3

    def run(present: bool, runs: int, source: Source) -> Floats:
        generator = _make_generator(source)
        inside = (generator.random(runs) < rate) & present
        passed = inside + generator.normal(0, screening_noise, runs) >= threshold
        votes = np.column_stack([inside, np.zeros(runs)]) + generator.normal(0, noise, (runs, 2))
        return np.column_stack([passed, np.where(passed[:, None], votes, 0.0)])

    def log_ratio(outcomes: Floats, pair: Pair) -> Floats:
        del pair
        passed, vote = outcomes[:, 0] > 0, outcomes[:, 1]
        sign = np.where(passed, 1.0, -1.0)
        screened = [log_ndtr(sign * (most - threshold) / screening_noise) for most in (1.0, 0.0)]
        voted = np.where(passed, (vote**2 - (vote - 1) ** 2) / (2 * noise**2), 0.0)
        return np.asarray(np.logaddexp(np.log1p(-rate), np.log(rate) + screened[0] - screened[1] + voted))

    parts = NoisyScreening(screening_noise, threshold, 1), VoteHistogram(noise)
    events = (PoissonSampledDpEvent(rate, part) for part in parts)
    claim = _claim_price(delta, "screening and vote share a sample", *events)
    return _make_membership_experiment(claim, run=run, log_ratio=log_ratio)


_make_membership_experiment = partial(
    Experiment, "one record more", pairs=(Pair("a set with one record more", True, False),), exact=True, trials=400_000
)


def _claim_price(delta: float, why_not: str, *events: DpEvent) -> Guarantee:
    """Return the false claim that a mechanism costs no more than these events."""
    return make_claim(compute_epsilon([(event, 1) for event in events], delta), delta, why_not, events)


def make_float_laplace() -> Experiment:
    """Return the textbook mechanism: a value plus NumPy's Laplace noise, in doubles."""

    def run(value: float, runs: int, source: Source) -> Floats:
        return value + _make_generator(source).laplace(size=(runs, 1))

    return Experiment(
        name="numpy's Laplace noise",
        guarantee=make_claim(1.0, 0.0, "doubles have gaps that depend on the value"),
        pairs=(Pair("zero and one", 0.0, 1.0),),
        run=run,
        log_ratio=lambda outcomes, pair: np.abs(outcomes[:, 0] - pair.second) - np.abs(outcomes[:, 0] - pair.first),
        trials=100_000,
    )


def fetch_chosen(public: PublicPart, feature: Floats, send: Send, source: Source) -> None:
    """Ask, choose, and then request the chosen items: the request reveals the hidden choice."""
    ids = ask_question(public, feature, send, source)
    send(b"images of " + ids.tobytes())


class BusyCells(Cells):
    """Cells that search the sets one by one and stop at the good one: honest messages, revealing work."""

    name = "busy-cells"

    def release(self, X: Any, *, rng: Source | None = None) -> Any:
        """Make messages, slowly."""
        for row in np.atleast_2d(np.asarray(X, dtype=np.float64)):
            good = self.map_.choose(self.features(row[None]))[0]
            for number in range(self.map_.n_sets):
                if number == good:
                    break
        messages: Message | list[Message] = super().release(X, rng=rng)
        return messages


def _make_generator(source: Source) -> np.random.Generator:
    """Return NumPy's generator; these mechanisms have other faults than their randomness."""
    return np.random.default_rng(source.words(4).tolist())


class QuietVotes(PrivateKNeighborsClassifier):
    """Votes with four fifths of the charged noise."""

    def _release(self, sums: NDArray[np.int64]) -> Floats:
        return sums + 0.8 * (super()._release(sums) - sums)


class OnceExactVotes(PrivateKNeighborsClassifier):
    """Exact votes in one of 2,000 answers."""

    def _release(self, sums: NDArray[np.int64]) -> Floats:
        slips = self._source.words(len(sums)) % _ONE_IN == 0
        return np.where(slips[:, None], sums, super()._release(sums))


class NoiselessLabels(PrivateKNeighborsClassifier):
    """Honest votes, with labels computed before the noise."""

    def answer(self, X: ArrayLike, *, progress: Tick | None = None) -> Answers:
        """Answer with the labels of the exact votes."""
        answers = super().answer(X, progress=progress)
        exact = np.concatenate([sums for sums, _ in self._poll._count_votes(self._poll._check_queries(X))])
        return replace(answers, labels=self._poll._choose_labels(exact, answers.answered))


class EndlessVotes(PrivateKNeighborsClassifier):
    """Refits itself before every call, so that no cap is reached."""

    def fit(self, X: ArrayLike, y: ArrayLike, **options: Any) -> Self:
        """Fit, and keep the private records."""
        super().fit(X, y, **options)
        self._records = X, y
        return self

    def answer(self, X: ArrayLike, *, progress: Tick | None = None) -> Answers:
        """Answer as if it were the first time."""
        return super(EndlessVotes, self.fit(*self._records)).answer(X, progress=progress)


class _FreeScreenings(MemorySpending):
    """Caps in memory, and an account that pays for votes alone."""

    def __init__(self, caps: dict[Part, int], payer: Spending) -> None:
        super().__init__(caps)
        self._payer = payer

    def take(self, part: Part, count: int) -> int:
        granted = super().take(part, count)
        return granted if part == "screened" else self._payer.take(part, granted)


class FreeScreening(PrivateKNeighborsClassifier):
    """Pays for votes but not for screenings."""

    def fit(self, X: ArrayLike, y: ArrayLike, **options: Any) -> Self:
        """Fit, with screenings that are only counted."""
        super().fit(X, y, **options)
        self._poll._spending = _FreeScreenings(self.plan_.caps, self._poll._spending)
        return self


class QuietDiscriminant(PrivateDiscriminant):
    """Publishes with about half of the charged noise."""

    def fit(self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None = None, **options: Any) -> Self:
        """Fit, and replace the model by one of three times the epsilon."""
        super().fit(X, y, public=public, **options)
        parameters = {**self.get_params(deep=False), "epsilon": 3 * self.guarantee.epsilon}
        loud = PrivateDiscriminant(**{**parameters, "ledger": None, "account": None}).fit(X, y, public=public)
        self.statistics_, self._model = loud.statistics_, replace(loud.export(), guarantee=self.guarantee)
        return self


class FreeDiscriminant(PrivateDiscriminant):
    """Publishes and does not pay."""

    def _charge_account(self, plan: VotePlan, guarantee: Guarantee) -> None:
        """Charge nothing."""


class ReachingDiscriminant(PrivateDiscriminant):
    """Publishes the largest private value, as the bound on the values that a projection accepts."""

    def fit(self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None = None, **options: Any) -> Self:
        """Fit, and replace the bound."""
        super().fit(X, y, public=public, **options)
        projection = replace(self._model.projection, reach=float(np.abs(np.asarray(X)).max()))
        self._model = replace(self._model, projection=projection)
        return self


class QuietCounts(PrivateDiscriminant):
    """Publishes counts with four fifths of the charged noise."""

    def fit(self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None = None, **options: Any) -> Self:
        """Fit, and replace the counts."""
        super().fit(X, y, public=public, **options)
        exact = (np.asarray(y) == self.classes_[:, None]).sum(axis=1)
        counts = exact + 0.8 * (self.statistics_.counts - exact)
        self.statistics_, self._model = replace(self.statistics_, counts=counts), replace(self._model, counts=counts)
        return self


class HeapMap(PublicMap):
    """A map of any size, searched with a heap: fast if the first prototypes are the nearest."""

    def __post_init__(self) -> None:
        """Accept every size."""

    def choose(self, features: Floats) -> NDArray[np.int64]:
        """Return the good set of each row."""
        near = self._index.search((features @ self.components).astype(np.float32), NEIGHBORS)[1]
        weights = np.exp(-np.arange(NEIGHBORS) / DECAY)
        return np.asarray((weights @ self.coverage[near]).argmax(axis=1))

    @cached_property
    def _index(self) -> faiss.IndexFlatIP:
        rows = self.prototypes.astype(np.float32)
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows)
        return index


def use_heap(public: PublicPart) -> PublicPart:
    """Return a public part with a map that is searched with a heap."""
    return replace(public, map=HeapMap(**{item.name: getattr(public.map, item.name) for item in fields(PublicMap)}))


def make_heap_search() -> Experiment:
    """Return the time of a choice with a heap, on maps within the limits."""
    return make_clock_experiment(lambda public: time_choice(use_heap(public)), name="a search with a heap", at_once=1)


def make_hasty_question() -> Experiment:
    """Return the time of a client that sends its question at once, and reads maps of any size."""
    large = _remove_cap(next(iter(make_hostile_parts().values())))
    scale = np.zeros(DIMENSION)
    scale[: len(_SCALE)] = _SCALE
    pair = Pair(
        "a million prototypes in order", TimedQuestion(large, scale, scale), TimedQuestion(large, -scale, scale)
    )
    experiment = make_clock_experiment(
        open_hasty_client, name="a question sent as soon as it is made", at_once=1, trials=400
    )
    return replace(experiment, pairs=(pair,))


def open_hasty_client(public: PublicPart) -> AbstractContextManager[QuestionTimer]:
    """Open a client that never waits and has cached the map of a hostile server."""

    def prepare(client: Any) -> None:
        client._client._session.pad_timing = False
        client._client._session._maps[public.gallery, None] = (ETAG, public)

    return ask_through_client(public, prepare)


def _remove_cap(public: PublicPart) -> PublicPart:
    """Return a public part with a million prototypes in order: each holds the digits of its number."""
    numbers = np.arange(_UNCAPPED)
    digits = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=1) - 128
    large = replace(
        use_heap(public).map,
        components=public.map.components[:, : len(_SCALE)],
        prototypes=digits.astype(np.int8),
        coverage=np.stack([numbers % 2, 1 - numbers % 2], axis=1).astype(np.uint8),
    )
    return replace(public, map=large)
