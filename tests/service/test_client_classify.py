"""Classification at home, as the client does it: no request depends on the query, and no server is trusted."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nearveil import AsyncClient, Client
from nearveil.client import QuestionError, ReplyError
from nearveil.client.errors import DeclinedError
from nearveil.client.session import MODEL_MAX_AGE
from nearveil.private_knn import PublicDiscriminant
from nearveil.private_knn.scaling import ColumnBounds
from nearveil.server.protected import ProtectedGallery
from nearveil.wire.schema import MOST_MODEL
from tests.clocks import SetClock
from tests.service.asking import URL, Endless, Scene, Server, framed, new_account
from tests.service.protected import CLASSES, DIMENSION, TERMS, copied, gallery, make, published, rows

ROWS, WHICH = rows(12, 7)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make(tmp_path_factory.mktemp("made"))
    published(place).close()
    return place


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


@pytest.fixture(scope="module")
def kept(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with protected(made, tmp_path_factory.mktemp("kept")) as found:
        yield found


def asked(requests: list[Any]) -> list[str]:
    return [url.rsplit("/", 1)[1] for _, url, *_ in requests]


def test_the_class_the_probabilities_and_both_guarantees_are_shown(here: Scene) -> None:
    client, wire = here.client(account=None)
    right = 0
    for row, which in zip(ROWS, WHICH, strict=True):
        found = client.classify(row)
        assert tuple(found.probabilities) == CLASSES
        assert sum(found.probabilities.values()) == pytest.approx(1.0)
        assert found.label == max(found.probabilities, key=lambda name: found.probabilities[name])
        right += found.label == CLASSES[which]
        assert (found.query_guarantee.epsilon, found.query_guarantee.protects) == (0.0, "query")
        assert found.gallery_guarantee.protects == "database"
        assert found.gallery_guarantee.epsilon <= TERMS["epsilon"]
        assert "Nothing is revealed about which record was queried" in str(found)
        assert str(found.gallery_guarantee) in str(found)
    assert right >= 10
    assert asked(wire.requests) == ["galleries", "model"]  # once, for twelve images
    assert here.paid == 0
    model = client.model()
    np.testing.assert_array_equal(model.predict(ROWS), [client.classify(row).label for row in ROWS])
    assert len(wire.requests) == 2


def test_requests_are_the_same_for_every_image(here: Scene) -> None:
    """To the byte, in number and in order: also for images that cannot be used at all."""
    seen = []
    between = np.linspace(ROWS[0], ROWS[1], 2001)
    between /= np.linalg.norm(between, axis=1, keepdims=True)  # as the client does
    surest = PublicDiscriminant.from_bytes(here.gallery.model()).predict_proba(between).max(axis=1)
    unclear = between[surest.argmin()]
    assert max(here.client(account=None)[0].classify(unclear).probabilities.values()) < 0.9
    images: list[Any] = [*ROWS[:3], unclear, np.zeros(DIMENSION), np.zeros(3), b"no image", "/no/such/file.png", 7]
    for image in images:
        client, wire = here.client(account=None)
        for _ in range(3):
            with suppress(ValueError, OSError):
                client.classify(image)
        seen.append(wire.requests)
    assert asked(seen[0]) == ["galleries", "model"]
    assert all(requests == seen[0] for requests in seen)


def test_the_image_is_looked_at_after_the_last_request(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def decoded(images: Any) -> list[Any]:
        order.append("image")
        return list(images)

    monkeypatch.setattr("nearveil.client.images.decode_images", decoded)
    wire = here.server.wire()
    wire.before = lambda request: order.append(request.url.path.rsplit("/", 1)[1])
    client, _ = here.client(wire=wire)
    client.classify(ROWS[0])
    client.classify(ROWS[1])
    assert order == ["galleries", "model", "image", "image"]


def test_a_newer_model_is_looked_for_once_an_hour(here: Scene) -> None:
    client, wire = here.client()
    client._client._session.clock = clock = SetClock()
    first = client.model()
    assert isinstance(here.gallery, ProtectedGallery)
    newer = here.gallery.publish()
    clock.time += MODEL_MAX_AGE - 1.0
    assert client.model() is first
    assert asked(wire.requests) == ["galleries", "model"]
    clock.time += 1.0
    assert client.model().to_bytes() == newer.model
    assert asked(wire.requests)[2:] == ["galleries", "model"]
    clock.time += MODEL_MAX_AGE
    client.classify(ROWS[0])
    assert asked(wire.requests)[4:] == ["galleries"]  # it is the same: its version says so


def test_a_gallery_here_needs_no_server(here: Scene) -> None:
    far = here.client()[0].classify(ROWS[0])
    with Client(here.gallery) as near:
        assert near.classify(ROWS[0]) == far

    async def asynchronously() -> Any:
        async with AsyncClient(URL, here.server.token, transport=here.server.wire()) as client:
            return await client.classify(ROWS[0]), await client.model()

    found, model = asyncio.run(asynchronously())
    assert found == far
    assert model.to_bytes() == here.gallery.model()


def test_what_is_wrong_is_named(here: Scene) -> None:
    client, _ = here.client()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"query": np.ones(3)}, f"{DIMENSION} numbers"),
        ({"query": np.full(DIMENSION, np.nan)}, "finite"),
        ({"gallery": "birds"}, "none named 'birds'"),
    ]
    for changed, words in cases:
        with pytest.raises(ValueError, match=words):
            client.classify(**({"query": ROWS[0]} | changed))
    for one in (client, here.client(account=None)[0]):
        with pytest.raises(QuestionError, match="scans: it is protected, and answers classify only"):
            one.nearest(ROWS[0], epsilon=4.0, gallery="scans")
        for asks in (one.nearest, lambda _, one=one: one.map()):
            with pytest.raises(QuestionError, match="none is open, and a protected one answers classify only"):
                asks(ROWS[0])
    assert here.paid == 0


def test_much_noise_is_said(made: Path, tmp_path: Path) -> None:
    """By the model's own figures, and never by the image: 80 records a class against noise of 3 or 61 records."""
    (tmp_path / "quiet").mkdir()
    with protected(made, tmp_path / "quiet") as quiet:
        found = quiet.client(account=None)[0].classify(ROWS[0])
        assert found.caution == ""
        assert found.caution not in str(found).splitlines()
    (tmp_path / "anew").mkdir()
    with protected(make(tmp_path / "anew"), tmp_path, epsilon=0.3, account="noisy") as noisy:
        assert isinstance(noisy.gallery, ProtectedGallery)
        noisy.gallery.publish(allow_noise=True)
        said = {noisy.client(account=None)[0].classify(row).caution for row in ROWS}
    (words,) = said
    assert words.startswith("The model has much noise: 3 of its 3 classes have fewer than five times as many records")


def test_a_gallery_that_was_deleted_and_made_anew_gives_its_own_model(made: Path, tmp_path: Path) -> None:
    """Under the same name and with the same number of publications: the version tells them apart."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with protected(made, tmp_path / "first") as first, protected(made, tmp_path / "second") as second:
        fresh = published(make(tmp_path), ledger=tmp_path / "fresh.db")
        client, wire = first.client(account=None)
        client._client._session.clock = clock = SetClock()
        old = client.model()
        before, after = first.gallery.info(), fresh.info()
        assert (before.name, before.revision, before.dimension) == (after.name, after.revision, after.dimension)
        wire.change = Listing(second, lambda request, _: _reply_of(request, fresh))
        assert client.model() is old
        clock.time += MODEL_MAX_AGE
        assert client.model().to_bytes() == fresh.model() != old.to_bytes()
        fresh.close()


def _reply_of(request: httpx.Request, found: ProtectedGallery) -> httpx.Response:
    if request.url.path.endswith("/model"):
        return framed(found.model(), 200, "application/octet-stream")
    listed = json.dumps({"galleries": [found.info().model_dump(mode="json")]}).encode()
    return framed(listed, 200, "application/json")


def named(model: bytes, listed: httpx.Response, **changed: Any) -> httpx.Response:
    """Return the list of galleries, with the version of some bytes."""
    told = json.loads(listed.content)
    told["galleries"][0] |= {"version": hashlib.sha256(model).hexdigest(), **changed}
    return framed(json.dumps(told).encode(), 200, "application/json")


def spoiled(model: PublicDiscriminant, **changed: Any) -> bytes:
    """Return a model in which something was changed by hand, past all checks."""
    for name, value in changed.items():
        object.__setattr__(model, name, value)
    return model.to_bytes()


def spoiled_projection(model: PublicDiscriminant, **changed: Any) -> bytes:
    """Return a model in which something of the projection was changed by hand, past all checks."""
    projection = copy(model.projection)
    for name, value in changed.items():
        object.__setattr__(projection, name, value)
    return spoiled(model, projection=projection)


def lying(model: PublicDiscriminant) -> Any:
    """Return the guarantee of a model, with a hundredth of its epsilon."""
    stated = copy(model.guarantee)
    object.__setattr__(stated, "epsilon", stated.epsilon / 100)
    return stated


def lied(good: bytes) -> bytes:
    """Return a model whose words about itself were changed, in place: one byte of its epsilon."""
    place = good.index(b'"epsilon": ') + len(b'"epsilon": ')
    return good[:place] + b"1" + good[place + 1 :]


def hostile_models(good: bytes) -> dict[str, tuple[bytes, str]]:
    def read() -> PublicDiscriminant:
        return PublicDiscriminant.from_bytes(good)

    many, weights = [f"class {number}" for number in range(5000)], read().weights
    nan = good.replace(weights.tobytes(), np.full_like(weights, np.nan).tobytes())
    assert nan != good
    overflow = {name: np.full_like(getattr(read().projection, name), 1e297) for name in ("offset", "scale")}
    low = np.zeros(read().n_features)
    narrow = ColumnBounds(low, low + 5e-324)
    return {
        "an offset beyond its bound": (spoiled_projection(read(), offset=overflow["offset"]), "none beyond"),
        "a scale beyond its bound": (spoiled_projection(read(), scale=overflow["scale"]), "none beyond"),
        "a reach beyond its bound": (spoiled_projection(read(), reach=1e297), "none beyond"),
        "bounds with a half of 0": (spoiled_projection(read(), bounds=narrow), "low must be below high"),
        "nothing": (b"", "cannot be used"),
        "truncated": (good[:-1], "cannot be used"),
        "longer": (good + b"\0", "cannot be used"),
        "another kind": (b"NVW" + good, "cannot be used"),
        "no numbers": (nan, "cannot be used"),
        "one class twice": (spoiled(read(), classes=np.array(["a", "a", "b"])), "cannot be used"),
        "too many classes": (spoiled(read(), classes=np.array(many)), "cannot be used"),
        "more classes than weights": (spoiled(read(), classes=np.array(["a", "b", "c", "d"])), "cannot be used"),
        "classes that steer a terminal": (spoiled(read(), classes=np.array(["a", "b", "\x1b[2J"])), "that print"),
        "numbers for classes": (spoiled(read(), classes=np.array([1, 2, 3])), "not text"),
        "counts that are none": (good.replace(read().counts.tobytes(), b"\xff" * 12), "cannot be used"),
        "more counts than classes": (spoiled(read(), counts=np.zeros(9, np.float32)), "cannot be used"),
        "a guarantee that its noise does not keep": (spoiled(read(), guarantee=lying(read())), "cannot be used"),
        "another database's guarantee": (lied(good), "cannot be used"),
    }


KINDS = (
    "an offset beyond its bound",
    "a scale beyond its bound",
    "a reach beyond its bound",
    "bounds with a half of 0",
    "nothing",
    "truncated",
    "longer",
    "another kind",
    "no numbers",
    "one class twice",
    "too many classes",
    "more classes than weights",
    "classes that steer a terminal",
    "numbers for classes",
    "counts that are none",
    "more counts than classes",
    "a guarantee that its noise does not keep",
    "another database's guarantee",
)


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_bad_will(kept: Scene, kind: str) -> None:
    cases = hostile_models(kept.gallery.model())
    assert tuple(cases) == KINDS
    model, words = cases[kind]

    def hostile(request: httpx.Request, honest: httpx.Response) -> httpx.Response:
        if request.url.path.endswith("/model"):
            return framed(model, 200, "application/octet-stream")
        return named(model, honest)

    said = set()
    for row in ROWS[:3]:
        client, wire = kept.client(Listing(kept, hostile), account=None)
        with pytest.raises(ReplyError, match=words) as raised:
            client.classify(row)
        said.add(str(raised.value))
        assert str(raised.value).isprintable()
        assert asked(wire.requests) == ["galleries", "model"]  # and nothing after
    assert len(said) == 1


class Listing:
    """Gives the honest list of galleries to whoever changes replies: its own body may not have been read yet."""

    def __init__(self, scene: Scene, change: Any) -> None:
        body = json.dumps({"galleries": [scene.gallery.info().model_dump(mode="json")]}).encode()
        self._body, self._change = body, change

    def __call__(self, request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if request.url.path.endswith("/galleries"):
            reply = httpx.Response(200, headers={"content-type": "application/json"}, content=self._body)
        found: httpx.Response = self._change(request, reply)
        return found


def test_a_model_that_is_not_the_one_that_was_named(kept: Scene) -> None:
    good = kept.gallery.model()

    def another(request: httpx.Request, honest: httpx.Response) -> httpx.Response:
        return honest if request.url.path.endswith("/model") else named(good + b"x", honest)

    def wide(request: httpx.Request, honest: httpx.Response) -> httpx.Response:
        return honest if request.url.path.endswith("/model") else named(good, honest, dimension=7)

    for change, words in ((another, "is not the listed one"), (wide, "has other features")):
        client, wire = kept.client(Listing(kept, change))
        with pytest.raises(ReplyError, match=words):
            client.classify(ROWS[0])
        assert asked(wire.requests) == ["galleries", "model"]


def test_a_model_without_end_and_replies_that_are_none(kept: Scene) -> None:
    endless = Endless()

    def change(request: httpx.Request, honest: httpx.Response) -> httpx.Response:
        if not request.url.path.endswith("/model"):
            return honest
        return httpx.Response(200, headers={"content-type": "application/octet-stream"}, stream=endless)

    client, _ = kept.client(change)
    with pytest.raises(ReplyError, match=f"larger than {MOST_MODEL} bytes"):
        client.classify(ROWS[0])
    assert endless.taken <= MOST_MODEL + (1 << 17)
    replies = [
        (framed(b"x", 200, "text/html"), ReplyError),
        (framed(b"", 304, "application/octet-stream"), ReplyError),
        (framed(b"", 302, "application/octet-stream", location="https://elsewhere.example"), ReplyError),
        (framed(b'{"code": "unknown", "message": "none"}', 404, "application/json"), DeclinedError),
    ]
    for reply, error in replies:

        def spoil(request: httpx.Request, honest: httpx.Response, reply: httpx.Response = reply) -> httpx.Response:
            return reply if "/model" in request.url.path else honest

        client, wire = kept.client(spoil)
        with pytest.raises(error):
            client.classify(ROWS[0])
        assert asked(wire.requests) == ["galleries", "model"]


@pytest.mark.parametrize("version", ["", "0" * 63, "G" * 64, "../../x", None, 3])
def test_versions_that_are_none(kept: Scene, version: Any) -> None:
    def change(request: httpx.Request, honest: httpx.Response) -> httpx.Response:
        del request
        return named(b"", honest, version=version)

    client, wire = kept.client(Listing(kept, change))
    with pytest.raises(ValueError, match="has no model yet" if version == "" else "not that of a nearveil server"):
        client.classify(ROWS[0])
    assert asked(wire.requests) == ["galleries"]
