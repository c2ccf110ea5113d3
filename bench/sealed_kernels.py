"""How fast each kernel of sealed search passes over a million codes of 64 bytes, beside reading as much memory.

One thread, and seconds of its processor rather than of the clock, so that other programs count less; runs of all take
turns, and the least of each is told::

    python bench/sealed_kernels.py --out out/bench
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nearveil.sealed.kernels import KernelName, make_kernel

SHAPE = (41, 352, 74 * 64)  # colours, slots, columns of a million codes
KERNELS: tuple[KernelName, ...] = ("numpy", "numba", "torch")
COUNTS = (1, 4, 32)


def main() -> None:
    """Measure."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    database = rng.integers(-127, 128, SHAPE).astype(np.int8)
    asked = {count: rng.integers(0, 1 << 24, (count, SHAPE[0], SHAPE[2])).astype(np.uint32) for count in COUNTS}
    words = database.reshape(-1).view(np.int64)
    actions: dict[str, Callable[[], object]] = {"memory": lambda: np.bitwise_or.reduce(words)}
    for kind in KERNELS:
        kernel = make_kernel(database, kind, n_threads=1)
        for count in COUNTS if kind != "numpy" else (1,):
            actions[f"{kind}, {count}"] = lambda kernel=kernel, count=count: kernel.multiply(asked[count])  # type: ignore[misc]
    least: dict[str, float] = dict.fromkeys(actions, np.inf)
    for turn in range(given.repeats + 1):
        for name, action in actions.items():
            start = time.process_time()
            action()
            if turn:  # the first warms up
                least[name] = min(least[name], time.process_time() - start)
    rate = database.nbytes / least["memory"]
    report: dict[str, dict[str, float]] = {}
    for name, seconds in least.items():
        questions = 1 if name == "memory" else int(name.split(", ")[1])
        report[name] = {
            "ms": 1e3 * seconds,
            "pass_gb_per_s": database.nbytes / seconds / 1e9,
            "pass_to_memory": database.nbytes / seconds / rate,
            "questions_per_s_and_core": questions / seconds,
        }
        print(name, {word: round(value, 2) for word, value in report[name].items()})
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "sealed-kernels.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
