"""A process that hosts an actor of arrays: ``buffers_host.py DIRECTORY`` says its endpoint as JSON, ends with stdin."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import numpy
import trio

from fray.model.messages.client import ActorEndpoint
from fray.net.buffers import shared_memory
from fray.net.codec import to_json
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.actors.server import ActorHostServer


class Lender:
    """Actor in the loop that can store its arguments, and report what its process holds."""

    def __init__(self) -> None:
        self.kept: Any = None

    def echo(self, value: Any) -> Any:
        return value

    def keep(self, value: Any) -> None:
        self.kept = value

    def fill(self, value: float) -> None:
        self.kept[:] = value

    def get(self) -> Any:
        return self.kept

    def make(self, size: int) -> Any:
        return numpy.arange(size // 8, dtype="f8")

    def ends(self) -> tuple[float, float]:
        return float(self.kept[0]), float(self.kept[-1])

    def pool(self) -> tuple[str, int, int]:
        """Directory, bytes held, segments in use."""
        pool = shared_memory.known_pool()
        return ("", 0, 0) if pool is None else (pool.directory, pool.held_bytes, pool.used)

    async def pid(self) -> int:
        return os.getpid()


async def serve(directory: str) -> None:
    async with trio.open_nursery() as nursery:
        rng = random.SystemRandom()
        host = ActorHostServer(
            WebSocketNetwork(), incarnation=f"host-{os.getpid()}", rng=rng, directory=lambda: directory
        )
        await nursery.start(host.run)
        await host.listen()
        await host.listen_tcp()
        number = host.register(Lender(), "lender")
        endpoint = ActorEndpoint(
            actor_id="lender",
            name="lender",
            job_id="",
            namespace="",
            incarnation=host.incarnation,
            number=number,
            addresses=host.addresses,
            key=host.key,
        )
        print(to_json(endpoint), flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)
        await host.shutdown()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(serve, sys.argv[1])
