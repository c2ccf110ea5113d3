"""Original files of items: read them without following links."""

import hashlib
import os
import stat
from pathlib import Path

from nearveil.gallery.answers import LARGEST_ORIGINAL

_FLAGS = {name: getattr(os, name, 0) for name in ("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")}
_FOLDER = os.O_RDONLY | _FLAGS["O_PATH"] | _FLAGS["O_DIRECTORY"] | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_CLOEXEC"]
_FILE = os.O_RDONLY | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_NONBLOCK"] | _FLAGS["O_CLOEXEC"]


def hash_file(path: Path) -> bytes | None:
    """Return the SHA-256 of a file that may be served, or None if there is no such file."""
    data = read_regular(path, LARGEST_ORIGINAL)
    return None if data is None else hashlib.sha256(data).digest()


def read_regular(path: Path, most: int) -> bytes | None:
    """Read a regular file of at most `most` bytes; return None if that fails."""
    # No part of the path may be a symbolic link: one created after indexing could point to any file. Pipes and devices
    # are refused without blocking.
    try:
        with os.fdopen(_open_without_links(path), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > most:
                return None
            data = file.read(most + 1)  # the file may have grown
    except (OSError, ValueError, NotImplementedError):  # NotImplementedError: no dir_fd on this system
        return None
    return data if len(data) <= most else None


def _open_without_links(path: Path) -> int:
    """Open a file by walking down its folders, following no link; return the descriptor."""
    anchor, *folders, name = path.parts
    parent = os.open(anchor, _FOLDER)
    try:
        for folder in folders:
            child = os.open(folder, _FOLDER, dir_fd=parent)
            os.close(parent)
            parent = child
        return os.open(name, _FILE, dir_fd=parent)
    finally:
        os.close(parent)
