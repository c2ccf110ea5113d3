import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError

from nearveil.gallery.publishing import select_first
from nearveil.mechanisms import Message, MessageError
from nearveil.privacy.noise import unsafe_seeded
from nearveil.privatemail import PrivateMail
from nearveil.search import Retriever
from nearveil.wire.client import rank_candidates
from nearveil.wire.frames import WireError
from studies.baselines import Cells
from tests.search.standins import Plain, RandomCells, clustered

PUBLIC, _ = clustered(1, 80)
GALLERY, LABELS = clustered(2, 400)
QUERIES, _ = clustered(3, 60)


def plain(candidates: float = 0.25, **options: Any) -> Retriever:
    return Retriever(Plain(), candidates, **options).fit(PUBLIC).index(GALLERY, LABELS)


def cosines(queries: Any) -> Any:
    a, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, GALLERY))
    return a @ b.T


@pytest.mark.parametrize("code_bytes", [None, 128])
def test_a_message_that_tells_all_finds_all_in_order(code_bytes: int | None) -> None:
    truth = np.argsort(-cosines(QUERIES), axis=1)[:, :8]
    found = plain(code_bytes=code_bytes).nearest(QUERIES, 8)
    assert found.shape == (60, 8)
    assert (found == truth).mean() > 0.98
    assert np.array_equal(plain(code_bytes=code_bytes).nearest(QUERIES[5], 3), found[5, :3])


def test_cells_answer_with_the_set_that_was_named_and_choose_within_it() -> None:
    retriever = Retriever(RandomCells(1.0, 0.1), code_bytes=None).fit(PUBLIC).index(GALLERY)
    mechanism: Any = retriever.mechanism
    assert retriever.candidates == 0.1
    chosen, sizes, answers = retriever.search(QUERIES, 5, rng=unsafe_seeded(4))
    scores = cosines(QUERIES)
    messages = mechanism.release(QUERIES, rng=unsafe_seeded(4))
    assert sizes == [message.nbytes for message in messages]
    for row, (message, answer) in enumerate(zip(messages, answers, strict=True)):
        members = np.sort(mechanism.members_[int(message["cell"])])
        assert answer.ids.tolist() == members.tolist()
        best = members[np.argsort(-scores[row, members])[:5]]
        assert np.abs(scores[row, chosen[row]] - scores[row, best]).max() < 1e-3


def test_seeds_repeat_and_are_passed_through() -> None:
    retriever = Retriever(RandomCells(0.5, 0.1)).fit(PUBLIC).index(GALLERY)
    first_time, again, other = (retriever.nearest(QUERIES, 4, rng=unsafe_seeded(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first_time, again)
    assert not np.array_equal(first_time, other)


def test_guarantee_is_the_mechanisms() -> None:
    assert Retriever(RandomCells(0.5, 0.1)).fit(PUBLIC).index(GALLERY).guarantee.epsilon == 0.5


def test_equal_messages_share_an_answer_of_the_same_size_as_all_others() -> None:
    retriever = Retriever(RandomCells(0.5, 0.1)).fit(PUBLIC).index(GALLERY)
    _, _, answers = retriever.search(QUERIES, 4, rng=unsafe_seeded(1))
    assert len({id(answer) for answer in answers}) <= 10
    assert {answer.nbytes for answer in answers} == {22 + 40 * (4 + 18)}  # codes of 18 bytes keep enough


def test_the_answer_depends_on_the_message_alone() -> None:
    retriever = plain()
    message = retriever.mechanism.release(QUERIES[0])
    server = retriever._indexed()
    one, two = server.answers([message])[0], server.answers([Message.from_bytes(message.to_bytes())])[0]
    assert one.to_bytes() == two.to_bytes()
    with pytest.raises(MessageError):
        server.answers([Message("plain", "0" * 32, message.arrays)])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.data())
def test_first_takes_the_highest_and_breaks_ties_by_position(scores: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores)))
    expected = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])
    assert select_first(np.array(scores, dtype=float), count).tolist() == expected


def test_client_checks_what_comes_back() -> None:
    narrow, wide = plain(code_bytes=8), plain(code_bytes=128)
    _, _, answers = narrow.search(QUERIES[:1], 2)
    with pytest.raises(WireError, match="fetch the public part"):
        rank_candidates(wide.codes, QUERIES[:1], answers, 2)
    with pytest.raises(WireError, match="at least k"):
        rank_candidates(narrow.codes, QUERIES[:1], answers, 101)
    with pytest.raises(ValueError, match="answers must be 2"):
        rank_candidates(wide.codes, QUERIES[:2], answers, 2)
    whole = plain(code_bytes=None)
    _, _, (answer,) = whole.search(QUERIES[:1], 2)
    broken = type(answer)(answer.ids, np.full_like(answer.codes, 255))  # NaN, all of them
    chosen, _ = rank_candidates(whole.codes, QUERIES[:1], [broken], 2)
    assert np.isin(chosen, answer.ids).all()  # to stop might tell about the query


def test_fractions_must_agree() -> None:
    with pytest.raises(ValueError, match=r"agree with the mechanism's own, 0\.1"):
        Retriever(RandomCells(1.0, 0.1), candidates=0.2)
    with pytest.raises(ValueError, match="candidates must be given"):
        Retriever(Plain())
    assert Retriever(RandomCells(1.0, 0.1), candidates=0.1).candidates == 0.1


@pytest.mark.parametrize("candidates", [0.0, -1.0, 1.5, float("nan"), "a", True])
def test_absurd_fractions(candidates: Any) -> None:
    with pytest.raises(ValueError, match="candidates must be a fraction"):
        Retriever(Plain(), candidates)


@pytest.mark.parametrize("k", [0, -1, 101, 2.0, True, "8"])
def test_absurd_k_is_refused_before_anything_is_spent(k: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = plain()
    monkeypatch.setattr(Plain, "release", lambda *_, **__: pytest.fail("a message was made"))
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 100"):
        retriever.nearest(QUERIES[0], k)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.full(16, np.nan), "X must be finite"),
        (np.ones(3), "X must have 16 columns"),
        (np.zeros((0, 16)), "X must have at least one row"),
        (np.zeros((2, 2, 16)), "X must have rows and columns"),
        (PUBLIC.mean(axis=0), "equals the public mean"),
    ],
)
def test_bad_queries(x: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plain().nearest(x)


def test_bad_galleries() -> None:
    retriever = Retriever(Plain(), 0.25).fit(PUBLIC)
    for gallery, words in (
        (np.zeros((0, 16)), "gallery must have at least one row"),
        (np.ones((5, 3)), "gallery must have 16 columns"),
        (np.full((5, 16), np.inf), "gallery must be finite"),
        (GALLERY[:3], "candidates must be at least 1/3"),
    ):
        with pytest.raises(ValueError, match=words):
            retriever.index(gallery)
    with pytest.raises(ValueError, match="gallery_y must hold"):
        retriever.index(GALLERY, LABELS[:5])


def test_order_of_the_steps() -> None:
    retriever = Retriever(Plain(), 0.25)
    with pytest.raises(NotFittedError, match=r"fit\(public_X\)"):
        retriever.index(GALLERY)
    with pytest.raises(NotFittedError, match=r"call index\(gallery\)"):
        retriever.fit(PUBLIC).nearest(QUERIES[0])
    retriever.index(GALLERY).fit(PUBLIC[:40])
    with pytest.raises(NotFittedError, match=r"call index\(gallery\)"):
        retriever.nearest(QUERIES[0])


def test_a_mechanism_given_to_two_retrievers_serves_both() -> None:
    mechanism = Cells(8.0, 0.1)
    first_one = Retriever(mechanism).fit(PUBLIC).index(GALLERY)
    before = first_one.nearest(QUERIES, 8, rng=unsafe_seeded(0))
    Retriever(mechanism).fit(QUERIES).index(PUBLIC)
    assert np.array_equal(first_one.nearest(QUERIES, 8, rng=unsafe_seeded(0)), before)
    assert not hasattr(mechanism, "mean_")


def test_the_guarantee_is_that_of_the_mechanism_that_asks() -> None:
    retriever = Retriever(Cells(8.0, 0.1)).fit(PUBLIC).index(GALLERY)
    with pytest.raises(AttributeError):
        retriever.mechanism = Cells(0.01, 0.1).fit(PUBLIC)  # type: ignore[misc]
    with pytest.raises(AttributeError, match="cannot change"):
        retriever.mechanism.set_params(epsilon=0.01)
    assert retriever.guarantee.epsilon == 8.0


def test_dummies_are_not_dropped_in_silence() -> None:
    hidden = PrivateMail(4.0).fit(PUBLIC).with_dummies(QUERIES, np.arange(60) % 5)
    with pytest.raises(ValueError, match="must not have dummies"):
        Retriever(hidden, 0.1)
    for nothing in ("covers", Cells, None):
        with pytest.raises(ValueError, match="mechanism must be a release"):
            Retriever(nothing, 0.1)  # type: ignore[arg-type]


def test_a_hostile_table_cannot_make_the_client_stop_for_some_queries() -> None:
    retriever = plain(code_bytes=128)
    codes = copy.deepcopy(retriever.codes)
    codes.steps[:] = 3e38  # type: ignore[attr-defined]
    _, _, answers = retriever.search(QUERIES, 8)
    chosen, _ = rank_candidates(codes, QUERIES, answers, 8)
    assert chosen.shape == (60, 8)
