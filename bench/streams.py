"""Streams between two processes, in items a second: ``python -m bench.streams``.

A generator of each kind, and a duplex stream (`open`) in which every item is sent back. Target: 50,000 small items
a second out of a generator.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import trio
from attrs import evolve

from bench.calls import endpoint
from bench.measure import Probe, by_the_lot, report, take_turns
from bench.serving import other_process
from fray.model.messages.client import ActorEndpoint
from fray.net.codec import from_json, to_json
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.actors.method_streams import BlockingStream, Stream
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.calls.caller import Caller
from fray.runtime.calls.route import Route

ITEMS = 5_000


class OnThread:
    """Sync actor, with its own thread."""

    def count(self, n: int) -> Iterator[int]:
        yield from range(n)

    def echo(self, stream: BlockingStream) -> Iterator[int]:
        yield from stream


class InLoop:
    """Actor with an async method, so that everything runs in the loop."""

    def count(self, n: int) -> Iterator[int]:
        yield from range(n)

    async def echo(self, stream: Stream) -> AsyncIterator[int]:
        async for item in stream:
            yield item

    async def add_up(self, stream: Stream) -> int:
        return sum([item async for item in stream])

    async def count_async(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number


# The serving process -------------------------------------------------------------------------------------------------


async def serve(directory: str) -> None:
    """Serve both actors; print their endpoints as JSON. Ends with its standard input."""
    async with trio.open_nursery() as nursery:
        host = ActorHostServer(
            WebSocketNetwork(), incarnation="bench", rng=random.SystemRandom(), directory=lambda: directory
        )
        await nursery.start(host.run)
        await host.listen()
        numbers = {"loop": host.register(InLoop(), "loop"), "thread": host.register(OnThread(), "thread")}
        ends = {name: evolve(endpoint(host, number), addresses=host.addresses) for name, number in numbers.items()}
        print(json.dumps({name: to_json(end) for name, end in ends.items()}), flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)
        nursery.cancel_scope.cancel()


# The measuring process -----------------------------------------------------------------------------------------------


def probe_stream(caller: Caller, route: Route, method: str) -> Probe:
    async def lot() -> int:
        async with route.stream(method, (ITEMS,)) as items:
            async for _ in items:
                pass
        return ITEMS

    return lambda seconds: by_the_lot(lot, seconds)


def probe_echo(caller: Caller, route: Route) -> Probe:
    """Send items that come back; ``per_s`` counts each once."""

    async def lot() -> int:
        async with route.open("echo") as stream, trio.open_nursery() as nursery:

            async def send() -> None:
                for number in range(ITEMS):
                    await stream.send(number)
                await stream.done_sending()

            nursery.start_soon(send)
            async for _ in stream:
                pass
        return ITEMS

    return lambda seconds: by_the_lot(lot, seconds)


def probe_upload(caller: Caller, route: Route) -> Probe:
    async def lot() -> int:
        async with route.open("add_up") as stream:
            for number in range(ITEMS):
                await stream.send(number)
            await stream.done_sending()
            await stream
        return ITEMS

    return lambda seconds: by_the_lot(lot, seconds)


async def measure(seconds: float, rounds: int, json_file: Path | None) -> None:
    async with other_process("streams") as served, trio.open_nursery() as nursery:
        ends = {name: from_json(ActorEndpoint, text) for name, text in served.items()}
        caller = Caller(WebSocketNetwork(), None, session="bench", rng=random.SystemRandom())
        nursery.start_soon(caller.run)
        loop, thread = caller.route_to(ends["loop"]), caller.route_to(ends["thread"])
        probes = {
            "generator in the loop": probe_stream(caller, loop, "count"),
            "async generator": probe_stream(caller, loop, "count_async"),
            "generator on a thread": probe_stream(caller, thread, "count"),
            "items to an async method": probe_upload(caller, loop),
            "there and back, async": probe_echo(caller, loop),
            "there and back, thread": probe_echo(caller, thread),
        }
        results = await take_turns(probes, rounds, seconds / rounds / len(probes))
        report("Streams", results, {}, json_file)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--seconds", type=float, default=12.0, help="duration of all probes together (default 12)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds of all probes in turn (default 3)")
    parser.add_argument("--serve", metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        trio.run(serve, options.serve)
    else:
        trio.run(measure, options.seconds, options.rounds, options.json)


if __name__ == "__main__":
    main()
