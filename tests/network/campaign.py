"""Random faults between hosts under load, from one seed: ``python -m tests.network.campaign --seed 7 --cuts 100``.

Two drivers, one behind a gateway, call two actors on two machines: calls, two-way streams and arrays, many at once,
while one fault after another breaks what connects them. None lasts as long as the controller tolerates silence. So each
call must be answered without an error, each effect must be counted exactly once by its actor, nothing may hang, and no
actor may run twice.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from tests.network.actors import OVERLAPS
from tests.network.cluster import Answer, Driver, TestCluster, open_test_cluster
from tests.network.laboratory import Laboratory
from tests.network.namespaces import reason_to_skip

NODES = ("n1", "n2")
LAPTOPS = ("laptop", "home")
"""Hosts of the drivers; the second is behind a gateway."""
LONGEST_S = 6.0
"""Length of the longest fault; a machine is suspect after 30 s of silence."""
END_S = 120.0
"""Time for everything under way to end after the last fault."""
WORKERS = 6
"""Tasks of each driver for each actor that call one after the other."""


@define
class Result:
    """Sums of a campaign, and each breach of a promise as a sentence."""

    faults: list[str] = field(factory=list)
    calls: int = 0
    items: int = 0
    arrays: int = 0
    longest_s: float = 0.0
    breaches: list[str] = field(factory=list)

    def text(self) -> str:
        """Return one line."""
        return (
            f"{len(self.faults)} faults: {self.calls:,} calls, {self.items:,} items of streams, "
            f"{self.arrays:,} arrays, the longest in {self.longest_s:.1f} s; {len(self.breaches)} breaches"
        )


@define(eq=False)
class Faults:
    """Random faults. Each kind is a method that begins one, and returns how to name it; it ends by itself."""

    lab: Laboratory
    cluster: TestCluster
    rng: random.Random

    def _two(self) -> list[str]:
        return self.rng.sample(["controller", *NODES, *LAPTOPS], 2)

    def cut(self, seconds: float) -> str:
        """Cut two hosts from one another."""
        a, b = self._two()
        self.lab.cut(a, b, seconds=seconds)
        return f"{a} and {b}"

    def isolate(self, seconds: float) -> str:
        """Cut one host from all."""
        host = self._two()[0]
        self.lab.cut(host, seconds=seconds)
        return host

    def cut_one_way(self, seconds: float) -> str:
        """Drop the packets of one direction."""
        a, b = self._two()
        self.lab.cut_one_way(a, b, seconds=seconds)
        return f"{a} to {b}"

    def freeze(self, seconds: float) -> str:
        """Stop all processes of a node's machine."""
        host = self.lab.hosts[self.rng.choice(NODES)]
        host.freeze()
        time.sleep(seconds)
        host.thaw()
        return host.name

    def lose(self, seconds: float) -> str:
        """Lose a part of the packets, and delay the others."""
        a, b = self._two()
        self.lab.link(a, b, delay_s=0.01, jitter_s=0.02, loss=0.1)
        time.sleep(seconds)
        self.lab.link(a, b)
        return f"{a} and {b}"

    def restart_controller(self, seconds: float) -> str:
        """Kill the controller, and start it again after a while."""
        self.cluster.daemons["controller"].kill()
        time.sleep(seconds)
        self.cluster.start_controller()
        return "controller"

    def reset(self, seconds: float) -> str:
        """Reset connections at both ends."""
        a, b = self._two()
        self.lab.reset_connections(a, b, seconds=min(seconds, 1.0))
        return f"{a} and {b}"

    def firewall(self, seconds: float) -> str:
        """Answer everything that is sent to a node with a reset."""
        host = self.rng.choice(NODES)
        self.lab.firewall(host, except_from="controller", seconds=seconds)
        return host

    def reject(self, seconds: float) -> str:
        """Answer packets with ICMP errors."""
        a, b = self._two()
        self.lab.reject(a, b, code=self.rng.choice((1, 3, 13)), seconds=seconds)
        return f"{a} to {b}"

    def forget(self, seconds: float) -> str:
        """Let the gateway lose its table."""
        self.lab.forget_connections("home")
        return "home"


KINDS = tuple(name for name, value in vars(Faults).items() if callable(value) and not name.startswith("_"))


def run_campaign(
    lab: Laboratory,
    seed: int,
    cuts: int,
    kinds: Sequence[str] = KINDS,
    report: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run a cluster under load and faults, and return what happened."""
    rng, result = random.Random(seed), Result()
    with open_test_cluster(lab, *NODES) as cluster:
        drivers = [
            cluster.open_driver(lab.host(name, behind_nat=name == "home", remaps=rng.random() < 0.5))
            for name in LAPTOPS
        ]
        for name in NODES:
            drivers[0].do("create", f"on-{name}", on=name)
            drivers[1].do("find", f"on-{name}")
        loads = [
            (driver, f"on-{node}", driver.start("load", f"on-{node}", f"{laptop}-{node}", WORKERS))
            for laptop, driver in zip(LAPTOPS, drivers, strict=True)
            for node in NODES
        ]
        faults = Faults(lab, cluster, rng)
        for number in range(cuts):
            kind, seconds = rng.choice(kinds), rng.uniform(0.1, LONGEST_S)
            where = getattr(faults, kind)(seconds)
            result.faults.append(f"{kind} {where} {seconds:.1f} s")
            report(f"{number + 1}/{cuts} {result.faults[-1]}")
            time.sleep(rng.uniform(0.0, seconds + 1.0))
        lab.heal()
        _finish(result, drivers, loads)
    if (lab.shared / OVERLAPS).exists():
        result.breaches += (lab.shared / OVERLAPS).read_text().splitlines()
    return result


def _finish(result: Result, drivers: Sequence[Driver], loads: Sequence[tuple[Driver, str, Answer]]) -> None:
    """Stop the load, and compare what callers were answered with what actors have counted."""
    give_up_at = time.monotonic() + END_S
    for driver in drivers:
        try:
            driver.do("stop_load", timeout_s=END_S)
        except Exception as error:  # noqa: BLE001 - a driver that does not answer is a breach, not the end
            result.breaches.append(f"stop_load: {error}")
    counted: dict[str, int] = {}
    items: dict[str, int] = {}
    for _, actor, answer in loads:
        try:
            done: dict[str, Any] = answer.value(max(1.0, give_up_at - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - as above
            result.breaches.append(f"load of {actor}: {error}")
            continue
        result.calls += done["calls"]
        result.arrays += done["arrays"]
        result.items += done["items"]
        result.longest_s = max(result.longest_s, done["longest_s"])
        result.breaches += done["errors"]
        counted[actor] = counted.get(actor, 0) + done["calls"] + done["arrays"]
        items[actor] = items.get(actor, 0) + done["items"]
    for actor, keys in counted.items():
        try:
            effects = drivers[0].do("call", actor, "effects", timeout_s=30)
        except Exception as error:  # noqa: BLE001 - as above
            result.breaches.append(f"effects of {actor}: {error}")
            continue
        if effects["repeated"]:
            result.breaches.append(
                f"{actor}: {len(effects['repeated'])} effects were repeated: {effects['repeated'][:5]}"
            )
        if not result.breaches and (effects["keys"], effects["items"]) != (keys, items[actor]):
            result.breaches.append(f"{actor} counted {effects}, its callers {keys} keys and {items[actor]} items")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one campaign; exit status 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.network.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--cuts", type=int, default=100, help="number of faults (default: %(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, with commas (default: %(default)s)")
    found = parser.parse_args(argv)
    if reason_to_skip():
        print(f"skipped: {reason_to_skip()}")
        return 0
    seed = secrets.randbelow(2**32) if found.seed is None else found.seed
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), seed) as lab:
        result = run_campaign(lab, seed, found.cuts, found.kinds.split(","), lambda line: print(line, flush=True))
    print(result.text())
    for breach in result.breaches:
        print(f"  {breach}")
    return 1 if result.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
