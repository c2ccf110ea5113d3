"""Defects that outsiders planted in voting estimators, and that an audit once called kept.

Each must be called broken, for its own reason and no other; the same estimator without the defect must not. Confidence
of "broken" is 1 - 5e-7 in every audit; seeds are fixed, so that a pass repeats.
"""

from typing import Any

from nearveil.audit import Report, audit
from nearveil.audit.registry import make_experiment
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import PrivateDiscriminant, PrivateKNeighborsClassifier
from studies.audits import specimens as planted


def attacked(make: Any, trials: int, *, screened: int = 0) -> Report:
    voter = make(4.0, delta=1e-2, max_answered=1, max_screened=screened)
    return audit(voter, trials=trials, source=unsafe_seeded(1))


def failed(report: Report) -> set[str]:
    return {one.name for one in report.checks if one.result == "failed"}


def test_the_estimator_without_a_defect_is_kept() -> None:
    report = attacked(PrivateKNeighborsClassifier, 10_000, screened=1)
    assert (report.verdict, report.reasons) == ("kept", ())
    wanted = {"the stated density", "the stated law", "repeated outcomes", "labels", "predict", "caps", "the account"}
    wanted |= {"the guarantee's price", "copies", "parameters set later"}
    assert {one.name for one in report.checks if one.result == "passed"} == wanted


def test_four_fifths_of_the_noise() -> None:
    report = attacked(planted.QuietVotes, 4_000)
    assert report.verdict == "broken"
    assert "the stated law" in failed(report)
    assert "does not have the stated spread" in str(report)


def test_exact_votes_in_one_of_2000_answers() -> None:
    report = attacked(planted.OnceExactVotes, 20_000)
    assert report.verdict == "broken"
    assert "repeated outcomes" in failed(report)
    assert failed(report) <= {"the stated law", "repeated outcomes"}


def test_labels_decided_before_the_noise() -> None:
    report = attacked(planted.NoiselessLabels, 2_000)
    assert report.verdict == "broken"
    assert failed(report) >= {"labels", "predict"}
    # And by attack: the label tells a record that flips the plurality.
    assert any(one.refutes and "linear" in one.name for one in report.attacks)


def test_caps_that_are_ignored() -> None:
    report = attacked(planted.EndlessVotes, 400)
    assert report.verdict == "broken"
    assert "caps" in failed(report)
    assert "4 queries were answered where 1 are allowed" in str(report)


def test_screening_that_is_not_charged() -> None:
    report = attacked(planted.FreeScreening, 400, screened=1)
    assert (report.verdict, failed(report)) == ("broken", {"the account"})
    assert "the account was charged epsilon" in str(report)


def attacked_discriminant(make: Any) -> Report:
    return audit(make(4.0, 0.05, publications=2), trials=400, source=unsafe_seeded(1))


def run_checks(make: Any) -> dict[str, str]:
    """Return the details of the checks that a discriminant fails."""
    checks = [check(unsafe_seeded(1), 1e-9) for check in make_experiment(make(4.0, 0.05, publications=2)).checks]
    return {check.name: check.detail for check in checks if check.result == "failed"}


def test_a_discriminant_without_a_defect_is_not_called_broken() -> None:
    report = attacked_discriminant(PrivateDiscriminant)
    assert report.reasons == ()
    passed = {one.name for one in report.checks if one.result == "passed"}
    assert passed >= {"the stated density", "the stated law", "the account", "the export", "parameters set later"}


def test_half_the_noise_of_a_discriminant() -> None:
    report = attacked_discriminant(planted.QuietDiscriminant)
    assert report.verdict == "broken"
    assert "does not have the stated spread" in str(report)


def test_a_discriminant_that_does_not_pay() -> None:
    assert set(run_checks(planted.FreeDiscriminant)) == {"the account"}


def test_the_largest_private_value_in_a_discriminant() -> None:
    problems = run_checks(planted.ReachingDiscriminant)
    assert set(problems) == {"the export"}
    assert "its public part depends on private records" in problems["the export"]


def test_four_fifths_of_the_noise_on_counts() -> None:
    report = attacked_discriminant(planted.QuietCounts)
    assert report.verdict == "broken"
    assert "the stated law" in failed(report)
    assert "number 2 does not have the stated spread" in str(report)
