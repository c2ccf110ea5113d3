"""A protected gallery behind the application: its model, the same for everybody, and nothing of its records."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nearveil.private_knn import PublicDiscriminant
from nearveil.server import Settings, TokenStore, create_app, open_galleries
from nearveil.wire.schema import FRAME, KEY_HEADER

from ..gallery.index_places import one_thread
from .protected import CLASSES, PATIENT, TERMS, gallery, make, published
from .serving import InProcess

__all__ = ["one_thread"]  # fixture


class Hospital:
    """The application with one protected gallery, opened as a server opens it."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        told = {**TERMS, "name": "scans", "kind": "protected", "public": str(folder / "public")}
        settings = Settings.load(
            galleries=[
                {**told, "index": str(folder / "private"), "ledger": str(folder / "ledger.db"), "account": "scans"}
            ],
            tokens=str(folder / "tokens.db"),
            log_file=folder / "log.jsonl",
        )
        self.galleries, self.store = open_galleries(settings), TokenStore(settings.tokens)
        self.client = InProcess(create_app(self.galleries, self.store, settings), runner)
        self.ann, self.bob = (self.store.create(name, scopes=["query", "originals", "metrics"])[1] for name in "ab")
        self.said = b""

    def get(self, path: str, token: str | None = None, **headers: str) -> httpx.Response:
        told = {"authorization": f"Bearer {token or self.ann}", **headers}
        reply = self.client.get(path, headers=told)
        self.said += reply.content
        return reply

    def post(self, what: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.ann}", "content-type": FRAME, KEY_HEADER: f"a-long-key-{what}"}
        reply = self.client.post(f"/v1/galleries/scans/{what}", content=b"no frame", headers=headers)
        self.said += reply.content
        return reply

    def close(self) -> None:
        self.client.app.state.nearveil.close()
        self.store.close()
        for one in self.galleries:
            one.close()


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[Hospital]:
    published(make(tmp_path)).close()
    with asyncio.Runner() as runner:
        found = Hospital(tmp_path, runner)
        yield found
        found.close()


def test_everybody_is_given_the_model_and_nothing_else(hospital: Hospital, tmp_path: Path) -> None:
    (info,) = hospital.get("/v1/galleries").json()["galleries"]
    assert (info["kind"], info["offers"], info["candidates"]) == ("protected", [], [])
    assert info["promise"]["protects"] == "database"
    first = hospital.get("/v1/galleries/scans/model")
    assert (first.status_code, first.headers["content-type"]) == (200, "application/octet-stream")
    assert first.headers["etag"] == f'"{info["version"]}"' == f'"{hashlib.sha256(first.content).hexdigest()}"'
    assert PublicDiscriminant.from_bytes(first.content).classes.tolist() == list(CLASSES)
    assert hospital.get("/v1/galleries/scans/model", hospital.bob).content == first.content
    known = hospital.get("/v1/galleries/scans/model", **{"if-none-match": first.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")
    for what in ("map", "items/0/original"):
        reply = hospital.get(f"/v1/galleries/scans/{what}")
        assert (reply.status_code, reply.json()["code"]) == (403, "not_offered"), what
    assert (hospital.post("query").status_code, hospital.post("query").json()["code"]) == (403, "not_offered")
    assert hospital.post("classify").status_code == 404
    assert hospital.get("/ready").status_code == 200
    figures = hospital.get("/metrics").text
    (left,) = [
        line for line in figures.splitlines() if line.startswith('nearveil_ledger_left_epsilon{gallery="scans"}')
    ]
    assert 0 <= float(left.split()[-1]) < TERMS["epsilon"]
    hospital.client.app.state.nearveil.log._queue.join()
    for private in (PATIENT, PATIENT.split()[-1]):
        assert private.encode() not in hospital.said
        assert private not in (tmp_path / "log.jsonl").read_text()


def test_what_a_client_says_that_it_has(hospital: Hospital) -> None:
    etag = hospital.get("/v1/galleries/scans/model").headers["etag"]
    known, unknown = ("{}", "W/{}", '"x", {}', "*"), ('"x"', "", "{}x", "\x7f")
    for header, status in [*((one, 304) for one in known), *((one, 200) for one in unknown)]:
        reply = hospital.get("/v1/galleries/scans/model", **{"if-none-match": header.format(etag)})
        assert reply.status_code == status, header
        assert reply.headers["etag"] == etag
        assert bool(reply.content) == (status == 200)


def test_two_servers_on_one_ledger_give_the_same_bytes(hospital: Hospital, tmp_path: Path) -> None:
    """Each names the model that it gives, before and after it has seen a newer one."""
    with asyncio.Runner() as runner:
        other = Hospital(tmp_path, runner)
        publisher = gallery(tmp_path)
        for server in (hospital, other):
            assert server.get("/v1/galleries/scans/model").content == publisher.model()
        newer = publisher.publish()
        publisher.close()
        asyncio.run(other.client.app.state.nearveil.refresh())
        seen = []
        for server in (hospital, other):
            (info,) = server.get("/v1/galleries").json()["galleries"]
            model = server.get("/v1/galleries/scans/model").content
            assert hashlib.sha256(model).hexdigest() == info["version"]
            seen.append((info["revision"], model == newer.model))
        assert seen == [(1, False), (2, True)]
        asyncio.run(hospital.client.app.state.nearveil.refresh())
        assert hospital.get("/v1/galleries/scans/model").content == newer.model
        other.close()


def test_a_new_model_is_served_when_the_operator_publishes_it(hospital: Hospital, tmp_path: Path) -> None:
    first = hospital.get("/v1/galleries/scans/model")
    other = gallery(tmp_path)  # `nearveil protect`, in another process
    newer = other.publish()
    other.close()
    asyncio.run(hospital.client.app.state.nearveil.refresh())
    again = hospital.get("/v1/galleries/scans/model", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (200, newer.model)
    assert again.content != first.content
    (info,) = hospital.get("/v1/galleries").json()["galleries"]
    assert (info["revision"], info["version"]) == (2, newer.version)
