"""The supervised manifold against dense references, its theorems, and scikit-learn's rules."""

import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from nearveil import SupervisedManifold
from nearveil.privatemail.graph import gaussian_graph, label_graph
from nearveil.privatemail.manifold import ManifoldQuery, smlq_step
from studies.baselines.solvers import ReferenceManifold
from studies.data import FeatureSet
from tests.estimators import run_check
from tests.reference import dense_label_weights, dense_objective, dense_step, dense_weights, laplacian, unit_rows

UNLABELLED = "fit_transform uses the labels; transform places the same rows as new and unlabelled"
EXPECTED_FAILED_CHECKS = {
    "check_transformer_general": UNLABELLED,
    "check_transformer_data_not_an_array": UNLABELLED,
    "check_estimators_dtypes": "its integer data holds a row of zeros, which has no direction and raises",
}


@parametrize_with_checks([SupervisedManifold()], expected_failed_checks=lambda _: EXPECTED_FAILED_CHECKS)  # type: ignore[untyped-decorator]
def test_scikit_learn_conventions(estimator: Any, check: Any) -> None:
    run_check(check, estimator)


def test_scikit_learn_conventions_on_torch_tensors() -> None:
    pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    program = """
import sys, warnings
warnings.simplefilter("ignore")
class NoCupy:  # not a library that is promised, where it is installed
    def find_spec(self, name, path=None, target=None):
        if name == "cupy":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoCupy())
from unittest import SkipTest
from sklearn.utils.estimator_checks import estimator_checks_generator
from nearveil import SupervisedManifold
passed = 0
for estimator, check in estimator_checks_generator(SupervisedManifold()):
    if "array_api" in str(check):
        try:
            check(estimator)
        except SkipTest:
            continue
        passed += 1
print(passed > 0)
"""
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}
    result = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert result.stdout.strip() == "True", result.stdout + result.stderr


def problem(n: int = 40, d: int = 5, n_classes: int = 4, seed: int = 0) -> tuple[Any, Any, Any]:
    y = np.random.default_rng(seed).integers(-1, n_classes, size=n)
    y[:2] = [0, 1]
    return unit_rows(n, d, seed), y, np.random.default_rng(seed + 1).normal(size=(n, 2))


@pytest.mark.parametrize("encoding", ["integer", "one-hot"])
@pytest.mark.parametrize("bandwidth", [6.0, 1.0, 0.4])
@pytest.mark.parametrize("label_weight", [0.0, 0.6, 3.0])
def test_one_step_is_eq_4(encoding: Any, bandwidth: float, label_weight: float) -> None:
    X, y, Q = problem()
    V = dense_label_weights(y, bandwidth, encoding)
    manifold = SupervisedManifold(
        bandwidth=bandwidth,
        label_weight=label_weight,
        n_iter=1,
        init=Q,
        rescale=False,
        graph="exact",
        label_encoding=encoding,
    ).fit(7 * X, y)
    expected = dense_step(Q, dense_weights(X, bandwidth), V, label_weight)
    assert np.max(np.abs(manifold.embedding_ - expected)) < 1e-12 * max(1, np.max(np.abs(expected)))
    W = dense_weights(X, bandwidth)
    np.testing.assert_allclose(
        manifold.objective_history_,
        [dense_objective(Q, W, V, label_weight), dense_objective(expected, W, V, label_weight)],
        rtol=1e-10,
    )
    assert manifold.objective_ == manifold.objective_history_[-1]


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(2, 40),
    d=st.integers(1, 6),
    bandwidth=st.floats(0.5, 20),
    label_weight=st.floats(0, 5),
    n_classes=st.integers(2, 8),
    encoding=st.sampled_from(["integer", "one-hot"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_objective_never_rises(
    n: int, d: int, bandwidth: float, label_weight: float, n_classes: int, encoding: Any, seed: int
) -> None:
    """Theorem: majorisation. Holds for every graph, labelling and alpha >= 0."""
    rng = np.random.default_rng(seed)
    graph = gaussian_graph(unit_rows(n, d, seed), bandwidth, method="exact")
    labels = label_graph(rng.integers(-1, n_classes, size=n), bandwidth, encoding)
    Z = rng.normal(size=(n, 2))
    history = []
    for _ in range(6):
        Z, objective = smlq_step(Z, graph, labels, label_weight)
        history.append(objective)
        scale = float(np.sum(graph.degree[:, None] * Z**2)) * (1 + label_weight * n / float(graph.degree.min()))
        assert history[-1] <= (history[-2] if len(history) > 1 else np.inf) + 1e-12 * scale


def test_with_negative_alpha_the_theorem_would_fail() -> None:
    """The property test above has teeth: outside the theorem's range the objective does rise."""
    graph = gaussian_graph(unit_rows(20, 3), 6.0, method="exact")
    labels = label_graph(np.arange(20) % 2, 6.0)
    Z = np.random.default_rng(0).normal(size=(20, 2))
    history = []
    for _ in range(8):
        Z, objective = ManifoldQuery(graph, labels, -8.0).step(Z)
        history.append(objective)
    assert np.any(np.diff(history) > 0)


@pytest.mark.parametrize("bandwidth", [6.0, 0.4])
def test_rescaled_steps_lower_the_objective_per_degree(bandwidth: float) -> None:
    """Theorem: v(Z) / Tr(Z' D Z) never rises, because the step is a positive operator in that product."""
    X, y, Q = problem(60)
    W, V = dense_weights(X, bandwidth), dense_label_weights(y, bandwidth)
    quotients = []
    for n_iter in range(1, 12):
        Z = SupervisedManifold(bandwidth=bandwidth, n_iter=n_iter, init=Q, graph="exact").fit(X, y).embedding_
        quotients.append(dense_objective(Z, W, V, 0.6) / np.sum(W.sum(axis=1)[:, None] * Z**2))
    assert np.all(np.diff(quotients) <= 1e-12)


@pytest.mark.parametrize("rescale", [True, False])
def test_several_steps_equal_the_dense_iteration(rescale: bool) -> None:
    X, y, Q = problem()
    W, V = dense_weights(X, 1.0), dense_label_weights(y, 1.0)
    Z = Q
    for _ in range(4):
        Z = dense_step(Z, W, V, 0.6)
        if rescale:
            Z = Z * np.sqrt(40) / np.linalg.norm(Z)
    manifold = SupervisedManifold(bandwidth=1.0, n_iter=4, init=Q, rescale=rescale, graph="exact").fit(X, y)
    np.testing.assert_allclose(manifold.embedding_, Z, atol=1e-12)
    assert manifold.n_iter_ == 4
    assert len(manifold.objective_history_) == 5


@pytest.mark.parametrize(("bandwidth", "label_weight"), [(6.0, 0.6), (0.4, 0.6), (1.0, 0.0)])
def test_many_steps_neither_collapse_nor_run_away(bandwidth: float, label_weight: float) -> None:
    X, y, _ = problem(80)
    manifold = SupervisedManifold(bandwidth=bandwidth, label_weight=label_weight, n_iter=2000, random_state=0).fit(X, y)
    assert np.linalg.norm(manifold.embedding_) == pytest.approx(np.sqrt(80))
    degree = manifold.graph_.degree
    assert np.max(np.abs(degree @ manifold.embedding_)) < 1e-9 * degree.sum()
    assert np.max(np.std(manifold.embedding_, axis=0)) > 0.5


def test_the_series_follows_the_exact_iteration() -> None:
    X, y, Q = problem(200)
    exact, series = (
        SupervisedManifold(bandwidth=6.0, init=Q, graph=graph).fit(X, y).embedding_ for graph in ("exact", "series")
    )
    assert np.max(np.abs(exact - series)) < 1e-5


def test_transform_is_the_kernel_average() -> None:
    X, y, Q = problem()
    new = unit_rows(9, 5, seed=8)
    manifold = SupervisedManifold(bandwidth=0.7, init=Q, graph="exact").fit(X, y)
    weights = np.exp((new @ X.T - 1) / 0.49)
    expected = weights @ manifold.embedding_ / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(manifold.transform(3 * new), expected, atol=1e-13)


def test_transform_is_where_eq_1_leaves_a_new_row_at_rest() -> None:
    X, y, Q = problem()
    new = unit_rows(1, 5, seed=8)
    manifold = SupervisedManifold(bandwidth=0.7, init=Q, graph="exact").fit(X, y)
    Z = np.vstack([manifold.transform(new), manifold.embedding_])
    both = gaussian_graph(np.vstack([new, X]), 0.7, method="exact")
    moved, _ = smlq_step(Z, both, label_graph(np.concatenate([[-1], y]), 0.7), 0.6)
    np.testing.assert_allclose(moved[0], Z[0], atol=1e-12)


def test_cccp_is_eq_6_of_2021() -> None:
    X, y, Q = problem()
    L_X, L_Y = laplacian(dense_weights(X, 1.0)), laplacian(dense_label_weights(y, 1.0))
    S = 40 * np.eye(40) - np.ones((40, 40))
    relaxed, Z = [], Q
    for _ in range(5):
        Z = 0.3 * np.linalg.pinv(L_X) @ (L_Y @ Z - S @ Q)
        relaxed.append(np.trace(Z.T @ L_X @ Z) + 0.6 * np.trace(Z.T @ S @ Q) - 0.3 * np.trace(Z.T @ L_Y @ Z))
    fit = {"bandwidth": 1.0, "label_weight": 0.3, "n_iter": 5, "init": Q, "solver": "cccp", "graph": "exact"}
    manifold = ReferenceManifold(**fit, rescale=False).fit(X, y)
    np.testing.assert_allclose(manifold.embedding_, Z, rtol=1e-9, atol=1e-9 * np.max(np.abs(Z)))
    assert np.all(np.diff(relaxed) <= 1e-9 * np.abs(relaxed[0]))  # what this iteration lowers is the relaxed objective
    rescaled = ReferenceManifold(**fit).fit(X, y).embedding_
    np.testing.assert_allclose(rescaled, Z * np.sqrt(40) / np.linalg.norm(Z), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("bandwidth", "label_weight"), [(6.0, 0.6), (0.5, 0.6), (0.5, 0.0)])
def test_spectral_is_the_minimum_under_orthonormal_columns(bandwidth: float, label_weight: float) -> None:
    X, y, _ = problem(60)
    W, V = dense_weights(X, bandwidth), dense_label_weights(y, bandwidth)
    matrix = laplacian(W) - label_weight * laplacian(V)
    basis = np.linalg.qr(np.hstack([np.ones((60, 1)), np.eye(60)[:, :-1]]))[0][:, 1:]
    least = np.linalg.eigvalsh(basis.T @ matrix @ basis)[:3].sum()
    manifold = ReferenceManifold(
        3, bandwidth=bandwidth, label_weight=label_weight, solver="spectral", rescale=False, random_state=0
    ).fit(X, y)
    Z = manifold.embedding_
    np.testing.assert_allclose(Z.T @ Z, np.eye(3), atol=1e-10)
    np.testing.assert_allclose(Z.sum(axis=0), 0, atol=1e-8)
    assert manifold.objective_ == pytest.approx(least, rel=1e-6, abs=1e-6 * np.abs(matrix).max())
    other = np.random.default_rng(0).normal(size=(60, 3))
    assert least <= dense_objective(np.linalg.qr(other - other.mean(axis=0))[0], W, V, label_weight)


@pytest.mark.parametrize(("bandwidth", "label_weight"), [(6.0, 0.6), (0.5, 0.6), (0.5, 0.0)])
def test_eigenmaps_are_those_of_the_generalised_problem(bandwidth: float, label_weight: float) -> None:
    X, y, _ = problem(60)
    W, V = dense_weights(X, bandwidth), dense_label_weights(y, bandwidth)
    matrix, degree = laplacian(W) - label_weight * laplacian(V), W.sum(axis=1)
    values, vectors = scipy.linalg.eigh(matrix, np.diag(degree))
    constant = np.abs(degree @ vectors) > 1e-6 * np.sqrt(degree.sum())
    assert constant.sum() == 1  # of weighted mean zero are all but the constant
    least, expected = values[~constant][:3], vectors[:, ~constant][:, :3]
    manifold = ReferenceManifold(
        3, bandwidth=bandwidth, label_weight=label_weight, solver="eigenmaps", rescale=False, graph="exact"
    ).fit(X, y)
    Z = manifold.embedding_
    np.testing.assert_allclose(Z.T @ (degree[:, None] * Z), np.eye(3), atol=1e-9)
    np.testing.assert_allclose(degree @ Z, 0, atol=1e-7)
    assert manifold.objective_ == pytest.approx(least.sum(), rel=1e-6, abs=1e-8)
    cosines = np.linalg.svd(np.sqrt(degree)[:, None] * Z, full_matrices=False)[0].T @ (
        np.sqrt(degree)[:, None] * expected
    )
    assert np.linalg.svd(cosines)[1].min() > 1 - 1e-6
    plain = ReferenceManifold(
        3, bandwidth=bandwidth, label_weight=label_weight, solver="spectral", rescale=False, graph="exact"
    ).fit(X, y)
    if bandwidth < 1:  # at bandwidth 6 all degrees are nearly equal
        other = np.linalg.svd(np.linalg.qr(plain.embedding_)[0].T @ np.linalg.qr(Z)[0])[1]
        assert other.min() < 0.999


def test_a_start_with_a_tiny_mean_is_left_as_it_is() -> None:
    X, y, Q = problem()
    W, V = dense_weights(X, 1.0), dense_label_weights(y, 1.0)
    degree = W.sum(axis=1)
    tiny = Q - (degree @ Q) / degree.sum() + 5e-7
    uneven = np.column_stack([Q[:, 0] + 0.5, 1e7 * Q[:, 1]])
    for start in (tiny, uneven):
        fit = SupervisedManifold(bandwidth=1.0, n_iter=1, init=start, rescale=False, graph="exact").fit(X, y)
        expected = dense_step(start, W, V, 0.6)
        assert np.max(np.abs(fit.embedding_ - expected) / np.abs(start).max(axis=0)) < 1e-12


@pytest.mark.parametrize("solver", ["majorize", "cccp", "spectral", "eigenmaps"])
@pytest.mark.parametrize("rescale", [True, False])
def test_the_objective_is_that_of_the_embedding(solver: str, rescale: bool) -> None:
    X, y, Q = problem()
    fit = ReferenceManifold(
        bandwidth=1.0, label_weight=0.3, n_iter=3, init=Q, solver=solver, rescale=rescale, graph="exact"
    ).fit(X, y)
    expected = dense_objective(fit.embedding_, dense_weights(X, 1.0), dense_label_weights(y, 1.0), 0.3)
    assert fit.objective_ == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("solver", ["majorize", "cccp", "spectral", "eigenmaps"])
@pytest.mark.parametrize("n", [40, 600])
def test_every_solver_takes_float32(solver: str, n: int) -> None:
    X, y, Q = problem(n)
    single, double = (
        ReferenceManifold(bandwidth=1.0, label_weight=0.3, n_iter=3, init=Q, solver=solver).fit(rows, y).embedding_
        for rows in (X.astype(np.float32), X)
    )
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, double, atol=2e-3)


def test_the_label_bandwidth_is_the_labels() -> None:
    X, y, Q = problem()
    fit = SupervisedManifold(bandwidth=1.0, label_bandwidth=3.0, n_iter=1, init=Q, rescale=False).fit(X, y)
    np.testing.assert_allclose(
        fit.embedding_, dense_step(Q, dense_weights(X, 1.0), dense_label_weights(y, 3.0), 0.6), atol=1e-12
    )


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e-160])
def test_the_length_of_rows_does_not_matter(scale: float) -> None:
    X, y, Q = problem()
    np.testing.assert_allclose(
        SupervisedManifold(init=Q).fit(scale * X, y).embedding_,
        SupervisedManifold(init=Q).fit(X, y).embedding_,
        atol=1e-9,
    )


@pytest.mark.parametrize(
    "X",
    [
        np.array([[1j, 2], [3, 4]]) * 987.5,
        [["Alice Smith", 1.0], ["b", 2.0]],
        np.full((4, 2), 987.5)[:, 0],
    ],
)
def test_errors_hold_no_values_of_the_rows(X: Any) -> None:
    with pytest.raises(ValueError, match=r"Complex data|text or objects|Expected 2D array") as caught:
        SupervisedManifold().fit(X)
    assert not any(value in str(caught.value) for value in ("987", "Alice"))


def test_rows_that_meet_in_one_point_are_named() -> None:
    with pytest.raises(ValueError, match="rows have met in one point"):
        SupervisedManifold(random_state=0).fit([[1.0, 0.0], [0.0, 2.0]])


@pytest.mark.parametrize("label_weight", [-1.0, np.nan])
def test_a_step_refuses_a_weight_that_its_theorem_excludes(label_weight: float) -> None:
    with pytest.raises(ValueError, match="label_weight must be at least 0"):
        smlq_step(np.eye(3), gaussian_graph(np.eye(3), 1.0), None, label_weight)


@pytest.mark.parametrize("solver", ["majorize", "cccp", "spectral", "eigenmaps"])
def test_seeds_repeat_and_none_differs(solver: str) -> None:
    X, y, _ = problem()
    first, again, other = (
        ReferenceManifold(solver=solver, random_state=seed).fit(X, y).embedding_ for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    if solver not in ("spectral", "eigenmaps"):  # eigenvectors do not depend on where one starts
        assert not np.allclose(first, other)


def test_unlabelled_rows_are_as_no_labels_at_all() -> None:
    X, _, Q = problem()
    with_none = SupervisedManifold(init=Q).fit(X)
    np.testing.assert_array_equal(SupervisedManifold(init=Q).fit(X, np.full(40, -1)).embedding_, with_none.embedding_)


def test_float32_stays_float32() -> None:
    X, y, Q = problem()
    single = SupervisedManifold(init=Q, bandwidth=1.0).fit(X.astype(np.float32), y)
    assert single.embedding_.dtype == np.float32
    assert single.transform(X.astype(np.float32)).dtype == np.float32
    np.testing.assert_allclose(
        single.embedding_, SupervisedManifold(init=Q, bandwidth=1.0).fit(X, y).embedding_, atol=1e-4
    )


def test_it_works_in_a_pipeline_and_a_grid_search() -> None:
    X, y = load_digits(return_X_y=True)
    pipeline = make_pipeline(SupervisedManifold(8, label_weight=0.0, random_state=0), KNeighborsClassifier())
    grid = {"supervisedmanifold__bandwidth": [0.3, 6.0]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(X[:400], y[:400])
    assert search.best_params_ == {"supervisedmanifold__bandwidth": 0.3}
    assert search.score(X[400:800], y[400:800]) > 0.3  # chance is 0.1


def test_output_has_names_and_may_be_a_frame() -> None:
    X, y, _ = problem()
    manifold = SupervisedManifold(3, random_state=0).fit(X, y)
    assert list(manifold.get_feature_names_out()) == [f"supervisedmanifold{column}" for column in range(3)]
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = manifold.set_output(transform="pandas").transform(X)
    assert isinstance(frame, pandas.DataFrame)


def test_clones_and_pickles_agree() -> None:
    X, y, _ = problem()
    manifold = SupervisedManifold(random_state=3, bandwidth=0.7).fit(X, y)
    np.testing.assert_array_equal(clone(manifold).fit(X, y).embedding_, manifold.embedding_)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(manifold)).transform(X), manifold.transform(X))  # noqa: S301


def rows_with(value: float) -> Any:
    X = unit_rows(6, 3)
    X[4] = value
    return X


@pytest.mark.parametrize(
    ("X", "y", "parameters", "message"),
    [
        (rows_with(np.nan), None, {}, "contains NaN"),
        (rows_with(np.inf), None, {}, "contains infinity"),
        (rows_with(0.0), None, {}, r"X holds a row of zeros \(row 4\)"),
        (unit_rows(1, 3), None, {}, "minimum of 2 is required"),
        (unit_rows(6, 3), [1] * 6, {}, "y has one class only"),
        (unit_rows(6, 3), [1, -1, -1, 1, -1, 1], {}, "y has one class only"),
        (unit_rows(6, 3), [0, 1], {}, "y must have a label for each row of X: it has 2 for 6 rows"),
        (unit_rows(6, 3), list("abcabc"), {}, 'encoding="one-hot" for names'),
        (unit_rows(6, 3), None, {"bandwidth": 0.0}, "'bandwidth' parameter of SupervisedManifold must be a float"),
        (unit_rows(6, 3), None, {"bandwidth": -1.0}, "'bandwidth' parameter"),
        (unit_rows(6, 3), None, {"bandwidth": np.nan}, "bandwidth|'bandwidth' parameter"),
        (unit_rows(6, 3), None, {"n_components": 7}, "n_components=7 must be at most the number of rows, 6"),
        (unit_rows(6, 3), None, {"n_components": 0}, "'n_components' parameter"),
        (unit_rows(6, 3), None, {"n_components": 6, "solver": "spectral"}, "n_components must be below the 6 rows"),
        (unit_rows(6, 3), None, {"label_weight": -0.1}, "'label_weight' parameter"),
        (unit_rows(6, 3), None, {"n_iter": 0}, "'n_iter' parameter"),
        (unit_rows(6, 3), None, {"init": np.ones((5, 2))}, r"init must have shape \(6, 2\); got \(5, 2\)"),
        (unit_rows(6, 3), None, {"init": np.full((6, 2), np.nan)}, "init must be finite"),
        (unit_rows(6, 3), None, {"init": np.zeros((6, 2))}, "cannot be rescaled: its rows have met in one point"),
        (unit_rows(6, 3), None, {"solver": "cccp"}, 'solver="cccp" needs labels'),
        (unit_rows(6, 3), None, {"graph": "series"}, 'use method="exact"'),
        (unit_rows(6, 3), [0, 1] * 3, {"rescale": False, "label_weight": 1e9, "n_iter": 99}, "the embedding overflows"),
        (np.eye(3), None, {"bandwidth": 0.01}, "degree of 3 row.* underflows"),
        (unit_rows(6, 3), [0, 1] * 3, {"solver": "cccp", "n_iter": 400, "label_weight": 9.0}, "eq. 6 overflows"),
        (unit_rows(6, 3), [0, 1] * 3, {"solver": "cccp", "init": np.zeros((6, 2))}, "eq. 6 gives zero everywhere"),
        (unit_rows(6, 3), None, {"init": np.full((6, 2), 1e-310)}, "cannot be rescaled"),
    ],
)
def test_bad_input_is_named(X: Any, y: Any, parameters: dict[str, Any], message: str) -> None:
    kind = ReferenceManifold if "solver" in parameters else SupervisedManifold
    with pytest.raises(ValueError, match=message):
        kind(**{"random_state": 0, **parameters}).fit(X, y)


def test_bad_new_rows_are_named() -> None:
    manifold = SupervisedManifold(random_state=0).fit(unit_rows(6, 3))
    for X, message in ((rows_with(0.0), "row of zeros"), (rows_with(np.nan), "NaN"), (unit_rows(2, 4), "4 features")):
        with pytest.raises(ValueError, match=message):
            manifold.transform(X)


def test_neighbours_of_real_birds_stay_together(birds: FeatureSet) -> None:
    """On 20 public classes, rows placed without labels find their class far above chance, below raw features."""
    few = birds.labels < 20
    X = birds.features[few] - birds.features[birds.labels < 100].mean(axis=0)
    y = birds.labels[few]
    fitted, held = np.arange(len(y)) % 3 > 0, np.arange(len(y)) % 3 == 0
    manifold = SupervisedManifold(8, bandwidth=0.5, label_weight=0.0, random_state=0).fit(X[fitted], y[fitted])
    places = KNeighborsClassifier(5).fit(manifold.transform(X[fitted]), y[fitted])
    score = places.score(manifold.transform(X[held]), y[held])
    chance, raw = 1 / 20, KNeighborsClassifier(5).fit(X[fitted], y[fitted]).score(X[held], y[held])
    assert 6 * chance < score < raw
