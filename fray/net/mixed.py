"""Two networks as one: what stays in this process, and what leaves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from fray.net.transport import Authorize, Credential, Network, Transport


class MixedNetwork:
    """``memory:`` addresses within this process, all others over sockets."""

    def __init__(self, memory: Network, sockets: Network) -> None:
        self._memory, self._sockets = memory, sockets

    def _of(self, address: str) -> Network:
        return self._memory if address.startswith("memory:") else self._sockets

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
