"""Actor calls between two processes, beside their building blocks: ``python -m bench.calls``.

Side by side in one run: a raw Trio TCP echo, a raw trio-websocket echo; calls over a Unix socket and over TCP, one at a
time and many concurrently (against one WebSocket message a call), to actors in the loop and on a thread; and in a
``machine`` cluster: the async and the blocking API, one actor and four. ``--peer ray`` continues with the comparison
harness. Targets: one call at a time at most 2 times the raw Trio TCP echo; many concurrent calls at
least 50,000 a second from async code and 20,000 from sync code.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
import trio_websocket

from bench.compare import add_peer_option, run_peers
from bench.measure import Probe, by_the_lot, one_by_one, percentiles, report, take_turns
from bench.serving import other_process
from fray import ActorHandle, blocking, open_cluster
from fray.model.messages.client import ActorEndpoint
from fray.net.codec import from_json, to_json
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.calls.caller import Caller
from fray.runtime.calls.route import Route

MESSAGE = b"x" * 60
IN_THE_AIR = 1_000
FACE_IN_THE_AIR = 5_000
WINDOW = 256
"""Concurrent calls when each is a separate message: more gains nothing there."""


class InLoop:
    """Actor with an async method, so that everything runs in the loop."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def add_async(self, k: int) -> int:
        self.n += k
        return self.n

    async def add_slowly(self, k: int) -> int:
        await trio.lowlevel.checkpoint()
        return self.add(k)


class OnThread:
    """Sync actor, with its own thread."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n


# The serving process -------------------------------------------------------------------------------------------------


async def serve(directory: str) -> None:
    """Serve all servers in one process; print their addresses as JSON. Ends with its standard input."""
    async with trio.open_nursery() as nursery:
        echoes = await nursery.start(trio.serve_tcp, tcp_echo, 0)
        sockets = await nursery.start(trio_websocket.serve_websocket, websocket_echo, "127.0.0.1", 0, None)
        rng = random.SystemRandom()
        host = ActorHostServer(WebSocketNetwork(), incarnation="bench", rng=rng, directory=lambda: directory)
        await nursery.start(host.run)
        await host.listen()
        await host.listen_tcp()
        numbers = {"in the loop": host.register(InLoop(), "loop"), "on a thread": host.register(OnThread(), "thread")}
        addresses = {
            "tcp": echoes[0].socket.getsockname()[1],
            "websocket": sockets.port,
            "hosts": {address.partition(":")[0]: address for address in host.addresses},
            "actors": {name: to_json(endpoint(host, number)) for name, number in numbers.items()},
        }
        print(json.dumps(addresses), flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)
        nursery.cancel_scope.cancel()


def endpoint(host: ActorHostServer, number: int) -> ActorEndpoint:
    return ActorEndpoint(
        actor_id=str(number),
        name=str(number),
        job_id="",
        namespace="",
        incarnation=host.incarnation,
        number=number,
        key=host.key,
    )


async def tcp_echo(stream: trio.SocketStream) -> None:
    stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
    async for data in stream:
        await stream.send_all(data)


async def websocket_echo(request: trio_websocket.WebSocketRequest) -> None:
    """Serve ``/echo``, and ``/call``, which unpickles a call, makes it, and sends the pickled result."""
    connection = await request.accept()
    actor, calls = InLoop(), request.path == "/call"
    try:
        while True:
            message = await connection.get_message()
            if calls:
                assert isinstance(message, bytes)
                method, args = pickle.loads(message)
                message = pickle.dumps(getattr(actor, method)(*args), 5)
            await connection.send_message(message)
    except trio_websocket.ConnectionClosed:
        pass


# The measuring process -----------------------------------------------------------------------------------------------


async def probe_tcp(port: int, seconds: float) -> dict[str, float]:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)

        async def step() -> None:
            await stream.send_all(MESSAGE)
            await stream.receive_some(4096)

        return await one_by_one(step, seconds)


async def probe_websocket(port: int, seconds: float) -> dict[str, float]:
    async with trio_websocket.open_websocket_url(f"ws://127.0.0.1:{port}/echo") as connection:

        async def step() -> None:
            await connection.send_message(MESSAGE)
            await connection.get_message()

        return await one_by_one(step, seconds)


async def probe_message_a_call(port: int, seconds: float) -> dict[str, float]:
    async with trio_websocket.open_websocket_url(f"ws://127.0.0.1:{port}/call") as connection:

        async def send() -> None:
            for _ in range(WINDOW):
                await connection.send_message(pickle.dumps(("add", (1,)), 5))

        async def lot() -> int:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                for _ in range(WINDOW):
                    message = await connection.get_message()
                    assert isinstance(message, bytes)
                    pickle.loads(message)
            return WINDOW

        return await by_the_lot(lot, seconds)


def probe_one_call(caller: Caller, route: Route, method: str) -> Probe:
    async def step() -> None:
        await route.call(method, (1,))

    return lambda seconds: one_by_one(step, seconds)


def probe_many_calls(caller: Caller, route: Route, method: str) -> Probe:
    async def lot() -> int:
        calls = [route.start(method, (1,)) for _ in range(IN_THE_AIR)]
        for call in calls:
            await call
        return IN_THE_AIR

    return lambda seconds: by_the_lot(lot, seconds)


def probe_steady_calls(caller: Caller, route: Route, method: str) -> Probe:
    """Make calls in tasks that make one call after another."""

    async def one(count: int) -> None:
        for _ in range(count):
            await route.call(method, (1,))

    async def lot() -> int:
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(one, 20)
        return 2_000

    return lambda seconds: by_the_lot(lot, seconds)


# Users' view: both APIs --------------------------------------------------------------------------------------------


def native_many(actors: list[ActorHandle]) -> Probe:
    async def lot() -> int:
        futures = [actors[i % len(actors)].add.start(1) for i in range(FACE_IN_THE_AIR)]
        for future in futures:
            await future
        return FACE_IN_THE_AIR

    return lambda seconds: by_the_lot(lot, seconds)


def blocking_one(actor: blocking.ActorHandle) -> Probe:
    """Make one call after another in a thread."""

    def measure(seconds: float) -> dict[str, float]:
        clock, times = time.perf_counter, []
        until = clock() + seconds
        now = clock()
        while now < until:
            actor.add(1)
            then, now = now, clock()
            times.append(now - then)
        return percentiles(times)

    return lambda seconds: trio.to_thread.run_sync(measure, seconds)


def blocking_many(actors: list[blocking.ActorHandle]) -> Probe:
    def measure(seconds: float) -> dict[str, float]:
        clock = time.perf_counter
        began, done = clock(), 0
        while clock() - began < seconds:
            futures = [actors[i % len(actors)].add.remote(1) for i in range(FACE_IN_THE_AIR)]
            for future in futures:
                future.result()
            done += FACE_IN_THE_AIR
        return {"per_s": done / (clock() - began)}

    return lambda seconds: trio.to_thread.run_sync(measure, seconds)


@asynccontextmanager
async def api_probes() -> AsyncIterator[dict[str, Probe]]:
    """Yield the probes of both APIs, with the cluster they need."""
    async with open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster, cluster.open_scope("bench") as scope:
        probes: dict[str, Probe] = {}
        for place, body in (("in the loop", InLoop), ("on a thread", OnThread)):
            actors = [await scope.create_actor(body) for _ in range(4)]
            for actor in actors:
                await actor.add(1)
            handles = [blocking.ActorHandle(actor) for actor in actors]

            async def one(actor: ActorHandle = actors[0]) -> None:
                await actor.add(1)

            probes |= {
                f"native: one call, {place}": lambda seconds, one=one: one_by_one(one, seconds),  # type: ignore[misc]
                f"native: many calls, {place}": native_many(actors[:1]),
                f"native: many calls, {place}, 4 actors": native_many(actors),
                f"blocking: one call, {place}": blocking_one(handles[0]),
                f"blocking: many calls, {place}": blocking_many(handles[:1]),
                f"blocking: many calls, {place}, 4 actors": blocking_many(handles),
            }
        yield probes


def on_port(probe: Callable[[int, float], Awaitable[dict[str, float]]], port: int) -> Probe:
    return lambda seconds: probe(port, seconds)


def all_probes(addresses: dict[str, Any], nursery: trio.Nursery) -> dict[str, Probe]:
    probes: dict[str, Probe] = {
        "Trio TCP echo": on_port(probe_tcp, addresses["tcp"]),
        "trio-websocket echo": on_port(probe_websocket, addresses["websocket"]),
        "trio-websocket, one message a call": on_port(probe_message_a_call, addresses["websocket"]),
    }
    for wire, address in addresses["hosts"].items():
        caller = Caller(WebSocketNetwork(), None, session=f"bench-{wire}", rng=random.SystemRandom())
        nursery.start_soon(caller.run)
        routes = {}
        for place, text in addresses["actors"].items():
            known = from_json(ActorEndpoint, text)
            routes[place] = caller.route_to(
                ActorEndpoint(
                    actor_id=known.actor_id,
                    name=known.name,
                    job_id="",
                    namespace="",
                    incarnation=known.incarnation,
                    number=known.number,
                    addresses=(address,),
                    key=known.key,
                )
            )
        loop, thread = routes["in the loop"], routes["on a thread"]
        probes |= {
            f"{wire}: one call, sync in the loop": probe_one_call(caller, loop, "add"),
            f"{wire}: one call, async": probe_one_call(caller, loop, "add_async"),
            f"{wire}: one call, thread": probe_one_call(caller, thread, "add"),
            f"{wire}: many calls, sync in the loop": probe_many_calls(caller, loop, "add"),
            f"{wire}: many calls, async": probe_many_calls(caller, loop, "add_async"),
            f"{wire}: many calls, async that waits": probe_many_calls(caller, loop, "add_slowly"),
            f"{wire}: many calls, thread": probe_many_calls(caller, thread, "add"),
            f"{wire}: 100 tasks, sync in the loop": probe_steady_calls(caller, loop, "add"),
        }
    return probes


async def measure(seconds: float, rounds: int, json_file: Path | None) -> None:
    async with other_process("calls") as addresses, api_probes() as faces, trio.open_nursery() as nursery:
        probes = all_probes(addresses, nursery) | faces
        results = await take_turns(probes, rounds, seconds / rounds / len(probes))
        ratios = {}
        for wire in addresses["hosts"]:
            for how in ("sync in the loop", "async", "thread"):
                one, many = f"{wire}: one call, {how}", f"{wire}: many calls, {how}"
                ratios[f"{one} / trio-websocket echo"] = results.ratio("p50_us", one, "trio-websocket echo")
                ratios[f"{many} / one message a call"] = results.ratio(
                    "per_s", many, "trio-websocket, one message a call"
                )
        floor = "Trio TCP echo"
        for one in (
            "unix: one call, sync in the loop",
            "native: one call, in the loop",
            "blocking: one call, in the loop",
        ):
            ratios[f"{one} / {floor}"] = results.ratio("p50_us", one, floor)
        report("Actor calls", results, ratios, json_file)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of all probes together (default 30)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds of all probes in turn (default 5)")
    parser.add_argument("--serve", metavar="DIRECTORY", help=argparse.SUPPRESS)
    add_peer_option(parser)
    options = parser.parse_args()
    if options.serve is not None:
        trio.run(serve, options.serve)
    else:
        trio.run(measure, options.seconds, options.rounds, options.json)
        run_peers(options, "latency,flood")


if __name__ == "__main__":
    main()
