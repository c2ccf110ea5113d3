"""Sources whose words are recorded and replayed: what was drawn can be computed a second time."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil.privacy.noise import Source, unsafe_seeded

Words = NDArray[np.uint64]


class Tape:
    """A source that returns recorded words, and fails where they end."""

    sound = False

    def __init__(self, words: Words) -> None:
        self._words = words

    def words(self, count: int) -> Words:
        assert count <= len(self), "more words are drawn than were recorded"
        words, self._words = self._words[:count], self._words[count:]
        return words

    def __len__(self) -> int:
        return len(self._words)


def record_words(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Source | None], Any], *, default: bool
) -> tuple[Any, Tape]:
    """Return the result of `run` and the words that it drew, from the default source (None) or from a seeded one."""
    drawn: list[Words] = []
    source, urandom = unsafe_seeded(3), os.urandom
    draw_seeded = source.words

    def draw(count: int) -> Words:
        drawn.append(draw_seeded(count))
        return drawn[-1]

    def draw_bytes(count: int) -> bytes:
        if count % 8:
            return urandom(count)
        drawn.append(np.frombuffer(urandom(count), np.uint64))
        return drawn[-1].tobytes()

    with monkeypatch.context() as patch:
        if default:
            patch.setattr(os, "urandom", draw_bytes)
        else:
            patch.setattr(source, "words", draw)
        result = run(None if default else source)
    return result, Tape(np.concatenate(drawn))
