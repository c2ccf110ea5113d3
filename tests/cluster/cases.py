"""Cases of a study that workers import."""

from typing import Any


def list_cases() -> list[dict[str, Any]]:
    return [{"x": x} for x in range(5)]


def measure(case: Any) -> list[dict[str, Any]]:
    return [{"x": case["x"], "square": case["x"] ** 2}]
