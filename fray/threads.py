"""Daemon threads for the sync code that `fray.v2` and `fray.job` run in this process.

They are daemons, so that no exit waits for user code. A thread that has done its work waits `IDLE_S` for more: starting
a thread costs twice what a call costs otherwise. The number of threads has no limit here, as any call may wait for any
other; `BoundedThreads` limits what runs concurrently. A child made by ``fork`` begins without any of them.

Neither runs on the `local` cluster, which also runs jobs on threads: it pickles what it runs, limits concurrency by
``max_concurrency``, does not survive a fork, and must open a loop first. A call to an actor of `LocalClient` takes
20 µs and a job 40 µs (on ``local``: 300 µs and 14 ms); callers rely on closures over locks and on shared objects.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import Context
from queue import Empty, SimpleQueue
from typing import Any

IDLE_S = 0.5
"""Seconds that a thread waits for more work before it ends."""


class _WorkerThread:
    """Thread with an inbox of calls."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work(self) -> None:
        while True:
            try:
                call = self.inbox.get(timeout=IDLE_S)
            except Empty:
                if _idle.pop(self, None) is not None:
                    return
                call = self.inbox.get()  # `_start` has just taken this worker off the list, and is about to put a call
            call()
            del call  # so that a waiting thread holds none of its objects
            _idle[self] = True


_idle: dict[_WorkerThread, bool] = {}
"""Waiting workers, the last one used first. Each operation on the dictionary is atomic: the thread that takes a worker
off it has it exclusively."""


def _start(call: Callable[[], None]) -> None:
    """Call ``call()`` on an idle worker, or on a new one."""
    try:
        worker, _ = _idle.popitem()
    except KeyError:
        worker = _WorkerThread()
        worker.inbox.put(call)  # first: an interrupt may come while the thread starts, which works all the same
        threading.Thread(target=worker.work, name="fray-idle", daemon=True).start()
    else:
        worker.inbox.put(call)


def call_in_thread(context: Context, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call ``fn`` at once, in ``context``, in a thread that has nothing else to do.

    The future gets what it returns or raises, SystemExit too.
    """
    item = _WorkItem(context, name, fn, args, kwargs)
    # It starts at once, so it can no longer be cancelled.
    item.future.set_running_or_notify_cancel()
    _start(item.run)
    return item.future


def lock_timeout(timeout: float | None) -> float | None:
    """Return a timeout as locks accept it: None in place of more than they can count, such as ``math.inf``."""
    return None if timeout is None or timeout > threading.TIMEOUT_MAX else timeout


class ThreadFuture(Future[Any]):
    """Result of a call in a thread of this process. A child made by ``fork`` has no such thread, so it cannot wait."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result. Raises RuntimeError: it is pending, and this process was forked since."""
        try:
            self._check_process()
            return super().result(lock_timeout(timeout))
        finally:
            del self  # else the error's traceback and the future would hold each other

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; return the error, or None. Raises as `result`."""
        self._check_process()
        return super().exception(lock_timeout(timeout))

    def _check_process(self) -> None:
        if os.getpid() != self._process and not self.done():
            raise RuntimeError(
                f"this call runs in process {self._process}, from which this process was forked: wait for it there, or "
                "make clients and actors after the fork"
            )


class _WorkItem:
    """Function, its arguments and context, and the future of its result."""

    __slots__ = ("args", "context", "fn", "future", "kwargs", "name")

    def __init__(self, context: Context, name: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.future = ThreadFuture()
        self.context, self.name, self.fn, self.args, self.kwargs = context, name, fn, args, kwargs

    def run(self) -> None:
        threading.current_thread().name = self.name
        try:
            value = self.context.run(self.fn, *self.args, **self.kwargs)
        except BaseException as error:  # noqa: BLE001 (it belongs to the caller that waits for the result)
            self.future.set_exception(error)
            del self  # else error, traceback, frame and future would hold each other, and the arguments
        else:
            self.future.set_result(value)


class BoundedThreads:
    """Calls functions on threads, at most ``limit`` of them concurrently, first come first served.

    Args:
        closed: text of the error that `submit` raises after `close`.
    """

    def __init__(self, limit: int, closed: str) -> None:
        self._limit, self._closed_text = limit, closed
        self._is_closed = False
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_WorkItem] = deque()
        self._threads: set[int] = set()
        self._busy = 0
        self._unfinished: set[Future[Any]] = set()

    def submit(self, context: Context, fn: Callable[[], Any], name: str) -> Future[Any]:
        """Call ``fn()`` in ``context`` when a thread is free; until then its future can be cancelled.

        Raises:
            RuntimeError: the pool was closed, or no thread can be started.
        """
        item = _WorkItem(context, name, fn, (), {})
        with self._lock:
            if self._is_closed:
                raise RuntimeError(self._closed_text)
            self._unfinished.add(item.future)
            self._waiting.append(item)
            # Counted before the thread exists: two submits at the limit must not both start one.
            starts = self._busy < self._limit
            self._busy += starts
        item.future.add_done_callback(self._unfinished.discard)
        if starts:
            self._start_thread(item)
        return item.future

    def _start_thread(self, item: _WorkItem | None = None) -> None:
        try:
            _start(self._work)
        except RuntimeError:  # no thread can be started: `item` would never run, and `close` would wait for it
            with self._lock:
                self._busy -= 1
                if item is not None and item in self._waiting:
                    self._waiting.remove(item)
            if item is not None:
                self._unfinished.discard(item.future)
            raise

    def _work(self) -> None:
        self._threads.add(threading.get_ident())
        while True:
            with self._lock:
                # The thread leaves the pool and becomes idle for any other user of this module.
                if not self._waiting or self._busy > self._limit:  # over the limit after an `aside` has ended
                    self._busy -= 1
                    self._threads.discard(threading.get_ident())
                    return
                item = self._waiting.popleft()
            if item.future.set_running_or_notify_cancel():
                item.run()
            del item

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let another function run while the ``with`` block waits, if this thread belongs to the pool.

        So functions that wait for others of the same pool never block one another.
        """
        if threading.get_ident() not in self._threads:
            yield
            return
        with self._lock:
            self._busy -= 1
            # Only if work waits: a thread without work would end at once.
            starts = bool(self._waiting) and self._busy < self._limit
            self._busy += starts
        try:
            if starts:
                self._start_thread()
            yield
        finally:
            with self._lock:
                # May exceed the limit for a moment: this thread must continue, and the extra one ends after its item.
                self._busy += 1

    def close(self, *, wait: bool = False, cancel: bool = False) -> None:
        """Accept no more functions.

        Args:
            wait: until all that were submitted have ended.
            cancel: those that have not started yet.

        Raises:
            RuntimeError: with ``wait``, in a thread of this pool, which would wait for itself.
        """
        if wait and threading.get_ident() in self._threads:
            raise RuntimeError("a job cannot wait for the end of all jobs of its client: shutdown(wait=False)")
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting) if cancel else []
        # Outside of the lock: callbacks of the futures may submit or close.
        for item in waiting:
            item.future.cancel()
        for future in list(self._unfinished) if wait else ():
            try:
                future.exception()
            except CancelledError:
                pass


_pools: weakref.WeakSet[BoundedThreads] = weakref.WeakSet()


def _forget_threads() -> None:
    """Drop all threads in a child made by ``fork``, where only the forking thread exists."""
    _idle.clear()
    for pool in list(_pools):
        pool._reset()


os.register_at_fork(after_in_child=_forget_threads)
