import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import nearveil.gallery
import nearveil.wire
import nearveil.wire.client
from nearveil.gallery.answers import EXTRAS, Answer, Extras
from nearveil.ledger import KeySpentError, Ledger, OverBudgetError
from nearveil.mechanisms import Covers, Message, PublicMap
from nearveil.metrics import ScoreSpace
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import unsafe_seeded
from nearveil.wire.client import OutdatedMapError, ProtocolError, RefusedError, encode_queries
from nearveil.wire.frames import HEADER_BYTES, Kind, WireError
from nearveil.wire.messages import MapChanged, PublicPart, Query, Refusal, RefusalCode, decode_frame, write_query
from nearveil.wire.server import ServerProtocol, _refuse
from tests.wire.wiring import (
    DIMENSION,
    EPSILON,
    GALLERY,
    QUERIES,
    THUMBNAIL,
    PaidDebit,
    Purse,
    Shelf,
    ask,
    choose,
    part,
    published,
    ready,
)


def conversation(
    gallery: Shelf, feature: Any, extras: Extras = "none", k: int = 8, epsilon: float = EPSILON
) -> tuple[NDArray[np.int64], NDArray[np.float32], Answer, Query]:
    client = ready(epsilon, gallery.make_public_part())
    query = ask(client, feature, extras=extras, rng=unsafe_seeded(1))
    assert decode_frame(query, Query).message.seeded
    reply = ServerProtocol(gallery).answer(query)
    return *choose(client, feature, reply, k, extras), decode_frame(query, Query)


@pytest.mark.parametrize("code_bytes", [None, 12, 16])
@pytest.mark.parametrize("extras", EXTRAS)
def test_a_question_from_end_to_end(code_bytes: int | None, extras: Extras) -> None:
    gallery = published(code_bytes)
    for feature in QUERIES[:6]:
        ids, similarities, answer, query = conversation(gallery, feature, extras)
        named = int(query.message["sets"][0])
        members = np.flatnonzero(gallery.published.release.members_[[named]].toarray()[0])
        assert answer.ids.tolist() == sorted(gallery.published.ids[members].tolist())
        assert len(ids) == 8
        scores = gallery.published.table.scores(
            encode_queries(gallery.make_public_part(), feature).queries, gallery.published.codes
        )[0]
        rows = [int(np.flatnonzero(gallery.published.ids == number)[0]) for number in ids]
        assert np.abs(scores[rows] - np.sort(scores[members])[::-1][:8]).max() < 1e-5  # the best of them, best first
        assert np.abs(similarities - scores[rows]).max() < 1e-6
        shown = [] if extras == "none" else gallery.read_extras(answer.ids, extras, 1 << 20)
        assert list(answer.contents) == shown


def test_both_halves_agree_without_sharing_the_public_rows() -> None:
    honest = published()
    client = Covers(EPSILON, 0.2).fit_space(part().space, part().public_digest).use_map(part().map)
    assert client.public_id == honest.published.release.public_id
    message = decode_frame(ask(ready(EPSILON, part()), QUERIES[0], rng=unsafe_seeded(2)), Query).message
    assert message == client.release(QUERIES[0], rng=unsafe_seeded(2))  # the client makes it without an estimator
    assert ready(EPSILON, part()).guarantee == client.guarantee
    assert client.release(QUERIES, rng=unsafe_seeded(2)) == honest.published.release.release(
        QUERIES, rng=unsafe_seeded(2)
    )
    other = ScoreSpace("cosine", part().space.mean + 1)
    from_space = Covers(EPSILON, 0.2).fit_space(other)
    again = Covers(EPSILON, 0.2).fit_space(other, from_space.public_digest)
    assert from_space.public_digest == again.public_digest != honest.published.release.public_digest
    with pytest.raises(ValueError, match="finite"):
        Covers(EPSILON).fit_space(ScoreSpace("cosine", np.array([np.nan, 1.0])))


def test_epsilon_is_the_clients_and_the_server_answers_at_any() -> None:
    server = ServerProtocol(published())
    for epsilon in (0.1, 7.5):
        purse, client = Purse(), ready(epsilon)
        ids, _, _ = choose(client, QUERIES[0], server.answer(ask(client, QUERIES[0], purse)))
        assert len(ids) == 8
        assert [promise.epsilon for promise in purse.paid] == [epsilon] == [client.guarantee.epsilon]
    for wrong in (0.0, 41.0, np.nan, "2", True):
        with pytest.raises(ValueError, match="epsilon must be"):
            ready(wrong)  # type: ignore[arg-type]


def test_every_answer_has_one_form() -> None:
    server, release = ServerProtocol(published()), published().published.release
    for extras in EXTRAS:
        answers = [
            decode_frame(
                server.answer(
                    Query(Message("covers", release.public_id, {"sets": np.array([one], np.int32)}), extras).to_bytes()
                ),
                Answer,
            )
            for one in range(6)
        ]
        assert {len(answer.ids) for answer in answers} == {40}
        assert len({answer.ids.tobytes() for answer in answers}) > 1
        assert all((np.diff(answer.ids.astype(int)) > 0).all() for answer in answers)
        if extras not in ("originals", "names", "metadata"):
            assert len({answer.nbytes for answer in answers}) == 1


def test_deleted_items_are_replaced_and_never_handed_out() -> None:
    whole = published()
    dead = whole.published.ids[::3]
    for feature in QUERIES[:5]:
        _, _, answer, _ = conversation(replace(whole, alive=~np.isin(whole.published.ids, dead)), feature)
        assert len(answer.ids) == 40
        assert not set(answer.ids.tolist()) & set(dead.tolist())
    few = ServerProtocol(replace(whole, alive=np.arange(len(GALLERY)) < 39))
    with pytest.raises(RefusedError, match="failed"):
        ready().read_answer(few.answer(ask(ready(), QUERIES[0])))


def test_fresh_questions_differ() -> None:
    """Two clients that ask the same draw their own noise."""
    client = ready(0.5)
    drawn = {ask(client, QUERIES[0]) for _ in range(60)}
    assert len(drawn) == 6  # all sets are named, sooner or later: (1 - 0.15)^60 is 6e-5 for each


def test_the_debit_comes_before_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    choose = PublicMap.choose

    def record_choice(self: PublicMap, *arguments: Any) -> Any:
        events.append("message")
        return choose(self, *arguments)

    class Debit(PaidDebit):
        def store(self, message: bytes, /) -> None:
            events.append(f"stored {Message.from_bytes(message).mechanism}")
            super().store(message)

        def __exit__(self, *_: object) -> None:
            events.append("closed")

    class Account:
        def spend(self, guarantee: Guarantee, key: str, /) -> Debit:
            events.append(f"paid {guarantee.epsilon} for {key}")
            return Debit()

    monkeypatch.setattr(PublicMap, "choose", record_choice)
    ready().pay(QUERIES[0], Account(), "one")
    assert events == ["paid 2.0 for one", "message", "stored covers", "closed"]

    class Broke:
        def spend(self, guarantee: Guarantee, key: str, /) -> Debit:  # noqa: ARG002
            raise OverBudgetError("no", epsilon=1.0, spent=1.0, cost=2.0, left=0.0)

    events.clear()
    with pytest.raises(OverBudgetError):
        ready().pay(QUERIES[0], Broke(), "one")
    assert events == []


def test_questions_on_different_maps_add_up_in_one_account(tmp_path: Path) -> None:
    other = published(n_sets=4).make_public_part()
    with Ledger(tmp_path / "budget.db") as ledger:
        account = ledger.open_account(
            "me", owner="me", protects="query", unit="record", relation="replace", epsilon=4.5, delta=0.0
        )
        first = ready(2.0).pay(QUERIES[0], account, "one")
        ready(2.0, other).pay(QUERIES[0], account, "two")
        assert account.balance().left == 0.5
        with pytest.raises(OverBudgetError):
            ready(2.0, other).pay(QUERIES[0], account, "three")
        assert account.balance().left == 0.5
        # A process that died after it paid, and came back, sends what it would have sent.
        again = ready(2.0).pay(QUERIES[0], account, "one")
        assert (again.repeated, again.message) == (True, first.message)
        with pytest.raises(OutdatedMapError):
            ready(2.0, other).pay(QUERIES[0], account, "one")
        assert account.balance().left == 0.5
        with account.spend(ready(0.5).guarantee, "lost"):
            pass  # died before the message was stored
        with pytest.raises(KeySpentError):
            ready(0.5).pay(QUERIES[0], account, "lost")


def test_a_map_that_changed_is_told_and_an_old_one_is_answered_with_its_old_sets() -> None:
    old, new = published(), published(n_sets=4)
    new = replace(new, published=replace(new.published, revision=9))
    query = ask(ready(), QUERIES[0], rng=unsafe_seeded(3))
    reply = ServerProtocol(new).answer(query)
    assert decode_frame(reply, MapChanged) == MapChanged("birds", 9)
    with pytest.raises(OutdatedMapError, match="revision 9") as caught:
        ready().read_answer(reply)
    assert caught.value.revision == 9
    assert ServerProtocol(new, old).answer(query) == ServerProtocol(old).answer(query)


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (np.full(DIMENSION, np.nan), "feature must be finite"),
        (np.full(DIMENSION, np.inf), "feature must be finite"),
        (np.full(DIMENSION, 2e6), "feature must be finite"),
        (np.ones(DIMENSION + 1), "feature must be one row of 6"),
        (np.ones((1, DIMENSION)), "feature must be one row of 6"),
        (["a"] * DIMENSION, "feature must be an array of real numbers"),
    ],
)
def test_bad_features_cost_nothing_and_are_not_shown(feature: Any, words: str) -> None:
    purse = Purse()
    with pytest.raises(ValueError, match=words) as caught:
        ask(ready(), feature, purse)
    assert not purse.paid
    assert "2000000" not in str(caught.value)


def test_what_cannot_be_answered_is_refused_before_it_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError, match="mechanism must be covers, "):
        decode_frame(replace(part(), mechanism="plain").to_bytes(), PublicPart)
    monkeypatch.setattr(Kind.ANSWER, "limit", 1100)
    with pytest.raises(ProtocolError, match="limit is 1100"):
        ready()
    monkeypatch.setattr(Kind.ANSWER, "limit", 8 + 40 * 28)
    ready()


@pytest.mark.parametrize("k", [0, 41, -1, True, 2.0, "8"])
def test_an_absurd_k_loses_no_answer(k: Any) -> None:
    reply = ServerProtocol(published()).answer(ask(ready(), QUERIES[0]))
    with pytest.raises(ValueError, match=r"k must be|at least k = 41"):
        choose(ready(), QUERIES[0], reply, k)
    assert len(choose(ready(), QUERIES[0], reply, 40)[0]) == 40


@dataclass(frozen=True, eq=False)
class Showing(Shelf):
    """Shows what it is told to show."""

    shown: Any = None

    def read_extras(self, ids: NDArray[np.uint32], kind: Extras, most: int) -> list[bytes]:  # noqa: ARG002
        if isinstance(self.shown, Exception):
            raise self.shown
        return list(self.shown)


def showing(shown: Any) -> Showing:
    honest = published()
    return Showing(**{one.name: getattr(honest, one.name) for one in fields(honest)}, shown=shown)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerProtocol(showing(OSError("the disk at /secret/place is gone")))

    def refusal(data: bytes) -> Refusal:
        reply: Refusal = decode_frame(server.answer(data), Refusal)
        return reply

    query = ask(ready(), QUERIES[0])
    assert isinstance(decode_frame(server.answer(query), Answer), Answer)
    images = ask(ready(), QUERIES[0], extras="originals")
    assert refusal(images) == Refusal(RefusalCode.FAILED, "the server could not make an answer")
    assert refusal(query[:-1]).code == RefusalCode.MALFORMED
    assert refusal(query[:3] + b"\x07" + query[4:]).code == RefusalCode.VERSION
    assert refusal(query[:6] + b"\xff\xff\xff\xff" + query[10:]).code == RefusalCode.TOO_LARGE
    long = Message("a\x1b" * 90, published().published.release.public_id, {"sets": np.array([1], np.int32)})
    assert refusal(Query(long).to_bytes()).code == RefusalCode.MALFORMED
    assert refusal(decode_frame(query, Query).message.to_bytes()).code == RefusalCode.MALFORMED
    assert decode_frame(_refuse(ValueError("a\x1b[2J\n" * 400)), Refusal).words == ("a?[2J?" * 400)[:500]
    poor = ServerProtocol(replace(published(), offers=()))
    assert decode_frame(poor.answer(images), Refusal).code == RefusalCode.NOT_OFFERED
    monkeypatch.setattr(Kind.ANSWER, "limit", 8 + 40 * 28)
    narrow = ServerProtocol(published())
    assert decode_frame(narrow.answer(images), Refusal).code == RefusalCode.TOO_LARGE
    with pytest.raises(RefusedError, match=r"refused \(too_large\)") as caught:
        ready().read_answer(narrow.answer(images))
    assert caught.value.code == RefusalCode.TOO_LARGE


def test_a_thumbnail_that_is_none_is_the_servers_fault() -> None:
    query = ask(ready(), QUERIES[0], extras="thumbnails")
    for images in ([b"GIF89a"] * 40, [b""] * 39):
        assert decode_frame(ServerProtocol(showing(images)).answer(query), Refusal).code == RefusalCode.FAILED


def test_the_answer_does_not_depend_on_what_was_asked_before() -> None:
    server = ServerProtocol(published())
    queries = [ask(ready(), feature, extras="thumbnails") for feature in QUERIES[:5]]
    before = [server.answer(data) for data in queries]
    assert [server.answer(data) for data in reversed(queries)] == before[::-1]


_FRESH = """
import sys
import nearveil.wire.client
from nearveil.wire import ClientProtocol
assert ClientProtocol is nearveil.wire.client.ClientProtocol
assert "sqlalchemy" not in sys.modules
inside = [name.split(".")[1:] for name in sys.modules if name.startswith("nearveil.")]
print(*sorted(name[1] for name in inside if name[0] in ("gallery", "wire") and len(name) > 1))
print(*sorted({name[0] for name in inside}))
"""


def test_the_clients_half_imports_nothing_of_the_servers_or_of_an_index() -> None:
    shown = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True).stdout  # noqa: S603
    own, rooms = (line.split() for line in shown.splitlines())
    assert set(own) == {"answers", "client", "codes", "frames", "messages"}
    assert not {"ledger", "private_knn", "client", "server", "cli", "features"} & set(rooms)


@pytest.mark.parametrize("room", [nearveil.gallery, nearveil.wire])
def test_every_name_of_a_room_is_found_where_it_is_said_to_be(room: Any) -> None:
    assert all(getattr(room, name) is not None for name in room.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        room.Nothing  # noqa: B018


@pytest.mark.parametrize("message", [None, b"", b"something else"])
def test_a_debit_whose_message_was_lost_is_told_so(message: bytes | None) -> None:
    class Account:
        def spend(self, guarantee: Guarantee, key: str, /) -> PaidDebit:  # noqa: ARG002
            return PaidDebit(repeated=True, message=message)

    with pytest.raises(ProtocolError, match="use a new key"):
        ready().pay(QUERIES[0], Account(), "one")


def test_bytes_of_a_thumbnail_answer_are_what_they_should_be() -> None:
    answer = decode_frame(ServerProtocol(published()).answer(ask(ready(), QUERIES[0], extras="thumbnails")), Answer)
    assert answer.nbytes == HEADER_BYTES + 8 + 40 * (4 + 4 * DIMENSION + 4 + len(THUMBNAIL) + 4)


def test_answers_to_another_question_are_refused() -> None:
    plain = ServerProtocol(published()).answer(ask(ready(), QUERIES[0]))
    with pytest.raises(WireError, match="must have thumbnails as extras; it has none"):
        ready().read_answer(plain, "thumbnails")
    with pytest.raises(WireError, match="not expected here"):
        ready().read_answer(ask(ready(), QUERIES[0]))


def test_one_message_is_asked_with_images_and_with_names() -> None:
    server, client = ServerProtocol(published()), ready()
    message = client.pay(QUERIES[0], Purse(), "one").message
    assert message is not None
    pictures, names = (
        client.read_answer(server.answer(write_query(message, extras)), extras) for extras in ("thumbnails", "names")
    )
    assert (pictures.ids == names.ids).all()
    assert pictures.contents == tuple(THUMBNAIL + int(number).to_bytes(4, "little") for number in pictures.ids)
    assert names.contents == tuple(b"bird %d.png" % number for number in names.ids)


def test_a_client_keeps_its_epsilon() -> None:
    half = ready(4.0)
    with pytest.raises(AttributeError):
        half.epsilon = 0.01  # type: ignore[misc]
    assert half.guarantee.epsilon == half.epsilon == 4.0
