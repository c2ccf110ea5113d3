"""A disk so small that a test can fill it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Yield a disk of that size; skip where the right to mount is missing."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        pytest.skip(f"no small disk here: {error}")
    if done.returncode:
        pytest.skip(f"no small disk here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S603, S607


def fill(folder: Path, leave: int) -> Path:
    """Fill a disk up with one file but for `leave` pages."""
    ballast, page = folder / "ballast", 4096
    with ballast.open("wb", buffering=0) as out:
        try:
            while out.write(b"x" * page):
                pass
        except OSError:
            pass
        size = os.fstat(out.fileno()).st_size
        os.ftruncate(out.fileno(), max(0, size // page - leave) * page)
    return ballast
