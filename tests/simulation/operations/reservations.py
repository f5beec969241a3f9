"""Reservations: machines held for later jobs, and the jobs in them."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve

from fray import (
    EndReason,
    Job,
    NeverSchedulable,
    NoSuchReservation,
    ReservationConfig,
    ReservationState,
    ResourceConfig,
)
from fray.errors import DeadlineExceeded
from fray.model.reservations import ReservationEventKind
from tests.simulation import workloads
from tests.simulation.operations.context import (
    Act,
    OperationContext,
    launch,
    value_of,
)
from tests.simulation.workloads import SMALL, request

WAIT_S = 60.0
NOTICE_S = 3.0


def _config(b: OperationContext) -> ReservationConfig:
    least = b.rng.choice((0, 1, 1, 2))
    most = evolve(SMALL, replicas=least + b.rng.choice((0, 1, 2)) or 1)
    return ReservationConfig(
        evolve(SMALL, replicas=least),
        most,
        name=b.token,
        ttl_seconds=b.rng.choice((20, 3600)),
        notice_s=b.rng.choice((0.0, 0.0, 2.0)),
        priority=b.rng.choice((0, 0, 1)),
        preemptible=b.rng.random() < 0.8,
        band=b.rng.choice((None, None, "batch", "production")),
    )


async def open_reservation(b: OperationContext) -> str:
    """Jobs in an open reservation have their values; those that still run at the end of its block end with it."""
    b.op("reserve")
    job = None
    try:
        async with b.cluster.open_reservation(_config(b), wait_limit_s=WAIT_S) as reservation:
            info = reservation.info
            own = info.state is not ReservationState.HELD or info.held_units >= info.min_units
            b.check("invariant", own, f"{b.token} is held with {info.held_units} of {info.min_units} units")
            await reservation.wait_units(1, WAIT_S)
            wanted = request(b.token, workloads.give, b.token, 6, b.rng.uniform(0, 3), max_retries_failure=0)
            job = await launch(b, b.cluster, wanted, reservation_id=reservation)
            text = await value_of(b, job, 6, b.token)
            if b.rng.random() < 0.5:
                late = f"{b.token}.late"
                job = await launch(b, b.cluster, request(late, workloads.linger, late, 0.0), reservation_id=reservation)
                b.doomed(late)
    except NeverSchedulable:
        return "never schedulable"
    except (DeadlineExceeded, NoSuchReservation):
        return "not to be had in time"
    b.op("wait")
    ended = await job.wait_ended()
    b.saw(ended)
    return f"{text}, {ended.state}"


async def kept_units(b: OperationContext) -> str:
    """One job for each unit, which starts and ends with it, until the reservation is released."""
    b.op("reserve")
    try:
        name = await b.cluster.create_reservation(_config(b))
    except NeverSchedulable:
        return "never schedulable"
    reservation = await b.cluster.follow_reservation(name)
    jobs = await reservation.keep(request(b.token, workloads.linger, b.token, 0.0))
    for job in jobs:
        b.accepted(job)
    await trio.sleep(b.rng.uniform(0, 20))
    for job in jobs:
        b.doomed(job.name)
    try:
        await b.cluster.release_reservation(name)
    except NoSuchReservation:
        return "over by itself"
    allowed = (
        EndReason.STOPPED,
        EndReason.OWNER_ENDED,
        EndReason.MACHINE_LOST,
        EndReason.KILLED,
        EndReason.PREEMPTED,
        EndReason.FAILURE,
    )
    for job in jobs:
        b.op("wait")
        info = await job.wait_ended()
        b.saw(info)
        b.check("P2", info.cause in allowed, f"{job.id} was stopped with its reservation and ended as {info.cause}")
    return str(len(jobs))


async def expiring_reservation(b: OperationContext) -> str:
    """The reservation is not renewed in time: it warns, ends its jobs, and each change is reported once and in
    order."""
    ttl_s = b.rng.uniform(4, 20)
    b.op("reserve")
    try:
        reservation_id = await b.cluster.create_reservation(evolve(_config(b), ttl_seconds=ttl_s))
        reservation = await b.cluster.follow_reservation(reservation_id)
        job = await launch(
            b, b.cluster, request(b.token, workloads.linger, b.token, 0.0), reservation_id=reservation_id
        )
        if b.rng.random() < 0.3:
            b.op("renew")
            await reservation.renew(ttl_s)
    except NeverSchedulable:
        return "never schedulable"
    except NoSuchReservation:
        return "over before"
    b.op("wait")
    await reservation.wait_ended()
    b.doomed(b.token)
    info = await job.wait_ended()
    b.saw(info)
    b.check("P1", info.cause is not EndReason.SUCCEEDED, f"{b.token} succeeded in a reservation that has ended")
    changes = reservation.info.events
    numbers = [change.number for change in changes]
    b.check("P3", numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"{b.token} has changes {numbers}")
    b.check(
        "P3",
        changes[-1].kind is ReservationEventKind.ENDED,
        f"{b.token} has ended, its last change is {changes[-1].kind}",
    )
    return ", ".join(change.kind for change in changes)


async def shrinking_reservation(b: OperationContext) -> str:
    """A reservation with more than its minimum gives units back to jobs that wait, after the notice to those inside."""
    unit = ResourceConfig.with_cpu(cpu=1.0, memory="100MB")
    config = ReservationConfig(
        evolve(unit, replicas=0), evolve(unit, replicas=3), name=b.token, notice_s=NOTICE_S, band="batch"
    )
    b.op("reserve")
    try:
        async with b.cluster.open_reservation(config, wait_limit_s=WAIT_S) as reservation:
            await reservation.wait_units(1, WAIT_S)
            inside = await reservation.keep(request(b.token, workloads.linger, b.token, 0.0, resources=unit))
            for job in inside:
                b.accepted(job)
            await trio.sleep(b.rng.uniform(1.0, 5.0))
            others = [await _waiting_job(b, f"{b.token}.{number}") for number in range(4)]
            b.op("wait")
            await b.cluster.wait(others)
            changes = reservation.info.events
            b.doomed(b.token, *(job.name for job in inside))
    except NeverSchedulable:
        return "never schedulable"
    except (DeadlineExceeded, NoSuchReservation):
        return "not to be had in time"
    shrinking = [change for change in changes if change.kind is ReservationEventKind.SHRINKING]
    if any(change.jobs for change in shrinking):
        b.used("notice of a reservation")
    noticed = all(change.notice_s == NOTICE_S or not change.jobs for change in shrinking)
    b.check("P6", noticed, f"{b.token} takes back units in use without notice: {shrinking}")
    return ", ".join(change.kind for change in changes)


async def _waiting_job(b: OperationContext, token: str) -> Job:
    resources = ResourceConfig.with_cpu(cpu=1.5, memory="100MB")
    wanted = request(token, workloads.give, token, 1, b.rng.uniform(2.0, 5.0), resources=resources)
    return await launch(b, b.cluster, evolve(wanted, wait_limit_s=30.0))


ACTS: Mapping[str, Act] = {
    "shrinking reservation": shrinking_reservation,
    "open reservation": open_reservation,
    "kept units": kept_units,
    "expiring reservation": expiring_reservation,
}
