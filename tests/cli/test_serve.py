"""``nearveil serve``: what it is told, and what it says. How it runs is tested in tests/service/test_serve.py."""

from pathlib import Path
from typing import Any

import pytest

import nearveil.service
from nearveil.service import Settings

from .galleries import fine, refused


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    found: list[Settings] = []

    def serve(settings: Settings, *, ready: Any) -> None:
        found.append(settings)
        ready("http://127.0.0.1:8321")

    monkeypatch.setattr(nearveil.service, "serve", serve, raising=False)
    monkeypatch.delenv("NEARVEIL_CONFIG", raising=False)
    return found


def test_a_folder_is_a_gallery(served: list[Settings], tmp_path: Path) -> None:
    assert fine("serve", tmp_path / "My Photos") == "nearveil serves at http://127.0.0.1:8321\n"
    (gallery,) = served[0].galleries
    assert (gallery.name, gallery.kind, gallery.index) == ("my-photos", "open", str(tmp_path / "My Photos"))
    fine("serve", "postgresql://me@host/photos", "--name", "birds")
    assert served[1].galleries[0].name == "birds"


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
    for words, said in (
        ((), "galleries: there is none"),
        (("--name", "birds"), "--name"),
        (("x", "--port", "70000"), "port: "),
        (("x", "--host", "0.0.0.0"), "host: beyond loopback"),  # noqa: S104
        (("x", "--log-level", "loud"), "log_level: "),
        (("x", "--tls-cert", "none.pem"), "tls_cert and tls_key"),
        (("--config", tmp_path / "none.toml"), "cannot be read"),
        ((tmp_path / "nowhere", "--port", "0"), "there is none here"),
    ):
        assert said in refused("serve", *words)


def test_help_has_examples() -> None:
    for words in (("serve",), ("token", "create"), ("token", "list"), ("token", "revoke")):
        assert "Examples" in fine(*words, "--help")
