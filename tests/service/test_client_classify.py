"""Two-sided classification, as the client sees it: both promises, and the question without a question."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nearveil.retrieval import ClientProtocol, MapChanged, Query, Refusal, RefusalCode
from nearveil.retrieval._wire_schema import read
from nearveil.service import Client
from nearveil.service._client_errors import DeclinedError, QuestionError, UnansweredError
from nearveil.service._protected import ProtectedGallery
from tests.service.asking import Scene, Seen, Server, framed, is_post, new_account, public_of, seeded
from tests.service.protected import CLASSES, DIMENSION, SETS, TERMS, copied, gallery, make, rows

ROWS = rows(12, 7)[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made"))


@contextmanager
def protected(made: Path, folder: Path, **changed: Any) -> Iterator[Scene]:
    with ExitStack() as stack:
        held: ProtectedGallery = gallery(copied(made, folder), **changed)
        stack.callback(held.close)
        server = Server(folder / "tokens.db", held)
        stack.callback(server.close)
        account = stack.enter_context(new_account(folder / "budget.db"))
        yield Scene(held, server, account, stack)


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Iterator[Scene]:
    with protected(made, tmp_path) as found:
        yield found


def numbers(posts: list[Seen]) -> list[int]:
    """Return the sets that were named."""
    return [int(read(body, Query).message["sets"][0]) for *_, body in posts]


def test_both_promises_are_shown(here: Scene) -> None:
    client, wire = here.client()
    found = client.classify(ROWS[0], 3.0)
    assert set(found.votes) == set(CLASSES)
    assert found.label == max(found.votes, key=lambda name: found.votes[name])
    assert (found.query_guarantee.epsilon, found.query_guarantee.protects) == (3.0, "query")
    assert (found.gallery_promise.epsilon, found.gallery_promise.protects) == (TERMS["epsilon"], "database")
    assert str(found.query_guarantee) in str(found)
    assert found.gallery_promise.words in str(found)
    assert here.account.balance().left == 97.0
    assert [url.rsplit("/", 1)[1] for _, url, *_ in wire.requests] == ["galleries", "map", "classify"]
    assert read(wire.posts[0][3], Query).extras == "none"


def test_a_key_asks_again_for_nothing(here: Scene) -> None:
    client, wire = here.client()
    first, again = (client.classify(ROWS[0], key="mine") for _ in range(2))
    assert (first.repeated, again.repeated) == (False, True)
    assert (first.label, first.votes, first.key) == (again.label, again.votes, "mine")
    assert wire.posts[0] == wire.posts[1]
    assert here.paid == 1


def test_a_gallery_here_is_asked_with_the_same_words(here: Scene, tmp_path: Path) -> None:
    far = here.client()[0].classify(ROWS[0], rng=seeded())
    with new_account(tmp_path / "other.db") as account, Client(here.gallery, account=account) as near:
        same = near.classify(ROWS[0], rng=seeded())
    assert (far.label, far.votes, far.gallery_promise) == (same.label, same.votes, same.gallery_promise)


@pytest.mark.usefixtures("same_nonces")
def test_asking_for_every_set_tells_nothing_and_costs_nothing(here: Scene) -> None:
    asked = []
    public = public_of(here.gallery)
    for row in ROWS[:6]:
        client, wire = here.client(account=None)
        found = client.classify(row, 0, key="the same")
        asked.append(wire.requests)
        assert numbers(wire.posts) == list(range(SETS))
        assert found.query_guarantee.epsilon == found.query_guarantee.delta == 0
        assert "learns nothing about which record was asked for" in str(found.query_guarantee)
        # The answer is that of the set which suits the image: it is known at home alone.
        good = ClientProtocol(1.0, public=public).good_set(row)
        told = here.gallery.classify(wire.posts[good][3], "test")
        assert not isinstance(told, bytes)
        assert (found.label, found.votes) == (told.label, told.votes)
        assert not found.repeated
    assert all(requests == asked[0] for requests in asked)  # to the byte, for all images
    assert len({ClientProtocol(1.0, public=public).good_set(row) for row in ROWS[:6]}) > 1
    assert here.paid == 0


@pytest.mark.usefixtures("same_nonces")
def test_one_set_without_an_answer_is_the_end_for_every_image(here: Scene) -> None:
    """Were it the end only for those who need that set, whoever comes again would tell that they do."""
    said, sent = set(), set()
    for row in ROWS[:6]:

        def spent(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
            if is_post(request) and read(request.content, Query).message["sets"][0] == 2:
                return framed(b'{"code": "budget_spent", "message": "no more"}', 429, "application/json")
            return reply

        client, wire = here.client(spent, account=None)
        with pytest.raises(DeclinedError, match=r"429 budget_spent") as raised:
            client.classify(row, 0, key="the same")
        said.add(str(raised.value))
        sent.add(tuple(wire.requests))
    assert len(said) == len(sent) == 1


def test_a_gallery_whose_budget_is_spent(made: Path, tmp_path: Path) -> None:
    with protected(made, tmp_path, answers=1) as poor:
        client, wire = poor.client()
        public = public_of(poor.gallery)
        first = client.classify(ROWS[0], 30.0)
        other = next(row for row in ROWS if ClientProtocol(1.0, public=public).good_set(row) != numbers(wire.posts)[0])
        with pytest.raises(
            UnansweredError, match=r"429 budget_spent.*Waiting does not help.*It was paid for"
        ) as raised:
            client.classify(other, 30.0)
        assert len(wire.posts) == 2  # time does not bring a budget back: it is not tried again
        assert not raised.value.again
        again = client.classify(ROWS[0], 30.0)  # what was answered once is answered always
        assert (again.label, again.votes) == (first.label, first.votes)


def test_what_is_wrong_is_said_before_anything_is_paid(here: Scene) -> None:
    client, wire = here.client()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"epsilon": -1.0}, "epsilon must be"),
        ({"epsilon": math.nan}, "epsilon must be"),
        ({"epsilon": 1e-9}, "epsilon must be"),
        ({"epsilon": False}, "epsilon must be"),
        ({"epsilon": "0"}, "epsilon must be"),
        ({"image": np.zeros(3)}, f"{DIMENSION} numbers"),
        ({"image": np.full(DIMENSION, np.nan)}, "finite"),
        ({"image": np.full(DIMENSION, np.nan), "epsilon": 0}, "finite"),
        ({"gallery": "birds"}, "none named 'birds'"),
        ({"key": "\n"}, "key must be"),
    ]
    for changed, words in cases:
        with pytest.raises(ValueError, match=words):
            client.classify(**({"image": ROWS[0]} | changed))
    with pytest.raises(QuestionError, match="scans: it is protected, and shows no candidates"):
        client.nearest(ROWS[0], gallery="scans")
    with pytest.raises(QuestionError, match="none is open"):
        client.nearest(ROWS[0])
    without, _ = here.client(account=None)
    with pytest.raises(QuestionError, match="account: somebody must pay"):
        without.classify(ROWS[0])
    assert wire.posts == []
    assert here.paid == 0


GOOD = {
    "label": "benign",
    "votes": {"benign": 3.5, "malignant": 1.0},
    "promise": {
        "epsilon": 1.0,
        "delta": 1e-6,
        "protects": "database",
        "unit": "record",
        "sound": True,
        "words": "A promise.",
    },
}


@pytest.fixture(scope="module")
def kept(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with protected(made, tmp_path_factory.mktemp("kept")) as found:
        yield found


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (json.dumps(GOOD | {"label": "other"}).encode(), "label without votes"),
        (json.dumps(GOOD | {"votes": {"benign": float("inf")}}).encode(), "no numbers|not what"),
        (json.dumps(GOOD | {"votes": {"benign": float("nan")}}).encode(), "no numbers|not what"),
        (json.dumps(GOOD | {"votes": {"benign": 1, "\x1b": 1}}).encode(), "does not print"),
        (json.dumps(GOOD | {"votes": []}).encode(), "not what a nearveil server sends"),
        (json.dumps(GOOD | {"votes": dict.fromkeys(map(str, range(10_001)), 1)}).encode(), "not what a nearveil"),
        (json.dumps(GOOD | {"votes": {"benign": 1, "x" * 1001: 1}}).encode(), "not what a nearveil server sends"),
        (json.dumps(GOOD | {"promise": GOOD["promise"] | {"protects": "query"}}).encode(), "not to its records"),  # type: ignore[operator]
        (json.dumps(GOOD | {"promise": None}).encode(), "not what a nearveil server sends"),
        (b"[" * 70_000, "not what a nearveil server sends"),
        (MapChanged("scans", 3).to_bytes(), "of no more use"),
        (Refusal(RefusalCode.FAILED, "no disk").to_bytes(), "no disk"),
        (b"NVW", "not of the nearveil protocol"),
    ],
)
def test_votes_of_bad_will(kept: Scene, reply: bytes, words: str) -> None:
    frame = reply.startswith(b"NVW")

    def hostile(request: httpx.Request, honest: httpx.Response) -> httpx.Response:
        if not is_post(request):
            return honest
        return framed(reply, 409) if frame else framed(reply, 200, "application/json")

    client, wire = kept.client(hostile)
    said = set()
    for row in ROWS[:3]:
        with pytest.raises(UnansweredError, match=words) as raised:
            client.classify(row, 0.5)
        said.add(raised.value.reason)
    assert len(said) == 1
    assert len(wire.posts) == 3
    with pytest.raises(ValueError, match=words.replace("of no more use", "has changed")):
        client.classify(ROWS[0], 0)
