"""The studies of PrivateMail in miniature: made-up images stand in for the real ones, and numbers are checked."""

import csv
import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from nearveil.privacy.noise import unsafe_seeded
from nearveil.privatemail import PrivateMail
from nearveil.privatemail.graph import gaussian_graph, label_graph
from nearveil.privatemail.manifold import smlq_step
from studies import (
    _privatemail,
    label_leak,
    label_weight,
    privatemail_convergence,
    privatemail_embeddings,
    privatemail_parameters,
    privatemail_recall,
)
from studies._report import round_up, write
from studies._study import Row, Study, as_frame, run

pytestmark = pytest.mark.usefixtures("quick_figures")

CLASSES = {"cub200_cropped_lite0": 200, "cars196_cropped_lite0": 196, "cifar100_partial": 100}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Write three sets of a few images each, classes well apart, and make everything small."""
    for number, (name, classes) in enumerate(CLASSES.items()):
        generator = np.random.default_rng(number)
        labels = np.repeat(np.arange(classes), 5)
        middles = generator.normal(size=(classes, 24))
        features = middles[labels] + 0.3 * generator.normal(size=(len(labels), 24))
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / f"{name}.npz", features=features.astype(np.float16), labels=labels)
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    monkeypatch.setattr(_privatemail, "ANCHORS", 80)
    _privatemail._load.cache_clear()
    label_weight.split.cache_clear()
    with threadpool_limits(1):  # small products: threads would only wait for each other
        yield
    _privatemail._load.cache_clear()
    label_weight.split.cache_clear()


def made(study: Study, folder: Path) -> list[Row]:
    """Run a study, write it, and see that its files tell the same."""
    measured = run(study, folder / study.name, jobs=1)
    page = write(study, measured, folder / study.name)
    text = page.read_text()
    assert "nan" not in text
    with page.with_suffix(".csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(measured.rows)
    assert json.loads(page.with_suffix(".json").read_text())["rows"] == measured.rows
    return measured.rows


def means(rows: list[Row], *keys: str, column: str = "recall") -> dict[Any, float]:
    found: dict[Any, float] = as_frame(rows).groupby(list(keys))[column].mean().to_dict()
    return found


def test_images_are_asked_for_equally_often_and_never_in_the_gallery() -> None:
    drawn = _privatemail.sample_images("cars196", 3, gallery=300)
    assert np.array_equal(np.bincount(drawn.query_labels), np.ones(98))
    assert np.array_equal(
        np.bincount(_privatemail.sample_images("cifar100", 3, gallery=99).query_labels), np.full(50, 2)
    )
    assert (len(drawn.anchors), len(drawn.others), len(drawn.gallery)) == (80, 98 * 5 - 80, 300)
    assert drawn.anchor_labels.max() < 98
    assert drawn.n_classes == 98
    distances = np.abs(drawn.queries[:, None] - drawn.gallery[None]).max(axis=2)
    assert distances.min() > 0
    other = _privatemail.sample_images("cars196", 4, gallery=300)
    assert not np.array_equal(drawn.queries, other.queries)


def test_a_step_of_the_walk_is_that_of_the_query() -> None:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(40, 6))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    start, labels = generator.normal(size=(40, 2)), label_graph(np.arange(40) % 4, 1.5)
    first, second = _privatemail.walk(X @ X.T, start, steps=1, bandwidth=1.5, label_weight=0.6, repel=labels)
    assert np.linalg.norm(first) == pytest.approx(math.sqrt(40))
    expected = smlq_step(first, gaussian_graph(X, 1.5, method="exact"), labels, 0.6)[0]
    assert np.allclose(second, expected * math.sqrt(40) / np.linalg.norm(expected), rtol=1e-9)


def test_a_row_without_label_has_no_part_in_what_labels_do() -> None:
    labels, Z = np.array([4, -1, 0, 9, -1]), np.random.default_rng(0).normal(size=(5, 2))
    known = labels >= 0
    n = int(known.sum())
    J = np.eye(n) - 1 / n
    kernel = -0.5 * J @ np.abs(labels[known][:, None] - labels[known][None, :]) @ J
    expected = np.zeros((5, 2))
    expected[known] = (np.diag(kernel.sum(axis=0)) - kernel) @ Z[known]
    assert np.allclose(_privatemail.PartlyLabelled(labels).laplacian_matmul(Z), expected)


def test_limits_are_those_of_the_theory() -> None:
    by_hand = (8 * math.exp(0.01) + 97e-5) / (8 * math.exp(0.01) + 90)
    assert _privatemail.compute_ceiling(0.01, 98) == pytest.approx(by_hand, rel=1e-12)
    assert _privatemail.compute_ceiling(0.01, 98) < 0.083
    assert _privatemail.compute_ceiling(0.023, 98, 0.99) == 1.0
    assert _privatemail.compute_floor(98) == 8 / 98


def test_small_measures_by_hand() -> None:
    drawn = replace(
        _privatemail.sample_images("cars196", 0, gallery=9),
        gallery_labels=np.array([5, 6, 7]),
        query_labels=np.array([6, 7]),
    )
    assert drawn.score([[0, 1], [0, 1]]) == 0.5
    assert drawn.score([[0, 1], [0, 1]], np.array([5, 6])) == 1.0
    assert round_up(0.0824) == "0.083"
    within = privatemail_embeddings.compute_within_share(
        np.array([[0.0], [2.0], [10.0], [12.0]]), np.array([0, 0, 1, 1])
    )
    assert within == pytest.approx(4 / 104)
    assert privatemail_embeddings.compute_error(np.zeros((2, 1)), np.array([[-1.0], [1.0]])) == 1.0
    chosen = _privatemail.choose_by_class(np.arange(12), np.array([0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 8]))
    assert chosen.tolist() == [0, 8, 10, 2, 3, 4, 5, 6]  # the commonest classes first, one item of each


def test_the_label_leaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(label_leak, "DATA", ("cars196",))
    monkeypatch.setattr(label_leak, "SEEDS", (0, 1))
    rows = made(label_leak.STUDY, tmp_path)
    found = means(rows, "data", "features", "label")
    told = means(rows, "data", "features", "label", column="recall_of_told_label")
    for data in label_leak.DATA:
        for features in ("true", "random"):
            assert found[data, features, "true"] > 0.4
            assert found[data, features, "random"] < 0.2
            assert told[data, features, "random"] == pytest.approx(found[data, features, "true"], abs=0.15)
        assert found[data, "true", label_leak.APART] < 0.2  # the leak needs labels that are numbered from 0
    assert all(row["recall"] > row["ceiling"] for row in rows if row["label"] == "true")


def test_the_label_leaks_from_data_that_a_package_carries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    styles = _privatemail._make_styles()
    sizes = np.bincount(styles.labels)
    assert len(sizes) == 100
    assert 17 <= sizes.min() <= sizes.max() <= 19
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path / "nothing"))
    here = importlib.reload(label_leak)
    try:
        assert here.DATA == ("digits",)
        assert "papers' images are not on this machine" in here.STUDY.note
        monkeypatch.setattr(here, "SEEDS", (0, 1))
        rows = made(here.STUDY, tmp_path)
        found = means(rows, "features", "label")
        assert found["random", "true"] > rows[0]["ceiling"]
    finally:
        monkeypatch.undo()
        importlib.reload(label_leak)


def test_recall_converges_to_the_label_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(privatemail_convergence, "DATA", ("cars196",))
    monkeypatch.setattr(privatemail_convergence, "SEEDS", (0, 1))
    rows = made(privatemail_convergence.STUDY, tmp_path)
    last = means([row for row in rows if row["step"] == privatemail_convergence.STEPS], "method")
    assert last[privatemail_convergence.PROGRAM] > 0.9
    assert last[privatemail_convergence.PROGRAM_HONEST] < 0.2
    assert last[privatemail_convergence.PAPER] < 0.2
    raw = [row["recall"] for row in rows if row["method"] == privatemail_convergence.RAW]
    assert min(raw) > 0.9
    # By hand: four images of each class are left, and 8 of 392 are drawn, with replacement.
    assert {round(row["chance"], 12) for row in rows} == {round(1 - (1 - 4 / 392) ** 8, 12)}


def test_without_labels_nothing_is_left_of_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(privatemail_parameters, "DATA", ("cars196",))
    monkeypatch.setattr(privatemail_parameters, "SEEDS", (0, 1))
    values = {"n_components": (2, 4), "label_weight": (0.0, 0.6), "bandwidth": (2.0, 6.0)}
    monkeypatch.setattr(privatemail_parameters, "VALUES", values)
    rows = made(privatemail_parameters.STUDY, tmp_path)
    found = means(rows, "method", "parameter", "value")
    program, sound = privatemail_parameters.PROGRAM, privatemail_parameters.SOUND
    assert found[program, "label_weight", 0.0] < 0.2
    assert found[program, "label_weight", 0.6] > 0.4
    assert found[program, "n_components", 2.0] == found[program, "bandwidth", 6.0]  # the same setting and noise
    assert max(share for (method, *_), share in found.items() if method == sound) < 0.2
    assert found[privatemail_parameters.SOUND_PLAIN, "n_components", 4.0] > 0.3


def test_recall_over_epsilon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(privatemail_recall, "DATA", ("cub200",))
    monkeypatch.setattr(privatemail_recall, "SEEDS", (0, 1, 2))
    for module in (privatemail_recall, _privatemail):
        monkeypatch.setattr(module, "EPSILONS", (0.1, 4.0, 16.0))
        monkeypatch.setattr(module, "FIRST_EPSILONS", (0.023, 10.527))
    deltas, few = _privatemail.FIRST_DELTAS, (0.1, 16.0)
    published = {"2022-code": ((1e-5,), few), "2022": ((1e-5,), few), "2021": (deltas, (0.023, 10.527))}
    monkeypatch.setattr(_privatemail, "PUBLISHED", published)
    monkeypatch.setattr(_privatemail, "SETS_OF", {1.0: 4, 4.0: 8, 8.0: 16})
    monkeypatch.setattr(_privatemail, "DSNE_ANCHORS", 40)
    pytest.importorskip("openTSNE", reason="openTSNE is not installed (the extra `tsne`)")
    rows = made(privatemail_recall.STUDY, tmp_path)
    found = means(rows, "method", "epsilon")
    assert found[_privatemail.PROGRAM, 0.1] > 0.4
    assert min(row["recall"] for row in rows if row["method"] == "no privacy") > 0.9
    assert found["covers", 16.0] > 0.5 > found["covers", 0.1]
    assert {row["method"] for row in rows if row["sound"]} == set(privatemail_recall.BELOW)
    for row in rows:
        if row["sound"]:  # 100 queries: three standard errors
            top = row["ceiling"]
            assert row["recall"] <= top + 3 * math.sqrt(top * (1 - top) / 100) + 0.02
        if row["method"] == _privatemail.FIRST:
            each, delta = row["step"], row["delta"]
            total = each * math.sqrt(4 * math.log(1 / delta)) + 2 * each * math.expm1(each) / (math.exp(each) + 1)
            assert total == pytest.approx(row["epsilon"], rel=1e-6)
            assert (row["ceiling"] == 1.0) == (delta == 0.99 or row["epsilon"] > 100)
    page = (tmp_path / "privatemail-recall" / "privatemail-recall.md").read_text()
    assert "- PrivateMail 2022, the authors' program: CUB-200-2011 at 0.1" in page
    assert "No sound method is among them." in page


def test_embeddings_and_their_alignment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(privatemail_embeddings, "SEEDS", (0, 1))
    rows = made(privatemail_embeddings.STUDY, tmp_path)
    spread = means([row for row in rows if row["kind"] == "spread"], "method", "step", column="within")
    assert spread[_privatemail.PROGRAM, 0] > 0.7
    assert spread[_privatemail.PROGRAM, 7] < 0.1
    assert spread[_privatemail.PAPER, 7] > 0.7
    error = [row for row in rows if row["kind"] == "error"]
    assert all(row["after"] <= min(row["before"], 1) + 1e-9 for row in error)
    points = [row for row in rows if row["kind"] == "point"]
    assert {row["seed"] for row in points} == {0}
    shown = [row for row in points if row.get("role") == "target"]
    assert {(row["method"], row["epsilon"]) for row in shown} == {
        (method, epsilon) for method, epsilons in privatemail_embeddings.SHOWN.items() for epsilon in epsilons
    }


def test_the_error_of_an_alignment_is_that_of_the_message() -> None:
    """One row of the study again, from a message and least squares."""
    rows = privatemail_embeddings.measure({"method": _privatemail.PROGRAM, "seed": 0})
    drawn = _privatemail.sample_images("cars196", 0, gallery=privatemail_embeddings.GALLERY)
    mail = PrivateMail.published("2022-code", "cars196", epsilon=1.0, label_weight=0.5, allow_unsound=True)
    mail = mail.fit(drawn.anchors, drawn.anchor_labels)
    server = mail.embed_gallery(drawn.gallery, drawn.gallery_labels).anchors
    messages = mail.release(drawn.queries[:3], labels=drawn.query_labels[:3], rng=unsafe_seeded(0))
    after = []
    for message in messages:
        client = message["embedding"][1:]
        a, b = client - client.mean(axis=0), server - server.mean(axis=0)
        # In the plane a turn and a stretch are one complex number, found by least squares.
        p, q = a @ [1, 1j], b @ [1, 1j]
        after.append(np.linalg.norm(q - p * np.vdot(p, q) / np.vdot(p, p)) / np.linalg.norm(q))
    found = next(row for row in rows if row["kind"] == "error" and row["epsilon"] == 1.0)
    assert found["after"] == pytest.approx(np.mean(after), rel=1e-6)


def test_labels_do_not_help_rows_that_have_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(label_weight, "BANDWIDTHS", (0.3,))
    monkeypatch.setattr(label_weight, "LABEL_WEIGHTS", (0.0, 0.6))
    monkeypatch.setattr(label_weight, "SEEDS", (0, 1))
    rows = made(label_weight.STUDY, tmp_path)
    found = means(rows, "data", "label_weight", column="accuracy")
    assert found["digits", 0.6] < found["digits", 0.0] < rows[0]["raw"]
    assert rows[0]["floor"] == pytest.approx(0.102, abs=0.002)
    assert {row["data"] for row in rows} == {"digits", "birds"}
