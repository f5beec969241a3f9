"""Requests to end this process while its main thread cannot listen.

That is in the user's imports, and in the constructor of an async actor, which blocks the loop.

Such code has nothing to save yet, and it may take as long as the import of a large library. It gets KeyboardInterrupt,
as all sync code does, and not after the whole time that a running actor has for its cleanup.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fray.runtime.process import current_job, stack_dump

ARRIVED = signal.SIGURG
"""Signal that a command has arrived. Where it finds no handler, nothing happens."""
LEFT_WITHIN_S = 0.5
"""Seconds in which interrupted code runs its ``finally`` blocks; then the process exits.

Libraries that are being imported lose a KeyboardInterrupt (a bare ``except``, a callback of C), or load for a second.
"""

_control_fd = -1
_is_requested = False


def bind_control(descriptor: int) -> None:
    """Take the shim's commands from this descriptor: this process serves one attempt only."""
    global _control_fd
    _control_fd = descriptor


@contextmanager
def interrupted_by_end() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block when the end is requested; exit if that does not end it.

    For the main thread, while nothing else reads the commands. Where this process shares its program with others, or
    the kernel cannot send the signal, the block is not interrupted.
    """
    if _control_fd < 0:
        yield
        return
    # A signal and not a thread: it is handled in the main thread, so none can be on its way when the block is left.
    before = signal.signal(ARRIVED, lambda number, frame: _handle_commands())
    try:
        with suppress(OSError):
            fcntl.fcntl(_control_fd, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(_control_fd, fcntl.F_SETSIG, ARRIVED)
            _set_async(True)
        _handle_commands()  # those that were there before
        yield
    finally:
        with suppress(OSError):
            _set_async(False)
        signal.signal(ARRIVED, before)
        if _is_requested:
            faulthandler.cancel_dump_traceback_later()
    if _is_requested:
        raise KeyboardInterrupt  # the block has lost it


def _set_async(is_on: bool) -> None:
    flags = fcntl.fcntl(_control_fd, fcntl.F_GETFL)
    fcntl.fcntl(_control_fd, fcntl.F_SETFL, flags | os.O_ASYNC if is_on else flags & ~os.O_ASYNC)


def _handle_commands() -> None:
    """Handle the commands that have arrived. Raises KeyboardInterrupt if the end is among them."""
    global _is_requested
    while word := read_command(_control_fd):
        if word == b"c":
            _is_requested = True
            # Its thread is one of C, which exits whatever has the lock of the interpreter.
            silent = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            faulthandler.dump_traceback_later(LEFT_WITHIN_S, exit=True, file=silent)
            raise KeyboardInterrupt
        if word == b"t":
            stack_dump.write_tasks("")  # there is no loop, or it is blocked
        elif word == b"p":
            current_job.set_preemption_notice()


def read_command(descriptor: int) -> bytes | None:
    """Return a command that has arrived; None if there is none, and nothing if there will be none any more."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return os.read(descriptor, 1) if poll.poll(0) else None
