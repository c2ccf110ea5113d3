import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import nearveil.gallery
import nearveil.wire
from nearveil.gallery.answers import EXTRAS, Answer, Extras
from nearveil.ledger import KeySpentError, Ledger, OverBudgetError
from nearveil.mechanisms import Covers, Message
from nearveil.privacy.noise import unsafe_seeded
from nearveil.wire.client import (
    ClientProtocol,
    MapChanged,
    OutdatedMapError,
    ProtocolError,
    PublicPart,
    Query,
    Refusal,
    RefusalCode,
    RefusedError,
    decode_frame,
)
from nearveil.wire.frames import HEADER_BYTES, Limits, WireError
from nearveil.wire.server import ServerProtocol, _refusal
from tests.wire.wiring import (
    DIMENSION,
    EPSILON,
    GALLERY,
    PUBLIC,
    QUERIES,
    THUMBNAIL,
    Purse,
    Shelf,
    part,
    published,
    ready,
)


def conversation(
    server: ServerProtocol, feature: Any, extras: Extras = "none", k: int = 8, epsilon: float = EPSILON
) -> Any:
    client = ClientProtocol(epsilon)
    client.take_public(server.reply(client.public_request()))
    asked = client.ask(feature, spend=Purse(), extras=extras, rng=unsafe_seeded(1))
    assert not client.guarantee.sound
    return client.take_answer(server.reply(asked), k), decode_frame(asked, Query)


@pytest.mark.parametrize("code_bytes", [None, 12, 16])
@pytest.mark.parametrize("extras", EXTRAS)
def test_a_question_from_end_to_end(code_bytes: int | None, extras: Extras) -> None:
    gallery = published(code_bytes)
    server = ServerProtocol(gallery)
    for feature in QUERIES[:6]:
        found, query = conversation(server, feature, extras)
        named = int(query.message["sets"][0])
        members = np.flatnonzero(gallery.published.release.members_[[named]].toarray()[0])
        assert found.answer.ids.tolist() == sorted(gallery.published.ids[members].tolist())
        assert len(found.ids) == 8
        scores = gallery.published.table.scores(
            gallery.published.release.features(feature[None]).astype(np.float32), gallery.published.codes
        )[0]
        rows = [int(np.flatnonzero(gallery.published.ids == one)[0]) for one in found.ids]
        assert np.abs(scores[rows] - np.sort(scores[members])[::-1][:8]).max() < 1e-5  # the best of them, best first
        assert np.array_equal(found.codes, gallery.published.codes[rows])
        assert np.abs(found.scores - scores[rows]).max() < 1e-6
        shown = [] if extras == "none" else gallery.read_extras(found.ids.astype(np.uint32), extras, 1 << 20)
        assert list(found.images) == shown


def test_both_halves_agree_without_sharing_the_public_rows() -> None:
    honest = published()
    client = Covers(EPSILON, 0.2).fit_mean(part().mean, part().public_digest).use_map(part().map)
    assert client.public_id == honest.published.release.public_id
    assert client.release(QUERIES, rng=unsafe_seeded(2)) == honest.published.release.release(
        QUERIES, rng=unsafe_seeded(2)
    )
    from_mean = Covers(EPSILON, 0.2).fit_mean(part().mean)
    again = Covers(EPSILON, 0.2).fit_mean(part().mean.tolist(), from_mean.public_digest)
    assert from_mean.public_digest == again.public_digest != honest.published.release.public_digest
    with pytest.raises(ValueError, match="mean must be one row"):
        Covers(EPSILON).fit_mean(PUBLIC)
    with pytest.raises(ValueError, match="finite"):
        Covers(EPSILON).fit_mean([np.nan, 1.0])


def test_epsilon_is_the_clients_and_the_server_answers_at_any() -> None:
    server = ServerProtocol(published())
    for epsilon in (0.1, 7.5):
        purse, client = Purse(), ClientProtocol(epsilon, public=part())
        found = client.take_answer(server.reply(client.ask(QUERIES[0], spend=purse)))
        assert len(found.ids) == 8
        assert [promise.epsilon for promise in purse.paid] == [epsilon] == [client.guarantee.epsilon]
    for wrong in (0.0, 41.0, np.nan, "2", True):
        with pytest.raises(ValueError, match="epsilon must be"):
            ClientProtocol(wrong)  # type: ignore[arg-type]


def test_every_answer_has_one_form() -> None:
    server, release = ServerProtocol(published()), published().published.release
    for extras in EXTRAS:
        answers = [
            decode_frame(
                server.reply(
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
    server = ServerProtocol(replace(whole, alive=~np.isin(whole.published.ids, dead)))
    for feature in QUERIES[:5]:
        found, _ = conversation(server, feature)
        assert len(found.answer.ids) == 40
        assert not set(found.answer.ids.tolist()) & set(dead.tolist())
    few = ServerProtocol(replace(whole, alive=np.arange(len(GALLERY)) < 39))
    client = ready()
    with pytest.raises(RefusedError, match="failed"):
        client.take_answer(few.reply(client.ask(QUERIES[0], spend=Purse())))


def test_steps_out_of_turn_are_errors() -> None:
    server = ServerProtocol(published())
    client = ClientProtocol(EPSILON)
    for early in (
        lambda: client.ask(QUERIES[0], spend=Purse()),
        lambda: client.take_answer(b""),
        lambda: client.public,
        lambda: client.n_candidates,
    ):
        with pytest.raises(ProtocolError):
            early()
    reply = server.reply(client.public_request())
    assert client.take_public(reply) is client.public
    assert (client.state, client.n_candidates) == ("ready", 40)
    for repeated in (client.public_request, lambda: client.take_public(reply), lambda: client.take_answer(b"")):
        with pytest.raises(ProtocolError, match="state 'ready'"):
            repeated()
    asked = client.ask(QUERIES[0], spend=Purse())
    assert client.state == "asked"
    client.take_answer(server.reply(asked), 3)
    assert vars(client)["_state"] == "answered"


def test_after_an_answer_nothing_can_be_sent() -> None:
    server, client, purse = ServerProtocol(published()), ready(), Purse()
    answer = server.reply(client.ask(QUERIES[0], spend=purse))
    client.take_answer(answer)
    for step in (
        client.public_request,
        lambda: client.take_public(b""),
        lambda: client.ask(QUERIES[0], spend=purse),
        lambda: client.ask(QUERIES[1], spend=purse, extras="thumbnails"),
        lambda: client.take_answer(answer),
    ):
        with pytest.raises(ProtocolError, match="after an answer nothing is sent"):
            step()
    assert len(purse.paid) == 1
    kept = [value for value in vars(client).values() if isinstance(value, np.ndarray)]
    assert not kept  # the feature is forgotten
    assert client.public is part()


def test_a_retry_sends_the_same_bytes_and_pays_nothing() -> None:
    client, purse = ready(), Purse()
    first = client.ask(QUERIES[0], spend=purse)
    assert {client.ask(QUERIES[0].tolist(), spend=purse) for _ in range(20)} == {first}
    assert len(purse.paid) == 1
    richer = decode_frame(client.ask(QUERIES[0], spend=purse, extras="thumbnails"), Query)
    assert (richer.message, richer.extras) == (decode_frame(first, Query).message, "thumbnails")
    with pytest.raises(ProtocolError, match="another feature"):
        client.ask(QUERIES[1], spend=purse)
    assert len(purse.paid) == 1


def test_fresh_questions_differ() -> None:
    """Two clients that ask the same draw their own noise."""
    drawn = {ready(0.5).ask(QUERIES[0], spend=Purse()) for _ in range(60)}
    assert len(drawn) == 6  # all sets are named, sooner or later: (1 - 0.15)^60 is 6e-5 for each


def test_the_debit_comes_before_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    release = Covers.release

    def released(self: Any, *arguments: Any, **options: Any) -> Any:
        events.append("message")
        return release(self, *arguments, **options)

    @dataclass
    class Paid:
        repeated: bool = False
        message: bytes | None = None

        def store(self, message: bytes, /) -> None:
            events.append(f"stored {Message.from_bytes(message).mechanism}")

    @contextmanager
    def spend(promise: Any) -> Iterator[Paid]:
        events.append(f"paid {promise.epsilon}")
        yield Paid()
        events.append("closed")

    monkeypatch.setattr(Covers, "release", released)
    ready().ask(QUERIES[0], spend=spend)
    assert events == ["paid 2.0", "message", "stored covers", "closed"]

    def broke(promise: Any) -> Any:
        raise OverBudgetError("no", epsilon=1.0, spent=1.0, cost=2.0, left=0.0)

    events.clear()
    client = ready()
    with pytest.raises(OverBudgetError):
        client.ask(QUERIES[0], spend=broke)
    assert (events, client.state) == ([], "ready")


def test_questions_on_different_maps_add_up_in_one_account(tmp_path: Path) -> None:
    other = published(n_sets=4).make_public_part()
    with Ledger(tmp_path / "budget.db") as ledger:
        account = ledger.open_account(
            "me", owner="me", protects="query", unit="record", relation="replace", epsilon=4.5, delta=0.0
        )
        first = ready(2.0).ask(QUERIES[0], spend=lambda promise: account.spend(promise, "one"))
        ready(2.0, other).ask(QUERIES[0], spend=lambda promise: account.spend(promise, "two"))
        assert account.balance().left == 0.5
        with pytest.raises(OverBudgetError):
            ready(2.0, other).ask(QUERIES[0], spend=lambda promise: account.spend(promise, "three"))
        assert account.balance().left == 0.5
        # A process that died after it paid, and came back, sends what it would have sent.
        again = ready(2.0).ask(QUERIES[0], spend=lambda promise: account.spend(promise, "one"))
        assert again == first
        with pytest.raises(ProtocolError, match="on another map"):
            ready(2.0, other).ask(QUERIES[0], spend=lambda promise: account.spend(promise, "one"))
        assert account.balance().left == 0.5
        with account.spend(ClientProtocol(0.5).guarantee, "lost"):
            pass  # died before the message was stored
        with pytest.raises(KeySpentError):
            ready(0.5).ask(QUERIES[0], spend=lambda promise: account.spend(promise, "lost"))


def test_a_map_that_changed_is_told_and_an_old_one_is_answered_with_its_old_sets() -> None:
    old, new = published(), published(n_sets=4)
    new = replace(new, published=replace(new.published, revision=9))
    asked = ready().ask(QUERIES[0], spend=Purse(), rng=unsafe_seeded(3))
    moved = ServerProtocol(new).reply(asked)
    assert decode_frame(moved, MapChanged) == MapChanged("birds", 9)
    client = ready()
    client.ask(QUERIES[0], spend=Purse())
    with pytest.raises(OutdatedMapError, match="revision 9") as caught:
        client.take_answer(moved)
    assert (caught.value.revision, client.state) == (9, "answered")
    grace = ServerProtocol(new, old)
    assert grace.reply(asked) == ServerProtocol(old).reply(asked)
    assert decode_frame(grace.reply(ClientProtocol(1.0).public_request()), PublicPart).revision == 9


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
        ready().ask(feature, spend=purse)
    assert not purse.paid
    assert "2000000" not in str(caught.value)


def test_what_cannot_be_answered_is_refused_before_it_is_paid() -> None:
    purse = Purse()
    plain = replace(part(), offers=())
    with pytest.raises(ProtocolError, match="does not offer thumbnails"):
        ready(public=plain).ask(QUERIES[0], spend=purse, extras="thumbnails")
    with pytest.raises(ValueError, match="extras must be"):
        ready().ask(QUERIES[0], spend=purse, extras="all")  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"mechanism must be one of \['covers'\]"):
        ready(public=replace(part(), mechanism="plain"))
    with pytest.raises(ProtocolError, match="at most 600 are read"):
        ClientProtocol(1.0, public=part(), limits=Limits(answer=600))
    assert ClientProtocol(1.0, public=part(), limits=Limits(answer=8 + 40 * 16)).state == "ready"
    with pytest.raises(ProtocolError, match="features of 'a model'"):
        ClientProtocol(1.0, public=part(), fingerprint="model-2")
    assert ClientProtocol(1.0, public=part(), fingerprint="model-1").state == "ready"
    assert not purse.paid


@pytest.mark.parametrize("k", [0, 41, -1, True, 2.0, "8"])
def test_an_absurd_k_loses_no_answer(k: Any) -> None:
    client = ready()
    answer = ServerProtocol(published()).reply(client.ask(QUERIES[0], spend=Purse()))
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 40"):
        client.take_answer(answer, k)
    assert len(client.take_answer(answer, 40).ids) == 40


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


def test_refusals() -> None:
    server = ServerProtocol(
        showing(OSError("the disk at /secret/place is gone")), limits=Limits(answer=8 + 40 * 20, query=1000)
    )

    def refusal(data: bytes) -> Refusal:
        found: Refusal = decode_frame(server.reply(data), Refusal)
        return found

    asked = ready().ask(QUERIES[0], spend=Purse())
    assert isinstance(decode_frame(server.reply(asked), Answer), Answer)
    images = ready().ask(QUERIES[0], spend=Purse(), extras="originals")
    assert refusal(images) == Refusal(RefusalCode.FAILED, "the server could not make an answer")
    assert refusal(asked[:-1]).code == RefusalCode.MALFORMED
    assert refusal(asked[:3] + b"\x07" + asked[4:]).code == RefusalCode.VERSION
    assert refusal(asked[:6] + b"\xff\xff\xff\xff" + asked[10:]).code == RefusalCode.TOO_LARGE
    long = Message("a\x1b" * 90, published().published.release.public_id, {"sets": np.array([1], np.int32)})
    assert refusal(Query(long).to_bytes()).code == RefusalCode.MALFORMED
    assert refusal(decode_frame(asked, Query).message.to_bytes()).code == RefusalCode.MALFORMED
    assert decode_frame(_refusal(RefusalCode.MALFORMED, "a\x1b[2J\n" * 400), Refusal).words == ("a?[2J?" * 400)[:500]
    poor = ServerProtocol(replace(published(), offers=()))
    assert decode_frame(poor.reply(images), Refusal).code == RefusalCode.NOT_OFFERED
    narrow = ServerProtocol(published(), limits=Limits(answer=8 + 40 * 16))
    assert decode_frame(narrow.reply(images), Refusal).code == RefusalCode.TOO_LARGE
    client = ready()
    client.ask(QUERIES[0], spend=Purse())
    with pytest.raises(RefusedError, match=r"refused \(too_large\)") as caught:
        client.take_answer(narrow.reply(images))
    assert caught.value.code == RefusalCode.TOO_LARGE
    assert client.state == "asked"
    with pytest.raises(RefusedError, match="failed"):
        ClientProtocol(1.0).take_public(Refusal(RefusalCode.FAILED, "later").to_bytes())


def test_a_thumbnail_that_is_none_is_the_servers_fault() -> None:
    asked = ready().ask(QUERIES[0], spend=Purse(), extras="thumbnails")
    for images in ([b"GIF89a"] * 40, [b""] * 39):
        assert decode_frame(ServerProtocol(showing(images)).reply(asked), Refusal).code == RefusalCode.FAILED


def test_the_answer_does_not_depend_on_what_was_asked_before() -> None:
    server = ServerProtocol(published())
    asked = [ready().ask(feature, spend=Purse(), extras="thumbnails") for feature in QUERIES[:5]]
    before = [server.reply(data) for data in asked]
    assert [server.reply(data) for data in reversed(asked)] == before[::-1]


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
    assert set(own) == {"answers", "client", "frames"}
    assert not {"ledger", "private_knn", "client", "server", "cli", "features"} & set(rooms)


@pytest.mark.parametrize("room", [nearveil.gallery, nearveil.wire])
def test_every_name_of_a_room_is_found_where_it_is_said_to_be(room: Any) -> None:
    assert all(getattr(room, name) is not None for name in room.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        room.Nothing  # noqa: B018


def test_a_debit_whose_message_was_lost_is_told_so() -> None:
    @dataclass
    class Lost:
        repeated: bool = True
        message: bytes | None = None

        def store(self, message: bytes, /) -> None:  # noqa: ARG002
            raise AssertionError

    with pytest.raises(ProtocolError, match="never stored and so never sent"):
        ready().ask(QUERIES[0], spend=lambda _: nullcontext(Lost()))


def test_bytes_of_a_thumbnail_answer_are_what_they_should_be() -> None:
    client = ready()
    answer = decode_frame(
        ServerProtocol(published()).reply(client.ask(QUERIES[0], spend=Purse(), extras="thumbnails")), Answer
    )
    assert answer.nbytes == HEADER_BYTES + 8 + 40 * (4 + 2 * DIMENSION + 4 + len(THUMBNAIL) + 4)


def test_answers_to_another_question_are_refused() -> None:
    server = ServerProtocol(published())
    plain = server.reply(ready().ask(QUERIES[0], spend=Purse()))
    client = ready()
    client.ask(QUERIES[0], spend=Purse(), extras="thumbnails")
    with pytest.raises(WireError, match="must have thumbnails as extras; it has none"):
        client.take_answer(plain)
    with pytest.raises(WireError, match="no place here"):
        client.take_answer(client.ask(QUERIES[0], spend=Purse()))


def test_answers_may_be_read_before_one_chooses() -> None:
    """One message, asked twice: for images and for names; nothing is chosen before both are there."""
    server, client, purse = ServerProtocol(published()), ready(), Purse()
    first = client.ask(QUERIES[0], spend=purse, extras="thumbnails")
    second = client.ask(QUERIES[0], spend=purse, extras="names")
    pictures, names = server.reply(first), server.reply(second)
    with pytest.raises(WireError, match="must have names as extras; it has thumbnails"):
        client.read_answer(pictures)
    shown, named = client.read_answer(pictures, "thumbnails"), client.read_answer(names)
    assert (shown.ids == named.ids).all()
    assert client.state == "asked"
    found = client.choose(shown, 4)
    assert found.images == tuple(THUMBNAIL + int(one).to_bytes(4, "little") for one in found.ids)
    assert named.images == tuple(b"bird %d.png" % one for one in named.ids)
    assert (client.state, len(purse.paid)) == ("answered", 1)
    with pytest.raises(ProtocolError, match="in state 'answered'"):
        client.choose(shown, 4)


def test_a_client_keeps_its_epsilon() -> None:
    client = ready(4.0)
    with pytest.raises(AttributeError):
        client.epsilon = 0.01  # type: ignore[misc]
    assert client.guarantee.epsilon == client.epsilon == 4.0
