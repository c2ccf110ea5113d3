"""Plant defects one at a time, and check that the tests turn red.

A mutant is a small change of the package that weakens what it guarantees. `load` reads them from the TOML files of
this folder, `run` plants each in a copy of the sources and runs the tests that must fail.
"""

import ast
import compileall
import os
import py_compile
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal

Verdict = Literal["killed", "survived", "timed out", "broken"]

_TESTS_FAILED = 1  # pytest's exit status; 2 to 5 mean that the tests did not run
_OPTIONS = (
    "-q",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    "--disable-plugin-autoload",
    "-p",
    "mutants_profile",
    "--import-mode=append",
)
# Where one of these is set, pytest compares long lists line by line, which takes minutes for some thousand.
_LONG_DIFFS = ("CI", "BUILD_NUMBER")
# Properties are tried on the same examples every time, without deadlines, and failures are not made smaller.
_PROFILE = """\
from hypothesis import Phase, settings
settings.register_profile("mutants", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("mutants")
"""


class MutantError(Exception):
    """The list of mutants is wrong, or the tests fail without any mutant."""


@cache
def _find_statements(text: str) -> list[str]:
    """Return the statements of a text; many mutants are of one file."""
    lines = text.splitlines(keepends=True)
    return ["".join(lines[one.lineno - 1 : one.end_lineno]) for one in ast.parse(text).body]


def _change_meaning(text: str, old: str, new: str) -> bool:
    """Return whether a text means something else with `new` in place of `old`, which it holds once."""
    part = next((one for one in _find_statements(text) if old in one), text)
    return ast.dump(ast.parse(part.replace(old, new))) != ast.dump(ast.parse(part))


@dataclass(frozen=True)
class Mutant:
    """A defect, and the tests that must find it.

    Attributes
    ----------
    name : str
        Unique.
    file : str
        Relative to the folder of sources; or below ``studies/``.
    old : str
        Text that the file holds exactly once.
    new : str
        What replaces it.
    tests : tuple of str
        Node ids of pytest. At least one test must fail.
    why : str
        What the defect would give away.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    def apply(self, sources: Path) -> str:
        """Return the changed text of the file."""
        path = (sources.parent if self.file.startswith("studies/") else sources) / self.file
        if not path.is_file():
            raise MutantError(f"{self.name} does not apply: there is no file {self.file}")
        text = path.read_text(encoding="utf-8")
        found = text.count(self.old)
        if found != 1:
            raise MutantError(f"{self.name} does not apply: {self.file} holds `old` {found} times, not once")
        changed = text.replace(self.old, self.new)
        try:
            same = not _change_meaning(text, self.old, self.new)
        except SyntaxError as error:
            raise MutantError(f"{self.name} does not apply: `new` is not Python ({error.msg})") from None
        if same:
            raise MutantError(f"{self.name} does not apply: `new` does the same as `old`")
        return changed


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant, and what pytest said last."""

    mutant: Mutant
    verdict: Verdict
    seconds: float
    said: str


def load(folder: Path) -> list[Mutant]:
    """Return all mutants of the TOML files in a folder, in the order of the files' names."""
    mutants = [mutant for path in sorted(folder.glob("*.toml")) for mutant in _read(path)]
    names = [mutant.name for mutant in mutants]
    for name in {name for name in names if names.count(name) > 1}:
        raise MutantError(f"{name} stands twice in the list")
    return mutants


def _read(path: Path) -> Iterator[Mutant]:
    wanted = {field.name for field in fields(Mutant)}
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        if set(entry) != wanted:
            raise MutantError(f"{path.name}: mutant {entry.get('name')} must have exactly {', '.join(sorted(wanted))}")
        mutant = Mutant(**{**entry, "tests": tuple(entry["tests"])})
        if not mutant.tests or not all(test.startswith("tests/") and "::" in test for test in mutant.tests):
            raise MutantError(f"{mutant.name}: tests must be node ids below tests/")
        yield mutant


def select_part(mutants: Sequence[Mutant], part: int, parts: int) -> list[Mutant]:
    """Return one of `parts` parts, counted from 1; every part holds mutants of all files."""
    if not 1 <= part <= parts:
        raise MutantError("a part must be K/N with K from 1 to N")
    return list(mutants[part - 1 :: parts])


def run(
    mutants: Sequence[Mutant], root: Path, *, jobs: int, timeout: float, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """Plant each mutant in a copy of ``root/src`` and run its tests in `root`.

    Parameters
    ----------
    mutants : sequence of Mutant
        All must apply, and all their tests must pass without them.
    root : Path
        Where pytest runs.
    jobs : int
        How many run at a time, each in its own copy.
    timeout : float
        Seconds for each. Running out of time is not a kill.
    report : callable
        Called with each outcome as soon as it is there.

    Returns
    -------
    list of Outcome
        As they came.
    """
    changed = {mutant.name: mutant.apply(root / "src") for mutant in mutants}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(_copy(root / "src", Path(folder, str(number))))

        def plant(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return _plant(mutant, changed[mutant.name], root, copy, timeout)
            finally:
                copies.put(copy)

        outcomes = []
        for done in as_completed([pool.submit(plant, mutant) for mutant in mutants]):
            outcomes.append(done.result())
            report(outcomes[-1])
        return outcomes


def check_green(mutants: Sequence[Mutant], root: Path, *, jobs: int, timeout: float) -> None:
    """Raise unless all tests of the mutants pass on the sources as they are; `jobs` files are run at a time."""
    files: dict[str, set[str]] = {}
    for test in (test for mutant in mutants for test in mutant.tests):
        files.setdefault(test.partition("::")[0], set()).add(test)
    parts = [sorted(set().union(*list(files.values())[start::jobs])) for start in range(min(jobs, len(files)))]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copy = _copy(root / "src", Path(folder, "green"))
        for status, said in pool.map(lambda tests: _pytest(tests, root, copy, timeout), parts):
            if status != 0:
                raise MutantError(f"the tests do not pass without mutants:\n{said}")


def _copy(sources: Path, copy: Path) -> Path:
    """Copy the sources. Their bytecode is checked by hash, so that no stale one hides a mutant of the same second."""
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if (studies := sources.parent / "studies").is_dir():
        shutil.copytree(studies, copy / "studies", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "mutants_profile.py").write_text(_PROFILE)
    compileall.compile_dir(copy, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return copy


def _plant(mutant: Mutant, changed: str, root: Path, copy: Path, timeout: float) -> Outcome:
    path, start = copy / mutant.file, time.monotonic()
    kept = path.read_bytes()
    path.write_text(changed, encoding="utf-8")
    try:
        status, said = _pytest(["-x", *mutant.tests], root, copy, timeout)
    finally:
        path.write_bytes(kept)
    return Outcome(mutant, _judge(status, said), time.monotonic() - start, said)


def _judge(status: int | None, said: str) -> Verdict:
    if status is None:
        return "timed out"
    if status == 0:
        return "survived"
    last = said.rstrip().rpartition("\n")[2]
    return "killed" if status == _TESTS_FAILED and re.search(r"\b\d+ failed\b", last) else "broken"


def _pytest(arguments: Sequence[str], root: Path, copy: Path, timeout: float) -> tuple[int | None, str]:
    """Run tests on a copy of the sources; return pytest's status, None where time ran out, and its output."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in _LONG_DIFFS},
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # An output file and not a pipe: a process that a failed test leaves behind would hold the pipe open.
    # A folder for each run: in a common one pytest removes those of other runs, and fails where two do so at a time.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        # The copy of `studies` comes before that of the root, which pytest would put first for its conftest.py.
        paths = ("-o", f"pythonpath={copy} .")
        command = [sys.executable, "-m", "pytest", *_OPTIONS, *paths, f"--basetemp={folder}/tests", *arguments]
        process = subprocess.Popen(  # noqa: S603 - the command is ours
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process.pid)
            process.wait()
        output.seek(0)
        return status, output.read()


def _end_group(group: int) -> None:
    """End what a run has left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
