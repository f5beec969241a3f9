"""What can be done with a pool of workers, however it is reached: tasks one by one, lists of them, streams of them."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import Any, Protocol

from attrs import frozen

from fray.api.futures import Future
from fray.api.pools.task_stream import OnProgress, TaskStream
from fray.errors import InvalidRequest
from fray.model.ids import JobId
from fray.runtime.process.attempt import is_async
from fray.runtime.serialization import pickling
from fray.runtime.serialization.function_cache import FunctionPickleCache
from fray.runtime.tasks.dispatcher import TaskFunction

IN_FLIGHT_PER_WORKER = 256
_closures = FunctionPickleCache()


@frozen
class TaskOptions:
    """How tasks are to be run; see `WorkerPool.options`."""

    timeout_s: float | None = None
    max_retries: int = 3
    retry_exceptions: tuple[type[BaseException], ...] = ()


@frozen
class WorkerInfo:
    """One worker process, as `WorkerPool.workers` shows it."""

    job_id: JobId
    node: str
    pid: int | None
    busy: bool
    running: int
    """Tasks it has been given and not answered: one runs, the others are there ahead."""
    done: int


@frozen
class PoolStats:
    """What a pool has done so far; see `WorkerPool.stats`."""

    queued: int
    """Tasks that no worker has yet."""
    running: int
    """Tasks that workers have: one each runs, the others are there ahead."""
    done: int
    failed: int
    cancelled: int
    retried: int
    """How many times a task was given to another worker because its own died, or as ``retry_exceptions`` says."""
    workers: tuple[WorkerInfo, ...]

    @property
    def submitted(self) -> int:
        """Tasks the pool was ever given."""
        return self.queued + self.running + self.done + self.failed + self.cancelled


class TaskSink(Protocol):
    """Where tasks are handed in."""

    num_workers: int

    def pickled(self, fn: Callable[..., Any]) -> TaskFunction:
        """The function as it is now."""

    def add(
        self, function: TaskFunction, args: tuple[Any, ...], kwargs: dict[str, Any], options: TaskOptions
    ) -> Future:
        """Queue one task."""

    def start_soon(self, task: Callable[..., Any], *args: Any) -> None:
        """Run a task as long as the pool is there."""


def close_function(fn: Callable[..., Any]) -> tuple[str, bytes, bool]:
    """Name, pickle, and whether it is async. Raises InvalidRequest, NotPicklable."""
    if not callable(fn):
        raise InvalidRequest(f"submit needs a callable, not {fn!r}")
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return name, _closures.dumps(fn, f"task {name!r}"), is_async(fn)


def close_arguments(function: TaskFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The arguments of one task, pickled, for `WorkerPool.queue`; on any thread. Raises NotPicklable."""
    return pickling.dumps_call(function.name, args, kwargs)


class TaskPool:
    """What can be done with a pool, however it is reached: `submit`, `map`, `imap`, and these with `options`."""

    def __init__(self, desk: TaskSink, options: TaskOptions) -> None:
        self._desk = desk
        self._options = options

    def options(
        self,
        *,
        timeout_s: float | None = None,
        max_retries: int | None = None,
        retry_exceptions: type[BaseException] | Sequence[type[BaseException]] = (),
    ) -> TaskPool:
        """The same pool for tasks with other options: ``pool.options(timeout_s=5).map(fn, items)``.

        Args:
            timeout_s: how long a task may run, counted anew each time it begins; then it is cancelled (a sync one is
                told, see `fray.current_actor`) and its future raises DeadlineExceeded. Default: for ever.
            max_retries: how many times a task may be repeated. Default: what the pool says.
            retry_exceptions: errors of the task itself after which it is repeated, by another worker. Default none:
                only the death of its worker repeats a task.

        Raises:
            InvalidRequest: a negative number, or something that is no exception class.
        """
        kinds = (retry_exceptions,) if isinstance(retry_exceptions, type) else tuple(retry_exceptions)
        if timeout_s is not None and timeout_s <= 0:
            raise InvalidRequest(f"timeout_s={timeout_s!r} must be above 0 (seconds), or None")
        if max_retries is not None and max_retries < 0:
            raise InvalidRequest(f"max_retries={max_retries!r} must be 0 or more")
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise InvalidRequest(f"retry_exceptions={retry_exceptions!r} must be exception classes, such as OSError")
        retries = self._options.max_retries if max_retries is None else max_retries
        return TaskPool(self._desk, TaskOptions(timeout_s, retries, kinds))

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Queue ``fn(*args, **kwargs)`` (sync, or async) and return a future at once; ``await`` it for the result.

        Raises:
            InvalidRequest: the pool is not open (not entered, or shut down), or ``fn`` is not callable.
            NotPicklable, MessageTooLarge: it cannot travel.
            ChannelFull: the pool holds more tasks than it may; `imap` waits instead.
        """
        return self._desk.add(self._desk.pickled(fn), args, kwargs, self._options)

    def map(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> list[Future]:
        """`submit` for each item, the function pickled once; futures in the order of the items. Raises as `submit`."""
        add, options = self._desk.add, self._options
        function = self._desk.pickled(fn)
        return [add(function, (item,), {}, options) for item in items]

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
        """Results as they come: ``async for result in pool.imap(fn, items)``; ``items`` may be infinite, or async.

        Args:
            ordered: results in the order of the items; False: as they are done.
            max_in_flight: items taken whose results have not been taken. Default 256 for each worker.
            return_exceptions: an error comes as a result. Default: it is raised at its place, and iterating may go on.
            on_progress: called with (results taken, ``total``) after each.
            total: for ``on_progress``. Default ``len(items)``, or None where there is none.

        Use it as ``async with pool.imap(...) as results`` where leaving early shall cancel what is under way at once.
        Raises as `submit`; while iterating, also what ``items`` raises.
        """
        function = self._desk.pickled(fn)
        if max_in_flight is None:
            max_in_flight = IN_FLIGHT_PER_WORKER * self._desk.num_workers
        if max_in_flight < 1:
            raise InvalidRequest(f"max_in_flight={max_in_flight!r} must be 1 or more")
        return TaskStream(
            lambda item: self._desk.add(function, (item,), {}, self._options),
            items,
            ordered=ordered,
            max_in_flight=max_in_flight,
            return_exceptions=return_exceptions,
            on_progress=on_progress,
            total=total,
            start_soon=self._desk.start_soon,
        )
