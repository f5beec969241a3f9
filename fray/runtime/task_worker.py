"""The actor in each process of a pool: holds tasks, runs them one by one, says what came of them.

One method carries everything, both ways. `TaskWorker.exchange` brings tasks, functions, and wishes, and is answered
when there is something to say, or when the next one comes: so outcomes ride on the answers, as many as there are, and
no task costs a message of its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, TypeAlias

import trio
from attrs import define

from fray.errors import DeadlineExceeded, FrayError
from fray.net.codec import MESSAGE_LIMIT_BYTES
from fray.runtime import payload, remote_errors
from fray.runtime.attempt import carries_cancellation
from fray.runtime.context import Runtime, current
from fray.runtime.current import current_actor_var
from fray.runtime.executor import Runner

VALUE, ERROR, CANCELLED, ASIDE = range(4)
"""What a task came to; the last: nothing yet, but it waits, and others are run beside it."""
ASIDE_LIMIT = 1_000
"""Tasks of one worker that wait, each on a thread."""
PIECE_LIMIT_BYTES = MESSAGE_LIMIT_BYTES // 2
"""One result, the arguments of one task, or one function, pickled."""
ANSWER_BYTES = 4 * 1024 * 1024
"""Outcomes in one answer: as many as fit, and at least one."""

WireTask: TypeAlias = tuple[int, int, bytes, bool, bool, float | None]
"""Number, number of the function, pickled arguments, with keywords, async, seconds it may run."""
WireFunction: TypeAlias = tuple[int, bytes, str]
"""Number, pickle, name for people."""
WireOutcome: TypeAlias = tuple[int, int, bytes]


class _Never:
    """Stands for the event that nobody waits for: most tasks need none."""

    def set(self) -> None: ...

    def is_set(self) -> bool:
        return False

    async def wait(self) -> None:
        await trio.sleep_forever()


NEVER = _Never()


@define(eq=False)
class _Function:
    data: bytes
    name: str
    made: Any = None

    def open(self) -> Any:
        """A function is made once, an object that can be called for each task: it may keep state."""
        if self.made is not None:
            return self.made
        fn = payload.loads(self.data)
        if hasattr(fn, "__code__") and not hasattr(fn, "__self__"):
            self.made = fn
        return fn


POLL_S = 0.01


class TaskRun:
    """One task here: a job of the thread, and what `fray.current_actor` shows to the task."""

    chain: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def __init__(
        self,
        worker: TaskWorker,
        number: int,
        function: _Function,
        args: bytes,
        has_kwargs: bool,
        is_async: bool,
        timeout_s: float | None,
    ) -> None:
        self.number = number
        self.begun = False
        self.cancelled = False
        self.told = False
        self.is_aside = False
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

    def again(self) -> TaskRun:
        """The same task, for another thread."""
        about = self._function, self._args, self._has_kwargs, self._is_async, self._timeout_s
        return TaskRun(self._worker, self.number, *about)

    def step_aside(self) -> None:
        """On its thread: it is going to wait for others, so its worker takes more tasks beside it.

        Raises:
            FrayError: `ASIDE_LIMIT` tasks of this worker wait already.
        """
        if not self.is_aside and not self._is_async:
            self._worker.step_aside(self)

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

    async def attend(self) -> None:
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
            if not self.is_aside:
                worker.released()

    async def _run_async(self) -> None:
        if not self._worker.waiting.pop(self, False):
            self._worker.ended(self)
            return
        self.begun = True
        began = self._worker.clock()
        current_actor_var.set(self)
        try:
            fn, args, kwargs = await self._worker.off_loop(self._open)
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
            self.outcome = (self.number, ERROR, remote_errors.dump_error(DeadlineExceeded(text, task=self.method)))
        self.cancelled = True
        if self._is_async:
            self._worker.ended(self)
        else:
            self._worker.tell(self)

    def _open(self) -> tuple[Any, Sequence[Any], Any]:
        fn = self._function.open()
        args, kwargs = payload.loads_call(self._args, self._has_kwargs)
        self._args = b""
        return fn, args, kwargs

    def _returned(self, value: Any) -> None:
        data = payload.dumps(value, f"the result of {self.method!r}")
        if len(data) > PIECE_LIMIT_BYTES:
            raise payload.too_large(f"the result of {self.method!r}", len(data), PIECE_LIMIT_BYTES)
        self.outcome = self.outcome or (self.number, VALUE, data)

    def _raised(self, error: BaseException) -> None:
        self.outcome = self.outcome or (self.number, ERROR, remote_errors.dump_error(error))


class TaskWorker:
    """The actor class of pool workers."""

    def __init__(self, kill_after_s: float | None = None, extras: Mapping[str, object] | None = None) -> None:
        self.job_id, self.job_name = "", ""
        self._kill_after_s = kill_after_s
        self._extras = extras or {}
        self._doomed: SystemExit | None = None
        self.waiting: dict[TaskRun, bool] = {}
        """Not begun. Whoever takes a run out owns it: the thread begins it, the loop gives it back. Runs, not numbers:
        a task that was given back may come again while its first run is still in the thread's queue."""
        self._lane: deque[TaskRun] = deque()
        """Not handed to the thread, behind one that is awaited here."""
        self._functions: dict[int, _Function] = {}
        self._here: dict[int, TaskRun] = {}
        """Not ended."""
        self._in_thread = 0
        """Handed to the thread, and not left it."""
        self._handed: deque[TaskRun] = deque()
        """The same, in order, and some of those that have left it."""
        self._aside = 0
        self._awaiting = False
        self._outcomes: deque[WireOutcome] = deque()
        self._busy_s = 0.0
        self._ran = 0
        self._parked: trio.Event | None = None
        self._runner: Runner | None = None
        self._runtime: Runtime | None = None
        self._context = copy_context()
        """What its threads see."""
        self._spawn: Callable[[Callable[[], Any]], None] = lambda task: None
        self.clock: Callable[[], float] = time.perf_counter
        """For the pace; the host's, which is constant in simulation."""

    # The exchange ----------------------------------------------------------------------------------------------------

    async def exchange(
        self,
        tasks: Sequence[WireTask],
        functions: Sequence[WireFunction],
        forget: Sequence[int],
        back: Sequence[int],
        cancel: Sequence[int],
    ) -> tuple[list[WireOutcome], list[int], int, float]:
        """Take what the parcel brings; return outcomes, tasks given back, tasks run and the seconds they took."""
        if self._runner is None:
            self._begin()
        for number in forget:
            self._functions.pop(number, None)
        for number, data, name in functions:
            self._functions[number] = _Function(data, name)
        self._take(tasks)
        returned = [number for number in back if self._give_back(number)]
        for number in cancel:
            self._cancel(number)
        self._pump()
        previous, self._parked = self._parked, None
        if previous is not None:
            previous.set()
        if not self._outcomes and not back:
            self._parked = here = trio.Event()
            await here.wait()
        if self._doomed is not None:
            raise self._doomed
        return self._report(returned)

    def _report(self, returned: list[int]) -> tuple[list[WireOutcome], list[int], int, float]:
        outcomes: list[WireOutcome] = []
        size = 0
        while self._outcomes and (not outcomes or size + len(self._outcomes[0][2]) <= ANSWER_BYTES):
            outcome = self._outcomes.popleft()
            outcomes.append(outcome)
            size += len(outcome[2])
        ran, busy_s, self._ran, self._busy_s = self._ran, self._busy_s, 0, 0.0
        return outcomes, returned, ran, busy_s

    # Running ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        runtime = self._runtime = current()
        runtime.extras.update(self._extras)
        self._context = copy_context()
        self.job_id, self.job_name = runtime.job_id or "", runtime.job_name
        self._runner = runtime.host.make_runner(self.job_name, 1)
        self._spawn = runtime.host.spawn
        self.clock = runtime.host.clock
        self._spawn(self._hold_thread)

    async def _hold_thread(self) -> None:
        """The thread ends with the host of this actor."""
        assert self._runner is not None
        try:
            await trio.sleep_forever()
        finally:
            self._runner.stop()

    def _take(self, tasks: Sequence[WireTask]) -> None:
        for number, function, args, has_kwargs, is_async, timeout_s in tasks:
            run = TaskRun(self, number, self._functions[function], args, has_kwargs, is_async, timeout_s)
            self._here[number] = run
            self.waiting[run] = True
            self._lane.append(run)

    def _give_back(self, number: int) -> bool:
        """Whether it has not begun here, and will not."""
        run = self._here.get(number)
        if run is None or not self.waiting.pop(run, False):
            return False
        del self._here[number]
        return True

    def _pump(self) -> None:
        """Hand to the thread all up to the next task that is awaited here; begin that one when the thread is free."""
        runner = self._runner
        assert runner is not None
        while self._lane and not self._awaiting:
            run = self._lane[0]
            if run.is_awaited and self._in_thread:
                break
            self._lane.popleft()
            if run not in self.waiting:
                self._left(run)  # given back, or cancelled
            elif run.is_awaited:
                self._awaiting = True
                self._spawn(run.attend)
            else:
                self._hand(run, runner)
        runner.flush()

    def _hand(self, run: TaskRun, runner: Runner) -> None:
        self._in_thread += 1
        while self._handed and self._handed[0] not in self.waiting:
            self._handed.popleft()
        self._handed.append(run)
        runner.submit(run)

    # Aside -----------------------------------------------------------------------------------------------------------

    def step_aside(self, run: TaskRun) -> None:
        """On its thread."""
        if self._aside >= ASIDE_LIMIT:
            raise FrayError(
                f"{ASIDE_LIMIT} tasks of this worker wait for other tasks, each on a thread: nest them less deeply, or "
                "let the one that starts them wait"
            )
        assert self._runtime is not None
        self._runtime.token.run_sync_soon(self._stepped_aside, run)

    def _stepped_aside(self, run: TaskRun) -> None:
        """The thread is that task's own from now on; another one takes what was to come after it."""
        if run.is_aside or self._here.get(run.number) is not run or run.outcome is not None:
            return
        assert self._runner is not None
        assert self._runtime is not None
        run.is_aside = True
        self._aside += 1
        self._in_thread -= 1
        self._runner.stop()
        behind = [each for each in self._handed if self.waiting.pop(each, False)]
        for each in behind:
            each.is_aside = True  # its first run: the thread will find that it is nobody's
            self._in_thread -= 1
        for each in reversed(behind):
            fresh = self._here[each.number] = each.again()
            self.waiting[fresh] = True
            self._lane.appendleft(fresh)
        self._handed.clear()
        self._runner = self._context.run(self._runtime.host.make_runner, self.job_name, 1)
        if run.is_awaited:
            self._awaiting = False
        self._outcomes.append((run.number, ASIDE, b""))
        self._wake()
        self._pump()

    async def on_thread(self, run: TaskRun) -> None:
        """Run a sync task and wait for its end; a cancelled wait leaves the thread alone."""
        assert self._runner is not None
        self._hand(run, self._runner)
        self._runner.flush()
        await run.finished.wait()

    async def wait_for_thread(self, run: TaskRun) -> None:
        """It has been told to end. The thread is needed: if the pool says so, its process ends instead."""
        with trio.move_on_after(math.inf if self._kill_after_s is None else self._kill_after_s):
            await run.finished.wait()
        if not run.finished.is_set():
            self._doomed = SystemExit(f"task {run.method!r} did not end {self._kill_after_s:g} s after it was told to")
            self._wake()
            await run.finished.wait()

    async def off_loop(self, fn: Callable[[], Any]) -> Any:
        """Unpickling imports modules: not in the loop."""
        assert self._runner is not None
        return await self._runner.run(fn)

    def left_thread(self, run: TaskRun) -> None:
        """The thread is done with it, whether or not it began."""
        if not run.is_aside:
            self._in_thread -= 1
        elif run.begun:
            self._aside -= 1
        self.ended(run)

    def ended(self, run: TaskRun) -> None:
        """It has ended, and its outcome, if it has not been told before, is there."""
        self._left(run)
        if run.begun:
            self._ran += 1
            self._busy_s += run.seconds
        if run.outcome is not None:
            self.tell(run)
        if self._lane:
            self._pump()

    def _left(self, run: TaskRun) -> None:
        if self._here.get(run.number) is run:
            del self._here[run.number]

    def released(self) -> None:
        """A task that was awaited here has ended."""
        self._awaiting = False
        self._pump()

    def tell(self, run: TaskRun) -> None:
        """Its outcome, once."""
        if run.outcome is None or run.told:
            return
        run.told = True
        self._outcomes.append(run.outcome)
        self._wake()

    def _wake(self) -> None:
        if self._parked is not None:
            self._parked.set()
            self._parked = None

    def _cancel(self, number: int) -> None:
        run = self._here.get(number)
        if run is None:
            return  # its outcome is on the way
        if not self.waiting.pop(run, False):
            run.stop()
        else:
            run.outcome = (number, CANCELLED, b"")
            self.tell(run)
