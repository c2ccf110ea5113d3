"""Train a public student on noisy answers about public rows. No private label is read here."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse import csr_array
from sklearn.base import ClassifierMixin, clone
from sklearn.cluster import MiniBatchKMeans
from sklearn.dummy import DummyClassifier
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics import pairwise_distances_argmin
from sklearn.neighbors import kneighbors_graph
from sklearn.svm import SVC
from sklearn.utils import check_random_state, get_tags
from sklearn.utils._param_validation import HasMethods
from sklearn.utils.validation import check_is_fitted

from nearveil.features import Extractor
from nearveil.privacy import Guarantee
from nearveil.privacy.parameters import Parameters, allow_integers, parameter
from nearveil.private_knn._knn import PrivateKNeighborsClassifier
from nearveil.private_knn.estimator import Answers, VotingClassifier
from nearveil.private_knn.individual import VoteForecast
from nearveil.private_knn.plan import VotePlan
from nearveil.private_knn.records import check_public_rows
from nearveil.private_knn.scaling import Rows, warn_of_scaled_rows
from nearveil.private_knn.student_model import (
    AT_ONCE,
    Features,
    HalfWhitening,
    PublicStudent,
    check_rows,
    extract_rows,
    map_rows,
    normalize_rows,
)
from nearveil.progress import Tick

_GRAPH_NEIGHBORS = 10  # of a row, in the graph of the public rows
_STEPS = 30  # of spreading; the weight of a row's own score falls as _KEEP to this power
_KEEP = 0.9  # weight of the neighbours in a step


def choose_typical(rows: Rows, count: int, seed: int) -> NDArray[np.int64]:
    """Return the public rows nearest to the centres of `count` clusters, completed at random if centres share one."""
    rng = np.random.default_rng(seed)
    if count >= len(rows):
        return rng.permutation(len(rows))
    clusters = MiniBatchKMeans(count, random_state=seed, n_init=1, batch_size=2048, max_iter=20).fit(rows)
    chosen = np.unique(pairwise_distances_argmin(clusters.cluster_centers_, rows))
    rest = rng.permutation(np.setdiff1d(np.arange(len(rows)), chosen))
    return rng.permutation(np.concatenate([chosen, rest[: count - len(chosen)]]))


def build_graph(rows: Rows) -> sparse.csr_array:
    """Return the normalised graph of the nearest public neighbours."""
    links = sparse.csr_array(kneighbors_graph(rows, min(_GRAPH_NEIGHBORS, len(rows) - 1)))
    links = links.maximum(links.T)
    scale = sparse.diags_array(1 / np.sqrt(np.maximum(links.sum(axis=1), 1.0)))
    return sparse.csr_array(scale @ links @ scale)


def spread_labels(links: sparse.csr_array, scores: Rows) -> Rows:
    """Spread scores over the graph (Zhou et al. 2004); a tenth of each step is the row's own score."""
    result = scores
    for _ in range(_STEPS):
        result = _KEEP * (links @ result) + (1 - _KEEP) * scores
    return result


def regress_votes(rows: Rows, queried: NDArray[np.int64], shares: Rows, noise: float) -> Rows:
    """Return class scores of every public row from the noisy shares of votes, with a largest magnitude of 1."""
    # Kernel ridge regression averages the noise of similar queries; the public noise gives the regularisation.
    n_classes = shares.shape[1]
    gamma = 1 / max(rows.shape[1] * float(rows.var()), 1e-300)
    alpha = max(noise**2 * n_classes**2 / max(n_classes - 1, 1), 1e-6)
    regression = KernelRidge(alpha=alpha, kernel="rbf", gamma=gamma).fit(rows[queried], shares - 1 / n_classes)
    scores = np.concatenate([regression.predict(rows[i : i + AT_ONCE]) for i in range(0, len(rows), AT_ONCE)])
    return np.asarray(scores / np.maximum(np.abs(scores).max(axis=1, keepdims=True), 1e-300))


_FEATURE_METHODS = ("transform", "decision_function", "predict_proba")  # the first that a student has


@dataclass(frozen=True)
class StudentRound:
    """One round: the queried public rows, their answers and labels. All of it is public."""

    rows: NDArray[np.int64]  # numbers of public rows
    answers: Answers  # in the same order
    labels: NDArray[Any]  # the labels that the student learned from, for every public row


@dataclass(eq=False, repr=False)
class Student(ClassifierMixin, Parameters):  # type: ignore[misc]
    """Learn from private records through their votes on public rows.

    A round queries the most typical public rows, once each, spreads the noisy votes over all public rows, and trains a
    student on them. The next round searches neighbours in the student's features. Only the votes use private records,
    so the trained student is public, and predicting costs nothing: :meth:`export` returns it, to be published. A pickle
    of this object holds no record either, but the voter's parameters, with the ledger's address.

    The voter's `epsilon` and caps are those of all rounds together. Noise is the same in all of them; `shares` divides
    the caps. Rows and features may follow from earlier answers, because the guarantee is that of the caps.

    Parameters
    ----------
    voter : PrivateKNeighborsClassifier or studies.pate.PateClassifier
        Cloned for every round, which debits its account. It must be given: its epsilon is that of the student.
    student : classifier, optional
        Cloned for every round; by default a support vector machine. Gets the public features, or the images themselves
        if its tags say that it takes them (``input_tags.three_d_array``), as a network may.
    features : callable, optional
        From images to rows; :func:`nearveil.features.extractor.hog` by default for images, none for rows. A row must
        depend on its own image alone, bit for bit, and on nothing learned from private records. Of a network:
        ``functools.partial(extractor.extract, row_exact=True)``.
    rounds : int, default=1
    shares : sequence of float, optional
        Of the answers, for each round; equal by default. Must sum to 1.
    n_components : int, optional
        Half-whitened principal components of the public features in which the first round searches. By default one for
        40 public rows, from 8 to 64: more than that would be noise.
    self_training : int, default=1
        How often the student is trained again on its own labels of the public rows, spread again.
    random_state : int, RandomState or None, default=None
        For the choice of public rows and for students that take one. The noise of the votes does not come from it.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    student_ : classifier
        Of the last round.
    rounds_ : tuple of StudentRound
        The queried rows of each round, their answers, and the labels.
    plan_ : VotePlan
        Of all rounds together.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from nearveil.private_knn import PrivateKNeighborsClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> voter = PrivateKNeighborsClassifier(epsilon=2.0, max_answered=60, max_screened=0, classes=range(10))
    >>> student = Student(voter, random_state=0).fit(X[:1000], y[:1000], public=X[1000:1500])
    >>> student.predict(X[1500:]).shape
    (297,)
    >>> print(student.guarantee)
    Seeing the answers makes any conclusion about whether any one record is in the database at most 7.4 times as
    likely as it would be otherwise, plus 1.0e-5.
    """

    voter: VotingClassifier | None = parameter(None, HasMethods(["fit", "answer"]), None)
    student: Any = parameter(None, HasMethods(["fit", "predict"]), None)
    _: KW_ONLY
    features: Features | None = parameter(None, callable, None)
    rounds: int = parameter(1, allow_integers(1))
    shares: Sequence[float] | None = parameter(None, "array-like", None)
    n_components: int | None = parameter(None, allow_integers(1), None)
    self_training: int = parameter(1, allow_integers(0))
    random_state: int | np.random.RandomState | None = parameter(None, "random_state")
    plan_: VotePlan = field(init=False)
    _groups: dict[str, ArrayLike | None] = field(init=False)  # during a fit
    _public: PublicStudent = field(init=False)

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        public: ArrayLike,
        *,
        groups: ArrayLike | None = None,
        public_groups: ArrayLike | None = None,
        progress: Tick | None = None,
    ) -> Self:
        """Let the private records vote on public rows, and train the student.

        `X` has rows, or images of shape (height, width) or (height, width, 3); `public` has public ones of the same
        shape, without labels. `groups` and `public_groups` are the person of each, as for the voter. `progress` is
        called with the number of queries that were finished since the last call.
        """
        parameters = self.get_params(deep=False)
        # Fit a copy, with a copy of the voter's parameters: other threads may set parameters or fit at the same time.
        copy = type(self)(**{**parameters, "voter": self.voter and _copy_voter(self.voter)})
        copy._validate_params()
        copy._groups = {"groups": groups, "public_groups": public_groups}
        copy._learn_from(X, y, public, progress)
        del copy._groups
        self.__dict__.update({name: value for name, value in vars(copy).items() if name not in parameters})
        return self

    def _learn_from(self, X: ArrayLike, y: ArrayLike, public: ArrayLike, progress: Tick | None) -> None:
        private, public_rows = check_rows(X, "X"), check_rows(public, "public")
        check_public_rows(public, X)
        if len(private) != len(np.asarray(y)):
            raise ValueError("y must have one label for each row of X")
        if private.shape[1:] != public_rows.shape[1:]:
            raise ValueError("public must have rows of the same shape as X")
        if len(public_rows) < 2:
            raise ValueError("public must hold at least two rows: the student learns from them")
        if private.ndim == 2:
            warn_of_scaled_rows(private, stacklevel=4)
        shares, rng = self._check_parameters(), check_random_state(self.random_state)
        self._takes_images = bool(get_tags(self._make_student(0)).input_tags.three_d_array)
        components = min(max(len(public_rows) // 40, 8), 64) if self.n_components is None else self.n_components
        self._space = HalfWhitening.learn(extract_rows(public_rows, self.features), components)
        first, space = (map_rows(rows, self.features, self._space) for rows in (private, public_rows))
        inputs = public_rows if self._takes_images else normalize_rows(space)
        voter = self._fit_voter(first, y, space)
        self.plan_, guarantee, self.classes_ = voter.plan_, voter.guarantee, voter.classes_
        done: list[StudentRound] = []
        for number, share in enumerate(shares):
            caps = _find_caps(self.plan_, share, done, last=number == len(shares) - 1)
            if not caps["max_answered"]:
                break
            if number:
                noise = {name: getattr(self.plan_, name) for name in ("vote_noise", "screening_noise", "threshold")}
                if isinstance(voter, PrivateKNeighborsClassifier) and self.plan_.individual:
                    records = voter.forecast(space[done[-1].rows]).n_records  # stored: it costs nothing
                    noise |= {"accounting": "individual", "least_records": math.floor(records)}
                rows, space = self._transform_rows(private if self._takes_images else first, inputs)
                voter = self._fit_voter(rows, y, space, **noise, **caps)
            seeds = [int(seed) for seed in rng.randint(2**31, size=2)]
            queried = choose_typical(normalize_rows(space), caps.get("max_screened", caps["max_answered"]), seeds[0])
            answers = voter.answer(space[queried], progress=progress)
            answered = [*((earlier.rows, earlier.answers) for earlier in done), (queried, answers)]
            labels = self._train_on_answers(inputs, normalize_rows(space), answered, seeds[1])
            done.append(StudentRound(queried, answers, labels))
        self.rounds_ = tuple(done)
        whitening = None if self._takes_images else self._space
        self._public = PublicStudent(self.classes_, guarantee, self.student_, self.features, whitening)

    def _fit_voter(self, rows: Rows, y: ArrayLike, space: Rows, **fixed: Any) -> VotingClassifier:
        voter = _copy_voter(self.voter, **fixed)
        if not isinstance(voter, PrivateKNeighborsClassifier):
            return voter.fit(rows, y, groups=self._groups["groups"])
        return voter.fit(rows, y, public=space, **self._groups)

    def export(self) -> PublicStudent:
        """Return the public part, which predicts as this one does. Publish its bytes; readers need nearveil."""
        check_is_fitted(self, "_public")
        return self._public

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of all rounds together. It follows from their caps."""
        return self.export().guarantee

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Classify rows or images. Costs nothing."""
        return self.export().predict(X)

    def _check_parameters(self) -> NDArray[np.float64]:
        """Return the shares; raise errors before anything is spent."""
        shares = np.full(self.rounds, 1 / self.rounds) if self.shares is None else np.asarray(self.shares, dtype=float)
        if not (shares.shape == (self.rounds,) and np.all(shares > 0) and abs(shares.sum() - 1) < 1e-9):
            raise ValueError("shares must hold a positive number for each round, and sum to 1")
        if self.voter is None:
            raise ValueError(
                "voter must be given, with an epsilon: PrivateKNeighborsClassifier(epsilon=2.0, max_answered=500, "
                "max_screened=0)"
            )
        if getattr(self.voter, "crowding", None) is not None:
            raise ValueError(
                "crowding of voter must be None: each round is one batch of queries, and would pay for a stream"
            )
        if getattr(self.voter, "votes", "classes") not in ("classes", "soft"):
            raise ValueError('voter must vote on classes: votes must be "classes" or "soft"')
        if not _is_row_exact(self.features):
            raise ValueError("features must be row-exact: functools.partial(extractor.extract, row_exact=True)")
        if self.rounds > 1 and not any(hasattr(self._make_student(0), name) for name in _FEATURE_METHODS):
            raise ValueError(f"student must have one of {', '.join(_FEATURE_METHODS)} for a second round")
        return shares

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle: of `voter` and `student` parameters alone."""
        state = dict(super().__getstate__())
        return state | {name: None if state[name] is None else clone(state[name]) for name in ("voter", "student")}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # every fit draws new noise
        return tags

    def _make_student(self, seed: int) -> Any:
        # The scores of pairs of classes are features; those of single classes are rounded to places.
        student = SVC(decision_function_shape="ovo") if self.student is None else clone(self.student)
        if student.get_params().get("random_state", 0) is None:
            student.set_params(random_state=seed)
        return student

    def _transform_rows(self, private: NDArray[Any], inputs: NDArray[Any]) -> tuple[Rows, Rows]:
        """Return private and public rows in the student's features, centred by the public ones."""
        # One by one: the last bits of a row's features may depend on the other rows of its batch.
        singles = (private[i : i + 1] for i in range(len(private)))
        rows = np.concatenate(
            [self._extract_learned(row if self._takes_images else normalize_rows(row)) for row in singles]
        )
        space = self._extract_learned(inputs)
        middle = space.mean(axis=0)
        return rows - middle, space - middle

    def _extract_learned(self, inputs: NDArray[Any]) -> Rows:
        method = next(name for name in _FEATURE_METHODS if hasattr(self.student_, name))
        rows = np.asarray(getattr(self.student_, method)(inputs), dtype=np.float64)
        return rows if rows.ndim == 2 else np.column_stack([rows, np.ones(len(rows))])  # two classes, one score

    def _train_on_answers(
        self, inputs: NDArray[Any], space: Rows, rounds: Sequence[tuple[NDArray[np.int64], Answers]], seed: int
    ) -> NDArray[Any]:
        """Spread the answers of all rounds over the public rows, train a student on them, and return their labels."""
        queried = np.concatenate([rows[answers.answered] for rows, answers in rounds])
        if not len(queried):
            raise ValueError("voter declined every public row: lower its threshold, or give max_screened=0")
        plan, links = self.plan_, build_graph(space)
        terms = [answers.forecast or VoteForecast(plan.n_neighbors, plan.vote_noise, 1, 1) for _, answers in rounds]
        shares = [_share_votes(answers, each.voters) for (_, answers), each in zip(rounds, terms, strict=True)]
        noise = max(each.noise / each.voters for each in terms)
        labels = self._spread_to_labels(links, regress_votes(space, queried, np.concatenate(shares), noise))
        self.student_ = self._train_student(inputs, labels, seed)
        for _ in range(self.self_training):
            predicted = self.student_.predict(inputs)[:, None] == self.classes_
            labels = self._spread_to_labels(links, predicted.astype(np.float64))
            self.student_ = self._train_student(inputs, labels, seed)
        return labels

    def _spread_to_labels(self, links: csr_array, scores: Rows) -> NDArray[Any]:
        return np.asarray(self.classes_[np.argmax(spread_labels(links, scores), axis=1)])

    def _train_student(self, inputs: NDArray[Any], labels: NDArray[Any], seed: int) -> Any:
        student = self._make_student(seed) if len(np.unique(labels)) > 1 else DummyClassifier(strategy="most_frequent")
        return student.fit(inputs, labels)


def _share_votes(answers: Answers, voters: float) -> Rows:
    """Return the shares of the votes; within a radius, more than the expected number of records may vote, or fewer."""
    votes = answers.votes[answers.answered]
    if answers.forecast is None:
        return votes / voters
    shares = votes / np.maximum(votes.sum(axis=1, keepdims=True), voters)
    return np.asarray(shares - shares.mean(axis=1, keepdims=True) + 1 / votes.shape[1])


def _copy_voter(voter: VotingClassifier | None, **fixed: Any) -> VotingClassifier:
    """Return a voter with the very source, ledger and account of another: a copied source would draw the same noise."""
    assert voter is not None
    return type(voter)(**{**voter.get_params(deep=False), **fixed})


def _is_row_exact(features: Features | None) -> bool:
    """Return False where features are an extractor's that sees rows in batches, however it is bound."""
    inner: Any = features
    keywords: dict[str, Any] = {}
    while isinstance(inner, partial):  # the outermost keywords win
        inner, keywords = inner.func, {**inner.keywords, **keywords}
    maker = getattr(inner, "__self__", None)
    return not isinstance(maker, Extractor) or maker.row_exact or keywords.get("row_exact") is True


def _find_caps(plan: VotePlan, share: float, done: Sequence[StudentRound], *, last: bool) -> dict[str, int]:
    """Return the caps of the next round; the last round gets all that remains."""
    # By individual accounting a query is paid for where it is declined, too.
    paid = (len(step.rows) if plan.individual else int(step.answers.answered.sum()) for step in done)
    caps = {"max_answered": plan.max_answered - sum(paid)}
    if plan.screening is not None:
        caps["max_screened"] = plan.max_screened - sum(len(step.rows) for step in done)
    if last:
        return caps
    return {name: min(left, math.ceil(share * getattr(plan, name))) for name, left in caps.items()}
