"""Execution of one task in its worker, on the thread or in the loop, with its outcome and cancellation.

`fray.runtime.tasks.worker` queues and starts the runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import trio
from attrs import define

from fray.errors import DeadlineExceeded
from fray.model.messages.large_values import check_size
from fray.runtime.cancellation import split_cancelled
from fray.runtime.current_call import current_actor_var
from fray.runtime.serialization import errors, pickling

VALUE, ERROR, CANCELLED, BLOCKED = range(4)
"""Kinds of outcome. BLOCKED is not an end: the task waits for something, and others run beside it."""

WireOutcome: TypeAlias = tuple[int, int, pickling.Enclosed]


# A run is made for every task of a pool, and few are awaited: the others save an event with its set of waiters.
class _NoEvent:
    """Replacement for an event without waiters: most tasks do not need a real one."""

    def set(self) -> None: ...

    def is_set(self) -> bool:
        return False

    async def wait(self) -> None:
        await trio.sleep_forever()


NEVER = _NoEvent()


@define(eq=False)
class SentFunction:
    data: bytes
    name: str
    loaded: Any = None

    def open(self) -> Any:
        """Return the callable: a function is unpickled once, other callables for each task, as they may have state."""
        if self.loaded is not None:
            return self.loaded
        fn = pickling.loads(self.data)
        # A bound method carries its object, whose state must not pass from one task to the next.
        if hasattr(fn, "__code__") and not hasattr(fn, "__self__"):
            self.loaded = fn
        return fn


POLL_S = 0.01


class RunOwner(Protocol):
    """Part of a worker that its tasks use (`fray.runtime.tasks.worker.TaskWorker`)."""

    job_id: str
    job_name: str
    waiting: dict[TaskRun, bool]
    clock: Callable[[], float]

    def mark_blocked(self, run: TaskRun) -> None: ...

    def left_thread(self, run: TaskRun) -> None: ...

    async def on_thread(self, run: TaskRun) -> None: ...

    async def wait_for_thread(self, run: TaskRun) -> None: ...

    async def run_on_thread(self, fn: Callable[[], Any]) -> Any: ...

    def ended(self, run: TaskRun) -> None: ...

    def released(self) -> None: ...

    def report(self, run: TaskRun) -> None: ...


class TaskRun:
    """One task in its worker: a work item of the thread, and the object behind `fray.current_actor` in the task."""

    chain: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def __init__(
        self,
        worker: RunOwner,
        number: int,
        function: SentFunction,
        args: pickling.Enclosed,
        has_kwargs: bool,
        is_async: bool,
        timeout_s: float | None,
    ) -> None:
        self.number = number
        self.begun = False
        self.cancelled = False
        self.is_reported = False
        self.is_blocked = False
        self.deadline: float | None = None
        self.outcome: WireOutcome | None = None
        self.seconds = 0.0
        # A sync task with a timeout has a task in the loop as well, which enforces it.
        self.is_awaited = is_async or timeout_s is not None
        self.finished = trio.Event() if self.is_awaited else NEVER
        self._worker, self._function, self._args, self._has_kwargs = worker, function, args, has_kwargs
        self._is_async, self._timeout_s = is_async, timeout_s
        self._scope: trio.CancelScope | None = None
        self.waits: set[Any] = set()

    def wait_cancelled(self, timeout_s: float | None = None) -> bool:
        """Block until the task is cancelled or ``timeout_s`` has passed; return whether it is cancelled.

        For code on a thread; polls a hundred times a second.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.cancelled and time.monotonic() < until:
            time.sleep(POLL_S)
        return self.cancelled

    def copy(self) -> TaskRun:
        """Return a new run of the same task, for another thread."""
        about = self._function, self._args, self._has_kwargs, self._is_async, self._timeout_s
        return TaskRun(self._worker, self.number, *about)

    def mark_blocked(self) -> None:
        """Report, on its thread, that the task is going to wait for others, so that its worker runs more beside it.

        Raises:
            FrayError: `BLOCKED_LIMIT` tasks of this worker wait already.
        """
        if not self.is_blocked and not self._is_async:
            self._worker.mark_blocked(self)

    @property
    def actor_id(self) -> str:
        return self._worker.job_id

    @property
    def name(self) -> str:
        return self._worker.job_name

    @property
    def method(self) -> str:
        return self._function.name

    # On the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        # The pop is the claim: the loop may be returning the same task to the dispatcher at this moment.
        if not self._worker.waiting.pop(self, False):
            return  # returned, or cancelled before it began
        self.begun = True
        began = self._worker.clock()
        current_actor_var.set(self)
        try:
            fn, args, kwargs = self._unpickle()
            self._set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - any error of a task is its outcome
            self._set_error(error)
        finally:
            current_actor_var.set(None)
            self.seconds = self._worker.clock() - began

    def done(self) -> None:
        """Report the end of the run to the worker. Loop only."""
        # Before `finished` is set: the task that waits for it starts the next one.
        self._worker.left_thread(self)
        self.finished.set()

    # In the loop -----------------------------------------------------------------------------------------------------

    async def run_awaited(self) -> None:
        """Run an async task, or a task with a timeout, and enforce the timeout.

        The time counts from the beginning of each run: in a queue of thousands any other start would be a guess.
        """
        worker = self._worker
        limit_s = math.inf if self._timeout_s is None else self._timeout_s
        if self._timeout_s is not None:
            self.deadline = trio.current_time() + limit_s
        try:
            # Around the wait alone: a thread cannot be cancelled, so what follows waits for it separately.
            with trio.move_on_after(limit_s) as self._scope:
                await (self._run_async() if self._is_async else worker.on_thread(self))
            if self._scope.cancelled_caught:
                self._set_stopped()
            # The worker takes no further task before the thread is free, since tasks run one by one.
            if not self._is_async and not self.finished.is_set():
                await worker.wait_for_thread(self)
        finally:
            # A blocked task has released its worker already.
            if not self.is_blocked:
                worker.released()

    async def _run_async(self) -> None:
        if not self._worker.waiting.pop(self, False):
            self._worker.ended(self)
            return
        self.begun = True
        began = self._worker.clock()
        current_actor_var.set(self)
        try:
            fn, args, kwargs = await self._worker.run_on_thread(self._unpickle)
            self._set_result(await fn(*args, **kwargs))
        # KeyboardInterrupt and Cancelled end the loop or its scope, not only this task.
        except (Exception, SystemExit, BaseExceptionGroup) as error:  # noqa: BLE001 - any error of the user's code is its outcome
            cancelled, _ = split_cancelled(error)
            if cancelled is not None:
                # What else it raised meanwhile is not its outcome: it timed out or was cancelled, or another worker
                # repeats it.
                raise cancelled from None
            self._set_error(error)
        finally:
            self.seconds = self._worker.clock() - began
            # None: it was cancelled from outside, and the process is ending.
            if self.outcome is not None:
                self._worker.ended(self)

    def stop(self) -> None:
        """Cancel the task: an async task at its next checkpoint; on a thread, `wait_cancelled` returns True."""
        self.cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        # The thread may run on, but the author gets the answer now; a later outcome is dropped.
        elif not self._is_async:
            self._set_stopped()

    def _set_stopped(self) -> None:
        """Set the outcome of a task that was cancelled or has timed out."""
        if self.cancelled:
            self.outcome = (self.number, CANCELLED, b"")
        else:
            text = f"task {self.method!r} ran longer than its {self._timeout_s:g} s"
            self.outcome = (self.number, ERROR, errors.dump_error(DeadlineExceeded(text, task=self.method)))
        self.cancelled = True
        if self._is_async:
            self._worker.ended(self)
        else:
            self._worker.report(self)

    def _unpickle(self) -> tuple[Any, Sequence[Any], Any]:
        fn = self._function.open()
        call = pickling.open_enclosed(self._args)
        args, kwargs = call if self._has_kwargs else (call, {})
        # The run stays in tables until its outcome was reported; its pickled arguments need not.
        self._args = b""
        return fn, args, kwargs

    def _set_result(self, value: Any) -> None:
        what = f"the result of {self.method!r}"
        packed = pickling.pack(value, what)
        # Checked here, where it is the task's error; later it would fail the answer and with it other outcomes.
        check_size(len(packed), what)
        # An array that nothing else refers to is not copied.
        del value
        self.outcome = self.outcome or (self.number, VALUE, pickling.enclose(packed))

    def _set_error(self, error: BaseException) -> None:
        self.outcome = self.outcome or (self.number, ERROR, errors.dump_error(error))
