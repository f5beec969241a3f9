"""Threads that live while there is work: of `LocalClient`'s jobs and calls. They are daemons, so that no exit waits.

A thread that has done its work is kept for the next for `IDLE_S`: starting one costs twice what a call costs otherwise.
How many there are has no limit here, as a call may wait for any other. A child made by ``fork`` begins without any.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextvars import Context
from queue import Empty, SimpleQueue
from typing import Any

IDLE_S = 0.5
"""How long a thread waits for more work before it ends."""


class _Worker:
    """A thread, and the calls that are handed to it."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work(self) -> None:
        while True:
            try:
                call = self.inbox.get(timeout=IDLE_S)
            except Empty:
                if _idle.pop(self, None) is not None:
                    return
                call = self.inbox.get()  # somebody has just taken it off the list, and is about to hand it work
            call()
            del call  # and what it holds
            _idle[self] = True


_idle: dict[_Worker, bool] = {}
"""Each operation on it is atomic; whoever takes a worker off it has it alone. The last to come is the first to go."""


def _hand_to_a_thread(call: Callable[[], None]) -> None:
    try:
        worker, _ = _idle.popitem()
    except KeyError:
        worker = _Worker()
        worker.inbox.put(call)  # first: Ctrl-C may come while the thread starts, which works all the same
        threading.Thread(target=worker.work, name="fray-v2", daemon=True).start()
    else:
        worker.inbox.put(call)


def begin(context: Context, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call it in a thread that has nothing else to do, at once, in ``context``; the future gets what it returns or
    raises, SystemExit too."""
    call = _WorkItem(context, name, fn, args, kwargs)
    call.future.set_running_or_notify_cancel()
    _hand_to_a_thread(call.run)
    return call.future


def no_end(timeout: float | None) -> float | None:
    """As locks take it: what is more than they can count, ``math.inf`` for one, is None."""
    return None if timeout is None or timeout > threading.TIMEOUT_MAX else timeout


class ThreadFuture(Future[Any]):
    """Of a thread of this process: in a child made by ``fork``, which has none of them, it never comes."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> Any:
        """As every future's. Raises RuntimeError: it is still to come, and this process was forked since."""
        try:
            self._check_process()
            return super().result(no_end(timeout))
        finally:
            del self  # else the error's traceback and the future would hold each other

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`."""
        self._check_process()
        return super().exception(no_end(timeout))

    def _check_process(self) -> None:
        if os.getpid() != self._process and not self.done():
            raise RuntimeError(
                f"this answer is on its way in process {self._process}, which this one was forked from: wait for it "
                "there, or make clients and actors after the fork"
            )


class _WorkItem:
    """A function, what to call it with, and the future of what comes of it."""

    __slots__ = ("args", "context", "fn", "future", "kwargs", "name")

    def __init__(self, context: Context, name: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.future = ThreadFuture()
        self.context, self.name, self.fn, self.args, self.kwargs = context, name, fn, args, kwargs

    def run(self) -> None:
        threading.current_thread().name = self.name
        try:
            value = self.context.run(self.fn, *self.args, **self.kwargs)
        except BaseException as error:  # noqa: BLE001 (it belongs to whoever asks for the result)
            self.future.set_exception(error)
            del self  # else error, traceback, frame and future would hold each other, and the arguments
        else:
            self.future.set_result(value)


# Jobs ----------------------------------------------------------------------------------------------------------------


class JobThreads:
    """At most ``limit`` jobs at once, first come first served."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"max_threads={limit} must be 1 or more")
        self._limit = limit
        self._closed = False
        self._begin_empty()
        _pools.add(self)

    def _begin_empty(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_WorkItem] = deque()
        self._threads: set[int] = set()
        self._busy = 0
        self._unfinished: set[Future[Any]] = set()

    def submit(self, context: Context, fn: Callable[[], Any], name: str) -> Future[Any]:
        """Have ``fn()`` called in ``context`` when there is a thread for it; until then its future can be cancelled.

        Raises:
            RuntimeError: it was closed, or no thread can be started.
        """
        call = _WorkItem(context, name, fn, (), {})
        with self._lock:
            if self._closed:
                raise RuntimeError("this LocalClient was shut down: make another")
            self._unfinished.add(call.future)
            self._waiting.append(call)
            starts = self._busy < self._limit
            self._busy += starts
        call.future.add_done_callback(self._unfinished.discard)
        if starts:
            self._start(call)
        return call.future

    def _start(self, call: _WorkItem) -> None:
        try:
            _hand_to_a_thread(self._work)
        except RuntimeError:  # no thread can be started: nobody would run it, and `close` would wait for it
            with self._lock:
                self._busy -= 1
                if call in self._waiting:
                    self._waiting.remove(call)
            self._unfinished.discard(call.future)
            raise

    def _work(self) -> None:
        self._threads.add(threading.get_ident())
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy -= 1
                    self._threads.discard(threading.get_ident())
                    return
                call = self._waiting.popleft()
            if call.future.set_running_or_notify_cancel():
                call.run()
            del call

    def close(self, wait: bool) -> None:
        """Take no more; ``wait`` for those that were taken.

        Raises:
            RuntimeError: it would be a job of these threads that waits, and so for itself.
        """
        if wait and threading.get_ident() in self._threads:
            raise RuntimeError("a job cannot wait for the end of all jobs of its client: shutdown(wait=False)")
        self._closed = True
        for future in list(self._unfinished) if wait else ():
            try:
                future.exception()
            except CancelledError:
                pass


_pools: weakref.WeakSet[JobThreads] = weakref.WeakSet()


def _forget_threads() -> None:
    """In a child made by ``fork``, where no thread but the forking one is."""
    _idle.clear()
    for pool in list(_pools):
        pool._begin_empty()


os.register_at_fork(after_in_child=_forget_threads)
