"""Workers of Dask for the tests: real processes, started once for all tests of this folder, with TLS as deployed."""

from collections.abc import Iterator
from typing import Any

import pytest

from .certificates import Certificates
from .processes import Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A scheduler and two workers on this machine."""
    made = Certificates.make(tmp_path_factory.mktemp("certificates"))
    with Processes(tmp_path_factory.mktemp("workers"), 2, made) as found:
        yield found


@pytest.fixture(scope="session")
def workers(processes: Processes) -> Any:
    """The client of these processes."""
    return processes.client
