"""Ctrl-C in a driver: it reaches the driver's main task, never a task of Fray's in the middle of something."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def is_in_fray_code(frame: FrameType | None) -> bool:
    """Whether Fray's own code is running, or waits for what is running."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("fray."):
            return True
        frame = frame.f_back
    return False


@contextmanager
def defer_sigint_in_fray_code() -> Iterator[None]:
    """While entered, a SIGINT that meets Fray's code is delivered by Trio at the main task's next checkpoint.

    Trio raises KeyboardInterrupt wherever unprotected Python code happens to run, so also in the embedded controller.
    Only Trio's own handler is wrapped, and only on the main thread; a handler of the user's stays as it is.
    """
    inner = signal.getsignal(signal.SIGINT)
    of_trio = getattr(inner, "__module__", "") == "trio._core._ki"
    if threading.current_thread() is not threading.main_thread() or not of_trio:
        yield
        return
    assert callable(inner)

    def handler(number: int, frame: FrameType | None) -> None:
        inner(number, None if is_in_fray_code(frame) else frame)  # no frame: Trio takes the code for protected

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, inner)
