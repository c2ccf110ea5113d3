import importlib.util
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# The GPU kernel can be imported only where Triton is; everything else is collected everywhere.
collect_ignore = [] if importlib.util.find_spec("triton") else ["src/nearveil/graph/_fused.py"]

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"]).pytest()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    missing = sum("no real data at" in str(report.longrepr) for report in skipped)
    terminalreporter.write_line(
        f"{missing} test(s) skipped for want of real data (NEARVEIL_DATA); {len(skipped) - missing} for other reasons"
    )
