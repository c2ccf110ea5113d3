"""A server of one's own: ``nearveil serve`` as a process on this machine, for as long as it is needed."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nearveil.service import TokenStore

_GRACE = 30.0  # seconds to stop


@dataclass(frozen=True)
class Loopback:
    """Where the server is, and what it asks for."""

    url: str
    token: str = field(repr=False)
    process: int


@contextmanager
def serve_on_loopback(index: Path, *options: str) -> Iterator[Loopback]:
    """Serve an index on a free port of loopback; stop when the context ends."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, log = Path(folder) / "tokens.db", Path(folder) / "log"
        with TokenStore(tokens) as store:
            _, token = store.create("demo", scopes=("query",), days=1)
        told = ["--port", "0", "--tokens", str(tokens), "--log-file", str(log), *options]
        command = [sys.executable, "-m", "nearveil", "serve", str(index), *told]
        # Settings of the one who runs this are for their own server.
        plain = {name: value for name, value in os.environ.items() if not name.startswith("NEARVEIL_SERVER_")}
        plain.pop("NEARVEIL_CONFIG", None)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=plain) as process:  # noqa: S603
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
