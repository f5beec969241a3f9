"""Processes of this machine, known by number and start time: which one is behind a connection, and when it is gone."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import trio
from attrs import frozen


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is none of this number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[19])  # the name in parentheses may hold anything
    except (OSError, ValueError, IndexError):
        return None


@frozen
class ProcessIdentity:
    """One process, and not the next one of its number."""

    pid: int
    started: int

    async def wait_ended(self) -> None:
        """Wait until it has ended; for ever where the kernel cannot tell."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        except (OSError, AttributeError):
            await trio.sleep_forever()
        try:
            if start_ticks(self.pid) == self.started:
                await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)


def peer_pid(sock: socket.socket) -> int:
    """Who made this connection; 0: it comes from elsewhere, or from where its number means nothing here."""
    if sock.family != socket.AF_UNIX:
        return 0
    pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def process_behind(sock: socket.socket) -> ProcessIdentity | None:
    """The process that made this connection; None: it cannot be known."""
    pid = peer_pid(sock)
    started = start_ticks(pid) if pid and pid != os.getpid() else None
    return None if started is None else ProcessIdentity(pid, started)
