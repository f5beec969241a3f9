"""Calls, arrays and new connections over TCP, with ``--tls`` also over TLS: ``python -m bench.network --tls``.

Fray and raw sockets of the standard library, plain and with TLS 1.3, in one run and in turn: over loopback, or with
``--namespaces`` (as root) between two network namespaces. Nothing is in shared memory, as between two machines.

A connection is measured up to its first answer, with the contexts of TLS made before: the raw one with an echo of one
byte, since only that shows that the listener has completed the handshake.

To be steady on a busy machine, each process has a CPU of its own, probes of one kind take turns in short rounds, and
ratios are made within a round. Beside the time there is the CPU time of both processes together.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import trio
from attrs import evolve

from bench.measure import Number, Probe, Results, percentiles, report, take_turns
from bench.serving import other_process
from fray.model.messages.client import ActorEndpoint
from fray.net.codec import from_json, to_json
from fray.net.tls.certificates import make_host
from fray.net.tls.identity import server_context, unverified_context
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.calls.caller import Caller

SIZES = {"10 MB": 10_000_000, "100 MB": 100_000_000}
KINDS = ("call", "connection and first call", *SIZES)
SETTLE_S = 0.005
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
        print(json.dumps({"at": at, "raw": raw, "endpoint": to_json(endpoint), "pid": os.getpid()}), flush=True)
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


def probe_raw(place: tuple[str, int], wire: str, size: int, server: int) -> Probe:
    """Echo so many bytes over a raw socket."""
    context = context_of(wire)
    message, back = size.to_bytes(8, "big") + os.urandom(size), memoryview(bytearray(size))

    async def measure(seconds: float) -> dict[str, float]:
        with connect_raw(place, context) as sock:

            async def step() -> float:
                # The other side receives all of it before it sends.
                sock.sendall(message)
                receive_into(sock, back)
                return time.perf_counter()

            return await time_steps(step, seconds, server)

    return measure


def probe_raw_handshake(place: tuple[str, int], wire: str, server: int) -> Probe:
    context = context_of(wire)

    async def step() -> float:
        with connect_raw(place, context) as sock:
            sock.sendall((1).to_bytes(8, "big") + b"x")
            sock.recv(1)
            return time.perf_counter()

    return lambda seconds: time_steps(step, seconds, server)


async def time_steps(step: Callable[[], Awaitable[float]], seconds: float, server: int) -> dict[str, float]:
    """Measure steps, which return the time of their answer: what they clean up afterwards counts as CPU time only."""
    # The server cleans up after the probe before this one, and caches are cold.
    await trio.sleep(SETTLE_S)
    await step()
    times: list[float] = []
    cpu_s = cpu_time_s(server)
    until = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        times.append(await step() - began)
    await trio.sleep(SETTLE_S)
    return {**percentiles(times), "cpu_us": 1e6 * (cpu_time_s(server) - cpu_s) / len(times)}


def cpu_time_s(server: int) -> float:
    """Return the CPU time of this process and of the other one."""
    # The clock of another process, see clock_getcpuclockid(3).
    return time.process_time() + time.clock_gettime((~server << 3) | 2)


@asynccontextmanager
async def calling(endpoint: ActorEndpoint, wire: str, server: int) -> AsyncIterator[dict[str, Probe]]:
    """Probes of calls over one kind of connection."""
    scheme = "tcp:" if wire == "plain" else "tls:"
    found = evolve(endpoint, addresses=tuple(each for each in endpoint.addresses if each.startswith(scheme)))
    network = WebSocketNetwork()
    caller = Caller(network, None, session=f"bench-{wire}", rng=random.SystemRandom())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller.run)
        route = caller.route_to(found)
        arrays = {label: numpy.random.default_rng(0).random(size // 8) for label, size in SIZES.items()}

        async def call() -> float:
            await route.call("add", (1,))
            return time.perf_counter()

        async def connect_and_call() -> float:
            one = Caller(network, None, session=f"bench-{random.random()}", rng=random.SystemRandom())
            async with trio.open_nursery() as inner:
                inner.start_soon(one.run)
                await one.route_to(found).call("add", (1,))
                answered = time.perf_counter()
                inner.cancel_scope.cancel()
            return answered

        def echo(label: str) -> Callable[[], Awaitable[float]]:
            async def step() -> float:
                await route.call("echo", (arrays[label],))
                return time.perf_counter()

            return step

        def probe(step: Callable[[], Awaitable[float]]) -> Probe:
            return lambda seconds: time_steps(step, seconds, server)

        await call()
        yield {
            f"call, {wire}": probe(call),
            f"connection and first call, {wire}": probe(connect_and_call),
            **{f"{label}, {wire}": probe(echo(label)) for label in SIZES},
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
    rounds: int,
    seconds: float,
    json_file: Path | None,
    wires: tuple[str, ...],
    at: str,
    before: tuple[str, ...],
    kinds: Collection[str],
) -> None:
    async with other_process("network", at, before=before, FRAY_SEGMENT_POOL_BYTES="0") as addresses:
        endpoint, server = from_json(ActorEndpoint, addresses["endpoint"]), addresses["pid"]
        probes: dict[str, Probe] = {}
        for wire in wires:
            place = addresses["at"], addresses["raw"][wire]
            probes[f"raw call, {wire}"] = probe_raw(place, wire, len(PING), server)
            probes[f"raw connection and first call, {wire}"] = probe_raw_handshake(place, wire, server)
            probes |= {f"raw {label}, {wire}": probe_raw(place, wire, size, server) for label, size in SIZES.items()}
        cpus = os.sched_getaffinity(0)
        pin(os.getpid(), server)
        async with calling(endpoint, "plain", server) as plain, calling(endpoint, wires[-1], server) as last:
            results = Results()
            for kind in kinds:
                one = {name: probe for name, probe in (probes | plain | last).items() if f"{kind}, " in name}
                if kind == "call":  # also part of the name of the next kind
                    one = {name: probe for name, probe in one.items() if "connection" not in name}
                part = await take_turns(one, rounds // (4 if kind in SIZES else 1), seconds)
                results.rounds |= part.rounds
        os.sched_setaffinity(0, cpus)
        report("network between namespaces" if before else "network", results, ratios_of(results, wires), json_file)


def pin(*processes: int) -> None:
    """Give each process a CPU of its own, if there are enough: sharing one or not changes an echo by a factor of 4."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) >= len(processes):
        for cpu, process in zip(cpus, processes, strict=False):
            for thread in os.listdir(f"/proc/{process}/task"):
                os.sched_setaffinity(int(thread), {cpu})


def ratios_of(results: Results, wires: tuple[str, ...]) -> dict[str, Number]:
    """Return how Fray compares with the raw socket, by wire."""
    ratios = {}
    for probe in results.rounds:
        if f"raw {probe}" in results.rounds:
            for number, what in (("p50_us", "time"), ("cpu_us", "CPU time")):
                ratios[f"{probe}: {what} / raw"] = results.ratio(number, probe, f"raw {probe}")
    if len(wires) > 1 and "call, TLS" in results.rounds:
        for number, what in (("p50_us", "time"), ("cpu_us", "CPU time")):
            ratios[f"{what} that TLS adds to a call / to a raw echo"] = _added(results, number)
    return ratios


def _added(results: Results, number: str) -> Number:
    """Return the ratio of what TLS adds in the median, with the 5th and the 95th percentile of its bootstrap."""
    values = {probe: results.rounds[probe][number] for probe in results.rounds if "call, " in probe}
    call, echo = (
        [tls - plain for tls, plain in zip(values[f"{one}, TLS"], values[f"{one}, plain"], strict=True)]
        for one in ("call", "raw call")
    )
    rng = random.Random(0)

    def ratio(rounds: Sequence[int]) -> float:
        return statistics.median(call[at] for at in rounds) / statistics.median(echo[at] for at in rounds)

    everything = range(len(call))
    sampled = sorted(ratio(rng.choices(everything, k=len(call))) for _ in range(1000))
    return Number(ratio(everything), sampled[50], sampled[949])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.network", description=__doc__.splitlines()[0])
    parser.add_argument("--tls", action="store_true", help="measure TLS, too")
    parser.add_argument("--namespaces", action="store_true", help="between two network namespaces; needs root")
    parser.add_argument("--rounds", type=int, default=40, help="default: 40; of arrays a quarter")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each probe in each round (default 0.1)")
    parser.add_argument("--only", choices=KINDS, action="append", help="one kind; may be repeated")
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
            kinds = options.only or KINDS
            trio.run(run, options.rounds, options.seconds, options.json, wires, at, before, kinds)


if __name__ == "__main__":
    main()
