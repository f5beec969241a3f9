"""The roll of the threads that run user code for a cluster of this very process.

Nobody can end them, but whoever leaves the cluster can wait for them, and say which ones are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import trio


class ThreadRegistry:
    """Made in the loop; threads enter and leave by themselves."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._inside: dict[object, str] = {}
        self._left: trio.Event | None = None
        """Set when one leaves, while somebody waits."""

    @contextmanager
    def registered(self, name: str) -> Iterator[None]:
        """On a thread: it is there until the end of the block."""
        key = object()
        self._inside[key] = name
        try:
            yield
        finally:
            del self._inside[key]
            waited_for = self._left
            if waited_for is not None:
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(waited_for.set)

    async def wait_empty(self, within_s: float) -> list[str]:
        """Wait for the last one to leave; who is there after ``within_s`` seconds, by name."""
        with trio.move_on_after(within_s):
            while True:
                self._left = trio.Event()  # first: who leaves from here on sets it
                if not self._inside:
                    return []
                await self._left.wait()
        return sorted(self._inside.values())


thread_registry_var: ContextVar[ThreadRegistry | None] = ContextVar("fray_roll", default=None)
"""Of the cluster around, where it is one of this process alone."""


@contextmanager
def register_thread(name: str) -> Iterator[None]:
    """On a thread that runs user code: on the roll, where there is one."""
    roll = thread_registry_var.get()
    if roll is None:
        yield
        return
    with roll.registered(name):
        yield
