"""Forecasts: what would let a waiting request start, and when; also for a job that was not submitted.

Tried out on a hypothetical pool, not guessed. Everything here is bounded: `TRIED` holders are tried one by one, and
`STEPS` ends in the order of their times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from attrs import evolve, frozen

from fray.errors import FrayError
from fray.model.ids import JobId, NodeName
from fray.model.messages.maintenance import Forecast, ForecastVerdict
from fray.model.policy.priority import Band
from fray.model.specs import JobSpec
from fray.model.text import list_text
from fray.scheduler.autoscaler.plan import new_estimate
from fray.scheduler.backfill.backfill import current_holds
from fray.scheduler.backfill.start_plan import ends_at
from fray.scheduler.jobs.submit import check_feasible
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.pool.pool import members_held
from fray.scheduler.pool.requests import PlacementRequest, is_weightless, request_of
from fray.scheduler.preemption.preemption import would_preempt
from fray.scheduler.queue.applicant import Applicant, PlacementShape
from fray.scheduler.reasons import demand_text
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import Tables
from fray.scheduler.state.what_if_pool import HypotheticalPool

TRIED = 10
"""Jobs whose end is tried alone."""
STEPS = 100
"""Jobs whose ends are tried together, one more each time."""
LOOKED_AT = 1_000
"""Attempts among which those are looked for, since the controller answers no other request meanwhile."""
ALTERNATIVES_SHOWN = 4
MEMBERS_SHOWN = 10


@frozen
class StartForecast:
    """Forecast for one request.

    Attributes:
        alone: jobs each of whose end would be enough by itself, a few of them.
        at: when there is room for it at the latest, by the scheduler's clock and the time limits and terminations of
            jobs that hold what it needs. None: unknown.
        ending: jobs that have to end for that.
        endless: jobs that hold what it needs and have no time limit.
        enough: the machines in service are large enough, and jobs hold some of their capacity.
    """

    alone: tuple[JobId, ...] = ()
    at: float | None = None
    ending: tuple[JobId, ...] = ()
    endless: tuple[JobId, ...] = ()
    enough: bool = False


def forecast_start(state: Tables, shape: PlacementShape) -> StartForecast:
    """Return the forecast for a waiting request."""
    request, pool = shape.request, state.pool_for(shape.reservation)
    holders = _holders(state, shape)
    ends = [(ends_at(state, job), job.order, job.job_id) for job in holders]
    timed = sorted((at, order, job_id) for at, order, job_id in ends if at is not None)
    endless = tuple(job_id for at, _, job_id in ends if at is None)
    # Released and placed on the pool itself, and undone, so that the answer is that of the placement rules and not a
    # second opinion. Requests before this one in the queue are not considered.
    with HypotheticalPool(state, shape.reservation) as trial:
        if trial.fits(request):
            return StartForecast(at=state.now, enough=True)
        alone = tuple(job.job_id for job in holders[:TRIED] if _is_enough(trial, request, job))
        ended: list[JobId] = []
        for at, _, job_id in timed[:STEPS]:
            trial.end((state.jobs[job_id],))
            ended.append(job_id)
            if trial.fits(request):
                return StartForecast(alone, at, tuple(ended), endless, enough=True)
    enough = bool(holders) and all(pool.could_hold(part) for part in request.parts)
    return StartForecast(alone, None, tuple(ended), endless, enough)


def _holders(state: Tables, shape: PlacementShape) -> list[JobRow]:
    """Return jobs that hold capacity of machines it could use, the latest first."""
    usable: dict[NodeName, None] = {}
    for demand in shape.request.demands:
        # Jobs on other machines would make no room, whenever they end.
        usable |= dict.fromkeys(state.pool_for(shape.reservation).usable(demand))
    found: dict[JobId, JobRow] = {}
    there = (attempt_id for name in usable for attempt_id in state.on_node[name])
    for attempt_id in islice(there, LOOKED_AT):
        job = state.jobs[state.attempts[attempt_id].job_id]
        takes = state.demand(job).ports or not is_weightless(state.demand(job))
        if takes and job.spec.reservation_id == shape.reservation:
            found[job.job_id] = job
    return sorted(found.values(), key=lambda job: -job.order)


def _is_enough(trial: HypotheticalPool, request: PlacementRequest, job: JobRow) -> bool:
    trial.end((job,))
    fits = trial.fits(request)
    trial.undo_to(0)
    return fits


# Text -----------------------------------------------------------------------------------------------------------------


def forecast_lines(state: Tables, shape: PlacementShape, found: StartForecast | None = None) -> Iterator[str]:
    """Yield what would let a request start, and when that is expected."""
    found = found or forecast_start(state, shape)
    if found.enough and not found.ending and not found.endless:
        yield "there is room for it now: it would start if requests before it did not need that"
        return
    if found.alone:
        yield f"it would start if {_alternatives(found.alone)} ended"
    elif found.enough:
        holders = list_text(found.ending + found.endless)
        yield f"it would start if several of those ended that hold what it needs: {holders}"
    if not found.enough:
        yield capacity_needed_text(state, shape)
    yield f"expected start: {_expected_text(state, found)}"


def _expected_text(state: Tables, found: StartForecast) -> str:
    if found.at is not None:
        has, limit = ("has", "its time limit") if len(found.ending) == 1 else ("have", "their time limits")
        has += " ended"
        if not any(state.jobs[job_id].phase is JobPhase.CLOSING for job_id in found.ending):
            has += f" by {limit}"
        when = f"in {max(0.0, found.at - state.now):.0f} s at the latest"
        return f"{when}, when {list_text(found.ending)} {has}, unless requests before it take that"
    if found.endless:
        return f"unknown: {list_text(found.endless)} {'has' if len(found.endless) == 1 else 'have'} no time limit"
    return "unknown: it depends on machines that are not there"


def capacity_needed_text(state: Tables, shape: PlacementShape) -> str:
    """Return which machines would let a request start that the present ones cannot hold."""
    if shape.reservation:
        return f"it would start if reservation {shape.reservation} held more machines that it can use"
    usable = {name for demand in shape.request.demands for name in state.pool.usable(demand)}
    reserved = [row.id for row in state.reservations.values() if any(usable & set(unit.nodes) for unit in row.units)]
    closed = [
        node.name
        for node in state.nodes.values()
        if (node.cordon is not None or node.quarantine is not None)
        and any(members_held(demand, node.capacity) for demand in shape.request.demands)
    ]
    released = f", or if reservation {_alternatives(reserved)} released some" if reserved else ""
    back = f", or if {_alternatives(closed)} were back in service" if closed else ""
    return f"it would start if more machines joined that it can use{released}{back}"


def _alternatives(names: Sequence[str]) -> str:
    return " or ".join(names[:ALTERNATIVES_SHOWN])


# Requests that were not submitted -------------------------------------------------------------------------------------


def what_if(state: State, spec: JobSpec) -> Forecast:
    """Return whether a job would start now, and where; or its position, and what would let it start.

    The answer is that of the scheduler at this moment; nothing is changed.
    """
    try:
        check_feasible(state, spec)
    except FrayError as error:
        return Forecast(verdict=ForecastVerdict.NEVER, text=str(error))
    shape = PlacementShape(request_of(spec), False, spec.reservation_id)
    # As if it were accepted now: what is held for applicants before it is held against it.
    newest = newcomer(state, spec, shape)
    with HypotheticalPool(state, shape.reservation) as trial:
        placed = current_holds(state, newest).place_in_trial(trial, newest)
    if placed is not None:
        nodes = tuple(node for part in placed for node in part.nodes)
        return Forecast(verdict=ForecastVerdict.NOW, nodes=nodes, text=f"it would start now on {_members_text(nodes)}")
    if groups := groups_for(state, shape.request) if not spec.reservation_id else ():
        text = f"machines of group {' or '.join(groups)} would be requested, and it would start there"
        return Forecast(verdict=ForecastVerdict.GROW, groups=groups, text=text)
    found = forecast_start(state, shape)
    # The rule of `try_preempt`: a job that starts soon anyway preempts nothing.
    is_soon = found.at is not None and found.at <= state.now + state.policy.preemption.patience_s
    choice = None if is_soon else would_preempt(state, newest)
    if choice is not None and choice.victims:
        nodes = tuple(node for part in choice.placed for node in part.nodes)
        victims, where = _members_text(choice.victims), _members_text(nodes)
        text = f"it would preempt {victims}, and start on {where} when that has ended"
        return Forecast(verdict=ForecastVerdict.PREEMPT, preempts=choice.victims, nodes=nodes, text=text)
    number = 1 + state.queue.count_ahead_of(newest)
    members = f"{spec.members} times " if spec.members > 1 else ""
    demands = demand_text(spec.demand, *spec.alternatives)
    lines = [f"it would wait: number {number} in the queue; it needs {members}{demands}"]
    return Forecast(
        verdict=ForecastVerdict.WAIT,
        place=number,
        unblocked_by=found.alone,
        expected_s=None if found.at is None else max(0.0, found.at - state.now),
        text="\n".join([*lines, *forecast_lines(state, shape, found)]),
    )


def groups_for(state: State, request: PlacementRequest) -> tuple[str, ...]:
    """Return the groups from which machines could be requested now that would hold all of it."""
    # Packed as the autoscaler does, each group alone: sums of members say nothing about slices.
    estimate = new_estimate(state)
    names = dict.fromkeys(offer.group for offer in estimate.offers)
    alone = {name: tuple(offer for offer in estimate.offers if offer.group == name) for name in names}
    return tuple(name for name in names if evolve(estimate, offers=alone[name], stock={}).pack_whole(request))


def newcomer(state: State, spec: JobSpec, shape: PlacementShape) -> Applicant:
    """Return the job's applicant, as if it were accepted now."""
    return Applicant(
        "",
        shape,
        # Without `next_order`, which would change the state: a question leaves no trace.
        state.meta.last_order + 1,
        state.now,
        band=spec.band or Band.INTERACTIVE,
        tenant=state.shares.tenant(spec.user, spec.namespace),
        time_limit_s=spec.time_limit_s,
    )


def _members_text(names: Sequence[str]) -> str:
    counted = Counter(names)
    return list_text(
        [f"{name} ({count} members)" if count > 1 else name for name, count in counted.items()], MEMBERS_SHOWN
    )
