"""Waiting for some of several references, with one callback per reference however often it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from fray.threads import lock_timeout


class _Waiter:
    """Wait in progress: the number of references that are still missing."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.enough = threading.Event()

    def count_down(self) -> None:
        self.missing -= 1
        if self.missing <= 0:
            self.enough.set()


class WaitSet:
    """Waits in progress by reference. A reference gets one callback, however often it is waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[int, list[_Waiter]] = {}
        """Waits by the identity of the reference, which lives as long as its callback."""

    def wait(self, refs: Sequence[Any], count: int, timeout: float | None) -> None:
        """Wait until ``count`` references are done, or ``timeout`` seconds have passed."""
        waiter = _Waiter(count)
        # Callbacks are added outside of the lock, since one that is done calls back at once.
        fresh = []
        with self._lock:
            for ref in refs:
                known = self._waiters.get(id(ref))
                if known is None:
                    self._waiters[id(ref)] = [waiter]
                    fresh.append(ref)
                else:
                    known.append(waiter)
        try:
            for ref in fresh:
                ref.add_done_callback(self._done)
            waiter.enough.wait(lock_timeout(timeout))
        finally:
            # After a timeout the waiter is removed; the callback stays for the next wait.
            with self._lock:
                for ref in refs:
                    if waiter in (known := self._waiters.get(id(ref), [])):
                        known.remove(waiter)

    def _done(self, ref: Any) -> None:
        with self._lock:
            for waiter in self._waiters.pop(id(ref), []):
                waiter.count_down()
