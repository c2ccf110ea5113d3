"""Clients whose pads have exact masks, from hints: most tests need no token, which takes a tenth of a second."""

from collections.abc import Callable

import numpy as np

from nearveil.privacy.noise import Source, unsafe_seeded
from nearveil.sealed import SealedClient, SealedIndex
from nearveil.sealed.lwe import Longs, make_hint
from nearveil.sealed.pads import Pad, get_process
from nearveil.sealed.parameters import RING
from nearveil.sealed.ring import public_bytes
from nearveil.sealed.wire import write_parts
from nearveil.wire.frames import Kind


def make_hints(index: SealedIndex, part: str) -> Longs:
    """Return the hints of all groups, shape (groups, rows, n)."""
    stage = index.layout.stages[part]
    groups = [
        make_hint(part, index.layout.seed, group // stage.n_secrets, [index._get_group(part, group)])[0]
        for group in range(stage.n_groups)
    ]
    return np.stack(groups).astype(np.int64)


class ExactClient(SealedClient):
    """A client whose pads need no token."""

    def __init__(self, index: SealedIndex, source: Source | None = None) -> None:
        layout, lengths = index.layout, [public_bytes(stage.secret_rows) for stage in index.layout.stages.values()]
        tokens = write_parts(Kind.SEALED_TOKENS, layout.version, [bytes(length) for length in lengths])
        super().__init__(layout.to_bytes(), tokens, source=source)
        self._hints = {part: make_hints(index, part) for part in layout.stages}

    def prepare(self, n_questions: int, send: Callable[[bytes], bytes] | None = None) -> None:
        """Fill the stocks; `send` is not used."""
        del send
        for part in self.layout.stages:
            self._fill(part, n_questions)

    def _fill(self, part: str, count: int) -> None:
        stage = self.layout.stages[part]
        while len(self._stocks[part]) < count:
            zeros, secrets = self._encrypt_zeros(
                part, self.layout.seed, (stage.n_groups, stage.n_columns), stage.n_secrets, self._source
            )
            of_groups = np.resize(secrets, (stage.n_groups, secrets.shape[1]))
            masks = np.einsum("grn,gn->gr", self._hints[part], of_groups) % RING.plain_modulus
            self._stocks[part].add(Pad(zeros, masks, secrets), get_process())

    def _reserve_or_request(self, send: Callable[[bytes], bytes]) -> SealedClient:
        del send
        return self

    def _take_pad(self, part: str) -> Pad:
        self._fill(part, 1)
        return super()._take_pad(part)


def connect(index: SealedIndex, seed: int | None = 5) -> ExactClient:
    return ExactClient(index, None if seed is None else unsafe_seeded(seed))
