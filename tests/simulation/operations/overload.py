"""A crowd that fills the machines, and a production gang among it."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve

from fray import ResourceConfig
from tests.simulation import workloads
from tests.simulation.operations.context import (
    Act,
    KnownJob,
    OperationContext,
    launch,
)
from tests.simulation.operations.preemption import production_gang
from tests.simulation.workloads import request

LARGE = ResourceConfig(cpu=2, memory="200MB")
"""So much that a few of them fill the machines of a story."""
SHIELDED_S = 3.0
"""In stories nobody is shielded for longer (`tests.simulation.scenario.PREEMPTION`)."""


async def crowd(b: OperationContext) -> str:
    """More than there is room for; they come to their values one by one, whoever goes before them."""
    band = b.rng.choice(("batch", "batch", "interactive"))
    for number in range(b.rng.randint(4, 9)):
        name = f"{b.token}.{number}"
        lasts = evolve(LARGE, preemptible=b.rng.random() < 0.8)
        wanted = request(name, workloads.give, name, number, b.rng.uniform(10, 30), resources=lasts)
        job = await launch(b, b.cluster, evolve(wanted, priority=band, time_limit_s=b.rng.choice((None, 60.0))))
        b.desk.jobs.append(KnownJob(job, number))
    return "accepted"


async def crowded_gang(b: OperationContext) -> str:
    """It comes all the same, in the places of others."""
    await crowd(b)
    await trio.sleep(SHIELDED_S)
    return await production_gang(b)


ACTS: Mapping[str, Act] = {"crowd": crowd, "crowded gang": crowded_gang}
