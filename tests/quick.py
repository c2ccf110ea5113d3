"""Choose the tests of a quick run: all that are fast, and all of what changed since the last commit.

``python -m tests.quick REPORT.xml ...`` writes anew which tests are slow, from reports of ``pytest --junitxml``.
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
SLOW = ROOT / "tests" / "slow.txt"
_LIMIT = 0.1  # seconds that a fast test may take where two others run beside it


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
    slow, wanted = set(SLOW.read_text().split()), find_tests(changed_files())
    return [name.split("::")[0] in wanted or name.split("[")[0] not in slow for name in names]


def write_slow(reports: list[Path]) -> None:
    """Write the names of tests that were slow in any report, without their parameters."""
    slow = set()
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):  # noqa: S314 - our own
        parts = str(case.get("classname")).split(".")
        kinds = [part for part in parts if part[0].isupper()]
        file = "/".join(part for part in parts if part not in kinds) + ".py"
        name = str(case.get("name")).split("[")[0]
        if float(str(case.get("time"))) > _LIMIT and _is_there(ROOT / file, kinds, name):
            slow.add("::".join([file, *kinds, name]))
    SLOW.write_text("".join(f"{name}\n" for name in sorted(slow)))


def _is_there(file: Path, kinds: list[str], name: str) -> bool:
    """Return whether a test is still in its file; those of a class may come from another, and examples have dots."""
    return file.is_file() and (bool(kinds) or "." in name or f"def {name}(" in file.read_text())


if __name__ == "__main__":
    write_slow([Path(name) for name in sys.argv[1:]])
