"""The guarantee of a release that added noise."""

from nearveil.privacy._compose import compose_events
from nearveil.privacy._guarantee import Basis, Guarantee, Protects, Relation
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source


def noise_guarantee(
    noise: GaussianNoise | LaplaceNoise,
    *,
    delta: float,
    protects: Protects,
    unit: str,
    relation: Relation,
    source: Source,
) -> Guarantee:
    """Return what a release of values with `noise` promises.

    Parameters
    ----------
    noise : GaussianNoise or LaplaceNoise
        The specification; what its grid and tables cost is charged.
    delta : float
        Between ``noise.extra_delta`` and 1.
    protects : {"query", "database"}
    unit : str
    relation : {"replace", "add-remove"}
        That of the sensitivity.
    source : Source
        Where the randomness of the release came from: the one that `add_noise` was given. One that
        is not sound makes a guarantee that is not.

    Returns
    -------
    Guarantee

    Examples
    --------
    >>> from nearveil.privacy.noise import calibrate_gaussian, secure_source, unsafe_seeded
    >>> noise = calibrate_gaussian(1.0, 1e-5, sensitivity=2.0, size=64)
    >>> stated = {"delta": 1e-5, "protects": "query", "unit": "image", "relation": "replace"}
    >>> promise = noise_guarantee(noise, source=secure_source(), **stated)
    >>> f"{promise.epsilon:.3f}", promise.sound
    ('1.000', True)
    >>> print(noise_guarantee(noise, source=unsafe_seeded(7), **stated))
    No promise about which image was asked for: the noise came from a seed, so whoever knows the seed can take it away.
    """
    if not noise.extra_delta < delta < 1:
        raise ValueError(f"delta must lie between {noise.extra_delta:.1g}, which the sampler costs, and 1")
    return compose_events(
        [noise.event],
        delta=delta,
        extra_delta=noise.extra_delta,
        protects=protects,
        unit=unit,
        relation=relation,
        basis=Basis(f"{type(noise).__name__}, rounded, by its privacy loss", "docs/theory/noise.md"),
    ).with_source(source)
