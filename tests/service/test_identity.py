"""Tokens of an identity provider, against one on this machine whose keys change, fail and come late."""

import asyncio
import base64
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from nearveil import Client, NearveilError
from nearveil.server import OpenGallery, Settings, TokenStore, create_app
from nearveil.server.settings import SettingsError

from ..gallery.index_places import unit_rows
from .asking import new_account
from .serving import InProcess, Server, index_of, lines
from .test_serve import started

jwt = pytest.importorskip("jwt", reason="PyJWT is not installed (the extra `oidc`)")
identity = pytest.importorskip("nearveil.server.identity")

NAME = "ann@example.org"
SCOPES = {"galleries": {"see.birds": ["birds"], "see.all": ["*"]}, "originals": "see.originals", "metrics": "watch"}


@cache
def make_key(number: int, kind: str = "ES256") -> Any:
    del number
    if kind.startswith("ES"):
        return ec.generate_private_key(ec.SECP256R1())
    return rsa.generate_private_key(65537, 1024 if kind == "weak" else 2048)


def publish(key: Any, kid: str, alg: str | None = None, **more: str) -> dict[str, Any]:
    """Return the public part of a key as a provider shows it."""
    kind = jwt.algorithms.RSAAlgorithm if hasattr(key, "public_exponent") or hasattr(key, "decrypt") else (
        jwt.algorithms.ECAlgorithm
    )  # fmt: skip
    named = {} if alg is None else {"alg": alg}
    return {**kind.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig", **named, **more}


class Provider:
    """An identity provider on loopback."""

    def __init__(self) -> None:
        self.keys = [publish(make_key(0), "first")]
        self.status, self.delay, self.fetches = 200, 0.0, list[str]()
        self.documents: dict[str, Any] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805 - of the server inside
                self.fetches.append(handler.path)
                time.sleep(self.delay)
                content = self.find_document(handler.path)
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                handler.send_response(self.status if content is not None else 404)
                handler.send_header("location", f"{self.issuer}/elsewhere")
                handler.send_header("content-length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}/realm"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def find_document(self, path: str) -> Any:
        usual = {
            "/realm/.well-known/openid-configuration": {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys"},
            "/realm/keys": {"keys": self.keys},
            "/realm/elsewhere": {"keys": self.keys},
        }
        return {**usual, **self.documents}.get(path)

    def sign(
        self, scope: object = "see.birds", *, key: Any = None, alg: str = "ES256", kid: str | None = "first",
        headers: dict[str, Any] | None = None, **claims: Any,
    ) -> str:  # fmt: skip
        """Return a token; a claim that is None is left out, and times are seconds from now."""
        now = time.time()
        usual = {"iss": self.issuer, "aud": "nearveil", "sub": NAME, "exp": 60, "iat": 0, "scope": scope}
        content = {name: value for name, value in {**usual, **claims}.items() if value is not None}
        content |= {name: now + content[name] for name in ("exp", "iat", "nbf") if name in content}
        named = ({} if kid is None else {"kid": kid}) | (headers or {})
        return str(jwt.encode(content, make_key(0) if key is None else key, alg, named))


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.server.shutdown()
    made.server.server_close()


Open = Callable[..., Server]


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("identity")
    with ExitStack() as stack:
        yield {name: stack.enter_context(index_of(folder / name, seed=len(name))) for name in ("birds", "car")}


@contextmanager
def serving(folder: Path, indexes: dict[str, Any], oidc: dict[str, Any], **told: Any) -> Iterator[Server]:
    """Run the application with two galleries and a provider, in this process."""
    listed = [{"name": name, "index": str(folder / name)} for name in indexes]
    settings = Settings.load(
        tokens=str(folder / "tokens.db"), log_file=folder / "log.jsonl", oidc=oidc, galleries=listed, **told
    )
    with TokenStore(settings.tokens) as store, asyncio.Runner() as runner, ExitStack() as stack:
        galleries = [OpenGallery(index, name, offers=("originals",)) for name, index in indexes.items()]
        app = create_app(galleries, store, settings)
        secret = store.create("own", scopes=["query", "originals", "metrics"])[1]
        life = app.router.lifespan_context(app)
        runner.run(life.__aenter__())
        stack.callback(lambda: runner.run(life.__aexit__(None, None, None)))
        yield Server(indexes["birds"], store, settings, galleries[0], secret, InProcess(app, runner))


@pytest.fixture
def open_server(tmp_path: Path, provider: Provider, indexes: dict[str, Any]) -> Iterator[Open]:
    with ExitStack() as stack:

        def make(folder: str = ".", *, oidc: dict[str, Any] | None = None, **told: Any) -> Server:
            (tmp_path / folder).mkdir(exist_ok=True)
            words = {"issuer": provider.issuer, "audience": "nearveil", **SCOPES, **(oidc or {})}
            return stack.enter_context(serving(tmp_path / folder, indexes, words, **told))

        yield make


def find_provider(server: Server) -> Any:
    return server.client.app.state.nearveil.identity


def let_fetch(server: Server) -> None:
    """Let the least time between two fetches pass."""
    find_provider(server)._fetched_at = -math.inf


def forbid_fetch(server: Server) -> None:
    find_provider(server)._fetched_at = math.inf


def names(server: Server, token: str) -> list[str]:
    return [entry["name"] for entry in server.get("/v1/galleries", token).json()["galleries"]]


def read_ids(folder: Path) -> list[str]:
    return [entry["token"] for line in lines(folder).splitlines() if (entry := json.loads(line)).get("token")]


def test_scopes_open_galleries(open_server: Open, provider: Provider) -> None:
    server = open_server()
    birds, every = provider.sign("openid see.birds"), provider.sign(["see.all", "other"])
    assert names(server, birds) == ["birds"]
    assert names(server, every) == ["birds", "car"]
    assert server.get("/v1/galleries/birds/map", birds).status_code == 200
    other, unknown = (server.get(f"/v1/galleries/{name}/map", birds) for name in ("car", "no-such"))
    assert (other.status_code, other.content) == (unknown.status_code, unknown.content)
    assert other.status_code == 404
    original = "/v1/galleries/birds/items/1/original"
    assert server.get(original, birds).status_code == 403
    assert server.get(original, provider.sign("see.birds see.originals")).content == b"an original"
    assert server.get(original, provider.sign("see.originals")).status_code == 403  # it lacks `query`
    assert server.get("/metrics", birds).status_code == 403
    assert "nearveil_requests_total" in server.get("/metrics", provider.sign("watch")).text


@pytest.mark.parametrize("scope", [None, "", "openid", "see.birdsx", [], ["see.bird"], 3, [["see.birds"]], {"a": 1}])
def test_a_token_without_a_scope_opens_nothing(open_server: Open, provider: Provider, scope: object) -> None:
    server = open_server()
    reply = server.get("/v1/galleries", provider.sign(scope))
    assert reply.status_code == (401 if scope in (3, [["see.birds"]]) else 403)
    assert server.ask(server.query(), token=provider.sign(scope)).status_code == reply.status_code


def test_the_claim_with_the_scopes_may_have_another_name(open_server: Open, provider: Provider) -> None:
    server = open_server(oidc={"claim": "scp", "jwks_url": f"{provider.issuer}/keys"})
    assert names(server, provider.sign(None, scp="see.birds")) == ["birds"]
    assert server.get("/v1/galleries", provider.sign("see.birds")).status_code == 403
    assert set(provider.fetches) == {"/realm/keys"}


def make_invalid(provider: Provider) -> dict[str, str]:
    """Return tokens that nobody may use, by what is wrong with them."""
    sign, other = provider.sign, make_key(9)
    without: dict[str, dict[str, Any]] = {name: {name: None} for name in ("iss", "aud", "sub", "exp", "iat")}
    public = make_key(0).public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )  # fmt: skip
    head, body, signature = sign().split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    rewritten = base64.urlsafe_b64encode(json.dumps(claims | {"scope": "see.all"}).encode()).rstrip(b"=").decode()
    unsigned = base64.urlsafe_b64encode(b'{"alg":"none","kid":"first"}').rstrip(b"=").decode()

    def confuse(secret: bytes) -> str:
        """Sign with the public key as if it were a secret of HS256, which PyJWT refuses to do."""
        import hashlib
        import hmac

        start = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"first"}').rstrip(b"=").decode()
        digest = hmac.new(secret, f"{start}.{body}".encode(), hashlib.sha256).digest()
        return f"{start}.{body}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"

    return {
        "expired": sign(exp=-31),
        "too old": sign(iat=-86_431),
        "of the future": sign(iat=31),
        "not yet": sign(nbf=31),
        "for others": sign(aud="others"),
        "for others, listed": sign(aud=["others", "more"]),
        "of another issuer": sign(iss="https://evil.example.org"),
        "of a part of the issuer": sign(iss=provider.issuer + "/"),
        **{f"without {name}": sign(**without[name]) for name in without},
        "of nobody": sign(sub=""),
        "of a number": sign(sub=7),
        "of another key": sign(key=other),
        "of an unknown key": sign(key=other, kid="other"),
        "of a key without a name": sign(kid=None),
        "with its own key": sign(key=other, headers={"jwk": publish(other, "first")}),
        "with a URL of its key": sign(key=other, headers={"jku": f"{provider.issuer}/evil", "kid": "first"}),
        "with a critical header": sign(headers={"crit": ["exp"]}),
        "by another algorithm": sign(key=make_key(1, "RS256"), alg="RS256"),
        "confused": confuse(public),
        "confused, stripped": confuse(public.strip()),
        "rewritten": f"{head}.{rewritten}.{signature}",
        "unsigned": f"{unsigned}.{body}.",
        "without a signature": f"{head}.{body}.",
        "cut": f"{head}.{body}",
        "no JSON": "a.b.c",
        "deep": base64.urlsafe_b64encode(b"[" * 9000).rstrip(b"=").decode() + f".{body}.{signature}",
        "empty": "",
        "no token": "x" * 100,
        "a number for its key": sign(headers={"kid": "first"}).replace(head, base64.urlsafe_b64encode(
            b'{"alg":"ES256","kid":1}').rstrip(b"=").decode()),
    }  # fmt: skip


def test_invalid_tokens_are_refused_alike(
    open_server: Open, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the status, body and headers of a wrong own token, after the work of a valid one."""
    server, verified = open_server(rate=None), list[bool]()
    assert server.get("/v1/galleries", provider.sign()).status_code == 200  # its keys are here now
    forbid_fetch(server)
    own = server.get("/v1/galleries", server.secret[:-1] + "x")
    verify = jwt.algorithms.ECAlgorithm.verify

    def count(*words: Any) -> bool:
        verified.append(verify(*words))
        return verified[-1]

    monkeypatch.setattr(jwt.algorithms.ECAlgorithm, "verify", count)
    assert server.get("/v1/galleries", provider.sign()).status_code == 200
    work = len(verified)
    for name, token in make_invalid(provider).items():
        verified.clear()
        reply = server.get("/v1/galleries", token or " ")
        assert (reply.status_code, reply.content) == (401, own.content), name
        assert set(reply.headers) == set(own.headers), name
        assert len(verified) == work == 1, name
    assert provider.fetches.count("/realm/evil") == 0
    assert provider.fetches.count("/realm/keys") == 1  # at the start
    assert server.get("/v1/galleries", provider.sign()).status_code == 200
    assert server.get("/v1/galleries").status_code == 200  # own tokens, too


@pytest.mark.parametrize("alg", ["RS256", "PS256", "ES256"])
def test_clocks_may_differ_a_little(open_server: Open, provider: Provider, alg: str) -> None:
    key = make_key(2, alg)
    provider.keys = [publish(key, "first", alg)]
    server = open_server(oidc={"leeway": 10})
    for claims in ({"exp": -8}, {"iat": 8}, {"nbf": 8}, {"iat": -86_407}, {"aud": ["more", "nearveil"]}):
        assert server.get("/v1/galleries", provider.sign(key=key, alg=alg, **claims)).status_code == 200
    assert server.get("/v1/galleries", provider.sign(key=key, alg=alg, exp=-12)).status_code == 401


def test_nobody_is_named(open_server: Open, provider: Provider, tmp_path: Path) -> None:
    """Logs and the table of keys have an id of the subject, which only the token store can derive from a name."""
    tokens = [provider.sign(), provider.sign(exp=50), provider.sign(sub="bob@example.org")]
    for folder in ("a", "a", "b"):
        server = open_server(folder)
        for number, token in enumerate(tokens):
            assert server.ask(server.query(), token=token, key=f"{folder}-{number % 2}-of-a-client").status_code in (
                200,
                409,
            )
        server.client.app.state.nearveil.log.close()
    ids = {folder: read_ids(tmp_path / folder) for folder in "ab"}
    assert ids["a"][0] == ids["a"][1] == ids["a"][3] != ids["a"][2]  # the same subject, also after a restart
    assert len({*ids["a"], *ids["b"]}) == 4
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".jsonl", ".keys")):
        content = path.read_bytes()
        assert not any(token.encode() in content or token.split(".")[2].encode() in content for token in tokens)
        assert b"ann" not in content
        assert b"example" not in content


def test_a_subject_is_one_client(open_server: Open, provider: Provider) -> None:
    """Its new token repeats a request; nobody else does, nor another gallery. It has one rate."""
    server = open_server(rate=60.0, burst=8)
    key, query = "a-key-of-the-subject", server.query()
    first = server.ask(query, token=provider.sign("see.all"), key=key)
    again = server.ask(query, token=provider.sign("see.birds", exp=100), key=key)
    assert (first.status_code, again.content) == (200, first.content)
    assert server.ask(query, token=provider.sign("see.all"), key=key, gallery="car").status_code == 409
    assert server.ask(query, token=provider.sign("see.birds"), key=key, gallery="car").status_code == 404
    assert server.ask(query, token=provider.sign("see.all", sub="bob"), key=key).status_code == 409
    statuses = [server.get("/v1/galleries", provider.sign(exp=60 + number)).status_code for number in range(9)]
    assert 429 in statuses
    assert server.get("/v1/galleries", provider.sign(sub="bob")).status_code == 200


def test_keys_rotate(open_server: Open, provider: Provider) -> None:
    server, new = open_server(rate=None), make_key(3)
    old_token, new_token = provider.sign(), provider.sign(key=new, kid="second")
    assert server.get("/v1/galleries", old_token).status_code == 200
    provider.keys.append(publish(new, "second"))
    forbid_fetch(server)
    assert server.get("/v1/galleries", new_token).status_code == 401  # as if keys were fetched a moment ago
    let_fetch(server)
    assert server.get("/v1/galleries", new_token).status_code == 200
    assert server.get("/v1/galleries", old_token).status_code == 200
    del provider.keys[0]
    let_fetch(server)
    assert server.get("/v1/galleries", provider.sign(kid="third")).status_code == 401  # fetches again
    assert server.get("/v1/galleries", old_token).status_code == 401
    assert server.get("/v1/galleries", new_token).status_code == 200


def test_keys_are_fetched_every_five_minutes(open_server: Open, provider: Provider) -> None:
    server = open_server()
    state, found = server.client.app.state.nearveil, find_provider(server)
    server.get("/v1/galleries", provider.sign())
    before, found._fetched_at = len(provider.fetches), time.monotonic() - identity._INTERVAL + 60
    server.client.runner.run(state.refresh())
    assert len(provider.fetches) == before
    found._fetched_at = time.monotonic() - identity._INTERVAL
    server.client.runner.run(state.refresh())
    assert len(provider.fetches) == before + 2


def test_random_keys_fetch_once(open_server: Open, provider: Provider) -> None:
    server = open_server(rate=None)
    assert server.get("/v1/galleries", provider.sign()).status_code == 200
    let_fetch(server)
    before = len(provider.fetches)
    for number in range(50):
        server.get("/v1/galleries", provider.sign(key=make_key(9), kid=f"random {number}"))
    assert len(provider.fetches) == before + 2  # configuration and keys


def test_a_slow_provider_delays_nobody_else(open_server: Open, provider: Provider) -> None:
    server = open_server(rate=None)
    assert server.get("/v1/galleries", provider.sign()).status_code == 200
    let_fetch(server)
    provider.delay, before, ended = 0.4, len(provider.fetches), list[str]()

    async def get(token: str, name: str) -> None:
        headers = {"authorization": f"Bearer {token}"}
        assert (await server.client._client.get("/v1/galleries", headers=headers)).status_code != 503
        ended.append(name)

    async def ask() -> None:
        unknown = [get(provider.sign(kid=f"unknown {number}"), "unknown") for number in range(5)]
        waiting = asyncio.gather(*unknown)
        await asyncio.sleep(0.1)
        for _ in range(5):
            await get(provider.sign(), "known")
            await get(server.secret, "own")
        await waiting

    server.client.runner.run(ask())
    assert ended == ["known", "own"] * 5 + ["unknown"] * 5
    assert len(provider.fetches) == before + 2


def test_a_provider_that_is_down(open_server: Open, provider: Provider, tmp_path: Path) -> None:
    provider.status = 500
    server = open_server(rate=None)
    for token in (provider.sign(), "x"):
        reply = server.get("/v1/galleries", token)
        assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (503, "unavailable", "2")
    assert server.get("/v1/galleries").status_code == 200  # own tokens
    server.client.runner.run(server.client.app.state.nearveil.refresh())
    assert server.get("/ready", None).status_code == 200
    provider.status = 200
    let_fetch(server)
    assert server.get("/v1/galleries", provider.sign()).status_code == 200
    provider.status = 500
    let_fetch(server)
    assert server.get("/v1/galleries", provider.sign(kid="other")).status_code == 401
    assert server.get("/v1/galleries", provider.sign()).status_code == 200  # with the keys of before
    provider.server.shutdown()
    provider.server.server_close()
    let_fetch(server)
    assert server.get("/v1/galleries", provider.sign(kid="other")).status_code == 401
    assert server.get("/v1/galleries", provider.sign()).status_code == 200


BROKEN: dict[str, Callable[[Provider], object]] = {
    "a redirect": lambda made: setattr(made, "status", 302),
    "not JSON": lambda made: made.documents.update({"/realm/keys": b"<html>"}),
    "too large": lambda made: made.documents.update({"/realm/keys": b" " * (1 << 20) + b'{"keys": []}'}),
    "no keys": lambda made: made.documents.update({"/realm/keys": {"keys": []}}),
    "another issuer": lambda made: made.documents.update(
        {
            "/realm/.well-known/openid-configuration": {"issuer": "https://evil", "jwks_uri": f"{made.issuer}/evil"},
            "/realm/evil": {"keys": [publish(make_key(9), "other")]},
        }
    ),
    "keys without TLS": lambda made: made.documents.update(
        {
            "/realm/.well-known/openid-configuration": {
                "issuer": made.issuer, "jwks_uri": made.issuer.replace("127.0.0.1", "192.0.2.1") + "/keys"
            }
        }
    ),
    "a file": lambda made: made.documents.update(
        {"/realm/.well-known/openid-configuration": {"issuer": made.issuer, "jwks_uri": "file:///etc/passwd"}}
    ),
    "only other keys": lambda made: setattr(
        made,
        "keys",
        [
            publish(make_key(0), "first", use="enc"),
            {"kty": "oct", "k": base64.urlsafe_b64encode(b"s" * 32).decode(), "kid": "first", "alg": "HS256"},
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_what_a_provider_must_not_send(open_server: Open, provider: Provider, fault: str) -> None:
    server = open_server(rate=None)
    assert server.get("/v1/galleries", provider.sign()).status_code == 200
    BROKEN[fault](provider)
    let_fetch(server)
    assert server.get("/v1/galleries", provider.sign(key=make_key(9), kid="other")).status_code == 401
    assert server.get("/v1/galleries", provider.sign()).status_code == 200  # with the keys of before


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")  # an error would refuse them, too
def test_weak_and_symmetric_keys_verify_nothing(open_server: Open, provider: Provider) -> None:
    weak, secret = make_key(4, "weak"), b"s" * 32
    provider.keys += [
        publish(weak, "weak", "RS256"),
        {"kty": "oct", "k": base64.urlsafe_b64encode(secret).decode(), "kid": "secret", "alg": "HS256"},
    ]
    server = open_server(rate=None)
    for token in (
        provider.sign(key=weak, alg="RS256", kid="weak"),
        provider.sign(key=secret, alg="HS256", kid="secret"),
    ):
        assert server.get("/v1/galleries", token).status_code == 401


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, indexes: dict[str, Any]) -> None:
    words = {"issuer": "https://id.example.org", "audience": "nearveil", **SCOPES}
    for change, message in (
        ({"issuer": "http://id.example.org"}, "oidc.issuer: must be a URL that begins with https://"),
        ({"jwks_url": "file:///etc/keys"}, "oidc.jwks_url: must be a URL"),
        ({"galleries": {"a": ["dogs"]}}, "oidc.galleries: no gallery is named dogs"),
        ({"scope": "x"}, "oidc.scope: no such setting"),
        ({"audience": ""}, "oidc.audience"),
        ({"leeway": 1e6}, "oidc.leeway"),
    ):
        with pytest.raises(SettingsError, match=message):
            Settings.load(oidc={**words, "galleries": {"see.all": ["*"]}, **change})
    monkeypatch.setenv("NEARVEIL_SERVER_OIDC", "id.example.org")
    with pytest.raises(SettingsError, match="oidc: must be a table with issuer, audience and galleries"):
        Settings.load()
    monkeypatch.delenv("NEARVEIL_SERVER_OIDC")
    monkeypatch.setitem(sys.modules, "jwt", None)
    monkeypatch.delitem(sys.modules, "nearveil.server.identity")
    monkeypatch.delattr("nearveil.server.identity")
    with pytest.raises(ModuleNotFoundError, match=r"nearveil\[oidc\]"), serving(tmp_path, indexes, words):
        pass


def test_a_server_with_several_processes(provider: Provider, tmp_path: Path) -> None:
    index_of(tmp_path / "birds").close()
    galleries = json.dumps([{"name": "birds", "index": str(tmp_path / "birds")}])
    oidc = json.dumps({"issuer": provider.issuer, "audience": "nearveil", "galleries": {"see.birds": ["birds"]}})
    process = started(tmp_path, "--workers", "2", GALLERIES=galleries, OIDC=oidc)
    try:
        for _ in range(6):
            with closing(httpx.Client(base_url=process.url)) as client:  # a new connection, to any of them
                headers = {"authorization": f"Bearer {provider.sign()}"}
                assert client.get("/v1/galleries/birds/map", headers=headers).status_code == 200
        token = provider.sign(groups=[f"group-{number:040}" for number in range(80)])  # 6,000 characters
        with new_account(tmp_path / "ledger.db") as account:
            with Client(process.url, token, account=account, extractor=None) as asker:
                assert len(asker.nearest(unit_rows(1)[0], epsilon=4.0, k=3).matches) == 3
            late = Client(process.url, provider.sign(exp=-60), account=account, extractor=None)
            with late, pytest.raises(NearveilError, match="nvalid or revoked token"):
                late.nearest(unit_rows(1)[0], epsilon=4.0, k=3)
    finally:
        process.end()
    assert len(set(read_ids(tmp_path))) == 1
