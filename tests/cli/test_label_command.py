"""What ``nearveil label`` does around the votes: reads, refuses, pays, writes, and says nothing private."""

import errno
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nearveil.features import ImageError
from nearveil.ledger import Ledger
from nearveil.private_knn import PrivateKNeighborsClassifier, labelling
from nearveil.storage import replace_file
from tests.cli.labelling import HIDDEN, RARE, Plain, fine, refused, rows_of, run, small, write_png

ONE = ("--epsilon", "1")


@pytest.fixture(autouse=True)
def plain_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelling, "PrivateKNeighborsClassifier", Plain)


@pytest.fixture
def private(here: Path) -> Path:
    """Two classes that lie far apart."""
    X = np.repeat([[1.0, 0.1], [-1.0, 0.1]], 200, axis=0)
    return small(here / "private.npz", X=X, y=np.repeat([RARE, "plain"], 200))


@pytest.fixture
def public(here: Path) -> Path:
    return small(here / "public.npz", X=[[1.0, 0.0], [-1.0, 0.0], [2.0, 0.1]])


def test_what_is_printed(private: Path, public: Path) -> None:
    text = fine(private, public, *ONE, "--out", "mine.csv")
    words = text.replace("│", " ").split()
    assert words[words.index("public") + 2] == "3"
    assert words[words.index("answered") + 1] == "3"
    assert words[words.index("declined") + 1] == "0"
    assert "mine.csv" in text
    assert "makes any conclusion about whether any one" in text or "a factor of more than a million" in text
    assert "list of classes is PRIVATE's own and is not protected" in text
    assert "No account was charged" in text
    assert rows_of("mine.csv") == [["row", "label"], ["0", RARE], ["1", "plain"], ["2", RARE]]


def test_given_classes_are_said_to_be_no_leak(private: Path, public: Path, here: Path) -> None:
    (here / "classes.txt").write_text(f"{RARE}\nplain\n\nnobody has this\n")
    found = json.loads(fine(private, public, *ONE, "--classes", "classes.txt", "--json"))
    assert not any("list of classes" in note for note in found["notes"])
    assert rows_of()[1:] == [["0", RARE], ["1", "plain"], ["2", RARE]]
    fine(private, public, *ONE, "--classes", f"plain, {RARE}", "--force")
    assert rows_of()[1:] == [["0", RARE], ["1", "plain"], ["2", RARE]]


def test_noise_alone_is_not_paid_for(here: Path, account: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelling, "PrivateKNeighborsClassifier", PrivateKNeighborsClassifier)
    few = small(here / "few.npz", X=np.repeat([[1.0, 0.1], [-1.0, 0.1]], 7, axis=0), y=np.repeat([RARE, "plain"], 7))
    many = small(here / "many.npz", X=np.repeat([[1.0, 0.0]], 40, axis=0))
    text = refused(few, many, *ONE, *PAID)
    assert "--epsilon: only noise is to be expected, and nothing was paid" in text
    assert "fewer rows (--max-answered)" in text
    assert "--allow-noise labels anyway" in text
    assert " 14 " not in text  # how many records there are is private
    assert account() == 0
    found = json.loads(fine(few, many, *ONE, *PAID, "--allow-noise", "--json"))
    assert found["answered"] + found["declined"] == 40
    assert account() > 0


def test_no_more_than_asked_for_are_answered(private: Path, here: Path) -> None:
    many = small(here / "many.npz", X=np.repeat([[1.0, 0.0]], 2000, axis=0))
    found = json.loads(fine(private, many, *ONE, "--max-answered", 7, "--neighbors", 21, "--json"))
    assert found["answered"] == 7
    assert found["declined"] == 1993
    assert len(rows_of()) == 2001


def test_a_file_is_replaced_by_force_alone(private: Path, public: Path) -> None:
    Path("labels.csv").write_text("precious")
    result = run(private, public, *ONE)
    assert result.exit_code == 1
    assert "--force" in result.output
    assert Path("labels.csv").read_text() == "precious"
    fine(private, public, *ONE, "--force")
    assert rows_of()[1] == ["0", RARE]


@pytest.mark.parametrize("out", ["private.npz", "public.npz"])
def test_no_input_is_overwritten(private: Path, public: Path, out: str) -> None:
    before = Path(out).read_bytes()
    assert "--out" in refused(private, public, *ONE, "--out", out, "--force")
    assert Path(out).read_bytes() == before


@pytest.fixture
def account(here: Path) -> Iterator[Callable[[], float]]:
    """An account in budget.db, and what is spent of it."""
    with Ledger(here / "budget.db") as ledger:
        opened = ledger.open_account(
            "archive", owner="me", unit="record", protects="database", relation="add-remove", epsilon=4.0, delta=1e-5
        )
        yield lambda: opened.balance().spent


PAID = ("--ledger", "budget.db", "--account", "archive", "--classes", f"{RARE},plain")


def test_an_account_pays_once(private: Path, public: Path, account: Callable[[], float]) -> None:
    found = json.loads(fine(private, public, "--epsilon", 2, *PAID, "--json"))
    once = account()
    assert once > 0
    assert not any("No account" in note for note in found["notes"])
    fine(private, public, "--epsilon", 2, *PAID, "--out", "again.csv")
    assert account() > once


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--out", "nowhere/labels.csv"), "does not exist"),
        (("--out", "."), "is a folder"),
        (("--classes", "a,b"), "not in --classes"),
        (("--classes", "a,a,b"), "each once"),
        (("--classes", "a"), "at least two"),
        (("--features", "hog"), "needs images"),
        (("--account", "nobody"), "No account"),
        (("--unit", "person with all images"), "guarantee is about the unit 'person with all images'"),
    ],
)
def test_nothing_is_spent_on_mistakes(
    private: Path, public: Path, account: Callable[[], float], more: tuple[str, ...], words: str
) -> None:
    text = refused(private, public, "--epsilon", 2, *PAID, *more)
    assert words in text
    assert RARE not in text
    assert account() == 0


def test_too_little_budget_leaves_no_file(private: Path, public: Path, account: Callable[[], float]) -> None:
    text = refused(private, public, "--epsilon", 8, *PAID)
    assert "nothing was spent; lower --epsilon" in text
    assert account() == 0


def test_a_ledger_without_an_account_is_a_mistake(private: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--account" in refused(private, public, *ONE, "--ledger", "budget.db")
    assert "No ledger" in refused(private, public, *ONE, "--account", "archive")
    monkeypatch.setenv("NEARVEIL_LEDGER", "budget.db")
    assert "--account" in refused(private, public, *ONE)


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_found_before_anything_is_spent(
    private: Path, public: Path, account: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelling, "_fill", _full)
    assert "No space left on device" in refused(private, public, "--epsilon", 2, *PAID)
    assert account() == 0


def test_room_is_made_for_the_longest_text(here: Path) -> None:
    """On a disk without room: no file may grow beyond 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with replace_file(here / "fits.csv") as file:
            labelling._fill(file, bytes(1000))
            labelling._fill(file, b"short")
        with pytest.raises(OSError, match="File too large"), replace_file(here / "labels.csv") as file:
            labelling._fill(file, bytes(1001))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.name for file in here.iterdir()] == ["fits.csv"]
    assert (here / "fits.csv").read_text() == "short"


def test_labels_that_cannot_be_written_are_printed(
    private: Path, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = labelling._fill
    monkeypatch.setattr(labelling, "_fill", lambda file, content: _full() if any(content) else fill(file, content))
    result = run(private, public, *ONE)
    assert result.exit_code == 1
    assert result.stdout == f"row,label\n0,{RARE}\n1,plain\n2,{RARE}\n"
    assert "No space left on device" in result.stderr
    assert "save them" in result.stderr
    found = json.loads(run(private, public, *ONE, "--json").stdout)
    assert found["out"] is None
    assert found["labels"] == {"0": RARE, "1": "plain", "2": RARE}
    assert not list(Path().glob(".*.part"))


def test_a_file_that_appears_meanwhile_is_kept(private: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = labelling._collect_labels

    def slow(*words: Any) -> Any:
        Path("labels.csv").write_text("another's")
        return ask(*words)

    monkeypatch.setattr(labelling, "_collect_labels", slow)
    result = run(private, public, *ONE)
    assert result.exit_code == 1
    assert Path("labels.csv").read_text() == "another's"
    assert f"1,plain\n2,{RARE}\n" in result.stdout


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError(RARE)])
def test_answers_before_a_stop_are_kept(
    private: Path, here: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    many = small(here / "many.npz", X=np.repeat([[-1.0, 0.0]], 30, axis=0))
    monkeypatch.setattr(labelling, "_BATCH", 10)
    answer, calls = Plain.answer, []

    def stopping(self: Any, queries: Any, **more: Any) -> Any:
        calls.append(len(queries))
        if len(calls) == 3:
            raise error
        return answer(self, queries, **more)

    monkeypatch.setattr(Plain, "answer", stopping)
    result = run(private, many, *ONE)
    assert result.exit_code == 1
    assert "after 20 of 30 rows" in result.output
    assert RARE not in result.output
    assert rows_of()[1:] == [[str(row), "plain"] for row in range(20)]


def test_a_stop_before_all_answers_leaves_nothing(private: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plain, "answer", stopping)
    assert "may be spent" in refused(private, public, *ONE)


def _line(*cells: object) -> str:
    return ",".join(map(str, cells)) + "\n"


BOTH = np.array(["a", RARE])
BAD_ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"X": np.ones((2, 2))}, "y or labels"),
    ({"y": BOTH}, "X or images"),
    ({"X": np.ones((2, 2)), "images": np.ones((2, 8, 8)), "y": BOTH}, "one of the two"),
    ({"X": np.ones((3, 2)), "y": BOTH}, "one label for each row"),
    ({"X": np.ones((2, 2)), "y": BOTH[:, None]}, "one label for each row"),
    ({"X": np.ones(2), "y": BOTH}, "must hold numbers"),
    ({"X": np.array([["x", "y"]] * 2), "y": BOTH}, "must hold numbers"),
    ({"X": np.array([[1.0, np.nan]] * 2), "y": BOTH}, "must be finite"),
    ({"X": np.array([[1.0, np.inf]] * 2), "y": BOTH}, "must be finite"),
    ({"X": np.ones((0, 2)), "y": BOTH[:0]}, "no records"),
    ({"X": np.ones((2, 0)), "y": BOTH}, "no features"),
    ({"X": np.ones((2, 3)), "y": BOTH}, "3 features and PUBLIC 2"),
    ({"X": np.ones((2, 2)), "y": np.array(["a", " "])}, "labels are empty"),
    ({"X": np.ones((2, 2)), "y": np.array([0.5, 1.0])}, "whole numbers or text"),
    ({"X": np.ones((2, 2)), "y": np.array([1j, 2j])}, "whole numbers or text"),
    ({"X": np.ones((2, 2)), "y": np.array([1, 1])}, "at least two classes"),
    ({"images": np.ones((2, 8, 8)), "labels": BOTH}, "of one kind"),
    ({"X": np.array([{}, {}]), "y": BOTH}, "plain arrays"),
]


@pytest.mark.parametrize(("arrays", "words"), BAD_ARRAYS)
def test_bad_arrays(public: Path, here: Path, arrays: dict[str, Any], words: str) -> None:
    text = refused(small(here / "bad.npz", **arrays), public, *ONE)
    assert words in text
    assert RARE not in text


BAD_TABLES = [
    ("", "'label'"),
    (_line("x", "y", "label"), "no records"),
    (_line("x", "y") + _line(1, 2), "'label'"),
    (_line("x", "label") + _line(1, RARE), "no column 'y'"),
    (_line("x", "x", "y", "label") + _line(1, 1, 2, RARE), "same name"),
    (_line("x", "y", "label") + _line(1, 2, RARE) + _line(1, "31 Elm Street", "a"), "is no number"),
    (_line("x", "y", "label") + _line(1, 2, RARE) + _line(1, 2), "a cell is missing"),
    (_line("x", "y", "label") + _line(1, 2, RARE, 4), "one too many"),
    (_line("x", "y", "label") + _line(1, "nan", RARE) + _line(1, 2, "a"), "must be finite"),
    (_line("x", "y", "label") + _line(1, 2, RARE) + _line(1, 2, ""), "labels are empty"),
    (_line("x", "y", "label") + _line(1, 2, RARE) + _line(1, 2, "a" * 200_000), "a cell is too long"),
]


@pytest.mark.parametrize(("text", "words"), BAD_TABLES)
def test_bad_tables(here: Path, text: str, words: str) -> None:
    (here / "bad.csv").write_text(text)
    (here / "public.csv").write_text(_line("x", "y") + _line(1, 2))
    told = refused("bad.csv", "public.csv", *ONE)
    assert words in told
    assert "PRIVATE" in told
    for secret in (RARE, "Elm"):
        assert secret not in told


def test_public_tables_are_told_of_more_openly(private: Path, here: Path) -> None:
    (here / "public.csv").write_text(_line("x", "y") + _line(1, 2) + _line(1, "much"))
    assert "PUBLIC, record 2: a cell is missing" in refused(private, "public.csv", *ONE)
    (here / "public.csv").write_bytes(b"x,y\n1,\xff\n")
    assert "PUBLIC is not UTF-8 text" in refused(private, "public.csv", *ONE)
    (here / "public.csv").write_text(_line("x", "y") + _line("one", "two"))
    assert "PUBLIC has no features" in refused(private, "public.csv", *ONE)


def test_columns_go_by_name_and_text_is_left_out(here: Path) -> None:
    records = [_line(RARE, 1, "Ann", 0), _line("plain", 0, "Bob", 1)] * 100
    (here / "private.csv").write_text("\ufeff" + _line("label", "x", "name", "y") + "".join(records))
    (here / "public.csv").write_text(
        _line("y", "who", "x", "label") + _line(1, "Carl", 0, "?") + _line(0, "Dora", 1, "?")
    )
    found = json.loads(fine("private.csv", "public.csv", *ONE, "--json"))
    assert rows_of()[1:] == [["0", "plain"], ["1", RARE]]
    assert any(note.endswith("left out: who.") for note in found["notes"])


@pytest.mark.parametrize("missing", ["nothing.npz", "nothing.csv", "nothing"])
def test_paths_without_anything(private: Path, public: Path, missing: str) -> None:
    assert "PRIVATE: there is nothing" in refused(missing, public, *ONE)
    assert "PUBLIC: there is nothing" in refused(private, missing, *ONE)


def test_files_of_other_kinds(private: Path, here: Path) -> None:
    (here / "public.parquet").write_text("PAR1")
    assert "PUBLIC must be a .npz" in refused(private, "public.parquet", *ONE)
    (here / "public.npz").write_text("no archive")
    assert "PUBLIC is not a .npz file" in refused(private, "public.npz", *ONE)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--epsilon", 0), "--epsilon"),
        (("--epsilon", "nan"), "--epsilon"),
        (("--epsilon", "inf"), "--epsilon"),
        (("--epsilon", 1, "--delta", 1), "--delta"),
        (("--epsilon", 1, "--delta", 0), "--delta"),
        (("--epsilon", 1, "--max-answered", 0), "--max-answered"),
        (("--epsilon", 1, "--neighbors", 0), "--neighbors"),
        (("--epsilon", 1, "--side", 7), "--side"),
        ((), "--epsilon"),
    ],
)
def test_bad_options(private: Path, public: Path, words: tuple[object, ...], told: str) -> None:
    assert told in refused(private, public, *words, code=2)


@pytest.fixture
def pictures(here: Path) -> Path:
    """Stripes of two directions, and much beside them that is no picture."""
    for name, image in (("flat", np.indices((40, 30))[0]), ("tall", np.indices((40, 30))[1])):
        for number in range(40):
            write_png(here / "held" / name / f"{HIDDEN} {number}.png", (image + number) // 4 % 2)
            if number < 3:
                write_png(here / "asked" / f"{name} {number}.png", (image + number) // 4 % 2)
    return here


def test_files_that_are_no_pictures_are_left_out(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (pictures / "asked" / "flat 0.png").read_bytes()
    for name, content in (("cut.png", whole[:60]), ("words.txt", b"hello"), (".hidden", b"hello")):
        (pictures / "asked" / name).write_bytes(content)
        (pictures / "held" / "flat" / f"{HIDDEN}{name}").write_bytes(content)
    (pictures / "held" / f"{HIDDEN}-stray.png").write_bytes(whole)
    (pictures / "asked" / "again").symlink_to(pictures / "asked", target_is_directory=True)
    result = run("held", "asked", *ONE, "--json")
    assert result.exit_code == 0, result.output
    notes = " ".join(json.loads(result.stdout)["notes"])
    for told in ("1 broken or truncated", "1 not a file that can be read", "1 not an image"):
        assert told in notes
    assert "PRIVATE: some files were left out: broken" in result.stderr
    assert "not in the folder of a class" in result.stderr
    assert HIDDEN not in result.output
    wanted = [[f"{name} {number}.png", name] for name in ("flat", "tall") for number in range(3)]
    assert rows_of()[1:] == wanted


def test_pixels_instead_of_histograms(pictures: Path) -> None:
    found = json.loads(fine("held", "asked", *ONE, "--features", "none", "--side", 16, "--json"))
    assert found["public_rows"] == 6


def test_pictures_that_could_be_misread_are_left_out(here: Path) -> None:
    Image.fromarray(np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)).save(here / "deep.png")
    with pytest.raises(ImageError, match="16-bit"):
        labelling._load_gray(here / "deep.png", 8)


def test_folders_without_pictures(pictures: Path, here: Path) -> None:
    (here / "empty").mkdir()
    assert "PUBLIC holds no image" in refused("held", "empty", *ONE)
    assert "a folder with its name" in refused("asked", "asked", *ONE)


@pytest.mark.parametrize(("module", "library"), [("PIL", "Pillow"), ("skimage.feature", "scikit-image")])
def test_what_must_be_installed_is_named(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, module: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    text = refused("held", "asked", *ONE)
    assert f'{library} is not installed: pip install "nearveil[images]"' in text


def test_pictures_in_arrays_must_be_pictures(here: Path) -> None:
    held = small(here / "held.npz", images=np.full((2, 8, 8), 16.0), labels=BOTH)
    text = refused(held, small(here / "asked.npz", images=np.ones((2, 8, 8))), *ONE)
    assert "PRIVATE: images must be uint8, or floats from 0 to 1" in text
