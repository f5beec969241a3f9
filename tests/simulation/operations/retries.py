"""Retries by cause, exit codes, many jobs of one request, and several drivers under one id or name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import trio
from attrs import evolve

from fray import EndReason, Entrypoint, ExitRule, JobFailed, JobInfo, JobRequest, ResourceConfig
from fray.model.restart_policy import CRASH_S, CRASHES, JITTER
from tests.simulation import workloads
from tests.simulation.operations.context import (
    Act,
    OperationContext,
    booms,
    launch,
    value_of,
)
from tests.simulation.workloads import SMALL, request

EPSILON_S = 1e-3
"""Times on record are seconds since 1970, with fewer digits than a clock that begins at zero."""
SHARED = 4
"""Names and ids that the drivers of a scenario have in common."""


async def stumbling_job(b: OperationContext) -> str:
    """A job that fails a few times before it works: its retries are what its budgets allow."""
    fails, allowed = b.rng.randint(0, 4), b.rng.randint(0, 4)
    backoff_s, lost = b.rng.choice((0.0, 0.0, 1.0, 4.0)), b.rng.choice((None, 0, 1))
    wanted = request(b.token, workloads.stumble, b.token, fails, b.rng.uniform(0, 1), max_retries_failure=allowed)
    job = await launch(b, b.cluster, evolve(wanted, backoff_s=backoff_s, max_retries_machine_loss=lost))
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    own = {"failure", "killed"}
    spent = sum(count for cause, count in info.retries.items() if cause in own)
    b.check("P2", spent <= allowed, f"{b.token} was retried {spent} times, allowed were {allowed}")
    if set(info.retries) <= {"failure"} and info.cause in (EndReason.SUCCEEDED, EndReason.FAILURE):
        b.check("P2", spent == min(fails, allowed), f"{b.token} failed {fails} times, and was retried {spent} times")
        b.check("P2", (info.cause is EndReason.SUCCEEDED) is (fails <= allowed), f"{b.token} ended by {info.cause}")
    machines = info.retries.get("machine_lost", 0)
    b.check("P2", lost is None or machines <= lost, f"{b.token} was retried after {machines} lost machines, not {lost}")
    _check_backoff(b, info, backoff_s)
    await _check_crash_loop(b, info)
    return f"{info.cause} after {info.retries}"


def _check_backoff(b: OperationContext, info: JobInfo, backoff_s: float) -> None:
    """Check that the next attempt after a failure starts no sooner than the job's back-off allows."""
    early = []
    for old, new in pairwise(info.attempts):
        if old.cause is EndReason.FAILURE and old.end_time is not None and new.start_time is not None:
            waited_s = new.start_time - old.end_time
            if waited_s < backoff_s * (1 - JITTER) - EPSILON_S:
                early.append(f"{new.attempt_id} begins {waited_s:.3f} s after a failure, its back-off is {backoff_s} s")
    # An attempt that is about to be preempted counts as such, also if it fails before it is stopped.
    b.check("P2", len(early) <= info.retries.get("preempted", 0), early[0] if early else "")


async def _check_crash_loop(b: OperationContext, info: JobInfo) -> None:
    """Check that failures in a row, each right after its start, are reported as a crash loop."""
    short = [
        attempt.cause is EndReason.FAILURE
        and attempt.start_time is not None
        and attempt.end_time is not None
        and attempt.end_time - attempt.start_time < CRASH_S
        for attempt in info.attempts
    ]
    if all(short[:CRASHES]) and len(short) > CRASHES and not info.retries.get("preempted"):
        b.op("events")
        events = [event.what for event in await b.cluster.events(info.job_id)]
        b.check("P2", "crash_loop" in events, f"{b.token} failed {CRASHES} times at once, and its events are {events}")


async def ruled_program(b: OperationContext) -> str:
    """A program whose exit code has the meaning its author gave it."""
    rule = b.rng.choice(list(ExitRule))
    wanted = JobRequest(
        b.token,
        SMALL,
        Entrypoint.from_binary("sleeper", [f"{b.rng.uniform(0, 1):.3f}", "7"]),
        max_retries_failure=1,
        exit_codes={7: rule},
    )
    job = await launch(b, b.cluster, wanted)
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    if set(info.retries) <= {"failure"} and info.exit_code == 7:
        wanted_end = EndReason.SUCCEEDED if rule is ExitRule.IGNORE else EndReason.FAILURE
        again = {"failure": 1} if rule is ExitRule.RETRY else {}
        b.check("P2", (info.cause, info.retries) == (wanted_end, again), f"{b.token}, {rule}: {info.cause}")
    return f"{rule}: {info.cause} after {info.retries}"


async def requeued_job(b: OperationContext) -> str:
    """A running job is requeued and has its value all the same; the request has one effect at most, at no cost."""
    lasting_s = b.rng.uniform(1.0, 8.0)
    job = await launch(b, b.cluster, request(b.token, workloads.give, b.token, 6, lasting_s))
    await trio.sleep(b.rng.uniform(0.0, lasting_s))
    b.op("requeue")
    done = await b.cluster.requeue(job)
    text = await value_of(b, job, 6, b.token)
    times = job.info.retries.get("requeue", 0)
    b.check("P4", times <= len(done.jobs), f"{b.token} was requeued {times} times, and the answer was {done}")
    return f"{text}, requeued {times} times"


async def template(b: OperationContext) -> str:
    """Several jobs of one request, in order, waited for or ended by their prefix."""
    count, stays = b.rng.randint(2, 4), b.rng.random() < 0.5
    fn = (workloads.linger, b.token, 0.0) if stays else (workloads.give, b.token, 3, b.rng.uniform(0, 1))
    b.op("launch")
    jobs = await b.cluster.launch(request(b.token, *fn), count=count, name=f"{b.token}/w/{{index}}")
    for job in jobs:
        b.accepted(job)
    names = [f"{b.token}/w/{index}" for index in range(count)]
    b.check("P4", [job.name for job in jobs] == names, f"{b.token} launched {[job.name for job in jobs]}")
    if stays:
        await trio.sleep(b.rng.choice((0, 0.05, 0.5)))
        b.op("terminate")
        ended = await b.cluster.terminate(prefix=f"{b.token}/")
        b.doomed(*names)
        b.check("P4", {*ended} <= {job.id for job in jobs}, f"{b.token}/ ended {ended}")
        b.check("P4", await b.cluster.terminate(prefix=f"{b.token}/") == [], f"{b.token}/ was ended twice")
    b.op("wait")
    infos = [await job.wait_ended() for job in jobs]
    for info in infos:
        b.saw(info)
    return ", ".join(str(info.cause) for info in infos)


async def adopted_job(b: OperationContext) -> str:
    """The first driver launches the job, and all drivers wait for it; it is owned by the cluster."""
    name = f"both/{b.rng.randrange(SHARED)}"
    wanted = request(name, workloads.give, name, 7, 3.0, detached=True)
    job = await launch(b, b.cluster, wanted, adopt_existing=True)
    b.op("list")
    found = await b.cluster.list_jobs("*", prefix=f"{name}-", states=("pending", "running"))
    b.check("P4", len(found) <= 1, f"{', '.join(info.job_id for info in found)} live together")
    return await _same_for_all(b, job.id, 7)


async def job_of_an_id(b: OperationContext) -> str:
    """The same request under the same id from any driver, at any time: one job, one outcome, one run that counts."""
    name = f"once/{b.rng.randrange(SHARED)}"
    wanted = request(name, workloads.give, name, 8, 1.0, detached=True)
    job = await launch(b, b.cluster, wanted, job_id=f"{name}-run1")
    b.check("P4", job.id == f"{name}-run1", f"{name}-run1 was launched as {job.id}")
    return await _same_for_all(b, job.id, 8)


async def _same_for_all(b: OperationContext, job_id: str, value: int) -> str:
    b.op("wait")
    job = await b.cluster.get_job(job_id)
    try:
        got = await job.wait()
    except JobFailed:
        b.saw(job.info)
        raise
    b.saw(job.info)
    b.check("P2", got == value, f"{job_id} returned {got}, not {value}")
    return f"value {got}"


async def first_of_a_gang(b: OperationContext) -> str:
    """A gang of which one member fails: it restarts as a whole, and its record has the member."""
    members = b.rng.randint(2, 3)
    wanted = request(b.token, workloads.give_unless_first, b.token, 5, replicas=members, max_retries_failure=1)
    try:
        async with b.cluster.open_scope(b.token) as scope:
            job = await launch(b, scope, wanted)
            b.op("wait")
            info = await job.wait_ended()
    except* workloads.Boom as group:
        b.check("P2", booms(group) == {b.token}, f"{b.token} raised {booms(group)}")
        info = job.info
    b.saw(info)
    if info.retries == {"failure": 1}:
        generations = {attempt.attempt_id.split(":")[1] for attempt in info.attempts}
        b.check("P6", generations == {"0", "1"}, f"{b.token} has generations {generations} after one retry")
        b.op("events")
        texts = [event.text for event in await b.cluster.events(info.job_id) if event.what == "retrying"]
        b.check("P2", any("was the first to end" in text for text in texts), f"{b.token} reports {texts}")
    b.doomed(b.token)
    return f"{info.cause} after {info.retries}"


async def gang_on_machines(b: OperationContext) -> str:
    """A gang of members that need much of a machine each restarts as a whole, whichever of them ends."""
    resources = ResourceConfig.with_cpu(cpu=2, memory="100MB")
    wanted = request(
        b.token,
        workloads.give,
        b.token,
        6,
        b.rng.uniform(20, 60),
        resources=resources,
        replicas=2,
        max_retries_failure=5,
    )
    async with b.cluster.open_scope(b.token) as scope:
        job = await launch(b, scope, wanted)
        text = await value_of(b, job, 6, b.token)
    b.doomed(b.token)
    return text


ACTS: Mapping[str, Act] = {
    "stumbling job": stumbling_job,
    "ruled program": ruled_program,
    "requeued job": requeued_job,
    "template": template,
    "adopted job": adopted_job,
    "job of an id": job_of_an_id,
    "gang that breaks": first_of_a_gang,
    "gang on machines": gang_on_machines,
}
