"""Attacks on the promise to the records: what one record changes, on the smallest galleries."""

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import beta

from nearveil.privacy.noise import unsafe_seeded
from nearveil.retrieval import Index
from nearveil.service._protected_records import PrivateVoters, read_records
from nearveil.service._protected_sets import all_sets
from tests.service.protected import CLASSES, DIMENSION, SETS, gallery, make, newest, rows

TRIALS = 200_000
WRONG = 1e-7  # of each of the two bounds of a share: together they err less than once in 10^6 runs


def test_one_record_moves_one_vote_of_each_set_down_to_an_empty_gallery(tmp_path: Path) -> None:
    """Delete the records one by one. Each step is a pair of neighbours; the last is one record against none."""
    found = gallery(make(tmp_path, n_private=24), epsilon=8.0)  # 15 of 24 vote
    sets, private = found._sets[newest(found)], Index.open(tmp_path / "private")
    prototypes = sets.prototypes
    moved, before = [], None
    for _ in range(25):
        voter = found._voters.on(sets)
        (tally,) = voter._poll.tallies(prototypes, None)
        counts = tally.sums
        assert counts.shape == (SETS, len(CLASSES))
        if before is not None:
            moved.append(int(((counts - before) ** 2).sum(axis=1).max()))
        before = counts
        with Index.open(tmp_path / "public") as public:
            np.testing.assert_array_equal(all_sets(public)[0].prototypes, prototypes)
        ids = private.ids()
        if len(ids):
            private.delete(ids[[len(ids) // 2 if len(ids) % 2 else 0]])
    assert len(moved) == 24
    assert max(moved) <= 2  # what a vote is charged for
    assert min(moved[-8:]) >= 1  # fewer records than votes: each is seen
    assert moved[-1] == 2  # the last record against the public one that stands in for nobody


def test_the_image_of_a_record_depends_on_no_other(tmp_path: Path) -> None:
    found = gallery(make(tmp_path, n_private=30))
    sets = found._sets[newest(found)]
    records = read_records(found._private, CLASSES)
    whole = sets.centred(records.features)
    for n in (1, 2, 17, 29):
        np.testing.assert_array_equal(sets.centred(records.features[:n]), whole[:n])
        np.testing.assert_array_equal(sets.centred(records.features[n:]), whole[n:])


def bounds(hits: int) -> tuple[float, float]:
    """Return bounds of a share, by Clopper and Pearson."""
    low = 0.0 if hits == 0 else float(beta.ppf(WRONG, hits, TRIALS - hits + 1))
    return low, 1.0 if hits == TRIALS else float(beta.ppf(1 - WRONG, hits + 1, TRIALS - hits))


@pytest.mark.parametrize("noise", [1.0, 0.4])
def test_nobody_tells_one_record_from_none_better_than_promised(tmp_path: Path, noise: float) -> None:
    """All sets are asked, of a gallery with one record and of one with none; the best test there is says which.

    With 0.4 of the noise the same test breaks the promise: it would notice.
    """
    epsilon, delta = 1.0, 1e-2
    place = make(tmp_path, n_private=2)
    found = gallery(place, epsilon=epsilon, delta=delta)
    sets, private = found._sets[newest(found)], Index.open(place / "private")
    private.delete([0])  # what is left is malignant; benign stands in for nobody
    source = unsafe_seeded(9)

    def answers() -> NDArray[np.float64]:
        voter = found._voters.on(sets)
        (tally,) = voter._poll.tallies(sets.prototypes, None)
        sums, plan = tally.sums[:, :2], voter.plan_
        told = plan.votes.release(np.zeros((TRIALS, *sums.shape), np.int64), source)
        return sums + noise * told

    with_one = answers()
    private.delete(private.ids())
    with_none = answers()
    told = [(one[:, :, 1] - one[:, :, 0]).sum(axis=1) for one in (with_one, with_none)]
    assert abs(told[0].mean() - SETS) < 1
    assert abs(told[1].mean() + SETS) < 1
    worst = -math.inf
    for threshold in np.quantile(told[0], [0.5, 0.9, 0.99, 0.999]):
        for sign in (1, -1):
            shares = [bounds(int((sign * one > sign * threshold).sum())) for one in told]
            for here, there in (shares, shares[::-1]):
                worst = max(worst, here[0] - math.exp(epsilon) * there[1] - delta)
    assert (worst <= 0) == (noise == 1.0)


def test_voters_never_show(tmp_path: Path) -> None:
    found = gallery(make(tmp_path, n_private=6))
    features = rows(6, 0)[0]
    shown = repr(found._voters) + repr(read_records(found._private, CLASSES)) + repr(vars(found))
    assert isinstance(found._voters, PrivateVoters)
    assert features.shape == (6, DIMENSION)
    assert not any(f"{value:.4f}"[:6] in shown for value in features.ravel())
    assert "771234" not in shown
