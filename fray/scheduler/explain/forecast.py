"""What would let something start that waits for machines, and when: tried out, not guessed.

Everything here is bounded: `TRIED` holders are asked about one by one, and `STEPS` ends in the order of their times.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from attrs import frozen

from fray.model.ids import JobId, NodeName
from fray.model.specs import EndReason
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.pool.pool import MachinePool, members_held
from fray.scheduler.pool.requests import MemberGroup, PlacementRequest, is_weightless
from fray.scheduler.queue.applicant import PlacementShape
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.tables import Tables
from fray.scheduler.state.what_if_pool import HypotheticalPool

TRIED = 10
"""Jobs whose end is tried alone."""
STEPS = 100
"""Jobs whose ends are tried together, one more each time."""
LOOKED_AT = 1_000
"""Attempts among which those are looked for: the controller answers nobody else meanwhile."""
NAMED = 4


@frozen
class StartForecast:
    """What is known of the future of an ask.

    Attributes:
        alone: jobs each of whose end would be enough by itself, a few of them.
        at: when there is room for it, by the law's time and the run-time limits of those who hold what it needs.
            None: that is not known.
        ending: jobs whose ends that is.
        endless: jobs that hold what it needs and have no limit.
        enough: the machines in service are large enough, and somebody holds something of them.
    """

    alone: tuple[JobId, ...] = ()
    at: float | None = None
    ending: tuple[JobId, ...] = ()
    endless: tuple[JobId, ...] = ()
    enough: bool = False


def forecast_start(state: Tables, shape: PlacementShape) -> StartForecast:
    """Of something that waits."""
    ask, pool = shape.request, state.pool_for(shape.reservation)
    holders = _holders(state, shape)
    timed = sorted((end_of(job), job.order, job.job_id) for job in holders if end_of(job) is not None)
    endless = tuple(job.job_id for job in holders if end_of(job) is None)
    with HypotheticalPool(state, shape.reservation) as trial:
        if trial.fits(ask):
            return StartForecast(at=state.now, enough=True)
        alone = tuple(job.job_id for job in holders[:TRIED] if _enough(trial, ask, job))
        ended: list[JobId] = []
        for at, _, job_id in timed[:STEPS]:
            trial.end((state.jobs[job_id],))
            ended.append(job_id)
            if trial.fits(ask):
                return StartForecast(alone, max(at or 0.0, state.now), tuple(ended), endless, enough=True)
    enough = bool(holders) and all(_could_hold(pool, part) for part in ask.parts)
    return StartForecast(alone, None, tuple(ended), endless, enough)


def _could_hold(pool: MachinePool, part: MemberGroup) -> bool:
    """By the sizes of the machines in service."""
    return any(sum(pool.usable(demand).values()) >= part.members for demand in part.choices)


def _holders(state: Tables, shape: PlacementShape) -> list[JobRow]:
    """Jobs that hold something of machines it could use, the one that came last first: the easiest to do without."""
    usable: dict[NodeName, None] = {}
    for demand in shape.request.demands:
        usable |= dict.fromkeys(state.pool_for(shape.reservation).usable(demand))
    found: dict[JobId, JobRow] = {}
    there = (attempt_id for name in usable for attempt_id in state.on_node[name])
    for attempt_id in islice(there, LOOKED_AT):
        job = state.jobs[state.attempts[attempt_id].job_id]
        takes = state.demand(job).ports or not is_weightless(state.demand(job))
        if takes and job.spec.reservation_id == shape.reservation:
            found[job.job_id] = job
    return sorted(found.values(), key=lambda job: -job.order)


def end_of(job: JobRow) -> float | None:
    """When it is over at the latest: by its limit, or by its ladder if it is being ended; None: that is not known."""
    if job.phase is JobPhase.CLOSING:
        notice_s = (
            job.notice_s if job.first_outcome is not None and job.first_outcome.cause is EndReason.PREEMPTED else 0.0
        )
        return job.first_outcome_at + notice_s + job.spec.termination.cancel_s + job.spec.termination.term_s
    return job.time_limit_at


def _enough(trial: HypotheticalPool, ask: PlacementRequest, job: JobRow) -> bool:
    trial.end((job,))
    fits = trial.fits(ask)
    trial.undo_to(0)
    return fits


# Words ----------------------------------------------------------------------------------------------------------------


def forecast_lines(state: Tables, shape: PlacementShape, found: StartForecast | None = None) -> Iterator[str]:
    """What would unblock it, and when that is to be expected."""
    found = found or forecast_start(state, shape)
    if found.enough and not found.ending and not found.endless:
        yield "there is room for it now: it would start if what waits before it did not need that"
        return
    if found.alone:
        yield f"it would start if {_join_or(found.alone)} ended"
    elif found.enough:
        ends = [*found.ending, *found.endless]
        yield f"it would start if several of those ended that hold what it needs: {_some(ends)}"
    if not found.enough:
        yield capacity_needed_text(state, shape)
    yield f"expected start: {_expected(state, found)}"


def _expected(state: Tables, found: StartForecast) -> str:
    if found.at is not None:
        has = "has reached its time limit" if len(found.ending) == 1 else "have reached their time limits"
        if any(state.jobs[job_id].phase is JobPhase.CLOSING for job_id in found.ending):
            has = "has ended" if len(found.ending) == 1 else "have ended"
        when = f"in {max(0.0, found.at - state.now):.0f} s at the latest"
        return f"{when}, when {_some(list(found.ending))} {has}, unless others before it take that"
    if found.endless:
        have = "has" if len(found.endless) == 1 else "have"
        return f"unknown: {_some(list(found.endless))} {have} no time limit"
    return "unknown: it depends on machines that are not there"


def capacity_needed_text(state: Tables, shape: PlacementShape) -> str:
    if shape.reservation:
        return f"it would start if reservation {shape.reservation} held more machines that it can use"
    usable = {name for demand in shape.request.demands for name in state.pool.usable(demand)}
    holding = [row.id for row in state.reservations.values() if any(usable & set(unit.nodes) for unit in row.units)]
    given_back = f", or if reservation {_join_or(tuple(holding))} gave some back" if holding else ""
    return f"it would start if more machines joined that it can use{given_back}{_or_back(state, shape.request)}"


def _or_back(state: Tables, ask: PlacementRequest) -> str:
    out = [
        node.name
        for node in state.nodes.values()
        if (node.cordon is not None or node.quarantine is not None)
        and any(members_held(demand, node.capacity) for demand in ask.demands)
    ]
    return f", or if {_join_or(tuple(out))} were back in service" if out else ""


def _join_or(names: tuple[str, ...]) -> str:
    return " or ".join(names[:NAMED])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
