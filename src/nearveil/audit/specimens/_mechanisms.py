"""Mechanisms that are known to break their promise. An audit that does not catch them is blind."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import binom

from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.audit._releases import release_experiment
from nearveil.audit.attacks._wire import Send, question, wire_experiment
from nearveil.mechanisms import OME, Cells, Message, PrivateMail
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.accounting import PldAccountant
from nearveil.privacy.events import NoisyScreening, PureDp, VoteHistogram
from nearveil.privacy.noise import (
    GaussianNoise,
    Source,
    analytic_gaussian_scale,
    gaussian_grid,
)
from nearveil.privacy.noise.calibration import classical_gaussian_scale
from nearveil.protocol import PublicPart

DELTA = 1e-5
_LINK = "docs/theory/audit.md"


def claimed(epsilon: float, delta: float, why_not: str, events: tuple[DpEvent, ...] = ()) -> Guarantee:
    """Return a claim that does not hold.

    `events`: What was charged.
    """
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        protects="database" if events else "query",
        unit="record",
        relation="add-remove" if events else "replace",
        basis=Basis("a claim", _LINK),
        sound=False,
        reason=why_not,
        events=events,
    )


def label_after_noise() -> PrivateMail:
    """Return PrivateMail as the authors' program has it: the target's own label is used after the noise."""
    return PrivateMail(
        1.0, as_published="2022-code", allow_unsound=True, n_public_steps=5, start_scale=1e-8, n_anchors=60
    )


def variance_as_deviation() -> Experiment:
    """Return the program's noise at an initial scale of 1e-12: a variance for a deviation, and the label held fixed."""
    mail = PrivateMail(
        1.0, as_published="2022-code", allow_unsound=True, n_public_steps=0, start_scale=1e-12, n_anchors=60
    )
    told = release_experiment(mail)
    return replace(told, pairs=tuple(pair for pair in told.pairs if "one label" in pair.name))


def ome_claim() -> tuple[OME, Guarantee]:
    """Return OME at alpha 7, and what its paper claims of it."""
    release = OME(nominal_epsilon=1.0, alpha=7.0)
    return release, claimed(1.0, 0.0, "the claim lets what even and odd bits lose cancel")


def classical_gaussian() -> tuple[GaussianNoise, Guarantee]:
    """Return the classical calibration at epsilon 12, which is no theorem there: 11% too little noise."""
    delta = 1e-3
    scale = classical_gaussian_scale(1.0, 12.0, delta)
    noise = GaussianNoise(sensitivity=1.0, scale=scale, size=1, grid=gaussian_grid(1.0, 1))
    return noise, claimed(12.0, delta, "the classical calibration is a theorem for epsilon below 1")


def fixed_size_sample(n_records: int = 20, size: int = 4, noise: float = 1.0) -> Experiment:
    """Return votes of a sample of fixed size, drawn with replacement, charged as Poisson sampling.

    A record may be drawn twice, and then it has two votes.

    `n_records, size`: The sample's share of the records is what is charged.
    """
    event = PoissonSampledDpEvent(size / n_records, VoteHistogram(noise))
    times = np.arange(size + 1)
    weights = binom.logpmf(times, size, 1 / n_records)

    def run(present: bool, runs: int, source: Source) -> Floats:
        generator = _generator(source)
        drawn = generator.binomial(size, 1 / n_records, runs) if present else np.zeros(runs, dtype=np.int64)
        return np.column_stack([drawn, size - drawn]) + generator.normal(0, noise, (runs, 2))

    def log_ratio(seen: Floats, pair: Pair) -> Floats:
        del pair
        off = ((seen[:, None] - np.column_stack([times, size - times])) ** 2).sum(axis=2) / (2 * noise**2)
        return np.asarray(np.logaddexp.reduce(weights - off, axis=1) + off[:, 0])

    return Experiment(
        name="fixed-size sample charged as Poisson",
        promise=claimed(_charge((event,), DELTA), DELTA, "a record may be drawn more than once", (event,)),
        pairs=(Pair("a set with one record more", True, False),),
        run=run,
        log_ratio=log_ratio,
        exact=True,
        trials=400_000,
    )


def shared_sample(
    rate: float = 0.03, threshold: float = 1.0, screening_noise: float = 0.4, noise: float = 0.6, delta: float = 1e-3
) -> Experiment:
    """Return a screening and a vote on one and the same sample, charged as if each had a sample of its own.

    The database holds one record or none. Where the screening passed, the record most likely is in the sample, and the
    sampling hides it no more.
    """
    events = (
        PoissonSampledDpEvent(rate, NoisyScreening(screening_noise, threshold, 1)),
        PoissonSampledDpEvent(rate, VoteHistogram(noise)),
    )

    def run(present: bool, runs: int, source: Source) -> Floats:
        generator = _generator(source)
        inside = (generator.random(runs) < rate) & present
        passed = inside + generator.normal(0, screening_noise, runs) >= threshold
        votes = np.column_stack([inside, np.zeros(runs)]) + generator.normal(0, noise, (runs, 2))
        return np.column_stack([passed, np.where(passed[:, None], votes, 0.0)])

    def log_ratio(seen: Floats, pair: Pair) -> Floats:
        del pair
        passed, vote = seen[:, 0] > 0, seen[:, 1]
        sign = np.where(passed, 1.0, -1.0)
        screened = [log_ndtr(sign * (most - threshold) / screening_noise) for most in (1.0, 0.0)]
        voted = np.where(passed, (vote**2 - (vote - 1) ** 2) / (2 * noise**2), 0.0)
        return np.asarray(np.logaddexp(np.log1p(-rate), np.log(rate) + screened[0] - screened[1] + voted))

    return Experiment(
        name="one sample charged as two",
        promise=claimed(_charge(events, delta), delta, "screening and vote share a sample", events),
        pairs=(Pair("a set with one record more", True, False),),
        run=run,
        log_ratio=log_ratio,
        exact=True,
        trials=400_000,
    )


def float_laplace(epsilon: float = 1.0) -> Experiment:
    """Return a value plus NumPy's Laplace noise, in doubles: the textbook mechanism, as textbooks program it."""

    def run(value: float, runs: int, source: Source) -> Floats:
        return value + _generator(source).laplace(scale=1 / epsilon, size=(runs, 1))

    return Experiment(
        name="numpy's Laplace noise",
        promise=claimed(epsilon, 0.0, "doubles have gaps that depend on the value"),
        pairs=(Pair("zero and one", 0.0, 1.0),),
        run=run,
        log_ratio=lambda seen, pair: (np.abs(seen[:, 0] - pair.second) - np.abs(seen[:, 0] - pair.first)) * epsilon,
        trials=100_000,
    )


def chosen_are_fetched(public: PublicPart, feature: Floats, send: Send, source: Source) -> None:
    """Ask, choose, and then request what was chosen: the request hands over what the release hid."""
    found = question(public, feature, send, source)
    send(b"images of " + found.ids.tobytes())


def request_after_answer() -> Experiment:
    """Return the conversation of a client that fetches the images of the candidates that it chose."""
    return wire_experiment(chosen_are_fetched, name="a request after the answer")


class BusyCells(Cells):
    """Cells whose client looks through the sets one by one and stops at the good one: honest messages, telling work."""

    name = "busy-cells"

    def release(self, X: Any, *, rng: Source | None = None) -> Any:
        """Make messages, slowly."""
        for row in np.atleast_2d(np.asarray(X, dtype=np.float64)):
            good = self.map_.choose(self.features(row[None]))[0]
            for one in range(self.map_.n_sets):
                if one == good:
                    break
        found: Message | list[Message] = super().release(X, rng=rng)
        return found


def half_noise(epsilon: float, delta: float) -> float:
    """Return the epsilon at which Gaussian noise is half of what it is at `epsilon`.

    Examples
    --------
    >>> more = half_noise(1.0, 1e-5)
    >>> f"{analytic_gaussian_scale(1.0, 1.0, 1e-5) / analytic_gaussian_scale(1.0, more, 1e-5):.3f}"
    '2.000'
    """
    target = analytic_gaussian_scale(1.0, epsilon, delta) / 2
    return float(
        brentq(lambda more: analytic_gaussian_scale(1.0, more, delta) / target - 1, epsilon, 3 * epsilon + 1, xtol=1e-9)
    )


def pure(epsilon: float) -> Guarantee:
    """Return a claim of pure epsilon, for mechanisms whose noise was tampered with."""
    return Guarantee(
        epsilon=epsilon,
        delta=0.0,
        protects="query",
        unit="record",
        relation="replace",
        basis=Basis("a claim", _LINK),
        sound=False,
        reason="half of the noise is missing",
        events=(PureDp(epsilon),),
    )


@lru_cache(maxsize=8)
def _charge(events: tuple[DpEvent, ...], delta: float) -> float:
    """Return what an accountant charges for events that happen one after the other."""
    accountant = PldAccountant()
    for event in events:
        accountant.compose(event)
    return float(accountant.epsilon(delta))


def _generator(source: Source) -> np.random.Generator:
    """Return NumPy's generator: what is wrong with these mechanisms is not where their bits come from."""
    return np.random.default_rng(source.words(4).tolist())
