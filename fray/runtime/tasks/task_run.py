"""One task where it runs: on its worker's thread, or in the loop; what it came to; how it is stopped.

See `fray.runtime.tasks.worker`, which holds these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import trio
from attrs import define

from fray.errors import DeadlineExceeded
from fray.net.codec import MESSAGE_LIMIT_BYTES
from fray.runtime.current_call import current_actor_var
from fray.runtime.process.attempt import carries_cancellation
from fray.runtime.serialization import errors, pickling

VALUE, ERROR, CANCELLED, BLOCKED = range(4)
"""What a task came to; the last: nothing yet, but it waits, and others are run beside it."""
TASK_LIMIT_BYTES = MESSAGE_LIMIT_BYTES // 2
"""One result, the arguments of one task, or one function, pickled."""

WireOutcome: TypeAlias = tuple[int, int, bytes]


class _NoEvent:
    """Stands for the event that nobody waits for: most tasks need none."""

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
        """A function is made once, an object that can be called for each task: it may keep state."""
        if self.loaded is not None:
            return self.loaded
        fn = pickling.loads(self.data)
        if hasattr(fn, "__code__") and not hasattr(fn, "__self__"):
            self.loaded = fn
        return fn


POLL_S = 0.01


class RunOwner(Protocol):
    """What a task uses of the worker that runs it (`fray.runtime.tasks.worker.TaskWorker`)."""

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
    """One task here: a job of the thread, and what `fray.current_actor` shows to the task."""

    chain: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def __init__(
        self,
        worker: RunOwner,
        number: int,
        function: SentFunction,
        args: bytes,
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
        self.is_awaited = is_async or timeout_s is not None
        self.finished = trio.Event() if self.is_awaited else NEVER
        self._worker, self._function, self._args, self._has_kwargs = worker, function, args, has_kwargs
        self._is_async, self._timeout_s = is_async, timeout_s
        self._scope: trio.CancelScope | None = None
        self.waits: set[Any] = set()

    def wait_cancelled(self, timeout_s: float | None = None) -> bool:
        """On a thread: whether it is told within ``timeout_s`` (looked at a hundred times a second)."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.cancelled and time.monotonic() < until:
            time.sleep(POLL_S)
        return self.cancelled

    def copy(self) -> TaskRun:
        """The same task, for another thread."""
        about = self._function, self._args, self._has_kwargs, self._is_async, self._timeout_s
        return TaskRun(self._worker, self.number, *about)

    def mark_blocked(self) -> None:
        """On its thread: it is going to wait for others, so its worker takes more tasks beside it.

        Raises:
            FrayError: `ASIDE_LIMIT` tasks of this worker wait already.
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
        if not self._worker.waiting.pop(self, False):
            return  # given back, or cancelled before it began
        self.begun = True
        began = self._worker.clock()
        current_actor_var.set(self)
        try:
            fn, args, kwargs = self._open()
            self._returned(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - whatever a task raises is its outcome
            self._raised(error)
        finally:
            current_actor_var.set(None)
            self.seconds = self._worker.clock() - began

    def done(self) -> None:
        """In the loop."""
        self._worker.left_thread(self)
        self.finished.set()

    # In the loop -----------------------------------------------------------------------------------------------------

    async def run_awaited(self) -> None:
        """Await an async task, or one on the thread, within its time."""
        worker = self._worker
        limit_s = math.inf if self._timeout_s is None else self._timeout_s
        if self._timeout_s is not None:
            self.deadline = trio.current_time() + limit_s
        try:
            with trio.move_on_after(limit_s) as self._scope:
                await (self._run_async() if self._is_async else worker.on_thread(self))
            if self._scope.cancelled_caught:
                self._stopped()
            if not self._is_async and not self.finished.is_set():
                await worker.wait_for_thread(self)
        finally:
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
            fn, args, kwargs = await self._worker.run_on_thread(self._open)
            self._returned(await fn(*args, **kwargs))
        except (Exception, SystemExit, BaseExceptionGroup) as error:
            if carries_cancellation(error):
                raise
            self._raised(error)
        finally:
            self.seconds = self._worker.clock() - began
            if self.outcome is not None:
                self._worker.ended(self)

    def stop(self) -> None:
        """Its author does not want it any more: an async task is cancelled, one on the thread is told."""
        self.cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        elif not self._is_async:
            self._stopped()

    def _stopped(self) -> None:
        """It has been cancelled, or told."""
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

    def _open(self) -> tuple[Any, Sequence[Any], Any]:
        fn = self._function.open()
        args, kwargs = pickling.loads_call(self._args, self._has_kwargs)
        self._args = b""
        return fn, args, kwargs

    def _returned(self, value: Any) -> None:
        data = pickling.dumps(value, f"the result of {self.method!r}")
        if len(data) > TASK_LIMIT_BYTES:
            raise pickling.too_large(f"the result of {self.method!r}", len(data), TASK_LIMIT_BYTES)
        self.outcome = self.outcome or (self.number, VALUE, data)

    def _raised(self, error: BaseException) -> None:
        self.outcome = self.outcome or (self.number, ERROR, errors.dump_error(error))
