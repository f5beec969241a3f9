"""Queries, and requests that are refused."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from fray import NameInUse, NotPicklable, ResourceConfig
from fray.model.specs import EndReason
from tests.simulation import workloads
from tests.simulation.operations.context import Act, OperationContext
from tests.simulation.workloads import Counter, request


async def look_around(b: OperationContext) -> str:
    """Send all queries there are."""
    b.op("list")
    listed = await b.cluster.list_jobs()
    b.op("nodes")
    nodes = await b.cluster.nodes()
    if listed:
        job_id = b.rng.choice(listed).job_id
        b.op("explain")
        text = await b.cluster.explain(job_id)
        b.check("P2", bool(text), f"nothing explains {job_id}")
        b.op("events")
        await b.cluster.events(job_id)
        b.op("poll")
        await b.cluster.poll(job_id)
    b.op("what_if")
    asked = request(b.token, workloads.give, 0)
    before = len(await b.cluster.list_jobs())
    forecast = await b.cluster.what_if(asked)
    b.check("P10", bool(forecast.text), "nothing is said of a question")
    after = [info.name for info in await b.cluster.list_jobs()]
    b.check("P4", b.token not in after or len(after) < before, f"to ask about {b.token} has launched it")
    return f"{len(listed)} jobs, {len(nodes)} nodes, {forecast.verdict.value}"


async def impatient_job(b: OperationContext) -> str:
    """The job needs a whole machine, and waits for it only a few seconds."""
    nodes = await b.cluster.nodes()
    if not nodes:
        return "no machine"
    cpu = max(node.cpu_milli for node in nodes) / 1000
    wanted = evolve(
        request(b.token, workloads.give, 7),
        resources=ResourceConfig.with_cpu(cpu=cpu, memory="1GB"),
        wait_limit_s=b.rng.uniform(0.5, 5.0),
    )
    b.op("launch")
    job = await b.cluster.launch(wanted)
    b.accepted(job)
    b.op("wait")
    info = await b.cluster.wait(job)
    b.saw(info)
    if info.cause is EndReason.UNSCHEDULABLE:
        b.check("P10", "for machines, its limit" in (info.error_message or ""), f"{info.error_message}")
        b.check("P4", b.runs(b.token) == 0 or bool(info.retries), f"{b.token} ran and counts as never placed")
    return info.state.value


async def bad_requests(b: OperationContext) -> str:
    """Impossible requests are refused, and have no effect."""
    b.op("launch")
    try:
        await b.cluster.launch(request(b.token, workloads.give, (number for number in [1])))
        b.check("P2", False, "a generator was accepted as an argument")
    except NotPicklable:
        pass
    async with b.cluster.open_scope(b.token) as scope:
        b.op("create_actor")
        await scope.create_actor(Counter, name=b.token)
        b.op("create_actor")
        try:
            await scope.create_actor(Counter, name=b.token)
            b.check("P2", False, f"the name {b.token} was given twice")
        except NameInUse:
            pass
    return "refused"


ACTS: Mapping[str, Act] = {
    "look around": look_around,
    "bad requests": bad_requests,
    "impatient job": impatient_job,
}
