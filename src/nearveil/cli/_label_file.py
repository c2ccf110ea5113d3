"""Where labels are written: room is made before anything is spent, and a file appears whole or not at all."""

import csv
import io
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def table(heading: str, names: Sequence[str], labels: Sequence[str]) -> str:
    """Return labels as CSV.

    Examples
    --------
    >>> table("row", ["0", "1"], ["cat", ""]).splitlines()
    ['row,label', '0,cat', '1,']
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([heading, "label"])
    writer.writerows(zip(names, labels, strict=True))
    return text.getvalue()


def check_free(path: Path, *, force: bool) -> None:
    """Raise unless a file may be written here."""
    if path.is_dir():
        raise ValueError(f"--out: {path} is a folder; give the path of a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out: the folder of {path} does not exist; make it, or give another path")
    if path.exists() and not force:
        raise ValueError(f"--out: {path} exists; --force replaces it, or give another path")


class ReservedFile:
    """Room on the disk for labels that are not known yet.

    `size`: How many bytes there will be at most.
    `force`: Whether to replace a file.
    """

    def __init__(self, path: Path, size: int, *, force: bool) -> None:
        self._path, self._force = path, force
        self._part = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self._file = os.fdopen(os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "r+b", buffering=0)
        try:
            self._fill(bytes(size))
        except BaseException:
            self.close()
            raise

    def write(self, text: str) -> None:
        """Write, force it to the disk, and only then give it its name."""
        self._fill(encoded(text))
        check_free(self._path, force=self._force)  # answers took a while: a file may have appeared
        self._part.replace(self._path)
        with suppress(OSError):  # the labels are on the disk; some file systems cannot sync a folder
            _sync(self._path.absolute().parent)

    def close(self) -> None:
        """Remove what was not written."""
        self._file.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)

    def _fill(self, content: bytes) -> None:
        self._file.seek(0)  # in place, not anew: the blocks of the placeholder are there already
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]
        self._file.truncate(len(content))
        os.fsync(self._file.fileno())


@contextmanager
def reserved(path: Path, largest: str, *, force: bool) -> Iterator[ReservedFile]:
    """Make room for a text at most as large as `largest`, before anything is spent.

    A full disk is found here, not when there are answers to keep. What is not written leaves nothing behind.
    """
    check_free(path, force=force)
    file = ReservedFile(path, len(encoded(largest)), force=force)
    try:
        yield file
    finally:
        file.close()


def encoded(text: str) -> bytes:
    """Return a text as UTF-8, where names of files that are no text come back as they were."""
    return text.encode("utf-8", errors="surrogateescape")


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
