"""``nearveil token``: made, listed, revoked, in words."""

import json
from pathlib import Path

import pytest

from nearveil.server import TokenStore

from .galleries import fine, refused, run, told


def test_a_token_is_made_shown_once_and_revoked(here: Path) -> None:
    result = run(
        "token", "create", "ann", "--scope", "query", "--scope", "originals", "--gallery", "birds", "--days", 3
    )
    assert result.exit_code == 0
    secret = result.stdout.strip()
    place = here / "data" / "nearveil" / "tokens.db"
    assert place.stat().st_mode & 0o777 == 0o600
    assert place.parent.stat().st_mode & 0o777 == 0o700
    with TokenStore(place) as store:
        token = store.verify(secret)
        assert token is not None
        assert (token.label, token.scopes, token.galleries) == ("ann", ("query", "originals"), ("birds",))
        assert token.expires == token.created + 3 * 86_400
        listed = fine("token", "list")
        assert token.id in listed
        assert secret not in listed
        assert "active" in listed
        assert "Revoked token" in fine("token", "revoke", token.id)
        assert "revoked" in fine("token", "list")
    with TokenStore(place) as store:
        assert store.verify(secret) is None


def test_for_programs(here: Path) -> None:
    made = told("token", "create", "prometheus", "--scope", "metrics", "--tokens", here / "t.db")
    assert made["token"].startswith(f"nv_{made['id']}_")
    assert (made["scopes"], made["galleries"], made["expires"], made["state"]) == (["metrics"], ["*"], None, "active")
    (listed,) = json.loads(fine("token", "list", "--json", "--tokens", here / "t.db"))
    assert listed == {key: value for key, value in made.items() if key != "token"}
    assert told("token", "revoke", made["id"], "--tokens", here / "t.db")["state"] == "revoked"


def test_what_is_refused(here: Path) -> None:
    for words, said in (
        (("create", ""), "LABEL"),
        (("create", "ann", "--scope", "admin"), "scopes must be of query, originals, metrics"),
        (("create", "ann", "--gallery", "A B"), "galleries must be names"),
        (("create", "ann", "--days", "0"), "days must be above 0"),
        (("revoke", "ann"), "16 hexadecimal digits"),
        (("list", "--tokens", "mysql://x/y"), "tokens must name a SQLite file"),
    ):
        assert said in refused("token", *words)


def test_looking_for_tokens_makes_none(here: Path) -> None:
    for words in (("list",), ("revoke", "0" * 16)):
        text = refused("token", *words)
        assert f"No tokens at {here / 'data' / 'nearveil' / 'tokens.db'}: create one with" in text
        assert "`nearveil token create LABEL`" in text
    assert list(here.iterdir()) == []
    fine("token", "create", "ann")
    assert "no such token" in refused("token", "revoke", "0" * 16)


def test_the_file_of_the_server_says_where(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = here / "nearveil.toml"
    config.write_text(f'tokens = "{here / "t.db"}"\ntls_cert = "/root/nobody may look here"\n')
    fine("token", "create", "ann", "--config", config)
    monkeypatch.setenv("NEARVEIL_CONFIG", str(config))
    fine("token", "create", "bob")
    assert {one["label"] for one in json.loads(fine("token", "list", "--json"))} == {"ann", "bob"}
    fine("token", "create", "eve", "--tokens", here / "other.db")  # said here, it wins
    monkeypatch.setenv("NEARVEIL_SERVER_TOKENS", str(here / "other.db"))  # and so does a variable
    assert [one["label"] for one in json.loads(fine("token", "list", "--json"))] == ["eve"]
    monkeypatch.delenv("NEARVEIL_SERVER_TOKENS")
    for text, said in (("token = 'x'", "token: no such setting"), ("tokens = 3", "tokens: must be text")):
        config.write_text(text)
        assert said in refused("token", "list")
    assert not (here / "data").exists()


def test_a_list_fits_a_terminal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    scopes = [word for name in ("query", "originals", "metrics") for word in ("--scope", name)]
    made = told("token", "create", "the camera by the door", *scopes, "--gallery", "birds", "--days", 3)
    listed = fine("token", "list")
    assert max(map(len, listed.splitlines())) <= 80
    for word in (made["id"], "camera", "originals", "birds", made["expires"][:10], "active"):
        assert word in listed


def test_a_label_does_not_steer_a_terminal(here: Path) -> None:
    assert "LABEL must be" in refused("token", "create", "\x1b[31mred")
