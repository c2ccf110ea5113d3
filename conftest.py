import gc
import importlib.util
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Kernels for GPUs can be imported only where Triton is; everything else is collected everywhere.
_KERNELS = ["src/nearveil/privatemail/graph/_fused.py", "src/nearveil/sealed/_device_ring.py"]
collect_ignore = [] if importlib.util.find_spec("triton") else _KERNELS

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"]).pytest()


# How long examples take, and how long it takes to draw them, says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Handle SIGINT even if the parent ignores it (`nohup make test &`, cron): children inherit it, and tests send it.

    Workers of xdist inherit it, too, so this runs before they start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Look for garbage after each file, and never again through what is left: it stays to the end."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files of a process out one by one; those that share a cluster together, so that one is started."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    from tests.quick import APART

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return APART if nodeid.startswith(APART) else str(super()._split_scope(nodeid))

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # several processes take files: a long one that came last would run alone
        from tests.quick import find_group, weigh_files

        seconds = weigh_files()
        items.sort(key=lambda item: -seconds[find_group(item.nodeid)])
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
