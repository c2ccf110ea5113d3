"""The client: it pays first, a retry sends the same, and what is wrong is said before anything is paid."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import nearveil
from nearveil import Client
from nearveil.client.errors import (
    DeclinedError,
    QuestionError,
    ReplyError,
    UnansweredError,
    UnreachableError,
)
from nearveil.client.questions import DEFAULT_K
from nearveil.client.timing import Clock
from nearveil.features import backbones
from nearveil.gallery import Index
from nearveil.ledger import Debit, KeyConflictError, Ledger, OverBudgetError, new_key
from nearveil.mechanisms import Message
from nearveil.mechanisms.covers.channels import set_guarantee
from nearveil.privacy import Guarantee
from nearveil.privacy.events import NamedSets
from nearveil.privacy.noise import unsafe_seeded
from nearveil.server.galleries import OpenGallery
from nearveil.wire.messages import MapChanged, Query, Refusal, RefusalCode, decode_frame
from tests.service.asking import (
    CANDIDATES,
    QUERIES,
    SETS,
    URL,
    WEBP,
    Scene,
    Server,
    framed,
    is_post,
    make_index,
    new_account,
    opened,
    public_of,
    scene,
    seeded,
)

PRIVATE = QUERIES[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("made") / "birds", (0.2, 0.1))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return how long the client waits; it does not."""
    found: list[float] = []

    async def pause(self: Clock, seconds: float) -> None:
        del self
        found.append(seconds)

    monkeypatch.setattr(Clock, "pause", pause)
    return found


def test_a_server_and_an_index_are_asked_with_the_same_words(here: Scene, made: Path, tmp_path: Path) -> None:
    far, _ = here.client()
    with new_account(tmp_path / "other.db") as account, Client(made, account=account) as near:
        every: list[dict[str, Any]] = [
            {},
            {"thumbnails": True},
            {"originals": True},
            {"candidates": 0.2},
        ]
        for options in every:
            found, same = (one.nearest(PRIVATE, 5, 4.0, rng=seeded(), **options) for one in (far, near))
            assert found.matches == same.matches
            assert (found.set, found.n_sets, found.n_candidates) == (same.set, same.n_sets, same.n_candidates)
        assert [(one.name, one.kind) for one in near.galleries()] == [("local", "open")]
    assert [(one.name, one.candidates) for one in far.galleries()] == [("birds", (0.1, 0.2))]


def test_what_a_seed_made_is_never_called_sound(here: Scene) -> None:
    client, wire = here.client()
    with pytest.raises(ValueError, match="not sound"):
        client.nearest(PRIVATE, 5, 4.0, rng=unsafe_seeded(5))
    assert (here.account.balance().spent, wire.posts) == (0.0, [])

    class Generous:
        """Pays for anything, as an account would for the same message with sound randomness."""

        def spend(self, promise: Guarantee, key: str, /) -> Debit:
            paid.append(promise)
            return here.account.spend(set_guarantee(NamedSets(promise.epsilon, 4)), key)

    paid: list[Guarantee] = []
    rash, _ = here.client(account=Generous())
    found = rash.nearest(PRIVATE, 5, 4.0, key="mine", rng=unsafe_seeded(5))
    again = rash.nearest(PRIVATE, 5, 4.0, key="mine")  # the message that was stored
    for guarantee in (paid[0], found.guarantee, again.guarantee):
        assert (guarantee.sound, guarantee.source) == (False, "seeded")
    assert str(found.guarantee).startswith("No guarantee about which record was queried: the noise came from a seed")
    assert rash.nearest(PRIVATE, 5, 4.0).guarantee.sound


def test_a_map_by_itself_is_free_and_the_same_request_as_before_a_question(here: Scene) -> None:
    client, wire = here.client(account=None)
    assert client.map().map.map_id == public_of(here.gallery).map.map_id
    assert client.map(0.2, gallery="birds").candidates == 0.2
    asked, asking = here.client()
    asked.nearest(PRIVATE, 5, 4.0)
    assert [one[:2] for one in asking.requests[:2]] == [one[:2] for one in wire.requests[:2]]
    assert wire.posts == []
    with pytest.raises(QuestionError, match="there is none named 'cars'"):
        client.map(gallery="cars")


def test_all_candidates_have_names(here: Scene) -> None:
    client, _ = here.client()
    found = client.nearest(PRIVATE, 5, 4.0)
    assert found.answer is not None
    assert found.names == {number: f"bird {number}.png" for number in found.answer.ids.tolist()}


def test_the_nearest_of_the_set_are_found(here: Scene, made: Path) -> None:
    client, _ = here.client()
    found = client.nearest(PRIVATE, 4, 40.0)  # the good set, but for a chance of 1e-16
    with Index.open(made) as index:
        published = index.maps()[0]
        rows = index.features(index.ids())
        cosines = rows @ PRIVATE / np.linalg.norm(rows, axis=1) / np.linalg.norm(PRIVATE)
        good = int(published.map.choose(published.release.features(PRIVATE[None]))[0])
        members = published.release.members_[[good]].indices
    best = members[np.argsort(-cosines[members])][:4]
    assert found.set == good
    assert [match.id for match in found.matches] == best.tolist()
    assert [match.name for match in found.matches] == [f"bird {n}.png" for n in best]
    assert [match.similarity for match in found.matches] == pytest.approx(cosines[best], abs=5e-3)
    assert {match.image for match in found.matches} == {None}
    assert (found.n_candidates, found.n_sets, found.repeated) == (CANDIDATES, SETS, False)
    assert found.guarantee.epsilon == 40.0
    assert here.account.balance().left == 60.0


def test_a_similarity_is_at_most_one(here: Scene, made: Path) -> None:
    with Index.open(made) as index:
        rows = index.features(index.ids())
    client, _ = here.client(account=here.another("rich in questions"))
    found = [client.nearest(row, 1, 40.0).matches[0].similarity for row in rows[[13, 25]]]  # rounding makes them more
    assert found == pytest.approx([1.0, 1.0], abs=2e-3)
    assert max(found) <= 1.0


def test_images_come_for_all_candidates_alike(here: Scene) -> None:
    client, wire = here.client()
    cases: dict[str, Callable[[int], bytes]] = {
        "thumbnails": lambda n: WEBP + bytes([n]),
        "originals": lambda n: b"original %d" % n if n % 3 else b"",
    }
    for word, image in cases.items():
        found = client.nearest(PRIVATE, 3, epsilon=4.0, thumbnails=word == "thumbnails", originals=word == "originals")
        assert [match.image for match in found.matches] == [image(match.id) for match in found.matches]
        assert [match.name for match in found.matches] == [f"bird {match.id}.png" for match in found.matches]
        assert found.answer is not None
        assert found.answer.contents == tuple(image(n) for n in found.answer.ids.tolist())
    # For each question: its images, then its names, with one message.
    queries = [decode_frame(body, Query) for *_, body in wire.posts]
    assert [query.extras for query in queries] == ["thumbnails", "names", "originals", "names"]
    assert queries[0].message == queries[1].message


def test_names_that_are_not_offered_are_left_out(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, offers=()) as quiet:
        client, wire = quiet.client()
        assert {match.name for match in client.nearest(PRIVATE, epsilon=4.0).matches} == {""}
        assert [decode_frame(body, Query).extras for *_, body in wire.posts] == ["none"]


def test_it_is_paid_and_stored_before_it_is_sent(here: Scene) -> None:
    histories: list[list[str]] = []

    def looking(request: httpx.Request) -> None:
        if is_post(request):
            histories.append([entry.kind for entry in here.account.history()])

    client, wire = here.client()
    wire.before = looking
    found = client.nearest(PRIVATE, epsilon=4.0)
    assert histories == [["opened", "debit", "message"]]
    with here.account.spend(found.guarantee, found.key) as debit:
        assert debit.message is not None
        assert decode_frame(wire.posts[0][3], Query).message == Message.from_bytes(debit.message)


def test_a_retry_is_the_same_to_the_byte_and_free(here: Scene, pauses: list[float]) -> None:
    troubles = iter((0, 503, 429, 502))  # the first one: a connection that breaks

    def failing(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        trouble = next(troubles, None) if is_post(request) else None
        if trouble == 0:
            raise httpx.ReadError("broken pipe", request=request)
        if trouble is None:
            return reply
        later = {"retry-after": "7"} if trouble == 429 else {}
        return framed(b'{"code": "busy", "message": "later"}', trouble, "application/json", **later)

    client, wire = here.client(failing, retries=5)
    found = client.nearest(PRIVATE, 3, epsilon=4.0)
    assert len(wire.posts) == 5
    assert len(set(wire.posts)) == 1
    assert pauses == [0.5, 1.0, 7.0, 4.0]
    assert (here.paid, found.repeated) == (1, False)


@pytest.mark.parametrize("pause", ["100000", "-5", "1e9", "tomorrow", "999999999999"])
def test_a_server_does_not_say_how_long_a_client_sleeps(here: Scene, pauses: list[float], pause: str) -> None:
    def busy(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(b"{}", 503, "application/json", **{"retry-after": pause}) if is_post(request) else reply

    with pytest.raises(UnansweredError):
        here.client(busy)[0].nearest(PRIVATE, epsilon=4.0)
    assert len(pauses) == 3
    assert 0 < max(pauses) <= 20


def test_what_was_paid_for_is_asked_again_with_the_key(here: Scene, pauses: list[float]) -> None:
    def lost(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if is_post(request):
            raise httpx.ReadError("broken pipe", request=request)
        return reply

    first, before = here.client(lost, retries=2)
    with pytest.raises(UnansweredError, match="It is paid for: key='") as raised:
        first.nearest(PRIVATE, epsilon=4.0, thumbnails=True)
    assert len(before.posts) == 3
    assert raised.value.again
    assert isinstance(raised.value.__cause__, UnreachableError)
    second, after = here.client()
    found = second.nearest(PRIVATE, epsilon=4.0, thumbnails=True, key=raised.value.key)
    assert after.posts[0] == before.posts[0]
    assert found.repeated
    assert here.paid == 1
    third, again = here.client()
    third.nearest(PRIVATE, epsilon=4.0, thumbnails=True, key=raised.value.key)  # the stored message
    assert again.posts == after.posts
    assert len(again.posts) == 2
    assert here.paid == 1


WORKER = """
import os, sys
for name in ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic_settings"):
    sys.modules[name] = None  # an index here needs none of them
import numpy as np
from nearveil import Client
from nearveil.ledger import Account
from nearveil.client.timing import Clock
from nearveil.server.galleries import OpenGallery

place, ledger, log = sys.argv[1:]
feature = np.load(sys.stdin.buffer)
ask, dies = OpenGallery.query, os.fork() == 0  # the first is a child, which shares what was imported
if not dies:
    print(os.waitstatus_to_exitcode(os.wait()[1]))
def asked(self, data):
    with open(f"{log}-{dies}", "ab") as out:
        out.write(data)
    if dies:
        os.kill(os.getpid(), 9)
    return ask(self, data)
OpenGallery.query = asked
with Client(place, account="me", ledger=ledger) as client:
    found = client.nearest(feature, 3, 4.0, key="the question")
    print(found.repeated, len(found.matches))
"""


def test_a_client_that_was_killed_goes_on_with_the_same_message_and_needs_no_library_of_a_server(
    made: Path, tmp_path: Path
) -> None:
    with new_account(tmp_path / "budget.db"):
        pass
    np.save(tmp_path / "feature.npy", PRIVATE)
    with (tmp_path / "feature.npy").open("rb") as feature:
        command = [sys.executable, "-c", WORKER, str(made), str(tmp_path / "budget.db"), str(tmp_path / "log")]
        ended = subprocess.run(command, stdin=feature, capture_output=True, check=False)  # noqa: S603
    assert ended.stdout.splitlines() == [b"-9", b"True 3"], ended.stderr
    assert ended.returncode == 0
    first, again = (tmp_path / "log-True").read_bytes(), (tmp_path / "log-False").read_bytes()
    assert again == first
    with Ledger(tmp_path / "budget.db") as ledger:
        assert ledger.account("me").balance().left == 96.0


def test_an_account_that_is_spent_sends_nothing(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, epsilon=5.0) as poor:
        client, wire = poor.client()
        client.nearest(PRIVATE, epsilon=4.0)
        with pytest.raises(OverBudgetError):
            client.nearest(PRIVATE, epsilon=2.0)
        assert len(wire.posts) == 1
        assert poor.account.balance().left == 1.0


def test_what_is_wrong_is_said_before_anything_is_paid(
    here: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backbones, "EXTRACTORS", {})  # networks take long to make
    (tmp_path / "notes.png").write_text("a private text")
    client, wire = here.client()
    cases: list[tuple[dict[str, Any], type[ValueError], str]] = [
        ({"query": tmp_path / "nowhere.png"}, ValueError, "there is no file at"),
        ({"query": tmp_path / "notes.png"}, ValueError, "not an image"),
        ({"query": b"a private text"}, ValueError, "not an image"),
        ({"query": np.zeros((9, 9, 3), np.uint8)}, QuestionError, "extractor: the features are from an extractor"),
        ({"query": QUERIES}, QuestionError, "query: an array must be"),
        ({"query": ["0.5"] * 8}, QuestionError, "query: it must be a path"),
        ({"query": PRIVATE[:5]}, QuestionError, "query: a feature must have 8 numbers"),
        ({"query": np.full(8, np.nan)}, ValueError, "finite"),
        ({"query": np.full(8, 1e7)}, ValueError, "beyond"),
        ({"k": CANDIDATES + 1}, QuestionError, f"k: at most {CANDIDATES}"),
        ({"k": 0}, QuestionError, "k: it must be"),
        ({"k": 2.0}, QuestionError, "k: it must be"),
        ({"k": True}, QuestionError, "k: it must be"),
        (
            {"epsilon": 0.0},
            QuestionError,
            "epsilon: birds offers no free way.* costs 4, from the account 'me', which has 100 left",
        ),
        ({"epsilon": np.nan}, ValueError, "epsilon must be"),
        ({"epsilon": 41.0}, ValueError, "epsilon must be"),
        ({"candidates": 0.3}, DeclinedError, "0.1, 0.2"),
        ({"candidates": 0.0}, QuestionError, "candidates: it must be a fraction"),
        ({"candidates": np.nan}, QuestionError, "candidates: it must be a fraction"),
        ({"candidates": "0.1"}, QuestionError, "candidates: it must be a fraction"),
        ({"gallery": "cars"}, QuestionError, r"none named 'cars'; there are birds \(open\)"),
        ({"gallery": "../birds\n"}, QuestionError, "none named '../birds[?]'"),
        ({"thumbnails": True, "originals": True}, QuestionError, "not both"),
        ({"key": "a\nb"}, ValueError, "key must be"),
        ({"key": ""}, ValueError, "key must be"),
    ]
    for changed, kind, words in cases:
        given = {"query": PRIVATE, "epsilon": 4.0} | changed
        with pytest.raises(kind, match=words) as raised:
            client.nearest(**given)
        assert "private text" not in str(raised.value)
    with pytest.raises(QuestionError, match="birds: it is open, and has no model"):
        client.classify(PRIVATE, gallery="birds")
    assert wire.posts == []
    assert here.paid == 0


def test_what_is_wrong_by_itself_is_said_before_anything_is_sent(here: Scene) -> None:
    client, wire = here.client()
    wrong: list[dict[str, Any]] = [{"epsilon": 41.0}, {"k": 0}, {"candidates": 2.0}, {"key": "\n"}]
    for changed in wrong:
        with pytest.raises(ValueError, match=next(iter(changed))):
            client.nearest(PRIVATE, **({"epsilon": 4.0} | changed))
    assert wire.requests == []


def test_what_is_not_offered_is_said_before_anything_is_paid(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, offers=("names",)) as plain:
        client, wire = plain.client()
        for word in ("thumbnails", "originals"):
            with pytest.raises(QuestionError, match=f"{word}: this gallery does not offer {word}"):
                client.nearest(PRIVATE, epsilon=4.0, thumbnails=word == "thumbnails", originals=word == "originals")
        assert (wire.posts, plain.paid) == ([], 0)
        with pytest.raises(DeclinedError, match="403 not_offered"):
            client.original_not_private(3)


def test_somebody_must_pay(here: Scene, made: Path) -> None:
    client, wire = here.client(account=None)
    with pytest.raises(QuestionError, match=r"account: an account must pay: `nearveil budget .* or leave epsilon out"):
        client.nearest(PRIVATE, epsilon=4.0)
    assert [url.rsplit("/", 1)[1] for _, url, *_ in wire.requests] == ["galleries"]  # a protected one says so
    assert client.original_not_private(4) == b"original 4"
    for options, words in (
        ({"account": "me"}, "account: a name needs the ledger"),
        ({"ledger": "budget.db", "account": here.account}, "ledger: pass it only with the name"),
        ({"retries": -1}, "retries: it must be"),
    ):
        with pytest.raises(QuestionError, match=words):
            Client(made, **options)


def test_one_gallery_needs_no_name_and_several_do(made: Path, tmp_path: Path) -> None:
    with (
        opened(made, "birds") as birds,
        opened(made, "cars") as cars,
        new_account(tmp_path / "budget.db") as account,
    ):
        server = Server(tmp_path / "tokens.db", birds, cars)
        wire = server.wire()
        with Client(URL, server.token, account=account, transport=wire) as client:
            with pytest.raises(QuestionError, match=r"birds \(open\), cars \(open\): name one"):
                client.nearest(PRIVATE, epsilon=4.0)
            assert len(client.nearest(PRIVATE, epsilon=4.0, gallery="cars").matches) == DEFAULT_K
        assert [url.split("/galleries/")[1] for _, url, *_ in wire.posts] == ["cars/query"]
        server.close()


def test_a_number_of_neighbours_that_always_fits(here: Scene) -> None:
    client, _ = here.client()
    assert len(client.nearest(PRIVATE, None, epsilon=4.0).matches) == DEFAULT_K
    assert len(client.nearest(PRIVATE, CANDIDATES, epsilon=4.0).matches) == CANDIDATES


def test_a_key_pays_once_and_goes_with_one_promise(here: Scene) -> None:
    client, wire = here.client()
    first, again = (client.nearest(PRIVATE, epsilon=4.0, key="mine") for _ in range(2))
    assert (first.matches, first.repeated, again.repeated) == (again.matches, False, True)
    assert wire.posts[0] == wire.posts[1]
    assert here.paid == 1
    with pytest.raises(KeyConflictError, match="for something else"):
        client.nearest(PRIVATE, epsilon=2.0, key="mine")
    with here.account.spend(first.guarantee, "theirs") as debit:
        debit.store(b"something else")
    with pytest.raises(QuestionError, match="key: The key was spent on something else"):
        client.nearest(PRIVATE, epsilon=4.0, key="theirs")
    assert len(wire.posts) == 2


def test_keys_of_requests_tell_neither_the_key_nor_two_clients_apart_wrongly(here: Scene) -> None:
    """Two people may call their questions the same; a server that saw one key twice would refuse the second."""
    token = here.server.tokens.create("other")[1]
    wires = []
    for secret in (here.server.token, token):
        wire = here.server.wire()
        with Client(URL, secret, account=here.account, transport=wire) as client:
            client.nearest(PRIVATE, epsilon=4.0, key="mine")
        wires.append(wire)
    keys = [dict(wire.posts[0][2])[b"Nearveil-Key"] for wire in wires]
    assert keys[0] != keys[1]
    assert all(len(key) == 32 and b"mine" not in key for key in keys)


def test_a_map_that_changes_after_the_debit_is_not_paid_for_again(made: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(made, tmp_path / "birds"))
    with scene(place, tmp_path) as moving:

        def republished(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
            return framed(MapChanged("birds", 9).to_bytes(), 409) if is_post(request) else reply

        client, wire = moving.client(republished)
        with pytest.raises(
            UnansweredError, match="can no longer be answered: a new query, with a new key, costs again"
        ) as raised:
            client.nearest(PRIVATE, epsilon=4.0)
        assert not raised.value.again
        assert (len(wire.posts), moving.paid) == (1, 1)


def test_maps_are_kept_and_looked_at_anew_before_each_question(made: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(made, tmp_path / "birds"))
    with scene(place, tmp_path) as moving:
        client, wire = moving.client()
        first, second = (client.nearest(PRIVATE, epsilon=4.0) for _ in range(2))
        assert [seen[1].rsplit("/", 1)[1] for seen in wire.requests] == ["galleries", "map", "query", "map", "query"]
        tags = [dict(headers).get(b"If-None-Match") for _, url, headers, _ in wire.requests if url.endswith("/map")]
        assert tags[0] is None
        assert tags[1]
        assert second.bytes_received < first.bytes_received / 2  # the map did not come again
        with Index.open(place) as index:
            index.delete(index.ids()[:6])
            index.publish(4.0, 0.1, n_sets=5, reach=0.0)
        assert client.nearest(PRIVATE, epsilon=4.0).n_sets == 5


def test_a_message_for_an_old_map_is_not_sent_to_a_new_one(made: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(made, tmp_path / "birds"))
    with scene(place, tmp_path) as moving:
        client, wire = moving.client()
        client.nearest(PRIVATE, epsilon=4.0, key="mine")
        with Index.open(place) as index:
            index.publish(4.0, 0.1, n_sets=5, reach=0.0, keep=1)
        with pytest.raises(UnansweredError, match="another map than when this key was paid for") as raised:
            client.nearest(PRIVATE, epsilon=4.0, key="mine")
        assert (raised.value.again, raised.value.key) == (False, "mine")
        assert (len(wire.posts), moving.paid) == (1, 1)


def test_a_gallery_with_other_features_than_it_was_listed_with(made: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(made, tmp_path / "birds"))
    with scene(place, tmp_path) as moving:
        client, wire = moving.client()
        listed = client.galleries()[0]
        client._client._session._galleries = (listed.model_copy(update={"fingerprint": "another"}),)
        with pytest.raises(ReplyError, match="changed since it was listed; query it again"):
            client.nearest(PRIVATE, epsilon=4.0)
        assert moving.paid == 0
        client.nearest(PRIVATE, epsilon=4.0)  # it has looked anew
        assert len(wire.posts) == 1


def test_a_refusal_is_told_with_the_key(here: Scene) -> None:
    def refusing(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(Refusal(RefusalCode.TOO_LARGE, "too large").to_bytes(), 413) if is_post(request) else reply

    client, wire = here.client(refusing)
    with pytest.raises(UnansweredError, match=r"refused \(too_large\): too large. It is paid for: key='mine'"):
        client.nearest(PRIVATE, epsilon=4.0, key="mine")
    assert len(wire.posts) == 1


def test_an_account_by_its_name(made: Path, tmp_path: Path) -> None:
    with new_account(tmp_path / "budget.db"):
        pass
    with Client(str(made), account="me", ledger=tmp_path / "budget.db") as client:
        client.nearest(PRIVATE, epsilon=3.0)
    with Ledger(tmp_path / "budget.db") as ledger:
        assert ledger.account("me").balance().left == 97.0
        with Client(made, account="me", ledger=ledger) as client:
            client.nearest(PRIVATE, epsilon=3.0)
        assert ledger.account("me").balance().left == 94.0  # it is still open: it is not the client's
    with pytest.raises(ValueError, match="nobody"):
        Client(made, account="nobody", ledger=tmp_path / "budget.db")


def test_a_mistyped_ledger_is_not_created(made: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "budgte.db", f"sqlite:///{tmp_path}/budgte.db"):
        remedy = rf"ledger: there is none at {tmp_path}/budgte.db. .*`nearveil budget create me .*/budgte.db`"
        with pytest.raises(QuestionError, match=remedy):
            Client(made, account="me", ledger=path)
    assert not list(tmp_path.glob("budgte*"))


def test_what_was_given_stays_open_and_what_was_opened_is_closed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[OpenGallery] = []
    close = OpenGallery.close

    def closing(self: OpenGallery) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(OpenGallery, "close", closing)
    with new_account(tmp_path / "budget.db") as account, Index.open(made) as index:
        for where, count in ((index, 0), (OpenGallery(index, "birds"), 0), (made, 1), (str(made), 2)):
            with Client(where, account=account) as client:
                assert len(client.nearest(PRIVATE, 3, epsilon=4.0).matches) == 3
            assert len(closed) == count


def test_a_map_is_needed(tmp_path: Path) -> None:
    with Index.create(tmp_path / "bare", dimension=8) as index, new_account(tmp_path / "budget.db") as account:
        with Client(index, account=account) as client, pytest.raises(QuestionError, match="local has no map yet"):
            client.nearest(PRIVATE, epsilon=4.0)
        assert account.balance().left == 100.0


def test_one_original_is_fetched_by_a_name_that_says_what_it_is(here: Scene) -> None:
    client, wire = here.client()
    assert client.original_not_private(7, gallery="birds") == b"original 7"
    assert wire.requests[-1][1].endswith("/v1/galleries/birds/items/7/original")
    assert "NOT PRIVATE" in (Client.original_not_private.__doc__ or "")
    assert "NOT PRIVATE" in (nearveil.AsyncClient.original_not_private.__doc__ or "")
    for wrong in (-1, 1 << 32, True, "7", 7.0):
        with pytest.raises(QuestionError, match="id: it must be"):
            client.original_not_private(wrong)  # type: ignore[arg-type]
    with pytest.raises(DeclinedError, match="404 unknown"):
        client.original_not_private(6)  # it has none
    assert here.paid == 0


def test_all_forms_of_an_image_are_one_image(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pytest.importorskip("skimage")
    from nearveil.client.images import FeatureMaker
    from nearveil.features import HogColor

    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    picture = pillow.fromarray(pixels)
    picture.save(tmp_path / "me.png")
    tool = HogColor()
    gallery = tool.fingerprint, tool.dimension
    forms = [tmp_path / "me.png", str(tmp_path / "me.png"), (tmp_path / "me.png").read_bytes(), picture, pixels]
    expected = tool.extract([pixels])[0]
    rows = FeatureMaker(None).rows([*forms, expected], *gallery)
    assert all((row == expected).all() for row in rows)
    clear = pillow.fromarray(np.zeros((40, 50, 4), np.uint8))  # transparent: white, as in a file
    white = tool.extract([np.full((40, 50, 3), 255, np.uint8)])[0]
    assert (FeatureMaker(tool).rows([clear], *gallery)[0] == white).all()
    inks = picture.convert("CMYK")
    assert (FeatureMaker(tool).rows([inks], *gallery)[0] == tool.extract([np.asarray(inks.convert("RGB"))])[0]).all()
    with pytest.raises(ValueError, match="neither RGB nor grey"):
        FeatureMaker(tool).rows([picture.convert("LAB")], *gallery)
    with pytest.raises(QuestionError, match="another extractor than HOG"):
        FeatureMaker(tool).rows([pixels], "other", tool.dimension)


def test_random_keys_are_made_where_none_is_given(here: Scene) -> None:
    client, _ = here.client()
    keys = {client.nearest(PRIVATE, epsilon=4.0).key for _ in range(3)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {len(new_key())}
