"""Threads that many all-sync actors share: each has a lane, in which its calls keep their order.

A lane with work waits for a free thread; a thread stays in a lane for a slice, then takes the next. There are few
threads, and one more whenever nobody has got on for a while, up to a limit: so a thousand actors are no thousand
threads, and some that block do not hold up the others.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

import trio

from fray.errors import ActorDied
from fray.runtime.current_call import current_actor_var
from fray.runtime.threads.executor import SWITCH_INTERVAL_S, FunctionCall, WorkItem
from fray.runtime.threads.user_threads import register_thread

FIRST_THREADS = 2
THREADS_LIMIT = 128
"""So many lanes may block at once; the others then wait for one of them."""
STUCK_S = 0.01
"""How long lanes wait, while none gets on, before there is a thread more."""
SLICE_S = 0.002


class SharedThreadPool:
    """The threads. ``spawn`` starts a task in the loop; threads begin with the first work."""

    def __init__(self, name: str, spawn: Callable[[Callable[[], Any]], None]) -> None:
        self.name = name
        self.threads = 0
        self.turns = 0
        """Turns that have ended."""
        self._spawn = spawn
        self._inbox: SimpleQueue[SerialQueue | None] = SimpleQueue()
        self._outbox: deque[SerialQueue | WorkItem] = deque()
        self._collect_scheduled = False
        self._waiting = 0
        """Turns asked for and not ended."""
        self._watched = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._context = copy_context()
        """What the threads begin with: the place in the cluster, and no call."""
        self._context.run(current_actor_var.set, None)

    def make_queue(self, name: str, width: int = 1) -> SerialQueue:
        """A new lane, of which ``width`` jobs may run at once."""
        return SerialQueue(self, name, width)

    def stop(self) -> None:
        """The threads end when they are free."""
        for _ in range(self.threads):
            self._inbox.put(None)
        self.threads = THREADS_LIMIT  # none is added

    # In the loop

    def request_turn(self, lane: SerialQueue) -> None:
        if self._token is None:
            self._token = trio.lowlevel.current_trio_token()
        self._waiting += 1
        while self.threads < FIRST_THREADS:
            self._add_thread()
        self._inbox.put(lane)
        if not self._watched:
            self._watched = True
            self._spawn(self._watch)

    async def _watch(self) -> None:
        """While there is work: a thread more whenever none has come to the end of a turn for a while."""
        while self._waiting:
            turns = self.turns
            await trio.sleep(STUCK_S)
            if self._waiting > self.threads and turns == self.turns and self.threads < THREADS_LIMIT:
                self._add_thread()
        self._watched = False

    def _add_thread(self) -> None:
        self.threads += 1
        name = f"{self.name}-{self.threads}"
        threading.Thread(target=self._context.copy().run, args=(self._begin, name), name=name, daemon=True).start()

    def _begin(self, name: str) -> None:
        with register_thread(name):
            self._serve()

    def _collect(self) -> None:
        self._collect_scheduled = False
        outbox = self._outbox
        while outbox:
            done = outbox.popleft()
            if isinstance(done, SerialQueue):
                self._waiting -= 1
                self.turns += 1
                done.turn_ended()
            else:
                done.done()

    # On a thread

    def _serve(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        while (lane := self._inbox.get()) is not None:
            try:
                lane.work(self._finished)
            finally:
                self._finished(lane)

    def _finished(self, what: SerialQueue | WorkItem) -> None:
        self._outbox.append(what)
        if not self._collect_scheduled:
            self._collect_scheduled = True
            assert self._token is not None
            try:
                self._token.run_sync_soon(self._collect)
            except trio.RunFinishedError:
                pass  # the loop has ended: nobody waits for results


class SerialQueue:
    """The work of one actor: a `fray.runtime.threads.executor.Runner`."""

    __slots__ = ("_pool", "_queue", "_stopped", "_turns", "name", "width")

    def __init__(self, pool: SharedThreadPool, name: str, width: int) -> None:
        self.name = name
        self.width = width
        self._pool = pool
        self._queue: deque[WorkItem] = deque()
        self._turns = 0
        self._stopped = False

    def submit(self, job: WorkItem) -> None:
        self._queue.append(job)

    def flush(self) -> None:
        while self._turns < min(self.width, len(self._queue)):
            self._turns += 1
            self._pool.request_turn(self)

    async def run(self, fn: Callable[[], Any]) -> Any:
        """As `Executor.run`."""
        if self._stopped:
            raise ActorDied(f"the lane of {self.name!r} has been stopped")
        errand = FunctionCall(fn)
        self.submit(errand)
        self.flush()
        await errand.finished.wait()
        return errand.result()

    def stop(self) -> None:
        self._stopped = True

    def turn_ended(self) -> None:
        """In the loop."""
        self._turns -= 1
        self.flush()

    def work(self, finished: Callable[[WorkItem], None]) -> None:
        """On a thread: one turn."""
        until = time.perf_counter() + SLICE_S
        while True:
            try:
                job = self._queue.popleft()
            except IndexError:
                return
            try:
                job.run()
            except KeyboardInterrupt:
                pass  # a method's own: it is its caller's answer, and its actor's end
            finally:
                finished(job)
            if time.perf_counter() >= until:
                return
