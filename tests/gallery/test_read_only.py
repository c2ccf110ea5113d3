"""Indexes on volumes that are mounted read-only, as those of containers are."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nearveil.gallery import Index, Item

from .index_places import unit_rows

UNSHARE = shutil.which("unshare")
MOUNT = 'mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" && exec "$3" -c "$4" "$1" "$2"'
PROGRAM = """
import sys
from pathlib import Path
from nearveil.gallery import Index, Item
from nearveil.gallery.errors import IndexStoreError
from nearveil.server import OpenGallery
from tests.gallery.index_places import unit_rows
writable, mounted = map(Path, sys.argv[1:])
try:
    (mounted / "file").touch()
except OSError as error:
    print(error.strerror)
with Index.open(mounted) as index:
    print(len(index), index.search(unit_rows(60)[:1], 1)[0][0, 0])
    index.verify()
    gallery = OpenGallery(index, "birds")
    gallery.refresh()
    gallery.refresh()
    print(gallery.info().is_published)
    revision = gallery.info().revision
    if (mounted / "index.db-wal").exists():
        sys.exit()
    try:
        index.delete([0])
    except IndexStoreError as error:
        print(str(error).rpartition(": ")[2])
    # Somebody writes where the volume is writable, and closes the index: that is noticed.
    with Index.open(writable) as other:
        other.add([Item(unit_rows(1)[0], "new")])
        other.republish()
    gallery.refresh()
    print(len(index), gallery.info().revision - index.revision, gallery.info().revision > revision)
"""


def run_on_read_only_mount(folder: Path, mount: Path) -> list[str]:
    """Run the program in a mount namespace where `mount` shows a folder read-only; return the lines that it prints."""
    if UNSHARE is None:
        pytest.skip("unshare is not installed")
    flags = ["-m"] if os.geteuid() == 0 else ["-r", "-m"]
    command = [UNSHARE, *flags, "sh", "-c", MOUNT, "sh", str(folder), str(mount), sys.executable, PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this system lets nobody mount a folder here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def make_index(folder: Path) -> None:
    with Index.create(folder, dimension=12, extractor="tests") as index:
        index.add(Item(row, f"item {number}") for number, row in enumerate(unit_rows(60)))
        index.publish(4.0, 0.25, n_sets=4, reach=0.0)


def test_an_index_opens_on_a_read_only_volume_and_changes_are_noticed(tmp_path: Path) -> None:
    make_index(tmp_path / "a gallery")
    (tmp_path / "mounted").mkdir()
    assert run_on_read_only_mount(tmp_path / "a gallery", tmp_path / "mounted") == [
        "Read-only file system",
        "60 0",
        "True",
        "give this user write access",
        "61 0 True",
    ]


def test_an_index_with_a_log_opens_on_a_read_only_volume(tmp_path: Path) -> None:
    """A process that was killed left its log: what was committed is read from there."""
    make_index(tmp_path / "birds")
    shutil.copytree(tmp_path / "birds", tmp_path / "killed")
    (tmp_path / "mounted").mkdir()
    with Index.open(tmp_path / "birds") as index:
        index.add([Item(unit_rows(61)[60], "new")])  # a deletion would leave an empty log
        assert (tmp_path / "birds" / "index.db-wal").stat().st_size
        for name in ("index.db", "index.db-wal", "index.db-shm"):
            shutil.copy(tmp_path / "birds" / name, tmp_path / "killed" / name)
    lines = run_on_read_only_mount(tmp_path / "killed", tmp_path / "mounted")
    assert lines == ["Read-only file system", "61 0", "True"]
