"""Plans of random scenarios: size of the cluster, acts and faults, and when. Pure: from a seed to a plan.

A plan has only *when* an act or fault of which *kind* is tried; its job or actor is drawn when it happens, from a
generator of its own, so that taking one act out of a plan leaves the others unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from attrs import Factory, evolve, frozen

from fray.model.policy.policy import Amounts, TenantPolicy
from fray.model.resources import Capacity, Device, PortRange

GB = 1024**3
PORTS = PortRange(20_000, 12)
"""Few enough that they are allocated again and again."""
ACTS_S = 240.0
"""Acts begin within this time."""
FIRST_FAULT_S = 8.0

ACTS: Mapping[str, int] = {
    "value job": 8,
    "sync job": 3,
    "workspace job": 4,
    "packaged job": 4,
    "program": 2,
    "memory hog": 2,
    "background job": 8,
    "wait for a job": 6,
    "wait for many": 2,
    "failing scope": 5,
    "family": 7,
    "gang": 4,
    "device gang": 5,
    "slice gang": 3,
    "cancelled scope": 5,
    "error in the body": 3,
    "make an actor": 9,
    "calls": 22,
    "pipelined calls": 8,
    "cancelled call": 6,
    "call with deadline": 5,
    "relayed call": 7,
    "failing call": 4,
    "repeatable call": 5,
    "scoped actor": 4,
    "terminate": 5,
    "names": 5,
    "look around": 6,
    "detached job": 3,
    "stopped at once": 4,
    "abandoned launch": 4,
    "worker pool": 2,
    "bad requests": 2,
    "impatient job": 3,
    "remote run": 3,
    "supervised group": 5,
    "crash loop": 3,
    "stateful actor": 6,
    "deleted actor": 4,
    "replaced actor": 4,
    "shared actor": 6,
    "actors seen": 3,
    "stumbling job": 5,
    "ruled program": 3,
    "template": 4,
    "adopted job": 4,
    "job of an id": 4,
    "gang that breaks": 3,
    "recovering job": 2,
    "stalled job": 2,
    "sick job": 2,
    "followed job": 4,
    "late reader": 3,
    "forwarded port": 3,
    "whole tree": 2,
    "machine let in": 2,
    "job group": 5,
    "open reservation": 4,
    "bands": 4,
    "who goes first": 3,
    "limited job": 3,
    "gap filler": 3,
    "long batch": 4,
    "production gang": 4,
    "kept units": 3,
    "expiring reservation": 2,
    "ended group": 2,
    "crowd": 2,
    "crowded gang": 2,
    "evicted batch": 2,
    "exhausted group": 2,
    "wavering server": 2,
    "slow server": 2,
    "strict check": 2,
    "actor of a job": 4,
    "both ways": 6,
    "lent CPUs": 3,
    "shrinking reservation": 2,
}
"""Weights of the acts."""

FAULTS: Mapping[str, int] = {
    "bad machine": 3,
    "out of service": 4,
    "kill machine": 4,
    "power cut": 3,
    "restart node": 4,
    "kill process": 6,
    "partition": 4,
    "cut off": 5,
    "stop machine": 4,
    "stop driver": 2,
    "stop controller": 2,
    "break connections": 6,
    "crash controller": 5,
    "crash at save": 4,
    "driver vanishes": 4,
    "driver leaves": 3,
    "slow link": 2,
    "cloud trouble": 3,
    "machine taken away": 3,
    "node leaves": 4,
    "policy changed": 3,
    "group scaled": 3,
}

SPANS_S: tuple[tuple[int, float, float], ...] = ((10, 0.05, 3.0), (6, 3.0, 25.0), (4, 31.0, 100.0), (1, 310.0, 420.0))
"""Weight and range of how long a fault lasts: a blink, a pause, beyond ``suspect_s``, beyond ``lease_s``."""


@frozen
class PlannedAct:
    at_s: float
    driver: int
    kind: str
    number: int


@frozen
class PlannedFault:
    at_s: float
    kind: str
    span_s: float
    number: int


@frozen
class ScenarioPlan:
    """Plan of one scenario."""

    machines: tuple[Capacity, ...]
    drivers: int
    declares: bool
    """True: the controller has a list of its machines beforehand."""
    on_disk: bool
    acts: tuple[PlannedAct, ...]
    faults: tuple[PlannedFault, ...]
    cloud: bool = False
    """True: machines can be requested (`fray.testing.sim_cloud`)."""
    slices: bool = False
    """True: the cloud has slices of several hosts, too."""
    terms: Mapping[str, TenantPolicy] = Factory(dict)
    """Policy for the users, which are the drivers (``driver0``, …)."""


def draw_plan(rng: random.Random, *, acts: int = 100, faults: int = 15) -> ScenarioPlan:
    """Return a scenario with this many acts (some two operations each) and faults."""
    drawn = [_draw_machine(rng) for _ in range(rng.randint(3, 5))]
    machines = in_slices([evolve(each, attributes={"zone": "ab"[index % 2]}) for index, each in enumerate(drawn)])
    drivers = rng.randint(2, 3)
    plan = ScenarioPlan(
        machines=machines,
        drivers=drivers,
        declares=rng.random() < 0.5,
        on_disk=rng.random() < 0.05,
        acts=_draw_acts(rng, acts, drivers),
        faults=_draw_faults(rng, faults),
    )
    cloud = rng.random() < 0.6
    return evolve(
        plan,
        cloud=cloud and plan.declares,  # else what has not joined yet would never be
        terms={f"driver{number}": _draw_terms(rng) for number in range(drivers)},
    )


def _draw_terms(rng: random.Random) -> TenantPolicy:
    """Draw weights, quotas with borrowing, and a few devices without: jobs that wait for these give up."""
    quota = Amounts(cpu_milli=rng.choice((2000, 4000)), devices={"gpu": 4})
    return TenantPolicy(
        weight=rng.choice((1.0, 1.0, 3.0)),
        quota=rng.choice((None, quota)),
        borrow=rng.choice((True, Amounts(cpu_milli=6000, devices={"gpu": 0}))),
    )


def _draw_machine(rng: random.Random) -> Capacity:
    gpus = rng.choice((0, 0, 2, 4))
    devices = tuple(Device(f"gpu-{number}", "gpu", "h100") for number in range(gpus))
    return Capacity(
        cpu_milli=rng.choice((2000, 4000, 6000)),
        memory_bytes=16 * GB,
        disk_bytes=100 * GB,
        devices=devices,
        ports=PORTS,
    )


def in_slices(machines: Sequence[Capacity]) -> tuple[Capacity, ...]:
    """Make the first and third machine hosts of a TPU slice, and the second and fourth hosts of another."""
    chips = tuple(Device(f"tpu-{number}", "tpu", "v4-16") for number in range(4))
    return tuple(
        evolve(
            machine,
            devices=(*machine.devices, *chips),
            attributes={
                **machine.attributes,
                "slice": f"pod-{index % 2 + index // 4 * 2}",
                "tpu_worker": str(index % 4 // 2),
            },
        )
        for index, machine in enumerate(machines)
    )


def _draw_acts(rng: random.Random, count: int, drivers: int) -> tuple[PlannedAct, ...]:
    times = sorted(rng.uniform(0.0, ACTS_S) for _ in range(count))
    first = {driver: ["make an actor", "make an actor"] for driver in range(drivers)}
    planned = []
    for number, at_s in enumerate(times):
        driver = rng.randrange(drivers)
        kind = first[driver].pop() if first[driver] else rng.choices(list(ACTS), list(ACTS.values()))[0]
        planned.append(PlannedAct(round(at_s, 3), driver, kind, number))
    return tuple(planned)


def _draw_faults(rng: random.Random, count: int) -> tuple[PlannedFault, ...]:
    """Draw faults so that most scenarios have most kinds: the kinds are dealt like cards."""
    kinds: list[str] = []
    while len(kinds) < count:
        deck = [kind for kind, weight in FAULTS.items() for _ in range(weight)]
        rng.shuffle(deck)
        kinds += list(dict.fromkeys(deck))
    times = sorted(rng.uniform(FIRST_FAULT_S, ACTS_S) for _ in range(count))
    return tuple(
        PlannedFault(round(at_s, 3), kind, round(draw_span_s(rng), 3), number)
        for number, (at_s, kind) in enumerate(zip(times, kinds, strict=False))
    )


def draw_span_s(rng: random.Random) -> float:
    """Draw the duration of a fault."""
    _, low_s, high_s = rng.choices(SPANS_S, [weight for weight, _, _ in SPANS_S])[0]
    return rng.uniform(low_s, high_s)


def direct_plan(
    acts: Sequence[str],
    faults: Sequence[tuple[float, str, float]],
    *,
    machines: int = 3,
    every_s: float = 1.0,
    cloud: bool = False,
    terms: TenantPolicy | None = None,
) -> ScenarioPlan:
    """Return a scenario by hand: one driver, an act every so many seconds, and faults as (time, kind, seconds).

    Args:
        terms: the policy for the driver.
    """
    gpus = tuple(Device(f"gpu-{number}", "gpu", "h100") for number in range(4))
    capacity = Capacity(cpu_milli=4000, memory_bytes=16 * GB, disk_bytes=100 * GB, devices=gpus, ports=PORTS)
    return ScenarioPlan(
        machines=in_slices([capacity] * machines),
        terms={} if terms is None else {"driver0": terms},
        drivers=1,
        declares=cloud,
        on_disk=False,
        cloud=cloud,
        acts=tuple(PlannedAct(number * every_s, 0, kind, number) for number, kind in enumerate(acts)),
        faults=tuple(PlannedFault(at_s, kind, span_s, number) for number, (at_s, kind, span_s) in enumerate(faults)),
    )
