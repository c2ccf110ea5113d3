"""Ctrl-C in real processes: no traceback, a status that says it, and an end that does not wait for others."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import uvicorn

from nearveil.server.listener import Server
from nearveil.ui.auth import PAGE_HEADER

from ..service.serving import index_of


@pytest.mark.parametrize(
    ("command", "module"), [("ui", "typer"), ("ui", "numpy"), ("ui", "uvicorn"), ("serve", "fastapi")]
)
def test_ctrl_c_during_imports(command: str, module: str, tmp_path: Path) -> None:
    program = f"""
import runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("interrupted", flush=True)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["nearveil", {command!r}, "--port", "0"]
runpy.run_module("nearveil", run_name="__main__", alter_sys=True)
"""
    variables = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (130, "interrupted\n")


def test_a_signal_before_uvicorn_listens_for_it_counts() -> None:
    async def nothing(scope: object, receive: object, send: object) -> None:
        raise AssertionError

    told: list[str] = []
    config = uvicorn.Config(nothing, port=0, lifespan="off", log_config=None)
    server = Server(config, lambda: told.append("ready"), lambda: told.append("stopping"))
    with server.signals():
        signal.raise_signal(signal.SIGINT)
        server.run()
    assert told == ["stopping", "ready"]


def test_the_page_ends_while_a_server_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("nv_" + "0" * 16 + "_" + "a" * 43)
    (tmp_path / "token").chmod(0o600)
    variables = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told = ["--server", f"http://127.0.0.1:{silent.getsockname()[1]}", "--token-file", str(tmp_path / "token")]
        line = [sys.executable, "-m", "nearveil", "ui", *told, "--port", "0", "--no-browser"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as page:  # noqa: S603
            try:
                assert page.stdout is not None
                address = next((line.strip() for line in page.stdout if line.startswith("http")), "")
                asking = threading.Thread(target=ask_for_galleries, args=(address,), daemon=True)
                asking.start()
                silent.settimeout(60)
                with silent.accept()[0]:
                    page.send_signal(signal.SIGINT)
                    _, said = page.communicate(timeout=30)  # the client would wait for a minute
            finally:
                page.kill()
    assert (page.returncode, "Traceback" in said) == (130, False), said


def ask_for_galleries(address: str) -> None:
    with httpx.Client(timeout=60) as browser, suppress(httpx.HTTPError):
        welcome = browser.get(address)
        secret = re.search(r'name="page-secret" content="([^"]+)"', welcome.text)
        assert secret is not None
        browser.get(address.partition("?")[0] + "api/galleries", headers={PAGE_HEADER: secret[1]})


def test_ctrl_c_while_processes_of_a_server_start(tmp_path: Path) -> None:
    index_of(tmp_path / "birds").close()
    told = [str(tmp_path / "birds"), "--workers", "2", "--port", "0", "--tokens", str(tmp_path / "tokens.db")]
    line = [sys.executable, "-m", "nearveil", "serve", *told]
    with subprocess.Popen(  # noqa: S603
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as one:
        try:
            children, until = Path(f"/proc/{one.pid}/task/{one.pid}/children"), time.monotonic() + 60
            while len(children.read_text().split()) < 3 and time.monotonic() < until:  # two, and Python's own helper
                time.sleep(0.01)
            time.sleep(0.5)
            os.killpg(one.pid, signal.SIGINT)  # as a terminal does
            _, said = one.communicate(timeout=60)
        finally:
            one.kill()
    assert (one.returncode, "Traceback" in said) == (0, False), said
