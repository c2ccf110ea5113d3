"""What is deployed: the container installs the locked versions, and nothing without a hash."""

import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_LINE = re.compile(r"([a-z0-9.-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)")
_OF_THE_BUILD = {"hatchling", "packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers"}


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=;~! ]", requirement)[0].lower().replace("_", "-")


def container() -> dict[str, str]:
    """Return the versions that the container installs; each line must be a version with hashes."""
    text = (ROOT / "deploy" / "requirements.txt").read_text().replace(" \\\n   ", "")
    found = [_LINE.fullmatch(line) for line in text.splitlines() if not line.startswith("#")]
    assert all(found)
    return {one[1]: one[2] for one in found if one}


def test_the_container_has_the_locked_versions() -> None:
    pairs = [line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line]
    locked = {name_of(name): version for name, version in pairs}
    held = container()
    assert {name: locked[name] for name in held if name in locked} == {
        name: version for name, version in held.items() if name not in _OF_THE_BUILD - set(locked)
    }


def test_the_container_has_all_that_the_server_needs() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = told["project"]["optional-dependencies"]
    needed = [
        *told["project"]["dependencies"],
        *extras["service"],
        *extras["postgres"],
        *extras["sealed"],
        *told["build-system"]["requires"],
    ]
    assert {name_of(one) for one in needed} <= set(container())
    assert f"hatchling=={container()['hatchling']}" in told["build-system"]["requires"]


def test_the_container_downloads_nothing_without_a_hash() -> None:
    steps = (ROOT / "deploy" / "Containerfile").read_text()
    installs = [line for line in steps.splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


def test_the_health_check_of_the_container_asks_the_server_and_no_proxy() -> None:
    steps = (ROOT / "deploy" / "Containerfile").read_text()
    (program,) = re.findall(r'CMD \["python", "-c", \\\n\s+"(.+)"\]', steps)
    said = [200]

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(said[0] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = [sys.executable, "-I", "-c", program.replace("8321", str(server.server_port))]
        proxy = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), "http://127.0.0.1:9")
        for said[0], code in ((200, 0), (503, 1)):
            done = subprocess.run(words, env={**os.environ, **proxy}, check=False, timeout=60)  # noqa: S603
            assert done.returncode == code
        server.shutdown()


def test_the_composition_is_whole() -> None:
    """Every name that it uses is defined, every file is here or named as one to make, all that is ours is confined."""
    yaml: Any = pytest.importorskip("yaml")
    place = ROOT / "deploy" / "compose.yaml"
    told = yaml.safe_load(place.read_text())
    services = told["services"]
    assert set(services) == {"scheduler", "worker", "index", "postgres", "server-1", "server-2", "proxy"}
    made_by_hand = set(re.findall(r"^#   ([\w./, ]+?)  ", place.read_text(), re.MULTILINE))
    to_make = {word.strip("/").split("/")[0] for words in made_by_hand for word in words.split(", ")} | {"data"}
    for name, one in services.items():
        assert set(one["networks"]) <= set(told["networks"]), name
        assert set(one.get("secrets", ())) <= set(told["secrets"]), name
        assert set(one.get("depends_on", ())) <= set(services), name
        for volume in one.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (place.parent / source).exists() or source[2:] in to_make, source
            else:
                assert source in told["volumes"], source
        if one["image"] == "nearveil":
            assert (place.parent / one["build"]["context"] / one["build"]["dockerfile"]).exists()
            assert one["read_only"] is True
            assert one["cap_drop"] == ["ALL"]
        assert name == "proxy" or "ports" not in one  # nothing else can be reached from outside
    assert services["worker"]["deploy"]["replicas"] == 2
    for name in ("scheduler", "worker", "index"):
        assert services[name]["environment"]["DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION"] == "true"
    assert told["networks"]["work"]["internal"] is told["networks"]["database"]["internal"] is True
    assert set(re.findall(r"server-\d", (place.parent / "Caddyfile").read_text())) == {"server-1", "server-2"}
