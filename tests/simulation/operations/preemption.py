"""Time limits and preemption: jobs that end in time, gaps that are filled, jobs that are preempted."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve

from fray import EndReason, JobState, ResourceConfig
from tests.simulation import workloads
from tests.simulation.operations.context import (
    Act,
    KnownJob,
    OperationContext,
    launch,
    value_of,
)
from tests.simulation.workloads import request

BEYOND_US = (EndReason.MACHINE_LOST, EndReason.KILLED, EndReason.PREEMPTED, EndReason.OWNER_ENDED, EndReason.STOPPED)
SHIELD_S = 60.0


async def limited_job(b: OperationContext) -> str:
    """The job never ends by itself: its time limit ends it, and is the cause."""
    wanted = evolve(request(b.token, workloads.linger, b.token, 0.1), time_limit_s=b.rng.uniform(1.0, 10.0))
    async with b.cluster.open_scope(b.token) as scope:
        job = await launch(b, scope, wanted, on_failure="absorb")
        info = await job.wait_ended()
    b.saw(info)
    b.check("P2", info.cause in (EndReason.TIME_LIMIT, *BEYOND_US), f"{b.token} had a limit and ended as {info.cause}")
    b.check("P2", info.cause is not EndReason.TIME_LIMIT or info.state is JobState.FAILED, f"{b.token} is {info.state}")
    b.check("P4", EndReason.TIME_LIMIT.value not in info.retries, f"{b.token} was retried after its limit")
    return str(info.cause)


async def gap_filler(b: OperationContext) -> str:
    """A short job with a limit beside whatever waits; it ends in time."""
    wanted = evolve(request(b.token, workloads.give, b.token, 3, b.rng.uniform(0.0, 2.0)), time_limit_s=30.0)
    async with b.cluster.open_scope(b.token) as scope:
        job = await launch(b, scope, wanted)
        return await value_of(b, job, 3, b.token)


async def long_batch(b: OperationContext) -> str:
    """Background work that may be preempted; it has its value all the same."""
    job = await launch(
        b,
        b.cluster,
        evolve(
            request(b.token, workloads.give, b.token, 4, b.rng.uniform(SHIELD_S, 2 * SHIELD_S)),
            priority="batch",
            preemption_notice_s=b.rng.choice((0.0, 0.0, 2.0)),
            resources=ResourceConfig.with_cpu(cpu=b.rng.choice((1, 2)), memory="100MB"),
        ),
    )
    b.desk.jobs.append(KnownJob(job, 4))
    return "accepted"


async def production_gang(b: OperationContext) -> str:
    """The gang preempts batch jobs if it must, and has its value; or it does not fit in time."""
    wanted = evolve(
        request(b.token, workloads.give, b.token, 5, b.rng.uniform(0, 3)),
        priority="production",
        replicas=b.rng.randint(1, 3),
        resources=ResourceConfig.with_cpu(cpu=2, memory="100MB"),
    )
    text = "did not fit in time"
    with trio.move_on_after(45):
        async with b.cluster.open_scope(b.token) as scope:
            job = await launch(b, scope, wanted)
            text = await value_of(b, job, 5, b.token)
    b.doomed(b.token)
    return text


async def withdrawn_gang(b: OperationContext) -> str:
    """The gang preempts batch jobs if it must, and is withdrawn at once: nothing is kept free for it."""
    wanted = evolve(
        request(b.token, workloads.give, b.token, 5, 5.0),
        priority="production",
        replicas=b.rng.randint(1, 3),
        resources=ResourceConfig.with_cpu(cpu=2, memory="100MB"),
    )
    text = "withdrawn"
    with trio.move_on_after(b.rng.choice((0.02, 0.1, 0.5, 1.0, 2.0))):
        async with b.cluster.open_scope(b.token) as scope:
            job = await launch(b, scope, wanted)
            text = await value_of(b, job, 5, b.token)
    b.doomed(b.token)
    return text


ACTS: Mapping[str, Act] = {
    "limited job": limited_job,
    "gap filler": gap_filler,
    "long batch": long_batch,
    "production gang": production_gang,
    "withdrawn gang": withdrawn_gang,
}
