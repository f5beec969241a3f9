"""A caller that can be killed: gives large arrays to the actor of the endpoint it reads, says so, and waits."""

from __future__ import annotations

import random
import sys

import numpy
import trio

from fray.model.messages.client import ActorEndpoint
from fray.net.buffers import shared_memory
from fray.net.codec import from_json
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.calls.caller import Caller


async def call(endpoint: ActorEndpoint) -> None:
    caller = Caller(WebSocketNetwork(), None, session="victim", rng=random.SystemRandom())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller.run)
        route = caller.route_to(endpoint)
        await route.call("keep", (numpy.ones(4_000_000),))
        mine = await route.call("get")
        pool = shared_memory.known_pool()
        print(pool.directory if pool is not None else "", len(mine), flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(call, from_json(ActorEndpoint, sys.stdin.readline()))
