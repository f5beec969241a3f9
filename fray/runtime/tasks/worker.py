"""Actor class in each process of a pool: queues tasks, runs them one by one, reports their outcomes.

One method carries everything in both directions. `TaskWorker.exchange` brings tasks, functions and requests; it
returns when there are outcomes, or when the next call arrives. So outcomes ride on the answers, as many as there are,
and no task costs a message of its own.
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
from fray.model.service_key import ServiceKey
from fray.runtime.actors.server import host_of
from fray.runtime.runtime import Runtime, current
from fray.runtime.serialization.pickling import Enclosed, size_of_enclosed
from fray.runtime.tasks.task_run import (
    BLOCKED,
    CANCELLED,
    SentFunction,
    TaskRun,
    WireOutcome,
)
from fray.runtime.threads.executor import SerialExecutor

# Deep recursion of tasks would otherwise exhaust the threads of the process without a message.
BLOCKED_LIMIT = 1_000
"""Maximum number of tasks of one worker that wait for others, each on its own thread."""
ANSWER_BYTES = 4 * 1024 * 1024
"""Limit of the outcomes in one answer: as many as fit, and at least one."""

WireTask: TypeAlias = tuple[int, int, Enclosed, bool, bool, float | None]
"""Number, number of the function, pickled arguments, has_kwargs, is_async, timeout_s."""
WireFunction: TypeAlias = tuple[int, bytes, str]
"""Number, pickle, name for messages."""


class TaskWorker:
    """Actor class of pool workers."""

    def __init__(
        self, kill_after_s: float | None = None, services: Mapping[ServiceKey[Any], object] | None = None
    ) -> None:
        self.job_id, self.job_name = "", ""
        self._kill_after_s = kill_after_s
        self._services = services or {}
        self._exit_error: SystemExit | None = None
        self.waiting: dict[TaskRun, bool] = {}
        """Runs that have not begun. Popping a run claims it, atomically: the thread begins it, or the loop returns it.

        Keyed by run, not by number: a returned task may come again while its first run is still in the thread's queue.
        """
        self._backlog: deque[TaskRun] = deque()
        """Runs not submitted to the thread yet, behind one that is awaited in the loop."""
        self._functions: dict[int, SentFunction] = {}
        self._runs: dict[int, TaskRun] = {}
        """Runs that have not ended."""
        self._in_thread = 0
        """Number of runs submitted to the thread that have not left it."""
        self._submitted: deque[TaskRun] = deque()
        """Submitted runs in order, including some that have left the thread."""
        self._blocked = 0
        self._awaiting = False
        self._outcomes: deque[WireOutcome] = deque()
        self._busy_s = 0.0
        self._ran = 0
        self._open_exchange: trio.Event | None = None
        self._runner: SerialExecutor | None = None
        self._runtime: Runtime | None = None
        self._context = copy_context()
        """Context variables of its threads."""
        self._spawn: Callable[[Callable[[], Any]], None] = lambda task: None
        self.clock: Callable[[], float] = time.perf_counter
        """Clock for the measured pace: the actor server's, which is constant in simulation."""

    # The exchange ----------------------------------------------------------------------------------------------------

    async def exchange(
        self,
        tasks: Sequence[WireTask],
        functions: Sequence[WireFunction],
        forget: Sequence[int],
        back: Sequence[int],
        cancel: Sequence[int],
    ) -> tuple[list[WireOutcome], list[int], int, float]:
        """Queue, return and cancel tasks; return (outcomes, returned tasks, tasks run, seconds they took)."""
        if self._runner is None:
            self._begin()
        # Before the new ones: a number is never reused, so the order only bounds the memory.
        for number in forget:
            self._functions.pop(number, None)
        for number, data, name in functions:
            self._functions[number] = SentFunction(data, name)
        # Functions before tasks, and tasks before `back` and `cancel`, which may name any task sent so far.
        self._queue_tasks(tasks)
        returned = [number for number in back if self._return_task(number)]
        for number in cancel:
            self._cancel(number)
        self._start_tasks()
        # One open call is enough to report through; the one before returns, so that calls do not pile up.
        previous, self._open_exchange = self._open_exchange, None
        if previous is not None:
            previous.set()
        # A steal is answered at once, as an idle worker waits for these tasks.
        if not self._outcomes and not back:
            self._open_exchange = here = trio.Event()
            await here.wait()
        # SystemExit ends the actor as failed: the pool retries or fails the task, and the process is replaced.
        if self._exit_error is not None:
            raise self._exit_error
        return self._report(returned)

    def _report(self, returned: list[int]) -> tuple[list[WireOutcome], list[int], int, float]:
        outcomes: list[WireOutcome] = []
        size = 0
        # One outcome of any size, or it could never be sent.
        while self._outcomes and (not outcomes or size + size_of_enclosed(self._outcomes[0][2]) <= ANSWER_BYTES):
            outcome = self._outcomes.popleft()
            outcomes.append(outcome)
            size += size_of_enclosed(outcome[2])
        ran, busy_s, self._ran, self._busy_s = self._ran, self._busy_s, 0, 0.0
        return outcomes, returned, ran, busy_s

    # Running ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        runtime = self._runtime = current()
        for key, service in self._services.items():
            runtime.services[key] = service
        self._context = copy_context()
        self.job_id, self.job_name = runtime.job_id or "", runtime.job_name
        self._runner = host_of(runtime).make_executor(self.job_name, 1)
        self._spawn = host_of(runtime).spawn
        self.clock = host_of(runtime).clock
        # The thread belongs to the actor server's lifetime, whichever way that ends.
        self._spawn(self._hold_thread)

    async def _hold_thread(self) -> None:
        """Stop the thread when the actor server ends."""
        assert self._runner is not None
        try:
            await trio.sleep_forever()
        finally:
            self._runner.stop()

    def _queue_tasks(self, tasks: Sequence[WireTask]) -> None:
        for number, function, args, has_kwargs, is_async, timeout_s in tasks:
            run = TaskRun(self, number, self._functions[function], args, has_kwargs, is_async, timeout_s)
            self._runs[number] = run
            self.waiting[run] = True
            self._backlog.append(run)

    def _return_task(self, number: int) -> bool:
        """Withdraw a task for the dispatcher; return False if it has begun."""
        run = self._runs.get(number)
        # The thread may claim it at the same moment; the pop decides.
        if run is None or not self.waiting.pop(run, False):
            return False
        del self._runs[number]
        return True

    def _start_tasks(self) -> None:
        """Submit the tasks up to the next awaited one to the thread; start the awaited one once the thread is free."""
        runner = self._runner
        assert runner is not None
        while self._backlog and not self._awaiting:
            run = self._backlog[0]
            # An awaited task runs in the loop, beside the thread: without this wait two tasks would run at once.
            if run.is_awaited and self._in_thread:
                break
            self._backlog.popleft()
            if run not in self.waiting:
                self._forget(run)  # returned or cancelled
            elif run.is_awaited:
                self._awaiting = True
                # The end of a sync task may call here, from its thread: that context knows no runtime.
                self._context.run(self._spawn, run.run_awaited)
            else:
                self._submit(run, runner)
        runner.flush()

    def _submit(self, run: TaskRun, runner: SerialExecutor) -> None:
        self._in_thread += 1
        # Entries of runs that have begun are dropped here, so the list stays as short as the thread's queue.
        while self._submitted and self._submitted[0] not in self.waiting:
            self._submitted.popleft()
        self._submitted.append(run)
        runner.submit(run)

    # Blocked tasks ---------------------------------------------------------------------------------------------------

    def mark_blocked(self, run: TaskRun) -> None:
        """Report, on its thread, that a task is going to wait for others. Raises FrayError."""
        # Read on another thread, so the limit may be exceeded by a few, which is harmless.
        if self._blocked >= BLOCKED_LIMIT:
            raise FrayError(
                f"{BLOCKED_LIMIT} tasks of this worker wait for other tasks, each on a thread: nest them less deeply, "
                "or let the one that starts them wait"
            )
        assert self._runtime is not None
        self._runtime.token.run_sync_soon(self._on_blocked, run)

    def _on_blocked(self, run: TaskRun) -> None:
        """Leave the thread to the blocked task, and continue the tasks behind it on a new thread.

        Another process in its place would need room in the cluster, and could itself be what the task waits for. The
        blocked task does not return to the queue: an oversubscribed CPU for a while costs less than a second protocol.
        """
        # The report has crossed from a thread: meanwhile the task may have ended, or reported twice.
        if run.is_blocked or self._runs.get(run.number) is not run or run.outcome is not None:
            return
        assert self._runner is not None
        assert self._runtime is not None
        run.is_blocked = True
        self._blocked += 1
        self._in_thread -= 1
        # The old thread ends after the blocked task; work submitted behind it is skipped, as it is claimed below.
        self._runner.stop()
        behind = [later for later in self._submitted if self.waiting.pop(later, False)]
        for later in behind:
            later.is_blocked = True  # the old thread skips this run: it is not in `waiting` any more
            self._in_thread -= 1
        # In front of the backlog and in their order.
        for later in reversed(behind):
            fresh = self._runs[later.number] = later.copy()
            self.waiting[fresh] = True
            self._backlog.appendleft(fresh)
        self._submitted.clear()
        # A new thread must not inherit the context of the code that happens to call here.
        self._runner = self._context.run(host_of(self._runtime).make_executor, self.job_name, 1)
        if run.is_awaited:
            self._awaiting = False
        self._outcomes.append((run.number, BLOCKED, b""))
        self._answer_exchange()
        self._start_tasks()

    async def on_thread(self, run: TaskRun) -> None:
        """Run a sync task and wait for its end; a cancelled wait leaves the thread alone."""
        assert self._runner is not None
        self._submit(run, self._runner)
        self._runner.flush()
        await run.finished.wait()

    async def wait_for_thread(self, run: TaskRun) -> None:
        """Wait until a cancelled or timed out task has left the thread; after `kill_after_s`, end the process."""
        with trio.move_on_after(math.inf if self._kill_after_s is None else self._kill_after_s):
            await run.finished.wait()
        if not run.finished.is_set():
            # Set and raised by the next answer: an exception in this task would end the server without an outcome.
            self._exit_error = SystemExit(
                f"task {run.method!r} did not end within {self._kill_after_s:g} s after it was cancelled"
            )
            self._answer_exchange()
            await run.finished.wait()

    async def run_on_thread(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` on the thread: unpickling imports modules, which must not block the loop."""
        assert self._runner is not None
        return await self._runner.run(fn)

    def left_thread(self, run: TaskRun) -> None:
        """Count a run that has left the thread, whether or not it began."""
        if not run.is_blocked:
            self._in_thread -= 1
        elif run.begun:
            self._blocked -= 1
        self.ended(run)

    def ended(self, run: TaskRun) -> None:
        """Count a run that has ended, and report its outcome unless that was reported before."""
        self._forget(run)
        if run.begun:
            self._ran += 1
            self._busy_s += run.seconds
        if run.outcome is not None:
            self.report(run)
        if self._backlog:
            self._start_tasks()

    def _forget(self, run: TaskRun) -> None:
        if self._runs.get(run.number) is run:
            del self._runs[run.number]

    def released(self) -> None:
        """Continue with the backlog after an awaited task has ended."""
        self._awaiting = False
        self._start_tasks()

    def report(self, run: TaskRun) -> None:
        """Report the outcome of a run, once."""
        # A task that was cancelled while it ran has been reported before its thread ended.
        if run.outcome is None or run.is_reported:
            return
        run.is_reported = True
        self._outcomes.append(run.outcome)
        self._answer_exchange()

    def _answer_exchange(self) -> None:
        if self._open_exchange is not None:
            self._open_exchange.set()
            self._open_exchange = None

    def _cancel(self, number: int) -> None:
        run = self._runs.get(number)
        if run is None:
            return  # its outcome is on the way
        if not self.waiting.pop(run, False):
            run.stop()
        else:
            run.outcome = (number, CANCELLED, b"")
            self.report(run)
