"""Thread pool shared by many all-sync light actors, with one serial queue per actor.

A queue with work waits for a free thread; a thread works on one queue for a time slice, then takes the next. The pool
starts with few threads and adds one whenever no queue has made progress for a while, up to a limit: so a thousand
actors do not need a thousand threads, and blocked ones do not hold up the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

import trio

from fray.errors import ActorDied
from fray.net.switch_interval import shorten_switch_interval
from fray.runtime.current_call import current_actor_var
from fray.runtime.threads.executor import Collector, FunctionCall, WorkItem
from fray.runtime.threads.user_threads import register_thread

# Two, so that a single blocking method does not delay the others until a thread is added.
FIRST_THREADS = 2
THREADS_LIMIT = 128
"""Maximum number of threads, and so of queues that may block at once; further ones wait for one of them."""
# Progress and not load decides: CPU-bound methods make progress and gain nothing from more threads.
STUCK_S = 0.01
"""Seconds without progress of any queue, while some wait, after which a thread is added."""
SLICE_S = 0.002


class SharedThreadPool:
    """Threads that take turns on serial queues.

    ``spawn`` starts a task in the loop; threads start with the first work.
    """

    def __init__(self, name: str, spawn: Callable[[Callable[[], Any]], None]) -> None:
        self.name = name
        self.threads = 0
        self.turns = 0
        """Count of the turns that have ended."""
        self._spawn = spawn
        self._inbox: SimpleQueue[SerialQueue | None] = SimpleQueue()
        self._finished = Collector()
        self._waiting = 0
        """Count of the turns requested and not ended."""
        self._growing = False
        self._context = copy_context()
        """Context variables the threads start with: those of the cluster, without a current call."""
        self._context.run(current_actor_var.set, None)

    def make_queue(self, name: str, width: int = 1) -> SerialQueue:
        """Return a new queue, of which ``width`` items may run at once."""
        return SerialQueue(self, name, width)

    def stop(self) -> None:
        """End each thread once it is free."""
        for _ in range(self.threads):
            self._inbox.put(None)
        self.threads = THREADS_LIMIT  # none is added

    # In the loop

    def request_turn(self, queue: SerialQueue) -> None:
        self._finished.attach()
        self._waiting += 1
        while self.threads < FIRST_THREADS:
            self._add_thread()
        self._inbox.put(queue)
        if not self._growing:
            self._growing = True
            self._spawn(self._grow)

    async def _grow(self) -> None:
        """Add a thread whenever no turn has ended for `STUCK_S`, as long as there is work."""
        while self._waiting:
            turns = self.turns
            await trio.sleep(STUCK_S)
            # Only if turns wait for a thread, and none has ended: each thread is then blocked or in a long method.
            if self._waiting > self.threads and turns == self.turns and self.threads < THREADS_LIMIT:
                self._add_thread()
        self._growing = False

    def _add_thread(self) -> None:
        self.threads += 1
        name = f"{self.name}-{self.threads}"
        threading.Thread(target=self._context.copy().run, args=(self._begin, name), name=name, daemon=True).start()

    def _begin(self, name: str) -> None:
        with register_thread(name):
            self._serve()

    def on_turn_ended(self) -> None:
        self._waiting -= 1
        self.turns += 1

    # On a thread

    def _serve(self) -> None:
        shorten_switch_interval()
        while (queue := self._inbox.get()) is not None:
            try:
                queue.work(self._finished)
            finally:
                # The queue itself is the finished item: its `done` requests the next turn, in the loop.
                self._finished.put(queue)


class SerialQueue:
    """Work of one actor on the shared threads: a `fray.runtime.threads.executor.SerialExecutor`."""

    __slots__ = ("_pool", "_queue", "_stopped", "_turns", "name", "width")

    def __init__(self, pool: SharedThreadPool, name: str, width: int) -> None:
        self.name = name
        self.width = width
        self._pool = pool
        self._queue: deque[WorkItem] = deque()
        self._turns = 0
        self._stopped = False

    def submit(self, item: WorkItem) -> None:
        self._queue.append(item)

    def flush(self) -> None:
        # As many turns as may run at once, and no more than there is work: an empty turn costs a wake-up.
        while self._turns < min(self.width, len(self._queue)):
            self._turns += 1
            self._pool.request_turn(self)

    async def run(self, fn: Callable[[], Any]) -> Any:
        if self._stopped:
            raise ActorDied(f"the queue of {self.name!r} has been stopped")
        return await FunctionCall(fn).run_on(self)

    def stop(self) -> None:
        self._stopped = True

    def done(self) -> None:
        """Count an ended turn, and request the next if there is more work. Loop only."""
        self._pool.on_turn_ended()
        self._turns -= 1
        self.flush()

    def work(self, finished: Collector) -> None:
        """Run items for one time slice, on the calling thread of the pool."""
        until = time.perf_counter() + SLICE_S
        while True:
            try:
                # Turns of one queue share its items; which of them takes the last one is decided by the atomic pop.
                item = self._queue.popleft()
            except IndexError:
                return
            try:
                item.run()
            except KeyboardInterrupt:
                pass  # raised by the method itself: it is the caller's error and ends the actor, not this thread
            finally:
                finished.put(item)
            # At least one item, however long the one before took.
            if time.perf_counter() >= until:
                return
