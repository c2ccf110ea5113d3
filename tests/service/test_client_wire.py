"""What goes over the wire: a function of messages and of public things. Attacks ``docs/theory/service.md``."""

import asyncio
import hashlib
import hmac
import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nearveil import AsyncClient, Client
from nearveil.client.errors import QuestionError, ReplyError, UnansweredError, UnreachableError
from nearveil.client.session import RetryPolicy
from nearveil.client.transport import HttpTransport
from nearveil.ledger import Ledger
from nearveil.wire.client import encode_queries
from nearveil.wire.messages import Query, decode_frame
from tests.service.asking import (
    CANDIDATES,
    QUERIES,
    SETS,
    URL,
    Scene,
    Seen,
    framed,
    head_of,
    is_post,
    new_account,
    opened_account,
    public_of,
    raw_server,
    seeded,
)

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "thumbnails": {"thumbnails": True},
    "originals": {"originals": True},
    "all": {"thumbnails": True, "candidates": 0.1, "gallery": "birds"},
}
SECRET = "nv_0123456789abcdef_" + "s3cret" * 7


def groups(here: Scene) -> dict[int, list[int]]:
    """Return which of the queries have which good set."""
    public = public_of(here.gallery)
    found: dict[int, list[int]] = {}
    for number, row in enumerate(QUERIES[:30]):
        good = public.map.choose(encode_queries(public, row).directions)[0]
        found.setdefault(int(good), []).append(number)
    return found


def requests_of(here: Scene, row: Any, name: str, k: int = 8, seed: int = 5, **way: Any) -> list[Seen]:
    """Return all that a new client with a new account sends."""
    client, wire = here.client(account=here.another(name))
    client.nearest(row, k, 2.0, key="the same", rng=seeded(seed), **way)
    return wire.requests


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("same_nonces")
def test_requests_are_the_same_for_all_features_that_send_the_same_message(here: Scene, way: str) -> None:
    """Theorem 1 of docs/theory/service.md, to the byte: method, address, headers in their order, body."""
    sets = groups(here)
    assert len(sets) >= 4
    compared = 0
    for good, numbers in sets.items():
        seen = [requests_of(here, QUERIES[n], f"{good} {n}", **WAYS[way]) for n in numbers[:2]]
        assert all(one == seen[0] for one in seen)
        compared += len(seen) - 1
    assert compared >= 4


@pytest.mark.usefixtures("same_nonces")
def test_another_message_is_the_only_thing_that_differs(here: Scene) -> None:
    first, second, *_ = groups(here).values()
    # With this seed both messages name the good set, so they differ.
    one, other = (requests_of(here, QUERIES[rows[0]], f"{rows[0]}", seed=1) for rows in (first, second))
    assert one != other
    assert one[:-1] == other[:-1]
    (*start, head, body), (*same, others, changed) = one[-1], other[-1]
    assert (start, len(body)) == (same, len(changed))
    assert [name for name, _ in head] == [name for name, _ in others]
    assert {name for name, value in set(head) ^ set(others)} == {b"Nearveil-Key"}


def test_keys_of_requests_are_as_random_as_their_nonce(here: Scene) -> None:
    client, wire = here.client()
    for _ in range(8):
        client.nearest(QUERIES[0], epsilon=4.0, rng=seeded())
    assert len({body for *_, body in wire.posts}) == 1
    assert len({key_of(seen) for seen in wire.posts}) == 8


def key_of(seen: Seen) -> str:
    return dict(seen[2])[b"Nearveil-Key"].decode()


def test_nobody_guesses_what_a_question_is_called(here: Scene) -> None:
    """People call their questions "patient 0417". The server knows the token and everything that it was sent."""
    client, wire = here.client()
    client.nearest(QUERIES[0], epsilon=4.0, key="patient 0417")
    told, body = key_of(wire.posts[0]), wire.posts[0][3]
    salts = (b"", here.server.token.encode(), hashlib.sha256(here.server.token.encode()).digest(), body)
    for number in range(10_000):
        name = f"patient {number:04d}"
        for salt in salts:
            for text in (f"query\0birds\0{name}\0".encode() + body, f"{name}\0".encode() + body, name.encode()):
                assert hmac.digest(salt, text, "sha256").hex()[:32] != told


def test_the_key_of_a_request_is_of_one_ledger(here: Scene, tmp_path: Path) -> None:
    """One question of two people, with one token and one message, has two keys; asked again, the same."""
    told = []
    for name in ("ann", "ben"):
        for _ in range(2):
            with Ledger(tmp_path / f"{name}.db") as ledger:
                account = ledger.account("me") if ledger.accounts() else opened_account(ledger, "me")
                client, wire = here.client(account=account)
                client.nearest(QUERIES[0], epsilon=4.0, key="patient 0417", rng=seeded())
                told.append(wire.posts)
    (first, again), (other, _) = told[:2], told[2:]
    assert first == again
    assert [body for *_, body in first] == [body for *_, body in other]
    assert key_of(first[0]) != key_of(other[0])


@pytest.mark.usefixtures("same_nonces")
def test_how_many_are_wanted_is_not_told(here: Scene) -> None:
    seen = [requests_of(here, QUERIES[0], f"{k}", k=k) for k in (1, 5, CANDIDATES)]
    assert seen[0] == seen[1] == seen[2]


def test_neither_image_nor_feature_is_in_any_request(here: Scene) -> None:
    """Not in any of the forms that they have on the way: a single number of the feature would be found."""
    row = QUERIES[0]
    for name, way in WAYS.items():
        sent = b"".join(
            url.encode() + body + b"".join(a + b for a, b in headers)
            for _, url, headers, body in requests_of(here, row, name, **way)
        )
        for form in (row, row.astype(np.float64), row - public_of(here.gallery).space.mean):
            assert not any(number.tobytes() in sent for number in form)
        assert not any(f"{number:.4f}".encode() in sent for number in row)


def test_the_body_is_the_message_that_was_paid(here: Scene) -> None:
    client, wire = here.client()
    found = client.nearest(QUERIES[0], epsilon=4.0, thumbnails=True)
    queries = [decode_frame(body, Query) for *_, body in wire.posts]
    assert {query.message for query in queries} == {queries[0].message}
    assert queries[0].message.arrays.keys() == {"sets"}
    assert not queries[0].message.seeded
    assert found.bytes_sent == sum(len(body) for *_, body in wire.requests)


def test_all_requests_are_there_before_the_first_answer_is_looked_at(here: Scene) -> None:
    """An answer that is refused when it is read does not keep the second request back."""

    def damaged(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(b"NVW damaged") if is_post(request) else reply

    client, wire = here.client(damaged)
    with pytest.raises(UnansweredError):
        client.nearest(QUERIES[0], epsilon=4.0, thumbnails=True)
    assert [decode_frame(body, Query).extras for *_, body in wire.posts] == ["thumbnails", "names"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("same_nonces")
def test_waiting_or_not_the_requests_are_the_same(here: Scene, way: str) -> None:
    waiting = requests_of(here, QUERIES[0], "waiting", **WAYS[way])

    async def ask() -> list[Seen]:
        wire = here.server.wire()
        async with AsyncClient(URL, here.server.token, account=here.another("loop"), transport=wire) as client:
            await client.nearest(QUERIES[0], 8, 2.0, key="the same", rng=seeded(), **WAYS[way])
        return wire.requests

    assert asyncio.run(ask()) == waiting


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("kind", ["GET", "POST"])
def test_a_token_goes_to_its_origin_alone(here: Scene, status: int, kind: str) -> None:
    def elsewhere(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(b"", status, location="https://evil.example/v1") if request.method == kind else reply

    client, wire = here.client(elsewhere)
    with pytest.raises((ReplyError, UnansweredError), match=f"redirects .{status}."):
        client.nearest(QUERIES[0], epsilon=4.0)
    assert {httpx.URL(url).host for _, url, *_ in wire.requests} == {"birds.example"}
    assert here.paid == (kind == "POST")


def test_a_token_is_in_no_text(here: Scene, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)

    def failing(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if is_post(request):
            raise httpx.ConnectError(f"cannot send {request.headers}", request=request)
        return reply

    texts = [repr(HttpTransport(URL, SECRET))]
    for wire in (here.server.wire(), here.server.wire(failing)):
        with new_account(tmp_path / f"{len(texts)}.db") as account:
            client = Client(URL, SECRET, account=account, transport=wire, retries=0)
            with client, pytest.raises(ValueError, match=r".") as raised:
                client.nearest(QUERIES[0], epsilon=4.0)
            texts += [repr(client), str(raised.value), repr(raised.value)]
            cause: BaseException | None = raised.value
            while cause is not None:
                texts += [repr(cause), *getattr(cause, "__notes__", ())]
                cause = cause.__cause__ or cause.__context__
    with here.client()[0] as good:
        good.nearest(QUERIES[0], epsilon=4.0)
    texts.append(caplog.text)
    assert "401" in "".join(texts)
    assert "s3cret" not in "".join(texts)
    assert here.server.token.split("_", 2)[2] not in "".join(texts)


@pytest.mark.parametrize("token", ["", "a b", "a\r\nHost: evil", "ü", "x" * 8193, None, b"bytes"])
def test_tokens_that_cannot_be_sent(token: Any) -> None:
    with pytest.raises(QuestionError, match=r"^token: ") as raised:
        Client(URL, token)
    assert "evil" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://birds.example", "begin with https"),
        ("http://127.0.0.1.evil.example", "begin with https"),
        ("http://localhost.evil.example", "begin with https"),
        ("http://evil.localhost.example", "begin with https"),
        ("http://10.0.0.1:8321", "begin with https"),
        ("https://me:pass@birds.example", "no user, password"),
        ("https://birds.example/?token=1", "no user, password"),
        ("https://birds.example/#a", "no user, password"),
        ("https://", "look like https"),
        ("https://[half", "look like https"),
        ("http://\n", "look like https|begin with https"),
    ],
)
def test_addresses_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(QuestionError, match=f"^url: .*({words})") as raised:
        Client(url, SECRET)
    assert "pass@" not in str(raised.value)


def test_addresses_that_are_used() -> None:
    for url, insecure in (
        ("http://127.0.0.1:8321", False),
        ("http://127.9.9.9", False),
        ("http://[::1]:8321/", False),
        ("http://localhost", False),
        ("HTTPS://Birds.Example/below/", False),
        ("http://birds.example", True),
    ):
        assert HttpTransport(url, SECRET, insecure=insecure).url == url.lower().rstrip("/")
    assert repr(Client("https://birds.example", SECRET)) == "Client('https://birds.example')"


def test_a_path_before_the_interface(here: Scene) -> None:
    wire = here.server.wire()
    with Client(f"{URL}/below/", SECRET, transport=wire) as client, pytest.raises(ReplyError):
        client.galleries()
    assert wire.requests[0][1] == f"{URL}/below/v1/galleries"


def test_no_cookie_is_kept(here: Scene) -> None:
    def setting(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        reply.headers["set-cookie"] = "who=you; Path=/; Secure"
        return reply

    client, wire = here.client(setting)
    client.nearest(QUERIES[0], epsilon=4.0)
    client.nearest(QUERIES[0], epsilon=4.0)
    assert not any(name.lower() == b"cookie" for *_, headers, _ in wire.requests for name, _ in headers)


def test_nothing_that_is_packed_is_asked_for(here: Scene) -> None:
    client, wire = here.client()
    client.nearest(QUERIES[0], epsilon=4.0)
    for *_, headers, _ in wire.requests:
        assert dict(headers)[b"Accept-Encoding"] == b"identity"


def test_proxies_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[bytes]] = {"server": [], "proxy": []}

    def answering(name: str) -> Any:
        def answer(connection: socket.socket) -> None:
            asked[name].append(head_of(connection))
            connection.sendall(
                b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n{"galleries":[]}'
            )

        return answer

    with raw_server(answering("server")) as port, raw_server(answering("proxy")) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        with Client(f"http://127.0.0.1:{port}", SECRET) as client:
            assert client.galleries() == ()
        assert (len(asked["server"]), len(asked["proxy"])) == (1, 0)
        with Client("http://birds.example", SECRET, insecure=True, proxies=True) as client:
            assert client.galleries() == ()
        assert (len(asked["server"]), len(asked["proxy"])) == (1, 1)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a certificate for 127.0.0.1 that only itself vouches for, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)  # noqa: S603, S607
    return made, key


def test_certificates(certificate: tuple[Path, Path]) -> None:
    heads: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        heads.append(head_of(connection))
        connection.sendall(
            b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n{"galleries":[]}'
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with raw_server(answer, context) as port:
        url = f"https://127.0.0.1:{port}"
        with Client(url, SECRET) as client, pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED") as no:
            client.galleries()
        assert not no.value.again
        assert heads == []  # the token was not sent
        with Client(url, SECRET, ca=certificate[0], certificate=certificate) as client:
            assert client.galleries() == ()
        assert b"Bearer " + SECRET.encode() in heads[0]
        plain = url.replace("https", "http")
        with Client(plain, SECRET, retries=0) as client, pytest.raises(UnreachableError, match="does it speak https"):
            client.galleries()
    for wrong in ({"ca": "nowhere.pem"}, {"ca": certificate[1]}, {"certificate": certificate[0]}):
        (field,) = wrong
        with pytest.raises(QuestionError, match=rf"^{field}: .* must be there"):
            Client(url, SECRET, **wrong)


def test_plain_http_where_tls_is_expected() -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with (
        raw_server(answer) as port,
        Client(f"https://127.0.0.1:{port}", SECRET, retries=0) as client,
        pytest.raises(UnreachableError, match="does it speak plain http"),
    ):
        client.galleries()


def test_a_client_in_a_loop_and_in_threads(here: Scene) -> None:
    """Programs that wait may run inside of an event loop (notebooks do), and in many threads at once."""
    client, wire = here.client()

    async def inside() -> int:
        return len(client.nearest(QUERIES[0], 3, epsilon=4.0).matches)

    assert asyncio.run(inside()) == 3
    threads = [threading.Thread(target=client.nearest, args=(QUERIES[n], 3, 4.0)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert here.paid == len(wire.posts) == 5


def test_a_client_that_was_closed_or_lost_leaves_no_thread(here: Scene) -> None:
    def alive() -> int:
        return sum(thread.name == "nearveil" for thread in threading.enumerate())

    before = alive()
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(URL, here.server.token, transport=here.server.wire())) for _ in range(2)]
        for client in clients:
            client.galleries()
        assert alive() == before + 2
    assert alive() == before
    lost = Client(URL, here.server.token, transport=here.server.wire())
    lost.galleries()
    assert lost.galleries()  # a second time, on the same connection
    del lost
    end = time.monotonic() + 20
    while alive() > before:  # nobody waits for it: it may be dropped in its own thread
        assert time.monotonic() < end
        time.sleep(0.005)


def test_pauses_grow_and_end() -> None:
    patience = RetryPolicy(9)
    assert [patience.pause(n, None) for n in range(7)] == [0.5, 1, 2, 4, 8, 16, 20]
    assert [patience.pause(0, told) for told in (0.0, 3.0, 1e9)] == [0, 3, 20]


def test_ledgers_hold_nothing_but_messages(here: Scene, tmp_path: Path) -> None:
    client, _ = here.client()
    client.nearest(QUERIES[0], epsilon=4.0, thumbnails=True)
    here.account._ledger.close()
    held = b"".join(path.read_bytes() for path in tmp_path.glob("budget.db*"))
    for form in (QUERIES[0], QUERIES[0].astype(np.float64)):
        assert not any(number.tobytes() in held for number in form)
    with Ledger(tmp_path / "budget.db") as ledger:
        assert [entry.kind for entry in ledger.account("me").history()] == ["opened", "debit", "message"]
    assert public_of(here.gallery).map.n_sets == SETS
