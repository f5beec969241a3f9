"""Threads that live while there is work: of `LocalClient`'s jobs and calls. They are daemons, so that no exit waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context
from typing import Any


def begin(context: Context, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call it in a thread of its own, in ``context``; the future gets what it returns or raises, SystemExit too."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_fulfil, args=(future, context, fn, args, kwargs), name=name, daemon=True).start()
    return future


def _fulfil(future: Future[Any], context: Context, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        value = context.run(fn, *args, **kwargs)
    except BaseException as error:  # noqa: BLE001 (it belongs to whoever asks for the result)
        future.set_exception(error)
    else:
        future.set_result(value)


class JobThreads:
    """At most ``limit`` jobs at once, first come first served; each thread ends when nothing waits."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"max_threads={limit} must be 1 or more")
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Context, Callable[[], Any], str]] = deque()
        self._threads = 0

    def submit(self, context: Context, fn: Callable[[], Any], name: str) -> Future[Any]:
        """Have ``fn()`` called in ``context`` when there is a thread for it; until then its future can be cancelled."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((future, context, fn, name))
            if self._threads == self._limit:
                return future
            self._threads += 1
        threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                future, context, fn, name = self._waiting.popleft()
            threading.current_thread().name = name
            if future.set_running_or_notify_cancel():
                _fulfil(future, context, fn, (), {})
            del future, context, fn
