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

from fray.errors import FrayError
from fray.runtime.context import Runtime, current
from fray.runtime.tasks.task_run import (
    ASIDE,
    CANCELLED,
    SentFunction,
    TaskRun,
    WireOutcome,
)
from fray.runtime.threads.executor import SerialExecutor

ASIDE_LIMIT = 1_000
"""Tasks of one worker that wait, each on a thread."""
ANSWER_BYTES = 4 * 1024 * 1024
"""Outcomes in one answer: as many as fit, and at least one."""

WireTask: TypeAlias = tuple[int, int, bytes, bool, bool, float | None]
"""Number, number of the function, pickled arguments, with keywords, async, seconds it may run."""
WireFunction: TypeAlias = tuple[int, bytes, str]
"""Number, pickle, name for people."""


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
        self._functions: dict[int, SentFunction] = {}
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
        self._runner: SerialExecutor | None = None
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
            self._functions[number] = SentFunction(data, name)
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
        self._runner = runtime.host.make_executor(self.job_name, 1)
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

    def _hand(self, run: TaskRun, runner: SerialExecutor) -> None:
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
        self._runner = self._context.run(self._runtime.host.make_executor, self.job_name, 1)
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
