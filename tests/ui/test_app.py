"""The page in this process: who is let in, what a browser may do with it, and what it says when something fails."""

import hmac
import http.client
import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest
import uvicorn
from PIL import Image

from nearveil.client.timing import EXTRACTION_PERIOD, VECTOR_PERIOD
from nearveil.features import HogColor, load_image
from nearveil.gallery import Index, Item
from nearveil.ledger import LedgerError
from nearveil.mechanisms import Message
from nearveil.server import OpenGallery
from nearveil.ui import _app
from nearveil.ui._app import bind_port, make_config, read_assets
from nearveil.ui._views import make_image_address
from nearveil.ui.auth import PAGE_HEADER, POLICY, PageEntry
from tests.clocks import Watched, watched
from tests.service.asking import URL, Body, Server, framed, seeded
from tests.service.protected import make as make_protected
from tests.service.protected import published
from tests.ui.pages import COUNT, HOST, PORT, Page, page, pieces, png

__all__ = ["watched"]


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Iterator[Page]:
    with page(tmp_path, made) as found:
        yield found


def words_of(reply: httpx.Response, status: int, code: str) -> str:
    told = reply.json()
    assert (reply.status_code, told["code"]) == (status, code), told
    return str(told["words"])


def test_the_token_is_exchanged_once(made: Path, tmp_path: Path) -> None:
    with page(tmp_path, made, entered=False) as here:
        assert here.get("/").status_code == 401
        assert here.get("/?t=guessed").status_code == 403
        for purpose in ("prefetch", "prefetch;prerender"):  # a browser that guesses does not use the token up
            assert here.get(f"/?t={here.entry.token}", headers={"sec-purpose": purpose}).status_code == 503
        reply = here.get(f"/?t={here.entry.token}")
        assert reply.status_code == 200
        assert "/static/welcome.js" in reply.text
        cookie = reply.headers["set-cookie"]
        assert re.fullmatch(rf"nearveil-{PORT}=[\w-]{{43}}; HttpOnly; Max-Age=86400; Path=/; SameSite=strict", cookie)
        again = here.get(f"/?t={here.entry.token}")
        assert again.status_code == 403
        assert "This address belongs to another browser" in again.text
        here.take(reply)
        assert here.secret not in cookie
        assert here.get("/api/about").status_code == 200
        assert "What the server saw" in here.get("/").text
        assert here.get("/?t=older").headers["location"] == "/"  # of another run: the browser that is in, stays in
        secret, here.secret = here.secret, ""
        here.take(here.get(f"/?t={here.entry.token}"))  # a closed tab is opened again with the printed address
        assert here.secret == secret
        assert here.entry.token not in repr(here.entry) + again.text


def test_secrets_of_the_page_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    entry = PageEntry()
    assert not entry.use_token("")
    assert entry.use_token(entry.token)
    for cookie, secret in (("", ""), (entry.cookie, "ü" * 50), (entry.cookie, entry.secret)):
        assert entry.authenticates(cookie, secret) is (secret == entry.secret)
    assert entry.use_token(entry.token, has_cookie=True)
    assert not entry.use_token(entry.token)
    assert compared == [32] * 9


def test_a_link_on_another_site_leads_to_a_page_that_goes_on(made: Path, tmp_path: Path) -> None:
    with page(tmp_path, made, entered=False) as here:
        reply = here.get(f"/?t={here.entry.token}", headers={"sec-fetch-site": "cross-site"})
        assert reply.status_code == 200
        assert "/static/welcome.js" in reply.text
        assert "SameSite=strict" in reply.headers["set-cookie"]


def test_without_the_cookie_nothing_is_told(here: Page) -> None:
    cookies = here.cookies
    name, value = next(iter(cookies.items()))
    for wrong in ({}, {name: "guessed"}, {name: ""}, {"nearveil-1": value}, {name: value[:-1]}):
        here.cookies = wrong
        for path in ("/api/galleries", "/api/about", "/api/budget", "/api/history?account=holiday"):
            assert "not open in this tab" in words_of(here.get(path), 401, "pass")
        words_of(here.ask(png(1)), 401, "pass")
        words_of(here.again("guessed"), 401, "pass")
        assert "What the server saw" not in here.get("/").text
    here.cookies = cookies
    assert here.get("/api/about").status_code == 200
    assert here.debits == 0


def test_the_cookie_alone_opens_nothing(here: Page) -> None:
    """Every server at 127.0.0.1 is sent the cookie by the browser; none of them is sent the page's secret."""
    secret = here.secret
    for wrong in ("", "guessed", secret[:-1]):
        here.secret = wrong
        for path in ("/api/history?account=holiday", "/api/budget", "/api/about"):
            words_of(here.get(path), 401, "pass")
        words_of(here.ask(png(1)), 401, "pass")
    here.secret = secret
    assert here.get("/api/about").status_code == 200
    assert here.debits == 0


@pytest.mark.parametrize("others", ['theme={"dark": 1}', "flag", "a=b c", "a[b]=\xe9", "nearveil-8322=guessed", ""])
def test_cookies_of_other_servers_of_this_machine_lock_nobody_out(here: Page, others: str) -> None:
    name, value = next(iter(here.cookies.items()))
    for crumbs in (f"{others}; {name}={value}", f"{name}={value}; {others}"):
        reply = here.get("/api/about", cookie=False, headers={"cookie": crumbs.encode("latin-1")})
        assert reply.status_code == 200


@pytest.mark.parametrize("more", [{"epsilom": 0.1}, {"hid": True}, {"Candidates": 0.2}])
def test_an_unknown_parameter_is_refused_before_anything_is_paid(here: Page, more: dict[str, Any]) -> None:
    assert next(iter(more)) in words_of(here.ask(png(1), **more), 422, "question")
    words_of(here.get("/api/galleries", params=more), 422, "question")
    assert here.debits == 0


def test_another_name_for_this_machine_is_refused(here: Page) -> None:
    names = ("evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"[::1]:{PORT}", f"0.0.0.0:{PORT}", "")
    for name in names:
        for path in ("/", f"/?t={here.entry.token}", "/static/style.css", "/api/about"):
            words_of(here.get(path, headers={"host": name}), 421, "host")
    assert here.get("/api/about", headers={"host": f"localhost:{PORT}"}).status_code == 200
    twice = [("host", HOST), ("host", "evil.example")]
    words_of(here.get("/api/about", headers=twice), 400, "http")


def test_requests_of_other_sites_are_refused(here: Page) -> None:
    image = png(1)
    told = {"gallery": "local", "epsilon": 1}
    for path in ("/api/ask", "/api/again", "/api/sync"):
        for origin in (
            "http://evil.example",
            "null",
            "http://127.0.0.1:9",
            f"https://{HOST}",
            f"http://localhost:{PORT}",
            "",
        ):
            words_of(here.post(path, image, params=told, headers={"origin": origin}), 403, "origin")
        words_of(here.request("POST", path, content=image, params=told), 403, "origin")
    for site in ("cross-site", "same-site", "nonsense"):
        words_of(here.post("/api/ask", image, params=told, headers={"sec-fetch-site": site}), 403, "origin")
        words_of(here.get("/api/about", headers={"sec-fetch-site": site}), 403, "origin")
        words_of(here.get("/static/main.js", headers={"sec-fetch-site": site}), 403, "origin")
    assert here.debits == 0
    assert here.ask(image).status_code == 200  # the page's own
    assert here.debits == 1


def test_every_reply_says_what_a_browser_may_do(here: Page) -> None:
    replies = [
        here.get("/"),
        here.get("/", cookie=False),
        here.get("/static/main.js"),
        here.get("/api/about"),
        here.get("/api/nothing"),
        here.get("/api/about", headers={"host": "evil.example"}),
        here.get("/api/preview?epsilon=nonsense"),
        here.request("DELETE", "/api/ask", headers={"origin": f"http://{HOST}"}),
        here.ask(b"no image"),
    ]
    for reply in replies:
        assert reply.headers.get_list("content-security-policy") == [POLICY]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["cross-origin-resource-policy"] == "same-origin"
        assert reply.headers["cross-origin-opener-policy"] == "same-origin"
        assert "server" not in reply.headers
        assert "access-control-allow-origin" not in reply.headers
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY


def test_the_files_of_the_page_ask_for_nothing_from_elsewhere() -> None:
    held = read_assets()
    assert {"index.html", "closed.html", "used.html", "welcome.html", "style.css", "main.js", "icon.svg"} <= held.keys()
    for name, content in held.items():
        text = content.decode()
        assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"\bon\w+\s*=\s*\"|style=\"|innerHTML|insertAdjacentHTML|document\.write|eval\(", text), (
            name
        )
        if name.endswith(".html"):
            assert not re.search(r"<style|<script(?![^>]*\bsrc=)|<script[^>]*>[^<]", text), name
            for link in re.findall(r"(?:src|href)=\"(/static/[^\"]+)\"", text):
                assert link.removeprefix("/static/") in held
        for module in re.findall(r"from \"\./([^\"]+)\"", text):
            assert module in held


def test_nothing_else_is_served(here: Page) -> None:
    for path in (
        "/static/index.html", "/static/../__init__.py", "/static/..%2f__init__.py", "/static/%2e%2e/_app.py",
        "/static/", "/docs", "/openapi.json", "/redoc", "/static/main.js/..", "/favicon.ico", "/api", "//evil.example",
    ):  # fmt: skip
        reply = here.get(f"http://{HOST}{path}")
        assert reply.status_code == 404, path
        assert "Not found" in words_of(reply, 404, "path")


def test_an_answer_and_what_it_cost(here: Page) -> None:
    told = here.ask(png(100), candidates=0.2).json()
    saw = told["saw"]
    assert (len(told["got"]), saw["total"], saw["n_sets"], told["balance"]["left"]) == (8, 12, 5, 8.0)
    assert (told["cost"], told["map"]) == ("4", here.get("/api/map?gallery=local&candidates=0.2").json()["map"])
    assert told["map"] != here.get("/api/map?gallery=local&candidates=0.25").json()["map"]
    likes = [one["value"] for one in told["got"]]
    assert told["metric"] == here.get("/api/galleries").json()["galleries"][0]["metric"] == "cosine"
    assert likes == sorted(likes, reverse=True)
    ids = [one["id"] for one in saw["candidates"]]
    assert ids == sorted(ids)
    assert {one["id"] for one in told["got"]} <= set(ids)
    assert all(one["image"].startswith("data:image/webp;base64,") for one in (*told["got"], *saw["candidates"]))
    assert all(one["name"] == f"kind {one['id'] % 6}/{one['id']}.png" for one in saw["candidates"])
    stored = [one.message for one in here.session.payer.account.history() if one.kind == "message"]
    assert stored[0] is not None
    assert Message.from_bytes(stored[0])["sets"].tolist() == [saw["set"]]
    assert saw["messages"][0]["bytes"] == len(stored[0])
    head, tail = saw["messages"][0]["hex"].split(" … ")
    assert (bytes.fromhex(head), bytes.fromhex(tail)) == (stored[0][:24], stored[0][-24:])
    assert told["promise"].endswith("by at most a factor of 55.")
    assert here.ask(png(100)).json()["balance"]["left_words"] == "4"


def test_what_will_be_paid_is_said_before(here: Page) -> None:
    told = here.get("/api/preview?epsilon=4").json()
    assert (told["allowed"], told["cost"], told["before"], told["after"]) == (True, "4", "12", "8")
    told = here.get("/api/preview?epsilon=12.5").json()
    assert (told["allowed"], told["cost"], told["before"], told["after"]) == (False, "12.5", "12", "12")
    assert here.debits == 0
    for wrong in ("41", "-1", "inf", "nan", "x", "0"):
        words_of(here.get(f"/api/preview?epsilon={wrong}"), 422, "question")


def test_what_was_paid_is_what_the_account_says(made: Path, tmp_path: Path) -> None:
    with page(tmp_path, made) as here:
        account = here.session.ledger.open_account(
            "filter", owner="me", protects="query", unit="image", relation="replace", epsilon=3.0, delta=1e-5
        )
        here.session.payer.account = account
        worst = here.get("/api/preview?epsilon=0.1").json()  # of any map
        here.get("/api/map?gallery=local")
        before = here.get("/api/preview?epsilon=0.1&gallery=local").json()
        assert float(before["cost"]) < float(worst["cost"]) < 0.1  # it adds up more slowly there
        told = here.ask(png(100), 0.1).json()
        assert (told["cost"], told["balance"]["odds"]) == (before["cost"], None)


@pytest.mark.parametrize("way", ["home", "sealed"])
def test_questions_at_epsilon_zero_cost_nothing(made: Path, tmp_path: Path, way: str) -> None:
    offers: Any = ("names", "codes" if way == "home" else "sealed")
    with Index.open(made) as index, ExitStack() as stack:
        opened = OpenGallery(index, "local", offers=offers)
        opened.prepare()  # as `nearveil serve` does: on a busy machine a question would be told to come back later
        server = Server(tmp_path / "tokens.db", opened)
        stack.callback(server.close)
        wire = server.wire()
        options: Any = {"token": server.token, "transport": wire, "home": tmp_path / "home"}
        here = stack.enter_context(page(tmp_path, URL, **options))
        (gallery,) = here.get("/api/galleries").json()["galleries"]
        assert (gallery["copy"], way == "home") == (0, "codes" in gallery["offers"])
        if way == "home":
            assert "nearveil sync" in words_of(here.ask(png(100), 0.0), 422, "question")
            fetched = here.post("/api/sync", params={"gallery": "local"}).json()
            assert (fetched["items"], fetched["fetched"] > 1000) == (COUNT, True)
            assert here.get("/api/galleries").json()["galleries"][0]["copy"] == COUNT
        before = len(wire.requests)
        told = here.ask(png(100), 0.0).json()
        assert (told["kind"], told["way"], len(told["got"]), told["cost"], here.debits) == ("free", way, 8, "0", 0)
        assert len(told["saw"]["messages"]) == (0 if way == "home" else 2)
        questions = [body for _, url, _, body in wire.posts if url.endswith("/sealed")]
        assert len(questions) == (0 if way == "home" else 2)
        assert way == "sealed" or len(wire.requests) == before
        if way == "sealed":
            assert told["saw"]["messages"][0]["bytes"] == len(questions[0])
        assert here.left == 12.0


def test_a_question_without_an_epsilon_searches_the_index_and_pays_nothing(here: Page) -> None:
    (gallery,) = here.get("/api/galleries").json()["galleries"]
    assert (gallery["copy"], gallery["is_local"]) == (COUNT, True)
    shown = here.post("/api/ask", png(100), params={"gallery": "local"}).json()
    assert (shown["kind"], shown["way"], shown["saw"]) == ("free", "index", {"messages": [], "total": COUNT})
    assert (len(shown["got"]), shown["cost"], here.debits) == (8, "0", 0)
    assert all(match["image"] for match in shown["got"])


def test_all_that_was_told_so_far_is_counted(here: Page) -> None:
    assert here.get("/api/about").json()["balance"]["odds"] is None
    for total in ("7.4", "55"):
        told = here.ask(png(100), 2.0).json()
        assert (told["odds"], told["balance"]["odds"]) == ("7.4", total)


def test_what_cannot_be_asked_costs_nothing(here: Page) -> None:
    not_image = words_of(here.ask(b"a text"), 422, "image")
    assert "not an image" in not_image
    assert "nothing was paid" in not_image
    assert "no bytes" in words_of(here.ask(b""), 422, "image")
    assert "truncated" in words_of(here.ask(png(1)[:200]), 422, "image")
    words_of(here.ask(png(1), -1.0), 422, "question")
    assert "none named 'nowhere'" in words_of(here.ask(png(1), gallery="nowhere"), 422, "question")
    words_of(here.ask(png(1), candidates=0.9), 502, "declined")
    assert "0.2, 0.25" in words_of(here.ask(png(1), candidates=7), 502, "declined")
    assert "extra" not in words_of(here.post("/api/ask", png(1)), 422, "question")
    assert here.debits == 0


def test_too_large_is_refused_before_it_is_kept(here: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"content-length": str(1 << 40)}
    reply = here.post("/api/ask", b"", params={"gallery": "local", "epsilon": 1}, headers=size)
    assert "too large" in words_of(reply, 413, "too_large")
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(100):
            taken += 1 << 16
            yield bytes(1 << 16)

    monkeypatch.setattr(_app, "MOST_BYTES", 1 << 18)
    reply = here.post("/api/ask", endless(), params={"gallery": "local", "epsilon": 1})
    assert "too large" in words_of(reply, 413, "too_large")
    assert taken <= (1 << 18) + (2 << 16)
    words_of(here.post("/api/sync?gallery=local", bytes(2000)), 413, "too_large")


def served(made: Path, folder: Path) -> tuple[OpenGallery, Server]:
    index = Index.open(made)
    gallery = OpenGallery(index, "stripes", offers=("names", "thumbnails"))
    return gallery, Server(folder / "tokens.db", gallery)


def test_a_question_goes_out_when_public_sizes_say_so(made: Path, tmp_path: Path, watched: Watched) -> None:
    gallery, server = served(made, tmp_path)
    seen = set()
    with page(tmp_path, URL, token=server.token, transport=server.wire(), rng=seeded(3)) as here:
        here.get("/api/galleries")
        for number, work in enumerate((0.0, 0.0078125, 0.03125)):
            watched.work(decoding=work, extracting=work, paying=work, choosing=work, ranking=work)
            start = watched.clock.time
            assert here.ask(png(number), gallery="stripes").status_code == 200
            assert watched.sent[0] == ("map", start + EXTRACTION_PERIOD)
            seen.add(tuple(watched.gaps()))
    ((again, question, names),) = seen
    assert (again, names) == (("map", VECTOR_PERIOD), ("query", 0.0))
    assert question[0] == "query"
    assert question[1] > 0.1
    server.close()
    gallery.close()


def test_a_spent_budget_is_refused_before_anything_is_sent(made: Path, tmp_path: Path) -> None:
    gallery, server = served(made, tmp_path)
    wire = server.wire()
    with page(tmp_path, URL, epsilon=5.0, token=server.token, transport=wire) as here:
        assert here.ask(png(100), gallery="stripes").status_code == 200
        before = len(wire.requests)
        told = words_of(here.ask(png(100), gallery="stripes"), 409, "spent")
        assert "it would cost 4, and 1 of 5 is left" in told
        assert "No message was sent" in told
        assert len(wire.requests) == before
        assert here.ask(png(100), 1.0, gallery="stripes").json()["balance"]["left"] == 0
        assert "0 of 5 is left" in words_of(here.ask(png(100), 0.5, gallery="stripes"), 409, "spent")
        assert here.debits == 2
    server.close()
    gallery.close()


def test_a_question_without_an_answer_is_asked_again_for_nothing(made: Path, tmp_path: Path) -> None:
    gallery, server = served(made, tmp_path)
    gone = False

    def lose(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if gone and request.method == "POST":
            raise httpx.ConnectError("gone")
        return reply

    wire = server.wire(lose)
    with page(tmp_path, URL, token=server.token, transport=wire, retries=0) as here:
        assert here.get("/api/galleries").json()["galleries"][0]["name"] == "stripes"
        gone = True
        reply = here.ask(png(100), gallery="stripes")
        assert "paid for, and has no answer yet" in words_of(reply, 502, "unanswered")
        assert (reply.json()["paid"], reply.json()["again"], here.left) == (True, True, 8.0)
        lost = wire.posts[-1]
        gone = False
        (waits,) = here.waiting
        assert (waits["epsilon"], waits["gallery"]) == (4.0, "stripes")
        found = here.again(waits["key"]).json()
        assert (found["repeated"], found["cost"], here.left, here.debits) == (True, "0", 8.0, 1)
        assert wire.posts[1] == lost  # the same bytes under the same key
        assert here.waiting == []
        assert "not waiting for an answer" in words_of(here.again(waits["key"]), 404, "question")
    server.close()
    gallery.close()


def test_a_server_that_spoils_an_answer_does_not_learn_whether_the_next_image_is_the_same(
    made: Path, tmp_path: Path
) -> None:
    """A key that came back with the same image would tell, at any epsilon."""
    gallery, server = served(made, tmp_path)
    spoils = True

    def spoil(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(b"NVW damaged") if spoils and request.method == "POST" else reply

    wire = server.wire(spoil)
    with page(tmp_path, URL, token=server.token, transport=wire, retries=0) as here:
        keys: list[bytes] = []
        for turn in range(12):
            spoils = True
            words_of(here.ask(png(100), 0.01, gallery="stripes"), 502, "unanswered")
            spoils = False
            told = here.ask(png(100 + turn % 2), 0.01, gallery="stripes").json()
            assert (told["repeated"], told["cost"]) == (False, "0.01")
            keys += [dict(headers)[b"Nearveil-Key"] for _, _, headers, _ in wire.posts[-4:]]
        assert len(set(keys)) == len(keys) == 12 * 4  # two requests for each upload, all with keys of their own
        assert here.debits == 24
    server.close()
    gallery.close()


def test_what_fails_here_after_the_debit_is_not_lost(here: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("nearveil.ui.session.view_nearest", None)
        assert "is paid for" in words_of(here.ask(png(100)), 500, "failed")
    assert here.left == 8.0
    told = here.again(here.waiting[0]["key"]).json()
    assert (told["repeated"], here.left, here.waiting) == (True, 8.0, [])


@pytest.mark.parametrize("error", [ValueError("rows"), LedgerError("locked"), TypeError("rows")])
def test_after_the_debit_nobody_says_that_nothing_was_paid(
    here: Page, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(here.session, "balance", fail)
        reply = here.ask(png(100))
    words = words_of(reply, 500, "failed")
    assert words.startswith("The query is paid for")
    assert not re.search(r"[Nn]othing was paid|No message was sent|rows|locked", words)
    assert (reply.json()["paid"], reply.json()["again"], here.left) == (True, True, 8.0)
    assert here.again(here.waiting[0]["key"]).json()["repeated"] is True
    assert here.left == 8.0


def test_an_answer_that_nobody_heard_is_not_paid_twice(here: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"gallery": "local", "epsilon": 4.0}
    with listening(here) as (port, running), monkeypatch.context() as waiting:
        asked, gone, told = here.session._send, threading.Event(), threading.Event()

        def late(*question: Any) -> Any:
            found = asked(*question)
            told.set()
            gone.wait(30)
            return found

        waiting.setattr(here.session, "_send", late)
        name, value = next(iter(here.cookies.items()))
        browser = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        cookie = f"{name.replace(str(PORT), str(port))}={value}"
        headers = {"cookie": cookie, "origin": f"http://127.0.0.1:{port}", PAGE_HEADER: here.secret}
        browser.request("POST", f"/api/ask?{urlencode(params)}", png(100), headers)
        assert told.wait(30)
        browser.close()  # the page is loaded anew, or has lost its patience
        while not _noticed(running):
            time.sleep(0.01)
        gone.set()
        with here.session._lock:  # the question has ended
            pass
    assert here.left == 8.0
    assert here.again(here.waiting[0]["key"]).json()["repeated"] is True
    assert (here.left, here.waiting) == (8.0, [])


@contextmanager
def listening(here: Page) -> Iterator[tuple[int, uvicorn.Server]]:
    """Serve the page at a port of loopback, as the command does."""
    with bind_port(0) as place:
        port = place.getsockname()[1]
        running = uvicorn.Server(make_config(here.session, here.entry, port))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        try:
            yield port, running
        finally:
            running.should_exit = True
            thread.join(30)


def test_headers_without_end_are_refused(here: Page) -> None:
    with listening(here) as (port, _), socket.create_connection(("127.0.0.1", port), timeout=30) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * (1 << 15))
        line.sendall(b"x" * 1000)
        assert line.recv(100).startswith(b"HTTP/1.1 431 ")


def _noticed(running: uvicorn.Server) -> bool:
    """Return whether a server knows that its only client has gone."""
    return not running.server_state.connections


def test_a_debit_without_a_message_is_not_tried_for_ever(here: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("nearveil.ledger.Debit.store", None)  # as if the process had been killed in between
        words_of(here.ask(png(100)), 500, "failed")
    assert "never stored" in words_of(here.again(here.waiting[0]["key"]), 503, "ledger")
    assert here.waiting == []
    assert here.ask(png(100)).status_code == 200
    assert (here.left, here.debits) == (4.0, 2)


def test_questions_that_wait_are_kept_apart_and_not_without_end(made: Path, tmp_path: Path) -> None:
    gallery, server = served(made, tmp_path)
    gone = True

    def lose(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if gone and request.method == "POST":
            raise httpx.ConnectError("gone")
        return reply

    wire = server.wire(lose)
    with page(tmp_path, URL, token=server.token, transport=wire, retries=0) as here:
        for epsilon in (0.25, 0.5):
            words_of(here.ask(png(100), epsilon, gallery="stripes"), 502, "unanswered")
        first, second = (one["key"] for one in here.waiting)
        words_of(here.again(first), 502, "unanswered")  # it goes on waiting
        assert [one["epsilon"] for one in here.waiting] == [0.5, 0.25]
        gone = False
        assert here.again(second).json()["epsilon"] == 0.5
        assert wire.posts[-2] == wire.posts[1]
        gone = True
        for _ in range(16):
            words_of(here.ask(png(100), 0.125, gallery="stripes"), 502, "unanswered")
        assert len(here.waiting) == 16
        words_of(here.again(first), 404, "question")
        assert here.debits == 18
    server.close()
    gallery.close()


@pytest.mark.parametrize(
    ("reply", "status", "code", "said"),
    [
        (httpx.ConnectError("refused"), 502, "unreachable", "does not answer"),
        ((401, b'{"code": "unauthorized", "message": "no"}'), 502, "token", "rejected the token"),
        ((200, b"<html>"), 502, "reply", "not come from a nearveil server"),
        ((404, b'{"code": "unknown", "message": "there is no such thing"}'), 502, "declined", "there is no such thing"),
    ],
)
def test_what_a_server_does_wrong_is_said_in_words(
    tmp_path: Path, reply: object, status: int, code: str, said: str
) -> None:
    class Wrong(httpx.AsyncBaseTransport):
        async def handle_async_request(self, _: httpx.Request) -> httpx.Response:
            if isinstance(reply, Exception):
                raise reply
            assert isinstance(reply, tuple)
            return httpx.Response(reply[0], headers={"content-type": "application/json"}, stream=Body(reply[1]))

    with page(tmp_path, URL, token="nv_0_x", transport=Wrong(), retries=0) as here:  # noqa: S106
        for made in (here.get("/api/galleries"), here.ask(png(1), gallery="stripes")):
            words = words_of(made, status, code)
            assert said in words
            assert "nv_0_x" not in words
        assert here.debits == 0


def test_a_map_that_changes_is_said_in_words(made: Path, tmp_path: Path) -> None:
    from nearveil.wire.messages import MapChanged

    gallery, server = served(made, tmp_path)

    def change(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(MapChanged("stripes", 9).to_bytes(), 409) if request.method == "POST" else reply

    with page(tmp_path, URL, token=server.token, transport=server.wire(change)) as here:
        reply = here.ask(png(1), gallery="stripes")
        assert "changed its map" in words_of(reply, 409, "map_changed")
        assert (reply.json()["paid"], reply.json()["again"]) == (True, False)
        assert here.waiting == []
    server.close()
    gallery.close()


def test_a_gallery_with_other_features_is_not_asked_with_the_old_ones(made: Path, tmp_path: Path) -> None:
    place, rows = tmp_path / "other", HogColor().extract([load_image(png(number)) for number in range(COUNT)])
    with Index.create(place, dimension=rows.shape[1], extractor="another kind of as many numbers") as index:
        index.add(Item(row, "") for row in rows)
        index.publish(4.0, 0.2, n_sets=5, reach=0.0)
    gallery, server = served(made, tmp_path)
    gone = True

    def lose(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if gone and request.method == "POST":
            raise httpx.ConnectError("gone")
        return reply

    with page(tmp_path, URL, token=server.token, transport=server.wire(lose), retries=0) as here:
        words_of(here.ask(png(100), gallery="stripes"), 502, "unanswered")
        gone = False
        with Index.open(place) as index:
            state = server.app.state.nearveil
            state.__init__([OpenGallery(index, "stripes", offers=("names",))], state.tokens, state.settings)
            words_of(here.ask(png(100), gallery="stripes"), 502, "reply")
            # Listed anew, the gallery is what it is: for new questions, and for the one that waits.
            assert "not available here" in words_of(here.ask(png(100), gallery="stripes"), 422, "extractor")
            told = words_of(here.again(here.waiting[0]["key"]), 409, "listing")
            assert "changed its extractor" in told
            assert "nothing was paid" in told
        assert here.debits == 1
    server.close()
    gallery.close()


def test_neither_image_nor_feature_is_sent_or_logged(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    gallery, server = served(made, tmp_path)
    wire = server.wire()
    image = png(100)
    with caplog.at_level(logging.DEBUG), page(tmp_path, URL, token=server.token, transport=wire) as here:
        assert here.ask(image, gallery="stripes").status_code == 200
        here.ask(b"\x89PNG broken", gallery="stripes")
    told = b"".join(
        b"".join((method.encode(), url.encode(), *(part for one in headers for part in one), body))
        for method, url, headers, body in wire.requests
    )
    lines = [one.getMessage() for one in caplog.records if one.name != "httpx"]  # which is the test's own browser, too
    said = "".join([*lines, *capfd.readouterr()]).encode()
    ledger = b"".join(path.read_bytes() for path in tmp_path.glob("budget.db*"))
    for piece in pieces(image):
        assert piece not in told
        assert piece not in said
        assert piece not in ledger
    assert here.entry.token.encode() not in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and image[:64] in path.read_bytes()]
    server.close()
    gallery.close()


@pytest.mark.usefixtures("same_nonces")
def test_requests_depend_on_the_message_alone(made: Path, tmp_path: Path) -> None:
    gallery, server = served(made, tmp_path)
    groups: dict[bytes, list[tuple[Any, tuple[int, ...]]]] = {}
    for number in range(100, 118):
        wire, folder = server.wire(), tmp_path / str(number)
        folder.mkdir()
        with page(folder, URL, token=server.token, transport=wire, rng=seeded(3)) as here:
            found = here.ask(png(number), gallery="stripes").json()
            here.get("/api/map?gallery=stripes")
        chosen = tuple(one["id"] for one in found["got"])
        groups.setdefault(wire.posts[0][3], []).append((wire.requests, chosen))
    largest = max(groups.values(), key=len)
    assert len({chosen for _, chosen in largest}) >= 3  # what was chosen at home differs,
    assert all(requests == largest[0][0] for requests, _ in largest)  # and nothing shows it
    server.close()
    gallery.close()


@pytest.mark.parametrize("how", [{"quality": 80}, {"lossless": True}, {"save_all": True}])
def test_a_thumbnail_that_would_fill_the_browser_is_not_shown(how: dict[str, Any]) -> None:
    for width, height in ((512, 3), (3, 512), (513, 3), (3, 513), (16383, 3)):
        out = io.BytesIO()
        frames = [Image.new("RGB", (width, height), colour) for colour in ("red", "blue")]
        frames[0].save(out, "WEBP", **how, append_images=frames[1:])
        assert bool(make_image_address(out.getvalue())) == (max(width, height) <= 512)
    for content in (b"", b"RIFF\4\0\0\0WEBP", b"<svg xmlns='http://www.w3.org/2000/svg'/>", out.getvalue()[:29]):
        assert make_image_address(content) == ""
    alpha = io.BytesIO()
    Image.new("RGBA", (64, 48)).save(alpha, "WEBP")
    assert make_image_address(alpha.getvalue())
    assert not make_image_address(alpha.getvalue() + bytes(1 << 17))


def test_one_question_at_a_time(here: Page) -> None:
    with here.session._take_turn():
        reply = here.ask(png(1))
    assert "Another query is in flight" in words_of(reply, 409, "busy")
    assert here.ask(png(1)).status_code == 200


def test_a_protected_gallery_gives_classes_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    gallery = published(make_protected(tmp_path / "made"))

    class Toy(HogColor):
        """Makes rows as that gallery has them."""

        def __init__(self) -> None:
            super().__init__()
            self.fingerprint, self.dimension = "toy", 6

        def _rows(self, images: np.ndarray) -> np.ndarray:
            return np.stack([np.r_[image.reshape(-1, 3).mean(axis=0) + 1, 1, 1, 1] for image in images])

    with page(tmp_path, gallery, extractor=Toy()) as here:
        (told,) = here.get("/api/galleries").json()["galleries"]
        assert (told["name"], told["kind"], told["published"]) == ("scans", "protected", True)
        found = here.post("/api/classify", png(1), params={"gallery": "scans"}).json()
        assert found["kind"] == "classified"
        assert found["label"] == found["probabilities"][0][0]
        assert {one for one, _ in found["probabilities"]} == {"benign", "malignant", "none"}
        assert sum(share for _, share in found["probabilities"]) == pytest.approx(1.0)
        assert "any one record is in the database" in found["gallery_guarantee"]
        assert "Nothing is revealed" in found["promise"]
        assert found["caution"] == ""
        assert (here.left, here.debits) == (12.0, 0)
        assert here.waiting == []
        for wrong in (b"no image", b""):
            assert here.post("/api/classify", wrong, params={"gallery": "scans"}).json()["code"] == "image"
        assert here.post("/api/classify", png(1), params={"gallery": "birds"}).json()["code"] == "question"
        assert here.ask(png(1), gallery="scans").json()["code"] == "question"  # nothing is asked of it
        assert here.get("/api/map?gallery=scans").json()["code"] == "question"
        assert here.debits == 0
    gallery.close()


def test_budgets_are_told_planned_and_verified(here: Page) -> None:
    here.ask(png(1))
    here.session.ledger.open_account(
        "another", owner="me", protects="query", unit="image", relation="replace", epsilon=1.0, delta=0.0
    )
    told = here.get("/api/budget").json()
    assert [(one["account"], one["pays"], one["left"]) for one in told["accounts"]] == [
        ("holiday", True, 8.0),
        ("another", False, 1.0),
    ]
    lines = here.get("/api/history?account=holiday").json()["entries"]
    assert [(one["sequence"], one["what"]) for one in lines] == [
        (3, "Message stored"),
        (2, "Paid"),
        (1, "Account opened"),
    ]
    assert lines[1]["detail"] == "epsilon 4"
    words_of(here.get("/api/history?account=nobody"), 503, "ledger")
    fits = here.get("/api/plan?account=holiday&count=4&epsilon=2").json()
    assert (fits["allowed"], fits["after"]) == (True, "0")
    assert fits["words"] == "4 queries at epsilon 2 fit: they cost 8, and 0 would be left."
    refused = here.get("/api/plan?account=holiday&count=20&epsilon=2").json()
    assert (refused["allowed"], refused["fits"]) == (False, 4)
    assert refused["words"] == "20 queries at epsilon 2 do not fit: they cost 40, and 8 is left. 4 would fit."
    for wrong in ("count=0&epsilon=2", "count=2&epsilon=0", "count=10000000&epsilon=1"):
        words_of(here.get(f"/api/plan?account=holiday&{wrong}"), 422, "question")
    assert here.get("/api/verify").json() == {"ok": True, "words": "4 entries of 2 accounts checked: all is well."}
    assert here.left == 8.0


def test_what_nobody_thought_of_has_words_and_no_details(
    here: Page, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("something private")

    monkeypatch.setattr(here.session, "balance", fail)
    reply = here.get("/api/about")
    assert "Unexpected error" in words_of(reply, 500, "failed")
    assert "private" not in reply.text + caplog.text
    assert "RuntimeError" in caplog.text


JSON = {"content-type": "application/json"}


def vectors(place: Path, **map_terms: Any) -> Path:
    """Make an index of sixty vectors with texts; publish a map with these terms, if there are any."""
    rows = np.random.default_rng(3).normal(size=(COUNT, 16))
    with Index.create(place, dimension=16) as index:
        index.add(
            Item(row, external_id=f"word {n}", metadata={"text": f"text {n}", "kind": "ab"[n % 2]})
            for n, row in enumerate(rows)
        )
        if map_terms:
            index.publish(4.0, 0.2, **map_terms)
    return place


def test_vectors_and_items_are_queries_as_well(tmp_path: Path) -> None:
    with page(tmp_path, vectors(tmp_path / "index")) as here:
        (gallery,) = here.get("/api/galleries").json()["galleries"]
        assert (gallery["takes_images"], gallery["dimension"], gallery["published"]) == (False, 16, False)
        for query in (7, "word 7"):
            (first, *_) = here.post("/api/ask", json.dumps(query), params={"gallery": "local"}, headers=JSON).json()[
                "got"
            ]
            assert (first["name"], first["text"], first["metadata"]) == ("word 7", "text 7", {"kind": "b"})
        out = io.BytesIO()
        np.save(out, here.session.client.index.features([9])[0])  # type: ignore[union-attr]
        assert here.post("/api/ask", out.getvalue(), params={"gallery": "local"}).json()["got"][0]["name"] == "word 9"
        wrong: Any
        with Index.open(tmp_path / "index") as index:
            index.add([Item(np.ones(16), "a name", external_id="word 60")])
        reply = here.post("/api/ask", json.dumps("a name"), params={"gallery": "local"}, headers=JSON)
        assert reply.json()["got"][0]["external_id"] == "word 60"
        for wrong in ("nowhere", 10**6, [1], {}, True):
            assert "nothing was paid" in words_of(
                here.post("/api/ask", json.dumps(wrong), params={"gallery": "local"}, headers=JSON), 422, "question"
            )
        words_of(here.post("/api/ask", out.getvalue()[:90], params={"gallery": "local"}), 422, "question")
        items = here.get("/api/examples").json()["items"]
        assert (len(items), items[0]["name"], items[-1]["name"]) == (12, "word 0", "a name")


def test_items_and_originals_of_a_server_are_not_on_this_machine(made: Path, tmp_path: Path) -> None:
    gallery, server = served(made, tmp_path)
    with page(tmp_path, URL, token=server.token, transport=server.wire()) as here:
        assert here.get("/api/examples").json() == {"items": []}
        words_of(here.get("/api/picture?item=3&side=100"), 404, "path")
        reply = here.post("/api/ask", "3", params={"gallery": "stripes"}, headers=JSON)
        assert "Only a local index" in words_of(reply, 422, "question")
    assert [url for _, url, *_ in server.wire().requests] == []
    server.close()
    gallery.close()


def test_originals_of_this_machine_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(png(1, size=200))
    pixels = load_image(path)
    with Index.create(tmp_path / "index", dimension=HogColor().dimension) as index:
        index.add([Item(HogColor().extract([pixels])[0], "one", original=path)])
    with page(tmp_path, tmp_path / "index") as here:
        for side, shown in ((100, 100), (5000, 200)):
            reply = here.get(f"/api/picture?item=0&side={side}")
            assert reply.headers["content-type"] == "image/webp"
            with Image.open(io.BytesIO(reply.content)) as picture:
                assert picture.size == (shown, shown)
        words_of(here.get("/api/picture?item=1&side=100"), 404, "path")
        path.write_bytes(png(2))  # another file than the one that was indexed
        words_of(here.get("/api/picture?item=0&side=100"), 404, "path")


@pytest.mark.parametrize("mechanism", ["privunit", "privatemail (laplace)", "latent", "ome", "analytic-gaussian"])
def test_messages_of_other_mechanisms_are_sent_at_their_epsilon(tmp_path: Path, mechanism: str) -> None:
    with page(tmp_path, vectors(tmp_path / "index", mechanism=mechanism)) as here:
        told = here.get("/api/map?gallery=local").json()
        assert (told["mechanism"], told["epsilon"], told["refused"]) == (mechanism, 4.0, "")
        params = {"gallery": "local", "epsilon": 4}
        reply = here.post("/api/ask", "3", params=params, headers=JSON)
        if mechanism == "analytic-gaussian":
            assert "needs a delta" in words_of(reply, 409, "spent")  # the account has none
            return
        answer = reply.json()
        assert (answer["saw"]["mechanism"], answer["saw"]["set"], answer["right"]) == (mechanism, None, None)
        assert (len(answer["got"]), answer["cost"], here.debits) == (8, "4", 1)
        assert "at epsilon 4: pay that" in words_of(
            here.post("/api/ask", "3", params={**params, "epsilon": 2}, headers=JSON), 422, "question"
        )
        assert here.debits == 1


def test_a_mechanism_without_a_guarantee_is_refused(tmp_path: Path) -> None:
    terms = {"mechanism": "privatemail (as published 2022)", "labels": "kind", "allow_unsound": True}
    with page(tmp_path, vectors(tmp_path / "index", **terms)) as here:
        told = here.get("/api/map?gallery=local").json()
        assert "reveal the query" in told["refused"]
        assert told["refused"].endswith("`nearveil query --allow-unsound` sends one for comparison.")
        reply = here.post("/api/ask", "3", params={"gallery": "local", "epsilon": 4}, headers=JSON)
        assert "reveal the query" in words_of(reply, 422, "question")
        assert here.post("/api/ask", "3", params={"gallery": "local"}, headers=JSON).json()["way"] == "index"
        assert here.debits == 0


@pytest.mark.parametrize("offers", [("names",), ("names", "sealed"), ("codes",)])
def test_the_first_query_finds_everything_loaded(
    made: Path, tmp_path: Path, offers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Index.open(made) as index, ExitStack() as stack:
        gallery = OpenGallery(index, "stripes", offers=offers)
        gallery.prepare()
        server = Server(tmp_path / "tokens.db", gallery)
        stack.callback(server.close)
        wire = server.wire()
        here = stack.enter_context(page(tmp_path, URL, token=server.token, transport=wire, home=tmp_path / "home"))
        stages: list[Any] = []
        prepare = here.session.client.prepare

        def note(*arguments: Any, **options: Any) -> Any:
            stages.append(here.session.about()["preparing"])
            return prepare(*arguments, **options)

        monkeypatch.setattr(here.session.client, "prepare", note)
        here.session.warm_up()
        assert stages == [{"words": "Loading the feature network", "done": 0, "total": 2 if "sealed" in offers else 1}]
        assert here.get("/api/about").json()["preparing"] is None
        # No message is sent, and no copy is fetched.
        sent = sorted({url.rpartition("/v1/")[2] for _, url, *_ in wire.requests})
        part = "galleries/stripes/sealed"
        assert sent == ["galleries", *([part, f"{part}/tokens"] if "sealed" in offers else [])]
        monkeypatch.setattr("nearveil.client.images.find_extractor", None)  # nothing is loaded later
        reply = here.ask(png(100), gallery="stripes")
        assert reply.status_code == 200
        assert here.debits == 1


def test_a_server_that_is_gone_stops_no_page(made: Path, tmp_path: Path) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    gallery, server = served(made, tmp_path)
    with page(tmp_path, URL, token=server.token, transport=httpx.MockTransport(fail), retries=0) as here:
        here.session.warm_up()
        assert here.get("/api/about").json()["preparing"] is None
    server.close()
    gallery.close()
