"""Waiting in the loop for the end of a process, by its descriptor."""

from __future__ import annotations

import os

import trio


async def wait_process_end(pid: int) -> None:
    """Returns when the process is gone (or was never there)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
