"""The page in a real Chromium, against a real server, with real photographs; and all that went over the wire."""

import base64
import importlib.util
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("playwright", reason="Playwright is not installed (the extra `dev`)")
pytest.importorskip("tests.ui.pages")

import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, expect, sync_playwright

from nearveil import Client
from nearveil.cli._ui import _open_browser
from nearveil.features import HogColor, load_image
from nearveil.features.images import thumbnail
from nearveil.gallery import Index, Item
from nearveil.ledger import Ledger
from nearveil.mechanisms import Covers
from nearveil.privacy.noise import Source
from nearveil.server import OpenGallery, ProtectedGallery, Settings, TokenStore, create_app
from nearveil.server.galleries import Gallery
from nearveil.ui._app import bind_port, make_config
from nearveil.ui.auth import PageEntry
from nearveil.ui.session import PageSession, RecordingPayer
from studies.data import DataMissingError, find
from studies.serving import Loopback, serve_on_loopback
from tests.service.asking import seeded
from tests.ui.pages import open_account, pieces, png
from tests.ui.proxy import Recorder, recording

PATIENCE = 60_000  # milliseconds: the machine may be busy
EACH = 7  # photographs of a species in the gallery
PAGES = ("ask", "gallery", "budget")
CHEAP = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"]  # no graphics card is imitated

expect.set_options(timeout=PATIENCE)


@dataclass
class Birds:
    """An index of photographs, and others that are private."""

    index: Path
    private: list[Path]


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Birds:
    try:
        folder = find("birds_photos")
    except DataMissingError as missing:
        pytest.skip(str(missing))
    each = [sorted(place.glob("*.jpg")) for place in sorted(folder.iterdir()) if place.is_dir()]
    files = [path for some in each for path in some[:EACH]]
    pictures = [load_image(path) for path in files]
    extractor = HogColor()
    place = tmp_path_factory.mktemp("birds") / "index"
    with Index.create(place, dimension=extractor.dimension, extractor=extractor.fingerprint) as index:
        rows = extractor.extract(pictures)
        index.add(
            Item(row, f"{path.parent.name}/{path.name}", thumbnail(picture))
            for row, path, picture in zip(rows, files, pictures, strict=True)
        )
        for fraction in (0.2, 0.1):
            index.publish(4.0, fraction, n_sets=6, reach=0.0)
    return Birds(place, [some[-1] for some in each])


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=program, args=CHEAP, timeout=PATIENCE)
        except Error as error:
            pytest.skip(f"chromium does not start here: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(birds: Birds) -> Iterator[Loopback]:
    with serve_on_loopback(birds.index) as found:
        yield found


@pytest.fixture
def wire(server: Loopback) -> Iterator[Recorder]:
    with recording(server.url) as found:
        yield found


VIOLATIONS = """async () => {
  const { passes, violations } = await axe.run();
  if (passes.length < 10) return ["axe checked next to nothing"];
  return violations.flatMap((rule) => rule.nodes.map((node) => `${rule.id}: ${node.target} ${node.failureSummary}`));
}"""


@dataclass
class Look:
    """A page in a browser, and everything that the browser complains of or asks for."""

    page: Page
    address: str
    asked: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def origin(self) -> str:
        return self.address.partition("/?")[0]

    def open(self, epsilon: str = "4") -> None:
        """Load the page, and choose to pay for messages; with "" the page stays as it opens."""
        page = self.page
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (e) => console.error('policy', e.violatedDirective));"
        )
        page.on("request", lambda request: self.asked.append(request))  # noqa: PLW0108 - it marks what it is given
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._said)
        page.goto(self.address)
        self.wait_until_ready()
        if epsilon:
            self.pay(epsilon)

    def wait_until_ready(self) -> None:
        """Wait until the page shows how to search."""
        expect(self.page.locator("#ways input:checked")).to_be_visible()

    def pay(self, epsilon: str) -> None:
        """Choose to pay for messages."""
        self.page.check("#ways input[value=message]")
        self.page.fill("#epsilon-number", epsilon)
        expect(self.page.locator("#curve svg").first).to_be_visible()

    def _said(self, message: ConsoleMessage) -> None:
        # A reply with an error status is told in words on the page; the browser writes it down as well.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def choose(self, image: Path) -> None:
        self.page.set_input_files("#file", image)
        expect(self.page.locator("#preview")).to_be_visible()

    def ask(self) -> None:
        """Press the button and wait until there is an answer or an error."""
        button = self.page.locator("#ask-button")
        expect(button).to_be_enabled()
        with self.page.expect_response(re.compile("/api/ask")):
            button.click()
        expect(button).to_be_enabled()

    def check_axe(self, state: str) -> None:
        """Check the page with axe-core, where it is installed, and that it does not scroll sideways."""
        found = importlib.util.find_spec("axe_playwright_python")
        if found is not None and found.origin is not None:
            self.page.evaluate((Path(found.origin).parent / "axe.min.js").read_text())
            assert self.page.evaluate(VIOLATIONS) == [], state
        width = self.page.evaluate("innerWidth")
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width, state

    def go(self, name: str) -> None:
        self.page.click(f"nav a[data-page={name}]")
        expect(self.page.locator(f"#page-{name}")).to_be_visible()

    def check_quiet(self) -> None:
        assert self.complaints == []
        local = ("blob:", "data:")
        assert [one.url for one in self.asked if not one.url.startswith((f"{self.origin}/", *local))] == []


@contextmanager
def looking(chromium: Browser, address: str, **options: Any) -> Iterator[Look]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(PATIENCE)
    try:
        yield Look(context.new_page(), address)
    finally:
        context.close()


@contextmanager
def shown(
    folder: Path, url: str | Gallery | Index, token: str | None, *, epsilon: float = 12.0, rng: Source | None = None,
    where: str = "",
) -> Iterator[str]:  # fmt: skip
    """Show the page from this process, and yield its address."""
    with Ledger(folder / f"{uuid.uuid4()}.db") as ledger:
        payer = RecordingPayer()
        payer.account = open_account(ledger, "holiday", epsilon)
        with Client(url, token, account=payer, retries=0, timeout=30) as client, bind_port(0) as listening:
            session, entry = PageSession(client, payer, ledger, where or str(url), rng=rng), PageEntry()
            port = listening.getsockname()[1]
            running = uvicorn.Server(make_config(session, entry, port))
            thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{port}/?t={entry.token}"
            finally:
                running.should_exit = True
                thread.join(30)


@contextmanager
def command(folder: Path, url: str, token: str) -> Iterator[str]:
    """Run `nearveil ui` as a process of its own, and yield the address that it prints."""
    ledger = folder / "budget.db"
    with Ledger(ledger) as book:
        open_account(book, "holiday", 10.0)
    (folder / "token.txt").write_text(token)
    (folder / "token.txt").chmod(0o600)
    told = ["--server", url, "--token-file", str(folder / "token.txt"), "--ledger", str(ledger), "--account", "holiday"]
    line = [sys.executable, "-m", "nearveil", "ui", *told, "--port", "0", "--no-browser"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            assert process.stdout is not None
            address = next((line.strip() for line in process.stdout if line.startswith("http")), None)
            assert address is not None, process.stderr.read() if process.stderr else ""
            yield address
        finally:
            process.send_signal(signal.SIGINT)
            _, messages = process.communicate(timeout=60)
        # A start of more than five seconds prints its progress.
        assert re.sub(r"(Getting ready: \d+ s\n)*", "", messages) == ""
        assert process.returncode == 0


@contextmanager
def stripes(folder: Path, made: Path) -> Iterator[Loopback]:
    """Serve an open gallery of striped pictures, and a protected one with a model of six kinds of them."""
    extractor = HogColor()
    seeds = {"private": range(100, 220), "public": range(300, 360)}
    for name, some in seeds.items():
        rows = extractor.extract([load_image(png(seed)) for seed in some], row_exact=True)
        with Index.create(folder / name, dimension=extractor.dimension, extractor=extractor.fingerprint) as index:
            index.add((Item(row, f"kind {n % 6}/{n}") for n, row in zip(some, rows, strict=True)), row_exact=True)
    private, public = Index.open(folder / "private"), Index.open(folder / "public")
    terms: dict[str, Any] = {"epsilon": 60.0, "delta": 1e-5, "ledger": folder / "gallery.db", "account": "kinds"}
    kinds = ProtectedGallery(private, public, "kinds", classes=[f"kind {n}" for n in range(6)], **terms)
    kinds.publish()
    with Index.open(made) as index, TokenStore(folder / "tokens.db") as tokens:
        settings = Settings(tokens=str(folder / "tokens.db"), log_file=folder / "log", rate=None)
        app = create_app([OpenGallery(index, "stripes"), kinds], tokens, settings)
        running = uvicorn.Server(uvicorn.Config(app, log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
            thread.start()
            try:
                yield Loopback(f"http://127.0.0.1:{listening.getsockname()[1]}", tokens.create("test")[1], os.getpid())
            finally:
                running.should_exit = True
                thread.join(30)
    kinds.close()


def test_the_file_that_a_browser_gets_leads_to_the_page(
    chromium: Browser, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    with (
        Index.open(made) as index,
        shown(tmp_path, OpenGallery(index, "stripes"), None) as address,
        looking(chromium, address) as look,
        ExitStack() as files,
    ):
        _open_browser(address, files)
        look.page.goto(opened.get(timeout=30), wait_until="commit")
        look.page.wait_for_url(f"{look.origin}/*")
        look.wait_until_ready()
        assert address.partition("=")[2] not in look.page.url


def test_a_protected_gallery_is_used_at_home(chromium: Browser, made: Path, tmp_path: Path) -> None:
    images = [tmp_path / f"{seed}.png" for seed in (400, 403)]
    for image, seed in zip(images, (400, 403), strict=True):
        image.write_bytes(png(seed))
    with (
        stripes(tmp_path, made) as server,
        recording(server.url) as wire,
        shown(tmp_path, wire.url, server.token) as address,
        looking(chromium, address) as look,
    ):
        page = look.page
        look.open(epsilon="")
        page.select_option("#gallery-choice", "kinds")
        for hidden in ("#ways-field", "#epsilon-field", "#candidates-field", "#curve-card"):
            expect(page.locator(hidden)).to_be_hidden()
        expect(page.locator("#cost-note")).to_have_text("Free.")
        button, asked = page.get_by_role("button", name="Classify"), []
        for image, seed in zip(images, (400, 403), strict=True):
            look.choose(image)
            before = len(wire.seen)
            with page.expect_response(re.compile("/api/classify")):
                button.click()
            expect(page.locator("#got .big")).to_have_text(f"kind {seed % 6}")
            asked.append(len(wire.seen) - before)
        expect(page.locator("#saw .big")).to_have_text("Nothing about your image")
        rows = page.locator(".classes tbody tr")
        expect(rows).to_have_count(6)
        expect(rows.first).to_contain_text("%")
        expect(page.locator("#promise")).to_contain_text("Nothing is revealed")
        expect(page.locator("#got q")).to_contain_text("any one record is in the database")
        look.check_axe("classes")
        assert asked == [2, 0]  # the list and the model; then nothing
        assert not wire.posts
        look.go("gallery")
        expect(page.locator("#gallery-body")).to_contain_text("It has no map")
        look.go("ask")
        page.select_option("#gallery-choice", "stripes")  # and back to one that is asked
        expect(page.locator("#answer")).to_be_hidden()
        expect(page.locator("#ways input:checked")).to_have_value("message")  # this server offers no free way
        look.pay("4")
        expect(page.locator("#cost-note")).to_have_text("This will cost 4 of the 12 left.")
        look.ask()
        expect(page.locator(".matches li")).to_have_count(8)
        look.check_quiet()
    everything = b"".join(f"{method} {path} {headers}".encode() + body for method, path, headers, body in wire.seen)
    assert not [piece for image in images for piece in pieces(image.read_bytes()) if piece in everything]


def drop(page: Page, image: Path) -> None:
    """Drop a file as a hand with a mouse would."""
    content = base64.b64encode(image.read_bytes()).decode()
    given = page.evaluate_handle(
        """async ([content, name]) => {
            const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
            const given = new DataTransfer();
            given.items.add(new File([bytes], name, { type: "image/jpeg" }));
            return given;
        }""",
        [content, image.name],
    )
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event("#drop", event, {"dataTransfer": given})


def test_from_a_dropped_image_to_an_empty_budget(
    chromium: Browser, birds: Birds, server: Loopback, wire: Recorder, tmp_path: Path
) -> None:
    image = birds.private[9]
    with command(tmp_path, wire.url, server.token) as address, looking(chromium, address) as look:
        page = look.page
        look.open()
        assert page.url == f"{look.origin}/"  # the token is gone from the address
        assert page.evaluate("document.cookie") == ""
        expect(page.locator("#cost-note")).to_have_text("This will cost 4 of the 10 left.")
        drop(page, image)
        expect(page.locator("#preview")).to_be_visible()
        assert not wire.posts

        page.focus("#epsilon")
        for _ in range(2):
            page.keyboard.press("ArrowLeft")
        expect(page.locator("#epsilon-number")).to_have_value("3")
        expect(page.locator("#epsilon-note")).to_contain_text("a factor of 21")
        expect(page.locator("#cost-note")).to_have_text("This will cost 3 of the 10 left.")
        page.focus("#candidates")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#candidates-note")).to_contain_text("28 of 140 items are returned")

        look.ask()
        expect(page.locator(".matches li")).to_have_count(8)
        expect(page.locator("#saw .thumbs li")).to_have_count(28)
        expect(page.locator("#saw .big")).to_have_text(re.compile(r"^Set \d of 6$"))
        expect(page.locator("#promise")).to_contain_text("by at most a factor of 21")
        meter = page.get_by_role("meter")
        expect(meter).to_have_attribute("aria-valuenow", "7")
        shown = page.locator("#saw .thumbs img").evaluate_all("(all) => all.map((one) => one.naturalWidth)")
        assert len(shown) == 28
        assert min(shown) > 0
        dot = page.locator("#curve .legend").get_by_text("Your last query")
        expect(dot).to_be_visible()
        page.focus("#candidates")
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#candidates-note")).to_contain_text("14 of 140 items are returned")
        expect(dot).to_have_count(0)  # it was about another map
        page.keyboard.press("ArrowRight")
        expect(dot).to_be_visible()
        for left in ("4", "1"):
            look.ask()
            expect(meter).to_have_attribute("aria-valuenow", left)
        sent = len(wire.seen)
        look.ask()
        expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("it would cost 3, and 1 of 10 is left")
        expect(page.locator(".matches li")).to_have_count(8)  # what there was stays
        assert page.locator("#epsilon-number").input_value() == "3"
        assert len(wire.seen) == sent
        page.fill("#epsilon-number", "1")
        look.ask()
        expect(meter).to_have_attribute("aria-valuetext", "0 of 10 left")
        look.ask()
        expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("0 of 10 is left")
        look.check_quiet()

        with looking(chromium, address) as other:
            other.page.goto(address)
            expect(other.page.locator("h1")).to_have_text("This address belongs to another browser")
            other.page.goto(f"{look.origin}/")
            expect(other.page.locator("h1")).to_have_text("This page is not open here")

    everything = b"".join(f"{method} {path} {headers}".encode() + body for method, path, headers, body in wire.seen)
    assert len(wire.posts) == 2 * 4  # thumbnails and names, for four questions that were paid for
    assert not [piece for piece in pieces(image.read_bytes()) if piece in everything]
    assert image.name.encode() not in everything
    assert {len(body) for *_, body in wire.posts} == {len(wire.posts[0][3])}


def same_set(birds: Birds) -> tuple[Path, Path, Path]:
    """Return two private images that the same set suits, and one that another suits."""
    with Client(birds.index) as client:
        public = client.map(0.1)
    features = HogColor().extract([load_image(path) for path in birds.private])
    near = public.map.choose(Covers(4.0).fit_space(public.space).features(features))
    for number, one in enumerate(near):
        alike = [place for place in range(number + 1, len(near)) if near[place] == one]
        unlike = [place for place in range(len(near)) if near[place] != one]
        if alike and unlike:
            return birds.private[number], birds.private[alike[0]], birds.private[unlike[0]]
    raise AssertionError("every private image has a set of its own")


def everything_sent(chromium: Browser, server: Loopback, image: Path, folder: Path) -> tuple[list[Any], list[str]]:
    """Ask about an image with coins that are the same for all, look at everything, and return what went where."""
    with (
        recording(server.url) as wire,
        shown(folder, wire.url, server.token, rng=seeded(3)) as address,
        looking(chromium, address) as look,
    ):
        look.open()
        look.choose(image)
        look.ask()
        expect(look.page.locator(".matches li")).to_have_count(8)
        chosen = look.page.locator(".matches li").evaluate_all("(all) => all.map((one) => one.dataset.id)")
        look.page.locator(".matches li").first.hover()
        look.page.locator(".thumbs li").last.hover()
        look.page.locator(".matches .tile").first.click()
        look.page.keyboard.press("ArrowRight")
        look.page.keyboard.press("Escape")
        look.go("gallery")
        expect(look.page.locator("#gallery-body dd").first).to_be_visible()
        look.go("budget")
        expect(look.page.locator("#history tbody tr")).to_have_count(3)
        look.go("ask")
        look.check_quiet()
    host = ("host", wire.url.removeprefix("http://"))
    told = [
        (method, path, [pair for pair in headers if (pair[0].lower(), pair[1]) != host], body)
        for method, path, headers, body in wire.seen
    ]
    return told, chosen


@pytest.mark.usefixtures("same_nonces")
def test_two_images_with_the_same_message_cause_the_same_requests(
    chromium: Browser, birds: Birds, server: Loopback, tmp_path: Path
) -> None:
    one, alike, unlike = same_set(birds)
    (first, got), (second, also), (third, _) = (
        everything_sent(chromium, server, image, tmp_path) for image in (one, alike, unlike)
    )
    assert got != also  # what was chosen at home differs,
    assert first == second  # and nobody can see it
    assert [(method, path) for method, path, *_ in first] == [(method, path) for method, path, *_ in third]
    assert [body for *_, body in first if body] != [body for *_, body in third if body]


@contextmanager
def mortal(index: Path) -> Iterator[Loopback]:
    """Serve an index by a process that will be killed."""
    with pytest.raises(RuntimeError, match="exit code -9"), serve_on_loopback(index) as server:
        yield server


def test_what_an_answer_is_worth_stands_above_it(
    chromium: Browser, birds: Birds, server: Loopback, tmp_path: Path
) -> None:
    said: dict[bool, str] = {}
    with shown(tmp_path, server.url, server.token, rng=seeded(3)) as address, looking(chromium, address) as look:
        page = look.page
        look.open()
        look.choose(birds.private[0])
        page.fill("#epsilon-number", "1.5")
        for _ in range(8):
            look.ask()
            expect(page.locator(".matches li")).to_have_count(8)
            worth = page.locator(".worth")
            expect(worth).to_have_count(1)
            assert worth.evaluate("(one) => one.getBoundingClientRect().bottom") <= page.locator(".matches").evaluate(
                "(one) => one.getBoundingClientRect().top"
            )
            missed = "miss" in (worth.get_attribute("class") or "").split()
            status = page.locator("#ask-status").inner_text()
            assert status.startswith("A miss: " if missed else "8 matches found.")
            said[missed] = worth.inner_text()
            expect(page.get_by_role("button", name=re.compile("again", re.IGNORECASE))).to_have_count(0)
            if len(said) == 2:
                break
        look.check_quiet()
    assert "from the set that suits your query" in said[False]
    assert "from another set" in said[True]
    assert "Do not repeat the query because of that" in said[True]


def test_a_server_that_is_killed(chromium: Browser, birds: Birds, tmp_path: Path) -> None:
    with (
        mortal(birds.index) as server,
        shown(tmp_path, server.url, server.token) as address,
        looking(chromium, address) as look,
    ):
        look.open()
        look.choose(birds.private[0])
        look.ask()
        expect(look.page.locator(".matches li")).to_have_count(8)
        os.kill(server.process, signal.SIGKILL)
        look.page.fill("#epsilon-number", "2")
        look.ask()
        alert = look.page.get_by_role("alert").filter(visible=True)
        expect(alert).to_contain_text("The server does not answer")
        expect(alert).to_contain_text("nothing was paid")
        expect(look.page.get_by_role("meter")).to_have_attribute("aria-valuenow", "8")
        expect(look.page.locator("#preview")).to_be_visible()
        assert look.page.locator("#epsilon-number").input_value() == "2"
        look.go("gallery")
        expect(look.page.locator("#gallery-error")).to_contain_text("The server does not answer")
        look.go("budget")
        expect(look.page.locator("#history tbody tr")).to_have_count(3)
        look.page.goto(f"{look.origin}/")  # a page that is loaded while the server is gone says so, too
        expect(look.page.get_by_role("alert").filter(visible=True)).to_contain_text("The server does not answer")
        look.check_quiet()


def test_a_paid_question_is_asked_again_for_nothing(
    chromium: Browser, birds: Birds, server: Loopback, wire: Recorder, tmp_path: Path
) -> None:
    with shown(tmp_path, wire.url, server.token) as address, looking(chromium, address) as look:
        look.open()
        look.choose(birds.private[1])
        # The map is asked for, and answered; then the server is gone before the question comes.
        wire.only_get = True
        look.ask()
        alert = look.page.get_by_role("alert").filter(visible=True)
        expect(alert).to_contain_text("paid for, and has no answer yet")
        expect(look.page.get_by_role("meter")).to_have_attribute("aria-valuenow", "8")
        wire.only_get = False
        # The same image is a new question, and the server sees nothing that it has seen before.
        look.choose(birds.private[1])
        expect(look.page.locator("#cost-note")).to_have_text("This will cost 4 of the 8 left.")
        look.ask()
        expect(look.page.get_by_role("meter")).to_have_attribute("aria-valuenow", "4")
        keys = [dict(headers)["Nearveil-Key"] for _, _, headers, _ in wire.posts]
        assert len(set(keys)) == len(keys) == 3
        # The button asks the first one again, also after the page was loaded anew.
        look.page.reload()
        button = look.page.get_by_role("button", name="Repeat for free")
        expect(button).to_have_count(1)
        button.click()
        expect(look.page.locator("#ask-status")).to_contain_text("Already paid for.")
        expect(look.page.locator(".matches li")).to_have_count(8)
        expect(look.page.locator("#paid")).to_contain_text("free: it was already paid for")
        expect(look.page.get_by_role("meter")).to_have_attribute("aria-valuenow", "4")
        expect(look.page.locator("#waiting")).to_be_hidden()
        assert wire.posts[3] == wire.posts[0]
        look.check_quiet()


def test_what_is_no_image_is_refused_and_nothing_is_lost(
    chromium: Browser, birds: Birds, server: Loopback, tmp_path: Path
) -> None:
    text = tmp_path / "notes.jpg"
    text.write_text("not a picture")
    with shown(tmp_path, server.url, server.token) as address, looking(chromium, address) as look:
        look.open()
        look.page.click("#ask-button")
        alert = look.page.get_by_role("alert").filter(visible=True)
        expect(alert).to_contain_text("Choose an image first")
        look.page.fill("#epsilon-number", "2.5")
        look.page.set_input_files("#file", text)
        look.ask()
        expect(alert).to_contain_text("not an image")
        expect(alert).to_contain_text("nothing was paid")
        assert look.page.locator("#epsilon-number").input_value() == "2.5"
        look.page.fill("#epsilon-number", "99")
        look.page.click("#ask-button")
        expect(alert).to_contain_text("from 0.000001 to 40")
        look.page.fill("#epsilon-number", "2.5")
        look.choose(birds.private[2])
        look.ask()
        expect(look.page.locator(".matches li")).to_have_count(8)
        expect(alert).to_have_count(0)
        look.check_quiet()


def test_budget_page(chromium: Browser, server: Loopback, tmp_path: Path) -> None:
    with shown(tmp_path, server.url, server.token) as address, looking(chromium, address) as look:
        look.open()
        page = look.page
        look.go("budget")
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#plan-words")).to_contain_text("Does not fit. 20 queries at epsilon 2")
        page.fill("#plan-count", "6")
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#plan-words")).to_contain_text("Fits. 6 queries at epsilon 2 fit")
        page.get_by_role("button", name="Verify").click()
        expect(page.locator("#verify-words")).to_contain_text("all is well")
        look.check_quiet()


CONTRAST = """() => {
  const parts = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((one) => (one /= 255) <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const text = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || one.closest("[hidden], :disabled, option, svg, .skip, noscript") || !one.checkVisibility()) continue;
    const [front, back] = [light(parts(getComputedStyle(one).color)), light(behind(one))];
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (ratio < 4.5) found.push(`${one.tagName} ${one.className} "${one.textContent.slice(0, 20)}" ${ratio}`);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_and_fits_narrow_screens(
    chromium: Browser, birds: Birds, server: Loopback, tmp_path: Path, scheme: Any
) -> None:
    with (
        shown(tmp_path, server.url, server.token) as address,
        looking(chromium, address, color_scheme=scheme, reduced_motion="reduce") as look,
    ):
        look.open()
        look.choose(birds.private[3])
        look.ask()
        expect(look.page.locator(".matches li")).to_have_count(8)
        for name in PAGES:
            look.go(name)
            ready = {
                "ask": ".matches li",
                "gallery": "#gallery-body dd",
                "budget": "#history td",
            }
            look.page.locator(ready[name]).first.wait_for(state="attached")
            for width in (1280, 320):
                look.page.set_viewport_size({"width": width, "height": 800})
                assert look.page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
                assert look.page.evaluate(CONTRAST) == [], (name, width)
            look.page.set_viewport_size({"width": 1280, "height": 900})
        look.check_quiet()


def test_a_keyboard_is_enough(chromium: Browser, birds: Birds, server: Loopback, tmp_path: Path) -> None:
    with shown(tmp_path, server.url, server.token) as address, looking(chromium, address) as look:
        look.open(epsilon="")
        page = look.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        page.reload()  # the way past the menu is in the address now, and is the name of no page
        look.wait_until_ready()
        page.goto(f"{look.origin}/")
        look.wait_until_ready()
        page.keyboard.press("Tab")
        reached = []
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.dataset.page || ''"))
            outlined = page.evaluate(
                "((one) => [one, one.nextElementSibling, one.closest('label')])(document.activeElement)"
                ".some((one) => one && getComputedStyle(one).outlineStyle === 'solid')"
            )
            assert outlined, reached
            if reached[-1] == "epsilon":
                for key in ("ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowLeft"):
                    page.keyboard.press(key)
                expect(page.locator("#cost-note")).to_have_text("This will cost 3.5 of the 12 left.")
            if reached[-1] == "ask-button":
                break
        wanted = ["ask", "gallery", "budget", "file", "epsilon-number", "epsilon", "candidates", "ask-button"]
        assert [one for one in reached if one in wanted] == wanted
        look.choose(birds.private[4])
        page.focus("#ask-button")
        page.keyboard.press("Enter")
        expect(page.locator("#ask-status")).to_contain_text("Cost: 3.5. 8.5 of 12 is left.")
        look.go("gallery")
        assert page.evaluate("document.activeElement.id") == "main"
        unnamed = page.evaluate(
            "[...document.querySelectorAll('input, select, button')].filter((one) => !one.labels?.length"
            " && !one.ariaLabel && !one.textContent.trim()).map((one) => one.outerHTML)"
        )
        assert unnamed == []
        look.check_quiet()


WORDS = ("hospital", "clinic", "doctor", "river", "bank", "boat", "guitar", "piano", "song", "violin", "harp", "drum")


def make_words(place: Path) -> Path:
    """Make an index of words with texts: a vector gallery without images."""
    rows = np.random.default_rng(3).normal(size=(len(WORDS), 8))
    with Index.create(place, dimension=8) as index:
        index.add(
            Item(row, external_id=word, metadata={"text": f"About the {word}. " * 40, "rank": number})
            for number, (row, word) in enumerate(zip(rows, WORDS, strict=True))
        )
    return place


def make_photos(folder: Path) -> Path:
    """Make an index of pictures whose files are on this machine."""
    extractor, paths = HogColor(), [folder / f"kinds/{number}.png" for number in range(24)]
    paths[0].parent.mkdir(parents=True)
    for number, path in enumerate(paths):
        path.write_bytes(png(number, size=320))
    pictures = [load_image(path) for path in paths]
    with Index.create(folder / "index", dimension=extractor.dimension, extractor=extractor.fingerprint) as index:
        rows = extractor.extract(pictures)
        index.add(
            Item(row, f"kinds/{path.name}", thumbnail(picture), path)
            for row, path, picture in zip(rows, paths, pictures, strict=True)
        )
        index.publish(4.0, 0.5, n_sets=4, reach=0.0)
    return folder / "index"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos"))


def test_a_gallery_of_this_machine_needs_no_protection(chromium: Browser, photos: Path, tmp_path: Path) -> None:
    image = tmp_path / "mine.png"
    image.write_bytes(png(30))
    with (
        Index.open(photos) as index,
        shown(tmp_path, index, None) as address,
        looking(chromium, address) as look,
    ):
        page = look.page
        look.open(epsilon="")
        expect(page.locator("#ask-lead")).to_contain_text("It needs no protection")
        expect(page.locator("#ways input:checked")).to_have_value("home")
        expect(page.locator("#ways .way").first).to_contain_text("100%, exact")
        expect(page.locator("#message-options")).to_be_hidden()
        page.focus("#ways input:checked")
        for key, way in (("ArrowDown", "sealed"), ("ArrowDown", "message"), ("ArrowDown", "home")):
            page.keyboard.press(key)
            assert page.evaluate("[document.activeElement.value, document.activeElement.checked]") == [way, True]
        look.choose(image)
        look.ask()
        expect(page.locator(".matches li")).to_have_count(8)
        expect(page.locator("#ask-status")).to_have_text("8 matches found, free.")
        expect(page.locator("#saw .big")).to_have_text("Nothing")
        expect(page.locator(".matches .name").first).to_contain_text(re.compile(r"kinds/\d+\.png"))
        for picture in page.locator(".matches img").all():
            expect(picture).to_have_js_property("naturalWidth", 320)  # the file, not the thumbnail of 128
        page.locator(".matches .tile").nth(1).click()
        expect(page.locator("#viewer-count")).to_have_text("2 of 8")
        expect(page.locator("#viewer-body img")).to_have_js_property("naturalWidth", 320)
        page.keyboard.press("ArrowRight")
        expect(page.locator("#viewer-count")).to_have_text("3 of 8")
        named = page.locator("#viewer-body h2").inner_text()
        page.click("#viewer-similar")  # at once: it is free and stays here
        expect(page.locator(".matches .name").first).to_have_text(named)
        expect(page.locator("#viewer")).to_be_hidden()
        page.locator("#examples button").first.click()
        expect(page.locator(".matches .name").first).to_have_text("kinds/0.png")
        look.go("gallery")
        page.locator("#gallery-body .tile").first.click()
        expect(page.locator("#viewer")).to_be_visible()
        page.keyboard.press("Escape")
        look.check_quiet()


def test_a_gallery_of_texts_shows_texts(chromium: Browser, tmp_path: Path) -> None:
    with (
        Index.open(make_words(tmp_path / "words")) as index,  # no map was published for it
        shown(tmp_path, index, None) as address,
        looking(chromium, address) as look,
    ):
        page = look.page
        look.open(epsilon="")
        expect(page.locator("#drop")).to_be_hidden()
        expect(page.locator("#ways input[value=message]")).to_be_disabled()
        page.click("#ask-button")
        expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("Name an item first")
        page.fill("#item-id", "hospital")
        page.keyboard.press("Enter")
        card = page.locator(".matches li").first
        expect(card.locator(".name")).to_have_text("hospital")
        expect(card.locator(".text")).to_contain_text("About the hospital.")
        expect(card.locator(".metadata")).to_contain_text("rank")
        expect(page.locator(".matches img, .matches .blank")).to_have_count(0)
        card.get_by_role("button", name="Open: hospital").click()
        assert page.locator("#viewer-body .text").inner_text().count("About the hospital.") == 40
        page.click("#viewer-close")
        page.fill("#item-id", "nowhere")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("nothing was paid")
        expect(page.locator("#answer")).to_be_hidden()  # it is that of another query
        page.get_by_role("button", name="Search from river").click()
        expect(page.locator(".matches .name").first).to_have_text("river")
        assert page.locator("#item-id").input_value() == "river"
        for width in (400, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            look.check_axe("texts")
        look.check_quiet()


def test_a_closed_tab_is_opened_again(chromium: Browser, photos: Path, tmp_path: Path) -> None:
    with (
        Index.open(photos) as index,
        shown(tmp_path, index, None) as address,
        looking(chromium, address) as look,
    ):
        look.open(epsilon="")
        context = look.page.context
        look.page.close()
        for url in (f"{look.origin}/", address):
            look.page = context.new_page()
            look.page.goto(url)
            look.wait_until_ready()
            look.page.close()
        with looking(chromium, address) as other:
            other.page.goto(address)
            expect(other.page.locator("h1")).to_have_text("This address belongs to another browser")


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(chromium: Browser, photos: Path, tmp_path: Path, scheme: Any, width: int) -> None:
    pytest.importorskip("axe_playwright_python", reason="axe-core is not installed (the extra `dev`)")
    image = tmp_path / "mine.png"
    image.write_bytes(png(30))
    with (
        Index.open(photos) as index,
        shown(tmp_path, index, None) as address,
        looking(chromium, address, color_scheme=scheme, reduced_motion="reduce") as look,
    ):
        page = look.page
        page.set_viewport_size({"width": width, "height": 900})
        look.open(epsilon="")
        look.check_axe("before a search")
        page.click("#ask-button")
        expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("Choose an image first")
        look.check_axe("an error")
        look.choose(image)
        look.ask()
        expect(page.locator(".matches li")).to_have_count(8)
        look.check_axe("after a free search")
        page.locator(".matches .tile").first.click()
        look.check_axe("an item")
        page.click("#viewer-close")
        look.pay("1")
        look.ask()
        expect(page.locator(".thumbs li")).to_have_count(12)
        page.locator("#epsilon-field .hint").click()
        expect(page.locator(".hint-box:popover-open")).to_be_visible()
        look.check_axe("after a message, with a help text")
        for name in ("gallery", "budget"):
            look.go(name)
            page.locator(f"#{name}-body .card").first.wait_for()
            look.check_axe(name)
        look.check_quiet()
