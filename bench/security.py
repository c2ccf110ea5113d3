"""What the best attacks on the parameters of sealed search cost, by the lattice estimator.

The estimator (https://github.com/malb/lattice-estimator) is no package: pass the folder of a checkout. It needs Sage:
Debian's sagemath, or ``pip install passagemath-standard-no-symbolics passagemath-symbolics passagemath-maxima`` into an
environment of its own. Of this library only `nearveil.sealed.parameters` is imported, which needs nothing::

    PYTHONPATH=src python bench/security.py --estimator lattice-estimator > docs/results/sealed-security.txt

Attacks with guessing (hybrid) take minutes each: about an hour in all.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from nearveil.sealed.parameters import LWE, RING

MODELS = {"core-SVP (ADPS16)": "ADPS16", "MATZOV": "MATZOV"}
SAMPLES = range(16, 22)  # binary logarithms
RING_SAMPLES = 1 << 16  # of one ring secret: 16 ring elements; a request has six of keys and at most ten of secrets
TERNARY_BITS = 88, 109  # moduli of ternary secrets, for comparison: the largest above 128 bits, and a standard's limit


def list_attacks(estimator: Any, *, quick: bool) -> dict[str, Callable[..., Any]]:
    """Return attacks by their names; `quick` omits those that guess a part of the secret by primal attacks."""
    lwe, dual = estimator.LWE, importlib.import_module("estimator.lwe_dual")
    attacks = {
        "primal_usvp": lwe.primal_usvp,
        "primal_bdd": lwe.primal_bdd,
        "dual": lwe.dual,
        "dual_hybrid": lwe.dual_hybrid,  # of MATZOV, with a fast Fourier transform
    }
    guessing = {
        "dual, guess": dual.dual_hybrid,
        "dual, meet": partial(dual.dual_hybrid, mitm_optimization=True),  # guesses meet in the middle
        "bdd, guess": partial(lwe.primal_hybrid, mitm=False, babai=False),
        "babai, meet": partial(lwe.primal_hybrid, mitm=True, babai=True),
    }
    return attacks if quick else attacks | guessing


def estimate(estimator: Any, title: str, problem: Any, attacks: dict[str, Callable[..., Any]]) -> None:
    """Print a line for each attack."""
    print(f"\n{title}")
    for name, attack in attacks.items():
        figures = []
        for model, costs in MODELS.items():
            cost = attack(problem, red_cost_model=getattr(estimator.RC, costs))
            figures.append(f"{model} 2^{math.log2(cost['rop']):.1f} (block size {cost.get('beta', 'none')})")
        print(f"  {name:12} " + "; ".join(figures), flush=True)


def make_lwe(estimator: Any, sample_bits: int) -> Any:
    """Return the problem of LWE with 2^sample_bits samples."""
    width = estimator.ND.DiscreteGaussian(float(LWE.sigma))
    return estimator.LWE.Parameters(n=LWE.dimension, q=1 << LWE.modulus_bits, Xs=width, Xe=width, m=1 << sample_bits)


def make_problems(estimator: Any) -> Iterable[tuple[str, Any, bool]]:
    """Yield titles, problems in the estimator's terms, and whether quick attacks are enough."""
    gaussian, make = estimator.ND.DiscreteGaussian, estimator.LWE.Parameters
    for bits in SAMPLES:
        yield f"{LWE}, 2^{bits} samples", make_lwe(estimator, bits), bits < max(SAMPLES)
    ring = partial(make, n=RING.degree, m=RING_SAMPLES)
    width = gaussian(float(RING.sigma))
    yield f"{RING} (log q = {math.log2(RING.modulus):.2f})", ring(q=RING.modulus, Xs=width, Xe=width), False
    ternary = partial(ring, Xs=estimator.ND.UniformMod(3), Xe=gaussian(3.2))
    yield "the same ring, ternary secrets and sigma = 3.2: not used", ternary(q=RING.modulus), False
    for bits in TERNARY_BITS:
        yield f"ternary secrets, q of {bits} bits: not used", ternary(q=1 << bits), True
    published = make(n=1024, q=1 << 32, Xs=estimator.ND.UniformMod(1 << 32), Xe=gaussian(6.4), m=1 << 16)
    yield "SimplePIR as published: n = 1024, Q = 2^32, uniform secret, sigma = 6.4", published, True


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what attacks cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--estimator", required=True, help="folder of a checkout of the lattice estimator")
    sys.path.insert(0, parser.parse_args(arguments).estimator)
    estimator = importlib.import_module("estimator")
    print("Cost of attacks by the lattice estimator, in operations; a ring is estimated as LWE of its degree")
    for title, problem, quick in make_problems(estimator):
        estimate(estimator, title, problem, list_attacks(estimator, quick=quick))
    cost = estimator.LWE.coded_bkw(make_lwe(estimator, max(SAMPLES)))
    print(f"\nBy combining samples (coded BKW), {LWE}: 2^{math.log2(cost['rop']):.1f}")


if __name__ == "__main__":
    main()
