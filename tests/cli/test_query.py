"""``nearveil query``: pays first, says one thing, chooses at home, and explains what went wrong."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

pytest.importorskip("PIL")
pytest.importorskip("skimage")

from nearveil.cli import _accounts
from nearveil.cli._accounts import LazyAccount, PaymentOptions
from nearveil.features import HogColor, load_image
from nearveil.gallery import Index, Item
from nearveil.ledger import Ledger
from nearveil.mechanisms import Covers
from nearveil.privacy import Basis, compose_events
from nearveil.privacy.events import PureDp
from nearveil.server.galleries import OpenGallery
from nearveil.wire.messages import Query, Refusal, RefusalCode, decode_frame
from tests.cli.galleries import COUNT, colour, fine, gallery, picture, refused, run, told

MAGENTA = (255, 0, 255)
SURE = ("--epsilon", 40)  # the set that suits the image is named, but for a chance of 1e-16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with an index of its images, once."""
    folder = tmp_path_factory.mktemp("made")
    gallery(folder / "photos")
    fine("index", folder / "photos", "--into", folder / "index", "--extractor", "hog", "--candidates", 0.2)
    return folder


@pytest.fixture(autouse=True)
def indexed(made: Path, here: Path) -> None:
    shutil.copytree(made / "index", here / "data" / "nearveil" / "index")


MAP_REQUEST = b"the map"


@pytest.fixture
def image(here: Path) -> Path:
    """Return an image that looks like number 7 of the gallery, and is not in it."""
    return picture(here / "private.png", colour(7), seed=1000)


def left(here: Path) -> float:
    """Return what is left of the default account; all of it if it is not there."""
    place = here / "data" / "nearveil" / "ledger.db"
    if not place.exists():
        return _accounts.DEFAULT_EPSILON
    with Ledger(place, read_only=True) as book:
        return next((one.balance().left for one in book.accounts()), _accounts.DEFAULT_EPSILON)


def watched(monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes, bytes], bytes] | None = None) -> list[bytes]:
    """Return a list that will hold all that the gallery is asked: for its map, and by queries."""
    sent: list[bytes] = []
    ask, show = OpenGallery.query, OpenGallery.map

    def asked(self: OpenGallery, data: bytes) -> bytes:
        sent.append(data)
        answer = ask(self, data)
        return answer if change is None else change(data, answer)

    def shown(self: OpenGallery, candidates: float | None = None) -> bytes:
        sent.append(MAP_REQUEST)
        return show(self, candidates)

    monkeypatch.setattr(OpenGallery, "query", asked)
    monkeypatch.setattr(OpenGallery, "map", shown)
    return sent


def test_the_nearest_are_found_and_paid_for(image: Path, here: Path) -> None:
    found = told("query", image, *SURE, "-k", 3)
    with Index.open(here / "data" / "nearveil" / "index") as index:
        published = index.current().published
        row = HogColor().extract([load_image(image)])[0]
        asked, held = row, index.features(index.ids())
        cosines = held @ asked / np.linalg.norm(held, axis=1) / np.linalg.norm(asked)
        client = Covers(40.0, 0.2).fit_space(published.space).use_map(published.map)
        # At epsilon 40 no other set than the good one is named.
        good = int(client.release(row)["sets"][0])
        assert found["server_saw"]["set"] == good + 1  # people count from 1
        candidates = index.ids()[published.release.members_[[good]].indices]
        names = [item.name for item in index.items([one["id"] for one in found["found"]])]
    best = candidates[np.argsort(-cosines[candidates])][:3].tolist()
    assert [(one["rank"], one["id"]) for one in found["found"]] == list(enumerate(best, 1))
    assert [one["name"] for one in found["found"]] == names
    assert [one["similarity"] for one in found["found"]] == pytest.approx(cosines[best], abs=2e-3)
    assert (found["candidates"], found["paid"], found["left"], found["account"]) == (8, 40.0, 60.0, "queries")
    assert left(here) == 60.0


def test_the_first_query_says_which_account_it_opened(image: Path, here: Path) -> None:
    first, second = fine("query", image, "--epsilon", 4), fine("query", image, "--epsilon", 2)
    ledger = here / "data" / "nearveil" / "ledger.db"
    assert f"Opened the account 'queries' in {ledger}: epsilon 100 at delta 0" in first
    assert "Paid: epsilon 4, from the account 'queries'; left: 96 of 100." in first
    assert "at most a factor of 55" in first
    assert "Opened" not in second
    assert "left: 94 of 100." in second
    assert "at most a factor of 7.4" in second
    assert "94" in fine("budget", "show", "queries", "--ledger", ledger)


def test_an_account_with_a_delta_prices_messages_together(image: Path) -> None:
    fine("budget", "create", "album", "--owner", "me", "--epsilon", "40", "--delta", "1e-6")
    said = fine("query", image, "--epsilon", 4, "--account", "album")
    assert "of 40 (with a delta, messages are priced together, not summed)." in said


def test_a_message_with_a_delta_needs_an_account_with_one(here: Path) -> None:
    noise = GaussianDpEvent(10.0)
    terms: Any = {"delta": 1e-6, "protects": "query", "unit": "image", "relation": "replace"}
    with LazyAccount(PaymentOptions()) as payer:
        with pytest.raises(ValueError, match=r"Nothing was sent\. This message has a delta: open an account with one"):
            payer.spend(compose_events([noise], basis=Basis("noise"), **terms), "key")
        with pytest.raises(ValueError, match=r"Nothing was sent\. Lower --epsilon"):
            payer.spend(compose_events([PureDp(200.0)], basis=Basis("noise"), **terms | {"delta": 0.0}), "key")


def test_as_many_as_an_answer_holds(image: Path) -> None:
    assert len(told("query", image, "--epsilon", 4)["found"]) == 8
    assert len(told("query", image, "--epsilon", 4, "-k", 5)["found"]) == 5


def test_the_other_half_sees_one_message(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, looked = watched(monkeypatch), []
    read_texts = Index.texts

    def looking(self: Index, ids: Any, kind: Any) -> Any:
        looked.append(np.asarray(ids).tolist())
        return read_texts(self, ids, kind)

    monkeypatch.setattr(Index, "texts", looking)
    found = told("query", image, "--epsilon", 4, "-k", 2)
    assert sent[0] == MAP_REQUEST
    assert len(sent) == 2
    message = decode_frame(sent[1], Query).message
    assert {name: values.shape for name, values in message.arrays.items()} == {"sets": (1,)}
    assert found["server_saw"]["set"] == int(message["sets"][0]) + 1
    assert not message.seeded
    # Names are looked up for all candidates: which were chosen shows nowhere.
    assert [len(ids) for ids in looked] == [8]
    assert {one["id"] for one in found["found"]} <= set(looked[0])


def test_how_often_the_right_set_is_named(image: Path) -> None:
    found = told("query", image, "--epsilon", 2)
    sets = found["server_saw"]["of"]
    assert found["server_saw"]["probability_of_the_right_one"] == pytest.approx(np.exp(2) / (np.exp(2) + sets - 1))


def test_a_retry_with_the_key_spends_once(image: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = watched(monkeypatch)
    first, again = (told("query", image, "--epsilon", 1, "--key", "mine") for _ in range(2))
    assert sent[1] == sent[3]
    assert (first["found"], first["paid"], first["repeated"]) == (again["found"], 1.0, False)
    assert (again["paid"], again["repeated"], again["left"]) == (0.0, True, 99.0)
    assert "at no cost" in again["notes"][0]
    assert "used before, for something else" in refused("query", image, "--epsilon", 2, "--key", "mine")
    with Index.open(here / "data" / "nearveil" / "index") as index:
        index.delete(index.ids()[:1])
        index.publish(4.0, 0.2, keep=1)
    assert "another map than when this key was paid for" in refused("query", image, "--epsilon", 1, "--key", "mine")
    assert left(here) == 99.0


def test_what_was_paid_for_can_be_asked_again(image: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(data: bytes, answer: bytes) -> bytes:
        return answer if data == MAP_REQUEST else Refusal(RefusalCode.FAILED, "no disk").to_bytes()

    with monkeypatch.context() as patch:
        sent = watched(patch, failing)
        text = refused("query", image, "--epsilon", 4)
    assert "no disk" in text
    key = text.split("--key ")[1].split()[0]
    assert left(here) == 96.0
    with monkeypatch.context() as patch:
        later = watched(patch)
        assert told("query", image, "--epsilon", 4, "--key", key)["paid"] == 0.0
    assert later[1] == sent[1]
    assert left(here) == 96.0


def test_what_is_refused_costs_nothing(image: Path, here: Path) -> None:
    whole = image.read_bytes()
    (here / "cut.png").write_bytes(whole[: len(whole) // 2])
    (here / "notes.jpg").write_text("a private text")
    (here / "taken.png").write_bytes(b"precious")
    Index.create(here / "bare", dimension=436, extractor=HogColor().fingerprint).close()
    Index.create(here / "theirs", dimension=436, extractor="f00d" * 16).close()
    with Index.open(here / "theirs") as theirs, Index.open(here / "data" / "nearveil" / "index") as index:
        rows = index.features(index.ids())
        theirs.add(Item(row) for row in rows)
        theirs.publish(4.0, 0.2)
    for words, said in {
        ("notes.jpg",): "not an image",
        ("cut.png",): "broken or truncated",
        ("nowhere.png",): "IMAGE_OR_VECTOR: there is no file at nowhere.png",
        (image, "--index", "nowhere"): "Create one with `nearveil index DIR --into GALLERY`, or name another.",
        (image, "--index", "bare"): "has no map yet",
        (image, "--index", "theirs"): "not installed",
        (image, "--index", "theirs", "--extractor", "hog"): "another extractor than HOG",
        (image, "-k", "9"): "-k: at most 8",
        (image, "--epsilon", "1e-7"): "epsilon must be",
        (image, "--sheet", "taken.png"): "--force to overwrite",
        (image, "--sheet", "sheet.jpg"): "must end in .png",
        (image, "--sheet", "no/where.png"): "does not exist",
        (image, "--account", "nobody"): "No ledger at",
    }.items():
        text = refused("query", "--epsilon", 4, *words)
        assert said in text, text
        assert "private.png" not in text
        assert "notes.jpg" not in text
    assert not (here / "data" / "nearveil" / "ledger.db").exists()
    assert (here / "taken.png").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--epsilon", "41"), "--epsilon"),
        (("--epsilon", "nan"), "--epsilon"),
        (("--candidates", "2"), "--candidates"),
        (("--by", "pigeon"), "--by"),
        (("--by", "sealed", "--epsilon", "4"), "--by sealed reveals nothing and costs nothing; leave it out"),
        (("--by", "message", "--epsilon", "0"), "a message needs an epsilon above 0"),
    ],
)
def test_options_are_checked_before_anything_is_read(words: tuple[str, ...], said: str) -> None:
    result = run("query", "nowhere.png", *words)
    assert result.exit_code == 2
    assert said in result.output
    assert "nowhere.png" not in result.output


def test_a_small_answer_is_no_silent_one(here: Path) -> None:
    gallery(here / "few", 12)
    fine("index", here / "few", "--into", here / "small", "--extractor", "hog")
    asked = ("query", here / "few" / "0" / "00.png", "--epsilon", 4, "--index", here / "small")
    assert "Answers of this gallery hold 1 items" in told(*asked)["notes"][-1]
    every = told(*asked, "--epsilon", 0)
    assert len(every["found"]) == 8
    assert not every["notes"]


def test_a_spent_budget_ends_it(image: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine("query", image, *SURE)
    fine("query", image, *SURE)
    sent = watched(monkeypatch)
    text = refused("query", image, "--epsilon", 21)
    assert "spent 80, left 20" in text
    assert "Nothing was sent" in text
    assert sent == [MAP_REQUEST]
    assert left(here) == 20.0


def test_a_named_account_pays(image: Path, here: Path) -> None:
    ledger = ("--ledger", here / "mine.db")
    fine("budget", "create", "holiday", "--owner", "me", "--epsilon", 5, "--delta", 0, *ledger)
    found = told("query", image, "--epsilon", 4, "--account", "holiday", *ledger)
    assert (found["account"], found["left"], found["opened"]) == ("holiday", 1.0, None)
    assert "No account 'other'" in refused("query", image, "--epsilon", 4, "--account", "other", *ledger)
    assert not (here / "data" / "nearveil" / "ledger.db").exists()


def test_nothing_of_the_query_is_kept(image: Path, here: Path) -> None:
    def files() -> dict[str, bytes]:
        return {
            str(path): path.read_bytes()
            for path in here.rglob("*")
            if path.is_file() and not path.name.endswith(("-wal", "-shm")) and "ledger" not in path.name
        }

    before = files()
    fine("query", image, "--epsilon", 4)
    assert files() == before
    row = HogColor().extract([load_image(image)])[0].tobytes()
    for path in (here / "data" / "nearveil").iterdir():
        assert path.is_dir() or row[:32] not in path.read_bytes()


def test_the_contact_sheet_shows_the_query_on_one_side(here: Path) -> None:
    private = picture(here / "private.png", MAGENTA)
    text = fine("query", private, "--epsilon", 4, "--sheet", "sheet.png")
    assert "Contact sheet: sheet.png" in text
    assert (here / "sheet.png").stat().st_mode & 0o777 == 0o600
    sheet = load_image(here / "sheet.png").astype(int)
    magenta = (sheet[..., 0] > 200) & (sheet[..., 1] < 60) & (sheet[..., 2] > 200)
    half = sheet.shape[1] * 46 // 100
    assert not magenta[:, :half].any()
    assert magenta[:, half:].sum() > 10_000
    first = (here / "sheet.png").read_bytes()
    fine("query", private, "--epsilon", 4, "--sheet", "sheet.png", "--force", "-k", 1)
    assert (here / "sheet.png").read_bytes() != first


def test_an_index_that_has_changed_says_so(image: Path, here: Path) -> None:
    with Index.open(here / "data" / "nearveil" / "index") as index:
        index.delete(index.ids()[:2])
        assert len(index) == COUNT - 2
    found = told("query", image, "--epsilon", 4)
    assert "run `nearveil index DIR`" in found["notes"][-1]
    assert all(one["id"] > 1 for one in found["found"])


def test_two_first_queries_open_one_account(image: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ledger.open_account

    def late(book: Ledger, *name: Any, **terms: Any) -> Any:
        first(book, *name, **terms)
        return first(book, *name, **terms)

    monkeypatch.setattr(Ledger, "open_account", late)
    assert told("query", image, "--epsilon", 4)["left"] == 96.0


def test_a_sheet_that_cannot_be_written_is_noticed_before_paying(
    image: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != here.name)
    assert "is not writable; nothing was paid" in refused("query", image, "--epsilon", 4, "--sheet", "sheet.png")
    assert not (here / "data" / "nearveil" / "ledger.db").exists()


def test_what_an_answer_is_worth_stands_above_it(image: Path) -> None:
    text = fine("query", image, *SURE)
    assert text.index("comes from the set that suits your query") < text.index(" cosine ┃")
    assert re.search(
        r"nearest to your query by the cosine\. The gallery's codes keep [\d.]+% of the 10 nearest\.", text
    )
    found = told("query", image, "--epsilon", 25)
    assert found["named_best_set"] is True
    assert 0 < found["expected_share"] <= 1
    assert found["server_saw"]["set"] >= 1
    assert found["paid"] == pytest.approx(25)


def test_home_and_sealed_questions_cost_nothing_and_say_what_was_seen(image: Path, here: Path) -> None:
    pytest.importorskip("cryptography")
    text, nothing = fine("query", image, "--by", "sealed"), fine("query", image, "--by", "home", "-v")
    assert "two sealed messages of " in text
    assert "were compared with your query by the cosine, encrypted. The gallery's codes keep " in text
    assert "This is a computational guarantee" in text
    assert (
        f"All {COUNT} items of the index on this machine were compared with your query by the cosine, exactly"
        in nothing
    )
    assert "Nothing is revealed about which record was queried" in nothing
    sealed, home = (told("query", image, "--by", way) for way in ("sealed", "home"))
    assert sealed["found"][0]["id"] == home["found"][0]["id"]
    assert 8 <= sealed["candidates"] <= COUNT  # items, and not slots
    assert len(sealed["server_saw"].pop("sealed_bytes")) == 2
    assert sealed["server_saw"] == home["server_saw"] == {}
    assert not {"named_best_set", "expected_share"} & (sealed.keys() | home.keys())
    assert (sealed["epsilon"], sealed["paid"], sealed["account"]) == (0.0, 0.0, None)
    assert left(here) == _accounts.DEFAULT_EPSILON


def test_a_query_without_an_epsilon_pays_nothing_and_searches_the_index_itself(image: Path, here: Path) -> None:
    pytest.importorskip("cryptography")
    found, text = told("query", image), fine("query", image)
    assert (found["way"], found["candidates"], len(found["found"])) == ("index", COUNT, 8)
    assert (found["paid"], found["epsilon"], found["account"], found["left"]) == (0.0, 0.0, None, None)
    assert f"Nothing was sent. The index of all {COUNT} items was searched on this machine, at no cost." in text
    assert not (here / "data" / "nearveil" / "ledger.db").exists()
    assert "--candidates: it applies to messages only" in refused("query", image, "--candidates", 0.2)
