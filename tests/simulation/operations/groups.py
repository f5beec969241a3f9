"""Job groups: placed whole, in their order, ended by their rules."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve

from fray import Cluster, EndReason, JobGroup, JobGroupConfig, JobRequest, JobRole, NeverSchedulable, Scope
from tests.simulation import workloads
from tests.simulation.operations.context import Act, OperationContext, booms
from tests.simulation.workloads import SMALL, Boom, request


def _members(b: OperationContext, fails: bool) -> list[JobRequest]:
    """A head, a trainer that decides, and rollouts that serve it until they are ended."""
    token, sleep_s = b.token, b.rng.uniform(1, 8)
    trainer = (
        request(f"{token}.t", workloads.fail, f"{token}.t", sleep_s, resources=SMALL)
        if fails
        else request(f"{token}.t", workloads.give, f"{token}.t", 7, sleep_s, replicas=b.rng.choice((None, 2)))
    )
    lingering = [f"{token}.h", *(f"{token}.r{number}" for number in range(b.rng.randint(1, 3)))]
    roles = [JobRole("head", auxiliary=True), *[JobRole("rollout", stage=2, auxiliary=True)] * (len(lingering) - 1)]
    serving = [
        evolve(request(name, workloads.linger, name, b.rng.uniform(0, 1)), role=role)
        for name, role in zip(lingering, roles, strict=True)
    ]
    return [serving[0], evolve(trainer, role=JobRole("trainer", stage=1)), *serving[1:]]


async def _launched(
    b: OperationContext, where: Scope | Cluster, wanted: list[JobRequest], config: JobGroupConfig
) -> JobGroup:
    b.op("launch_group")
    group = await where.launch_group(wanted, config)
    for job in group:
        b.accepted(job)
    return group


async def job_group(b: OperationContext) -> str:
    """The value is the trainer's; the others end with it, and a failure is raised once."""
    fails = b.rng.random() < 0.25
    wanted = _members(b, fails)
    config = JobGroupConfig(
        b.token,
        same_region=b.rng.random() < 0.7,
        same_zone=b.rng.random() < 0.2,
        restart=b.rng.choice(("member", "member", "group")),
        auxiliary_failure=b.rng.choice(("escalate", "absorb")),
    )
    text = "did not fit in time"
    try:
        with trio.move_on_after(60) as waiting:
            async with b.cluster.open_scope(b.token) as scope:
                group = await _launched(b, scope, wanted, config)
                text = await _ended(b, group)
    except* Boom as errors:
        b.check("P2", fails and booms(errors) == {f"{b.token}.t"}, f"{b.token} raised {booms(errors)}")
        text = "its own error"
    except* NeverSchedulable:
        text = "never schedulable"
    if not waiting.cancelled_caught:
        b.check("P6", text != "value" or b.runs(f"{b.token}.t") > 0, f"{b.token} succeeded without its trainer")
    b.doomed(*(each.name for each in wanted))
    return text


async def _ended(b: OperationContext, group: JobGroup) -> str:
    b.op("wait")
    got = await group.wait()
    infos = [job.info for job in group]
    for info in infos:
        b.saw(info)
    peaceful = (EndReason.SUCCEEDED, EndReason.GROUP)
    odd = [info.cause for info in infos if info.cause not in peaceful and not info.absorbed]
    b.check("P2", got[1] == 7 and not odd, f"{b.token} returned {got}, and ended by {odd}")
    served = [number for number, value in enumerate(got) if number != 1 and value is not None]
    b.check("P2", not served, f"members {served} of {b.token} returned something")
    return "value"


async def ended_group(b: OperationContext) -> str:
    """The group is ended by its name, whatever its state."""
    group = await _launched(b, b.cluster, _members(b, fails=False), JobGroupConfig(b.token))
    await trio.sleep(b.rng.choice((0.0, 0.02, 2.0)))
    b.op("terminate")
    await b.cluster.terminate(group=b.token)
    b.doomed(*(job.name for job in group))
    b.op("wait")
    info = await group.wait_ended()
    for job in group:
        b.saw(job.info)
    b.check("P3", info.end_time is not None, f"all jobs of {b.token} have ended, and it has not")
    return info.state


ACTS: Mapping[str, Act] = {"job group": job_group, "ended group": ended_group}
