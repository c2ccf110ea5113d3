import gc
import importlib.util
from collections.abc import Generator
from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# The GPU kernel can be imported only where Triton is; everything else is collected everywhere.
collect_ignore = [] if importlib.util.find_spec("triton") else ["src/nearveil/graph/_fused.py"]

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"]).pytest()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only fast tests, and those of what changed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is imported and collected: all of it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(
        config, "workerinput"
    ):  # several processes take file after file: a long one that came last would run alone
        from tests.quick import weigh_files

        seconds = weigh_files()
        items.sort(key=lambda item: -seconds[item.nodeid.split("::")[0]])
    if config.getoption("quick"):
        from tests.quick import choose

        chosen = choose([item.nodeid for item in items])
        config.hook.pytest_deselected(items=[item for item, good in zip(items, chosen, strict=True) if not good])
        items[:] = [item for item, good in zip(items, chosen, strict=True) if good]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    missing = sum("no real data at" in str(report.longrepr) for report in skipped)
    terminalreporter.write_line(
        f"{missing} test(s) skipped for want of real data (NEARVEIL_DATA); {len(skipped) - missing} for other reasons"
    )
