"""Arrays to an actor in another process and back, with the limits of memory and sockets: ``python -m bench.data``.

GB/s is the bytes of the array over the time of the round trip. ``same host`` is a Unix socket with segments of shared
memory, ``chunks`` the same without segments (as between hosts, without the network), ``tcp`` chunks over loopback. The
memory rise is the highest PSS of both processes together, shared pages counted once, during echoes of 100 MB, above
idle with the argument in memory. Targets: 1 MB at least 1 GB/s, 100 MB at least 2 GB/s with a rise of at most 2.2
times the array on the same host, at least 0.4 GB/s over TCP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy
import trio
from attrs import evolve

from bench.compare import add_peer_option, run_peers
from bench.measure import Number, Probe, Results, report
from bench.serving import other_process
from fray.model.messages.client import ActorEndpoint
from fray.net.codec import from_json, to_json
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.calls.caller import Caller
from fray.runtime.calls.route import Route

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "10 MB": 10 << 20, "100 MB": 100 << 20}
ENOUGH = {"1 KB": 400, "1 MB": 100, "10 MB": 20, "100 MB": 5}
"""Largest number of echoes of each size in a round."""
clock = time.perf_counter


class Echo:
    """Actor in the loop of its process; `keep` makes it return an array that it stores."""

    def __init__(self) -> None:
        self.kept: Any = None

    def echo(self, array: Any) -> Any:
        return array

    def keep(self, array: Any) -> Any:
        self.kept = array
        return array

    async def nothing(self) -> None:
        self.kept = None


# The serving process -------------------------------------------------------------------------------------------------


async def serve(directory: str) -> None:
    """Serve the actor and a plain socket that echoes; print the addresses as JSON. Ends with its standard input."""
    async with trio.open_nursery() as nursery:
        host = ActorHostServer(
            WebSocketNetwork(), incarnation="bench", rng=random.SystemRandom(), directory=lambda: directory
        )
        await nursery.start(host.run)
        await host.listen()
        await host.listen_tcp()
        endpoints = [_endpoint(host, host.register(Echo(), name), name) for name in ("echo", "small")]
        raw = {name: _listen(name, directory) for name in ("unix", "tcp")}
        places = {"unix": raw["unix"].getsockname(), "tcp": raw["tcp"].getsockname()}
        actors = [to_json(endpoint) for endpoint in endpoints]
        print(json.dumps({"actors": actors, "raw": places, "pid": os.getpid()}), flush=True)
        for listener in raw.values():
            threading.Thread(target=_raw_echoes, args=(listener,), daemon=True).start()
        await trio.lowlevel.wait_readable(sys.stdin)
        await host.shutdown()
        nursery.cancel_scope.cancel()


def _endpoint(host: ActorHostServer, number: int, name: str) -> ActorEndpoint:
    return ActorEndpoint(
        actor_id=name,
        name=name,
        job_id="",
        namespace="",
        incarnation=host.incarnation,
        number=number,
        addresses=host.addresses,
        key=host.key,
    )


def _listen(kind: str, directory: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    listener.bind(f"{directory}/raw.sock" if kind == "unix" else ("127.0.0.1", 0))
    listener.listen()
    return listener


def _raw_echoes(listener: socket.socket) -> None:
    """Serve connections: 8 bytes give the size of the data, which is received into one buffer and sent back."""
    while True:
        sock, _ = listener.accept()
        _send_at_once(sock)
        buffer = memoryview(bytearray(SIZES["100 MB"]))
        while head := sock.recv(8, socket.MSG_WAITALL):
            part = buffer[: int.from_bytes(head, "big")]
            _receive_into(sock, part)
            sock.sendall(part)


def _send_at_once(sock: socket.socket) -> None:
    """Switch off Nagle's algorithm, as for Fray's sockets: with it, the data waits 40 ms for an acknowledgement."""
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view) :]


# The measuring process -----------------------------------------------------------------------------------------------


def make_array(size: int) -> Any:
    return numpy.random.default_rng(0).random(size // 8)


def same(got: Any, array: Any) -> bool:
    ends = (0, len(array) // 2, -1)
    return bool(got.shape == array.shape and got.flags.writeable and all(got[at] == array[at] for at in ends))


async def timed(step: Callable[[], Awaitable[None]], size: int, most: int, seconds: float) -> dict[str, float]:
    times: list[float] = []
    until = clock() + seconds
    while len(times) < 2 or (len(times) < most and clock() < until):
        began = clock()
        await step()
        times.append(clock() - began)
    times.sort()
    median = times[len(times) // 2]
    return {"gb_s": size / 1e9 / median, "p50_us": 1e6 * median}


def probe_echo(caller: Caller, route: Route, label: str, method: str = "echo") -> Probe:
    array = make_array(SIZES[label])

    async def step() -> None:
        got = await route.call(method, (array,))
        assert same(got, array)

    async def probe(seconds: float) -> dict[str, float]:
        result = await timed(step, array.nbytes, ENOUGH[label], seconds)
        await route.call("nothing")
        return result

    return probe


def probe_raw(place: Any, label: str) -> Probe:
    size = SIZES[label]

    async def probe(seconds: float) -> dict[str, float]:
        sock = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET)
        data, back = make_array(size), bytearray(size)
        with sock:
            sock.connect(place if isinstance(place, str) else tuple(place))
            _send_at_once(sock)

            def there_and_back() -> None:
                sock.sendall(size.to_bytes(8, "big"))
                sock.sendall(memoryview(data).cast("B"))
                _receive_into(sock, memoryview(back))

            async def step() -> None:
                there_and_back()

            return await timed(step, size, ENOUGH[label], seconds)

    return probe


def probe_memcpy(label: str, *, warm: bool) -> Probe:
    source = memoryview(make_array(SIZES[label])).cast("B")
    ready = bytearray(len(source))

    async def step() -> None:
        target = ready if warm else bytearray(len(source))
        memoryview(target)[:] = source

    return lambda seconds: timed(step, len(source), ENOUGH[label], seconds)


def probe_small_beside(caller: Caller, route: Route, small: Route, *, busy: bool) -> Probe:
    """Make small calls to another actor of the same process, beside echoes of 100 MB (or not)."""
    array = make_array(SIZES["100 MB"])

    async def probe(seconds: float) -> dict[str, float]:
        times: list[float] = []
        large = 0
        async with trio.open_nursery() as nursery:

            async def keep_busy() -> None:
                nonlocal large
                while True:
                    await route.call("echo", (array,))
                    large += 1

            if busy:
                nursery.start_soon(keep_busy)
            until = clock() + max(seconds, 1.0)
            while clock() < until:
                began = clock()
                await small.call("nothing")
                times.append(clock() - began)
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        times.sort()
        return {"p50_us": 1e6 * times[len(times) // 2], "p99_us": 1e6 * times[len(times) * 99 // 100], "large": large}

    return probe


async def probe_rise(caller: Caller, route: Route, pids: list[int], echoes: int) -> dict[str, float]:
    """Measure the rise of the memory of both processes during echoes of 100 MB, above idle with the argument."""
    array = make_array(SIZES["100 MB"])
    watch = PssWatch(pids)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        for _ in range(echoes):
            got = await route.call("echo", (array,))
            assert same(got, array)
            del got
    finally:
        watch.over = True
        thread.join()
    return {"rise_mb": (watch.peak - watch.idle) / 1e6, "times": (watch.peak - watch.idle) / array.nbytes}


class PssWatch:
    """Highest sum of proportional set sizes, polled every few milliseconds."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.over = False
        self.idle = self.peak = self._now()

    def run(self) -> None:
        while not self.over:
            self.peak = max(self.peak, self._now())
            time.sleep(0.004)

    def _now(self) -> int:
        return sum(map(_pss, self.pids))


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


@asynccontextmanager
async def reaching(addresses: dict[str, Any], wire: str) -> AsyncIterator[tuple[Caller, Route, Route]]:
    """Connect to both actors over one kind of transport."""
    known = [from_json(ActorEndpoint, text) for text in addresses["actors"]]
    mine = tuple(address for address in known[0].addresses if address.startswith(wire))
    caller = Caller(WebSocketNetwork(), None, session=f"bench-{random.random()}", rng=random.SystemRandom())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller.run)
        echo, small = (caller.route_to(evolve(each, addresses=mine)) for each in known)
        yield caller, echo, small
        nursery.cancel_scope.cancel()


async def measure(seconds: float, rounds: int, json_file: Path | None, sizes: list[str]) -> None:
    results = Results()
    async with (
        other_process("data") as sharing,
        other_process("data", FRAY_SEGMENT_POOL_BYTES="0") as alone,
        reaching(sharing, "unix") as here,
        reaching(alone, "unix") as chunks,
        reaching(alone, "tcp") as tcp,
    ):
        ways = {"same host": here, "chunks": chunks, "tcp": tcp}
        probes: dict[str, Probe] = {}
        for label in sizes:
            probes[f"{label}: memcpy, warm"] = probe_memcpy(label, warm=True)
            probes[f"{label}: memcpy into fresh pages"] = probe_memcpy(label, warm=False)
            for kind, place in alone["raw"].items():
                probes[f"{label}: raw {kind} echo"] = probe_raw(place, label)
            for name, (caller, route, _) in ways.items():
                probes[f"{label}: echo, {name}"] = probe_echo(caller, route, label)
            probes[f"{label}: echo of a stored array, same host"] = probe_echo(*here[:2], label, "keep")
        for name, way in ways.items():
            probes[f"small calls alone, {name}"] = probe_small_beside(*way, busy=False)
            probes[f"small calls beside 100 MB, {name}"] = probe_small_beside(*way, busy=True)
        results.add("rise in echoes of 100 MB, same host", await rise(FRAY_SEGMENT_POOL_BYTES=""))
        results.add("rise in echoes of 100 MB, chunks", await rise(FRAY_SEGMENT_POOL_BYTES="0"))
        for probe in probes.values():
            await probe(0.05)
        for _ in range(rounds):
            for name, probe in probes.items():
                results.add(name, await probe(seconds / rounds / len(probes)))
    report("Data", results, ratios_of(results, sizes), json_file)


async def rise(**environ: str) -> dict[str, float]:
    """Measure the rise in new processes, whose pools are empty."""
    async with other_process("data", **environ) as addresses, reaching(addresses, "unix") as (caller, route, _):
        await route.call("nothing")
        return await probe_rise(caller, route, [os.getpid(), addresses["pid"]], 6)


def ratios_of(results: Results, sizes: list[str]) -> dict[str, Number]:
    ratios = {}
    for label in sizes:
        for name, below in (("same host", "memcpy, warm"), ("chunks", "raw unix echo"), ("tcp", "raw tcp echo")):
            ratios[f"{label}: echo, {name} / {below}"] = results.ratio(
                "gb_s", f"{label}: echo, {name}", f"{label}: {below}"
            )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of all probes together (default 30)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds of all probes in turn (default 3)")
    parser.add_argument("--sizes", default=",".join(SIZES), help="sizes to measure (default all)")
    parser.add_argument("--serve", metavar="DIRECTORY", help=argparse.SUPPRESS)
    add_peer_option(parser)
    options = parser.parse_args()
    if options.serve is not None:
        trio.run(serve, options.serve)
    else:
        trio.run(measure, options.seconds, options.rounds, options.json, options.sizes.split(","))
        run_peers(options, "payload")


if __name__ == "__main__":
    main()
