"""Know which tests are slow: a quick run leaves most of them out, a whole run begins with their files.

``python -m tests.quick REPORT.xml ...`` writes anew which tests are slow, from reports of ``pytest --junitxml``.
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
SLOW = ROOT / "tests" / "slow.txt"
_LIMIT = 0.1  # seconds that a fast test may take with all its parameters
APART = "tests/cluster/"  # slow as a whole: no test's seconds show those of the workers that are started for all
_BUDGET = 40.0  # seconds of slow tests of modules that changed, the shortest first


def changed_files() -> set[str]:
    """Return the files that differ from the last commit."""
    told = ["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"]
    return {
        name
        for line in told
        for name in subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()  # noqa: S603
    }


def find_tests(changed: set[str]) -> set[str]:
    """Return the test files that changed, or that name a module that did."""
    modules = {
        name.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in changed
        if name.startswith(("src/", "studies/")) and name.endswith(".py")
    }
    found = set(changed)
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        if any(f"{module} import" in text for module in modules):
            found.add(str(path.relative_to(ROOT)))
    return found


def choose(names: list[str]) -> list[bool]:
    """Say of every test, by its pytest name, whether it belongs to a quick run."""
    slow, changed = read_slow(), changed_files()
    near, left, taken = find_tests(changed), _BUDGET, set()
    for name, took in sorted(slow.items(), key=lambda one: one[1]):
        if name.split("::")[0] in near and took <= left:
            taken.add(name)
            left -= took

    def belongs(name: str) -> bool:
        file = name.split("::", maxsplit=1)[0]
        if file in changed or name in taken:
            return True
        return name not in slow and (file in near or not file.startswith(APART))

    return [belongs(name.split("[")[0]) for name in names]


def weigh_files() -> defaultdict[str, float]:
    """Return the seconds that the slow tests of each group take together."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, took in read_slow().items():
        seconds[find_group(name)] += took
    return seconds


def find_group(name: str) -> str:
    """Return the file of a test, or the folder whose files share what is costly: one process runs them all."""
    return APART if name.startswith(APART) else name.split("::", maxsplit=1)[0]


def read_slow() -> dict[str, float]:
    """Return the slow tests, each with the seconds that it takes with all its parameters."""
    lines = (line.split(maxsplit=1) for line in SLOW.read_text().splitlines())
    return {name: float(took) for took, name in lines}


def write_slow(reports: list[Path]) -> None:
    """Write the names of tests that were slow in any report, each with the seconds of all its parameters together."""
    slow: dict[str, float] = {}
    for report in reports:
        seconds: defaultdict[str, float] = defaultdict(float)
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - our own
            name = _find_name(str(case.get("classname")).split("."), str(case.get("name")).split("[")[0])
            seconds[name] += float(str(case.get("time")))
        slow |= {name: max(took, slow.get(name, 0.0)) for name, took in seconds.items()}
    SLOW.write_text("".join(f"{took:.1f} {name}\n" for name, took in sorted(slow.items()) if name and took > _LIMIT))


def _find_name(parts: list[str], name: str) -> str:
    """Return what pytest calls a test; a page for its examples; nothing for what is there no more."""
    if parts[-1] == "md":
        return "/".join(parts[:-1]) + ".md"
    kinds = [part for part in parts if part[0].isupper()]
    file = "/".join(part for part in parts if part not in kinds) + ".py"
    return "::".join([file, *kinds, name]) if _is_there(ROOT / file, kinds, name) else ""


def _is_there(file: Path, kinds: list[str], name: str) -> bool:
    """Return whether a test is still in its file; those of a class may come from another, and examples have dots."""
    return file.is_file() and (bool(kinds) or "." in name or f"def {name}(" in file.read_text())


if __name__ == "__main__":
    write_slow([Path(name) for name in sys.argv[1:]])
