"""WorkerPool for sync code: stateless workers that run any callable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sized
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, overload

from fray.api.futures import Future
from fray.api.pools import worker_pool as native
from fray.api.pools.remote_pool import unpickle_pool
from fray.api.pools.task_pool import IN_FLIGHT_PER_WORKER, PoolStats, TaskOptions, WorkerInfo, close_arguments
from fray.blocking.bridge import pickling
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import BlockingContext, Portal
from fray.blocking.cluster import Cluster
from fray.blocking.futures import ActorFuture
from fray.errors import ChannelClosed, InvalidRequest
from fray.missing_names import check_interface
from fray.model.environment import EnvironmentConfig
from fray.model.ids import ActorId
from fray.model.resources import ResourceConfig
from fray.model.service_key import ServiceKey
from fray.tracebacks import short_tracebacks

OnProgress = Callable[[int, int | None], object]
P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class _QueuedTask:
    """Result of a task that is not queued in the loop yet."""

    def __init__(self, pool: native.WorkerPool, *task: Any) -> None:
        self._pool, self._task = pool, task
        self._future: Future | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._cancelled = False

    def queue(self) -> None:
        """Queue the task in the pool. In the loop."""
        try:
            self._future = self._pool.queue(*self._task)
        except Exception as error:  # noqa: BLE001 (the outcome of the task)
            self._error = error
            self._on_done(self)
        else:
            self._future.add_done_callback(self._on_done)
            if self._cancelled:
                self._future.cancel()

    def _on_done(self, future: object) -> None:
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        assert self._future is not None
        return self._future.result()

    @property
    def has_failed(self) -> bool:
        return self._future is None or self._future.has_failed

    @property
    def description(self) -> str:
        what: str = self._task[0].what
        return what

    def encoded_outcome(self) -> tuple[bool, Any]:
        if self._future is None:
            failed = Future(self.description)
            failed.fail(self._error or ChannelClosed("the task was never queued"))
            return failed.encoded_outcome()
        return self._future.encoded_outcome()

    def cancel(self) -> None:
        self._cancelled = True
        if self._future is not None:
            self._future.cancel()

    def __repr__(self) -> str:
        return repr(self._future or "a task")


@short_tracebacks
class TaskPool:
    """Methods of every pool, local or of another process: `submit`, `map`, `imap`, and these with `options`."""

    def __init__(self, portal: Portal, pool: Any, options: TaskOptions) -> None:
        self._portal, self._native, self._options = portal, pool, options

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as a pool whose tasks are queued here."""
        _, arguments = pickling.in_loop(self._portal, self._native.__reduce__)
        return _unpickle, (*arguments[:-1], self._options)

    def options(self, **options: Any) -> TaskPool:
        """Return the same pool for tasks with other options: those of `fray.WorkerPool.options`."""
        return TaskPool(self._portal, self._native, self._native.options(**options)._options)

    @overload
    def submit(self, fn: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T]: ...

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> ActorFuture[Any]:
        """Queue ``fn(*args, **kwargs)`` (sync, or async) and return a future at once.

        Raises:
            InvalidRequest: the pool has been shut down, or ``fn`` is not callable.
            NotPicklable, MessageTooLarge: function or arguments cannot be sent.
            ChannelFull: raised by the future: the pool holds the maximum number of tasks; `imap` waits instead.
        """
        return self._send(self._native.pickled(fn), args, kwargs)

    @overload
    def submit_after(
        self,
        futures: Iterable[ActorFuture[Any]],
        fn: Callable[P, Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ActorFuture[T]: ...
    @overload
    def submit_after(
        self, futures: Iterable[ActorFuture[Any]], fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> ActorFuture[T]: ...

    def submit_after(
        self, futures: Iterable[ActorFuture[Any]], fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> ActorFuture[Any]:
        """Submit a task that is queued when these futures are done; its arguments are pickled now."""
        function = self._native.pickled(fn)
        task = _QueuedTask(self._native, function, close_arguments(function, args, kwargs), bool(kwargs), self._options)
        pending = [future for future in futures if not future.done()]
        left = [None] * len(pending)

        def settled(_: object) -> None:
            left.pop()
            if not left:
                self._portal.send(task.queue)

        result: ActorFuture[Any] = ActorFuture(task, self._portal)
        for future in pending:
            future.add_done_callback(settled)
        if not pending:
            self._portal.send(task.queue)
        return result

    @overload
    def map(self, fn: Callable[[Item], Coroutine[Any, Any, T]], items: Iterable[Item]) -> list[ActorFuture[T]]: ...
    @overload
    def map(self, fn: Callable[[Item], T], items: Iterable[Item]) -> list[ActorFuture[T]]: ...

    def map(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> list[ActorFuture[Any]]:
        """Submit one task per item, the function pickled once; return futures in the order of the items. Raises as
        `submit`.
        """
        function = self._native.pickled(fn)
        return [self._send(function, (item,), {}) for item in items]

    def _send(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorFuture[Any]:
        content = close_arguments(function, args, kwargs)
        task = _QueuedTask(self._native, function, content, bool(kwargs), self._options)
        future: ActorFuture[Any] = ActorFuture(task, self._portal)
        self._portal.send(task.queue)
        return future

    @overload
    def imap(
        self,
        fn: Callable[[Item], Coroutine[Any, Any, T]],
        items: Iterable[Item],
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        return_exceptions: Literal[False] = False,
        on_progress: OnProgress | None = None,
        total: int | None = None,
    ) -> Iterator[T]: ...
    @overload
    def imap(
        self,
        fn: Callable[[Item], T],
        items: Iterable[Item],
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        return_exceptions: Literal[False] = False,
        on_progress: OnProgress | None = None,
        total: int | None = None,
    ) -> Iterator[T]: ...
    @overload
    def imap(
        self,
        fn: Callable[[Item], Any],
        items: Iterable[Item],
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        return_exceptions: bool,
        on_progress: OnProgress | None = None,
        total: int | None = None,
    ) -> Iterator[Any]: ...

    def imap(
        self,
        fn: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        return_exceptions: bool = False,
        on_progress: OnProgress | None = None,
        total: int | None = None,
    ) -> Iterator[Any]:
        """Yield results as they come: ``for result in pool.imap(fn, items)``; ``items``, which may be infinite, are
        read on this thread.

        Ending the iteration early (``close()`` of the iterator) cancels running tasks.

        Args:
            ordered: results in the order of the items; False: as tasks complete.
            max_in_flight: maximum number of items taken whose results have not been taken. Default 256 for each worker.
            return_exceptions: yield an error as a result. Default: raise it, which ends the iteration.
            on_progress: called with (results taken, ``total``) after each.
            total: passed to ``on_progress``. Default ``len(items)``, or None if it has no length.

        Raises:
            InvalidRequest: ``max_in_flight`` below 1. And as `submit`; while iterating, also what ``items`` raises.
        """
        limit = IN_FLIGHT_PER_WORKER * self._native.num_workers if max_in_flight is None else max_in_flight
        if limit < 1:
            raise InvalidRequest(f"max_in_flight={max_in_flight!r} must be 1 or more")
        if total is None and isinstance(items, Sized):
            total = len(items)
        function = self._native.pickled(fn)
        submitted = (self._send(function, (item,), {}) for item in items)
        futures = _in_order(submitted, limit) if ordered else _as_done(submitted, limit)
        return _results(futures, return_exceptions, on_progress, total)


def _results(
    futures: Iterator[ActorFuture[Any]], return_exceptions: bool, on_progress: OnProgress | None, total: int | None
) -> Iterator[Any]:
    try:
        for taken, future in enumerate(futures, 1):
            try:
                value = future.result()
            except Exception as error:
                if not return_exceptions:
                    raise
                value = error
            if on_progress is not None:
                on_progress(taken, total)
            yield value
    finally:
        futures.close()  # type: ignore[attr-defined]  # it is a generator


def _in_order(futures: Iterator[ActorFuture[Any]], limit: int) -> Iterator[ActorFuture[Any]]:
    window: deque[ActorFuture[Any]] = deque()
    try:
        for future in futures:
            window.append(future)
            if len(window) >= limit:
                yield window.popleft()
        while window:
            yield window.popleft()
    finally:
        for future in window:
            future.cancel()


def _as_done(futures: Iterator[ActorFuture[Any]], limit: int) -> Iterator[ActorFuture[Any]]:
    window: set[ActorFuture[Any]] = set()
    done: SimpleQueue[ActorFuture[Any]] = SimpleQueue()
    try:
        for future in futures:
            window.add(future)
            future.add_done_callback(done.put)
            if len(window) >= limit:
                window.discard(ready := done.get())
                yield ready
        while window:
            window.discard(ready := done.get())
            yield ready
    finally:
        for future in window:
            future.cancel()


def _unpickle(owner: ActorId, number: int, name: str, num_workers: int, options: TaskOptions) -> TaskPool:
    return pickling.unpickle_in_loop(
        lambda portal: TaskPool(portal, unpickle_pool(owner, number, name, num_workers, options), options)
    )


def unpickle_pool_handle(arguments: tuple[Any, ...]) -> TaskPool:
    """Return the pool of the arguments that `TaskPool.__reduce__` pickles."""
    return _unpickle(*arguments)


@short_tracebacks
class WorkerPool(TaskPool):
    """Workers for stateless tasks. They are launched when the pool is made; `shutdown`, or leaving a ``with`` of it,
    ends them, and so does the end of the cluster. Arguments and errors are those of `fray.WorkerPool`.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_workers: int,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        name_prefix: str = "worker",
        *,
        services: Callable[[TaskPool], Mapping[ServiceKey[Any], object]] | None = None,
        **options: Any,
    ) -> None:
        check_interface(cluster, "fray.blocking", "WorkerPool")
        if services is not None:
            options["services"] = lambda: services(TaskPool(cluster._portal, pool, pool._options))
        pool: native.WorkerPool = native.WorkerPool(
            cluster._native, num_workers, resources, environment, name_prefix, **options
        )
        self._context = BlockingContext(cluster._portal, pool)
        self._pool = self._context.enter(around_body=False)
        super().__init__(cluster._portal, pool, pool._options)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.leave(error)

    @property
    def size(self) -> int:
        """Number of workers that accept tasks now."""
        return self._pool.size

    @property
    def retried(self) -> int:
        """Number of times a task was assigned to another worker because its worker died."""
        return self._pool.retried

    def workers(self) -> list[WorkerInfo]:
        """Return a snapshot of the workers."""
        return self._portal.run(self._pool.workers)

    def stats(self) -> PoolStats:
        """Return the counts of the pool."""
        return self._portal.run(self._pool.stats)

    wait_for_workers = make_blocking(native.WorkerPool.wait_for_workers)

    def shutdown(self, wait: bool = True) -> None:
        """Accept no more tasks; with ``wait`` finish those submitted, else fail them; end the workers."""
        self._portal.call(self._native.shutdown, wait)
        self._context.leave()
