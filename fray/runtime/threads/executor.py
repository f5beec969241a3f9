"""The thread seam: sync user code runs off the loop, in order, and its results come back in bursts.

A burst of work goes to the thread as one item of a queue; whatever it has finished when the loop looks comes back at
once. So a loaded actor costs the loop one wake-up for many calls.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, Protocol

import trio

from fray.errors import ActorDied
from fray.runtime.threads.user_threads import register_thread

SWITCH_INTERVAL_S = 0.0002
"""How long a busy thread keeps the interpreter from the loop; Python's default is 0.005."""


class WorkItem(Protocol):
    """One piece of work. `run` is called on the thread and never raises but KeyboardInterrupt; `done` in the loop."""

    def run(self) -> None: ...

    def done(self) -> None: ...


class SerialExecutor(Protocol):
    """Runs the jobs of one actor in the order of `submit`; `Executor` and `InlineExecutor` are two."""

    def submit(self, job: WorkItem) -> None:
        """Take the job; it need not begin before `flush`."""

    def flush(self) -> None:
        """Begin what was submitted."""

    async def run(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` in its turn and return its result."""

    def stop(self) -> None:
        """No more work comes; what was submitted is still run."""


class FunctionCall:
    """One function for `Executor.run`."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.fn = fn
        self.value: Any = None
        self.error: BaseException | None = None
        self.finished = trio.Event()

    def run(self) -> None:
        try:
            self.value = self.fn()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asked
            self.error = error

    def done(self) -> None:
        self.finished.set()

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Executor:
    """Runs jobs on threads of its own (`start`), or on the thread that calls `run_on_this_thread`.

    One thread keeps the order; more let jobs overtake one another. The threads are daemons: a job that never ends
    does not keep the process alive.
    """

    def __init__(self, name: str = "fray-actor") -> None:
        self.name = name
        self._inbox: SimpleQueue[list[WorkItem] | None] = SimpleQueue()
        self._outbox: deque[WorkItem] = deque()
        self._submitted: list[WorkItem] = []
        self._collect_scheduled = False
        self._threads = 0
        self._stopped = False
        self.is_running = False
        """A thread is inside a job. A snapshot; with several threads a hint."""
        self._token: trio.lowlevel.TrioToken | None = None

    # In the loop -----------------------------------------------------------------------------------------------------

    def start(self, threads: int = 1) -> None:
        """Begin threads; they see the context variables of the caller."""
        self._threads += threads
        for number in range(threads):
            name = self.name if threads == 1 else f"{self.name}-{number}"
            threading.Thread(target=copy_context().run, args=(self._begin, name), name=name, daemon=True).start()

    def ensure_threads(self, threads: int) -> None:
        """Begin as many threads as are missing to so many."""
        self.start(max(0, threads - self._threads))

    def submit(self, job: WorkItem) -> None:
        self._submitted.append(job)

    def flush(self) -> None:
        jobs = self._submitted
        if not jobs:
            return
        self._submitted = []
        if self._token is None:
            self._token = trio.lowlevel.current_trio_token()
        if self._threads <= 1:
            self._inbox.put(jobs)
        else:
            for job in jobs:
                self._inbox.put([job])

    async def run(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` on the thread, after what was submitted before, and return its result or raise its error.

        A cancelled wait leaves at once; the thread is not interrupted.

        Raises:
            ActorDied: the executor has been stopped.
        """
        if self._stopped:
            raise ActorDied(f"the thread {self.name!r} has been stopped")
        errand = FunctionCall(fn)
        self.submit(errand)
        self.flush()
        await errand.finished.wait()
        return errand.result()

    def stop(self) -> None:
        """The threads end after what was submitted."""
        if not self._stopped:
            self._stopped = True
            for _ in range(max(1, self._threads)):
                self._inbox.put(None)

    def _collect(self) -> None:
        self._collect_scheduled = False
        outbox = self._outbox
        while outbox:
            outbox.popleft().done()

    # On the thread ---------------------------------------------------------------------------------------------------

    def run_on_this_thread(self, *, only_functions: bool = False) -> None:
        """Serve until `stop`. A KeyboardInterrupt, also one in the middle of a job, ends it and goes up.

        With ``only_functions``, after such an interrupt: what came by `submit` is dropped, what came by `run` is run.
        """
        if self._stopped and self._inbox.empty():
            return
        self._threads += 1
        try:
            self._serve(only_functions)
        finally:
            self._threads -= 1

    def _begin(self, name: str) -> None:
        with register_thread(name):
            self._serve()

    def _serve(self, only_functions: bool = False) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        inbox, outbox = self._inbox, self._outbox
        while True:
            jobs = inbox.get()
            if jobs is None:
                return
            for job in jobs:
                if only_functions and not isinstance(job, FunctionCall):
                    continue
                self.is_running = True
                try:
                    job.run()
                finally:
                    self.is_running = False
                    outbox.append(job)
                    if not self._collect_scheduled:
                        self._collect_scheduled = True
                        self._schedule_collect()

    def _schedule_collect(self) -> None:
        assert self._token is not None
        try:
            self._token.run_sync_soon(self._collect)
        except trio.RunFinishedError:
            pass  # the loop has ended: nobody waits for results


class InlineExecutor:
    """Runs jobs in the loop itself: for simulation, where threads would break determinism."""

    def __init__(self) -> None:
        self._submitted: deque[WorkItem] = deque()

    def submit(self, job: WorkItem) -> None:
        self._submitted.append(job)

    def flush(self) -> None:
        while self._submitted:
            job = self._submitted.popleft()
            copy_context().run(job.run)
            job.done()

    async def run(self, fn: Callable[[], Any]) -> Any:
        await trio.lowlevel.checkpoint()
        return fn()

    def stop(self) -> None:
        pass
