"""``nearveil serve``: what it is told, and what it says. How it runs is tested in tests/service/test_serve.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nearveil.server
from nearveil.gallery import Index, Item
from nearveil.server import Settings, TokenStore
from nearveil.server.tokens import default_location

from .galleries import fine, refused, run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    found: list[Settings] = []

    def serve(settings: Settings, *, ready: Any) -> None:
        found.append(settings)
        ready("http://127.0.0.1:8321")

    monkeypatch.setattr(nearveil.server, "serve", serve, raising=False)
    monkeypatch.delenv("NEARVEIL_CONFIG", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with TokenStore(default_location()) as store:
        store.create("ann")
    return found


def test_a_folder_is_a_gallery(served: list[Settings], tmp_path: Path) -> None:
    assert fine("serve", tmp_path / "My Photos") == "nearveil serves at http://127.0.0.1:8321\n"
    (gallery,) = served[0].galleries
    assert (gallery.name, gallery.kind, gallery.index) == ("my-photos", "open", str(tmp_path / "My Photos"))
    fine("serve", "postgresql://me@host/photos", "--name", "birds")
    assert served[1].galleries[0].name == "birds"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://me:hunter2@host/My%20Photos?options=-csearch_path%3Dhidden", "my-photos"),
        ("postgresql://me:hunter2@host/photos?password=hunter2/hunter2", "photos"),
        ("postgresql://me:hunter2@host/", "gallery"),
        ("postgresql://me:hunter2@host", "gallery"),
        ("postgresql://me:hunter2@host/..", "gallery"),
    ],
)
def test_the_name_of_a_database_holds_nothing_of_its_address(served: list[Settings], url: str, name: str) -> None:
    fine("serve", url)
    assert served[0].galleries[0].name == name
    text = refused("serve", "://hunter2")
    assert "INDEX must be a path, or a URL" in text
    assert "hunter2" not in text


def test_who_has_no_token_is_told_how_to_make_one(served: list[Settings], tmp_path: Path) -> None:
    place = tmp_path / "to kens" / "t.db"
    said = run("serve", "x", "--tokens", place)
    assert said.stdout == "nearveil serves at http://127.0.0.1:8321\n"
    assert (
        f"No token yet, so no client can connect: create one with `nearveil token create LABEL --tokens '{place}'`"
        in (said.stderr)
    )
    assert not place.parent.exists()
    fine("token", "create", "ann", "--tokens", place)
    assert run("serve", "x", "--tokens", place).stderr == ""


def test_a_log_that_cannot_be_written_is_said_before_anything_is_served(served: list[Settings], tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere" / "log", tmp_path):
        assert f"log_file: {place} is not writable: " in refused("serve", "x", "--log-file", place)
    assert served == []
    fine("serve", "x", "--log-file", tmp_path / "log")


def test_ctrl_c_while_it_starts_is_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(settings: Settings, *, ready: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nearveil.server, "serve", interrupted, raising=False)
    result = run("serve", "x", "--tokens", tmp_path / "t.db")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_the_command_line_wins(served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text('port = 1\nlog_level = "error"\n[[galleries]]\nname = "birds"\nindex = "b"\n')
    monkeypatch.setenv("NEARVEIL_SERVER_PORT", "2")
    fine("serve", "--config", tmp_path / "c.toml", "--port", 3, "--tokens", tmp_path / "t.db")
    fine("serve", "--config", tmp_path / "c.toml")
    assert [one.port for one in served] == [3, 2]
    assert [one.log_level for one in served] == ["error"] * 2
    assert served[0].tokens == str(tmp_path / "t.db")
    assert [one.name for one in served[1].galleries] == ["birds"]


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("NEARVEIL_CONFIG", raising=False)
    certificate = tmp_path / "cert.pem"
    certificate.touch()
    for words, said in (
        ((), "galleries: none given"),
        (("--name", "birds"), "--name"),
        (("x", "--port", "70000"), "port: "),
        (("x", "--host", "0.0.0.0"), "host: beyond loopback"),  # noqa: S104
        (("x", "--log-level", "loud"), "log_level: "),
        (("x", "--cert", "none.pem"), "tls_cert: no such file"),
        (("x", "--cert", certificate), "tls_cert and tls_key"),
        (("--config", tmp_path / "none.toml"), "cannot be read"),
        (
            (tmp_path / "nowhere", "--port", "0"),
            "Create one with `nearveil index DIR --into GALLERY`",
        ),
    ):
        assert said in refused("serve", *words)


def test_an_index_without_a_map_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEARVEIL_CONFIG", raising=False)
    with Index.create(tmp_path / "bare", dimension=4, extractor="toy") as index:
        index.add(Item(row) for row in np.eye(4, dtype=np.float32))
    for more in ((), ("--workers", 2)):
        said = refused("serve", tmp_path / "bare", "--port", 0, "--tokens", tmp_path / "t.db", *more)
        assert "galleries: bare has no map yet: `nearveil index` makes one" in said
        assert "nearveil serves at" not in said


def test_help_has_examples() -> None:
    for words in (("serve",), ("token", "create"), ("token", "list"), ("token", "revoke")):
        assert "Examples" in fine(*words, "--help")


def test_settings_are_told_in_our_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEARVEIL_CONFIG", raising=False)
    config = tmp_path / "c.toml"
    for text, said in (
        ('[galleries.birds]\nindex = "b"', "galleries: must be a list: write [[galleries]] before each"),
        ('[[galleries]]\nname = "My Birds"\nindex = "b"', "galleries.0.name: must have lowercase letters, digits"),
        ('[[galleries]]\nindex = "b"', "galleries.0.name: required"),
        ('trusted_hosts = "birds.example"', "trusted_hosts: must be a list"),
    ):
        config.write_text(text)
        assert said in refused("serve", "--config", config)
    monkeypatch.setenv("NEARVEIL_SERVER_TRUSTED_HOSTS", "birds.example")
    assert 'NEARVEIL_SERVER_TRUSTED_HOSTS: trusted_hosts must be JSON in a variable, such as ["a", "b"]' in (
        refused("serve", "x")
    )
