"""Waiting in the event loop for the end of a process, by its pidfd."""

from __future__ import annotations

import os

import trio


async def wait_process_end(pid: int) -> None:
    """Return when the process has ended (or never existed)."""
    try:
        # A pidfd, since only the parent may wait by pid, and a pid may be reused.
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
