"""Registry of the threads that run user code for a cluster inside this process.

Threads cannot be killed, but leaving the cluster can wait for them and name those that are still running.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import trio


class ThreadRegistry:
    """Names of the running user threads. Made in the loop; threads register and unregister themselves."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._inside: dict[object, str] = {}
        self._left: trio.Event | None = None
        """Event set when a thread leaves, while `wait_empty` waits."""

    @contextmanager
    def registered(self, name: str) -> Iterator[None]:
        """Register the calling thread until the end of the block."""
        # By a key of its own: several threads may have one name.
        key = object()
        self._inside[key] = name
        try:
            yield
        finally:
            del self._inside[key]
            # Read after the removal: a waiter sets its event before it looks at the table, so one of the two sees the
            # other.
            left = self._left
            if left is not None:
                # The cluster did not wait any longer.
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(left.set)

    async def wait_empty(self, within_s: float) -> list[str]:
        """Wait up to ``within_s`` seconds for the last thread to leave; return the names of those still running."""
        with trio.move_on_after(within_s):
            while True:
                self._left = trio.Event()  # first, so that a thread that leaves from here on sets it
                if not self._inside:
                    return []
                await self._left.wait()
        return sorted(self._inside.values())


thread_registry_var: ContextVar[ThreadRegistry | None] = ContextVar("fray_thread_registry", default=None)
"""Registry of the surrounding cluster if that runs inside this process."""


@contextmanager
def register_thread(name: str) -> Iterator[None]:
    """Register the calling thread, which runs user code, if there is a registry."""
    registry = thread_registry_var.get()
    if registry is None:
        yield
        return
    with registry.registered(name):
        yield
