"""Limit on running attempts by file descriptors: further attempts wait until one ends.

A node that ran out of descriptors would fail in arbitrary places, so it admits fewer attempts instead; a gang that
needs more on one machine than the limit waits for ever, and its log says so. Daemons raise their own limit to the hard
one (`fray.net.file_limits`); jobs get the limit that the node was started with, since programs written for ``select``
break beyond 1,024.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from fray.net import file_limits

RESERVE = 256
"""Descriptors for everything else: the controller's connection, log readers, tunnels, builders."""
PER_ATTEMPT = 8
"""Descriptors per attempt. It has five most of the time: its shim's socket and pidfd, two pipes, its log."""
MIN_ATTEMPTS = 4

log = logging.getLogger("fray.node")


def attempts_for(limit: int) -> int:
    """Return the number of attempts at a time, with so many descriptors."""
    return max(MIN_ATTEMPTS, (limit - RESERVE) // PER_ATTEMPT)


class AttemptLimiter:
    """Slots for the attempts of one node."""

    def __init__(self, attempts: int | None = None) -> None:
        self._slots = trio.CapacityLimiter(attempts or attempts_for(file_limits.limit()))
        self._admitted: set[str] = set()

    async def acquire(self, attempt_id: str, say: Callable[[str], None]) -> None:
        """Return once there is a slot; most find one at once."""
        try:
            self._slots.acquire_on_behalf_of_nowait(attempt_id)
        except trio.WouldBlock:
            why = f"this node has descriptors for {self._slots.total_tokens} attempts at a time (see ulimit -Hn)"
            log.warning("%s waits: %s", attempt_id, why)
            say(f"waiting for another attempt to end: {why}")
            # On behalf of the attempt and not of the task: the slot is released by id.
            await self._slots.acquire_on_behalf_of(attempt_id)
        self._admitted.add(attempt_id)

    def adopt(self, attempt_id: str) -> None:
        """Give a slot to an attempt that runs, also if there is none left."""
        if self._slots.available_tokens < 1:
            self._slots.total_tokens += 1
        self._slots.acquire_on_behalf_of_nowait(attempt_id)
        self._admitted.add(attempt_id)

    def release(self, attempt_id: str) -> None:
        """Release the slot of an attempt, if it has one."""
        if attempt_id in self._admitted:
            self._admitted.discard(attempt_id)
            self._slots.release_on_behalf_of(attempt_id)
