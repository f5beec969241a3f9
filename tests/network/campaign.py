"""Random faults between hosts under load, from one seed: ``python -m tests.network.campaign --seed 7 --cuts 100``.

Two drivers, one behind a gateway, call four actors on two machines: calls, two-way streams and arrays, many at once,
while one fault after another breaks what connects them, or ends processes and machines. Whatever happens, each call has
one effect at most, and one if it was answered; no call hangs; one that may be repeated is answered; and no two
incarnations of an actor act at overlapping times, unless it may. A call may end as `OutcomeUnknown` or `MachineLost`
only after its actor, or its machine, was lost. The drivers also compete for names, whose actors count, and run gangs.
All of this is one history of operations, which `bench.histories` checks.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from attrs import asdict, define, field

from bench.histories.checks import violations
from bench.histories.files import read_history
from bench.histories.records import Kind, Operation, Outcome, table
from tests.network.actors import AGAIN, ANSWERS, EFFECTS, HISTORY, OVERLAPS
from tests.network.cluster import SUSPECT, Answer, Driver, TestCluster, open_test_cluster
from tests.network.laboratory import Laboratory, LaboratoryError
from tests.network.namespaces import reason_to_skip

NODES = ("n1", "n2")
LAPTOPS = ("laptop", "home")
"""Hosts of the drivers; the second is behind a gateway."""
ACTORS = {"on-n1": {"on": "n1"}, "on-n2": {"on": "n2"}, "anywhere": {}, "overlapping": {"may_overlap": True}}
"""Options of each actor."""
SUSPECT_S = 12.0
LONGEST_S = 6.0
"""Length of the longest fault, but for a silence."""
LOST_FOR_S = 60.0
"""Seconds after the loss of an actor or its machine in which calls may end for that reason."""
END_S = 120.0
"""Time for everything under way to end after the last fault."""
GONE_WITHIN_S = 20.0
"""Seconds after the end of `fray-node` within which what ran below it has ended; it may be frozen meanwhile."""
NAMES = ("left", "right")
"""Names for which the drivers compete."""
WORKERS = 4
"""Tasks of each driver for each actor that call one after the other."""


@define
class Incarnation:
    """One incarnation of an actor, as it has recorded what it did (`tests.network.actors.Effects`)."""

    actor: str
    host: str
    pid: int
    began: float
    file: Path

    def operations(self, *, may_overlap: bool) -> Iterator[Operation]:
        """Yield its effects, and its run from the first to the last sign of life, alone if it may overlap."""
        lines = [line.partition(" ") for line in self.file.read_text().splitlines()]
        attempt = f"{self.actor}:{self.host} {self.pid} {self.began}:0"
        for at, key in ((float(at), key) for at, _, key in lines if key):
            yield Operation(attempt, Kind.EFFECT, key, at, at, Outcome.VALUE)
        if lines:
            job = attempt if may_overlap else self.actor
            times = float(lines[0][0]), float(lines[-1][0])
            yield Operation(attempt, Kind.RUN, job, *times, Outcome.UNKNOWN, self.pid, machine=self.host)


def incarnations(lab: Laboratory) -> list[Incarnation]:
    """Return all, in the order in which they began."""
    found = []
    for file in (lab.shared / EFFECTS).iterdir():
        actor, host, pid, began = file.name.split()
        found.append(Incarnation(actor, host, int(pid), float(began), file))
    return sorted(found, key=lambda each: each.began)


@define
class Result:
    """Sums of a campaign, and each breach of a promise as a sentence."""

    faults: list[str] = field(factory=list)
    calls: int = 0
    items: int = 0
    arrays: int = 0
    unknown: int = 0
    """Calls and streams that ended as `OutcomeUnknown` or `MachineLost`."""
    incarnations: int = 0
    longest_s: float = 0.0
    operations: Counter[str] = field(factory=Counter)
    """Number of operations of the history by kind and outcome."""
    breaches: list[str] = field(factory=list)

    def text(self) -> str:
        """Return one line."""
        return (
            f"{len(self.faults)} faults: {self.calls:,} calls, {self.items:,} items of streams, "
            f"{self.arrays:,} arrays, the longest in {self.longest_s:.1f} s; {self.unknown:,} lost with one of "
            f"{self.incarnations} incarnations; {len(self.breaches)} breaches"
        )


@define(eq=False)
class Faults:
    """Random faults. Each kind is a method that begins one, and returns how to name it; it ends by itself."""

    lab: Laboratory
    cluster: TestCluster
    rng: random.Random
    machines: list[Operation] = field(factory=list)
    """The loss of each node or machine, with the time by which what ran there must have ended."""
    lost: list[tuple[float, str]] = field(factory=list)
    """Time and host of each end of an actor's process, of a node, or of a machine."""
    _started: dict[str, float] = field(factory=dict)
    """Time of the last start of each machine that was rebooted."""
    _addresses: Iterator[int] = field(factory=lambda: count(100))

    def _two(self) -> list[str]:
        return self.rng.sample(["controller", *NODES, *LAPTOPS], 2)

    def _lose_machine(self, name: str, gone_within_s: float) -> None:
        now = time.monotonic()
        self.lost.append((now, name))
        end = now + gone_within_s
        self.machines.append(Operation(name, Kind.LOST_MACHINE, "", now, end, Outcome.VALUE, gone_within_s))

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
        self.cluster.start_controller(*OPTIONS)
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

    def kill_actor(self, seconds: float) -> str:
        """Kill the process of an actor."""
        actor = self.rng.choice(list(ACTORS))
        last = [each for each in incarnations(self.lab) if each.actor == actor][-1]
        if last.began < self._started.get(last.host, 0.0):
            return f"{actor}, which is not back yet"
        self.lost.append((time.monotonic(), last.host))
        with suppress(LaboratoryError):  # it may have ended with its node
            self.lab.hosts[last.host].requests.ask("signal", pid=last.pid, number=signal.SIGKILL)
        return f"{actor} on {last.host}"

    def kill_node(self, seconds: float) -> str:
        """Kill `fray-node` alone, and start it again after a while."""
        name = self.rng.choice(NODES)
        self._lose_machine(name, GONE_WITHIN_S)
        self.cluster.daemons[name].kill()
        time.sleep(seconds)
        self.cluster.start_node(self.lab.hosts[name])
        return name

    def reboot(self, seconds: float) -> str:
        """Switch a node's machine off, and on again after a while."""
        host = self.lab.hosts[self.rng.choice(NODES)]
        self.lost.append((time.monotonic(), host.name))
        host.kill()
        self._lose_machine(host.name, 0.0)
        time.sleep(seconds)
        host.start()
        self._started[host.name] = time.monotonic()
        self.cluster.start_node(host)
        return host.name

    def change_address(self, seconds: float) -> str:
        """Give a node's or a driver's machine another address."""
        host = self.lab.hosts[self.rng.choice((*NODES, "laptop"))]
        host.change_address(f"10.77.0.{next(self._addresses)}")
        return f"{host.name} to {host.address}"

    def silence(self, seconds: float) -> str:
        """Isolate a node's machine until it is suspect, and then for a while."""
        name = self.rng.choice(NODES)
        self.lab.cut(name, seconds=SUSPECT_S + seconds)
        time.sleep(SUSPECT_S)
        return name


OPTIONS = ("--suspect-s", f"{SUSPECT_S:g}")
"""Options of the controller."""
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
    (lab.shared / HISTORY).mkdir()
    with open_test_cluster(lab, *NODES, controller_options=OPTIONS) as cluster:
        drivers = [
            cluster.open_driver(lab.host(name, behind_nat=name == "home", remaps=rng.random() < 0.5))
            for name in LAPTOPS
        ]
        for name, options in ACTORS.items():
            drivers[0].do("create", name, max_restarts=-1, backoff_max_s=1.0, **options)
            drivers[1].do("find", name)
        loads = [
            (driver, actor, driver.start("load", actor, f"{laptop}-{actor}", WORKERS))
            for laptop, driver in zip(LAPTOPS, drivers, strict=True)
            for actor in ACTORS
        ]
        others = [
            answer
            for laptop, driver in zip(LAPTOPS, drivers, strict=True)
            for answer in (driver.start("compete", laptop, NAMES), driver.start("run_gangs", laptop))
        ]
        faults = Faults(lab, cluster, rng)
        for number in range(cuts):
            kind, seconds = rng.choice(kinds), rng.uniform(0.1, LONGEST_S)
            where = getattr(faults, kind)(seconds)
            result.faults.append(f"{kind} {where} {seconds:.1f} s")
            report(f"{number + 1}/{cuts} {result.faults[-1]}")
            time.sleep(rng.uniform(0.0, seconds + 1.0))
        lab.heal()
        _finish(result, drivers, loads, others, [*faults.lost, *_suspicions(cluster)])
        result.breaches += [
            f"fray-node of {name} has ended" for name in NODES if not cluster.daemons[name].is_running()
        ]
    check_history(lab, result, faults.machines)
    return result


def _suspicions(cluster: TestCluster) -> list[tuple[float, str]]:
    """Return when the controller has suspected which node."""
    records = [json.loads(line) for line in cluster.log.read_text().splitlines() if f'"{SUSPECT}"' in line]
    offset_s = time.monotonic() - time.time()
    return [(record["time"] + offset_s, record["detail"].partition(" ")[0]) for record in records]


def _finish(
    result: Result,
    drivers: Sequence[Driver],
    loads: Sequence[tuple[Driver, str, Answer]],
    others: Sequence[Answer],
    lost: Sequence[tuple[float, str]],
) -> None:
    """Stop the load, and collect what its calls were answered with."""
    give_up_at = time.monotonic() + END_S
    for driver in drivers:
        try:
            driver.do("stop_load", timeout_s=END_S)
        except Exception as error:  # noqa: BLE001 - a driver that does not answer is a breach, not the end
            result.breaches.append(f"stop_load: {error}")
    for _, actor, answer in loads:
        try:
            done: dict[str, Any] = answer.value(max(1.0, give_up_at - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - as above
            result.breaches.append(f"load of {actor}: {error}")
            continue
        result.calls += done["calls"]
        result.arrays += done["arrays"]
        result.items += done["items"]
        result.unknown += len(done["unknown"])
        result.longest_s = max(result.longest_s, done["longest_s"])
        result.breaches += done["errors"]
        result.breaches += [
            f"nothing was lost: {text}" for at, text in done["unknown"] if was_nothing_lost(actor, at, lost)
        ]

    for answer in others:
        try:
            answer.value(max(1.0, give_up_at - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - as above
            result.breaches.append(str(error))


def was_nothing_lost(actor: str, at: float, lost: Sequence[tuple[float, str]]) -> bool:
    """Return whether neither the actor nor its machine was ``lost`` shortly before a time."""
    # An actor that is bound to a node is lost only there.
    return not any(0.0 <= at - began <= LOST_FOR_S for began, host in lost if ACTORS[actor].get("on", host) == host)


def check_history(lab: Laboratory, result: Result, machines: Sequence[Operation]) -> None:
    """Check what actors did and what their callers were answered, and what competitors and gangs have recorded."""
    lived = incarnations(lab)
    result.incarnations = len(lived)
    _check(result, read_history(lab.shared / HISTORY), machines)
    for actor, options in ACTORS.items():
        history = [one for file in (lab.shared / ANSWERS).glob(f"{actor} *") for one in calls_of(file)]
        for incarnation in (each for each in lived if each.actor == actor):
            history += incarnation.operations(may_overlap=bool(options.get("may_overlap")))
        _check(result, history, machines)
    if (lab.shared / OVERLAPS).exists():
        lines = (lab.shared / OVERLAPS).read_text().splitlines()
        result.breaches += [line for line in lines if not ACTORS[line.partition(":")[0]].get("may_overlap")]


def _check(result: Result, history: Sequence[Operation], machines: Sequence[Operation]) -> None:
    result.operations.update(table(history))
    result.breaches += violations([*history, *machines])


def calls_of(file: Path) -> Iterator[Operation]:
    """Yield the calls of a load; each item of a stream counts as one."""
    for line in file.read_text().splitlines():
        begin, end, outcome, items, key = line.split(" ", 4)
        kind = Kind.REPEATABLE_CALL if key.endswith(AGAIN) else Kind.CALL
        for each in (f"{key} {item}" for item in range(int(items))) if int(items) else (key,):
            yield Operation(file.name, kind, each, float(begin), float(end), Outcome(outcome))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one campaign; exit status 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.network.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--cuts", type=int, default=100, help="number of faults (default: %(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, with commas (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the sums, with operations by kind and outcome, there")
    found = parser.parse_args(argv)
    if reason_to_skip():
        print(f"skipped: {reason_to_skip()}")
        return 0
    seed = secrets.randbelow(2**32) if found.seed is None else found.seed
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), seed) as lab:
        result = run_campaign(lab, seed, found.cuts, found.kinds.split(","), lambda line: print(line, flush=True))
    print(result.text())
    print(json.dumps(result.operations, indent=1, sort_keys=True))
    if found.json is not None:
        found.json.write_text(json.dumps({"seed": seed, **asdict(result)}, indent=1) + "\n")
    for breach in result.breaches:
        print(f"  {breach}")
    return 1 if result.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
