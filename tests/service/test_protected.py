"""A protected gallery shows a model and nothing else, pays before it is made, and stays within its promise."""

import logging
import math
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil import Client
from nearveil.features import TorchExtractor
from nearveil.gallery import Index, IndexStoreError, Item
from nearveil.gallery.errors import InexactRowsError, PrivateIndexError
from nearveil.ledger import Account, Debit, Ledger, LedgerUnavailableError
from nearveil.privacy.events import VoteHistogram
from nearveil.private_knn import PrivateDiscriminant, PublicDiscriminant, discriminant, plan
from nearveil.private_knn.discriminant import sum_classes
from nearveil.private_knn.discriminant_model import SENSITIVITY
from nearveil.server import OpenGallery, Settings, open_galleries
from nearveil.server.errors import ServiceError
from nearveil.server.protected import ProtectedGallery, PublicationError
from tests.programs import Program
from tests.service.protected import (
    CLASSES,
    DIMENSION,
    PATIENT,
    TERMS,
    copied,
    debits,
    gallery,
    make,
    published,
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
    found = published(place)
    yield found
    found.close()


def _terms(place: Path, **changed: Any) -> dict[str, Any]:
    return {**TERMS, "ledger": place / "ledger.db", "account": "scans", **changed}


def test_only_the_model_is_shown(scans: ProtectedGallery) -> None:
    for shows in (lambda: scans.map(0.25), lambda: scans.query(b"x"), lambda: scans.original(0)):
        with pytest.raises(ServiceError, match="nothing of its records but its model"):
            shows()  # type: ignore[no-untyped-call]
    model = PublicDiscriminant.from_bytes(scans.model())
    assert model.classes.tolist() == list(CLASSES)
    assert (model.guarantee.protects, model.guarantee.unit) == ("database", "record")
    assert model.guarantee.epsilon <= TERMS["epsilon"]
    features, which = rows(30, 3)
    assert (model.predict(features) == np.array(CLASSES)[which]).mean() > 0.9
    said = scans.model() + scans.info().model_dump_json().encode()
    assert PATIENT.encode() not in said
    assert b"771234" not in said


def test_info_says_nothing_about_the_records(scans: ProtectedGallery, place: Path) -> None:
    before, model = scans.info(), scans.model()
    assert (before.kind, before.offers, before.candidates, before.revision) == ("protected", (), (), 1)
    assert before.promise is not None
    assert before.promise.epsilon == pytest.approx(30.0, rel=1e-4)
    assert before.promise.delta == 1e-6
    assert before.promise.protects == "database"
    assert before.promise.sound
    assert before.is_published
    with Index.open(place / "private") as private:
        private.add((Item(row, "none/new") for row in rows(30, 5)[0]), row_exact=True)
        private.delete(private.ids()[:50])
    scans.refresh()
    assert scans.info() == before
    assert scans.model() is model  # the same until it is published anew


def test_a_gallery_without_a_model_says_so(place: Path) -> None:
    found = gallery(place)
    assert (found.account, found.publications_left) == (None, 3)
    assert not found.info().is_published
    assert found.info().promise is None
    with pytest.raises(ServiceError, match="published no model yet"):
        found.model()
    with Client(found) as client, pytest.raises(ValueError, match="scans has no model yet"):
        client.classify(rows(1, 3)[0][0])
    found.close()
    with Index.open(place / "private") as private:
        assert not private.is_private
    told = {**_terms(place), "name": "scans", "kind": "protected"}
    told |= {name: str(place / name) for name in ("public", "ledger")} | {"index": str(place / "private")}
    with pytest.raises(ValueError, match="scans has no model yet: `nearveil protect scans --publish` makes one"):
        open_galleries(Settings.load(galleries=[told], tokens=str(place / "tokens.db")))


def test_the_debit_comes_before_the_model_and_the_store_before_it_is_shown(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = gallery(place)
    order: list[tuple[str, int, bool]] = []
    fit, store = PrivateDiscriminant.fit, Debit.store

    def watched(name: str) -> None:
        scans.refresh()
        order.append((name, debits(scans), scans.info().is_published))

    monkeypatch.setattr(scans, "_lock", threading.RLock())

    def fitted(self: Any, *arguments: Any, **named: Any) -> Any:
        watched("fit")
        return fit(self, *arguments, **named)

    def stored(self: Debit, message: bytes) -> None:
        watched("store")
        store(self, message)

    monkeypatch.setattr(PrivateDiscriminant, "fit", fitted)
    monkeypatch.setattr(Debit, "store", stored)
    scans.publish()
    assert order == [("fit", 1, False), ("store", 1, False)]
    assert scans.account is not None
    kinds = [entry.kind for entry in scans.account.history()]
    assert kinds == ["opened", "debit", "message"]
    assert scans.account.history()[-1].message == scans.model()
    scans.close()


def test_publications_are_counted_and_run_out(place: Path) -> None:
    found = published(place, publications=2)
    first = found.model(), found.info().version
    assert found.publications_left == 1
    with Index.open(place / "private") as private:
        names = {item.id: item.name for item in private.items(private.ids())}
        private.delete([number for number, name in names.items() if name.startswith("none")])
    assert found.model() == first[0]
    second = found.publish()
    assert (second.number, found.publications_left) == (2, 0)
    assert found.model() == second.model != first[0]
    assert found.info().version == second.version != first[1]
    for _ in range(2):
        with pytest.raises(PublicationError, match="paid for all 2 that it was opened for"):
            found.publish()
    assert found.model() == second.model
    found.close()
    again = gallery(place, publications=2)  # a restart brings nothing back
    with pytest.raises(PublicationError, match="used up"):
        again.publish()
    assert (again.model(), debits(again)) == (second.model, 2)
    assert again.account is not None
    assert again.account.balance().left < 1.0
    again.close()


def test_another_process_shows_a_new_model_after_a_look(scans: ProtectedGallery, place: Path) -> None:
    other = gallery(place)
    assert other.model() == scans.model()
    newer = scans.publish()
    assert other.info().revision == 1
    other.refresh()
    assert (other.model(), other.info().revision) == (newer.model, 2)
    other.close()


def test_threads_publish_once_each(place: Path) -> None:
    found = gallery(place)
    begin = threading.Barrier(3)

    def work(_: int) -> int:
        begin.wait()
        return found.publish().number

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(work, range(3))) == [1, 2, 3]
    assert debits(found) == 3
    found.close()


@pytest.mark.parametrize("breaks", ["index", "ledger"])
def test_what_fails_before_the_debit_costs_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaks: str
) -> None:
    scans = gallery(place)

    def broken(*_: Any, **__: Any) -> Any:
        raise LedgerUnavailableError("gone") if breaks == "ledger" else IndexStoreError("gone")

    with monkeypatch.context() as patched, caplog.at_level(logging.DEBUG):
        if breaks == "index":
            patched.setattr(scans._private, "snapshot", broken)
        else:
            patched.setattr(Account, "spend", broken)
        with pytest.raises((LedgerUnavailableError, IndexStoreError)):
            scans.publish()
    assert debits(scans) == 0
    assert "771234" not in caplog.text + repr(scans) + repr(vars(scans))
    assert scans.publish().number == 1
    with monkeypatch.context() as patched:  # what is published is served from memory
        patched.setattr(Account, "receipt", broken if breaks == "ledger" else scans.account.receipt)  # type: ignore[union-attr]
        if breaks == "ledger":
            with pytest.raises(ServiceError, match="Try again later"):
                scans.refresh()
        assert scans.model()
    scans.close()


def test_a_fit_that_fails_costs_one_publication_and_shows_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearveil.server.protected._STORE_TIMEOUT", 0.0)
    scans = gallery(place)
    with monkeypatch.context() as patched:
        patched.setattr(PrivateDiscriminant, "export", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scans.publish()
    assert (debits(scans), scans.info().is_published) == (1, False)
    assert scans.publish().number == 2
    assert debits(scans) == 2
    scans.close()


def test_serving_reads_no_record(scans: ProtectedGallery, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a record was read")

    for name in ("snapshot", "items", "features", "search"):
        monkeypatch.setattr(Index, name, never)
    again = gallery(place)
    again.refresh()
    assert again.model() == scans.model()
    assert again.info() == scans.info()
    again.close()


def test_noise_alone_is_refused_unless_allowed(place: Path) -> None:
    found = gallery(place, epsilon=0.01, publications=1)
    forecast = found.forecast()
    assert abs(forecast.accuracy - forecast.floor) < 0.1
    assert forecast.records_per_class == dict.fromkeys(CLASSES, 80)
    assert forecast.noise_per_class > 80
    with pytest.raises(PublicationError, match="noise alone") as error:
        found.publish()
    assert not any(figure in str(error.value) for figure in ("80", "0.3", "433"))  # figures are for the terminal
    assert found.account is None  # nothing was opened, so other terms are still free
    with Index.open(place / "private") as private:
        assert not private.is_private
    assert found.publish(allow_noise=True).number == 1
    found.close()


def test_the_model_has_the_noise_that_the_account_pays_for(scans: ProtectedGallery) -> None:
    assert scans.account is not None
    ((paid, left),) = scans.account.remaining()
    (event,) = PublicDiscriminant.from_bytes(scans.model()).guarantee.events
    assert (event.event, event.count) == (paid, TERMS["publications"])
    assert left == TERMS["publications"] - 1


def test_another_last_digit_of_an_accountant_loses_no_publication(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(place).close()
    calibrated = plan._calibrate
    monkeypatch.setattr(plan, "_calibrate", lambda *given: calibrated(*given) * (1 + 1e-12))
    again = gallery(place)
    assert again.publish().number == 2
    again.close()


def test_one_record_less_changes_sums_by_what_is_charged_with_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exploit: a row that depends on its batch, so that one record less moves the sums by far more."""
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(8, track_running_stats=False)  # what an image becomes depends on its batch
    extractor = TorchExtractor(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), norm), side=16, batch=2)
    images = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    shown = extractor.extract(list(images[30:]), row_exact=True)
    with Index.create(tmp_path / "public", dimension=8, extractor=extractor.fingerprint) as public:
        public.add(Item(row) for row in shown)
    exact: list[Any] = []

    def watched(*given: Any) -> Any:
        exact.append(sum_classes(*given))
        return exact[-1]

    monkeypatch.setattr(discriminant, "sum_classes", watched)

    def sums(gone: int | None, *, row_exact: bool) -> Any:
        kept = [number for number in range(30) if number != gone]
        made = extractor.extract([images[number] for number in kept], row_exact=row_exact)
        place = tmp_path / f"{gone} {row_exact}"
        shutil.copytree(tmp_path / "public", place / "public")
        with Index.create(place / "private", dimension=8, extractor=extractor.fingerprint) as private:
            items = (Item(row, f"{CLASSES[n % 3]}/{n}") for n, row in zip(kept, made, strict=True))
            private.add(items, row_exact=row_exact)
        found = gallery(place)
        found.publish(allow_noise=True)
        found.close()
        return exact[-1]

    whole = sums(None, row_exact=True)
    changes = [whole - sums(gone, row_exact=True) for gone in (0, 13, 29)]
    assert max((change.astype(float) ** 2).sum() for change in changes) <= SENSITIVITY**2
    assert min((change.astype(float) ** 2).sum() for change in changes) > 0.5 * SENSITIVITY**2
    with pytest.raises(InexactRowsError):
        sums(None, row_exact=False)


STRAY = (f"elsewhere/{PATIENT}", PATIENT, f"/{PATIENT}", f"Benign/{PATIENT}", "")


@pytest.mark.parametrize("name", STRAY)
def test_a_record_of_no_class_is_not_published(place: Path, name: str) -> None:
    with Index.open(place / "private") as private:
        private.add([Item(rows(1, 8)[0][0], name)], row_exact=True)
    found = gallery(place)
    for asks in (found.publish, found.forecast):
        with pytest.raises(ValueError, match="a record of no class") as error:
            asks()
        assert PATIENT not in str(error.value)
    assert found.account is None
    found.close()


def test_what_is_published_is_not_protected(place: Path) -> None:
    public, private = Index.open(place / "public"), Index.open(place / "private")
    for one in (private, public):
        with pytest.raises(ValueError, match="must be different indexes"):
            ProtectedGallery(one, Index.open(one._location), "scans", **_terms(place))
    image = private.snapshot().features[40] * np.float32(1 + 2e-6)  # another batch gives other last digits
    public.add([Item(image, "seen elsewhere")])
    found = gallery(place)
    with pytest.raises(ValueError, match="an item is in both indexes") as error:
        found.publish()
    assert PATIENT not in str(error.value)
    assert found.account is None
    found.close()


def test_nothing_to_learn_from_is_said(place: Path) -> None:
    with Index.open(place / "public") as public:
        rest = public.snapshot()
        public.delete(public.ids())
    found = gallery(place)
    with pytest.raises(ValueError, match="public: the index is empty"):
        found.publish()
    with Index.open(place / "public") as public, Index.open(place / "private") as private:
        public.add(Item(row) for row in rest.features)
        private.delete(private.ids())
    with pytest.raises(ValueError, match="private has no records"):
        found.publish(allow_noise=True)
    found.close()


def test_rows_that_are_not_exact_are_not_protected(place: Path) -> None:
    with Index.open(place / "private") as private:
        (number,) = private.add([Item(rows(1, 8)[0][0], f"none/{PATIENT}")])
    with pytest.raises(InexactRowsError, match="nearveil index DIR --private") as error:
        gallery(place)
    assert PATIENT not in str(error.value)
    with Index.open(place / "private") as private:
        assert not private.is_private
        private.delete([number])
    found = published(place)
    with Index.open(place / "private") as private, pytest.raises(InexactRowsError):
        private.add([Item(rows(1, 8)[0][0], f"none/{PATIENT}")])
    found.close()


_ELSEWHERE = """
import sys
from pathlib import Path
from tests.service.protected import published
published(Path(sys.argv[1])).close()
"""


def test_records_of_a_protected_gallery_are_served_openly_by_no_process(place: Path) -> None:
    """The exploit: another configuration, with the same index as an open gallery."""
    server = OpenGallery(Index.open(place / "private"), "scans", offers=("names", "thumbnails", "originals"))
    assert server.map()
    assert PATIENT.encode() in server.original(0)
    elsewhere = Program("-c", _ELSEWHERE, str(place))
    elsewhere.read(300)
    assert elsewhere.returncode == 0
    for shows in (server.map, server.info, server.refresh, lambda: server.query(b""), lambda: server.original(0)):
        with pytest.raises(ServiceError, match="Try again later"):
            shows()
    server.close()
    settings = Settings.load(galleries=[{"name": "scans", "index": str(place / "private")}])
    with pytest.raises(PrivateIndexError, match="has private rows"):
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


def test_indexes_must_fit(place: Path, tmp_path: Path) -> None:
    private, public = Index.open(place / "private"), Index.open(place / "public")
    with (
        Index.create(tmp_path / "other", dimension=6, extractor="another") as other,
        pytest.raises(ValueError, match="features of one extractor"),
    ):
        ProtectedGallery(private, other, "scans", **_terms(place))
    with pytest.raises(ValueError, match="name must be"):
        ProtectedGallery(private, public, "Not A Name", **_terms(place))
    assert not (place / "ledger.db").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"classes": "benign"}, "classes must be 2 to"),
        ({"classes": ["benign"]}, "classes must be 2 to"),
        ({"classes": [*CLASSES, "none"]}, "classes must be 2 to"),
        ({"classes": [*CLASSES, "a/b"]}, "classes must be 2 to"),
        ({"classes": [*CLASSES, 3]}, "classes must be 2 to"),
        ({"classes": [*CLASSES, "\x1b[2J"]}, "classes must be 2 to"),
        ({"publications": 0}, "publications must be an integer"),
        ({"publications": True}, "publications must be an integer"),
        ({"publications": 1.5}, "publications must be an integer"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": 1e9}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"ledger": None}, "ledger must be given"),
        ({"account": ""}, "name must be a text"),
        ({"unit": ""}, "unit must say what one record is"),
    ],
)
def test_wrong_parameters_are_named(place: Path, changed: dict[str, Any], message: str) -> None:
    private, public = Index.open(place / "private"), Index.open(place / "public")
    with pytest.raises(ValueError, match=message):
        ProtectedGallery(private, public, "scans", **_terms(place, **changed)).publish()
    assert not private.is_private


def test_an_account_keeps_its_terms(place: Path) -> None:
    published(place).close()
    for changed, message in (
        ({"epsilon": 2.0}, "epsilon and delta must be those of the account, 30 and 1e-06"),
        ({"epsilon": 31.0}, "epsilon and delta must be those"),
        ({"delta": 1e-5}, "epsilon and delta must be those"),
        ({"publications": 4}, "publications must be those of the account, 3"),
        ({"unit": "person with all images"}, "unit must be that of the account, 'record'"),
    ):
        with pytest.raises(ValueError, match=message):
            gallery(place, **changed)
    with Ledger(place / "ledger.db") as ledger:
        account = ledger.account("scans")
        with pytest.raises(ValueError, match="account must be the name"):
            gallery(place, ledger, account=account)
        private, public = Index.open(place / "private"), Index.open(place / "public")
        again = ProtectedGallery(private, public, "scans", **_terms(place, ledger=None, account=account))
        assert again.publish().number == 2
        about: dict[str, Any] = {"owner": "me", "unit": "record", "delta": 1e-6}
        kinds: dict[str, dict[str, Any]] = {
            "filter": {"protects": "database", "relation": "add-remove", "epsilon": 30.0},
            "query": {"protects": "query", "relation": "replace", "epsilon": 30.0},
        }
        for name, kind in kinds.items():
            ledger.open_account(name, **about, **kind)
            with pytest.raises(ValueError, match="opened for a protected gallery"):
                gallery(place, ledger, account=name)


def test_an_account_of_an_earlier_version_says_what_to_do(place: Path) -> None:
    with Ledger(place / "ledger.db") as ledger:
        about: dict[str, Any] = {"protects": "database", "relation": "add-remove", "unit": "record"}
        ledger.open_account(
            "scans",
            owner="nearveil.service",
            epsilon=30.0,
            delta=1e-6,
            plan=[(VoteHistogram(0.7), 3)],
            **about,
        )
    with pytest.raises(ValueError, match=r"records that vote on sets.*use a new account, and index the records again"):
        gallery(place)


def test_an_account_that_pays_for_other_noise_pays_for_no_model(place: Path) -> None:
    with Ledger(place / "ledger.db") as ledger:
        about: dict[str, Any] = {"protects": "database", "relation": "add-remove", "unit": "record", "owner": "me"}
        ledger.open_account("scans", epsilon=30.0, delta=1e-6, plan=[(VoteHistogram(0.7), 3)], **about)
        found = gallery(place, ledger)
        with pytest.raises(ValueError, match="account cannot pay for this estimator"):
            found.publish()
        assert debits(found) == 0


def test_clients_are_told_the_unit_that_the_operator_states(place: Path) -> None:
    person = "person with all images"
    found = published(place, unit=person)
    told = found.info().promise
    assert told is not None
    assert told.unit == person == PublicDiscriminant.from_bytes(found.model()).guarantee.unit
    assert f"whether any one {person} is in the database" in told.words
    found.close()
    with pytest.raises(ValueError, match=f"unit must be that of the account, '{person}'"):
        gallery(place)


def test_a_start_that_fails_closes_the_ledger(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(place).close()
    closed: list[bool] = []
    close = Ledger.close

    def watched(self: Ledger) -> None:
        closed.append(True)
        close(self)

    monkeypatch.setattr(Ledger, "close", watched)

    def broken(*_: Any) -> Any:
        raise IndexStoreError("gone")

    monkeypatch.setattr(Index, "bind", broken)
    with pytest.raises(IndexStoreError):
        gallery(place)
    assert closed == [True]


def test_records_are_paid_for_from_one_account_alone(place: Path) -> None:
    published(place).close()
    for changed in ({"account": "another"}, {"ledger": place / "another.db"}):
        found = gallery(place, **changed)
        with pytest.raises(ValueError, match="paid for from another account"):
            found.publish()
        assert debits(found) == 0
        found.close()
    again = gallery(place)  # the first still serves
    assert again.publish().number == 2
    again.close()


def test_a_ledger_that_is_deleted_buys_no_second_budget(place: Path) -> None:
    """The account of the same name, opened anew for the same terms, is another: the records are bound to the first."""
    published(place).close()
    for path in place.glob("ledger.db*"):
        path.unlink()
    found = gallery(place)
    with pytest.raises(ValueError, match="paid for from another account"):
        found.publish()
    assert debits(found) == 0
    assert not found.info().is_published
    found.close()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"name": "shown", "index": "private"}, "must not be served by another"),
        ({"name": "twice", "account": "other"}, "must not be served by another"),
        (
            {"name": "turned", "index": "public", "public": "private", "account": "other"},
            "must not be served by another",
        ),
        ({"name": "shared", "index": "more"}, "must not publish from one account"),
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


def test_records_never_show(scans: ProtectedGallery) -> None:
    features = rows(240, 0)[0]
    shown = repr(scans) + repr(scans._load_records()) + repr(vars(scans))
    assert features.shape == (240, DIMENSION)
    assert not any(f"{value:.4f}"[:6] in shown for value in features[:20].ravel())
    assert "771234" not in shown


def test_all_records_of_a_group_add_as_much_as_one(tmp_path: Path) -> None:
    """A person with a hundred scans moves the sums no further than a record, and the account says whom it protects."""
    features, which = rows(60, 5)
    private, public = (
        Index.create(tmp_path / name, dimension=features.shape[1], extractor="toy") for name in ("mine", "all")
    )
    items = [
        Item(row, f"{CLASSES[code]}/scan", metadata={"person": number // 3})
        for number, (row, code) in enumerate(zip(features, which, strict=True))
    ]
    private.add(items, row_exact=True)
    public.add(Item(row) for row in rows(60, 6)[0])
    terms = {"classes": CLASSES, "epsilon": 8.0, "delta": 1e-6, "ledger": tmp_path / "ledger.db", "account": "persons"}
    gallery = ProtectedGallery(private, public, "scans", group="person", **terms)  # type: ignore[arg-type]
    records = gallery._load_records()
    assert records.groups is not None
    assert sorted(np.unique(records.groups, return_counts=True)[1]) == [3] * 20
    gallery.publish(allow_noise=True)
    guarantee = PublicDiscriminant.from_bytes(gallery.model()).guarantee
    assert guarantee.unit == "person with all records"
    gallery.close()
