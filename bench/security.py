"""What the best attacks on the parameters of sealed search cost, by the lattice estimator.

The estimator (https://github.com/malb/lattice-estimator) is no package: pass the folder of a checkout. It needs Sage:
Debian's sagemath, or ``pip install passagemath-standard-no-symbolics passagemath-symbolics`` into an environment of
its own. Of this library only `nearveil.sealed.parameters` is imported, which needs nothing::

    PYTHONPATH=src python bench/security.py --estimator lattice-estimator > docs/results/sealed-security.txt
"""

import argparse
import importlib
import math
import sys
from typing import Any

from nearveil.sealed.parameters import FETCH, SCORES, LweParameters

ATTACKS = ("primal_usvp", "primal_bdd", "dual", "dual_hybrid")
MODELS = {"core-SVP (ADPS16)": "ADPS16", "MATZOV": "MATZOV"}


def estimate(estimator: Any, title: str, problem: Any) -> None:
    """Print a line for each attack."""
    print(f"\n{title}")
    for attack in ATTACKS:
        figures = []
        for name, model in MODELS.items():
            cost = getattr(estimator.LWE, attack)(problem, red_cost_model=getattr(estimator.RC, model))
            figures.append(f"{name} 2^{math.log2(cost['rop']):.1f} (block size {cost['beta']})")
        print(f"  {attack:12} " + "; ".join(figures), flush=True)


def make_problem(estimator: Any, parameters: LweParameters) -> Any:
    """Return a set of parameters in the estimator's terms."""
    width = estimator.ND.DiscreteGaussian(float(parameters.sigma))
    return estimator.LWE.Parameters(
        n=parameters.dimension, q=1 << parameters.modulus_bits, Xs=width, Xe=width, m=parameters.most_samples
    )


def main() -> None:
    """Print what attacks cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--estimator", required=True, help="folder of a checkout of the lattice estimator")
    sys.path.insert(0, parser.parse_args().estimator)
    estimator = importlib.import_module("estimator")
    print("Cost of attacks by the lattice estimator, in operations")
    for parameters in (SCORES, FETCH):
        title = f"{parameters.name}: {parameters}, {parameters.most_samples} samples"
        estimate(estimator, title, make_problem(estimator, parameters))
    published = estimator.LWE.Parameters(
        n=1024, q=1 << 32, Xs=estimator.ND.UniformMod(1 << 32), Xe=estimator.ND.DiscreteGaussian(6.4), m=1 << 16
    )
    estimate(estimator, "SimplePIR as published: n = 1024, Q = 2^32, uniform secret, sigma = 6.4", published)


if __name__ == "__main__":
    main()
