"""Try sealed search without a hint: the server multiplies its hint by secrets that a ring scheme encrypts.

One colour is measured, with SEAL's CKKS through TenSEAL (`pip install tenseal`, no dependency of nearveil); a question
takes one for each. It prints bytes and seconds of the processor beside the hint that they would replace.
"""

import argparse
import time
from importlib import import_module

import numpy as np

from nearveil.sealed.parameters import SCORES
from nearveil.sealed.sizes import HINT_BYTES, choose_dimension, choose_shape, count_slots

DEGREE = 8192
MODULI = [60, 50, 60]  # bits: 170 of the 218 that 128 bits of security leave at this degree
SCALE = 50
HINT_BITS = 8 * HINT_BYTES["scores"]
WIDTH = 64.0  # what secrets are divided by, so that they are below one


def measure_colour(rows: int) -> dict[str, float]:
    """Multiply a random hint of one colour by an encrypted secret."""
    seal, generator = import_module("tenseal"), np.random.default_rng(0)
    context = seal.context(seal.SCHEME_TYPE.CKKS, poly_modulus_degree=DEGREE, coeff_mod_bit_sizes=MODULI)
    context.global_scale = 2.0**SCALE
    context.generate_galois_keys()
    keys = len(context.serialize(save_secret_key=False, save_galois_keys=True))
    keys -= len(context.serialize(save_secret_key=False, save_galois_keys=False))
    secret = np.rint(generator.normal(0, float(SCORES.sigma), SCORES.dimension))
    hint = generator.integers(0, 1 << HINT_BITS, (rows, SCORES.dimension)).astype(np.float64)
    asked = seal.ckks_vector(context, (secret / WIDTH).tolist())
    columns = [(some.T / 2.0**HINT_BITS).tolist() for some in np.split(hint, range(DEGREE // 2, rows, DEGREE // 2))]
    start = time.process_time()
    parts = [asked.matmul(some) for some in columns]
    seconds = time.process_time() - start
    found = np.concatenate([part.decrypt() for part in parts]) * WIDTH * 2.0**HINT_BITS
    return {
        "keys": keys,
        "up": len(asked.serialize()),
        "down": sum(len(part.serialize()) for part in parts),
        "seconds": seconds,
        "error": float(np.abs(found - hint @ secret).max()),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[1_000_000, 100_000_000, 1_000_000_000])
    print("items | colours, rows of each | hint, MB | keys once, MB | up, down, MB | processor, s | largest error")
    for n_items in parser.parse_args().items:
        n_cells, n_colours = choose_shape(n_items, choose_dimension(n_items))
        rows = count_slots(n_items, n_cells)
        one = measure_colour(rows)
        hint = HINT_BYTES["scores"] * n_colours * rows * SCORES.dimension
        up, down, seconds = (n_colours * one[name] for name in ("up", "down", "seconds"))
        print(
            f"{n_items:,} | {n_colours}, {rows:,} | {hint / 1e6:,.0f} | {one['keys'] / 1e6:.1f} | "
            f"{up / 1e6:.1f}, {down / 1e6:.1f} | {seconds:,.0f} | {one['error']:.4f} of {2**HINT_BITS}",
            flush=True,
        )


if __name__ == "__main__":
    main()
