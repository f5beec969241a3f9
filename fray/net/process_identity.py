"""Identity of processes on this machine: which one is behind a connection, and when it has ended.

A process is identified by a `ProcessMark`: boot id, pid and start time. Invariant: a mark counts as a living process
only if boot id and start time fit the process of that pid now. A mark from another PID namespace names an unrelated
process and proves nothing. From then on a pidfd stands for that very process, so a reused pid is never mistaken for it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from functools import cache
from pathlib import Path

import trio

from fray.model.messages.client import ProcessMark


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if no process has this pid."""
    try:
        return int(_stat(pid)[19])  # field 22 of proc(5)
    except (OSError, ValueError, IndexError):
        return None


def _stat(pid: int) -> list[str]:
    """Return the fields of a process after its name, which is in parentheses and may hold anything. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_living(mark: ProcessMark) -> bool:
    """Return whether the process of a mark lives on this machine; False for one that has ended, also as a zombie."""
    try:
        fields = _stat(mark.pid)
        return mark.boot_id == boot_id() and int(fields[19]) == mark.start_ticks and fields[0] not in "ZX"
    except (OSError, ValueError, IndexError):
        return False


@cache
def boot_id() -> str:
    """Return the id the kernel chose at boot; empty where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace_id() -> str:
    """Return an id of the PID namespace of this process, different after a reboot; empty where that is not known."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_mark(pid: int | None = None) -> ProcessMark:
    """Return the mark of a process, by default of this one. Its start time is 0 if no process has this pid."""
    pid = os.getpid() if pid is None else pid
    return ProcessMark(boot_id=boot_id(), pid=pid, start_ticks=start_ticks(pid) or 0)


def peer_pid(sock: socket.socket) -> int:
    """Return the pid at the other end of a Unix socket; 0 for other sockets and for pids of other namespaces."""
    return _peer_credentials(sock)[0] if sock.family == socket.AF_UNIX else 0


def peer_uid(sock: socket.socket) -> int:
    """Return the effective uid at the other end of a Unix socket, in the user namespace of this process."""
    return _peer_credentials(sock)[1]


def _peer_credentials(sock: socket.socket) -> tuple[int, int]:
    # Recorded by the kernel when the connection was made, so the peer cannot choose them.
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def account_name() -> str:
    """Return the name of the account of this process; its uid if it has none."""
    import pwd  # a job's process does not need it

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def process_behind(sock: socket.socket) -> ProcessMark | None:
    """Return the mark of the process that opened this connection; None if it is not known, or is this process."""
    pid = peer_pid(sock)
    # This process itself is left out: its end needs no notice.
    mark = process_mark(pid) if pid and pid != os.getpid() else None
    return mark if mark is not None and mark.start_ticks else None


class ProcessWatch:
    """Watches one process of this machine by its pidfd, until it is closed."""

    def __init__(self, pidfd: int, pid: int) -> None:
        self._pidfd = pidfd
        self.pid = pid

    @classmethod
    def open(cls, mark: ProcessMark | None) -> ProcessWatch | None:
        """Return a watch of the process behind a mark; None unless it provably lives on this machine and is not us."""
        try:
            return cls._open(mark)
        except (OSError, AttributeError):  # the kernel has no pidfds, or no descriptor is left
            return None

    @classmethod
    def _open(cls, mark: ProcessMark | None) -> ProcessWatch | None:
        if mark is None or mark.pid == os.getpid() or mark.boot_id != boot_id():
            return None
        try:
            pidfd = os.pidfd_open(mark.pid)
        except ProcessLookupError:
            return None
        # Checked after the open: from then on the pid cannot be reused for another process unnoticed.
        if start_ticks(mark.pid) != mark.start_ticks:
            os.close(pidfd)
            return None
        return cls(pidfd, mark.pid)

    def has_exited(self) -> bool:
        """Return whether the process has ended (a zombie has)."""
        if self._pidfd < 0:
            return False
        # Not `select.select`, which fails for descriptors from 1024 on.
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    async def wait_exited(self) -> None:
        """Wait until the process has ended.

        Raises:
            trio.ClosedResourceError: the watch was closed, before or meanwhile.
        """
        if self._pidfd < 0:
            raise trio.ClosedResourceError("this watch is closed")
        await trio.lowlevel.wait_readable(self._pidfd)

    def close(self) -> None:
        """Release the descriptor; idempotent."""
        if self._pidfd >= 0:
            # Wakes `wait_exited` first: the number of a closed descriptor may be reused at once.
            trio.lowlevel.notify_closing(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


async def wait_process_exited(mark: ProcessMark) -> None:
    """Wait until the process of a mark of this machine has ended; forever where the kernel cannot say."""
    try:
        watch = ProcessWatch._open(mark)
    # Not being able to watch a process proves nothing: its session then keeps the usual grace period.
    except (OSError, AttributeError):
        await trio.sleep_forever()
    if watch is not None:
        try:
            await watch.wait_exited()
        finally:
            watch.close()
