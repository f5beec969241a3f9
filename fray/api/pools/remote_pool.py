"""RemotePool: a WorkerPool of another process; tasks are queued there, and run by its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import trio

from fray.api.futures import Future
from fray.api.pools.task_pool import PoolStats, TaskOptions, TaskPool, close_arguments, close_function
from fray.errors import ActorDied
from fray.model.ids import ActorId
from fray.runtime.calls.futures import CallFuture
from fray.runtime.objects.exports import call_export, exports_of
from fray.runtime.runtime import Runtime, current, current_or_none
from fray.runtime.serialization.pickling import Enclosed, enclose_again
from fray.runtime.tasks.dispatcher import TaskFunction


class ExportedPool(Protocol):
    """`WorkerPool`, as far as its own process uses it for other processes."""

    def known_function(self, name: str, data: bytes, runs_async: bool) -> TaskFunction:
        """Return the function of this pickle."""

    def queue(self, function: TaskFunction, content: Enclosed, has_kwargs: bool, options: TaskOptions) -> Future:
        """Queue one task whose arguments are pickled."""

    def stats(self) -> PoolStats:
        """Return counts of tasks and the state of the workers."""


class PoolExport:
    """Pool as an exported object: its methods are called by the `RemotePool`s of other processes."""

    def __init__(self, pool: ExportedPool) -> None:
        self.pool = pool

    async def task(
        self, name: str, data: bytes, runs_async: bool, args: Enclosed, has_kwargs: bool, options: TaskOptions
    ) -> tuple[bool, Enclosed]:
        """Queue a task and return its encoded outcome; cancelled with the call."""
        pool, settled = self.pool, trio.Event()
        future = pool.queue(pool.known_function(name, data, runs_async), enclose_again(args), has_kwargs, options)
        future.add_done_callback(lambda _: settled.set())
        try:
            await settled.wait()
        finally:
            future.cancel()
        return future.encoded_outcome()

    async def stats(self) -> PoolStats:
        return self.pool.stats()


def unpickle_pool(owner: ActorId, number: int, name: str, num_workers: int, options: TaskOptions) -> TaskPool:
    """Return the pool itself in the process that made it, elsewhere a `RemotePool`."""
    runtime = current_or_none()
    if runtime is not None and exports_of(runtime).actor_id == owner:
        export = exports_of(runtime).exported_object(number)
        assert isinstance(export, PoolExport)
        assert isinstance(export.pool, TaskPool)
        return export.pool
    return RemotePool(owner, number, name, num_workers, options)


class RemotePool(TaskPool):
    """Handle of a `WorkerPool` of another process: `submit`, `map`, `imap` and `options` as there.

    Each task is one call of that process; when the process has ended, futures raise `ActorDied`. At most 16,384 calls
    may be unanswered (`ChannelFull` beyond).
    """

    def __init__(self, owner: ActorId, number: int, name: str, num_workers: int, options: TaskOptions) -> None:
        super().__init__(self, options)
        self.num_workers = num_workers
        self._owner, self._number, self._name = owner, number, name
        self._here = current_or_none()

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickle_pool, (self._owner, self._number, self._name, self.num_workers, self._options)

    @property
    def _runtime(self) -> Runtime:
        return self._here or current()

    async def stats(self) -> PoolStats:
        """Return the counts of the pool, over all its users. Raises ActorDied."""
        stats: PoolStats = await call_export(self._runtime, self._owner, "use", self._number, "stats")
        return stats

    def pickled(self, fn: Callable[..., Any]) -> TaskFunction:
        """Return the function as it is now, pickled."""
        name, data, runs_async = close_function(fn)
        return TaskFunction(0, data, name, runs_async)

    def add(
        self, function: TaskFunction, args: tuple[Any, ...], kwargs: dict[str, Any], options: TaskOptions
    ) -> Future:
        """Queue one task."""
        return self.queue(function, close_arguments(function, args, kwargs), bool(kwargs), options)

    def queue(self, function: TaskFunction, content: Enclosed, has_kwargs: bool, options: TaskOptions) -> Future:
        """Queue one task whose arguments are already pickled."""
        task = (function.name, function.data, function.is_async, content, has_kwargs, options)
        call = call_export(self._runtime, self._owner, "use", self._number, "task", *task)
        future = Future(function.what, call.cancel)
        call.add_done_callback(lambda call: self._on_answer(future, call))
        return future

    def _on_answer(self, future: Future, call: CallFuture) -> None:
        error = call.exception()
        if error is None:
            is_result, data = call.result()
            (future.resolve_pickled if is_result else future.fail_pickled)(data)
        elif call.cancelled:
            future.fail_cancelled()
        elif isinstance(error, ActorDied):
            died = ActorDied(f"the process of worker pool {self._name!r} has ended", pool=self._name)
            died.__cause__ = error
            future.fail(died)
        else:
            future.fail(error)

    def start_soon(self, task: Callable[..., Any], *args: Any) -> None:
        """Run a task as long as this process is connected to the cluster."""
        self._runtime.nursery.start_soon(task, *args)

    def __repr__(self) -> str:
        return f"<RemotePool {self._name!r} of {self.num_workers} workers>"
