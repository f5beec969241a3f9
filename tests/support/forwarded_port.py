"""A forwarded port: another address that leads to a listener, as that of a router or of ``ssh -L``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import trio


async def forward_port(target: Callable[[], str], seen: list[bytes], *, task_status: trio.TaskStatus[int]) -> None:
    """Forward connections to ``tcp:127.0.0.1:PORT`` until cancelled; reports the port.

    What dialers send is appended to ``seen``.
    """

    async def serve(near: trio.SocketStream) -> None:
        far = await trio.open_tcp_stream("127.0.0.1", int(target().rpartition(":")[2]))
        async with far, trio.open_nursery() as nursery:
            nursery.start_soon(copy, near, far, seen)
            await copy(far, near, [])
            nursery.cancel_scope.cancel()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(listener.socket.getsockname()[1])
    await trio.serve_listeners(serve, [listener])


async def copy(source: trio.SocketStream, sink: trio.SocketStream, seen: list[bytes]) -> None:
    with suppress(trio.BrokenResourceError):
        async for data in source:
            seen.append(bytes(data))
            await sink.send_all(data)
