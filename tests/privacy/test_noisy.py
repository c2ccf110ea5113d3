"""What a release with noise promises."""

from typing import Any

import pytest

from nearveil.privacy import noise_guarantee
from nearveil.privacy.noise import calibrate_gaussian, calibrate_laplace, secure_source, unsafe_seeded

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
    assert promise == noise_guarantee(noise, delta=1e-5, **STATED)


@pytest.mark.parametrize("noise", NOISES)
def test_a_seed_voids_the_promise(noise: Any) -> None:
    promise = noise_guarantee(noise, delta=1e-5, source=unsafe_seeded(3), **STATED)
    assert not promise.sound
    assert "seed" in promise.reason


@pytest.mark.parametrize("delta", [0.0, 1.0, float("nan"), NOISES[0].extra_delta / 2])
def test_a_delta_that_the_sampler_exceeds_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta must lie between"):
        noise_guarantee(NOISES[0], delta=delta, **STATED)
