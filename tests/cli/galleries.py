"""What the tests of ``nearveil index`` and ``nearveil query`` share: folders of small pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from nearveil.cli import app

COUNT = 40


def colour(number: int) -> tuple[int, int, int]:
    return (6 * number % 256, 37 * number % 256, 255 - 5 * number % 256)


def picture(path: Path, rgb: tuple[int, int, int], seed: int = 0) -> Path:
    """Write a picture of one colour with some noise; wider than high."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-20, 21, (60, 90, 3))
    Image.fromarray((np.array(rgb) + noise).clip(0, 255).astype(np.uint8)).save(path)
    return path


def gallery(folder: Path, count: int = COUNT) -> Path:
    for number in range(count):
        picture(folder / f"{number % 4}" / f"{number:02}.png", colour(number), number)
    return folder


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def fine(*words: object) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return str(result.output)


def told(*words: object) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*words: object) -> str:
    """Return the words of an error that a user can mend."""
    result = run(*words)
    assert result.exit_code == 1, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return " ".join(result.output.split())
