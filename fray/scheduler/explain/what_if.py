"""What would become of a request, without submitting it: asked of the law as it is, and nothing is changed."""

from __future__ import annotations

from fray.errors import FrayError
from fray.model.messages.maintenance import Forecast, ForecastVerdict
from fray.model.policy.priority import Band
from fray.model.specs import JobSpec
from fray.scheduler.autoscaler.plan import unit_offers
from fray.scheduler.backfill.backfill import current_holds
from fray.scheduler.explain import forecast
from fray.scheduler.jobs.submit import check_feasible
from fray.scheduler.pool.pool import members_held
from fray.scheduler.pool.requests import request_of
from fray.scheduler.pool.resource_text import needs
from fray.scheduler.preemption.preemption import would_preempt
from fray.scheduler.queue.applicant import Applicant, PlacementShape
from fray.scheduler.state.state import State
from fray.scheduler.state.what_if_pool import HypotheticalPool


def what_if(state: State, spec: JobSpec) -> Forecast:
    """Whether it would start now, and where; or how long the line before it is, and what would let it start."""
    try:
        check_feasible(state, spec)
    except FrayError as error:
        return Forecast(verdict=ForecastVerdict.NEVER, text=str(error))
    shape = PlacementShape(request_of(spec), False, spec.reservation_id)
    newest = newcomer(state, spec, shape)
    with HypotheticalPool(state, shape.reservation) as trial:
        placed = current_holds(state, newest).place_in_trial(trial, newest)
    if placed is not None:
        nodes = tuple(node for part in placed for node in part.nodes)
        return Forecast(verdict=ForecastVerdict.NOW, nodes=nodes, text=f"it would start now on {_some(nodes)}")
    return _waits(state, spec, shape)


def _waits(state: State, spec: JobSpec, shape: PlacementShape) -> Forecast:
    groups = groups_for(state, spec) if not spec.reservation_id else ()
    if groups:
        text = f"machines of group {' or '.join(groups)} would be asked for, and it would start there"
        return Forecast(verdict=ForecastVerdict.GROW, groups=groups, text=text)
    found = forecast.forecast_start(state, shape)
    soon = found.at is not None and found.at <= state.now + state.policy.preemption.patience_s
    choice = None if soon else would_preempt(state, newcomer(state, spec, shape))
    if choice is not None and choice.victims:
        nodes = tuple(node for part in choice.placed for node in part.nodes)
        whom, where = _some(choice.victims), _some(nodes)
        text = f"it would preempt {whom}, and start on {where} when that has ended"
        return Forecast(verdict=ForecastVerdict.PREEMPT, preempts=choice.victims, nodes=nodes, text=text)
    number = place_of(state, spec, shape)
    gang = f"{spec.members} times " if spec.members > 1 else ""
    lines = [f"it would wait: number {number} in line; it needs {gang}{needs(spec.demand, *spec.alternatives)}"]
    lines += forecast.forecast_lines(state, shape, found)
    return Forecast(
        verdict=ForecastVerdict.WAIT,
        place=number,
        unblocked_by=found.alone,
        expected_s=None if found.at is None else max(0.0, found.at - state.now),
        text="\n".join(lines),
    )


def groups_for(state: State, spec: JobSpec) -> tuple[str, ...]:
    """Groups that could be asked for machines now, and would hold all of it."""
    books = state.fleet
    return tuple(
        config.name
        for config in books.policy.groups
        if any(
            not offer.closed_text
            and members_held(demand, offer.capacity) * config.hosts * (config.max - len(books.live_units(config.name)))
            >= spec.members
            for offer in unit_offers(books, config, state.now)
            for demand in (spec.demand, *spec.alternatives)
        )
    )


def newcomer(state: State, spec: JobSpec, shape: PlacementShape) -> Applicant:
    """The job, if it were accepted now."""
    return Applicant(
        "",
        shape,
        state.meta.last_order + 1,
        state.now,
        band=spec.band or Band.INTERACTIVE,
        tenant=state.shares.tenant(spec.user, spec.namespace),
        time_limit_s=spec.time_limit_s,
    )


def place_of(state: State, spec: JobSpec, shape: PlacementShape) -> int:
    """Its number in line, if it were accepted now."""
    newest = newcomer(state, spec, shape)
    return 1 + state.queue.count_ahead_of(newest)


def _some(names: tuple[str, ...]) -> str:
    counted = {name: names.count(name) for name in dict.fromkeys(names)}
    told = [f"{name} ({count} members)" if count > 1 else name for name, count in list(counted.items())[:10]]
    return ", ".join(told) + (f" and {len(counted) - 10} more" if len(counted) > 10 else "")
