"""What a release with noise promises."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from nearveil.privacy import noise_guarantee
from nearveil.privacy.noise import (
    GaussianNoise,
    add_noise,
    calibrate_gaussian,
    calibrate_laplace,
    secure_source,
    unsafe_seeded,
)

STATED: dict[str, Any] = {"protects": "query", "unit": "image", "relation": "replace"}
NOISES: list[Any] = [
    calibrate_gaussian(1.0, 1e-5, sensitivity=2.0, size=64),
    calibrate_laplace(1.0, sensitivity=2.0, size=64),
]


@pytest.mark.parametrize("noise", NOISES)
def test_the_promise_is_what_the_noise_was_calibrated_for(noise: Any) -> None:
    promise = noise_guarantee(noise, delta=1e-5, source=secure_source(), **STATED)
    assert promise.epsilon == pytest.approx(1.0, abs=2e-4)
    assert promise.sound
    assert promise.events == (noise.event,)
    assert promise.extra_delta == noise.extra_delta > 0


def test_beyond_what_is_proved_of_the_sampler_nothing_is_promised() -> None:
    weak = GaussianNoise(sensitivity=1.0, scale=0.06, size=1, grid=2.0**-30)
    assert noise_guarantee(weak, delta=1e-5, source=secure_source(), **STATED).epsilon == float("inf")


class Costly(GaussianNoise):
    """Noise whose tables cost half of delta."""

    extra_delta = 5e-6


def test_what_the_tables_cost_is_taken_from_delta() -> None:
    specification = {"sensitivity": 1.0, "scale": 4.0, "size": 1, "grid": 2.0**-20}
    stated = {"source": secure_source(), **STATED}
    costly = noise_guarantee(Costly(**specification), delta=1e-5, **stated)  # type: ignore[arg-type]
    assert costly.epsilon == noise_guarantee(GaussianNoise(**specification), delta=5e-6, **stated).epsilon  # type: ignore[arg-type]


@pytest.mark.parametrize("narrow", [np.float16, np.float32])
def test_narrow_numbers_cost_as_much_as_wide_ones(narrow: Any) -> None:
    sensitivity = narrow(1.2607)
    for calibrate in (partial(calibrate_gaussian, 2.39, 1e-5), partial(calibrate_laplace, 2.39)):
        assert calibrate(sensitivity=sensitivity, size=3) == calibrate(sensitivity=float(sensitivity), size=3)


def test_masked_values_are_not_released() -> None:
    with pytest.raises(ValueError, match="must not be masked"):
        add_noise(np.ma.masked_array([1.0] * 64, mask=[True] * 64), NOISES[0])


@pytest.mark.parametrize("noise", NOISES)
def test_a_seed_voids_the_promise(noise: Any) -> None:
    promise = noise_guarantee(noise, delta=1e-5, source=unsafe_seeded(3), **STATED)
    assert not promise.sound
    assert "seed" in promise.reason


@pytest.mark.parametrize("delta", [0.0, 1.0, float("nan"), NOISES[0].extra_delta / 2])
def test_a_delta_that_the_sampler_exceeds_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta must be between"):
        noise_guarantee(NOISES[0], delta=delta, source=secure_source(), **STATED)
