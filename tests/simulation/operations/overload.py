"""A crowd that fills the machines, and a production gang among it."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve

from fray import EndReason, ResourceConfig
from tests.simulation import workloads
from tests.simulation.operations.context import (
    Act,
    KnownJob,
    OperationContext,
    launch,
)
from tests.simulation.operations.preemption import BEYOND_US, production_gang
from tests.simulation.workloads import request

LARGE = ResourceConfig(cpu=2, memory="200MB")
"""Demand of which a few jobs fill the machines of a scenario."""
SHIELDED_S = 3.0
"""Longest shield from preemption in scenarios (`tests.simulation.scenario.PREEMPTION`)."""


async def crowd(b: OperationContext) -> str:
    """More jobs than there is room for; they have their values one by one, in any order."""
    band = b.rng.choice(("batch", "batch", "interactive"))
    for number in range(b.rng.randint(4, 9)):
        name = f"{b.token}.{number}"
        lasts = evolve(LARGE, preemptible=b.rng.random() < 0.8)
        wanted = request(name, workloads.give, name, number, b.rng.uniform(10, 30), resources=lasts)
        job = await launch(b, b.cluster, evolve(wanted, priority=band, time_limit_s=b.rng.choice((None, 60.0))))
        b.desk.jobs.append(KnownJob(job, number))
    return "accepted"


async def crowded_gang(b: OperationContext) -> str:
    """The gang runs all the same, by preemption."""
    await crowd(b)
    await trio.sleep(SHIELDED_S)
    return await production_gang(b)


async def evicted_batch(b: OperationContext) -> str:
    """Batch jobs that may not be repeated, and a gang that needs their machines: who is preempted ends, and says so."""
    jobs = []
    for number in range(b.rng.randint(3, 6)):
        name = f"{b.token}.{number}"
        wanted = request(name, workloads.give, name, number, b.rng.uniform(15, 30), resources=LARGE)
        wanted = evolve(wanted, priority="batch", max_retries_preemption=0)
        jobs.append(await launch(b, b.cluster, wanted, on_failure="absorb"))
    await trio.sleep(SHIELDED_S)
    text = await production_gang(b)
    causes = []
    for job in jobs:
        b.op("wait")
        info = await job.wait_ended()
        b.saw(info)
        causes.append(info.cause)
        retried = info.retries.get("preempted", 0)
        b.check("P2", not retried, f"{job.id} was preempted and repeated {retried} times, and allows none")
        allowed = (EndReason.SUCCEEDED, *BEYOND_US)
        b.check("P2", info.cause in allowed, f"{job.id} was to give its value, and ended as {info.cause}")
    return f"{text}; {', '.join(sorted(causes))}"


ACTS: Mapping[str, Act] = {"evicted batch": evicted_batch, "crowd": crowd, "crowded gang": crowded_gang}
