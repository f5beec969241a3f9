"""Proof of death for a peer on this machine: its process is gone, so nobody needs to wait for it.

A `ProcessMark` is believed only if it fits a process that lives here while the peer is greeting us (same boot, same
start time): a mark from another PID namespace names somebody else's number and proves nothing. From then on a pidfd
stands for that very process, so a number given out again cannot deceive us.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

import trio

from fray.model.messages.client import ProcessMark
from fray.net.process_identity import start_ticks


def boot_id() -> str | None:
    """This kernel's life; None where there is no such file."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def pid_namespace_id() -> str:
    """Where process numbers mean what they mean here: this life of the kernel, and this namespace of numbers."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class ProcessWatch:
    """Watches one process of this machine by its pidfd. Close it when nobody asks any more."""

    def __init__(self, pidfd: int, pid: int) -> None:
        self._pidfd = pidfd
        self.pid = pid

    @classmethod
    def open(cls, mark: ProcessMark | None) -> ProcessWatch | None:
        """A process_watch for the process behind a mark; None if it is not (provably) one of this machine, or is us."""
        if mark is None or mark.pid == os.getpid() or mark.boot_id != boot_id():
            return None
        try:
            pidfd = os.pidfd_open(mark.pid)
        except (OSError, AttributeError):
            return None
        if start_ticks(mark.pid) != mark.start_ticks:
            os.close(pidfd)
            return None
        return cls(pidfd, mark.pid)

    def has_exited(self) -> bool:
        """It has ended (a zombie has)."""
        if self._pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    async def wait_exited(self) -> None:
        """Raises trio.ClosedResourceError if it was or is closed meanwhile."""
        if self._pidfd < 0:
            raise trio.ClosedResourceError("nobody asks any more")
        await trio.lowlevel.wait_readable(self._pidfd)

    def close(self) -> None:
        if self._pidfd >= 0:
            trio.lowlevel.notify_closing(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


async def wait_process_exited(mark: ProcessMark) -> None:
    """Returns when the process of a mark that was once believed in this `world` is dead; at once if it is."""
    process_watch = ProcessWatch.open(mark)
    if process_watch is not None:
        try:
            await process_watch.wait_exited()
        finally:
            process_watch.close()
