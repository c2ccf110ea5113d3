"""``nearveil token``: made, listed, revoked, in words."""

import json
from pathlib import Path

import pytest

from nearveil.service import TokenStore

from .galleries import fine, refused, run, told


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("NEARVEIL_SERVER_TOKENS", raising=False)
    return tmp_path


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
        assert "good" in listed
        assert "is good no more" in fine("token", "revoke", token.id)
        assert "revoked" in fine("token", "list")
    with TokenStore(place) as store:
        assert store.verify(secret) is None


def test_for_programs(here: Path) -> None:
    made = told("token", "create", "prometheus", "--scope", "metrics", "--tokens", here / "t.db")
    assert made["token"].startswith(f"nv_{made['id']}_")
    assert (made["scopes"], made["galleries"], made["expires"], made["state"]) == (["metrics"], ["*"], None, "good")
    (listed,) = json.loads(fine("token", "list", "--json", "--tokens", here / "t.db"))
    assert listed == {key: value for key, value in made.items() if key != "token"}
    assert told("token", "revoke", made["id"], "--tokens", here / "t.db")["state"] == "revoked"


def test_what_is_refused(here: Path) -> None:
    for words, said in (
        (("create", ""), "label"),
        (("create", "ann", "--scope", "admin"), "scopes must be of query, originals, metrics"),
        (("create", "ann", "--gallery", "A B"), "galleries must be names"),
        (("create", "ann", "--days", "0"), "days must be above 0"),
        (("revoke", "ann"), "16 hexadecimal digits"),
        (("revoke", "0" * 16), "there is no such token"),
        (("list", "--tokens", "mysql://x/y"), "tokens must be a file"),
    ):
        assert said in refused("token", *words)


def test_a_label_does_not_steer_a_terminal(here: Path) -> None:
    assert "label must be" in refused("token", "create", "\x1b[31mred")
