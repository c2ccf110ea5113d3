"""Folders and files that say when somebody asks are for their owner alone, and no privacy guard is an `assert`."""

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import nearveil
from nearveil.features.gallery import FeatureCache
from nearveil.gallery import Index
from nearveil.privacy import noise
from nearveil.privacy.events import VoteHistogram
from nearveil.private_knn import plan
from nearveil.storage import make_data_folder, make_private_folder
from studies.pate import assign_records

ROOT = Path(nearveil.__file__).parent


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Let every file be for all that is not made for its owner alone."""
    umask = os.umask(0)
    yield
    os.umask(umask)


def find_open_paths(folder: Path) -> list[str]:
    """Return what others may read below a folder."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_missing_folders_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b" / "c")
    assert find_open_paths(tmp_path) == []
    (tmp_path / "shared").mkdir()
    make_private_folder(tmp_path / "shared" / "d")
    make_private_folder(tmp_path / "shared")
    assert find_open_paths(tmp_path) == ["shared"]  # as its owner made it
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            make_private_folder(place)


def test_a_first_sync_makes_a_private_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    from tests.clocks import hurry
    from tests.service.asking import make_index, scene

    hurry(monkeypatch)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "local" / "share"))
    with scene(make_index(tmp_path / "birds"), tmp_path, offers=("codes",)) as here:
        here.client()[0].sync()
    folders = [path for path in home.rglob("*") if path.is_dir()]
    assert len(folders) > 4
    assert [path for path in folders if stat.S_IMODE(path.stat().st_mode) != 0o700] == []


def test_everything_else_below_the_data_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "local" / "share"))
    make_data_folder("witness")
    FeatureCache(tmp_path / "other" / "features")
    Index.create(tmp_path / "third" / "index", dimension=4).close()
    assert find_open_paths(tmp_path) == []


def test_parents_are_made_by_one_function() -> None:
    """`Path.mkdir(mode, parents=True)` makes the parents for all; results that a user names a folder for may be."""
    calls = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("mkdir", "makedirs")
    ]
    assert sorted(calls) == ["cli/_output.py", "storage.py"]


def test_a_log_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from nearveil.cli._server import _check_log
    from nearveil.server import Settings
    from nearveil.server.logs import JsonLog

    writer = JsonLog(tmp_path / "moved")  # as after a rotation
    writer.write({"event": "test"})
    writer.close()
    _check_log(Settings.load(log_file=tmp_path / "checked"))
    assert {path.name for path in tmp_path.iterdir()} == {"moved", "checked"}
    assert find_open_paths(tmp_path) == []
    (tmp_path / "checked").chmod(0o640)  # for a group that reads logs
    _check_log(Settings.load(log_file=tmp_path / "checked"))
    assert find_open_paths(tmp_path) == ["checked"]


@pytest.mark.parametrize(("mode", "count"), [(0o600, 0), (0o640, 0), (0o644, 1), (0o604, 1)])
def test_a_key_that_all_can_read_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, count: int
) -> None:
    pytest.importorskip("uvicorn")
    from nearveil.server import serving

    # Not by caplog: servers of other tests leave the handlers of loggers changed.
    warnings: list[tuple[object, ...]] = []
    monkeypatch.setattr(serving._LOG, "warning", lambda *arguments: warnings.append(arguments))
    (tmp_path / "key.pem").touch()
    (tmp_path / "key.pem").chmod(mode)
    serving._warn_of_readable_key(tmp_path / "key.pem")
    serving._warn_of_readable_key(None)
    assert len(warnings) == count


class ExtraWord:
    """A source that gives one word too many."""

    sound = True

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.zeros(count + 1, np.uint64)


def test_records_without_one_teacher_are_refused() -> None:
    with pytest.raises(RuntimeError, match="every record must have one teacher"):
        assign_records(5, 2, ExtraWord())


def test_a_table_with_other_odds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "sum", lambda values: sum(values) + 1, raising=False)
    with pytest.raises(ArithmeticError, match="release nothing"):
        noise.make_alias_table([2, 1, 4])


def test_noise_below_its_guarantee_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = plan.NoisySums(plan.PoissonSample(1.0), plan.Ballot(VoteHistogram, 1), 2.0, 3)
    assert votes.release(np.array([3, 4]), noise.secure_source()).shape == (2,)
    monkeypatch.setattr(plan, "_ROUNDING_VARIANCE", 0)
    with pytest.raises(ArithmeticError, match="smaller than its guarantee states"):
        votes.release(np.array([3, 4]), noise.secure_source())


def narrows_a_type(test: ast.expr) -> bool:
    """Return whether a condition says what a checker of types cannot see: ``x is not None``, ``isinstance(x, T)``."""
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return (
        isinstance(test, ast.Compare)
        and [type(operator) for operator in test.ops] == [ast.IsNot]
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


def test_asserts_narrow_types_and_guard_nothing() -> None:
    """`python -O` leaves asserts out, so what guards privacy must raise by itself."""
    others = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and not narrows_a_type(node.test)
    ]
    assert others == []
