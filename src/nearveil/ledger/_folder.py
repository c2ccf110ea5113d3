"""The folder of this user's data."""

import os
from pathlib import Path


def data_folder() -> Path:
    """Return the folder where everything is kept by default, whether it is there or not."""
    base = os.environ.get("XDG_DATA_HOME", "")
    # The specification says that a relative path is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share") / "nearveil"


def make_data_folder(*inside: str) -> Path:
    """Make that folder, or one inside it, for its owner alone, whatever is made in it first; return it."""
    folder = data_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)  # parents would be made for all
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in inside:
        folder = folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder
