"""A protected gallery shows votes and nothing else, pays for each set once, and stays within its promise."""

import contextlib
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearveil.features import TorchExtractor
from nearveil.ledger import Debit, Ledger, LedgerUnavailableError
from nearveil.privacy.events import VoteHistogram
from nearveil.retrieval import (
    Index,
    IndexStoreError,
    InexactRowsError,
    Item,
    MapChanged,
    NotPublishedError,
    PrivateIndexError,
    PublicPart,
    Refusal,
    RefusalCode,
    UnknownItemError,
)
from nearveil.retrieval._wire_schema import PublicRequest, read
from nearveil.service import Client, OpenGallery, Settings, _protected, open_galleries
from nearveil.service._errors import NotOfferedError, ServiceError, SpentError, UnavailableError, UnknownError
from nearveil.service._model import Classification
from nearveil.service._protected import ProtectedGallery
from nearveil.service._protected_account import _noise
from nearveil.votes._classifier import NeighborPoll
from tests.service.protected import (
    CLASSES,
    DIMENSION,
    PATIENT,
    SETS,
    TERMS,
    ask,
    copied,
    debits,
    frame,
    gallery,
    make,
    newest,
    rows,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("protected"))


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return copied(made, tmp_path)


@pytest.fixture
def scans(place: Path) -> Iterator[ProtectedGallery]:
    found = gallery(place)
    yield found
    found.close()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was counted, before noise."""
    seen: list[Any] = []
    tallies = NeighborPoll.tallies

    def watched(self: Any, queries: Any, progress: Any) -> Any:
        for tally in tallies(self, queries, progress):
            seen.append(dict(zip(self.classes.tolist(), tally.sums[0].tolist(), strict=True)))
            yield tally

    monkeypatch.setattr(NeighborPoll, "tallies", watched)
    return seen


def told_to_fetch(found: ProtectedGallery, public_id: str) -> MapChanged:
    reply = found.classify(frame(public_id, 0), "alice")
    assert isinstance(reply, bytes)
    changed: MapChanged = read(reply, MapChanged)
    return changed


def refused(reply: Any) -> RefusalCode:
    return RefusalCode(read(reply, Refusal).code)


def test_only_votes_are_shown(scans: ProtectedGallery, place: Path) -> None:
    message = frame(newest(scans), 0)
    with pytest.raises(NotOfferedError):
        scans.query(message)
    for number in (0, 1, 10**9):
        with pytest.raises(NotOfferedError):
            scans.original(number)
    for extras in ("thumbnails", "originals", "names"):
        assert refused(scans.classify(frame(newest(scans), 0, extras), "a")) == RefusalCode.NOT_OFFERED
    assert debits(scans) == 0
    told = scans.classify(message, "alice")
    assert isinstance(told, Classification)
    assert set(told.model_dump()) == {"label", "votes", "promise"}
    assert tuple(told.votes) == CLASSES
    assert told.label == max(told.votes, key=lambda one: told.votes[one])
    assert PATIENT not in told.model_dump_json() + scans.info().model_dump_json()
    assert PATIENT.encode() not in scans.map()


def test_the_public_map_is_the_only_one(place: Path) -> None:
    with Index.open(place / "private") as private:
        own = private.maps()[0]
    scans = gallery(place)
    with Index.open(place / "private") as private, Index.open(place / "public") as public:
        (others,) = public.maps()
        part = read(scans.map(), PublicPart)
        assert (part.map.map_id, part.offers, part.gallery) == (others.map.map_id, (), "scans")
        assert part.map.n_items == len(public) != len(private)
        with pytest.raises(UnknownError, match=r"0\.25"):
            scans.map(own.release.candidates)
        assert told_to_fetch(scans, own.public_id) == MapChanged("scans", public.revision)
        with pytest.raises(PrivateIndexError):
            private.publish(4.0, 0.25, n_sets=SETS)
        scans.refresh()
        assert read(scans.map(0.25), PublicPart).map.map_id == others.map.map_id
    assert debits(scans) == 0
    scans.close()


def test_info_says_nothing_about_the_records(scans: ProtectedGallery, place: Path) -> None:
    before = scans.info()
    assert (before.kind, before.offers, before.candidates, before.revision) == ("protected", (), (0.25,), 1)
    assert before.promise is not None
    assert (before.promise.epsilon, before.promise.delta, before.promise.protects) == (1.0, 1e-6, "database")
    assert before.promise.sound
    with Index.open(place / "private") as private:
        private.add((Item(row, "none/new") for row in rows(30, 5)[0]), row_exact=True)
        private.delete(private.ids()[:50])
    scans.refresh()
    assert scans.info() == before


def test_the_nearest_records_decide(place: Path) -> None:
    scans = gallery(place, epsilon=8.0)
    sets = scans._sets[newest(scans)]
    nearest = sets.prototypes @ (np.eye(6)[:3] - sets.published.mean).T
    clear = [number for number in range(SETS) if np.sort(nearest[number])[-2] < 0.5]
    assert len(clear) >= 2
    for number in clear:  # noise 1.85 on 15 votes: wrong once in 10^7 runs
        assert ask(scans, number).label == CLASSES[nearest[number].argmax()]


def test_prototypes_are_means_of_the_images_that_choose_a_set(scans: ProtectedGallery, place: Path) -> None:
    with Index.open(place / "public") as public:
        published = public.maps()[0]
        features = published.release.features(public.snapshot().features)
        good = published.map.choose(features)
        assert set(good.tolist()) == set(range(SETS))
        for number, prototype in enumerate(scans._sets[published.public_id].prototypes):
            mean = features[good == number].mean(axis=0)
            np.testing.assert_allclose(prototype, mean / np.linalg.norm(mean), atol=1e-12)


def test_sets_that_nobody_chooses_and_images_that_are_gone_do_no_harm(place: Path) -> None:
    with Index.open(place / "public") as public:
        published = public.publish(4.0, 0.5, n_sets=SETS)  # sets of half of all images overlap
        good = published.map.choose(published.release.features(public.snapshot().features))
        public.delete(public.ids()[good == 1])
        inside = np.setdiff1d(published.release.members_[[1]].indices, np.flatnonzero(good == 1))
        rest = published.release.features(public.features(published.ids[inside]))
    found = gallery(place)
    mean = rest.mean(axis=0)
    np.testing.assert_allclose(found._sets[newest(found)].prototypes[1], mean / np.linalg.norm(mean), atol=1e-12)
    with Index.open(place / "public") as public:
        public.delete(public.ids())
    again = gallery(place)
    assert not again._sets[newest(again)].prototypes.any()
    assert isinstance(ask(again, 1), Classification)


def test_the_debit_comes_before_the_count_and_the_store_before_the_answer(
    scans: ProtectedGallery, monkeypatch: pytest.MonkeyPatch, counts: list[Any]
) -> None:
    order: list[tuple[int, int]] = []
    store = Debit.store

    def stored(self: Debit, message: bytes) -> None:
        order.append((len(counts), debits(scans)))
        store(self, message)

    monkeypatch.setattr(Debit, "store", stored)
    tallies = NeighborPoll.tallies

    def counted(self: Any, *arguments: Any) -> Any:
        order.append((len(counts), debits(scans)))
        return tallies(self, *arguments)

    monkeypatch.setattr(NeighborPoll, "tallies", counted)
    told = ask(scans, 0)
    assert order == [(0, 1), (1, 1)]
    kinds = [entry.kind for entry in scans.terms.account.history()]
    assert kinds == ["opened", "debit", "message"]
    assert abs(sum(told.votes.values()) - sum(counts[0].values())) < 7 * math.sqrt(3) * scans.terms.noise


def test_an_answer_that_was_given_is_free_for_everybody_and_for_ever(place: Path, counts: list[Any]) -> None:
    found = gallery(place, answers_per_client=1)
    first = ask(found, 0, "alice")
    assert ask(found, 0, "alice") == ask(found, 0, "bob") == first
    assert found.terms.account.balance(client="alice").remaining == ()
    found.close()
    with Index.open(place / "private") as private:
        private.delete(private.ids())
    again = gallery(place, answers_per_client=1)
    assert ask(again, 0, "carol") == first
    assert (debits(again), len(counts)) == (1, 1)
    again.close()


def test_answers_run_out_and_known_ones_stay(place: Path) -> None:
    found = gallery(place, answers=2)
    known = [ask(found, number) for number in (2, 0)]
    for _ in range(2):
        with pytest.raises(SpentError, match="the gallery's new answers are used up") as error:
            ask(found, 1)
        assert (error.value.status, error.value.code, error.value.retry_after) == (429, "budget_spent", None)
    assert [ask(found, number) for number in (2, 0)] == known
    assert debits(found) == 2
    found.close()
    again = gallery(place)  # as many as the account has: a restart brings nothing back
    with pytest.raises(SpentError):
        ask(again, 3)
    assert [ask(again, number) for number in (2, 0)] == known
    assert again.terms.account.balance().epsilon == 1.0 == again.info().promise.epsilon  # type: ignore[union-attr]
    again.close()


def test_a_client_runs_out_alone(place: Path) -> None:
    found = gallery(place, answers_per_client=1)
    by_alice = ask(found, 0, "alice")
    with pytest.raises(SpentError, match="your new answers are used up"):
        ask(found, 1, "alice")
    by_bob = ask(found, 1, "bob")
    assert ask(found, 1, "alice") == by_bob
    assert ask(found, 0, "bob") == by_alice
    with pytest.raises(SpentError, match="your"):
        ask(found, 2, "bob")
    found.close()
    again = gallery(place, answers_per_client=2)  # quotas that were given stay
    with pytest.raises(SpentError, match="your"):
        ask(again, 2, "alice")
    assert isinstance(ask(again, 2, "carol"), Classification)
    assert isinstance(ask(again, 3, "carol"), Classification)
    assert debits(again) == 4
    again.close()


def test_what_is_deleted_votes_no_more_and_what_is_new_does(
    scans: ProtectedGallery, place: Path, counts: list[Any]
) -> None:
    sets = scans._sets[newest(scans)]
    nearest = (sets.prototypes @ (np.eye(6)[:3] - sets.published.mean).T).argmax(axis=1)
    first = ask(scans, 0)
    with Index.open(place / "private") as private:
        names = {item.id: item.name for item in private.items(private.ids())}
        gone = CLASSES[nearest[1]]
        private.delete([number for number, name in names.items() if name.startswith(gone)])
        ask(scans, 1)
        assert counts[1][gone] == 0
        prototype = sets.prototypes[2] + sets.published.mean
        new = (prototype / np.linalg.norm(prototype)).astype(np.float32)
        private.add((Item(new, "malignant/new") for _ in range(100)), row_exact=True)
        ask(scans, 2)
    assert counts[2] == {"benign": 0, "malignant": max(sum(counts[2].values()), 1), "none": 0}
    assert ask(scans, 0) == first
    assert debits(scans) == 3


def test_a_new_map_has_new_sets_and_old_answers_stay(place: Path) -> None:
    found = gallery(place, answers=2 * SETS)
    old = newest(found)
    first = ask(found, 0)
    with Index.open(place / "public") as public:
        public.add(Item(row, "more") for row in rows(15, 9)[0])
        public.publish(4.0, 0.2, n_sets=3)
        assert isinstance(found.classify(frame(public.maps()[0].public_id, 0), "a"), Classification)
        assert found.info().candidates == (0.2, 0.25)
        assert found.info().revision == 2
        assert found.classify(frame(old, 0), "a") == first
        assert debits(found) == 2
        public.publish(4.0, 0.2, n_sets=2)
        found.refresh()
        assert told_to_fetch(found, old).revision == 2
    found.close()


def test_threads_pay_once(scans: ProtectedGallery) -> None:
    begin = threading.Barrier(8)

    def work(n: int) -> list[Any]:
        begin.wait()
        return [ask(scans, number, f"client {n}") for number in (3, 1)]

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(work, range(8)))
    assert all(one == told[0] for one in told)
    assert debits(scans) == 2


@pytest.mark.parametrize("quota", [None, 2])
def test_who_comes_a_moment_too_late_pays_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, quota: int | None
) -> None:
    """Another process answers a set between our look into the ledger and our debit."""
    ours, theirs = (gallery(place, answers_per_client=quota) for _ in range(2))
    refresh = ours._paid.refresh
    told: list[Any] = []

    def late() -> None:
        refresh()
        if not told:
            told.append(ask(theirs, 0, "alice"))

    monkeypatch.setattr(ours._paid, "refresh", late)
    assert ask(ours, 0, "bob") == told[0]
    assert debits(ours) == 1
    if quota is not None:
        assert [count for _, count in ours.terms.account.balance(client="bob").remaining] == [quota]
    ours.close()
    theirs.close()


def test_a_record_of_no_class_that_comes_later_does_not_vote(
    scans: ProtectedGallery, place: Path, counts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    prototype = scans._sets[newest(scans)].prototypes[0].astype(np.float32)
    with Index.open(place / "private") as private:
        names = (f"strange {PATIENT}/a", PATIENT, f"benign{PATIENT}")
        private.add((Item(prototype, name) for name in names), row_exact=True)
    with caplog.at_level(logging.DEBUG):
        assert isinstance(ask(scans, 0), Classification)
    assert "records of no class" in caplog.text
    assert PATIENT not in caplog.text
    with Index.open(place / "private") as private:
        private.delete(private.ids()[-3:])
        found = gallery(place)
        assert ask(found, 0).votes.keys() == counts[0].keys()


@pytest.mark.parametrize("breaks", ["index", "ledger", "count"])
def test_a_failure_tells_nothing_and_is_not_paid_for_again_and_again(
    scans: ProtectedGallery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaks: str
) -> None:
    monkeypatch.setattr(_protected, "_PATIENCE", 0.0)

    def broken(*_: Any, **__: Any) -> Any:
        kinds = {"index": UnknownItemError([771234]), "ledger": LedgerUnavailableError(PATIENT)}
        raise kinds.get(breaks, RuntimeError(PATIENT))

    with monkeypatch.context() as patched, caplog.at_level(logging.DEBUG):
        if breaks == "index":
            scans._voters._fitted = None
            patched.setattr(scans._private, "snapshot", broken)
        elif breaks == "ledger":
            patched.setattr(type(scans.terms.account), "receipt", broken)
        else:
            patched.setattr(NeighborPoll, "tallies", broken)
        for _ in range(3):
            with pytest.raises(UnavailableError) as error:
                ask(scans, 0)
            assert error.value.__context__ is None
            assert error.value.__cause__ is None
            assert "771234" not in str(error.value)
    assert "771234" not in caplog.text
    assert "771234" not in repr(scans) + repr(vars(scans))
    assert debits(scans) == (1 if breaks == "count" else 0)
    if breaks != "count":  # it comes back by itself
        assert isinstance(ask(scans, 0), Classification)


def test_frames_that_are_no_queries_are_refused(scans: ProtectedGallery) -> None:
    known = newest(scans)
    for data in (b"", b"nonsense", frame(known, 0)[:-3], PublicRequest().to_bytes()):
        assert refused(scans.classify(data, "alice")) == RefusalCode.MALFORMED
    for number in (-1, SETS, 2**31 - 1):
        assert refused(scans.classify(frame(known, number), "alice")) == RefusalCode.MALFORMED
    assert debits(scans) == 0


STRAY = (f"elsewhere/{PATIENT}", PATIENT, f"/{PATIENT}", f"Benign/{PATIENT}", "")


@pytest.mark.parametrize("name", STRAY)
def test_a_record_of_no_class_stops_the_start(place: Path, name: str) -> None:
    with Index.open(place / "private") as private:
        private.add([Item(rows(1, 8)[0][0], name)], row_exact=True)
    with pytest.raises(ValueError, match="first folder is not in classes") as error:
        gallery(place)
    assert PATIENT not in str(error.value)
    assert not (place / "ledger.db").exists()


def test_what_is_published_is_not_protected(place: Path) -> None:
    public, private = Index.open(place / "public"), Index.open(place / "private")
    for one in (private, public):
        with pytest.raises(ValueError, match="must be different indexes"):
            ProtectedGallery(one, Index.open(one._where), "scans", **_terms(place))
    image = private.snapshot().features[40] * np.float32(1 + 2e-6)  # another batch gives other last digits
    public.add([Item(image, "seen elsewhere")])
    with pytest.raises(ValueError, match="share an image") as error:
        gallery(place)
    assert PATIENT not in str(error.value)


def test_rows_that_are_not_exact_are_not_protected(place: Path) -> None:
    with Index.open(place / "private") as private:
        (number,) = private.add([Item(rows(1, 8)[0][0], f"none/{PATIENT}")])
    with pytest.raises(InexactRowsError, match="nearveil index DIR --private") as error:
        gallery(place)
    assert PATIENT not in str(error.value)
    with Ledger(place / "ledger.db") as ledger:
        assert ledger.accounts() == []
    with Index.open(place / "private") as private:
        assert not private.is_private
        private.delete([number])
    found = gallery(place)
    with Index.open(place / "private") as private, pytest.raises(InexactRowsError):
        private.add([Item(rows(1, 8)[0][0], f"none/{PATIENT}")])
    found.close()


_ELSEWHERE = """
import sys
from pathlib import Path
from tests.service.protected import gallery
gallery(Path(sys.argv[1])).close()
"""


def test_records_of_a_protected_gallery_are_served_openly_by_no_process(place: Path) -> None:
    """The exploit: another configuration, with the same index as an open gallery."""
    server = OpenGallery(Index.open(place / "private"), "scans", offers=("names", "thumbnails", "originals"))
    (own,) = server.index.maps()
    message = frame(own.public_id, 0)
    assert server.map()
    assert server.query(message) == server.known(message)
    assert PATIENT.encode() in server.original(0)
    root = Path(__file__).parents[2]
    told = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    subprocess.run([sys.executable, "-c", _ELSEWHERE, str(place)], env=told, check=True, timeout=300)  # noqa: S603
    assert not server.current()
    assert server.known(message) is None
    assert server.known_map() is None
    for shows in (server.map, server.info, server.refresh, lambda: server.query(message), lambda: server.original(0)):
        with pytest.raises(UnavailableError):
            shows()
    server.close()
    settings = Settings.load(galleries=[{"name": "scans", "index": str(place / "private")}])
    with pytest.raises(PrivateIndexError, match="its rows are private"):
        open_galleries(settings)
    swapped = _terms(place, ledger=place / "other.db", account="other")
    with (
        Index.open(place / "private") as private,
        Index.open(place / "public") as public,
        pytest.raises(PrivateIndexError),
    ):
        ProtectedGallery(public, private, "scans", **swapped)
    for where in (place / "private", str(place / "private"), Index.open(place / "private")):
        with pytest.raises(PrivateIndexError):
            Client(where)


def test_one_record_less_changes_votes_by_what_is_charged_with_a_network(tmp_path: Path) -> None:
    """The exploit: [16, 0] and [14, 2] votes of two real indexes with and without one record."""
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(8, track_running_stats=False)  # what an image becomes depends on its batch
    extractor = TorchExtractor(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), norm), side=16, batch=2)
    images = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    shown = extractor.extract(list(images[30:]), row_exact=True)
    with Index.create(tmp_path / "public", dimension=8, extractor=extractor.fingerprint) as public:
        public.add(Item(row) for row in shown)
        public.publish(4.0, 0.25, n_sets=SETS)

    def votes(gone: int | None, *, row_exact: bool) -> Any:
        kept = [number for number in range(30) if number != gone]
        made = extractor.extract([images[number] for number in kept], row_exact=row_exact)
        place = tmp_path / f"{gone} {row_exact}"
        shutil.copytree(tmp_path / "public", place / "public")
        with Index.create(place / "private", dimension=8, extractor=extractor.fingerprint) as private:
            items = (Item(row, f"{CLASSES[n % 3]}/{n}") for n, row in zip(kept, made, strict=True))
            private.add(items, row_exact=row_exact)
        found = gallery(place)
        sets = found._sets[newest(found)]
        (tally,) = found._voters.on(sets)._poll.tallies(sets.prototypes, None)
        found.close()
        return tally.sums

    whole = votes(None, row_exact=True)
    changes = [whole - votes(gone, row_exact=True) for gone in (0, 13, 29)]
    assert max((change**2).sum(axis=1).max() for change in changes) <= 2
    with pytest.raises(InexactRowsError):
        votes(None, row_exact=False)


def _terms(place: Path, **changed: Any) -> dict[str, Any]:
    return {
        "classes": CLASSES, "epsilon": 1.0, "delta": 1e-6, "ledger": place / "ledger.db", "account": "scans", **changed
    }  # fmt: skip


def test_indexes_must_fit(place: Path, tmp_path: Path) -> None:
    private, public = Index.open(place / "private"), Index.open(place / "public")
    with Index.create(tmp_path / "other", dimension=6, extractor="another") as other:
        other.add(Item(row) for row in rows(30, 4)[0])
        other.publish(4.0, 0.25, n_sets=3)
        with pytest.raises(ValueError, match="features of one extractor"):
            ProtectedGallery(private, other, "scans", **_terms(place))
    with (
        Index.create(tmp_path / "new", dimension=6, extractor="toy") as new,
        pytest.raises(NotPublishedError, match="nothing was published"),
    ):
        ProtectedGallery(private, new, "scans", **_terms(place))
    with pytest.raises(ValueError, match="name must be"):
        ProtectedGallery(private, public, "Not A Name", **_terms(place))
    assert not (place / "ledger.db").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"classes": "benign"}, "classes must list"),
        ({"classes": ["benign"]}, "classes must list"),
        ({"classes": [*CLASSES, "none"]}, "classes must list"),
        ({"classes": [*CLASSES, "a/b"]}, "classes must list"),
        ({"classes": [*CLASSES, 3]}, "classes must list"),
        ({"classes": CLASSES[:2]}, "not in classes"),
        ({"answers": 0}, "answers must be a whole number"),
        ({"answers": True}, "answers must be a whole number"),
        ({"answers_per_client": 0}, "answers_per_client must be a whole number"),
        ({"answers_per_client": SETS + 2}, "answers_per_client must be at most 5"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": 1e9}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"ledger": None}, "ledger must be given"),
        ({"account": ""}, "name must be a text"),
        ({"unit": ""}, "unit must be a text"),
    ],
)
def test_wrong_parameters_are_named(place: Path, changed: dict[str, Any], message: str) -> None:
    private, public = Index.open(place / "private"), Index.open(place / "public")
    with pytest.raises(ValueError, match=message):
        ProtectedGallery(private, public, "scans", **_terms(place, **changed))


def test_an_account_keeps_its_terms(place: Path) -> None:
    found = gallery(place)
    ask(found, 0)
    noise = found.terms.noise
    found.close()
    for changed, message in (
        ({"epsilon": 0.5}, "epsilon and delta must be those of the account, 1 and 1e-06"),
        ({"epsilon": 2.0}, "epsilon and delta must be those"),
        ({"delta": 1e-5}, "epsilon and delta must be those"),
        ({"answers": SETS}, "answers must be those of the account, 5"),
        ({"unit": "person with all images"}, "unit must be that of the account, 'record'"),
        ({"classes": [*CLASSES, "new"]}, "answered for other classes"),
    ):
        with pytest.raises(ValueError, match=message):
            gallery(place, **changed)
    with Ledger(place / "ledger.db") as ledger:
        again = gallery(place, ledger, answers=SETS + 1)
        assert again.terms.noise == noise
        again.close()
        account = ledger.account("scans")
        with pytest.raises(ValueError, match="account must be the name"):
            gallery(place, ledger, account=account)
        private, public = Index.open(place / "private"), Index.open(place / "public")
        given = _terms(place, ledger=None, account=account)
        assert ProtectedGallery(private, public, "scans", **given).terms.answers == SETS + 1
        about: dict[str, Any] = {"owner": "me", "unit": "record", "delta": 1e-6}
        kinds: dict[str, dict[str, Any]] = {
            "filter": {"protects": "database", "relation": "add-remove", "epsilon": 1.0},
            "query": {"protects": "query", "relation": "replace", "epsilon": 1.0},
        }
        for name, kind in kinds.items():
            ledger.open_account(name, **about, **kind)
            with pytest.raises(ValueError, match="opened for a protected gallery"):
                gallery(place, ledger, account=name)
        two = [VoteHistogram(20.0), VoteHistogram(30.0)]
        ledger.open_account(
            "two",
            **about,
            protects="database",
            relation="add-remove",
            epsilon=8.0,
            plan=two,
        )
        with pytest.raises(ValueError, match="votes and nothing else"):
            gallery(place, ledger, account="two")


def test_clients_are_told_the_unit_that_the_operator_states(place: Path) -> None:
    person = "person with all images"
    found = gallery(place, unit=person)
    told = found.info().promise
    assert told is not None
    assert (told.unit, found.terms.account.unit) == (person, person)
    assert f"whether any one {person} is in the database" in told.words
    assert ask(found, 0).promise == told
    found.close()
    with pytest.raises(ValueError, match=f"unit must be that of the account, '{person}'"):
        gallery(place)


@given(st.floats(0.05, 1e6))
def test_the_noise_of_an_account_is_found_to_the_last_bit(noise: float) -> None:
    event = VoteHistogram(noise).gaussian
    found = _noise(event)
    assert found is not None
    assert VoteHistogram(found).gaussian == event


def test_an_index_that_fails_at_the_start_closes_the_ledger(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    close = Ledger.close

    def watched(self: Ledger) -> None:
        closed.append(True)
        close(self)

    monkeypatch.setattr(Ledger, "close", watched)

    def broken(*_: Any) -> Any:
        raise IndexStoreError("gone")

    monkeypatch.setattr("nearveil.service._protected.PrivateVoters.on", broken)
    with pytest.raises(IndexStoreError):
        gallery(place)
    assert closed == [True]


def test_records_answer_from_one_account_alone(place: Path) -> None:
    found = gallery(place)
    ask(found, 0)
    found.close()
    for changed in ({"account": "another"}, {"ledger": place / "another.db"}):
        with pytest.raises(ValueError, match="answer from another account already"):
            gallery(place, **changed)
    again = gallery(place)  # the first still serves
    ask(again, 0)
    again.close()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"name": "shown", "index": "private"}, "must not be served by another"),
        ({"name": "twice", "account": "other"}, "must not be served by another"),
        (
            {"name": "turned", "index": "public", "public": "private", "account": "other"},
            "must not be served by another",
        ),
        ({"name": "shared", "index": "more"}, "must not answer from one account"),
    ],
)
def test_galleries_that_would_break_a_promise_are_not_opened(place: Path, second: dict[str, str], message: str) -> None:
    first = {"kind": "protected", "name": "scans", "index": "private", "public": "public", "ledger": "l.db", **TERMS}
    first["account"] = "scans"
    other = dict(first) | second if len(second) > 2 or "account" in second or second["index"] == "more" else second
    told = [
        {name: str(place / value) if name in ("index", "public", "ledger") else value for name, value in one.items()}
        for one in (first, other)
    ]
    told[0]["index"] = f"{place}/./private/"  # however it is written
    with pytest.raises(ValueError, match=message):
        open_galleries(Settings.load(galleries=told, tokens=str(place / "tokens.db")))
    assert not (place / "l.db").exists()


def test_a_public_index_that_loses_its_maps(place: Path) -> None:
    found = gallery(place)
    number = frame("0" * 32, 0)
    with Index.open(place / "public") as public, public._database.begin_write() as connection:
        connection.exec_driver_sql("DELETE FROM nearveil_published_part")
        connection.exec_driver_sql("DELETE FROM nearveil_published")
    found.refresh()
    with contextlib.suppress(ServiceError):
        found.classify(number, "ann")  # nothing else is raised
    found.close()


def test_what_is_released_has_the_noise_that_is_promised(place: Path) -> None:
    """Votes as they are served, on a gallery that has one record alone: all that is seen is noise, and one vote."""
    with Index.create(place / "one", dimension=DIMENSION, extractor="toy") as private:
        private.add([Item(np.eye(DIMENSION, dtype=np.float32)[0], f"{CLASSES[0]}/one")], row_exact=True)
        told = _terms(place) | {"answers": 400, "epsilon": 8.0, "account": "one"}
        with Index.open(place / "public") as public:
            found = ProtectedGallery(private, public, "scans", **told)
            voter = found._voters.on(next(iter(found._sets.values())))
            row = found._sets[next(iter(found._sets))].prototypes[0]
            drawn = np.array([voter.answer_once(row, f"{n}").votes[0] for n in range(300)])
            noise = found.terms.noise
    # 900 numbers whose variance is noise^2, and a vote for the first class: chi-square, 5 standard deviations each way.
    centred = drawn - np.array([1.0, 0.0, 0.0])
    assert abs(float((centred**2).mean()) / noise**2 - 1) < 5 * math.sqrt(2 / centred.size)
    assert (np.abs(centred.mean(axis=0)) < 5 * noise / math.sqrt(len(drawn))).all()
