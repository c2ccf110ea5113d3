"""The study of many labels: class names are read rightly, and both ways cost the same."""

import math
from pathlib import Path

import numpy as np
import pytest

from nearveil.private_knn import PrivateKNeighborsClassifier
from studies import multi_label
from studies._quick import shrink
from studies._report import write
from studies._study import as_frame, run
from studies.data import find


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AM General Hummer SUV 2000", ("AM", "SUV", "2000")),
        ("Ford F-450 Super Duty Crew Cab 2012", ("Ford", "Cab", "2012")),
        ("Dodge Caravan Minivan 1997", ("Dodge", "Minivan", "1997")),
        ("GMC Savana Van 2012", ("GMC", "Van", "2012")),
        ("Ford F-150 Regular Cab 2007", ("Ford", "Cab", "2007")),
        ("Chevrolet Corvette ZR1 2012", ("Chevrolet", "other", "2012")),
    ],
)
def test_a_class_name_has_make_body_and_year(name: str, expected: tuple[str, str, str]) -> None:
    assert multi_label.describe_class(name) == expected


def test_all_names_of_the_set_are_read() -> None:
    try:
        path = find(multi_label.FILE)
    except FileNotFoundError:
        pytest.skip("no Cars196 features on this machine")
    with np.load(path) as arrays:
        described = [multi_label.describe_class(str(name)) for name in arrays["class_names"]]
    makes, bodies, years = map(set, zip(*described, strict=True))
    assert len(described) == 196
    assert len(makes) == 49
    assert bodies == {*multi_label.BODIES, "other"}
    assert years <= set(map(str, range(1991, 2013)))
    assert sum(body == "other" for _, body, _ in described) < 20


def test_votes_are_one_for_each_attribute_and_are_read_back() -> None:
    attributes = np.array([["a", "x", "1"], ["b", "x", "2"], ["a", "y", "3"]])
    values = multi_label.list_values(attributes)
    encoded = multi_label.encode(attributes, values)
    assert encoded.sum(axis=1).tolist() == [3, 3, 3]
    assert encoded.shape == (3, 2 + 2 + 3)
    np.testing.assert_array_equal(multi_label.choose(encoded.astype(float), values), attributes)


@pytest.mark.filterwarnings("ignore::nearveil.private_knn.NoiseWarning")
def test_both_ways_have_the_noise_that_their_sensitivities_ask_for() -> None:
    rng = np.random.default_rng(0)
    rows, known = rng.normal(size=(300, 8)), np.array([["a", "x", "1"], ["b", "y", "2"]])[rng.integers(0, 2, 300)]
    data, values = (rows, known, rows[:20], known[:20]), multi_label.list_values(known)
    noises = []
    voter = PrivateKNeighborsClassifier
    for clip in (1.0, 3.0):
        made = voter(4.0, 1e-5, 20, votes="binary", clip=clip, max_screened=0, n_neighbors=50)
        noises.append(made.fit(rows, multi_label.encode(known, values)).plan_.vote_noise)
    assert noises[1] / noises[0] == pytest.approx(math.sqrt(3), rel=2e-3)  # sqrt(2 tau)
    _, together = multi_label.vote_together(data, values, 4.0, 3.0, 0)
    _, apart = multi_label.vote_apart(data, values, 4.0, 0)
    assert together <= 4.0
    assert apart <= 4.0
    single = voter(4.0, 1e-5, 60, max_screened=0, classes=range(2), n_neighbors=50).fit(rows[:2], [0, 1])
    assert single.plan_.vote_noise == pytest.approx(noises[1], rel=2e-3)  # three of sqrt 2 are one of sqrt 6


def test_the_study_in_miniature(tmp_path: Path, quick_figures: None) -> None:
    with shrink(multi_label.STUDY) as small:
        measured = run(small, tmp_path)
        write(small, measured, tmp_path)
    rows = as_frame(measured.rows)
    spent = rows[rows["spent"].notna()]
    assert (spent["spent"].astype(float) <= spent["epsilon"].astype(float)).all()
    assert set(rows["way"]) >= {"tau = 1", "tau = 3", multi_label.APART, multi_label.NOISELESS, multi_label.FLOOR}
