"""Files and folders for their owner alone."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from platformdirs import user_data_path


def data_folder() -> Path:
    """Return the folder where everything of this user is kept by default, whether it is there or not."""
    folder = user_data_path("nearveil", appauthor=False)
    # Where version 0.1 kept it on every system: a budget must not be left behind.
    earlier = Path.home() / ".local" / "share" / "nearveil"
    return earlier if sys.platform != "linux" and earlier.is_dir() else folder


def make_data_folder(*inside: str) -> Path:
    """Make that folder, or one inside it, for its owner alone; return it."""
    folder = data_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)  # parents would be made for all
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in inside:
        folder = folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def make_private_file(path: Path) -> None:
    """Make a file for its owner alone where there is none: SQLite would make it for all to read."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def flush_folder(folder: Path) -> None:
    """See to it that a new name in a folder survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
