"""Settings: from a file, the environment and the command line; and what is said where one is wrong."""

from pathlib import Path
from typing import Any

import pytest

from nearveil.cluster import is_loopback
from nearveil.server import Settings
from nearveil.server.middleware import get_network
from nearveil.server.settings import SettingsError, make_gallery_name

ROOT = Path(__file__).parents[2]
PROTECTED = {
    "name": "scans",
    "kind": "protected",
    "index": "private/",
    "public": "public/",
    "classes": ["benign", "malignant"],
    "epsilon": 1.0,
    "delta": 1e-6,
    "ledger": "ledger.db",
    "account": "scans",
}


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEARVEIL_CONFIG", raising=False)


def refused(**told: Any) -> str:
    with pytest.raises(SettingsError) as error:
        Settings.load(**told)
    return str(error.value)


def test_the_later_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nearveil.toml"
    file.write_text('port = 1\nburst = 2\nrate = 3.0\n[[galleries]]\nname = "birds"\nindex = "gallery/"\n')
    monkeypatch.setenv("NEARVEIL_SERVER_BURST", "20")
    monkeypatch.setenv("NEARVEIL_SERVER_RATE", "30")
    found = Settings.load(file, rate=300)
    assert (found.port, found.burst, found.rate) == (1, 20, 300)
    assert [gallery.index for gallery in found.galleries] == ["gallery/"]
    monkeypatch.setenv("NEARVEIL_CONFIG", str(file))
    assert Settings.load().port == 1
    monkeypatch.setenv("NEARVEIL_SERVER_GALLERIES", '[{"name": "cars", "index": "c"}]')
    assert [gallery.name for gallery in Settings.load().galleries] == ["cars"]
    monkeypatch.delenv("NEARVEIL_CONFIG")
    assert Settings.load().port == 8321
    assert type(Settings.load()) is Settings


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(SettingsError, match="at most 1048576 bytes"):
        Settings.load("/dev/zero")


def test_what_is_wrong_is_named_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "postgresql://me:hunter2@host/x"  # noqa: S105
    for told, said in (
        ({"port": 70_000}, "port: "),
        ({"port": "a"}, "port: "),
        ({"rate": 0}, "rate: "),
        ({"burst": 0}, "burst: "),
        ({"concurrency": 0}, "concurrency: "),
        ({"body_timeout": float("nan")}, "body_timeout: "),
        ({"max_body": 3}, "max_body: "),
        ({"log_level": "loud"}, "log_level: "),
        ({"tokens": ""}, "tokens: "),
        ({"colour": 1}, "colour: no such setting"),
        ({"tls_cert": __file__}, "tls_cert and tls_key"),
        ({"tls_cert": "x.pem", "tls_key": "y.pem"}, "tls_cert: no such file"),
        ({"tls_client_ca": __file__}, "tls_client_ca: needs"),
        ({"host": "0.0.0.0"}, "host: beyond loopback"),  # noqa: S104
        ({"host": "example.org"}, "host: beyond loopback"),
        ({"galleries": [{"name": "Birds", "index": secret}]}, "galleries.0.name: "),
        ({"galleries": [{"name": "birds"}]}, "galleries.0.index: "),
        ({"galleries": [{"name": "birds", "index": secret, "offers": ["secrets"]}]}, "galleries.0.offers"),
        ({"galleries": [{"name": "birds", "index": secret}] * 2}, "galleries: two have the same name"),
        ({"galleries": [{"name": "birds", "index": secret, "ledger": "x"}]}, "ledger: for protected galleries only"),
        ({"galleries": [{"name": "birds", "index": secret, "unit": "x"}]}, "unit: for protected galleries only"),
        ({"galleries": [{**PROTECTED, "epsilon": None}]}, "a protected gallery needs epsilon"),
        ({"galleries": [{**PROTECTED, "offers": ["names"]}]}, "offers none of its records"),
        ({"galleries": [{**PROTECTED, "delta": 0}]}, "galleries.0.delta: "),
    ):
        text = refused(**told)
        assert said in text, text
        assert "hunter2" not in text
    for name in ("NEARVEIL_SERVER_RATEE", "nearveil_server_ratee", "NEARVEIL_SERVER_RATE__X"):
        monkeypatch.setenv(name, "1")
        assert f"{name}: no such setting" in refused()
        monkeypatch.delenv(name)
    monkeypatch.setenv("NEARVEIL_SERVER_GALLERIES", "{not json")
    assert "galleries" in refused()
    monkeypatch.delenv("NEARVEIL_SERVER_GALLERIES")
    (tmp_path / "x.toml").write_text("port = = 1")
    assert "x.toml: not valid TOML" in refused(config=tmp_path / "x.toml")
    assert "cannot be read" in refused(config=tmp_path / "none.toml")
    (tmp_path / "x.toml").write_text("prot = 1")
    assert "prot: no such setting" in refused(config=tmp_path / "x.toml")


def test_who_may_listen_beyond_this_machine(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("")
    assert Settings.load(host="0.0.0.0", insecure=True).hosts == {"*"}  # noqa: S104
    both = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    assert "example.org" in Settings.load(host="example.org", **both).hosts
    assert Settings.load(host="::", trusted_hosts=["Birds.example"], **both).hosts == {"birds.example"}
    assert Settings.load(host="127.0.0.9").hosts == {"localhost", "127.0.0.1", "[::1]", "127.0.0.9"}


def test_a_protected_gallery(tmp_path: Path) -> None:
    (gallery,) = Settings.load(galleries=[PROTECTED]).galleries
    assert (gallery.kind, gallery.classes, gallery.publications) == ("protected", ("benign", "malignant"), None)
    (gallery,) = Settings.load(
        galleries=[PROTECTED | {"publications": 4, "allow_noise": True, "group": "person"}]
    ).galleries
    assert (gallery.publications, gallery.allow_noise, gallery.group) == (4, True, "person")
    for gone in ("answers", "answers_per_client"):
        assert f"{gone}: no such setting" in refused(galleries=[PROTECTED | {gone: 3}])
    for useless in ("publications", "allow_noise"):
        told = refused(galleries=[{"name": "birds", "index": "x", useless: 1}])
        assert f"{useless}: for protected galleries only" in told


def test_the_example_loads() -> None:
    found = Settings.load(ROOT / "deploy" / "nearveil.toml")
    assert [(gallery.name, gallery.kind) for gallery in found.galleries] == [("birds", "open"), ("scans", "protected")]
    assert (found.host, found.insecure) == ("127.0.0.1", False)  # nothing is open beyond loopback by itself
    assert found.trusted_hosts == ("gallery.example.org",)
    default = Settings.load()
    told = set(found.model_fields_set)
    same = [name for name in told if getattr(found, name) == getattr(default, name)]
    assert "rate" in same  # what the example says of limits are the defaults


def test_networks_of_addresses() -> None:
    hosts = "127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org"  # noqa: S104
    loopback = [is_loopback(host) for host in hosts]
    assert loopback == [True, True, True, False, False]
    clients = ("192.0.2.1", 5), ("2001:db8::1:2", 5), None
    assert [get_network(client) for client in clients] == ["192.0.2.1", "2001:db8::/64", ""]


def test_names_of_folders() -> None:
    assert make_gallery_name("My Photos (2024)/") == "my-photos-2024"
    assert [make_gallery_name(folder) for folder in ("a" * 100, "--x--", "Ünïcode", "...")] == [
        "a" * 64,
        "x",
        "n-code",
        "gallery",
    ]
