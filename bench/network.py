"""Calls, arrays and new connections over TCP, with ``--tls`` also over TLS: ``python -m bench.network --tls``.

Fray and raw sockets of the standard library, plain and with TLS 1.3, in one run and in turn: over loopback, or with
``--namespaces`` (as root) between two network namespaces. Nothing is in shared memory, as between two machines.

A connection is measured up to its first answer, with the contexts of TLS made before: the raw one with an echo of one
byte, since only that shows that the listener has completed the handshake.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import trio
from attrs import evolve

from bench.measure import Number, Probe, Results, one_by_one, percentiles, report, take_turns
from bench.serving import other_process
from fray.model.messages.client import ActorEndpoint
from fray.net.codec import from_json, to_json
from fray.net.tls.certificates import make_host
from fray.net.tls.identity import server_context, unverified_context
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.calls.caller import Caller

SIZES = {"10 MB": 10_000_000, "100 MB": 100_000_000}
PING = b"x" * 64
WIRES = ("plain", "TLS")
LOOPBACK = "127.0.0.1"
HERE, THERE = "10.251.7.1", "10.251.7.2"
"""Addresses of the two namespaces."""


class Target:
    """Actor in the loop."""

    async def add(self, k: int) -> int:
        return k

    async def echo(self, array: Any) -> Any:
        return array


# The serving process -------------------------------------------------------------------------------------------------


async def serve(directory: str, at: str) -> None:
    """Serve the actor and raw echoes at an IP address; print where as JSON. Ends with its standard input."""
    async with trio.open_nursery() as nursery:
        rng = random.SystemRandom()
        host = ActorHostServer(WebSocketNetwork(), incarnation="bench", rng=rng, directory=lambda: directory)
        host.advertise = lambda: at
        await nursery.start(host.run)
        await host.listen()
        host.has_tls = False
        await host.listen_tcp(at)
        endpoint = ActorEndpoint(
            actor_id="target",
            name="target",
            job_id="",
            namespace="",
            incarnation=host.incarnation,
            number=host.register(Target(), "target"),
            addresses=host.addresses,
            key=host.key,
        )
        raw = {"plain": start_raw_echo(at, None), "TLS": start_raw_echo(at, server_context(make_host(time.time())))}
        print(json.dumps({"at": at, "raw": raw, "endpoint": to_json(endpoint)}), flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)
        nursery.cancel_scope.cancel()


def start_raw_echo(at: str, context: ssl.SSLContext | None) -> int:
    """Serve raw echoes in a thread; return the port."""
    listener = socket.create_server((at, 0))
    threading.Thread(target=_raw_echo, args=(listener, context), daemon=True).start()
    return int(listener.getsockname()[1])


def _raw_echo(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    buffer = memoryview(bytearray(max(SIZES.values())))
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock if context is None else context.wrap_socket(sock, server_side=True) as connection:
            head = buffer[:8]
            while receive_into(connection, head):
                part = buffer[: int.from_bytes(head, "big")]
                receive_into(connection, part)
                connection.sendall(part)


def receive_into(sock: socket.socket, view: memoryview) -> bool:
    """Fill the view; return False at the end of the connection."""
    while view:
        count = sock.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


# Probes --------------------------------------------------------------------------------------------------------------


def connect_raw(place: tuple[str, int], context: ssl.SSLContext | None) -> socket.socket:
    sock = socket.create_connection(place)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock if context is None else context.wrap_socket(sock, server_hostname="bench")


def context_of(wire: str) -> ssl.SSLContext | None:
    return None if wire == "plain" else unverified_context()


def probe_raw(
    place: tuple[str, int], wire: str, size: int, seconds_each: Callable[..., Awaitable[dict[str, float]]]
) -> Probe:
    """Echo so many bytes over a raw socket."""
    context = context_of(wire)
    message, back = size.to_bytes(8, "big") + os.urandom(size), memoryview(bytearray(size))

    async def measure(seconds: float) -> dict[str, float]:
        with connect_raw(place, context) as sock:

            async def step() -> None:
                # The other side receives all of it before it sends.
                sock.sendall(message)
                receive_into(sock, back)

            return await seconds_each(step, seconds)

    return measure


def probe_raw_handshake(place: tuple[str, int], wire: str) -> Probe:
    context = context_of(wire)

    async def step() -> float:
        with connect_raw(place, context) as sock:
            sock.sendall((1).to_bytes(8, "big") + b"x")
            sock.recv(1)
            return time.perf_counter()

    return lambda seconds: until_answered(step, seconds)


async def until_answered(step: Callable[[], Awaitable[float]], seconds: float) -> dict[str, float]:
    """Measure steps that return the time of their answer; what they clean up afterwards does not count."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        times.append(await step() - began)
    return percentiles(times)


async def rates(step: Callable[[], Awaitable[None]], seconds: float) -> dict[str, float]:
    """Measure steps of which few fit into the time."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        await step()
        times.append(time.perf_counter() - began)
    return {"p50_us": 1e6 * sorted(times)[len(times) // 2]}


@asynccontextmanager
async def calling(endpoint: ActorEndpoint, wire: str) -> AsyncIterator[dict[str, Probe]]:
    """Probes of calls over one kind of connection."""
    scheme = "tcp:" if wire == "plain" else "tls:"
    found = evolve(endpoint, addresses=tuple(each for each in endpoint.addresses if each.startswith(scheme)))
    network = WebSocketNetwork()
    caller = Caller(network, None, session=f"bench-{wire}", rng=random.SystemRandom())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller.run)
        route = caller.route_to(found)
        arrays = {label: numpy.random.default_rng(0).random(size // 8) for label, size in SIZES.items()}

        async def call() -> None:
            await route.call("add", (1,))

        def echo(label: str) -> Probe:
            async def step() -> None:
                await route.call("echo", (arrays[label],))

            return lambda seconds: rates(step, seconds)

        async def connect_and_call() -> float:
            one = Caller(network, None, session=f"bench-{random.random()}", rng=random.SystemRandom())
            async with trio.open_nursery() as inner:
                inner.start_soon(one.run)
                await one.route_to(found).call("add", (1,))
                answered = time.perf_counter()
                inner.cancel_scope.cancel()
            return answered

        await call()
        yield {
            f"call, {wire}": lambda seconds: one_by_one(call, seconds),
            f"connection and first call, {wire}": lambda seconds: until_answered(connect_and_call, seconds),
            **{f"{label}, {wire}": echo(label) for label in SIZES},
        }
        nursery.cancel_scope.cancel()


@contextmanager
def other_namespace() -> Iterator[tuple[str, ...]]:
    """Make a network namespace with a pair of interfaces to this one; yield the command that runs others in it."""
    name, near, far = f"fray-bench-{os.getpid()}", f"fb{os.getpid()}", "fb0"
    inside = ("ip", "netns", "exec", name)
    try:
        for command in (
            f"ip netns add {name}",
            f"ip link add {near} type veth peer name {far} netns {name}",
            f"ip addr add {HERE}/30 dev {near}",
            f"ip link set {near} up",
            f"ip -n {name} addr add {THERE}/30 dev {far}",
            f"ip -n {name} link set {far} up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(command.split(), check=True)
        yield inside
    finally:
        # With it both interfaces go.
        subprocess.run(["ip", "netns", "del", name], check=False)


async def run(
    rounds: int, seconds: float, json_file: Path | None, wires: tuple[str, ...], at: str, before: tuple[str, ...]
) -> None:
    async with other_process("network", at, before=before, FRAY_SEGMENT_POOL_BYTES="0") as addresses:
        endpoint = from_json(ActorEndpoint, addresses["endpoint"])
        probes: dict[str, Probe] = {}
        for wire in wires:
            place = addresses["at"], addresses["raw"][wire]
            probes[f"raw echo, {wire}"] = probe_raw(place, wire, len(PING), one_by_one)
            probes[f"raw connection, {wire}"] = probe_raw_handshake(place, wire)
            probes |= {f"raw {label}, {wire}": probe_raw(place, wire, size, rates) for label, size in SIZES.items()}
        async with calling(endpoint, "plain") as plain, calling(endpoint, wires[-1]) as last:
            results = await take_turns(probes | plain | last, rounds, seconds)
        report("network between namespaces" if before else "network", results, ratios_of(results, wires), json_file)


def ratios_of(results: Results, wires: tuple[str, ...]) -> dict[str, Number]:
    """Return how Fray compares with the raw socket, by wire."""
    pairs = [(f"{label}, {wire}", f"raw {label}, {wire}") for wire in wires for label in SIZES]
    pairs += [(f"connection and first call, {wire}", f"raw connection, {wire}") for wire in wires]
    pairs += [(f"call, {wire}", f"raw echo, {wire}") for wire in wires]
    if len(wires) > 1:
        pairs += [("call, TLS", "call, plain"), ("raw echo, TLS", "raw echo, plain")]
    ratios = {f"{one}: time / {other}": results.ratio("p50_us", one, other) for one, other in pairs}
    if len(wires) > 1:
        ratios["what TLS adds to a call / to a raw echo"] = _added(results)
    return ratios


def _added(results: Results) -> Number:
    """Return the ratio of two differences, each of them of its round."""
    p50 = {probe: results.rounds[probe]["p50_us"] for probe in results.rounds}
    call, echo = (
        [tls - plain for tls, plain in zip(p50[f"{one}, TLS"], p50[f"{one}, plain"], strict=True)]
        for one in ("call", "raw echo")
    )
    values = [one / other for one, other in zip(call, echo, strict=True)]
    return Number(statistics.median(values), min(values), max(values))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.network", description=__doc__.splitlines()[0])
    parser.add_argument("--tls", action="store_true", help="measure TLS, too")
    parser.add_argument("--namespaces", action="store_true", help="between two network namespaces; needs root")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each probe in each round (default 0.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--serve", nargs=2, metavar=("DIRECTORY", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        trio.run(serve, *options.serve)
    else:
        os.environ["FRAY_SEGMENT_POOL_BYTES"] = "0"
        wires = WIRES if options.tls else WIRES[:1]
        with other_namespace() if options.namespaces else nullcontext(()) as before:
            at = THERE if options.namespaces else LOOPBACK
            trio.run(run, options.rounds, options.seconds, options.json, wires, at, before)


if __name__ == "__main__":
    main()
