"""The audit of sealed questions: it catches every weak seal, and finds nothing in the real one."""

import numpy as np
import pytest

pytest.importorskip("cryptography")

from nearveil.audit import audit
from nearveil.privacy.noise import Source, secure_source, unsafe_seeded
from nearveil.sealed.lwe import draw_gaussians
from studies.audits.sealed import SPECIMENS, are_dependent, make_sealed_experiment

SHOWN = {  # to a check that knows the secrets, and to no attack that an audit can afford
    "300 numbers of each secret twice": ["secrets of scores are", "secrets of records are"],
    "one error for all records": ["errors of records are"],
    "errors of a clock": ["the words of the source"],
    "records under the secrets of scores": ["secrets of scores and of records are"],
    "one ring secret for both stages": ["secrets of tokens of scores and of tokens of records are"],
    "ring errors of half the width": ["errors of tokens of scores is 0.25", "errors of tokens of records is 0.25"],
    "one error for both rotation keys": ["errors of tokens of scores are", "errors of tokens of records are"],
    "one public part for both secrets": ["secrets of scores do not match", "secrets of records do not match"],
}
CHECKED = [  # weak rings: the first check alone, to save time
    "one ring secret for all questions",
    "ternary ring secrets",
    "ring secrets with a mean",
    "rotation keys without errors",
]


SHARED = "one matrix for all colours"


@pytest.mark.parametrize("name", [name for name in SPECIMENS if name not in {*SHOWN, *CHECKED, SHARED}])
def test_weak_seals_are_caught(name: str) -> None:
    assert audit(SPECIMENS[name](), trials=400, source=unsafe_seeded(1)).verdict == "broken"


@pytest.mark.parametrize("name", CHECKED)
def test_weak_rings_are_caught(name: str) -> None:
    detail = SPECIMENS[name]().checks[0](unsafe_seeded(1), 1e-9).detail
    assert "secrets of tokens of" in detail or "errors of tokens of" in detail


@pytest.mark.parametrize("name", SHOWN)
def test_dependent_draws_are_caught(name: str) -> None:
    experiment = SPECIMENS[name]()
    experiment.run(experiment.pairs[0].first, 5, unsafe_seeded(2))  # questions of another client, as an audit asks them
    problems = [check(unsafe_seeded(1), 1e-9).detail for check in experiment.checks]
    details = "; ".join(filter(None, problems)).split("; ")
    assert len(details) == len(SHOWN[name])
    for detail, words in zip(details, SHOWN[name], strict=True):
        assert words in detail


def test_groups_that_share_a_matrix_and_a_secret_are_seen_by_the_server() -> None:
    report = audit(SPECIMENS[SHARED](), trials=400, source=unsafe_seeded(1))
    assert any(attack.refutes for attack in report.attacks)


def test_nothing_is_found_in_the_real_one() -> None:
    found = audit(make_sealed_experiment(), trials=400, source=unsafe_seeded(2))
    assert found.verdict != "broken"
    names = {"errors and secrets", "the source"}
    assert {check.name: check.result for check in found.checks if check.name in names} == dict.fromkeys(names, "passed")


@pytest.mark.parametrize("source", [secure_source(), unsafe_seeded(5)], ids=["default", "seeded"])
def test_draws_of_the_real_one_are_independent(source: Source) -> None:
    assert [check(source, 1e-9).result for check in make_sealed_experiment().checks] == ["passed", "passed"]


@pytest.mark.parametrize("offset", [0, 64, 900])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_number_in_ten_that_is_copied_is_seen(offset: int, sign: int) -> None:
    draws = draw_gaussians((20 * 3, 1024), unsafe_seeded(offset)).reshape(20, 3, 1024)
    assert not are_dependent(draws, draws, 1e-3)
    copied = draws.copy()
    copied[:, 2, offset : offset + 100] = sign * draws[:, 0, :100]
    assert are_dependent(copied, copied, 1e-9)


def test_magnitudes_that_are_copied_are_seen() -> None:
    draws = draw_gaussians((40, 1024), unsafe_seeded(1)).reshape(20, 2, 1024)
    signs = np.random.default_rng(0).choice([-1, 1], 1024)
    draws[:, 1] = signs * draws[:, 0]
    assert are_dependent(draws, draws, 1e-9)


def test_independent_draws_are_seldom_called_dependent() -> None:
    """Azuma's bound is on the safe side: of 200 pairs none passes a limit that one in five may pass."""
    draws = draw_gaussians((400, 128), unsafe_seeded(7)).reshape(200, 2, 1, 1, 128)
    assert sum(are_dependent(first, second, 0.2) for first, second in draws) <= 40
