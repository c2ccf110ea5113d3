"""How studies and benches measure: times of repeated work, and peak memory in a process of its own."""

import importlib
import json
import re
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHILD = "from studies import _timing; _timing.run_child()"


def time_repeatedly(work: Callable[[], object], *, least: int = 2, most: int = 9, seconds: float = 4.0) -> list[float]:
    """Return how long work took, again and again until it took long enough in all."""
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < seconds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def measure_peak_gib() -> float:
    """Return the peak memory of this process. What the one that started it held does not count, where that is known."""
    status = Path("/proc/self/status")
    peak = re.search(r"^VmHWM:\s*(\d+)", status.read_text(), re.MULTILINE) if status.exists() else None
    if peak is not None:
        return int(peak[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_in_new_process(function: str, **arguments: Any) -> Any:
    """Return what a function returns in a process of its own, whose peak memory is its own."""
    command = [sys.executable, "-c", _CHILD, function, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def run_child() -> None:
    """Run what `run_in_new_process` asked for, and print it."""
    module, _, name = sys.argv[1].rpartition(":")
    namespace = runpy.run_path(module) if module.endswith(".py") else vars(importlib.import_module(module))
    value = namespace[name](**json.loads(sys.argv[2]))
    sys.stdout.write(json.dumps(value) + "\n")
