"""A server on this machine, as a process of its own."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_GRACE = 30.0  # seconds to stop


@dataclass(frozen=True)
class Loopback:
    """Address, token and process of the server."""

    url: str
    token: str = field(repr=False)
    process: int


@contextmanager
def serve_on_loopback(*arguments: str | Path) -> Iterator[Loopback]:
    """Run ``nearveil serve`` with `arguments` on a free port of loopback; stop it when the context ends."""
    from nearveil.server import TokenStore

    with tempfile.TemporaryDirectory() as folder:
        tokens, log = Path(folder) / "tokens.db", Path(folder) / "log"
        with TokenStore(tokens) as store:
            _, token = store.create("demo", scopes=("query",), days=1)
        files = ["--port", "0", "--tokens", str(tokens), "--log-file", str(log)]
        command = [sys.executable, "-m", "nearveil", "serve", *map(str, arguments), *files]
        # The user's settings are for their own server.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NEARVEIL_SERVER_")}
        environment.pop("NEARVEIL_CONFIG", None)
        environment["NEARVEIL_SERVER_SHUTDOWN_DELAY"] = "0"  # there are no other clients
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:  # noqa: S603
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split()[-1:]
                if not url:
                    raise RuntimeError(f"the server did not start: exit code {process.wait(_GRACE)}")
                yield Loopback(url[0], token, process.pid)
            finally:
                process.send_signal(signal.SIGTERM)
                code = process.wait(_GRACE)
        if code:
            raise RuntimeError(f"the server stopped with exit code {code}")
