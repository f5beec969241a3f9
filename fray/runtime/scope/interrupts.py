"""Ctrl-C in a driver: delivered to the driver's main task, never in the middle of a task of Fray."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def is_in_fray_code(frame: FrameType | None) -> bool:
    """Return whether ``frame`` or one of its callers belongs to Fray."""
    # The whole stack, since Fray calls into Trio and the standard library, where the signal usually arrives.
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("fray."):
            return True
        frame = frame.f_back
    return False


@contextmanager
def defer_sigint_in_fray_code() -> Iterator[None]:
    """Deliver a SIGINT that interrupts Fray's code at the main task's next checkpoint instead, inside the block.

    Trio raises KeyboardInterrupt wherever unprotected Python code happens to run, so also in the embedded controller,
    where it would end a service half-way. Only Trio's own handler is wrapped, and only on the main thread; a handler
    installed by the user is left alone.
    """
    inner = signal.getsignal(signal.SIGINT)
    # By module name: Trio does not export its handler.
    is_trio_handler = getattr(inner, "__module__", "") == "trio._core._ki"
    if threading.current_thread() is not threading.main_thread() or not is_trio_handler:
        yield
        return
    assert callable(inner)

    def handler(number: int, frame: FrameType | None) -> None:
        inner(number, None if is_in_fray_code(frame) else frame)  # without a frame, Trio treats the code as protected

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        # User code may have installed its own handler meanwhile, which stays.
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, inner)
