"""``nearveil label`` with real votes: scikit-learn's digits as .npz, as .csv and as folders of images."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from nearveil.ledger import Ledger
from tests.cli.labelling import HIDDEN, RARE, fine, rows_of, run, write_png

ROWS = 40
HELD = 1797 - ROWS  # private records
NAMES = ["nil", "one", "two", RARE, "four", "five", "six", "seven", "eight", "nine"]
FOUR = ("--epsilon", "4")  # a promise that says little: there are few digits


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray[Any, Any], list[str]]:
    loaded = load_digits()
    return loaded.images / 16, [NAMES[digit] for digit in loaded.target]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, digits: tuple[np.ndarray[Any, Any], list[str]]) -> Path:
    """The same digits in all forms; the first rows are public, and what they truly are stands in truth.json."""
    folder, (images, labels) = tmp_path_factory.mktemp("digits"), digits
    truth, held = labels[:ROWS], labels[ROWS:]
    (folder / "truth.json").write_text(json.dumps(truth))
    np.savez(folder / "private.npz", images=images[ROWS:], labels=held)
    np.savez(folder / "public.npz", images=images[:ROWS])
    _write_csv(folder / "private.csv", images[ROWS:], held)
    _write_csv(folder / "public.csv", images[:ROWS], None)
    for number, (image, name) in enumerate(zip(images[ROWS:], held, strict=False)):
        write_png(folder / "private" / name / f"{HIDDEN}-{number}.png", image)
    for number, image in enumerate(images[:ROWS]):
        write_png(folder / "public" / f"part {number % 2}" / f"{number:03}.png", image)
    return folder


def _write_csv(path: Path, images: np.ndarray[Any, Any], labels: list[str] | None) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        pixels = [f"pixel {number}" for number in range(64)]
        writer.writerow([*pixels, "label"] if labels else ["who", *reversed(pixels)])
        for number, row in enumerate(images.reshape(len(images), -1)):
            writer.writerow([*row, labels[number]] if labels else [f"public {number}", *row[::-1]])


@pytest.mark.parametrize(("form", "heading"), [("{}.npz", "row"), ("{}.csv", "row"), ("{}", "file")])
def test_labels_in_every_form(data: Path, form: str, heading: str) -> None:
    text = fine(data / form.format("private"), data / form.format("public"), *FOUR, "--json")
    for secret in (RARE, HIDDEN, str(HELD)):
        assert secret not in text
    found = json.loads(text)
    lines = rows_of()
    assert lines[0] == [heading, "label"]
    truth = json.loads((data / "truth.json").read_text())
    if heading == "file":
        assert [name for name, _ in lines[1:]] == sorted(name for name, _ in lines[1:])
        numbers = [int(Path(name).stem) for name, _ in lines[1:]]
    else:
        numbers = [int(name) for name, _ in lines[1:]]
        assert numbers == list(range(ROWS))
    assert sorted(numbers) == list(range(ROWS))
    right = [label == truth[number] for number, (_, label) in zip(numbers, lines[1:], strict=True) if label]
    assert found["answered"] == len(right)
    assert found["declined"] == ROWS - len(right)
    assert found["public_rows"] == ROWS
    assert len(right) > ROWS / 5
    assert np.mean(right) > 0.6  # by chance, a tenth
    assert 3.99 < found["epsilon"] <= 4
    assert "record of a class that occurs anyway" in found["promise"]
    assert found["delta"] == 1e-5
    assert found["out"] == "labels.csv"


def test_bars_tell_how_far_but_not_how_many(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run(data / "private.npz", data / "public.npz", *FOUR, "--json")
    assert json.loads(result.stdout)["public_rows"] == ROWS
    for text in ("features of PUBLIC", "features of PRIVATE", "querying"):
        assert text in result.stderr
    assert "100%" in result.stderr
    assert str(HELD) not in result.stderr


def test_an_account_pays_what_is_promised(here: Path) -> None:
    rows = np.repeat([[1.0, 0.1], [-1.0, 0.1]], 100, axis=0)
    np.savez("private.npz", X=rows, y=np.repeat([3, 7], 100))
    np.savez("public.npz", X=rows[99:102])
    about: dict[str, Any] = {"owner": "me", "protects": "database", "unit": "record", "relation": "add-remove"}
    with Ledger("budget.db") as ledger:
        account = ledger.open_account("archive", epsilon=1.0, delta=1e-5, **about)
        words = ("private.npz", "public.npz", "--classes", "3,7", "--ledger", "budget.db", "--account", "archive")
        found = json.loads(fine(*words, "--epsilon", 0.5, "--json"))
        spent = account.balance().spent
        assert 0 < spent < 0.6
        assert found["promise"].startswith("Seeing the answers makes any conclusion about whether any one record")
        assert {label for _, label in rows_of()[1:]} <= {"3", "7", ""}
        refused = run(*words, "--epsilon", 1.5, "--out", "more.csv")
        assert refused.exit_code == 1
        assert "nothing was spent" in refused.output
        assert account.balance().spent == spent
        assert not Path("more.csv").exists()
