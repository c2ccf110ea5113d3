"""Run a stage over partitions: in this process, or on the workers of a Dask cluster.

A stage is a pure function of one partition and of shared values. Results are returned in the order of the partitions.
Partitions depend on the number of rows alone, never on the number of workers, so results do not depend on the cluster.
"""

import importlib
import ipaddress
import logging
import math
import re
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.lazy import require_extra

ROWS = 1 << 16  # of a partition
_ATTEMPTS = 4  # at a partition, if its inputs were lost with a worker or a scheduler
_WORKER_TIMEOUT = 60.0  # seconds to wait for a worker
_POLL_INTERVAL = 2.0  # seconds between two polls for workers
_REPLY_TIMEOUT = 10.0  # seconds to wait for a scheduler's reply
_TRANSFER_TIMEOUT = 600.0  # seconds to send or fetch a value
_SMALL_VALUE = 1 << 16  # bytes
_DASK_CONFIG = {"distributed.admin.large-graph-warning-threshold": 1 << 30}  # bytes: calls may carry a partition
_TASKS_PER_THREAD = 2  # partitions in flight for each thread of a worker
_RUNS_PER_THREAD = 4  # least number of runs of partitions for each thread; a worker merges the results of a run

_USER_ERRORS = (NearveilError, ValueError, OSError)  # errors that a user can fix
_EMPTY: Mapping[Any, Any] = MappingProxyType({})
_LOG = logging.getLogger(__name__)

Tick: TypeAlias = Callable[[int], object]
Merge: TypeAlias = Callable[[Any, Any], Any]
Result = TypeVar("Result")


class ClusterError(NearveilError, ConnectionError):
    """The cluster cannot be reached, or was lost; nothing was changed."""


class PartitionError(NearveilError, ValueError):
    """A stage failed on one partition, which the message names; nothing was changed."""


class StoredPart(ABC):
    """A partition that a stage loads when it needs it, and drops afterwards."""

    @abstractmethod
    def load(self) -> Any:
        """Load the partition."""


def cut_rows(n_rows: int, rows: int | None = None) -> list[slice]:
    """Return the partitions of a table, with `rows` rows each (default `ROWS`)."""
    step = ROWS if rows is None else rows
    return [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


class ThreadLimit:
    """Limits threads while any caller is active; independent limits would restore each other's.

    `start` sets the limit and returns a function that restores the earlier one.
    """

    def __init__(self, start: Callable[[], Callable[[], object]]) -> None:
        self._lock, self._users, self._start = threading.Lock(), 0, start
        self._restore: Callable[[], object] = start

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._restore = self._start()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()


def _limit_blas() -> Callable[[], object]:
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, user_api="blas").restore_original_limits  # type: ignore[no-any-return]


use_one_thread = ThreadLimit(_limit_blas).hold  # the last bits of matrix products depend on the number of threads


class Cluster:
    """Run stages in this process, one partition after the other; :func:`connect` returns those that use workers."""

    is_local = True  # whether all workers are processes of this machine and user

    @property
    def dashboard(self) -> str | None:
        """The URL of Dask's dashboard; None without workers."""
        return None

    def place(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Send partitions to the workers, for several stages; local workers load a :class:`StoredPart` themselves."""
        return parts

    def share(self, value: Any) -> Any:
        """Send a value to every worker, for several stages; return a handle for :meth:`map`."""
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
        """Apply a pure importable function to every partition, yield the results in order, and tick 1 after each."""
        # Partitions must be small, or sent with :meth:`place`. A failure raises a PartitionError and starts no other.
        work = _Stage(stage, function, parts, shared, _name_parts(parts) if names is None else names)
        for name, outcome in zip(work.names, self._run_parts(work), strict=True):
            yield _unwrap(outcome, stage, name)
            if tick is not None:
                tick(1)

    def reduce(
        self,
        function: Callable[..., Result],
        merge: Callable[[Result, Result], Result],
        parts: Sequence[Any],
        *shared: Any,
        stage: str,
        finish: Callable[[Result], Any] | None = None,
        tick: Tick | None = None,
    ) -> Any:
        """Apply a pure function to every partition, at least one; merge adjacent results, the earlier first."""
        # The tree depends on the number of partitions alone. With `finish`, workers only return its result.
        work = _Stage(stage, function, parts, shared, _name_parts(parts))
        outcome = self._merge_parts(work, merge, finish or _identity, tick or (lambda _: None))
        return _unwrap(outcome, stage, outcome.name)

    def _run_parts(self, work: "_Stage") -> "Iterator[_Outcome]":
        return (_run(work.function, part, *work.shared) for part in work.parts)

    def _merge_parts(self, work: "_Stage", merge: Merge, finish: Callable[[Any], Any], tick: Tick) -> "_Outcome":
        values = self.map(work.function, work.parts, *work.shared, stage=work.stage, tick=tick)
        return _Outcome(finish(_fold(values, merge)))


LOCAL = Cluster()
"""This process."""


@dataclass(frozen=True)
class _Stage:
    """A function to apply to partitions."""

    stage: str  # its name in errors
    function: Callable[..., Any]
    parts: Sequence[Any]
    shared: Sequence[Any]
    names: Sequence[str]  # of the partitions


@dataclass(frozen=True)
class _Outcome:
    """The result of a function, or its error and the name of the partition."""

    # Workers return errors: Dask would write the arguments of a function that raises, which may be rows, to their logs.

    value: Any = None
    error: Exception | None = None
    name: str = ""

    def __sizeof__(self) -> int:
        """Include the value: Dask schedules transfers by size."""
        return object.__sizeof__(self) + int(importlib.import_module("dask.sizeof").sizeof(self.value))


def _run(function: Callable[..., Any], part: Any, *shared: Any, inputs: Mapping[Any, Any] = _EMPTY) -> _Outcome:
    try:
        return _Outcome(function(_load(part, inputs), *shared))
    except Exception as error:
        return _Outcome(error=error)


def _load(part: Any, inputs: Mapping[Any, Any] = _EMPTY) -> Any:
    """Load a partition; `inputs` are the values of Dask keys that its blocks depend on."""
    if isinstance(part, tuple) and any(isinstance(item, StoredPart) for item in part):
        return tuple(_load(item, inputs) for item in part)
    if isinstance(part, _Block):
        return part.load(inputs)
    return part.load() if isinstance(part, StoredPart) else part


def _fold(values: Iterable[Result], merge: Callable[[Result, Result], Result]) -> Result:
    """Merge adjacent values in pairs, then pairs of pairs, and so on; few values are in memory at once."""
    waiting: list[tuple[int, Result]] = []  # level in the tree, and value
    for value in values:
        level = 0
        while waiting and waiting[-1][0] == level:
            level, value = level + 1, merge(waiting.pop()[1], value)  # noqa: PLW2901
        waiting.append((level, value))
    _, last = waiting.pop()
    while waiting:
        last = merge(waiting.pop()[1], last)
    return last


def _run_on_worker(
    names: Sequence[str],
    function: Callable[..., Any],
    merge: Merge,
    parts: Sequence[Any],
    *shared: Any,
    inputs: Mapping[Any, Any] = _EMPTY,
) -> _Outcome:
    """Apply a function to consecutive partitions and merge the results."""
    outcomes = (
        _make_portable(_run(function, part, *shared, inputs=inputs), name)
        for name, part in zip(names, parts, strict=True)
    )
    return _fold(outcomes, partial(_merge_on_worker, merge))


def _merge_on_worker(merge: Callable[..., Any], *outcomes: _Outcome) -> _Outcome:
    """Apply a function to results; return the first error if there is one."""
    failed = next((outcome for outcome in outcomes if outcome.error is not None), None)
    return failed or _make_portable(_run(merge, *(outcome.value for outcome in outcomes)), "")


def _make_portable(outcome: _Outcome, name: str) -> _Outcome:
    """Name the partition of an error, and convert it to ValueError, which every process can unpickle."""
    return outcome if outcome.error is None else _Outcome(error=ValueError(_describe(outcome.error)), name=name)


def _describe(error: Exception) -> str:
    """Return the message of an error, with the type unless a user can fix it."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return text if isinstance(error, _USER_ERRORS) else f"{type(error).__name__}: {text}"


def _unwrap(outcome: _Outcome, stage: str, name: str) -> Any:
    """Return the value or raise the error; errors that a user can fix name the partition."""
    if outcome.error is None:
        return outcome.value
    if not name or not isinstance(outcome.error, _USER_ERRORS):
        raise outcome.error
    raise PartitionError(f"{stage}, {name}: {_describe(outcome.error)}") from outcome.error


def _name_parts(parts: Sequence[Any]) -> Sequence[str]:
    return [""] if len(parts) == 1 else [f"partition {number} of {len(parts)}" for number in range(1, len(parts) + 1)]


class _RemoteValue:
    """A value of this process (or one that it loads) that is sent to workers, and again if they lose it."""

    def __init__(self, value: Any, *, everywhere: bool = False, near: str | None = None) -> None:
        self.value, self._everywhere, self._near = value, everywhere, near
        self._future: Any = None

    def find(self, client: Any) -> Any:
        """Return the future of the value; send it if there is no valid one."""
        if self._future is None or self._future.status in {"cancelled", "error"}:
            self._future = self._send(client)
        return self._future

    def _send(self, client: Any) -> Any:
        near = self._near if self._near in _list_workers(client) else None
        options = {"workers": near, "broadcast": self._everywhere, "hash": False}
        # `scatter` returns one future for each item of a list.
        (future,) = client.sync(client.scatter, [_load(self.value)], callback_timeout=_TRANSFER_TIMEOUT, **options)
        return future

    def drop(self) -> None:
        """Forget the future and the worker."""
        self._future = self._near = None


class _Block(StoredPart):
    """A block of a Dask array that a stage computes when it needs it, and drops afterwards."""

    def __init__(self, key: Any, graph: dict[Any, Any]) -> None:
        cull = importlib.import_module("dask.optimization").cull
        self._key, self._graph = key, dict(cull(graph, [key])[0]) if key in graph else {}

    def list_inputs(self) -> set[Any]:
        """Return the keys that it depends on and that workers hold."""
        return {self._key}.union(*(task.dependencies for task in self._graph.values())) - self._graph.keys()

    def load(self, inputs: Mapping[Any, Any] = _EMPTY) -> Any:
        constants = {key: (partial(_identity, value),) for key, value in inputs.items()}
        try:
            return importlib.import_module("dask").get({**self._graph, **constants}, self._key)
        except Exception as error:
            raise _BlockError(_describe_kind(error)) from None


class _RemoteBlock(_RemoteValue):
    """A block of a Dask array: workers keep a public one; each stage computes a private one where its inputs are."""

    def __init__(self, block: _Block, client: Any, *, private: bool) -> None:
        super().__init__(block)
        self.is_private = private
        self.inputs = {key: _load_dask().Future(key, client) for key in block.list_inputs()}

    def find(self, client: Any) -> Any:
        return self.value if self.is_private else super().find(client)

    def _send(self, client: Any) -> Any:
        return client.submit(_load, self.value, self.inputs, pure=False)


class _BlockError(ValueError):
    """A block could not be computed."""


def _describe_kind(error: BaseException) -> str:
    """Return the message for a block that failed: only the type of the error, because its text may quote a row."""
    return f"it cannot be computed ({type(error).__name__}); compute this block by itself to see why"


def _list_workers(client: Any) -> dict[str, int]:
    """Return the threads of each worker; empty if the scheduler does not reply."""
    try:
        return dict(client.sync(client.nthreads, callback_timeout=min(_REPLY_TIMEOUT, _WORKER_TIMEOUT)))
    except OSError:
        return {}


def _wait_for_workers(client: Any, stage: str) -> dict[str, int]:
    """Return the threads of each worker, as soon as there is one."""
    end = None
    while not (workers := _list_workers(client)):
        if end is None:
            end = time.monotonic() + _WORKER_TIMEOUT
            _LOG.warning("waiting for workers of the cluster while %s", stage)
        elif time.monotonic() > end:
            raise ClusterError(
                f"cluster: no worker answered for {_WORKER_TIMEOUT:g} s while {stage}: start scheduler and workers, "
                "and run it again; nothing was published"
            )
        time.sleep(_POLL_INTERVAL)
    return workers


class _DaskCluster(Cluster):
    """Runs stages on the workers of a client of dask.distributed."""

    def __init__(self, client: Any, *, is_local: bool = False) -> None:
        self._client, self.is_local = client, is_local

    @property
    def dashboard(self) -> str | None:
        link = self._client.dashboard_link
        return str(link) if link else None

    def place(self, parts: Sequence[Any]) -> Sequence[Any]:
        # Adjacent partitions share a worker, which merges their results.
        workers: list[str | None] = [*sorted(_list_workers(self._client))] or [None]
        return [
            part
            if self.is_local and isinstance(part, StoredPart)
            else _RemoteValue(part, near=workers[number * len(workers) // len(parts)])
            for number, part in enumerate(parts)
        ]

    def share(self, value: Any) -> Any:
        return _RemoteValue(value, everywhere=True)

    def _run_parts(self, work: _Stage) -> Iterator[_Outcome]:
        return self._start(work).run()

    def _merge_parts(self, work: _Stage, merge: Merge, finish: Callable[[Any], Any], tick: Tick) -> _Outcome:
        return self._start(work).merge(merge, finish, tick)

    def _start(self, work: _Stage) -> "_DaskStage":
        """Send large shared values to the workers once; small ones are sent with every partition."""
        size = importlib.import_module("dask.sizeof").sizeof
        shared = [
            value if isinstance(value, _RemoteValue) or size(value) < _SMALL_VALUE else self.share(value)
            for value in work.shared
        ]
        return _DaskStage(self._client, replace(work, shared=shared))


class _DaskStage:
    """A stage on workers: submits partitions, waits for them, and submits those again that lost workers had."""

    def __init__(self, client: Any, work: _Stage) -> None:
        self._client, self._work = client, work
        self._label = getattr(work.function, "__name__", "stage").strip("_")  # of tasks, on the dashboard
        self._pins = dict[Any, frozenset[str]]()  # workers that may compute a private block, by future
        self._ahead = dict[int, Any]()  # futures of the next partitions; the scheduler forgets those that are dropped
        self._ticked = set[int]()  # partitions whose run was counted

    def run(self) -> Iterator[_Outcome]:
        """Yield the outcome of each partition."""
        for number in range(len(self._work.parts)):
            yield self._retry(partial(self._run_part, number), [number])

    def merge(self, merge: Merge, finish: Callable[[Any], Any], tick: Tick) -> _Outcome:
        """Return the merged outcome of all partitions."""
        return self._retry(partial(self._run_tree, merge, finish, tick), range(len(self._work.parts)))

    def _retry(self, attempt: Callable[[], _Outcome], parts: Iterable[int]) -> _Outcome:
        """Try again if workers or the scheduler lost values of these partitions, or results."""
        dask = _load_dask()
        for number in range(_ATTEMPTS):
            try:
                return attempt()
            except ClusterError:
                raise
            except (dask.CancelledError, dask.TimeoutError, OSError) as error:
                lost = error
            self._ahead.clear()
            if number:  # the first retry already resends values that Dask reports as lost
                self._drop(parts)
        raise ClusterError(
            f"cluster: connection lost while {self._work.stage} ({type(lost).__name__}): start scheduler and workers, "
            "and run it again; nothing was published"
        ) from lost

    def _run_part(self, number: int) -> _Outcome:
        """Return the outcome of a partition, and keep a few of the next ones in flight."""
        ahead = max(1, _TASKS_PER_THREAD * self._count_threads())
        for later in range(number, min(number + ahead, len(self._work.parts))):
            if later not in self._ahead:
                self._ahead[later] = self._submit(slice(later, later + 1))
        self._watch(self._ahead[number])
        return self._fetch(self._ahead.pop(number), self._work.names[number])

    def _run_tree(self, merge: Merge, finish: Callable[[Any], Any], tick: Tick) -> _Outcome:
        """Submit runs of partitions and a tree of merges, and return the outcome of the whole."""
        leaves = {self._submit(run, merge): run for run in self._cut_runs()}
        row = list(leaves)
        while len(row) > 1:
            pairs = [
                self._client.submit(_merge_on_worker, merge, *row[start : start + 2], pure=False, priority=1)
                for start in range(0, len(row) - 1, 2)
            ]
            row = [*pairs, *row[2 * len(pairs) :]]
        root = self._client.submit(_merge_on_worker, finish, row[0], pure=False, priority=1)
        while leaves:
            self._watch(*leaves)
            for leaf in [leaf for leaf in leaves if leaf.done()]:
                run = leaves.pop(leaf)
                if leaf.status == "error":
                    raise self._make_failed_error(self._name_run(run), leaf.exception())
                done = set(range(run.start, run.stop)) - self._ticked
                self._ticked |= done
                tick(len(done))
        self._watch(root)
        return self._fetch(root, "merging")

    def _cut_runs(self) -> list[slice]:
        """Cut the partitions into runs, each for one worker; private blocks, on different workers, are runs of one."""
        # The length of a run is a power of two, so the tree is the same for any number of workers.
        count, n_runs = len(self._work.parts), _RUNS_PER_THREAD * max(1, self._count_threads())
        is_private = any(map(_list_inputs, self._work.parts))
        length = 1 if is_private else 1 << max(0, (count // n_runs).bit_length() - 1)
        return cut_rows(count, length)

    def _submit(self, run: slice, merge: Merge | None = None) -> Any:
        """Submit a run of partitions; private blocks stay on the workers that have all of their inputs."""
        work = self._work
        _wait_for_workers(self._client, work.stage)
        options: dict[str, Any] = {"key": f"{self._label}-{uuid.uuid4().hex}", "pure": False}
        inputs = {key: future for part in work.parts[run] for key, future in _list_inputs(part).items()}
        if inputs:
            pinned = self._find_holders(list(inputs.values()), self._name_run(run))
            options |= {"inputs": inputs, "workers": sorted(pinned), "allow_other_workers": False}
            self._pins[options["key"]] = pinned
        call = (work.names[run], work.function, merge, list(work.parts[run]), *work.shared)
        with importlib.import_module("dask").config.set(_DASK_CONFIG):
            return self._client.submit(_run_on_worker, *map(self._resolve, call), **options)

    def _find_holders(self, inputs: Sequence[Any], name: str) -> frozenset[str]:
        """Return the workers that have all inputs: private rows must not leave them."""
        for future in inputs:
            self._watch(future)
            if future.status == "error":
                raise self._make_failed_error(name, future.exception())
            if future.cancelled():
                raise PartitionError(f"{self._locate(name)}: the worker that held its rows is gone: load them again")
        holders = self._client.sync(self._client.who_has, inputs, callback_timeout=_REPLY_TIMEOUT).values()
        if not all(holders):
            raise TimeoutError("workers that held rows are gone")
        common = frozenset[str].intersection(*map(frozenset, holders))
        if not common:
            raise PartitionError(
                f"{self._locate(name)}: its pieces are on several workers, and private rows must stay on theirs: move "
                "each block to one worker first, with `rechunk` and `persist`"
            )
        return common

    def _resolve(self, value: Any) -> Any:
        """Replace remote values by their futures."""
        if isinstance(value, list):
            return [self._resolve(item) for item in value]
        if isinstance(value, tuple) and any(isinstance(item, _RemoteValue) for item in value):
            return tuple(map(self._resolve, value))
        return value.find(self._client) if isinstance(value, _RemoteValue) else value

    def _watch(self, *futures: Any) -> None:
        """Wait until one of the futures is done, as long as there are workers."""
        while not any(future.done() for future in futures):
            with suppress(TimeoutError), self._client.as_current():
                _load_dask().wait(futures, timeout=_POLL_INTERVAL, return_when="FIRST_COMPLETED")
                return
            workers = _wait_for_workers(self._client, self._work.stage).keys()
            if any(workers.isdisjoint(self._pins.get(future.key, workers)) for future in futures):
                raise TimeoutError("workers that held rows are gone")

    def _fetch(self, future: Any, name: str) -> _Outcome:
        """Return the outcome of a future that is done; errors of blocks are reported without their text."""
        try:
            outcome: _Outcome = future.result(timeout=_TRANSFER_TIMEOUT)
        except Exception as error:
            if future.status != "error":
                raise
            self._drop(range(len(self._work.parts)))  # another stage computes blocks in flight again
            raise self._make_failed_error(name, error) from None
        return outcome

    def _drop(self, parts: Iterable[int]) -> None:
        """Forget the futures of shared values and of partitions."""
        chosen = [self._work.parts[number] for number in parts]
        for value in (
            *self._work.shared,
            *chosen,
            *(item for part in chosen if isinstance(part, tuple) for item in part),
        ):
            if isinstance(value, _RemoteValue):
                value.drop()

    def _count_threads(self) -> int:
        return sum(_list_workers(self._client).values())

    def _name_run(self, run: slice) -> str:
        if len(self._work.names[run]) == 1:
            return str(self._work.names[run.start])
        return f"partitions {run.start + 1} to {run.stop} of {len(self._work.parts)}"

    def _make_failed_error(self, name: str, error: BaseException) -> PartitionError:
        if isinstance(error, _load_dask().KilledWorker):
            reason = "every worker that had it died; check their memory and logs"
        else:
            reason = str(error) if isinstance(error, _BlockError) else _describe_kind(error)
        return PartitionError(f"{self._locate(name)}: {reason}")

    def _locate(self, name: str) -> str:
        return f"{self._work.stage}, {name}" if name else self._work.stage


def _list_inputs(part: Any) -> dict[Any, Any]:
    """Return the futures that private blocks of a partition depend on, by key."""
    blocks = [item for item in (part if isinstance(part, tuple) else (part,)) if isinstance(item, _RemoteBlock)]
    return {key: future for block in blocks if block.is_private for key, future in block.inputs.items()}


@dataclass(frozen=True)
class SpreadRows:
    """Rows in partitions, on workers or in this process."""

    cluster: Cluster
    parts: Sequence[Any]  # arguments of `cluster.map`
    cuts: Sequence[slice]  # the rows of each
    shape: tuple[int, int]
    dtype: Any
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = ()  # functions applied to the rows before a stage

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def of(cls, array: Any, name: str = "X", *, private: bool = False) -> "SpreadRows":
        """Use the blocks of a Dask array, on the default client's workers; each stage recomputes private ones there."""
        if array.ndim != 2 or not array.shape[1] > 0:
            raise ValueError(f"{name} must be a 2-D array (rows, features) with at least one feature")
        sizes = array.chunks[0]
        if any(map(math.isnan, sizes)):
            raise ValueError(f"{name} is a Dask array with unknown chunk sizes: call its compute_chunk_sizes() first")
        lazy = array.rechunk({1: -1}).to_delayed()[:, 0].tolist()
        graph = dict(lazy[0].dask) if lazy else {}
        blocks = [_Block(delayed.key, graph) for delayed in lazy]
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        cuts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        try:
            client = _load_dask().default_client()
        except (ValueError, ModuleNotFoundError):  # no workers
            return cls(LOCAL, blocks, cuts, array.shape, array.dtype)
        if private:
            _check_encrypted(client)
        parts = [_RemoteBlock(block, client, private=private) for block in blocks]
        return cls(_DaskCluster(client), parts, cuts, array.shape, array.dtype)

    @classmethod
    def cut(cls, rows: NDArray[Any], cluster: Cluster = LOCAL) -> "SpreadRows":
        """Split rows of this process into partitions, and send them to the workers."""
        return cls(cluster, cluster.place(cut_table(rows)), cut_rows(len(rows)), rows.shape, rows.dtype)

    def then(self, function: Callable[..., Any], *shared: Any, width: int | None = None) -> "SpreadRows":
        """Apply a function to the rows at the start of each stage; it returns float32 rows with `width` columns."""
        shape = (self.shape[0], self.shape[1] if width is None else width)
        return replace(self, steps=(*self.steps, (function, shared)), shape=shape, dtype=np.dtype(np.float32))

    def map(
        self, function: Callable[..., Result], *shared: Any, stage: str, tick: Tick | None = None
    ) -> Iterator[Result]:
        """Apply a function to every partition, as :meth:`Cluster.map`."""
        return self.cluster.map(_apply, self.parts, self.steps, function, *shared, stage=stage, tick=tick)

    def reduce(
        self,
        function: Callable[..., Result],
        merge: Callable[[Result, Result], Result],
        *shared: Any,
        stage: str,
        finish: Callable[[Result], Any] | None = None,
        tick: Tick | None = None,
    ) -> Any:
        """Apply a function to every partition and the position of its first row, as :meth:`Cluster.reduce`."""
        parts = [(part, rows.start) for part, rows in zip(self.parts, self.cuts, strict=True)]
        arguments = (self.steps, function, *shared)
        return self.cluster.reduce(_apply_at, merge, parts, *arguments, stage=stage, finish=finish, tick=tick)

    def take(self, positions: NDArray[np.integer], stage: str) -> NDArray[Any]:
        """Return the rows at these positions, in their order."""
        order = np.argsort(positions, kind="stable")
        ascending = np.asarray(positions)[order]
        bounds = [np.searchsorted(ascending, [rows.start, rows.stop]).tolist() for rows in self.cuts]
        numbers = [number for number, (start, stop) in enumerate(bounds) if start < stop]
        inside = {number: ascending[slice(*bounds[number])] - self.cuts[number].start for number in numbers}
        parts = [(self.parts[number], rows) for number, rows in inside.items()]
        result = np.empty((len(ascending), self.shape[1]), self.dtype)
        for number, rows in zip(numbers, self.cluster.map(_take, parts, self.steps, stage=stage), strict=True):
            result[order[slice(*bounds[number])]] = rows
        return result

    def gather(self, stage: str) -> NDArray[Any]:
        """Return all rows."""
        return np.concatenate([np.empty((0, self.shape[1]), self.dtype), *self.map(_identity, stage=stage)])


def _apply(rows: Any, steps: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], function: Any, *shared: Any) -> Any:
    for step, arguments in steps:
        rows = step(rows, *arguments)
    return function(rows, *shared)


def _apply_at(part: tuple[Any, int], steps: Any, function: Any, *shared: Any) -> Any:
    rows, start = part
    return _apply(rows, steps, function, start, *shared)


def _take(part: tuple[Any, NDArray[Any]], steps: Any) -> Any:
    rows, positions = part
    return _apply(rows[positions], steps, _identity)


def _identity(rows: Any) -> Any:
    return rows


def is_dask_array(value: Any) -> bool:
    """Return whether a value is a Dask array, without importing Dask."""
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
    """Connect to "local", "local:N", "tls://host:port", "tcp://...", a Dask client or a Cluster; None: this process."""
    # A client or Cluster is used and left open. `ca`, `cert` and `key` are PEM files for tls://, by default those of
    # Dask's configuration. `insecure` allows tcp:// to another machine: anyone on the path can read the rows and run
    # programs.
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
        options: dict[str, Any] = {"threads_per_worker": 1, "processes": True, "dashboard_address": "127.0.0.1:0"}
        with (  # TLS with temporary keys: other users of this machine cannot connect
            distributed.LocalCluster(n_workers=count[1] and int(count[1]), security=True, **options) as workers,
            distributed.Client(workers, set_as_default=False) as client,
        ):
            yield _DaskCluster(client, is_local=True)
        return
    _check_address(address, insecure=insecure)
    security = None
    if address.startswith("tls:"):
        paths = {"tls_ca_file": ca, "tls_client_cert": cert, "tls_client_key": key}
        files = {name: str(path) for name, path in paths.items() if path is not None}
        security = distributed.Security(require_encryption=True, **files)
        if not (security.tls_ca_file and security.tls_client_cert):
            raise ClusterError(
                f"cluster: {address} cannot be reached without certificates: give `ca`, `cert` and `key`, or set "
                "Dask's distributed.comm.tls"
            )
    try:
        client = distributed.Client(address, security=security, set_as_default=False)
    except (OSError, ValueError) as error:  # includes unreadable certificates
        raise ClusterError(f"cluster: {address} cannot be reached: {_describe(error)}") from error
    with client:
        yield _DaskCluster(client)


def _load_dask() -> Any:
    """Import dask.distributed, which has no type hints."""
    with require_extra("cluster"):
        return importlib.import_module("distributed")


def _check_address(address: str, *, insecure: bool) -> None:
    try:
        parsed = urlsplit(address)
        valid = parsed.scheme in {"tcp", "tls"} and parsed.hostname is not None and parsed.port is not None
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("cluster must be local, local:N, tls://host:port, tcp://host:port or a client of Dask")
    if parsed.scheme == "tcp" and not insecure and not is_loopback(str(parsed.hostname)):
        raise ValueError(
            "cluster: tcp:// to another machine is not encrypted: anyone on the network path can read the rows and run "
            "programs. Use tls://, or set `insecure`"
        )


def _check_encrypted(client: Any) -> None:
    """Raise if private rows, or results from them, would be sent unencrypted."""
    for address in (client.scheduler.address, *_list_workers(client)):
        parsed = urlsplit(address)
        if parsed.scheme not in {"tls", "inproc"} and not is_loopback(str(parsed.hostname)):
            raise ValueError(
                f"cluster: {parsed.scheme}:// to another machine is not encrypted, and these rows are private: start "
                "scheduler and workers with TLS"
            )


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def cut_table(rows: NDArray[Any], size: int | None = None) -> list[NDArray[Any]]:
    """Return the partitions of rows as views."""
    return [rows[cut] for cut in cut_rows(len(rows), size)]
