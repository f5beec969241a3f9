"""Jobs: values, errors, gangs, waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio
from attrs import evolve

from fray import (
    EndReason,
    Entrypoint,
    EnvironmentConfig,
    JobRequest,
    JobStopped,
    NeverSchedulable,
    ResourceConfig,
    TpuConfig,
    WorkerPool,
)
from fray.testing.sim_environments import BROKEN
from fray.testing.sim_workspaces import ROOT
from tests.simulation import workloads
from tests.simulation.operations.context import (
    Act,
    KnownJob,
    OperationContext,
    booms,
    launch,
    value_of,
)
from tests.simulation.workloads import SMALL, Boom, request


async def value_job(b: OperationContext) -> str:
    """One job in a scope; its value comes back."""
    value = b.rng.randrange(1000)
    async with b.cluster.open_scope(b.token) as scope:
        wanted = request(b.token, workloads.give, b.token, value, b.rng.uniform(0, 5))
        job = await launch(b, scope, wanted)
        return await value_of(b, job, value, b.token)


async def workspace_job(b: OperationContext) -> str:
    """Two jobs of one project, edited in between: each has the version that was there when it was launched."""
    number = b.rng.randrange(100)
    async with b.cluster.open_scope(b.token) as scope:
        for step in range(2):
            token = f"{b.token}.{step}"
            environment = EnvironmentConfig(workspace=f"{ROOT}{number + step}")
            wanted = evolve(request(token, workloads.give, token, step, b.rng.uniform(0, 3)), environment=environment)
            job = await launch(b, scope, wanted)
            text = await value_of(b, job, step, token)
    return text


async def packaged_job(b: OperationContext) -> str:
    """A job with packages: they are made first, and where they cannot be, it is never tried again."""
    broken, packages = b.rng.random() < 0.4, [b.rng.choice(("alpha", "beta"))]
    environment = EnvironmentConfig(pip_packages=[*packages, *([BROKEN] if broken else [])])
    asked = request(b.token, workloads.give, b.token, 5, b.rng.uniform(0, 3), max_retries_failure=3)
    job = await launch(b, b.cluster, evolve(asked, environment=environment))
    if not broken:
        return await value_of(b, job, 5, b.token)
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    failed = [attempt for attempt in info.attempts if attempt.cause is EndReason.ENVIRONMENT]
    b.check("P2", len(failed) <= 1, f"{b.token} was tried again although it cannot be made")
    b.check("P2", not b.runs(b.token), f"{b.token} was executed without its packages")
    own = not failed or (info.cause is EndReason.ENVIRONMENT and BROKEN in (info.error_message or ""))
    b.check("P2", own, f"{b.token} ended by {info.cause}: {info.error_message}")
    return str(info.cause)


async def sync_job(b: OperationContext) -> str:
    """A job with sync code."""
    async with b.cluster.open_scope(b.token) as scope:
        job = await launch(b, scope, request(b.token, workloads.give_at_once, b.token, 5))
        return await value_of(b, job, 5, b.token)


async def program(b: OperationContext) -> str:
    """A program with an exit code."""
    code = b.rng.choice((0, 0, 3))
    argv = Entrypoint.from_binary("sleeper", [f"{b.rng.uniform(0, 2):.3f}", str(code)])
    wanted = JobRequest(name=b.token, resources=SMALL, entrypoint=argv)
    job = await launch(b, b.cluster, wanted)
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    own = info.cause in (EndReason.SUCCEEDED, EndReason.FAILURE)
    b.check("P2", not own or info.exit_code == code, f"{b.token} ended with {info.exit_code}, not {code}")
    return f"{info.state} {info.exit_code}"


async def memory_hog(b: OperationContext) -> str:
    """A program that takes more than it asked for, and has one more try."""
    argv = Entrypoint.from_binary("hog", [f"{b.rng.uniform(0, 2):.3f}"])
    wanted = JobRequest(name=b.token, resources=SMALL, entrypoint=argv, max_retries_out_of_memory=1)
    job = await launch(b, b.cluster, wanted)
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    tries = [attempt for attempt in info.attempts if attempt.cause is EndReason.OUT_OF_MEMORY]
    if info.cause is EndReason.OUT_OF_MEMORY:
        # An attempt that is about to be preempted counts as such, also if it runs out of memory before it is stopped.
        counted = len(tries) - info.retries.get("preempted", 0) <= 2 <= len(tries)
        b.check("P2", counted, f"{b.token} had {len(tries)} tries, not 2")
    b.check("P2", info.cause is not EndReason.SUCCEEDED, f"{b.token} succeeded with too much memory")
    peaks = {attempt.peak_memory_bytes for attempt in tries}
    b.check("P10", 0 not in peaks, f"the record of {b.token} does not say what it took")
    return str(info.cause)


async def background_job(b: OperationContext) -> str:
    """A job of the connection, for others to wait for or terminate."""
    value, sleep_s = b.rng.randrange(1000), b.rng.uniform(0, 40)
    retries = b.rng.choice((0, 0, 2))
    if b.rng.random() < 0.25:
        job = await launch(b, b.cluster, request(b.token, workloads.fail, b.token, sleep_s))
        b.desk.jobs.append(KnownJob(job, None, b.token))
    else:
        ports, secrets = b.rng.choice(((), ("http",), ("http", "grpc"))), b.rng.choice(((), ("KEY",)))
        args = (b.token, value, sleep_s)
        wanted = request(b.token, workloads.give, *args, max_retries_failure=retries, ports=ports, secrets=secrets)
        job = await launch(b, b.cluster, wanted)
        b.desk.jobs.append(KnownJob(job, value))
    return "accepted"


async def wait_for_job(b: OperationContext) -> str:
    """Wait for a background job."""
    if not b.desk.jobs:
        return await background_job(b)
    known = b.rng.choice(b.desk.jobs)
    b.op("wait")
    try:
        got = await known.job.wait()
    except Boom as boom:
        b.saw(known.job.info)
        b.check("P2", boom.token == known.boom, f"{known.job.name} raised the error of {boom.token}")
        return "its own error"
    except JobStopped:
        if not b.is_doomed(known.job.name):
            raise
        return "terminated meanwhile"
    b.saw(known.job.info)
    b.check("P2", not known.boom and got == known.value, f"{known.job.name} returned {got}, not {known.value}")
    return f"value {got}"


async def wait_for_many(b: OperationContext) -> str:
    """`Cluster.wait` for several at a time."""
    known = b.rng.sample(b.desk.jobs, min(len(b.desk.jobs), 4))
    b.op("wait")
    infos = await b.cluster.wait([each.job for each in known])
    for info in infos:
        b.saw(info)
        b.check("P3", info.state.finished, f"wait() returned {info.job_id} as {info.state}")
    return ", ".join(info.state for info in infos) or "nothing to wait for"


async def gang(b: OperationContext, resources: ResourceConfig = SMALL, replicas: int = 0) -> str:
    """Several members, all or none; the value is the first one's."""
    replicas, fails = replicas or b.rng.randint(2, 4), b.rng.random() < 0.2
    members = replicas * resources.hosts_per_replica()
    fn: Any = workloads.fail if fails else workloads.give
    args = (b.rng.uniform(0, 3),) if fails else (9, b.rng.uniform(0, 3))
    wanted = request(b.token, fn, b.token, *args, resources=resources, replicas=replicas)
    try:
        async with b.cluster.open_scope(b.token) as scope:
            job = await launch(b, scope, wanted)
            text = await value_of(b, job, 9, b.token)
    except* Boom as group:
        b.check("P2", fails and booms(group) == {b.token}, f"{b.token} raised {booms(group)}")
        text = "its own error"
    b.check("P6", fails or b.runs(b.token) >= members, f"gang {b.token} of {members} succeeded with fewer members")
    b.doomed(b.token)
    return text


async def device_gang(b: OperationContext) -> str:
    """A gang with accelerators; where there are too few it waits, or is refused."""
    resources = ResourceConfig.with_gpu("h100", count=b.rng.randint(1, 2), cpu=0.5, memory="100MB")
    text = "did not fit in time"
    try:
        with trio.move_on_after(30):
            text = await gang(b, resources)
    except* NeverSchedulable:
        text = "never schedulable"
    return text


async def slice_gang(b: OperationContext) -> str:
    """Whole TPU slices, of a type that the cluster lacks or has."""
    device = TpuConfig("v5p-16")
    resources = ResourceConfig(device, cpu=0.2, memory="50MB", device_alternatives=["v4-16"])
    text = "did not fit in time"
    try:
        with trio.move_on_after(30):
            text = await gang(b, resources, b.rng.choice((1, 1, 2)))
    except* NeverSchedulable:
        text = "never schedulable"
    return text


async def detached_job(b: OperationContext) -> str:
    """A job that outlives its driver, and ends by itself."""
    wanted = request(b.token, workloads.give, b.token, 1, b.rng.uniform(1, 20), detached=True)
    await launch(b, b.cluster, wanted)
    return "accepted"


async def remote_run(b: OperationContext) -> str:
    """`Scope.run`: one remote call."""
    async with b.cluster.open_scope(b.token) as scope:
        b.op("run")
        got = await scope.run(workloads.give, b.token, 4, b.rng.uniform(0, 2), resources=SMALL, name=b.token)
    b.check("P2", got == 4, f"{b.token} returned {got}")
    return f"value {got}"


async def terminate(b: OperationContext) -> str:
    """`Cluster.terminate` of a job or an actor of the connection."""
    if not b.desk.jobs:
        return await stopped_at_once(b)
    known = b.desk.jobs.pop(b.rng.randrange(len(b.desk.jobs)))
    b.op("terminate")
    b.doomed(known.job.name)
    await b.cluster.terminate(known.job)
    b.op("wait")
    info = await b.cluster.wait(known.job)
    b.saw(info)
    return str(info.cause)


async def stopped_at_once(b: OperationContext) -> str:
    """Terminated right after the launch."""
    job = await launch(b, b.cluster, request(b.token, workloads.linger, b.token, 0.0))
    await trio.sleep(b.rng.choice((0, 0.001, 0.02, 0.1)))
    b.op("terminate")
    await job.terminate()
    b.doomed(b.token)
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    allowed = (EndReason.STOPPED, EndReason.OWNER_ENDED, EndReason.MACHINE_LOST, EndReason.KILLED, EndReason.PREEMPTED)
    b.check("P2", info.cause in allowed, f"{b.token} was stopped and ended as {info.cause}")
    return str(info.cause)


async def worker_pool(b: OperationContext) -> str:
    """Tasks on whichever worker is free; each comes to its value."""
    async with WorkerPool(b.cluster, 2, resources=SMALL, name_prefix=b.token) as pool:
        b.op("pool")
        futures = []
        for number in range(5):
            b.op("submit")
            futures.append(pool.submit(workloads.give, f"{b.token}.{number}", number, b.rng.uniform(0, 1)))
        got = [await future for future in futures]
    b.check("P2", got == list(range(5)), f"{b.token}: tasks returned {got}")
    return f"values {got}"


ACTS: Mapping[str, Act] = {
    "value job": value_job,
    "sync job": sync_job,
    "workspace job": workspace_job,
    "packaged job": packaged_job,
    "program": program,
    "memory hog": memory_hog,
    "background job": background_job,
    "wait for a job": wait_for_job,
    "wait for many": wait_for_many,
    "gang": gang,
    "device gang": device_gang,
    "slice gang": slice_gang,
    "detached job": detached_job,
    "remote run": remote_run,
    "terminate": terminate,
    "stopped at once": stopped_at_once,
    "worker pool": worker_pool,
}
