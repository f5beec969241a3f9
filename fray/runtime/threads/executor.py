"""Executors that run sync user code off the loop, in order, and return its results in bursts.

A burst of work goes to the thread as one item of a queue; everything the thread has finished by the time the loop
collects comes back together. So a loaded actor costs the loop one wake-up for many calls: a thread hop per call takes
150 us through a portal, a shared burst 60 us.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, Protocol

import trio

from fray.errors import ActorDied
from fray.net.switch_interval import shorten_switch_interval as shorten_switch_interval
from fray.runtime.threads.user_threads import register_thread


class Finished(Protocol):
    """Part of a work item that the loop uses at its end."""

    def done(self) -> None: ...


class WorkItem(Finished, Protocol):
    """One unit of work.

    `run` is called on a thread and raises nothing but KeyboardInterrupt; `done` is called in the loop.
    """

    def run(self) -> None: ...


class SerialExecutor(Protocol):
    """Interface of an executor that starts the work of one actor in the order of `submit`.

    Implemented by `ThreadExecutor` (threads of its own), `InlineExecutor` (no thread) and
    `fray.runtime.threads.shared_pool.SerialQueue` (shared threads).
    """

    def submit(self, item: WorkItem) -> None:
        """Add work; it need not start before `flush`."""

    def flush(self) -> None:
        """Start the submitted work."""

    async def run(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` after the work submitted before it, and return its result or raise its error.

        A cancelled wait returns at once; a running ``fn`` is not interrupted.

        Raises:
            ActorDied: the executor has been stopped.
        """

    def stop(self) -> None:
        """Accept no more work; submitted work still runs."""


class FunctionCall:
    """Work item of one function whose result a task in the loop waits for."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.fn = fn
        self.value: Any = None
        self.error: BaseException | None = None
        self.finished = trio.Event()

    def run(self) -> None:
        try:
            self.value = self.fn()
        except BaseException as error:  # noqa: BLE001 - raised by the task that waits
            self.error = error

    def done(self) -> None:
        self.finished.set()

    async def run_on(self, executor: SerialExecutor) -> Any:
        """Submit this function and wait for its result."""
        executor.submit(self)
        executor.flush()
        await self.finished.wait()
        if self.error is not None:
            raise self.error
        return self.value


class Collector:
    """Finished work of threads on its way back to the loop, which calls `WorkItem.done` of all there is at once."""

    __slots__ = ("_finished", "_is_scheduled", "_token")

    def __init__(self) -> None:
        self._finished: deque[Finished] = deque()
        self._is_scheduled = False
        self._token: trio.lowlevel.TrioToken | None = None

    def attach(self) -> None:
        """Use the current loop; to be called there before the first `put`."""
        if self._token is None:
            self._token = trio.lowlevel.current_trio_token()

    def put(self, item: Finished) -> None:
        """Hand over a finished item, on its thread."""
        self._finished.append(item)
        # One `run_sync_soon` for a burst; setting the flag twice at a race costs one empty collection.
        if not self._is_scheduled:
            self._is_scheduled = True
            assert self._token is not None
            try:
                self._token.run_sync_soon(self._collect)
            except trio.RunFinishedError:
                pass  # the loop has ended: no task waits for results

    def _collect(self) -> None:
        self._is_scheduled = False  # first, so that what is put from here on is collected again
        finished = self._finished
        while finished:
            finished.popleft().done()


class ThreadExecutor:
    """Executor with threads of its own (`start`), or on the thread that calls `run_on_this_thread`.

    One thread runs the work in order; with more threads, items overtake one another. The threads are daemons, so that
    a method that never ends does not keep the process alive.
    """

    def __init__(self, name: str = "fray-actor") -> None:
        self.name = name
        # Implemented in C; `queue.Queue` is Python code around a lock and three conditions, paid for each burst.
        self._inbox: SimpleQueue[list[WorkItem] | None] = SimpleQueue()
        self._finished = Collector()
        self._submitted: list[WorkItem] = []
        self._threads = 0
        self._stopped = False
        self.is_running = False
        """Flag: a thread is running an item. A snapshot; with several threads a hint."""

    # In the loop -----------------------------------------------------------------------------------------------------

    def start(self, threads: int = 1) -> None:
        """Start threads; they run with a copy of the caller's context variables."""
        self._threads += threads
        for number in range(threads):
            name = self.name if threads == 1 else f"{self.name}-{number}"
            # The context of the actor: threads do not inherit context variables by themselves.
            threading.Thread(target=copy_context().run, args=(self._begin, name), name=name, daemon=True).start()

    def ensure_threads(self, threads: int) -> None:
        """Start threads until there are ``threads`` of them."""
        self.start(max(0, threads - self._threads))

    def submit(self, item: WorkItem) -> None:
        self._submitted.append(item)

    def flush(self) -> None:
        items = self._submitted
        if not items:
            return
        self._submitted = []
        self._finished.attach()
        # A burst as one item for a single thread; with several threads one of them would keep the whole burst.
        if self._threads <= 1:
            self._inbox.put(items)
        else:
            for item in items:
                self._inbox.put([item])

    async def run(self, fn: Callable[[], Any]) -> Any:
        if self._stopped:
            raise ActorDied(f"the thread {self.name!r} has been stopped")
        return await FunctionCall(fn).run_on(self)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            # One sentinel for each thread, behind the submitted work, which still runs.
            for _ in range(max(1, self._threads)):
                self._inbox.put(None)

    # On the thread ---------------------------------------------------------------------------------------------------

    def run_on_this_thread(self, *, only_functions: bool = False) -> None:
        """Serve until `stop`. A KeyboardInterrupt, also in the middle of an item, stops the serving and is raised.

        ``only_functions`` is for serving again after such an interrupt: submitted items are dropped, functions of
        `run` (the actor's cleanup) still run.
        """
        # The sentinel has been taken by the run that was interrupted: waiting for another one would hang.
        if self._stopped and self._inbox.empty():
            return
        # Counted, so that `flush` and `stop` know the thread that has lent itself.
        self._threads += 1
        try:
            self._serve(only_functions)
        finally:
            self._threads -= 1

    def _begin(self, name: str) -> None:
        with register_thread(name):
            self._serve()

    def _serve(self, only_functions: bool = False) -> None:
        # A CPU-bound thread holds the GIL for 5 ms by default, which the loop beside it would wait for at each step.
        shorten_switch_interval()
        inbox, finish = self._inbox, self._finished.put
        while True:
            items = inbox.get()
            if items is None:
                return
            for item in items:
                # The calls were answered before the interrupt; only the cleanup is left to run.
                if only_functions and not isinstance(item, FunctionCall):
                    continue
                self.is_running = True
                try:
                    item.run()
                finally:
                    self.is_running = False
                    # In the `finally`: an interrupted item has ended as well, and its caller needs the answer.
                    finish(item)


class InlineExecutor:
    """Executor that runs work in the loop itself: for simulation, where threads would break determinism."""

    def __init__(self) -> None:
        self._submitted: deque[WorkItem] = deque()

    def submit(self, item: WorkItem) -> None:
        self._submitted.append(item)

    def flush(self) -> None:
        while self._submitted:
            item = self._submitted.popleft()
            # As on a thread: what an item sets must not reach the loop's task.
            copy_context().run(item.run)
            item.done()

    async def run(self, fn: Callable[[], Any]) -> Any:
        await trio.lowlevel.checkpoint()
        return fn()

    def stop(self) -> None:
        pass
