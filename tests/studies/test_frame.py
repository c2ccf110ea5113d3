"""The frame of all studies: cases are measured once and kept, files are whole, pages show what was drawn."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from jinja2 import UndefinedError
from matplotlib.figure import Figure
from scipy import stats
from typer.testing import CliRunner

from nearveil.cli import app
from studies._figures import LOOKS, STYLE, ceiling, curve, curves, floor, look
from studies._report import PageError, as_csv, describe_origin, interval, publish, write
from studies._study import Case, Mean, Row, Study, as_frame, hash_sources, mean, run, select, summarise
from studies.data import DataMissingError
from tests.studies.squares import measure

CASES = [{"number": number, "seed": seed} for number in (1, 2, 3) for seed in (0, 1)]


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    drawn = Figure(layout="constrained")
    curve(drawn.subplots(), "squares", summarise(rows, "square", "number"))
    return {"squares": drawn}


TEMPLATE = """# Squares

What squares are.

{{ command }}

{{ n }} rows.

![squares](squares-squares.svg)
"""


def study(**changes: object) -> Study:
    given: dict[str, object] = {
        "name": "squares",
        "cases": lambda: CASES,
        "measure": measure,
        "figures": figures,
        "facts": lambda rows: {"n": len(rows)},
        "data": ("numbers that are made",),
        "parameters": {"power": 2, "numbers": [1, 2, 3]},
        "seeds": (0, 1),
        "template": TEMPLATE,
        **changes,
    }
    return Study(**given)  # type: ignore[arg-type]


def test_cases_are_measured_once_and_kept_in_their_order(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    first = run(study(), tmp_path, jobs=2, advance=lambda done, all_: steps.append((done, all_)))
    assert [(row["number"], row["seed"]) for row in first.rows] == [(c["number"], c["seed"]) for c in CASES]
    assert steps == [(done, 6) for done in range(7)]
    again = run(study(measure=lambda _: pytest.fail("measured again")), tmp_path, jobs=1)
    assert again == run(study(), tmp_path, jobs=1)
    assert again.rows == first.rows


def kept_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("cases/**/output.pkl"), key=lambda path: path.stat().st_mtime_ns)


def test_a_study_that_was_stopped_goes_on(tmp_path: Path) -> None:
    asked: list[int] = []

    def stops(case: Case) -> list[Row]:
        asked.append(case["number"])
        if len(asked) == 4:
            raise KeyboardInterrupt
        return measure(case)

    with pytest.raises(KeyboardInterrupt):
        run(study(measure=stops), tmp_path, jobs=1)
    assert len(kept_files(tmp_path)) == 3
    run(study(measure=stops), tmp_path, jobs=1)
    assert asked == [1, 1, 2, 2, 2, 3, 3]
    whole = run(study(), tmp_path / "whole", jobs=1).rows
    assert [row["square"] for row in run(study(), tmp_path, jobs=1).rows] == [row["square"] for row in whole]


def test_what_cannot_be_read_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run(study(), tmp_path, jobs=1).rows
    cut, gone, broken, *_ = kept_files(tmp_path)
    cut.write_bytes(cut.read_bytes()[:10])  # it was being written when the power went
    gone.unlink()
    broken.with_name("metadata.json").write_text("{")
    asked: list[Case] = []

    def counts(case: Case) -> list[Row]:
        asked.append(case)
        return measure(case)

    assert run(study(measure=counts), tmp_path, jobs=1).rows == whole
    assert sorted((case["number"], case["seed"]) for case in asked) == [(1, 0), (1, 1)]
    assert run(study(measure=lambda _: pytest.fail("measured again")), tmp_path, jobs=1).rows == whole


def test_what_was_kept_is_forgotten_with_other_parameters_and_when_asked(tmp_path: Path) -> None:
    asked: list[Case] = []

    def counts(case: Case) -> list[Row]:
        asked.append(case)
        return measure(case)

    for changes, fresh, expected in (
        ({}, False, 6),
        ({}, False, 6),
        ({"parameters": {"power": 3}}, False, 12),
        ({"name": "cubes"}, False, 18),
        ({}, False, 18),
        ({}, True, 24),
    ):
        run(study(measure=counts, **changes), tmp_path, jobs=1, fresh=fresh)
        assert len(asked) == expected


def test_rows_of_other_sources_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version number stays while the code changes: rows of both would be mixed in one table."""
    run(study(), tmp_path, jobs=1)
    monkeypatch.setattr("studies._study.hash_sources", lambda: "of other files")
    measured: list[Case] = []

    def count_cases(case: Case) -> list[Row]:
        measured.append(case)
        return measure(case)

    run(study(measure=count_cases), tmp_path, jobs=1)
    assert measured == CASES


def test_the_digest_of_the_sources_follows_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr("nearveil.__file__", str(tmp_path / "__init__.py"))
    digests = []
    for text in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "inner" / "part.py").write_text(text)
        digests.append(hash_sources.__wrapped__())
    assert digests[0] == digests[2] != digests[1]


def test_the_interval_is_students() -> None:
    values = np.random.default_rng(0).normal(size=7)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = mean(values)
    assert (found.value, found.low, found.high) == pytest.approx((values.mean(), expected.low, expected.high))
    assert math.isnan(mean([1.0]).low)
    assert interval(mean([1.0]), ".1f") == "1.0"
    frame = pd.DataFrame({"way": ["b"] * 7 + ["a"], "value": [*values, 1.0]})
    both = summarise(frame, "value", "way")
    assert list(both.index) == ["b", "a"]  # as they come
    assert tuple(both.loc["b"]) == pytest.approx(found)


def test_rows_of_one_kind_have_the_types_of_their_values() -> None:
    frame = as_frame([{"part": "a", "n": 1}, {"part": "b", "x": 0.5, "none": None}])
    assert select(frame, part="a").to_dict("records") == [{"part": "a", "n": 1}]
    assert select(frame, part="a")["n"].dtype == int
    assert select(frame, part="b").columns.to_list() == ["part", "x"]


def test_all_files_are_written_and_say_what_was_done(tmp_path: Path) -> None:
    measured = run(study(), tmp_path / "out", jobs=1)
    page = write(study(), measured, tmp_path / "out").read_text()
    assert page.startswith("# Squares\n\nWhat squares are.\n\n```sh\nnearveil study squares\n```\n\n6 rows.")
    assert "| parameters | power 2; numbers 1, 2, 3 |" in page
    assert "| seeds | 0, 1 |" in page
    assert "numpy " + np.__version__ in page
    with (tmp_path / "out/squares.csv").open() as file:
        assert [float(row["square"]) for row in csv.DictReader(file)] == [row["square"] for row in measured.rows]
    kept = json.loads((tmp_path / "out/squares.json").read_text())
    assert kept["rows"] == measured.rows
    assert kept["parameters"] == {"power": 2, "numbers": [1, 2, 3]}
    svg = (tmp_path / "out/squares-squares.svg").read_bytes()
    assert (tmp_path / "out/squares-squares.png").read_bytes().startswith(b"\x89PNG")
    publish(study(), tmp_path / "out", tmp_path / "docs")
    names = {"squares.md", "squares.csv", "squares.json", "squares-squares.svg", "squares-squares.png"}
    assert {path.name for path in (tmp_path / "docs").iterdir()} == names
    write(study(), measured, tmp_path / "out")
    assert (tmp_path / "out/squares-squares.svg").read_bytes() == svg  # the same rows, the same picture


def test_a_page_must_show_its_figures(tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r"does not show squares-squares.svg"):
        write(study(template="nothing"), run(study(), tmp_path, jobs=1), tmp_path)
    with pytest.raises(UndefinedError, match="'forgotten' is undefined"):
        write(study(template="{{ forgotten }}"), run(study(), tmp_path, jobs=1), tmp_path)


def test_real_data_is_named_by_its_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/set.npz").write_bytes(b"abc")
    measured = run(study(), tmp_path / "out", jobs=1)
    sums = describe_origin(study(data=("set/set.npz",)), measured)["data"]
    assert sums["set/set.npz"].startswith("ba7816bf8f01cfea")
    with pytest.raises(DataMissingError):
        describe_origin(study(data=("set/other.npz",)), measured)


def test_rows_need_not_have_all_columns() -> None:
    assert as_csv([{"a": 1}, {"b": 2}]) == "a,b\n1,\n,2\n"


def test_no_two_methods_look_alike_in_grey() -> None:
    looks = [(one.marker, str(one.dashes)) for one in LOOKS.values() if one.marker]
    assert len({look(name).colour for name in ("covers", "k-means cells", "PrivUnit", "PrivateMail, Gaussian")}) == 4
    shared = [one for one in looks if looks.count(one) > 1]
    assert set(shared) <= {("o", "-")}  # covers and ours are never in one picture; what is unsound is dotted there


def test_what_is_unsound_is_drawn_so() -> None:
    axes = Figure().subplots()
    curve(axes, "covers", pd.DataFrame([Mean(0.5, 0.4, 0.6)] * 2, index=[1, 2]))
    one_seed = pd.DataFrame({"method": "covers", "x": [2, 1], "y": [0.5, 0.6]})
    curves(axes, one_seed, "y", "x", only=["covers", "never measured"], unsound=["covers"])
    ceiling(axes, [1, 2], [0.6, 0.7])
    floor(axes, 0.1)
    labels = axes.get_legend_handles_labels()[1]
    assert set(labels) == {"covers", "covers (unsound)", "impossible: above the ceiling", "floor: no query"}
    assert axes.lines[0].get_markerfacecolor() != "white"
    assert axes.containers[1].lines[0].get_markerfacecolor() == "white"  # type: ignore[attr-defined]
    assert axes.containers[1].lines[0].get_linestyle() == ":"  # type: ignore[attr-defined]
    assert list(axes.containers[1].lines[0].get_xdata()) == [1, 2]  # type: ignore[attr-defined]
    assert STYLE["svg.hashsalt"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Case) -> list[Row]:
        raise DataMissingError("no real data at birds")

    def full(_: pd.DataFrame) -> dict[str, int]:
        raise OSError(28, "No space left on device")

    studies = {
        "squares": study(),
        "birds": study(name="birds", measure=missing),
        "cars": study(name="cars", data=("cars/missing.npz",), measure=full),
        "full": study(name="full", facts=full, figures=lambda _: {}),
    }
    monkeypatch.setattr("studies.load_studies", lambda: studies)
    runner = CliRunner()
    out = ["--out", str(tmp_path / "out"), "--jobs", "1"]
    listed = runner.invoke(app, ["study"])
    assert listed.exit_code == 0
    assert "Squares" in listed.output
    made = runner.invoke(app, ["study", "squares", *out, "--docs", str(tmp_path / "docs")])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "docs/study/squares.md").exists()
    times = [path.stat().st_mtime_ns for path in kept_files(tmp_path / "out/squares")]
    runner.invoke(app, ["study", "squares", *out])
    assert [path.stat().st_mtime_ns for path in kept_files(tmp_path / "out/squares")] == times
    runner.invoke(app, ["study", "squares", *out, "--fresh"])
    anew = [path.stat().st_mtime_ns for path in kept_files(tmp_path / "out/squares")]
    assert len(anew) == 6
    assert min(anew) > max(times)
    alone = runner.invoke(app, ["study", "birds", *out])
    assert alone.exit_code == 1
    assert "birds left out: no real data at birds" in " ".join(alone.output.split())
    unmeasured = runner.invoke(app, ["study", "cars", *out])
    assert "or use --quick" in " ".join(unmeasured.output.split())
    both = runner.invoke(app, ["study", "squares", "birds", *out])
    assert both.exit_code == 0
    no_room = runner.invoke(app, ["study", "full", *out])
    assert no_room.exit_code == 1
    assert "No space left on device; the measurements so far are in" in " ".join(no_room.output.split())
    assert len(kept_files(tmp_path / "out/full")) == 6
    wrong = runner.invoke(app, ["study", "sqares", *out])
    assert wrong.exit_code == 2
    assert "is none of" in " ".join(wrong.output.replace("│", " ").split())
    (tmp_path / "file").write_text("")
    shut = runner.invoke(app, ["study", "squares", "--out", str(tmp_path / "file/x")])
    assert shut.exit_code == 2
    assert "is not writable" in " ".join(shut.output.replace("│", " ").split())
