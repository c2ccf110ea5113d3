"""An extractor that kills the first process that uses it."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.features import Extractor


class DyingExtractor(Extractor):
    """Makes features of colours; the first process that makes one is killed."""

    def __init__(self, mark: Path) -> None:
        super().__init__(name="dying", identity={"kind": "dying"}, dimension=3, side=8, row_exact=True)
        self._mark = mark

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        if not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.asarray(images.reshape(len(images), -1, 3).mean(axis=1) + 1)
