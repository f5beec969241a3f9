"""Interface of worker pools, local or of another process: single tasks, lists and streams of tasks."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

from attrs import frozen

from fray.api.futures import Future
from fray.api.pools.task_stream import OnProgress, TaskStream
from fray.errors import InvalidRequest
from fray.model.ids import JobId
from fray.model.messages.large_values import check_size
from fray.runtime.process.attempt import is_async
from fray.runtime.serialization import pickling
from fray.runtime.serialization.function_cache import FunctionPickleCache
from fray.runtime.tasks.dispatcher import TaskFunction

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
IN_FLIGHT_PER_WORKER = 256
_closures = FunctionPickleCache()


@frozen
class TaskOptions:
    """Options of tasks; see `WorkerPool.options`."""

    timeout_s: float | None = None
    max_retries: int = 3
    retry_exceptions: tuple[type[BaseException], ...] = ()


@frozen
class WorkerInfo:
    """State of one worker process; see `WorkerPool.workers`."""

    job_id: JobId
    node: str
    pid: int | None
    busy: bool
    running: int
    """Tasks assigned and not answered: the first runs, the others are queued on the worker."""
    done: int


@frozen
class PoolStats:
    """Counts of a pool; see `WorkerPool.stats`."""

    queued: int
    """Tasks that are not assigned to a worker."""
    running: int
    """Tasks assigned to workers: on each the first runs, the others are queued."""
    done: int
    failed: int
    cancelled: int
    retried: int
    """Number of times a task was assigned to another worker because its worker died, or as ``retry_exceptions``
    says.
    """
    workers: tuple[WorkerInfo, ...]

    @property
    def submitted(self) -> int:
        """Tasks ever submitted to the pool."""
        return self.queued + self.running + self.done + self.failed + self.cancelled


class TaskSink(Protocol):
    """Queue of tasks: a local pool, or the connection to a pool of another process."""

    num_workers: int

    def pickled(self, fn: Callable[..., Any]) -> TaskFunction:
        """Return the function as it is now, pickled."""

    def add(
        self, function: TaskFunction, args: tuple[Any, ...], kwargs: dict[str, Any], options: TaskOptions
    ) -> Future:
        """Queue one task."""

    def start_soon(self, task: Callable[..., Any], *args: Any) -> None:
        """Run a task as long as the pool exists."""


def close_function(fn: Callable[..., Any]) -> tuple[str, bytes, bool]:
    """Return name and pickle of a function, and whether it is async. Raises InvalidRequest, NotPicklable."""
    if not callable(fn):
        raise InvalidRequest(f"submit needs a callable, not {fn!r}")
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return name, _closures.dumps(fn, f"task {name!r}"), is_async(fn)


def close_arguments(function: TaskFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> pickling.Enclosed:
    """Return the pickled arguments of one task, for `WorkerPool.queue`; on any thread. Raises NotPicklable,
    MessageTooLarge."""
    packed = pickling.pack_call(function.name, args, kwargs)
    # Before what is too large is copied.
    check_size(len(packed), f"the arguments of task {function.name!r}")
    return pickling.enclose(packed)


class TaskPool:
    """Methods of every pool, local or of another process: `submit`, `map`, `imap`, and these with `options`."""

    def __init__(self, sink: TaskSink, options: TaskOptions) -> None:
        self._sink = sink
        self._options = options

    def options(
        self,
        *,
        timeout_s: float | None = None,
        max_retries: int | None = None,
        retry_exceptions: type[BaseException] | Sequence[type[BaseException]] = (),
    ) -> TaskPool:
        """Return the same pool for tasks with other options: ``pool.options(timeout_s=5).map(fn, items)``.

        Args:
            timeout_s: seconds that a task may run, counted from each of its starts; then it is cancelled (a sync task
                sees it, see `fray.current_actor`) and its future raises DeadlineExceeded. Default: no limit.
            max_retries: number of times a task may be repeated. Default: that of the pool.
            retry_exceptions: errors of the task itself after which another worker repeats it. Default none: only the
                death of its worker repeats a task.

        Raises:
            InvalidRequest: a negative number, or an element of ``retry_exceptions`` that is not an exception class.
        """
        kinds = (retry_exceptions,) if isinstance(retry_exceptions, type) else tuple(retry_exceptions)
        if timeout_s is not None and timeout_s <= 0:
            raise InvalidRequest(f"timeout_s={timeout_s!r} must be above 0 (seconds), or None")
        if max_retries is not None and max_retries < 0:
            raise InvalidRequest(f"max_retries={max_retries!r} must be 0 or more")
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise InvalidRequest(f"retry_exceptions={retry_exceptions!r} must be exception classes, such as OSError")
        retries = self._options.max_retries if max_retries is None else max_retries
        return TaskPool(self._sink, TaskOptions(timeout_s, retries, kinds))

    @overload
    def submit(self, fn: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Queue ``fn(*args, **kwargs)`` (sync or async) and return a future at once; ``await`` it for the result.

        Raises:
            InvalidRequest: the pool is not open (not entered, or shut down), or ``fn`` is not callable.
            NotPicklable, MessageTooLarge: function or arguments cannot be sent.
            ChannelFull: the pool holds the maximum number of tasks; `imap` waits instead.
        """
        return self._sink.add(self._sink.pickled(fn), args, kwargs, self._options)

    @overload
    def map(self, fn: Callable[[Item], Coroutine[Any, Any, T]], items: Iterable[Item]) -> list[Future[T]]: ...
    @overload
    def map(self, fn: Callable[[Item], T], items: Iterable[Item]) -> list[Future[T]]: ...

    def map(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> list[Future]:
        """Submit one task per item, the function pickled once; return futures in the order of the items. Raises as
        `submit`.
        """
        add, options = self._sink.add, self._options
        function = self._sink.pickled(fn)
        return [add(function, (item,), {}, options) for item in items]

    @overload
    def imap(
        self,
        fn: Callable[[Item], Coroutine[Any, Any, T]],
        items: Iterable[Item] | AsyncIterable[Item],
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        return_exceptions: Literal[False] = False,
        on_progress: OnProgress | None = None,
        total: int | None = None,
    ) -> TaskStream[T]: ...
    @overload
    def imap(
        self,
        fn: Callable[[Item], T],
        items: Iterable[Item] | AsyncIterable[Item],
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        return_exceptions: Literal[False] = False,
        on_progress: OnProgress | None = None,
        total: int | None = None,
    ) -> TaskStream[T]: ...
    @overload
    def imap(
        self,
        fn: Callable[[Item], Any],
        items: Iterable[Item] | AsyncIterable[Item],
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        return_exceptions: bool,
        on_progress: OnProgress | None = None,
        total: int | None = None,
    ) -> TaskStream[Any]: ...

    def imap(
        self,
        fn: Callable[[Any], Any],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        return_exceptions: bool = False,
        on_progress: OnProgress | None = None,
        total: int | None = None,
    ) -> TaskStream:
        """Yield results as they come: ``async for result in pool.imap(fn, items)``; ``items`` may be infinite, or
        async.

        Args:
            ordered: results in the order of the items; False: as tasks complete.
            max_in_flight: maximum number of items taken whose results have not been taken. Default 256 for each worker.
            return_exceptions: yield an error as a result. Default: raise it in its place; the iteration may continue.
            on_progress: called with (results taken, ``total``) after each.
            total: passed to ``on_progress``. Default ``len(items)``, or None if it has no length.

        Use ``async with pool.imap(...) as results`` to cancel running tasks as soon as the iteration is left early.
        Raises as `submit`; while iterating, also what ``items`` raises.
        """
        function = self._sink.pickled(fn)
        if max_in_flight is None:
            max_in_flight = IN_FLIGHT_PER_WORKER * self._sink.num_workers
        if max_in_flight < 1:
            raise InvalidRequest(f"max_in_flight={max_in_flight!r} must be 1 or more")
        return TaskStream(
            lambda item: self._sink.add(function, (item,), {}, self._options),
            items,
            ordered=ordered,
            max_in_flight=max_in_flight,
            return_exceptions=return_exceptions,
            on_progress=on_progress,
            total=total,
            start_soon=self._sink.start_soon,
        )
