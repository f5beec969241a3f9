"""Daemon thread with a Trio loop, beside sync code: in the process of a sync job, and of a sync driver."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import trio

from fray.errors import FrayError


class LoopThread:
    """Loop in a daemon thread, started at most once.

    Args:
        main: async function of the loop; it calls `set_ready` once other threads may use the loop.
        on_end: called on the thread when the loop has ended, with the error it ended with, if any.
    """

    def __init__(
        self, main: Callable[[], Awaitable[object]], on_end: Callable[[BaseException | None], None] = lambda error: None
    ) -> None:
        self._main, self._on_end = main, on_end
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._started_or_failed = threading.Event()
        self._is_ready = False
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the loop unless that has been done, and wait until it is ready.

        Raises:
            FrayError: it failed to start.
        """
        # Several threads may need the loop at once; all of them wait for the same start.
        with self._lock:
            if self._thread is None:
                # A daemon, so that the interpreter can exit while the loop serves; its owner ends it in order before.
                self._thread = threading.Thread(target=self._run, name="fray-loop", daemon=True)
                self._thread.start()
        self._started_or_failed.wait()
        # The event is set at the end as well, so that a loop that fails early does not leave its starters waiting.
        if not self._is_ready:
            raise FrayError(f"the loop could not start: {self._error!r}") from self._error

    def set_ready(self) -> None:
        """Let `start` return. Loop only."""
        self._is_ready = True
        self._started_or_failed.set()

    def join(self, within_s: float) -> bool:
        """Wait for the end of the thread; return False if it still runs after ``within_s`` seconds."""
        if self._thread is not None:
            self._thread.join(within_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 - raised by `start`, or passed to `on_end`
            self._error = error
        finally:
            self._started_or_failed.set()
            self._on_end(self._error)
