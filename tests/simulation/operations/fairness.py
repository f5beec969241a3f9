"""Bands, shares and quotas: jobs of several users at once, and what the cluster says of who goes first."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from tests.simulation import workloads
from tests.simulation.operations.context import (
    Act,
    OperationContext,
    launch,
    value_of,
)
from tests.simulation.workloads import request

BANDS = ("production", "interactive", "batch", None)


async def bands(b: OperationContext) -> str:
    """Jobs of several bands have their values, whichever goes first."""
    async with b.cluster.open_scope(b.token) as scope:
        jobs = []
        for index in range(b.rng.randrange(2, 5)):
            name, band = f"{b.token}-{index}", b.rng.choice(BANDS)
            wanted = evolve(request(name, workloads.give, name, index, b.rng.uniform(0, 3)), priority=band)
            jobs.append(await launch(b, scope, wanted))
        for index, job in enumerate(jobs):
            await value_of(b, job, index, f"{b.token}-{index}")
    return f"{len(jobs)} jobs"


async def who_goes_first(b: OperationContext) -> str:
    """The queue is in the order of its positions, and shares are parts of a whole."""
    b.op("queue")
    line = await b.cluster.queue(limit=20)
    places = [one.position for one in line.entries]
    b.check("P10", places == sorted(places) and len(line.entries) <= line.total, f"the queue has the places {places}")
    b.op("usage")
    usage = await b.cluster.usage()
    wrong = [one for one in usage.users if not (0 <= one.share <= 1 and 0 <= one.mean <= 1)]
    b.check("P10", not wrong, f"shares and means must be parts of the cluster: {wrong}")
    scores = [one.score for one in usage.users]
    b.check("P10", scores == sorted(scores), f"the first in the queue must be listed first: {scores}")
    return f"{line.total} wait"


ACTS: Mapping[str, Act] = {"bands": bands, "who goes first": who_goes_first}
