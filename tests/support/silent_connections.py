"""Connections that send nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from fray.net import file_limits


@asynccontextmanager
async def silent(address: str, count: int) -> AsyncIterator[list[trio.SocketStream]]:
    """Connections that send nothing, open until the end."""
    file_limits.raise_limit()
    streams: list[trio.SocketStream] = []
    try:
        for _ in range(count):
            if address.startswith("unix:"):
                streams.append(await trio.open_unix_socket(address.removeprefix("unix:")))
            else:
                streams.append(await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2])))
        yield streams
    finally:
        for stream in streams:
            stream.socket.close()
