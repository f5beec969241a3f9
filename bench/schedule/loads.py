"""Synthetic workloads in the shape of cluster traces: users, demands, arrivals and run times.

Shapes follow what cluster traces have in common (Verma et al., "Large-scale cluster management at Google with Borg",
EuroSys 2015; Tirmazi et al., "Borg: the Next Generation", EuroSys 2020): most jobs are small and short, run times are
heavy-tailed (log-normal here), a few users request most (Zipf), and a few long gangs hold much of the cluster.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from attrs import frozen

from fray.model.policy.priority import Band
from fray.model.resources import Capacity, Demand, Device
from fray.model.specs import EntryKind, JobSpec

GB = 1 << 30
USERS = 20
CPUS, GPUS = 32, 8
ZONES = 4


@frozen
class Work:
    """Job of a load."""

    spec: JobSpec
    arrives_s: float
    runs_s: float
    """Actual run time of each member in seconds."""

    @property
    def user(self) -> str:
        return self.spec.user

    @property
    def cpu_s(self) -> float:
        return self.spec.members * self.spec.demand.cpu_milli / 1000 * self.runs_s


def machine(index: int) -> Capacity:
    """Return a machine's capacity: every fourth machine has GPUs; four zones of one region."""
    devices = tuple(Device(f"gpu-{i}", "gpu", "h100") for i in range(GPUS)) if index % 4 == 0 else ()
    attributes = {"region": "r1", "zone": f"r1-{index % ZONES}"}
    return Capacity(CPUS * 1000, CPUS * 4 * GB, 1 << 42, devices, attributes)


def user(rng: random.Random) -> str:
    """Return a random user by Zipf: the first has about USERS times as many jobs as the last."""
    ranks = range(1, USERS + 1)
    return f"u{rng.choices(ranks, [1 / rank for rank in ranks])[0]}"


def small(name: str, rng: random.Random, arrives_s: float) -> Work:
    """Return a job of one process that runs some minutes."""
    demand = Demand(cpu_milli=rng.choice((500, 1000, 1000, 1000, 2000, 4000)), memory_bytes=rng.randint(1, 8) * GB // 2)
    return _work(name, rng, arrives_s, demand, 1, rng.lognormvariate(4.0, 1.2))


def odd(name: str, rng: random.Random, arrives_s: float) -> Work:
    """Return a job of one process, with one of thousands of different demands."""
    demand = Demand(
        cpu_milli=rng.randint(2, 80) * 100,
        memory_bytes=rng.randint(1, 64) * GB // 4,
        device_kind="gpu" if rng.random() < 0.1 else None,
        device_count=0,
        zones=(f"r1-{rng.randrange(ZONES)}",) if rng.random() < 0.1 else (),
    )
    if demand.device_kind:
        demand = Demand(demand.cpu_milli, demand.memory_bytes, 0, "gpu", "h100", rng.choice((1, 2, 4)))
    return _work(name, rng, arrives_s, demand, 1, rng.lognormvariate(4.0, 1.2))


def gang(name: str, rng: random.Random, arrives_s: float) -> Work:
    """Return a gang that takes many whole machines for hours."""
    members = rng.choice((4, 8, 8, 16))
    large = Demand(8000, 32 * GB, 0, "gpu", "h100", 4), Demand(16_000, 64 * GB)
    demand = rng.choices(large, (1, 4))[0]
    return _work(name, rng, arrives_s, demand, members, rng.lognormvariate(7.5, 0.6), True)


def _work(
    name: str,
    rng: random.Random,
    arrives_s: float,
    demand: Demand,
    members: int,
    runs_s: float,
    band: Band | None = None,
) -> Work:
    who = user(rng)
    runs_s = min(runs_s, 6 * 3600.0)
    spec = JobSpec(
        job_id=name,
        name=name,
        namespace=f"{who}-runs",
        user=who,
        entry=EntryKind.BINARY,
        argv=("work",),
        demand=demand,
        members=members,
        band=_band(rng, gang),
        time_limit_s=runs_s * 2 if rng.random() < 0.5 else None,
        max_retries_preemption=-1,
        detached=True,
    )
    return Work(spec, arrives_s, runs_s)


def _band(rng: random.Random, gang: bool) -> Band:
    """Return a random band: one gang in five is production; of the rest, three in five are batch."""
    if gang and rng.random() < 0.2:
        return Band.PRODUCTION
    return Band.BATCH if rng.random() < 0.6 else Band.INTERACTIVE


def backlog(count: int, rng: random.Random, arrives_s: float = 0.0) -> Iterator[Work]:
    """Yield mixed work that arrives at once: nine tenths small, a tenth odd, one in five hundred a gang."""
    for number in range(count):
        draw = rng.random()
        make = gang if draw < 0.002 else odd if draw < 0.1 else small
        yield make(f"w{number}", rng, arrives_s)


def day(count: int, machines: int, rng: random.Random, load: float = 1.1) -> list[Work]:
    """Return arrivals in bursts at ``load`` times what the machines can do, in order of time."""
    works = list(backlog(count, rng))
    total_cpu_s = sum(work.cpu_s for work in works)
    span_s = total_cpu_s / (machines * CPUS * load)
    moments = [rng.uniform(0, span_s) for _ in range(max(1, count // 40))]
    timed = [Work(work.spec, rng.choice(moments), work.runs_s) for work in works]
    return sorted(timed, key=lambda work: (work.arrives_s, work.spec.name))
