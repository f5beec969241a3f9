"""Replacement of this process by another program, which gets its pid, its children, a state and some descriptors.

A parent that watches the process by a pidfd, and children that end with it, do not notice. If the other program fails,
or does not confirm in time, the kernel ends the process, and with it all that watches it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import NoReturn

TAKE_OVER_S = 60
"""Seconds that the other program has for `confirm`; then the kernel ends it by SIGALRM."""
_VARIABLE = "FRAY_HANDED_OVER"


def own_command() -> tuple[list[str], list[str]]:
    """Return the command that has started this process, and its arguments.

    A script is named by its path: its first line names the interpreter of the release that is installed there now.
    """
    arguments = sys.argv[1:]
    script = os.path.abspath(sys.argv[0])
    if os.path.basename(script) != "__main__.py" and os.access(script, os.X_OK):
        return [script], arguments
    return [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]], arguments


def replace_process(
    command: list[str], environ: Mapping[str, str], state: bytes, descriptors: Iterable[int]
) -> NoReturn:
    """Execute a program in this process.

    Args:
        state: what `take_state` returns there. It is in memory only.
        descriptors: those that stay open. The others, besides the first three, have to be close-on-exec.

    Raises:
        OSError: it cannot be executed; nothing has changed.
    """
    memory = os.memfd_create("fray-state")
    kept = [memory, *descriptors]
    # A repeated request would end the process between the programs.
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(state)
        os.lseek(memory, 0, os.SEEK_SET)
        for descriptor in kept:
            os.set_inheritable(descriptor, True)
        signal.alarm(TAKE_OVER_S)
        os.execve(command[0], command, {**environ, _VARIABLE: str(memory)})
    except OSError:
        signal.alarm(0)
        signal.signal(signal.SIGUSR2, before)
        for descriptor in kept:
            os.set_inheritable(descriptor, False)
        os.close(memory)
        raise


def take_state() -> bytes | None:
    """Return what the program that ran in this process before has left; None: there was none. Call it once."""
    descriptor = os.environ.pop(_VARIABLE, "")
    if not descriptor:
        return None
    with open(int(descriptor), "rb") as file:
        return file.read()


def confirm() -> None:
    """Lift the limit of `TAKE_OVER_S`: this program has what the one before it had."""
    signal.alarm(0)
