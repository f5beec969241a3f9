"""Zygote of the program that ran in this process before: it forks nothing more, and ends after its last shim."""

from __future__ import annotations

import socket
from collections.abc import Callable

import trio

from fray.node.zygotes.manager import ZygoteManager, make_running, reap_when_done


class AdoptedZygote(ZygoteManager):
    """Manager of a zygote that has no successor."""

    def __init__(self, pid: int, link: int, on_lost: Callable[[], None]) -> None:
        super().__init__((), {}, on_lost)
        self.pid = pid
        self._adopted = make_running(pid, socket.socket(fileno=link))
        self._adopted.ready = True
        self._set_running(self._adopted)

    async def run_until(self, unused: Callable[[], object]) -> None:
        """Hold it until ``unused`` returns, then end it and all that is left below it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                await unused()  # type: ignore[misc]
                nursery.cancel_scope.cancel()
        finally:
            self._set_running(None)
            with trio.CancelScope(shield=True):
                await reap_when_done(self._adopted)
            self.pid = None

    async def _watch(self) -> None:
        await self._listen(self._adopted)
        # It was killed: what was below it has come to this process.
        self._set_running(None)
        self.on_lost()

    async def sweep(self) -> None:
        """See `ZygoteManager.sweep`. Of a dead one nothing is left to be asked."""
        if self._running_zygote is not None:
            await super().sweep()
