"""Run a stage over partitions: in this process, or on the workers of a Dask cluster.

A stage is a pure function of one partition and of what all partitions share. What it returns comes back in the order
of the partitions, whoever computed it. Partitions are cut by the number of rows alone, never by the number of workers:
that is why results do not depend on where they were computed.
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
from collections import deque
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
from threadpoolctl import threadpool_limits

from nearveil.errors import NearveilError

ROWS = 1 << 16  # of a partition
_ATTEMPTS = 4  # at a partition, where what it needs was lost with a worker or a scheduler
_PATIENCE = 60.0  # seconds to wait for a worker
_LOOK = 2.0  # seconds between two looks whether there are workers
_ANSWER = 10.0  # seconds to wait for a scheduler's answer
_TRANSFER = 600.0  # seconds to wait until a value is sent or fetched
_SMALL = 1 << 16  # bytes
_WARNED = {"distributed.admin.large-graph-warning-threshold": 1 << 30}  # bytes: a partition may travel with its call
_AHEAD = 2  # partitions for each thread of a worker that are under way at once
_RUNS = 4  # of partitions for each thread of a worker, at least, whose results are merged before they travel

_MENDED = (NearveilError, ValueError, OSError)  # errors that a user can mend
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_LOG = logging.getLogger(__name__)

Tick: TypeAlias = Callable[[int], object]
Part = TypeVar("Part")
Result = TypeVar("Result")


class ClusterError(NearveilError, ConnectionError):
    """The cluster cannot be reached, or was lost; nothing was changed."""


class PartitionError(NearveilError, ValueError):
    """A stage failed on one partition, which the message names; nothing was changed."""


class StoredPart(ABC):
    """A partition that is read where a stage needs it: nobody holds it before or after."""

    @abstractmethod
    def load(self) -> Any:
        """Read it."""


def cut_rows(n_rows: int, rows: int | None = None) -> list[slice]:
    """Return the partitions of a table, `rows` in each (default `ROWS`): they depend on the number of rows alone.

    Examples
    --------
    >>> cut_rows(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = ROWS if rows is None else rows
    return [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


class _ThreadLimit:
    """Limits BLAS to one thread as long as anybody wants it: each by himself would restore the limits of others."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._limits: Any = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._limits = threadpool_limits(1, user_api="blas")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._limits.restore_original_limits()


use_one_thread = _ThreadLimit().hold  # products of matrices depend on the number of threads in their last bits


class Cluster:
    """Runs stages in this process, one partition after the other; :func:`connect` makes those that run them on workers.

    Examples
    --------
    >>> list(Cluster().map(len, ["a", "bcd"], stage="counting letters"))
    [1, 3]
    """

    is_here = True  # whether workers, if there are any, are processes of this machine and user

    @property
    def dashboard(self) -> str | None:
        """The address of the page that shows what workers do; None without workers."""
        return None

    def place(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Bring partitions to the workers, for several stages; local workers read a :class:`StoredPart` themselves."""
        return parts

    def share(self, value: Any) -> Any:
        """Bring to every worker what all partitions of several stages need; return what :meth:`map` takes for it."""
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

        Workers must be able to import the function. Partitions are small, or placed by :meth:`place`. Where the
        function fails on one, a PartitionError is raised and no further one is begun. `tick` gets 1 for each that is
        done.
        """
        called = _name_parts(parts, names)
        for part, name in zip(parts, called, strict=True):
            outcome = _run(function, part, *shared)
            yield _read_outcome(outcome, stage, name)
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
        """Apply a pure function to every partition, at least one, and merge what it returns in pairs.

        Neighbours are merged first, the earlier as first argument, in a tree that the number of partitions fixes. With
        `finish`, only what it returns leaves the workers.

        Examples
        --------
        >>> Cluster().reduce(abs, max, [-4, 3, 2], stage="looking for the largest")
        4
        """
        found = _fold(self.map(function, parts, *shared, stage=stage, tick=tick), merge)
        return found if finish is None else finish(found)


LOCAL = Cluster()
"""This process."""


@dataclass(frozen=True)
class _Outcome:
    """What a function returned, or what was wrong, and with which partition where that would be lost."""

    value: Any = None
    error: Exception | None = None
    name: str = ""

    def __sizeof__(self) -> int:
        """Return the bytes of the value too: Dask asks, and chooses by it what travels where."""
        return object.__sizeof__(self) + int(importlib.import_module("dask.sizeof").sizeof(self.value))


def _run(function: Callable[..., Any], part: Any, *shared: Any, held: Mapping[Any, Any] = _NOTHING) -> _Outcome:
    try:
        return _Outcome(function(_read(part, held), *shared))
    except Exception as error:
        return _Outcome(error=error)


def _read(part: Any, held: Mapping[Any, Any] = _NOTHING) -> Any:
    """Read a partition; `held`: what workers hold of blocks of Dask arrays."""
    if isinstance(part, tuple):
        return tuple(_read(one, held) for one in part) if any(isinstance(one, StoredPart) for one in part) else part
    if isinstance(part, _Block):
        return part.load(held)
    return part.load() if isinstance(part, StoredPart) else part


def _run_on_worker(
    name: str, function: Callable[..., Any], part: Any, *shared: Any, held: Mapping[Any, Any] = _NOTHING
) -> _Outcome:
    """Run a function where errors must travel: as plain ones, which every process can read."""
    outcome = _run(function, part, *shared, held=held)
    return outcome if outcome.error is None else _Outcome(error=ValueError(_describe(outcome.error)), name=name)


def _fold(values: Iterable[Result], merge: Callable[[Result, Result], Result]) -> Result:
    """Merge neighbours in pairs, then pairs, and so on; a few are held at once."""
    waiting: list[tuple[int, Result]] = []  # of ever fewer values: how often each was merged, and what it is
    for value in values:
        level = 0
        while waiting and waiting[-1][0] == level:
            level, value = level + 1, merge(waiting.pop()[1], value)  # noqa: PLW2901
        waiting.append((level, value))
    _, last = waiting.pop()
    while waiting:
        last = merge(waiting.pop()[1], last)
    return last


class _FailedError(Exception):
    """A partition failed, with this outcome."""


def _fold_on_worker(
    names: Sequence[str],
    function: Callable[..., Any],
    merge: Callable[[Any, Any], Any],
    parts: Sequence[Any],
    *shared: Any,
    held: Mapping[Any, Any] = _NOTHING,
) -> _Outcome:
    """Merge what a function returns for partitions that follow each other."""

    def compute() -> Iterator[Any]:
        for name, part in zip(names, parts, strict=True):
            outcome = _run_on_worker(name, function, part, *shared, held=held)
            if outcome.error is not None:
                raise _FailedError(outcome)
            yield outcome.value

    try:
        return _Outcome(_fold(compute(), merge))
    except _FailedError as error:
        failed: _Outcome = error.args[0]
        return failed


def _merge_on_worker(merge: Callable[[Any, Any], Any], first: _Outcome, second: _Outcome) -> _Outcome:
    wrong = first if first.error is not None else second if second.error is not None else None
    return _run_on_worker("", lambda _: merge(first.value, second.value), None) if wrong is None else wrong


def _finish_on_worker(finish: Callable[[Any], Any], found: _Outcome) -> _Outcome:
    return found if found.error is not None else _run_on_worker("", finish, found.value)


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
    """A value at this process, or that is read by it, and until it is lost at workers."""

    def __init__(self, value: Any, *, everywhere: bool, near: str | None = None) -> None:
        self.value, self._everywhere, self._near = value, everywhere, near
        self._future: Any = None

    def find(self, client: Any) -> Any:
        """Return the future of the value; sent (again) where there is none that is good."""
        if self._future is None or self._future.status in {"cancelled", "error"}:
            self._future = self._send(client)
        return self._future

    def _send(self, client: Any) -> Any:
        near = self._near if self._near in _list_workers(client) else None
        options = {"workers": near, "broadcast": self._everywhere, "hash": False}
        # In a list: an array by itself is one value, a list of one is, too, and comes back as a list.
        (future,) = client.sync(client.scatter, [_read(self.value)], callback_timeout=_TRANSFER, **options)
        return future

    def drop(self) -> None:
        """Forget what was sent, and where to."""
        self._future = self._near = None


class _Block(StoredPart):
    """A block of a Dask array, computed within a stage: nobody holds it before or after."""

    def __init__(self, key: Any, graph: dict[Any, Any]) -> None:
        cull = importlib.import_module("dask.optimization").cull
        self._key, self._graph = key, dict(cull(graph, [key])[0]) if key in graph else {}

    def list_needed(self) -> set[Any]:
        """Return the keys of what it is made of and workers hold."""
        return {self._key}.union(*(task.dependencies for task in self._graph.values())) - self._graph.keys()

    def load(self, held: Mapping[Any, Any] = _NOTHING) -> Any:
        found = {key: (partial(_pass_on, value),) for key, value in held.items()}
        try:
            return importlib.import_module("dask").get({**self._graph, **found}, self._key)
        except Exception as error:
            raise _BlockError(_describe_kind(error)) from None


class _Lying(_Placed):
    """A block of a Dask array: computed by workers, and held by them for several stages."""

    def __init__(self, block: _Block, client: Any) -> None:
        super().__init__(block, everywhere=False)
        self.held = {key: _load_dask().Future(key, client) for key in block.list_needed()}

    def _send(self, client: Any) -> Any:
        return client.submit(_read, self.value, self.held, pure=False)


class _PrivateBlock(_Lying):
    """A block of private rows: computed within each stage, by a worker that has all of what it is made of."""

    def find(self, client: Any) -> Any:  # noqa: ARG002
        return self.value


class _BlockError(ValueError):
    """A block could not be computed."""


def _describe_kind(error: BaseException) -> str:
    """Return the message for a block that failed: the type of the error alone, since its text may quote a row."""
    return f"it cannot be computed ({type(error).__name__}); compute this block by itself to see why"


def _list_workers(client: Any) -> dict[str, int]:
    """Return the threads of each worker; nothing where the scheduler does not answer."""
    try:
        return dict(client.sync(client.nthreads, callback_timeout=min(_ANSWER, _PATIENCE)))
    except OSError:
        return {}


def _wait_for_workers(client: Any, stage: str) -> dict[str, int]:
    """Return the threads of each worker, as soon as there is one."""
    end = None
    while not (found := _list_workers(client)):
        if end is None:
            end = time.monotonic() + _PATIENCE
            _LOG.warning("waiting for workers of the cluster while %s", stage)
        elif time.monotonic() > end:
            raise ClusterError(
                f"cluster: no worker answered for {_PATIENCE:g} s while {stage}: start scheduler and workers, and "
                "run it again; nothing was published"
            )
        time.sleep(_LOOK)
    return found


class _DaskCluster(Cluster):
    """Runs stages on the workers of a client of dask.distributed."""

    def __init__(self, client: Any, *, is_here: bool = False) -> None:
        self._client, self.is_here = client, is_here

    @property
    def dashboard(self) -> str | None:
        link = self._client.dashboard_link
        return str(link) if link else None

    def place(self, parts: Sequence[Any]) -> Sequence[Any]:
        near = _spread_evenly(self._client, len(parts))
        return [
            part if self.is_here and isinstance(part, StoredPart) else _Placed(part, everywhere=False, near=place)
            for part, place in zip(parts, near, strict=True)
        ]

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
        tasks = _Tasks(self._client, function, parts, sent, called)
        number = 0
        for place, name in enumerate(called):
            while number < len(parts) and len(waiting) < max(1, _AHEAD * tasks.count_threads()):
                waiting.append(tasks.submit(number, stage))
                number += 1
            yield _read_outcome(tasks.wait(place, waiting.popleft(), stage, name), stage, name)
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
        called = _name_parts(parts, None)
        sent = [one if isinstance(one, _Placed) or _is_small(one) else self.share(one) for one in shared]
        tasks = _Tasks(self._client, function, parts, sent, called)
        outcome = tasks.reduce(merge, finish or _pass_on, stage, tick or (lambda _: None))
        return _read_outcome(outcome, stage, outcome.name)


def _spread_evenly(client: Any, count: int) -> list[str | None]:
    """Return a worker for each of the partitions: neighbours are at one, so that it can merge what they give."""
    addresses: list[str | None] = [*sorted(_list_workers(client))] or [None]
    return [addresses[number * len(addresses) // count] for number in range(count)]


def _is_small(value: Any) -> bool:
    """Return whether a value may travel with every partition."""
    return bool(importlib.import_module("dask.sizeof").sizeof(value) < _SMALL)


class _Tasks:
    """Partitions of one stage at a client: submitted, waited for, and submitted again where workers were lost."""

    def __init__(
        self,
        client: Any,
        function: Callable[..., Any],
        parts: Sequence[Any],
        shared: Sequence[Any],
        names: Sequence[str],
    ) -> None:
        self._client, self._function, self._parts, self._shared = client, function, parts, shared
        self._names = names
        self._token = f"{getattr(function, '__name__', 'stage').strip('_')}-{uuid.uuid4().hex}"
        self._submitted = 0
        self._pins = dict[Any, frozenset[str]]()  # futures of private blocks, and the workers that may compute them

    def count_threads(self) -> int:
        """Return how many partitions are computed at once."""
        return sum(_list_workers(self._client).values())

    def submit(self, number: int, stage: str) -> Any:
        """Send a partition to a worker, and what it needs."""
        name = self._names[number]
        return self._submit(slice(number, number + 1), stage, _run_on_worker, name, self._function, self._parts[number])

    def _submit(self, run: slice, stage: str, *call: Any) -> Any:
        """Send a call for some partitions to a worker, and what all need; again where that worker died meanwhile."""
        lost: OSError | None = None
        for _ in range(_ATTEMPTS):
            self._submitted += 1
            options = {"key": f"{self._token}-{run.start}-{self._submitted}", "pure": False}
            try:
                _wait_for_workers(self._client, stage)
                held = {key: one for part in self._parts[run] for key, one in _list_held(part).items()}
                if held:
                    pinned = self._find_holders(list(held.values()), stage, self._name_run(run))
                    options |= {"held": held, "workers": sorted(pinned), "allow_other_workers": False}
                with importlib.import_module("dask").config.set(_WARNED):
                    future = self._client.submit(*(self._find(one) for one in (*call, *self._shared)), **options)
            except ClusterError:
                raise
            except OSError as error:
                lost = error
            else:
                if held:
                    self._pins[future.key] = pinned
                return future
        assert lost is not None
        raise _make_lost_error(stage, lost) from lost

    def _find_holders(self, held: Sequence[Any], stage: str, name: str) -> frozenset[str]:
        """Return the workers that have all of these: private rows do not leave them."""
        for future in held:
            self._watch(stage, future)
            if future.status == "error":
                raise _make_failed_error(stage, name, future.exception())
            if future.cancelled():
                raise PartitionError(f"{_join(stage, name)}: the worker that held its rows is gone: load them again")
        places = self._client.sync(self._client.who_has, held, callback_timeout=_ANSWER).values()
        if not all(places):
            raise TimeoutError("workers that held rows are gone")
        found = frozenset[str].intersection(*map(frozenset, places))
        if not found:
            raise PartitionError(
                f"{_join(stage, name)}: its pieces lie on several workers, and private rows do not travel: "
                "bring each block to one worker first, with `rechunk` and `persist`"
            )
        return found

    def _find(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._find(one) for one in value]
        if isinstance(value, tuple) and any(isinstance(one, _Placed) for one in value):
            return tuple(map(self._find, value))
        return value.find(self._client) if isinstance(value, _Placed) else value

    def _watch(self, stage: str, *futures: Any) -> None:
        """Wait until one of them is done, as long as there are workers."""
        while not any(future.done() for future in futures):
            with suppress(TimeoutError), self._client.as_current():
                _load_dask().wait(futures, timeout=_LOOK, return_when="FIRST_COMPLETED")
                return
            there = _wait_for_workers(self._client, stage).keys()
            if any(there.isdisjoint(self._pins.get(future.key, there)) for future in futures):
                raise TimeoutError("workers that held rows are gone")

    def _fetch(self, future: Any, stage: str, name: str) -> _Outcome:
        """Return what a future that is done has; an error of a block is told without its text."""
        try:
            found: _Outcome = future.result(timeout=_TRANSFER)
        except Exception as error:
            if future.status != "error":
                raise
            self._drop_all()  # blocks that are under way may fail, too: another stage computes them anew
            raise _make_failed_error(stage, name, error) from None
        return found

    def reduce(
        self, merge: Callable[[Any, Any], Any], finish: Callable[[Any], Any], stage: str, tick: Tick
    ) -> _Outcome:
        """Return the merged outcome of all partitions; all of it is done again where the cluster was lost."""
        dask = _load_dask()
        for attempt in range(_ATTEMPTS):
            try:
                leaves, root = self._submit_tree(merge, finish, stage)
                while leaves:
                    self._watch(stage, *leaves)
                    done = {leaf: run for leaf, run in leaves.items() if leaf.done()}
                    leaves = {leaf: run for leaf, run in leaves.items() if leaf not in done}  # others are forgotten
                    for leaf, run in done.items():
                        if leaf.status == "error":
                            raise _make_failed_error(stage, self._name_run(run), leaf.exception())
                    if not attempt:
                        tick(sum(run.stop - run.start for run in done.values()))
                self._watch(stage, root)
                return self._fetch(root, stage, "merging")
            except ClusterError:
                raise
            except (dask.CancelledError, dask.TimeoutError, OSError) as error:
                lost = error
            self._drop_all()
        raise _make_lost_error(stage, lost) from lost

    def _drop(self, number: int) -> None:
        """Forget that what a partition needs was sent."""
        part = self._parts[number]
        for placed in (*(part if isinstance(part, tuple) else (part,)), *self._shared):
            if isinstance(placed, _Placed):
                placed.drop()

    def _drop_all(self) -> None:
        for number in range(len(self._parts)):
            self._drop(number)

    def _name_run(self, run: slice) -> str:
        several = f"partitions {run.start + 1} to {run.stop} of {len(self._parts)}"
        return several if run.stop - run.start > 1 else self._names[run.start]

    def _submit_tree(
        self, merge: Callable[[Any, Any], Any], finish: Callable[[Any], Any], stage: str
    ) -> tuple[dict[Any, slice], Any]:
        """Send runs of partitions, and what merges them; return the futures of the runs and of the whole.

        One worker does a run. Its length is a power of two, so the tree is the same for any number of workers. Blocks
        that workers hold are runs of one: others may lie elsewhere.
        """
        wanted = _RUNS * max(1, self.count_threads())
        length = 1 if any(map(_list_held, self._parts)) else 1 << max(0, (len(self._parts) // wanted).bit_length() - 1)
        leaves = dict[Any, slice]()
        for run in cut_rows(len(self._parts), length):
            call = (_fold_on_worker, self._names[run], self._function, merge, list(self._parts[run]))
            leaves[self._submit(run, stage, *call)] = run
        row = list(leaves)
        while len(row) > 1:
            pairs = [
                self._client.submit(_merge_on_worker, merge, *row[start : start + 2], pure=False, priority=1)
                for start in range(0, len(row) - 1, 2)
            ]
            row = [*pairs, *row[2 * len(pairs) :]]
        return leaves, self._client.submit(_finish_on_worker, finish, row[0], pure=False, priority=1)

    def wait(self, number: int, future: Any, stage: str, name: str) -> _Outcome:
        """Return the outcome of a partition; whatever its workers had is sent again where it was lost."""
        dask = _load_dask()
        for attempt in range(_ATTEMPTS):
            try:
                self._watch(stage, future)
                return self._fetch(future, stage, name)
            except ClusterError:
                raise
            except (dask.CancelledError, dask.TimeoutError, OSError) as error:
                lost = error
            if attempt:  # what is known to be lost is sent again anyway
                self._drop(number)
            future = self.submit(number, stage)
        raise _make_lost_error(stage, lost) from lost


def _list_held(part: Any) -> dict[Any, Any]:
    """Return the futures of what workers hold of private blocks."""
    several = part if isinstance(part, tuple) else (part,)
    return {key: one for block in several if isinstance(block, _PrivateBlock) for key, one in block.held.items()}


def _join(stage: str, name: str) -> str:
    return f"{stage}, {name}" if name else stage


def _make_failed_error(stage: str, name: str, error: BaseException) -> PartitionError:
    if isinstance(error, _load_dask().KilledWorker):
        told = "every worker that had it died; look for their memory and their logs"
    else:
        told = str(error) if isinstance(error, _BlockError) else _describe_kind(error)
    return PartitionError(f"{_join(stage, name)}: {told}")


def _make_lost_error(stage: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"cluster: it was lost while {stage} ({type(error).__name__}): start scheduler and workers, and run it again; "
        "nothing was published"
    )


@dataclass(frozen=True)
class SpreadRows:
    """Rows in partitions, processed where they lie: on workers, or in this process one partition after the other."""

    cluster: Cluster
    parts: Sequence[Any]  # what `cluster.map` takes
    cuts: Sequence[slice]  # the rows of each
    shape: tuple[int, int]
    dtype: Any
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = ()  # what becomes of rows before a stage has them

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def of(cls, array: Any, name: str = "X", *, private: bool = False) -> "SpreadRows":
        """Take the blocks of a Dask array, on the workers of its default client where there is one.

        Workers hold blocks for several stages. Private ones are computed anew in each stage, and never leave the worker
        where they lie.
        """
        if array.ndim != 2 or not array.shape[1] > 0:
            raise ValueError(f"{name} must be a 2-D array (rows, features) with at least one feature")
        sizes = array.chunks[0]
        if any(map(math.isnan, sizes)):
            raise ValueError(f"{name} is a Dask array whose chunks have no sizes: call its compute_chunk_sizes() first")
        lazy = array.rechunk({1: -1}).to_delayed()[:, 0].tolist()
        graph = dict(lazy[0].dask) if lazy else {}
        blocks = [_Block(one.key, graph) for one in lazy]
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        cuts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        try:
            client = _load_dask().default_client()
        except (ValueError, ModuleNotFoundError):  # nobody started workers
            return cls(LOCAL, blocks, cuts, array.shape, array.dtype)
        if private:
            _check_encrypted(client)
        parts = [(_PrivateBlock if private else _Lying)(block, client) for block in blocks]
        return cls(_DaskCluster(client), parts, cuts, array.shape, array.dtype)

    @classmethod
    def cut(cls, rows: NDArray[Any], cluster: Cluster = LOCAL) -> "SpreadRows":
        """Cut rows of this process into partitions, and place them."""
        return cls(cluster, cluster.place(cut_table(rows)), cut_rows(len(rows)), rows.shape, rows.dtype)

    def then(self, function: Callable[..., Any], *shared: Any, width: int | None = None) -> "SpreadRows":
        """Return what a function makes of the rows, anew in each stage; `width`: of its rows, of numbers in 32 bits."""
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
        parts = [(part, some.start) for part, some in zip(self.parts, self.cuts, strict=True)]
        given = (self.steps, function, *shared)
        return self.cluster.reduce(_apply_at, merge, parts, *given, stage=stage, finish=finish, tick=tick)

    def take(self, positions: NDArray[np.integer], stage: str) -> NDArray[Any]:
        """Return some rows, in the order of their positions."""
        order = np.argsort(positions, kind="stable")
        rising = np.asarray(positions)[order]
        bounds = [np.searchsorted(rising, [some.start, some.stop]).tolist() for some in self.cuts]
        wanted = [number for number, (start, stop) in enumerate(bounds) if start < stop]
        parts = [(self.parts[number], rising[slice(*bounds[number])] - self.cuts[number].start) for number in wanted]
        found = np.empty((len(rising), self.shape[1]), self.dtype)
        for number, rows in zip(wanted, self.cluster.map(_take, parts, self.steps, stage=stage), strict=True):
            found[order[slice(*bounds[number])]] = rows
        return found

    def gather(self, stage: str) -> NDArray[Any]:
        """Return all rows."""
        found = np.empty(self.shape, self.dtype)
        for some, rows in zip(self.cuts, self.map(_pass_on, stage=stage), strict=True):
            found[some] = rows
        return found


def _apply(rows: Any, steps: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], function: Any, *shared: Any) -> Any:
    for step, given in steps:
        rows = step(rows, *given)
    return function(rows, *shared)


def _apply_at(part: tuple[Any, int], steps: Any, function: Any, *shared: Any) -> Any:
    rows, start = part
    return _apply(rows, steps, function, start, *shared)


def _take(part: tuple[Any, NDArray[Any]], steps: Any) -> Any:
    rows, places = part
    return _apply(rows[places], steps, _pass_on)


def _pass_on(rows: Any) -> Any:
    return rows


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
            yield _DaskCluster(client, is_here=True)
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


def _check_encrypted(client: Any) -> None:
    """Refuse a cluster where private rows, or what is found among them, would travel in the clear."""
    for address in (client.scheduler.address, *_list_workers(client)):
        parsed = urlsplit(address)
        if parsed.scheme not in {"tls", "inproc"} and not _is_loopback(str(parsed.hostname)):
            raise ValueError(
                f"cluster: {parsed.scheme}:// to another machine is not encrypted, and these rows are private: start "
                "scheduler and workers with TLS"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def cut_table(rows: NDArray[Any], size: int | None = None) -> list[NDArray[Any]]:
    """Return the partitions of rows as views."""
    return [rows[some] for some in cut_rows(len(rows), size)]
