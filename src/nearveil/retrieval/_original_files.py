"""Originals that lie in files: opened without waiting, without links, and only if they are regular files."""

import hashlib
import os
import stat
from pathlib import Path

LARGEST_ORIGINAL = 64 << 20
_FLAGS = {name: getattr(os, name, 0) for name in ("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")}
_FOLDER = os.O_RDONLY | _FLAGS["O_PATH"] | _FLAGS["O_DIRECTORY"] | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_CLOEXEC"]
_FILE = os.O_RDONLY | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_NONBLOCK"] | _FLAGS["O_CLOEXEC"]


def digest_of(path: Path) -> bytes | None:
    """Return the SHA-256 of a file that may be served; None where there is none."""
    data = read_regular(path, LARGEST_ORIGINAL)
    return None if data is None else hashlib.sha256(data).digest()


def read_regular(path: Path, most: int) -> bytes | None:
    """Return the content of a file; None where there is none that may be served.

    No part of the path may be a link: one that was made after indexing could lead to any file. A pipe or a device in
    place of the file is refused without waiting for it.

    `path`: Absolute, without links when the item was added.
    `most`: Bytes; None is returned for a larger file.
    """
    try:
        with os.fdopen(_opened(path), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > most:
                return None
            data = file.read(most + 1)  # it may have grown
    except (OSError, ValueError, NotImplementedError):  # the last where a system has no such walk
        return None
    return data if len(data) <= most else None


def _opened(path: Path) -> int:
    """Return a file descriptor, after a walk through the folders that follows no link."""
    anchor, *folders, name = path.parts
    place = os.open(anchor, _FOLDER)
    try:
        for folder in folders:
            below = os.open(folder, _FOLDER, dir_fd=place)
            os.close(place)
            place = below
        return os.open(name, _FILE, dir_fd=place)
    finally:
        os.close(place)
