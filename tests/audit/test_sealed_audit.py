"""The audit of sealed questions: it catches every weak seal, and finds nothing in the real one."""

import pytest

pytest.importorskip("cryptography")

from nearveil.audit import audit
from nearveil.audit.attacks._sealed import SPECIMENS, make_sealed_experiment
from nearveil.privacy.noise import unsafe_seeded


@pytest.mark.parametrize("name", list(SPECIMENS))
def test_weak_seals_are_caught(name: str) -> None:
    assert audit(SPECIMENS[name](), trials=400, source=unsafe_seeded(1)).verdict == "broken"


def test_nothing_is_found_in_the_real_one() -> None:
    found = audit(make_sealed_experiment(), trials=400, source=unsafe_seeded(2))
    assert found.verdict != "broken"
    assert [check.result for check in found.checks if check.name == "errors and secrets"] == ["passed"]
