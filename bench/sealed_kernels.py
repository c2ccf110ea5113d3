"""How fast each kernel of sealed search passes over codes of 64 bytes, beside reading as much memory.

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

from nearveil.sealed.kernels import CompiledKernel, Kernel, TorchKernel
from nearveil.sealed.sizes import choose_shape, count_slots

DIMENSION = 64
KERNELS: dict[str, Callable[[np.ndarray], Kernel]] = {
    "numba": lambda database: CompiledKernel(database, 1),
    "torch": lambda database: TorchKernel(database, "cpu"),
}
COUNTS = (1, 4, 32)


def find_shape(n_items: int) -> tuple[int, int, int]:
    """Return colours, slots and columns of an index of so many items, as it would be built."""
    n_cells, n_colours = choose_shape(n_items, DIMENSION)
    return n_colours, count_slots(n_items, n_cells), n_cells // n_colours * DIMENSION


def main() -> None:
    """Measure."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    shape = find_shape(given.items)
    database = rng.integers(-127, 128, shape, dtype=np.int8)
    asked = {count: rng.integers(0, 1 << 24, (count, shape[0], shape[2]), dtype=np.uint32) for count in COUNTS}
    words = database.reshape(-1).view(np.int64)
    actions: dict[str, Callable[[], object]] = {"memory": lambda: np.bitwise_or.reduce(words)}
    for kind in given.kernels:
        kernel = KERNELS[kind](database)
        for count in COUNTS:
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
    (given.out / f"sealed-kernels-{given.items}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
