"""Calls directly to the process of an actor, and through the controller: ``python -m bench.relay``.

Both routes lead to the same actor of one `machine` cluster, side by side in each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import trio
from attrs import evolve

import fray
from bench.measure import by_the_lot, one_by_one, report, take_turns
from fray.runtime.calls.caller import Caller
from fray.runtime.calls.route import Route
from fray.runtime.runtime import current

LOT = 1_000
DATA = b"x" * 4_000_000


class Target:
    """Actor in the loop."""

    async def add(self, k: int) -> int:
        return k

    async def echo(self, data: bytes) -> bytes:
        return data


def probe(caller: Caller, route: Route) -> Callable[[float], Awaitable[Mapping[str, float]]]:
    async def one() -> None:
        await route.call("add", (1,))

    async def lot() -> int:
        made = [route.start("add", (1,)) for _ in range(LOT)]
        for call in made:
            await call
        return LOT

    async def data() -> int:
        return len(await route.call("echo", (DATA,)))

    async def measure(seconds: float) -> Mapping[str, float]:
        latency = await one_by_one(one, seconds)
        many = await by_the_lot(lot, seconds)
        echo = await by_the_lot(data, seconds)
        return {**latency, "calls_per_s": many["per_s"], "echo_mb_per_s": echo["per_s"] / 1e6}

    return measure


async def run(rounds: int, seconds: float, json_file: Path | None) -> None:
    async with fray.open_cluster("machine?nodes=1&cpu=2", logs=False) as cluster, cluster.open_scope("bench") as scope:
        target = await scope.create_actor(Target)
        await target.add(1)
        runtime = current()
        known = target._connection_route().endpoint
        assert known is not None
        probes = {}
        for name, wanted in (("direct", False), ("relayed", True)):
            addresses = tuple(address for address in known.addresses if address.startswith("relay:") is wanted)
            caller = Caller(runtime.network, None, session=f"bench-{name}", rng=runtime.rng)
            runtime.nursery.start_soon(caller.run)
            probes[name] = probe(caller, caller.route_to(evolve(known, addresses=addresses)))
        results = await take_turns(probes, rounds, seconds)
        ratios = {
            f"{name}, relayed to direct": results.ratio(name, "relayed", "direct")
            for name in ("p50_us", "calls_per_s", "echo_mb_per_s")
        }
        report("relay and direct calls", results, ratios, json_file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.relay", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trio.run(run, options.rounds, options.seconds, options.json)


if __name__ == "__main__":
    main()
