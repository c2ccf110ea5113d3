"""Workers of Dask for the tests: real processes, started once for this folder, ended with it, with TLS as deployed."""

from collections.abc import Iterator
from typing import Any

import pytest

from .certificates import Certificates
from .processes import Processes


@pytest.fixture(scope="package")  # not longer: schedulers and workers that are idle take an eighth of a processor
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A scheduler and two workers on this machine."""
    made = Certificates.make(tmp_path_factory.mktemp("certificates"))
    with Processes(tmp_path_factory.mktemp("workers"), 2, made) as found:
        yield found


@pytest.fixture(scope="package")
def workers(processes: Processes) -> Any:
    """The client of these processes."""
    return processes.client
