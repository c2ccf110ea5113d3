"""The papers' protocol over the wire: a gallery is published for a mechanism, and answers are those of a retriever."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil import Client
from nearveil.client import QuestionError
from nearveil.gallery import Index
from nearveil.gallery.codes import learn_codes
from nearveil.gallery.publishing import Published, PublishedRelease, select_first
from nearveil.gallery.sync import sync_table
from nearveil.ledger import Account, Ledger, LedgerError
from nearveil.mechanisms import Message, MessageError
from nearveil.mechanisms.covers.maps import MapError
from nearveil.mechanisms.public import SERVED, PublicRelease
from nearveil.search import Retriever
from nearveil.wire.client import ClientProtocol, ProtocolError
from nearveil.wire.frames import WireError
from nearveil.wire.messages import PublicPart, decode_frame
from tests.search.standins import clustered
from tests.service.asking import URL, Server, opened, public_of, seeded, unit

DIMENSION, COUNT, CLASSES, EPSILON, FRACTION = 12, 150, 4, 4.0, 0.2
ROWS, LABELS = clustered(2, COUNT + 20, DIMENSION)
ITEMS, QUERIES = unit(ROWS[:COUNT]), unit(ROWS[COUNT:])
CLASS = np.arange(COUNT) % CLASSES
SOUND = sorted(name for name, entry in SERVED.items() if not entry.labelled)
UNSOUND = sorted(set(SERVED) - set(SOUND))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    with Index.create(tmp_path_factory.mktemp("made") / "birds", dimension=DIMENSION) as made:
        names = [f"species {kind}/{number}.png" for number, kind in enumerate(CLASS)]
        made.add_table(ITEMS, names=names, metadata=[{"family": f"f{kind % 2}"} for kind in CLASS])
        yield made


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    about: Any = {"owner": "me", "protects": "query", "unit": "image", "relation": "replace"}
    with Ledger(tmp_path / "budget.db") as ledger:
        yield ledger.open_account("me", epsilon=60.0, delta=1e-4, **about)


@pytest.fixture
def client(index: Index, account: Account, tmp_path: Path) -> Iterator[Any]:
    with opened(Path(index._location), offers=("names",)) as gallery:
        server = Server(tmp_path / "tokens.db", gallery)
        try:

            def connect(payer: Account = account) -> tuple[Client, Any]:
                gallery.refresh()
                wire = server.wire()
                return Client(URL, server.token, account=payer, transport=wire), wire

            yield connect
        finally:
            server.close()


def retrieve(published: Published, seed: int, row: NDArray[Any]) -> list[int]:
    """Return what a retriever on one machine finds with the same noise and the same public rows."""
    assert isinstance(published, PublishedRelease)
    shared = published.release
    labels = shared.labels if len(shared.labels) else None
    retriever = Retriever(SERVED[shared.mechanism].make(EPSILON), FRACTION)
    retriever.fit(shared.rows, labels).index(ITEMS)
    return [int(number) for number in retriever.nearest(row, 5, rng=seeded(seed))]


@pytest.mark.parametrize("name", SOUND)
def test_answers_are_those_of_a_retriever(index: Index, client: Any, account: Account, name: str) -> None:
    published = index.publish(EPSILON, FRACTION, mechanism=name)
    here, wire = client()
    with here:
        for seed, row in enumerate(QUERIES[:4]):
            nearest = here.nearest(row, 5, EPSILON, rng=seeded(seed))
            assert [match.id for match in nearest.matches] == retrieve(published, seed, row)
            assert nearest.mechanism == name
            assert nearest.set is None
            assert nearest.n_candidates == FRACTION * COUNT
            assert name in nearest.quality_summary
            assert nearest.guarantee.sound
            assert nearest.paid == pytest.approx(EPSILON)
    debits = [entry for entry in account.history() if entry.kind == "debit"]
    assert len(debits) == len(wire.posts) == 4
    sent = [public_of_message(body) for _, _, _, body in wire.posts]
    assert len(set(sent)) == 1


def public_of_message(body: bytes) -> str:
    from nearveil.wire.messages import Query

    return str(decode_frame(body, Query).message.public_id)


@pytest.mark.parametrize("name", UNSOUND)
def test_mechanisms_as_published_need_the_flag_twice(index: Index, client: Any, account: Account, name: str) -> None:
    with pytest.raises(ValueError, match=r"unsound, and only for comparison.*allow_unsound"):
        index.publish(EPSILON, FRACTION, mechanism=name)
    published = index.publish(EPSILON, FRACTION, mechanism=name, allow_unsound=True)
    assert isinstance(published, PublishedRelease)
    here, wire = client()
    with here:
        with pytest.raises(ProtocolError, match=r"reveal the query.*allow_unsound"):
            here.nearest(QUERIES[0], 5, EPSILON)
        with pytest.raises(ValueError, match=r"label: .* uses the class of the query"):
            here.nearest(QUERIES[0], 5, EPSILON, allow_unsound=True)
        with pytest.raises(QuestionError, match="no account pays"):
            here.nearest(QUERIES[0], 5, EPSILON, allow_unsound=True, label="species 1", key="mine")
        assert wire.posts == []
        nearest = here.nearest(QUERIES[0], 5, EPSILON, allow_unsound=True, label="species 1", rng=seeded(3))
    assert not nearest.guarantee.sound
    assert (nearest.paid, nearest.key, nearest.remaining) == (0.0, "", None)
    assert [entry.kind for entry in account.history()] == ["opened"]
    assert [match.id for match in nearest.matches] == rank_locally(published, QUERIES[0], 1)


def rank_locally(published: PublishedRelease, row: NDArray[Any], label: int) -> list[int]:
    """Return what one machine finds: each target of the message ranks the gallery, and the best rank counts."""
    release: Any = published.release.release
    message = release.release(row, labels=label, rng=seeded(3))
    scores = release.rank_each(message, ITEMS, CLASS)
    ranks = (-scores).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable").min(axis=0)
    chosen = select_first(-ranks.astype(float), round(FRACTION * COUNT))
    similarity = ITEMS[chosen] @ row
    return [int(number) for number in chosen[np.argsort(-similarity, kind="stable")[:5]]]


def test_the_epsilon_of_a_message_is_that_of_the_gallery(index: Index, client: Any, account: Account) -> None:
    index.publish(EPSILON, FRACTION, mechanism="privunit")
    here, wire = client()
    with here, pytest.raises(ProtocolError, match="at epsilon 4: pay that"):
        here.nearest(QUERIES[0], 5, 1.0)
    assert wire.posts == []
    assert len(account.history()) == 1


def test_an_account_without_delta_refuses_gaussian_noise(index: Index, client: Any, tmp_path: Path) -> None:
    index.publish(EPSILON, FRACTION, mechanism="analytic-gaussian")
    about: Any = {"owner": "me", "protects": "query", "unit": "image", "relation": "replace"}
    with Ledger(tmp_path / "pure.db") as ledger:
        here, wire = client(ledger.open_account("pure", epsilon=60.0, delta=0.0, **about))
        with here, pytest.raises((LedgerError, ValueError), match="delta"):
            here.nearest(QUERIES[0], 5, EPSILON)
    assert wire.posts == []


def test_a_key_repeats_a_message(index: Index, client: Any, account: Account) -> None:
    index.publish(EPSILON, FRACTION, mechanism="latent")
    here, wire = client()
    with here:
        first = here.nearest(QUERIES[0], 5, EPSILON, key="one")
        again = here.nearest(QUERIES[0], 5, EPSILON, key="one")
    assert (first.matches, again.paid) == (again.matches, 0.0)
    assert wire.posts[0][3] == wire.posts[1][3]
    assert sum(entry.kind == "debit" for entry in account.history()) == 1


def test_another_gallery_cannot_read_a_message(index: Index, client: Any) -> None:
    """Codes of another table would be decoded to other vectors: the fingerprint in a message covers them."""
    index.publish(EPSILON, FRACTION, mechanism="privunit", public=ITEMS[:40])
    here, _ = client()
    with here:
        here.nearest(QUERIES[0], 5, EPSILON, key="one")
        index.publish(EPSILON, FRACTION, mechanism="privunit", public=ITEMS[:40], code_bytes=10, keep=1)
        fresh, _ = client()
        with fresh, pytest.raises(Exception, match="another map"):
            fresh.nearest(QUERIES[0], 5, EPSILON, key="one")


def test_classes_are_read_from_metadata(index: Index) -> None:
    name = "privatemail (as published 2022-code)"
    published = index.publish(EPSILON, FRACTION, mechanism=name, labels="family", allow_unsound=True)
    assert isinstance(published, PublishedRelease)
    assert published.release.classes == ("f0", "f1")
    with pytest.raises(ValueError, match="labels: some items have no 'genus'"):
        index.publish(EPSILON, FRACTION, mechanism=name, labels="genus", allow_unsound=True)


@pytest.mark.parametrize("name", SOUND)
def test_folders_are_published_only_where_messages_need_them(index: Index, name: str) -> None:
    """A gallery need not offer names, and these messages have no class."""
    published = index.publish(EPSILON, FRACTION, mechanism=name)
    assert b"species" not in published.map.to_bytes()


def test_a_stored_gallery_answers_as_before(index: Index) -> None:
    published = index.publish(EPSILON, FRACTION, mechanism="ome")
    index._loaded_maps.clear()
    stored, stale = index.current()
    assert isinstance(published, PublishedRelease)
    assert not stale
    assert stored.terms == published.terms
    assert stored.public_id == published.public_id
    message = published.release.make_message(QUERIES[0].astype(float), None, seeded(1))
    for one, other in zip(vars(stored.answer(message)).values(), vars(index.answer(message)).values(), strict=True):
        np.testing.assert_array_equal(one, other)
    index.republish()
    assert index.current().published.terms.mechanism == "ome"


def test_a_gallery_goes_back_to_covers(tmp_path: Path) -> None:
    table: Any = (ITEMS, None, None, None)
    from nearveil.features.vectors import VectorTable

    place = tmp_path / "gallery"
    assert isinstance(sync_table(VectorTable(*table), place, mechanism="privunit").published, PublishedRelease)
    assert sync_table(None, place).learned is False
    assert not isinstance(sync_table(None, place, mechanism="covers").published, PublishedRelease)


def test_only_mechanisms_with_a_message_are_served(index: Index) -> None:
    with pytest.raises(ValueError, match="'raw' cannot be served; use covers, privunit"):
        index.publish(EPSILON, FRACTION, mechanism="raw")


def make_public(**changes: Any) -> PublicRelease:
    values: dict[str, Any] = {
        "mechanism": "privunit", "epsilon": 4.0, "rows": ITEMS[:40], "labels": np.empty(0, np.int64), "classes": (),
        "n_items": COUNT, "set_size": 30, "public_digest": "0" * 32,
    }  # fmt: skip
    return PublicRelease(**values | changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mechanism": "raw"}, "cannot be served"),
        ({"epsilon": 99.0}, "epsilon"),
        ({"rows": ITEMS[:1]}, "at least two rows"),
        ({"rows": np.full((4, DIMENSION), np.nan, np.float32)}, "rows"),
        ({"labels": np.zeros(3, np.int64)}, "labels"),
        ({"labels": np.full(40, 2, np.int64), "classes": ("a", "b")}, "positions of classes"),
        ({"classes": ("\x1b",)}, "printable"),
        ({"set_size": COUNT + 1}, "set_size"),
    ],
)
def test_hostile_public_rows_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(MapError, match=match):
        make_public(**changes)
    assert PublicRelease.from_bytes(make_public().to_bytes()).public_id == make_public().public_id


def test_a_public_part_states_what_its_map_is(index: Index) -> None:
    index.publish(EPSILON, FRACTION, mechanism="privunit")
    with opened(Path(index._location)) as gallery:
        public = public_of(gallery)
    for change in ({"epsilon": 2.0}, {"mechanism": "latent"}, {"public_digest": "0" * 32}):
        with pytest.raises(WireError, match="those of the map"):
            PublicPart(**vars(public) | change)


def test_a_query_that_is_the_public_mean_is_asked_like_any_other() -> None:
    """A server may choose public rows with a suspect's feature as their mean: an error would tell it who asks."""
    suspect = np.zeros(DIMENSION)
    rows = np.vstack([np.eye(DIMENSION), -np.eye(DIMENSION)]).astype(np.float32)
    shared = make_public(rows=rows)
    assert not (suspect - shared.release.mean_).any()
    assert shared.make_message(suspect, None, seeded(1)).mechanism == "privunit"


@pytest.mark.parametrize("name", [name for name in SERVED if name.startswith("privatemail")])
def test_messages_with_more_targets_or_steps_are_refused(name: str) -> None:
    """A message of 60 kB took 2 GB and 9 s of a server with 100,000 items; one of a hundred steps took 20 s."""
    labels = np.arange(40) % CLASSES
    shared = make_public(mechanism=name, labels=labels, classes=tuple("abcd"))
    prepared = shared.prepare(ITEMS, CLASS)
    honest = shared.make_message(QUERIES[0], "b", seeded(1))
    assert shared.rank(honest, prepared).shape == (COUNT,)
    arrays = dict(honest.arrays)
    for rows in {"released", "embedding"} & set(arrays):
        arrays[rows] = np.concatenate([arrays[rows][:1]] * CLASSES + [arrays[rows]])
    changed = [Message(honest.mechanism, honest.public_id, arrays, seeded=True)]
    if shared.is_sound:
        release: Any = shared.release
        changed.append(release.continue_embedding(honest, 3))
    for message in changed:
        with pytest.raises(MessageError, match="message must have at most"):
            shared.rank(message, prepared)


def test_the_guarantee_is_that_of_the_mechanism(index: Index) -> None:
    for name in SOUND:
        index.publish(EPSILON, FRACTION, mechanism=name)
        with opened(Path(index._location)) as gallery:
            protocol = ClientProtocol(public_of(gallery), EPSILON)
        assert protocol.guarantee == SERVED[name].make(EPSILON).fit(protocol.public.map.rows).guarantee
        assert protocol.guarantee.epsilon <= EPSILON + 1e-12


def test_codes_are_those_of_the_gallery(index: Index) -> None:
    published = index.publish(EPSILON, FRACTION, mechanism="privunit")
    from nearveil.cluster import SpreadRows

    encoded = SpreadRows.cut(published.space.encode(ITEMS).astype(np.float32))
    np.testing.assert_array_equal(published.codes, learn_codes(encoded, "auto", published.space)[1])


def test_corrupted_public_rows_are_an_error_of_the_message() -> None:
    data, generator = make_public(labels=np.zeros(40, np.int64), classes=("a",)).to_bytes(), np.random.default_rng(0)
    for _ in range(300):
        corrupted = bytearray(data)
        for position in generator.integers(0, 1000, 3).tolist():
            corrupted[position] = int(generator.integers(0, 256))
        with suppress(MessageError):  # no other error, and no crash
            _ = PublicRelease.from_bytes(bytes(corrupted)).public_id
