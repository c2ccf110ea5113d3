"""Run a stage over partitions: in this process, or on the workers of a Dask cluster.

A stage is a pure function of one partition and of what all partitions share. What it returns comes back in the order
of the partitions, whoever computed it. Partitions are cut by the number of rows alone, never by the number of workers:
that is why results do not depend on where they were computed.
"""

import importlib
import ipaddress
import math
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from numpy.typing import NDArray

from nearveil.errors import NearveilError

ROWS = 1 << 16  # of a partition
_ATTEMPTS = 4  # at a partition, where what it needs was lost with a worker or a scheduler
_PATIENCE = 60.0  # seconds to wait for a worker
_LOOK = 2.0  # seconds between two looks whether there are workers
_SMALL = 1 << 16  # bytes
_AHEAD = 2  # partitions for each thread of a worker that are under way at once

_MENDED = (NearveilError, ValueError, OSError)  # errors that a user can mend

Tick: TypeAlias = Callable[[int], object]
Part = TypeVar("Part")
Result = TypeVar("Result")


class ClusterError(NearveilError, ConnectionError):
    """The cluster cannot be reached, or was lost; nothing was changed."""


class PartitionError(NearveilError, ValueError):
    """A stage failed on one partition, which the message names; nothing was changed."""


def cut_rows(n_rows: int, rows: int | None = None) -> list[slice]:
    """Return the partitions of a table: by the number of its rows alone.

    Parameters
    ----------
    n_rows : int
    rows : int, optional
        Of a partition; `ROWS` by default.

    Returns
    -------
    list of slice

    Examples
    --------
    >>> cut_rows(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = ROWS if rows is None else rows
    return [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


class Cluster:
    """Where stages run: this one runs them in this process, one partition after the other.

    :func:`connect` makes those that run them on workers.

    Examples
    --------
    >>> list(Cluster().map(len, ["a", "bcd"], stage="counting letters"))
    [1, 3]
    """

    @property
    def dashboard(self) -> str | None:
        """The address of the page that shows what workers do; None without workers."""
        return None

    def place(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Bring partitions to the workers, for several stages.

        Parameters
        ----------
        parts : sequence

        Returns
        -------
        sequence
            What :meth:`map` takes in their place.
        """
        return parts

    def share(self, value: Any) -> Any:
        """Bring to every worker what all partitions of several stages need.

        Parameters
        ----------
        value : object

        Returns
        -------
        object
            What :meth:`map` takes in its place.
        """
        return value

    def map(
        self,
        function: Callable[..., Result],
        parts: Sequence[Any],
        *shared: Any,
        stage: str,
        names: Sequence[str] | None = None,
        tick: Tick | None = None,
    ) -> Iterator[Result]:
        """Apply a pure function to every partition, and yield what it returns in their order.

        Parameters
        ----------
        function : callable
            ``function(part, *shared)``, of a module that workers can import.
        parts : sequence
            Small, or placed by :meth:`place`.
        *shared : object
            Of any size; what several stages need is best shared by :meth:`share` once.
        stage : str
            What errors call the stage.
        names : sequence of str, optional
            What errors call the partitions; by default their numbers.
        tick : callable, optional
            Called with 1 for each partition that is done.

        Yields
        ------
        object

        Raises
        ------
        PartitionError
            If the function fails on a partition. No further one is begun.
        """
        called = _name_parts(parts, names)
        for part, name in zip(parts, called, strict=True):
            outcome = _run(function, _load(part), *shared)
            yield _read_outcome(outcome, stage, name)
            if tick is not None:
                tick(1)


LOCAL = Cluster()
"""This process."""


@dataclass(frozen=True)
class _Outcome:
    """What a function returned, or what was wrong."""

    value: Any = None
    error: Exception | None = None


def _run(function: Callable[..., Any], part: Any, *shared: Any) -> _Outcome:
    try:
        return _Outcome(function(part, *shared))
    except Exception as error:
        return _Outcome(error=error)


def _run_on_worker(function: Callable[..., Any], part: Any, *shared: Any) -> _Outcome:
    """Run a function where errors must travel: as plain ones, which every process can read."""
    outcome = _run(function, part, *shared)
    return outcome if outcome.error is None else _Outcome(error=ValueError(_describe(outcome.error)))


def _describe(error: Exception) -> str:
    """Return an error in words: ours say what to do, of others the kind says most."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return text if isinstance(error, _MENDED) else f"{type(error).__name__}: {text}"


def _read_outcome(outcome: _Outcome, stage: str, name: str) -> Any:
    """Return a value, or raise: what a user can mend names the partition, unless there is but one."""
    if outcome.error is None:
        return outcome.value
    if not name or not isinstance(outcome.error, _MENDED):
        raise outcome.error
    raise PartitionError(f"{stage}, {name}: {_describe(outcome.error)}") from outcome.error


def _name_parts(parts: Sequence[Any], names: Sequence[str] | None) -> Sequence[str]:
    if names is not None:
        return names
    return [""] if len(parts) == 1 else [f"partition {number} of {len(parts)}" for number in range(1, len(parts) + 1)]


class _Placed:
    """A value at this process and, until it is lost, at workers."""

    def __init__(self, value: Any, *, everywhere: bool) -> None:
        self.value, self._everywhere = value, everywhere
        self._future: Any = None

    def find(self, client: Any) -> Any:
        """Return the future of the value; sent (again) where there is none that is good."""
        if self._future is None or self._future.cancelled():
            client.wait_for_workers(1, timeout=_PATIENCE)
            # In a list: an array by itself is one value, a list of one is, too, and comes back as a list.
            (self._future,) = client.scatter([self.value], broadcast=self._everywhere, hash=False)
        return self._future

    def drop(self) -> None:
        """Forget what was sent."""
        self._future = None


class _Lying(_Placed):
    """A block of a Dask array: computed by workers where its data lies, and never brought to this process."""

    def find(self, client: Any) -> Any:
        if self._future is None or self._future.cancelled():
            self._future = client.compute(self.value)
        return self._future


def _load(part: Any) -> Any:
    """Return a partition for this process; blocks of Dask arrays are computed one at a time."""
    if isinstance(part, tuple) and any(map(_is_lazy, part)):
        return tuple(map(_load, part))
    return part.compute(scheduler="synchronous") if _is_lazy(part) else part


def _is_lazy(value: Any) -> bool:
    return type(value).__module__.startswith("dask.") and hasattr(value, "compute")


class _DaskCluster(Cluster):
    """Runs stages on the workers of a client of dask.distributed."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def dashboard(self) -> str | None:
        link = self._client.dashboard_link
        return str(link) if link else None

    def place(self, parts: Sequence[Any]) -> Sequence[Any]:
        return [_Placed(part, everywhere=False) for part in parts]

    def share(self, value: Any) -> Any:
        return _Placed(value, everywhere=True)

    def map(
        self,
        function: Callable[..., Result],
        parts: Sequence[Any],
        *shared: Any,
        stage: str,
        names: Sequence[str] | None = None,
        tick: Tick | None = None,
    ) -> Iterator[Result]:
        called = _name_parts(parts, names)
        sent = [one if isinstance(one, _Placed) or _is_small(one) else self.share(one) for one in shared]
        waiting: deque[Any] = deque()  # futures; those that are dropped are forgotten by the scheduler, too
        tasks = _Tasks(self._client, function, parts, sent)
        number = 0
        for place, name in enumerate(called):
            while number < len(parts) and len(waiting) < max(1, _AHEAD * tasks.count_threads()):
                waiting.append(tasks.submit(number, stage))
                number += 1
            yield _read_outcome(tasks.wait(place, waiting.popleft(), stage, name), stage, name)
            if tick is not None:
                tick(1)


def _is_small(value: Any) -> bool:
    """Return whether a value may travel with every partition."""
    return bool(importlib.import_module("dask.sizeof").sizeof(value) < _SMALL)


class _Tasks:
    """Partitions of one stage at a client: submitted, waited for, and submitted again where workers were lost."""

    def __init__(self, client: Any, function: Callable[..., Any], parts: Sequence[Any], shared: Sequence[Any]) -> None:
        self._client, self._function, self._parts, self._shared = client, function, parts, shared
        self._token = f"{getattr(function, '__name__', 'stage').strip('_')}-{uuid.uuid4().hex}"
        self._submitted = 0

    def count_threads(self) -> int:
        """Return how many partitions are computed at once."""
        return sum(self._client.nthreads().values())

    def submit(self, number: int, stage: str) -> Any:
        """Send a partition to a worker, and what it needs; again where that worker died meanwhile."""
        lost: OSError | None = None
        for _ in range(_ATTEMPTS):
            self._submitted += 1
            try:
                return self._client.submit(
                    _run_on_worker,
                    self._function,
                    *(self._find(one) for one in (self._parts[number], *self._shared)),
                    key=f"{self._token}-{number}-{self._submitted}",
                    pure=False,
                )
            except OSError as error:
                lost = error
        assert lost is not None
        raise _make_lost_error(stage, lost) from lost

    def _find(self, value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(one, _Placed) for one in value):
            return tuple(map(self._find, value))
        return value.find(self._client) if isinstance(value, _Placed) else value

    def _watch(self, future: Any) -> None:
        """Wait until a partition is done, as long as there are workers."""
        idle = 0.0
        while not future.done():
            with suppress(TimeoutError), self._client.as_current():
                _load_dask().wait(future, timeout=_LOOK)
            idle = 0.0 if self._client.nthreads() else idle + _LOOK
            if idle > _PATIENCE:
                raise TimeoutError("there is no worker")

    def wait(self, number: int, future: Any, stage: str, name: str) -> _Outcome:
        """Return the outcome of a partition; whatever its workers had is sent again where it was lost."""
        dask = _load_dask()
        for attempt in range(_ATTEMPTS):
            try:
                self._watch(future)
                found: _Outcome = future.result()
                return found
            except dask.KilledWorker:
                raise PartitionError(
                    f"{stage}, {name}: every worker that had it died; look for their memory and their logs"
                ) from None
            except (dask.CancelledError, dask.TimeoutError, OSError) as error:
                lost = error
            if attempt:  # what is known to be lost is sent again anyway
                part = self._parts[number]
                for placed in (*(part if isinstance(part, tuple) else (part,)), *self._shared):
                    if isinstance(placed, _Placed):
                        placed.drop()
            future = self.submit(number, stage)
        raise _make_lost_error(stage, lost) from lost


def _make_lost_error(stage: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"cluster: it was lost while {stage} ({type(error).__name__}): start scheduler and workers, and run it again; "
        "nothing was published"
    )


@dataclass(frozen=True)
class SpreadRows:
    """Rows of a Dask array, processed where they lie: on workers, or in this process one block after the other."""

    cluster: Cluster
    parts: Sequence[Any]  # what `cluster.map` takes
    cuts: Sequence[slice]  # the rows of each
    shape: tuple[int, int]
    dtype: Any

    @classmethod
    def of(cls, array: Any, name: str = "X") -> "SpreadRows":
        """Take the blocks of a Dask array, on the workers of its default client where there is one."""
        if array.ndim != 2 or not array.shape[1] > 0:
            raise ValueError(f"{name} must be a 2-D array (rows, features) with at least one feature")
        sizes = array.chunks[0]
        if any(map(math.isnan, sizes)):
            raise ValueError(f"{name} is a Dask array whose chunks have no sizes: call its compute_chunk_sizes() first")
        blocks = array.rechunk({1: -1}).to_delayed()[:, 0].tolist()
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        cuts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        try:
            client = _load_dask().default_client()
        except (ValueError, ModuleNotFoundError):  # nobody started workers
            return cls(LOCAL, blocks, cuts, array.shape, array.dtype)
        parts = [_Lying(block, everywhere=False) for block in blocks]
        return cls(_DaskCluster(client), parts, cuts, array.shape, array.dtype)


def is_dask_array(value: Any) -> bool:
    """Return whether a value is an array of Dask, without importing it."""
    return type(value).__module__.startswith("dask.array")


_LOCAL = re.compile(r"local(?::([0-9]{1,4}))?")


@contextmanager
def connect(
    cluster: Any = None,
    *,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    insecure: bool = False,
) -> Iterator[Cluster]:
    """Connect to where stages run.

    Parameters
    ----------
    cluster : str, dask.distributed.Client, Cluster or None, default=None
        ``"local"`` or ``"local:N"`` starts N worker processes on this machine (by default one for each core);
        ``"tls://host:port"`` or ``"tcp://host:port"`` is the scheduler of a cluster. A client, or what another
        :func:`connect` gave, is used and left open. None is this process.
    ca, cert, key : Path, optional
        For ``tls://``: certificates of the authority, of this client, and its key (PEM). By default as Dask's own
        configuration says (``distributed.comm.tls``).
    insecure : bool, default=False
        Whether ``tcp://`` to another machine is allowed: whoever is on the way sees the rows, and can run programs.

    Yields
    ------
    Cluster

    Examples
    --------
    >>> with connect() as here:
    ...     list(here.map(abs, [-1, 2], stage="taking absolute values"))
    [1, 2]
    """
    if cluster is None or isinstance(cluster, Cluster):
        yield cluster or LOCAL
        return
    distributed = _load_dask()
    if isinstance(cluster, distributed.Client):
        yield _DaskCluster(cluster)
        return
    address = str(cluster)
    count = _LOCAL.fullmatch(address)
    if count is not None and (count[1] is None or int(count[1])):
        with _start_local(None if count[1] is None else int(count[1])) as client:
            yield _DaskCluster(client)
        return
    _check_address(address, insecure=insecure)
    security = None
    if address.startswith("tls:"):
        given = {"tls_ca_file": ca, "tls_client_cert": cert, "tls_client_key": key}
        files = {name: str(path) for name, path in given.items() if path is not None}
        security = distributed.Security(require_encryption=True, **files)
        if not (security.tls_ca_file and security.tls_client_cert):
            raise ClusterError(
                f"cluster: {address} cannot be reached without certificates: give `ca`, `cert` and `key`, or set "
                "Dask's distributed.comm.tls"
            )
    try:
        client = distributed.Client(address, security=security, set_as_default=False)
    except (OSError, ValueError) as error:  # certificates that cannot be read are among them
        raise ClusterError(f"cluster: {address} cannot be reached: {_describe(error)}") from error
    with client:
        yield _DaskCluster(client)


@contextmanager
def _start_local(count: int | None) -> Iterator[Any]:
    """Start workers on this machine, encrypted with keys of their own: others on it cannot speak to them."""
    distributed = _load_dask()
    with (
        distributed.LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            security=True,
            dashboard_address="127.0.0.1:0",
        ) as workers,
        distributed.Client(workers, set_as_default=False) as client,
    ):
        yield client


def _load_dask() -> Any:
    """Import dask.distributed, whose functions have no types."""
    try:
        return importlib.import_module("distributed")
    except ModuleNotFoundError:
        raise ModuleNotFoundError('cluster: it needs Dask: pip install "nearveil[cluster]"') from None


def _check_address(address: str, *, insecure: bool) -> None:
    try:
        parsed = urlsplit(address)
        good = parsed.scheme in {"tcp", "tls"} and parsed.hostname is not None and parsed.port is not None
    except ValueError:
        good = False
    if not good:
        raise ValueError("cluster must be local, local:N, tls://host:port, tcp://host:port or a client of Dask")
    if parsed.scheme == "tcp" and not insecure and not _is_loopback(str(parsed.hostname)):
        raise ValueError(
            "cluster: tcp:// to another machine is not encrypted: whoever is on the way sees the rows and can run "
            "programs there. Use tls://, or say `insecure`"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def cut_table(rows: NDArray[Any], size: int | None = None) -> list[NDArray[Any]]:
    """Return the partitions of rows as views."""
    return [rows[some] for some in cut_rows(len(rows), size)]
