"""What is deployed: the container installs the locked versions, and nothing without a hash."""

import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typer.main import get_group

from nearveil.cli import _token, app
from nearveil.server.settings import Settings

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
        *(name for extra in ("budget", "knn", "gallery", "service", "postgres", "sealed") for name in extras[extra]),
        *told["build-system"]["requires"],
    ]
    assert {name_of(one) for one in needed} - {"nearveil"} <= set(container())
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
        words = [sys.executable, "-I", "-c", program.replace("8322", str(server.server_port))]
        proxy = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), "http://127.0.0.1:9")
        for said[0], code in ((200, 0), (503, 1)):
            done = subprocess.run(words, env={**os.environ, **proxy}, check=False, timeout=60)  # noqa: S603
            assert done.returncode == code
        server.shutdown()


class Exact(BaseModel):
    """A part of a composition; what it does not name is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Build(Exact):
    context: str
    dockerfile: str
    args: dict[str, str] = {}


class Dependency(Exact):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class Health(Exact):
    test: list[str] = Field(min_length=2)
    interval: str = Field(pattern=r"\d+s")
    retries: int


class NoHealth(Exact):
    disable: Literal[True]


class Replicas(Exact):
    replicas: int


class Service(Exact):
    """The fields of a service that we use, as the compose specification defines them."""

    image: str
    build: Build | None = None
    entrypoint: list[str] | None = None
    environment: dict[str, str] = {}
    volumes: list[Annotated[str, Field(pattern=r"[\w./]+:/[\w/.]+(:ro)?")]] = []
    tmpfs: list[str] = []
    secrets: list[str] = []
    networks: list[str] = Field(min_length=1)
    ports: list[Annotated[str, Field(pattern=r"\d+:\d+")]] = []
    depends_on: list[str] | dict[str, Dependency] = []
    profiles: list[str] = []
    deploy: Replicas | None = None
    healthcheck: Health | NoHealth | None = None
    read_only: bool = False
    cap_drop: list[str] = []
    cap_add: list[str] = []
    user: str | None = Field(default=None, pattern=r"\d+:\d+")
    group_add: list[str] = []
    mem_limit: str | None = Field(default=None, pattern=r"\d+[mg]")
    shm_size: str | None = Field(default=None, pattern=r"\d+[mg]")
    cpus: int | None = None
    pids_limit: int | None = None
    stop_grace_period: str | None = Field(default=None, pattern=r"\d+s")
    security_opt: list[str] = []
    restart: Literal["no", "always", "on-failure", "unless-stopped"] = "no"


class SecretFile(Exact):
    file: str


class Network(Exact):
    internal: bool = False


class Composition(Exact):
    name: str = Field(pattern=r"[a-z0-9][a-z0-9_-]*")
    services: dict[str, Service]
    secrets: dict[str, SecretFile]
    volumes: dict[str, Exact]
    networks: dict[str, Network]


def read_composition() -> dict[str, Any]:
    yaml: Any = pytest.importorskip("yaml")
    told: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    return told


def test_the_composition_is_one() -> None:
    """Its fields and their types are those of the compose specification; extensions (x-) may be anything."""
    told = read_composition()
    Composition.model_validate({name: value for name, value in told.items() if not name.startswith("x-")})


def parse_words(program: Any, name: str, words: list[str]) -> dict[str, Any]:
    """Return what a command of click reads from words, and run nothing."""
    with program.make_context(name, list(words)) as context:
        read: dict[str, Any] = context.params
        return read


def read_image_variables() -> dict[str, str]:
    """Return what the image sets for every program in it."""
    (lines,) = re.findall(r"^ENV ((?:.+\\\n)*.+)", (ROOT / "deploy" / "Containerfile").read_text(), re.MULTILINE)
    return dict(word.split("=", 1) for word in lines.replace("\\\n", " ").split())


def test_every_command_of_the_composition_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = pytest.importorskip("dask.config", reason="Dask is not installed (the extra `cluster`)")
    services = read_composition()["services"]
    for name, tool in (("scheduler", "dask_scheduler"), ("worker", "dask_worker")):
        python, flag, module, *words = services[name]["entrypoint"]
        assert (python, flag, module) == ("python", "-m", f"distributed.cli.{tool}")
        parse_words(import_module(module).main, tool, words)
    assert "NEARVEIL_CONFIG" in read_image_variables()
    for name, value in {**read_image_variables(), **services["server-1"]["environment"]}.items():
        if name.startswith("NEARVEIL_"):
            monkeypatch.setenv(name, value)
    read = {}
    for name in ("index", "token", "server-1", "server-2"):
        shell, flag, line, *_ = services[name]["entrypoint"]
        assert (shell, flag) == ("sh", "-c")
        assert line.startswith('PGPASSWORD="$$(cat /run/secrets/postgres)" exec ')
        assert services[name]["secrets"] == ["postgres"]
        assert services[name]["depends_on"]["postgres"] == {"condition": "service_healthy"}
        words = shlex.split(line.replace("$$", "$").partition(" exec ")[2])
        given = {"index": ["emb.parquet"], "token": ["create", "ann"]}.get(name, [])
        program, command, *rest = [one for word in words for one in (given if word == "$@" else (word,))]
        assert program == "nearveil"
        read[name] = parse_words(get_group(app).commands[command], command, rest)
    assert read["index"]["cluster"] == "tls://scheduler:8786"
    assert read["index"]["into"] == "postgresql://nearveil@postgres/nearveil"
    create = parse_words(get_group(_token.app).commands["create"], "create", ["ann"])
    assert (create["tokens"], create["config"]) == (read["index"]["into"], None)
    settings = Settings.load(read["server-1"]["config"])
    assert [one.index for one in settings.galleries] == [read["index"]["into"]]
    for name in ("scheduler", "worker", "index"):
        for key in services[name]["environment"]:
            if key.startswith("DASK_"):  # Dask would not say that it does not know one
                config.get(key.removeprefix("DASK_").lower().replace("__", ".").replace("_", "-"))


def check_confinement(name: str, service: dict[str, Any]) -> None:
    """Check that a container has no right that it does not need, and limits on what it takes."""
    assert service["read_only"] is True, name
    assert service["cap_drop"] == ["ALL"], name
    assert service.get("cap_add", []) == (["NET_BIND_SERVICE"] if name == "proxy" else []), name
    assert service["security_opt"] == ["no-new-privileges:true"], name
    assert service["image"] == "nearveil" or not service["user"].startswith("0"), name  # ours has a user of its own
    for limit in ("mem_limit", "cpus", "pids_limit"):
        assert service[limit], (name, limit)


def test_every_image_can_be_named_by_its_digest() -> None:
    """Each variable of an image is in the example of `.env`, with the same tag as the default."""
    composition = (ROOT / "deploy" / "compose.yaml").read_text()
    defaults = dict(re.findall(r"\$\{(NEARVEIL_\w+_IMAGE):-([^}]+)\}", composition))
    lines = (ROOT / "deploy" / "env.example").read_text().splitlines()
    assert defaults == dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert set(defaults) == {"NEARVEIL_BASE_IMAGE", "NEARVEIL_POSTGRES_IMAGE", "NEARVEIL_PROXY_IMAGE"}
    assert f"ARG BASE={defaults['NEARVEIL_BASE_IMAGE']}\n" in (ROOT / "deploy" / "Containerfile").read_text()
    services = read_composition()["services"]
    assert {service["image"] for service in services.values()} == {
        "nearveil", *(f"${{{name}:-{defaults[name]}}}" for name in defaults if "BASE" not in name)
    }  # fmt: skip


def test_the_proxy_looks_more_often_than_a_stopping_server_waits() -> None:
    (seconds,) = re.findall(r"health_interval (\d+)s", (ROOT / "deploy" / "Caddyfile").read_text())
    server = read_composition()["services"]["server-1"]
    delay = float(server["environment"]["NEARVEIL_SERVER_SHUTDOWN_DELAY"])
    assert 2 * int(seconds) < delay
    grace = Settings.model_fields["shutdown_grace"].default
    assert int(server["stop_grace_period"].rstrip("s")) > delay + grace + 5


def test_the_composition_is_whole() -> None:
    """Every name that it uses is defined, every file is here or named as one to make, all that is ours is confined."""
    place = ROOT / "deploy" / "compose.yaml"
    told = read_composition()
    services = told["services"]
    assert set(services) == {"scheduler", "worker", "index", "token", "postgres", "server-1", "server-2", "proxy"}
    made_by_hand = set(re.findall(r"^#   ([\w./, ]+?)  ", place.read_text(), re.MULTILINE))
    to_make = {word.strip("/").split("/")[0] for words in made_by_hand for word in words.split(", ")}
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
        assert name == "proxy" or "ports" not in one  # nothing else can be reached from outside
        check_confinement(name, one)
    assert services["worker"]["deploy"]["replicas"] == 2
    spill = services["worker"]["entrypoint"][services["worker"]["entrypoint"].index("--local-directory") + 1]
    assert f"spill:{spill}" in services["worker"]["volumes"]  # a disk, of a folder that the image gives to its user
    assert f"VOLUME {spill}\n" in (place.parent / "Containerfile").read_text()
    for name in ("scheduler", "worker", "index"):
        assert services[name]["environment"]["DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION"] == "true"
    assert {name for name, network in told["networks"].items() if not (network or {}).get("internal")} == {"edge"}
    assert {name for name, service in services.items() if "edge" in service["networks"]} == {"proxy"}
    assert set(re.findall(r"server-\d", (place.parent / "Caddyfile").read_text())) == {"server-1", "server-2"}
