"""Jobs with health checks: they stall, recover, become unhealthy."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve

from fray import EndReason, HealthCheck, JobInfo, JobRequest, OnStall
from tests.simulation import workloads
from tests.simulation.operations.context import Act, OperationContext, launch
from tests.simulation.workloads import request

STALL_S = 6.0
STARTS_S = 1.0
"""Longest start of an attempt on a machine that runs."""
_BEYOND_US = (EndReason.MACHINE_LOST, EndReason.KILLED, EndReason.PREEMPTED, EndReason.OWNER_ENDED, EndReason.STOPPED)
"""Causes by which a fault, or the end of the driver, may end any job."""


async def recovering_job(b: OperationContext) -> str:
    """Progress stops for longer than allowed, and then continues: stacks are captured, and it does not count as a
    failure."""
    pauses_s = tuple(b.rng.choice((1.0, 2.0, STALL_S + 3.0)) for _ in range(4))
    info = await _ended(b, evolve(request(b.token, workloads.dawdle, b.token, pauses_s, False), stall_s=STALL_S))
    ran_well = info.cause is EndReason.SUCCEEDED
    b.check("P2", ran_well or info.cause in _BEYOND_US, f"{b.token} was only slow, and ended as {info.cause}")
    stalled = max(pauses_s) > STALL_S
    last = info.attempts[-1] if info.attempts else None
    # While its machine was stopped, neither the job nor the node that watches it ran: a pause may fall into that time.
    was_stopped = last is not None and (last.duration_s or 0.0) > sum(pauses_s) + STARTS_S
    kept = last is None or bool(last.captured) == stalled or (stalled and was_stopped)
    b.check("P10", not ran_well or kept, f"{b.token} stalled: {stalled}, and its record has {last}")
    return f"{info.cause}, stalled: {stalled}"


async def stalled_job(b: OperationContext) -> str:
    """Progress stops for good: each attempt ends as a failure, with its stacks."""
    pauses_s = tuple(b.rng.uniform(0.5, 3.0) for _ in range(b.rng.choice((0, 2))))
    retries = b.rng.choice((0, 1))
    wanted = request(b.token, workloads.dawdle, b.token, pauses_s, True, max_retries_failure=retries)
    info = await _ended(b, evolve(wanted, stall_s=STALL_S, on_stall=OnStall.RESTART))
    return _failed_for(b, info, "stalled: ")


async def sick_job(b: OperationContext) -> str:
    """A server becomes unhealthy: so does each of its attempts."""
    check = HealthCheck(path="/healthz", period_s=2.0, failures=2, start_s=10.0)
    wanted = request(b.token, workloads.fall_ill, b.token, b.rng.uniform(0, 8))
    info = await _ended(b, evolve(wanted, health=check, ports=["http"]))
    return _failed_for(b, info, "not healthy: GET /healthz")


async def wavering_server(b: OperationContext) -> str:
    """A server starts slowly, and is unhealthy for a while, but never as often in a row as its check allows: it is not
    ended for it."""
    period_s = 2.0
    check = HealthCheck(path="/healthz", period_s=period_s, failures=5, start_s=30.0)
    spans_s = (b.rng.choice((0.0, 7.0)), 5.0, b.rng.choice((1.0, 3.0, 7.0)), 5.0)
    info = await _ended(b, evolve(request(b.token, workloads.waver, b.token, spans_s), health=check, ports=["http"]))
    ran_well = info.cause is EndReason.SUCCEEDED
    b.check("P2", ran_well or info.cause in _BEYOND_US, f"{b.token} was never unhealthy for long: {info.cause}")
    return f"{info.cause}"


async def slow_server(b: OperationContext) -> str:
    """A server never becomes healthy: each attempt fails once the time to start, and as many answers as allowed, have
    passed."""
    check = HealthCheck(
        path="/healthz", period_s=2.0, failures=b.rng.choice((1, 2, 3)), start_s=b.rng.choice((2.0, 9.0))
    )
    wanted = request(b.token, workloads.fall_ill, b.token, 0.0)
    began = trio.current_time()
    info = await _ended(b, evolve(wanted, health=check, ports=["http"]))
    took_s = trio.current_time() - began
    early = info.cause is EndReason.FAILURE and took_s < check.start_s
    b.check("P2", not early, f"{b.token} failed after {took_s:.1f} s, its server may start for {check.start_s:g} s")
    return _failed_for(b, info, "not healthy: GET /healthz")


async def strict_check(b: OperationContext) -> str:
    """One bad answer is enough to end a server that was healthy."""
    check = HealthCheck(path="/healthz", period_s=2.0, failures=1, start_s=10.0)
    wanted = request(b.token, workloads.fall_ill, b.token, b.rng.uniform(3, 8))
    info = await _ended(b, evolve(wanted, health=check, ports=["http"]))
    return _failed_for(b, info, "not healthy: GET /healthz")


async def _ended(b: OperationContext, wanted: JobRequest) -> JobInfo:
    job = await launch(b, b.cluster, wanted)
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    return info


def _failed_for(b: OperationContext, info: JobInfo, why: str) -> str:
    allowed = (EndReason.FAILURE, *_BEYOND_US)
    b.check("P2", info.cause in allowed, f"{b.token} should have failed, and ended as {info.cause}")
    for attempt in info.attempts:
        if attempt.cause is EndReason.FAILURE:
            is_captured = attempt.message.startswith(why) and attempt.captured
            b.check(
                "P10",
                bool(is_captured),
                f"{attempt.attempt_id} ended as {attempt.message!r}, with {attempt.captured!r}",
            )
    return f"{info.cause} after {len(info.attempts)} attempts"


ACTS: Mapping[str, Act] = {
    "recovering job": recovering_job,
    "stalled job": stalled_job,
    "sick job": sick_job,
    "wavering server": wavering_server,
    "slow server": slow_server,
    "strict check": strict_check,
}
