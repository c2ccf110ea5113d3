"""The sealed index that a gallery answers from: one build at a time, always of the newest map."""

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from nearveil.progress import start_stage
from nearveil.server.errors import ServiceError
from nearveil.wire.server import ServedMap

if TYPE_CHECKING:
    from nearveil.sealed import SealedIndex

_LOG = logging.getLogger(__name__)
_NOTICE_DELAY = 1.0  # seconds until a start that waits for a build says so; to load a file takes less
_TABLE_SPEED = 2  # bytes of tables of tokens that take as long as a byte of codes


@dataclass(eq=False)
class SealedAnswers:
    """The sealed index of a map, and the bytes of it that all clients fetch."""

    served: ServedMap
    index: "SealedIndex"

    def __post_init__(self) -> None:
        self.layout, self.tokens = self.index.layout.to_bytes(), self.index.get_public_tokens()

    @classmethod
    def open(cls, served: ServedMap, previous: "Self | None" = None) -> Self:
        """Load the index of a map, change the previous one, or build it."""
        from nearveil.wire.sealed import open_sealed_index

        return cls(served, open_sealed_index(served, previous=None if previous is None else previous.index))

    def update(self, served: ServedMap) -> "Self | None":
        """Return the index of a map in memory, without its file; None if it must be built again."""
        from nearveil.wire.sealed import update_sealed_index

        index = update_sealed_index(served, self.index)
        return None if index is None else type(self)(served, index)

    def get_lengths(self, *, tokens: bool) -> frozenset[int]:
        """Return the lengths of the frames of questions, or of requests for tokens, in bytes."""
        from nearveil.sealed.wire import measure_requests

        lengths = measure_requests(self.index.layout)
        return frozenset(length for part, length in lengths.items() if (part == "tokens") == tokens)

    def is_within(self, served: ServedMap) -> bool:
        """Return whether a map still has all items of the index: if so, it may answer while another is built."""
        return self.served is served or bool(np.isin(self.index.get_items(), served.read_alive()[0]).all())


class SealedBuilder:
    """Builds sealed indexes in a thread, one at a time. Any thread may use it, and only `wait` waits."""

    # Maps that come during a build replace each other, and the build of the newest follows. Until it ends, the previous
    # index answers, unless an item of it was deleted.

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._newest: ServedMap | None = None  # the map to build for
        self._built: SealedAnswers | None = None
        self._current: SealedAnswers | None = None  # `_built`, if it may answer
        self._error: Exception | None = None  # of the last build
        self._is_building = False

    @property
    def is_used(self) -> bool:
        """Whether a build was ever requested."""
        return self._newest is not None

    def get_pass_bytes(self, *, tokens: bool) -> int:
        """Return the bytes of codes that take as long as a question or a request for tokens; 0 before the build."""
        answers = self._current
        if answers is None:
            return 0
        return answers.index.token_nbytes // _TABLE_SPEED if tokens else answers.index.nbytes

    def get(self) -> SealedAnswers:
        """Return an index that may answer, without waiting; ServiceError if there is none."""
        answers = self._current
        if answers is None:
            raise ServiceError(
                "busy",
                "The sealed index is being built. Try again later; `nearveil index --sealed` builds it in advance.",
                5,
            )
        return answers

    def request(self, served: ServedMap) -> None:
        """Build the index of a map, unless that is done or in progress; during a build only remember the newest map."""
        with self._changed:
            if served is self._newest and self._error is None:
                return
            self._newest, self._error = served, None
            self._choose_current()
            if not self._is_building:
                self._is_building = True
                threading.Thread(target=self._run, name="sealed", daemon=True).start()

    def wait(self, seconds: float | None) -> SealedAnswers:
        """Return the index of the newest map when it is built, or raise the error of its build."""
        begin, _ = time.monotonic(), start_stage(f"Loading or building the sealed index of {self._name}")
        with self._changed:
            if seconds is None and not self._changed.wait_for(lambda: not self._is_building, _NOTICE_DELAY):
                _LOG.warning("Building the sealed index of %s ...", self._name)
                self._changed.wait_for(lambda: not self._is_building)
                if self._error is None:
                    _LOG.warning("The sealed index of %s: ready after %.0f s.", self._name, time.monotonic() - begin)
            self._changed.wait_for(lambda: not self._is_building, seconds)
            if self._error is not None:
                raise self._error
        return self.get()

    def _run(self) -> None:
        while (served := self._next()) is not None:
            error = None
            try:
                updated = None if self._built is None else self._built.update(served)
                if updated is not None:
                    self._publish(updated)  # it answers while the file is written
                self._publish(SealedAnswers.open(served, self._built))
            except Exception as problem:  # its text may be private
                _LOG.warning("the sealed index cannot be built: %s", type(problem).__name__)
                error = problem
            with self._changed:
                self._error = error if served is self._newest else None

    def _publish(self, built: SealedAnswers) -> None:
        with self._changed:
            self._built = built
            self._choose_current()

    def _next(self) -> ServedMap | None:
        """Return the map to build for; None, and end, if the newest is built or cannot be."""
        with self._changed:
            if self._error is None and (self._built is None or self._built.served is not self._newest):
                return self._newest
            self._is_building = False
            self._changed.notify_all()
            return None

    def _choose_current(self) -> None:
        assert self._newest is not None
        self._current = self._built if self._built is not None and self._built.is_within(self._newest) else None
