"""Workers of Dask for the tests: real processes, started once for all tests of this folder."""

from collections.abc import Iterator
from typing import Any

import pytest

from .processes import Processes


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two workers on this machine, behind a client."""
    with Processes(tmp_path_factory.mktemp("workers"), 2) as found:
        yield found.client
