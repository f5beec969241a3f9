"""Two networks as one: process-local and external addresses, or direct and relayed ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from fray.net.auth import Authorize
from fray.net.transport import Credential, Network, Transport


class RoutedNetwork:
    """Network that sends addresses with ``is_special`` to one network, and all others to another."""

    def __init__(self, usual: Network, special: Network, is_special: Callable[[str], bool]) -> None:
        self._usual, self._special, self._is_special = usual, special, is_special

    def _of(self, address: str) -> Network:
        # Chosen per address and not per process: one host may list direct and relayed addresses.
        return self._special if self._is_special(address) else self._usual

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        return await self._of(address).dial(address, credential, timeout_s=timeout_s)

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        await self._of(address).listen(address, authorize, handler, task_status=task_status)
