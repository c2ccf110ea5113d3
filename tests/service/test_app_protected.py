"""A protected gallery behind the application: votes, budgets, and nothing of its records."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nearveil.retrieval import Index, MapChanged, PublicPart, Refusal, RefusalCode
from nearveil.retrieval._wire_schema import read
from nearveil.service import Classification, Settings, TokenStore, create_app, open_galleries
from nearveil.service._model import FRAME, KEY_HEADER

from ..retrieval.index_places import one_thread
from .protected import PATIENT, SETS, TERMS, frame, make
from .serving import InProcess

__all__ = ["one_thread"]  # fixture


class Hospital:
    """The application with one protected gallery, opened as a server opens it."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        told = {**TERMS, "name": "scans", "kind": "protected", "answers": 3, "answers_per_client": 2}
        places = {name: str(folder / name) for name in ("public", "ledger")}
        settings = Settings.load(
            galleries=[{**told, "index": str(folder / "private"), **places, "account": "scans"}],
            tokens=str(folder / "tokens.db"),
            log_file=folder / "log.jsonl",
        )
        self.galleries, self.store = open_galleries(settings), TokenStore(settings.tokens)
        self.client = InProcess(create_app(self.galleries, self.store, settings), runner)
        self.ann, self.bob = (self.store.create(name, scopes=["query", "originals", "metrics"])[1] for name in "ab")
        self.said = b""

    def get(self, path: str) -> httpx.Response:
        reply = self.client.get(path, headers={"authorization": f"Bearer {self.ann}"})
        self.said += reply.content
        return reply

    def ask(self, data: bytes, token: str, key: str, what: str = "classify") -> httpx.Response:
        headers = {"authorization": f"Bearer {token}", "content-type": FRAME, KEY_HEADER: f"a-long-key-{key}"}
        reply = self.client.post(f"/v1/galleries/scans/{what}", content=data, headers=headers)
        self.said += reply.content
        return reply

    def close(self) -> None:
        self.client.app.state.desk.close()
        self.store.close()
        for gallery in self.galleries:
            gallery.close()


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[Hospital]:
    make(tmp_path)
    with asyncio.Runner() as runner:
        found = Hospital(tmp_path, runner)
        yield found
        found.close()


def test_votes_are_given_within_the_budget_and_nothing_else(hospital: Hospital, tmp_path: Path) -> None:
    part = read(hospital.get("/v1/galleries/scans/map").content, PublicPart)
    assert part.map.n_sets == SETS
    (told,) = hospital.get("/v1/galleries").json()["galleries"]
    assert (told["kind"], told["offers"], told["promise"]["protects"]) == ("protected", [], "database")
    with Index.open(tmp_path / "public") as public:
        public_id = public.current().published.public_id
    sets = [frame(public_id, number) for number in range(SETS)]
    first = hospital.ask(sets[0], hospital.ann, "0")
    votes = Classification.model_validate_json(first.content)
    assert set(votes.votes) == set(TERMS["classes"])
    assert votes.promise.epsilon <= TERMS["epsilon"]
    assert hospital.ask(sets[0], hospital.ann, "0").content == first.content  # a retry
    assert hospital.ask(sets[0], hospital.bob, "1").content == first.content  # what is told is told to all
    assert hospital.ask(sets[1], hospital.ann, "2").status_code == 200
    beyond = hospital.ask(sets[2], hospital.ann, "3")  # her third new one
    assert (beyond.status_code, beyond.json()["code"]) == (429, "budget_spent")
    assert "retry-after" not in beyond.headers
    assert hospital.ask(sets[2], hospital.bob, "4").status_code == 200
    assert hospital.ask(sets[3], hospital.bob, "5").json()["code"] == "budget_spent"  # the gallery's fourth
    assert hospital.ask(sets[1], hospital.bob, "6").status_code == 200  # known ones go on
    for what, reply in (
        ("query", hospital.ask(sets[0], hospital.ann, "7", "query")),
        ("original", hospital.get("/v1/galleries/scans/items/0/original")),
    ):
        assert (reply.status_code, reply.json()["code"]) == (403, "not_offered"), what
    changed = hospital.ask(frame("0f" * 16, 0), hospital.ann, "8")
    assert (changed.status_code, read(changed.content, MapChanged).gallery) == (409, "scans")
    broken = hospital.ask(b"no frame", hospital.ann, "9")
    assert (broken.status_code, read(broken.content, Refusal).code) == (400, RefusalCode.MALFORMED)
    offered = hospital.ask(frame(public_id, 0, "thumbnails"), hospital.ann, "10")
    assert (offered.status_code, read(offered.content, Refusal).code) == (403, RefusalCode.NOT_OFFERED)
    figures = hospital.get("/metrics").text
    (left,) = [
        line for line in figures.splitlines() if line.startswith('nearveil_ledger_left_epsilon{gallery="scans"}')
    ]
    assert 0 <= float(left.split()[-1]) < TERMS["epsilon"]
    hospital.client.app.state.desk.lines.flush()
    for private in (PATIENT, PATIENT.split()[-1]):
        assert private.encode() not in hospital.said
        assert private not in (tmp_path / "log.jsonl").read_text()
