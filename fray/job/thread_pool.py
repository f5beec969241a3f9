"""Threads that take turns: at most so many run at once; one that waits for another gives its turn away."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context
from typing import Any


class BoundedThreads:
    """Calls functions on threads, first come first served, ``limit`` at once; a thread ends when nothing waits."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Context, Callable[[], Any]]] = deque()
        self._running = 0
        self._is_closed = False
        self._mine = threading.local()

    def submit(self, context: Context, fn: Callable[[], Any]) -> Future[Any]:
        """Have ``fn()`` called in ``context``; until then its future can be cancelled. Raises RuntimeError: closed."""
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this context has been shut down")
            self._waiting.append((future, context, fn))
            self._start()
        return future

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a wait: on one of these threads, another may run meanwhile."""
        if not getattr(self._mine, "runs", False):
            yield
            return
        with self._lock:
            self._running -= 1
            self._start()
        try:
            yield
        finally:
            with self._lock:
                self._running += 1

    def close(self) -> None:
        """What has not begun never will."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
        for future, _, _ in waiting:
            future.cancel()

    def _start(self) -> None:
        if self._running < self._limit and self._waiting:
            self._running += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        self._mine.runs = True
        while True:
            with self._lock:
                if not self._waiting or self._running > self._limit:
                    self._running -= 1
                    return
                future, context, fn = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                _fulfil(future, context, fn)
            del future, context, fn


def _fulfil(future: Future[Any], context: Context, fn: Callable[[], Any]) -> None:
    try:
        value = context.run(fn)
    except BaseException as error:  # noqa: BLE001 (it belongs to whoever asks for the result)
        future.set_exception(error)
    else:
        future.set_result(value)
