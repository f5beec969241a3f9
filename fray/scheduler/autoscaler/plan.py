"""Plan of the autoscaler, made every `PLAN_S` while something waits, is on its way, or is idle.

For each group: units that are there or on their way, at least ``min``, at most ``max``, ``buffer`` more than are in
use, and as many as hold what waits. Everything that waits is packed in the queue's order, first into what the pool has
free and what is on its way, then into the cheapest group that can hold it (`bin_packing`). A zone that failed is in
back-off (`unit_rows.next_backoff`), meanwhile the next zone of the group is used. A unit that has been idle for
``idle_s`` is closed and deleted, except when it is needed for ``min``, ``buffer``, a reservation, or a gang whose other
machines are on their way.

A plan reads the state and requests units by name; the names are saved before any provider gets them. Nothing here waits
for a provider.
"""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.ids import NodeName
from fray.model.policy.machine_groups import GroupConfig
from fray.model.policy.policy import Policy
from fray.scheduler.autoscaler.bin_packing import GroupZone, PackingEstimate, UnitOffer
from fray.scheduler.autoscaler.provider_events import (
    back_off_zone,
    close_unit,
    is_unit_in_use,
    order_delete,
)
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.lifecycle import IllegalTransition, NodePhase
from fray.scheduler.pool.requests import MemberGroup, Placement, PlacementRequest
from fray.scheduler.queue.applicant import PlacementShape
from fray.scheduler.queue.quotas import Headroom
from fray.scheduler.reasons import Reason, ReasonKind
from fray.scheduler.state.known_capacity import declared_shape, host_capacity
from fray.scheduler.state.machine_groups import MachineGroupIndex, unit_name, zone_suffix
from fray.scheduler.state.state import State
from fray.scheduler.state.unit_rows import (
    CloudUnit,
    UnitEvent,
    UnitPhase,
    cluster_mark,
    make_unit_name,
)

SHAPES_LIMIT = 64
"""Shapes of requests that one plan considers, the first in the queue's order."""
GANGS_LIMIT = 100
"""Gangs of one shape that one plan considers."""
UNITS_LIMIT = 100
"""Units that one plan requests."""


def on_policy_changed(state: State, policy: Policy) -> None:
    """Use the new policy; stopped groups may be tried again."""
    fleet = state.fleet
    fleet.policy, fleet.limits_changed_at = policy, state.now
    # Also when nothing in the file has changed: the cause of a stop (a permission, a quota) often lies outside of it.
    for row in list(fleet.groups.values()):
        if row.stop_reason:
            row.stop_reason = ""
            fleet.group_changed(row)
    fleet.is_plan_due_soon = True


def on_controller_start(state: State, cluster: str, policy: Policy) -> None:
    """Set the cluster's mark and the policy; units that were being requested are requested again under the same
    name."""
    state.fleet.cluster = cluster_mark(cluster)
    on_policy_changed(state, policy)


def replan_if_needed(state: State, out: EffectBuffer) -> None:
    """Plan, after each event, if a plan is due and there is anything to plan for."""
    fleet = state.fleet
    if not (fleet.policy.groups or fleet.units):
        fleet.plan_at = None  # else it would always be due
        fleet.touched_units.clear()
        return
    for name in fleet.touched_units:
        if name in fleet.units:
            _update_unit(state, out, fleet.units[name])
    fleet.touched_units.clear()
    # At once after a quiet time, also before the end of an idle time for which the next plan is due; otherwise plans
    # keep their distance, as each one looks at everything that waits.
    if fleet.is_plan_due_soon or state.queue:
        if fleet.plan_at is None or fleet.planned_at is None:
            fleet.plan_at = state.now
        else:
            fleet.plan_at = min(fleet.plan_at, max(state.now, fleet.planned_at + fleet.pace_s))
    if fleet.plan_at is not None and fleet.plan_at <= state.now:
        replan(state, out)
    if fleet.has_new_orders:
        fleet.has_new_orders = False
        out.orders_changed()


def replan(state: State, out: EffectBuffer) -> None:
    """Update every unit, request more, and delete idle ones."""
    fleet = state.fleet
    fleet.is_plan_due_soon, fleet.planned_at = False, state.now
    fleet.units_in_use = {}
    for unit in list(fleet.units.values()):
        _update_unit(state, out, unit)
    # Before the floors: units requested for what waits count towards ``min`` and ``buffer``.
    used_by_gangs = _request_for_waiting(state, out)
    for config in fleet.configs():
        if config.provider != "fixed":
            _request_floor(state, out, config)
    due = [at for name in _group_names(state) if (at := _delete_idle(state, out, name, used_by_gangs)) is not None]
    fleet.plan_at = _next_plan_at(state, due)


def _group_names(state: State) -> list[str]:
    """Return the groups of the policy, and those of which only units are left."""
    names = dict.fromkeys(config.name for config in state.fleet.configs())
    return list(names | dict.fromkeys(unit.group for unit in state.fleet.units.values()))


def _next_plan_at(state: State, due: list[float]) -> float | None:
    """Return when to plan again; None: when something changes."""
    fleet = state.fleet
    busy = any(unit.phase not in (UnitPhase.JOINED, UnitPhase.GONE) for unit in fleet.units.values())
    if fleet.is_plan_due_soon or busy or state.queue:
        return state.now + fleet.pace_s
    # With nothing waiting or on its way, only the end of an idle time needs a plan.
    return max(min(due), state.now + fleet.pace_s) if due else None


# One unit -------------------------------------------------------------------------------------------------------------


def _update_unit(state: State, out: EffectBuffer, unit: CloudUnit) -> None:
    """Update one unit: joined, too long on its way, or drained."""
    if unit.phase is UnitPhase.DRAINING and not is_unit_in_use(state, unit):
        order_delete(state, out, unit, unit.reason)
    if not unit.is_live:
        return
    if is_unit_in_use(state, unit):
        state.fleet.units_in_use[unit.name] = None
        state.fleet.unit_busy_at[unit.name] = state.now
    if _is_whole(state, unit):
        _on_joined(state, out, unit)
    elif unit.broken_at is None:
        unit.broken_at = state.now
        state.fleet.unit_changed(unit)
    elif unit.provider != "fixed":
        _check_boot_timeout(state, out, unit)


def _is_whole(state: State, unit: CloudUnit) -> bool:
    nodes = state.fleet.nodes_of_unit.get(unit.name, ())
    return sum(state.nodes[name].phase is not NodePhase.LOST for name in nodes) >= unit.hosts


def _on_joined(state: State, out: EffectBuffer, unit: CloudUnit) -> None:
    if unit.broken_at is not None:
        unit.broken_at = None
        state.fleet.unit_changed(unit)
    if unit.phase is UnitPhase.JOINED:
        return
    state.fleet.apply_event(unit, UnitEvent.WHOLE, state.now)
    state.fleet.unit_busy_at[unit.name] = state.now
    out.log_event("", "machine joined", f"{unit.name} after {state.now - unit.requested_at:.0f} s")
    row = state.fleet.row(unit.group)
    # A machine that came is proof that the zone works.
    row.backoffs.pop(unit.zone, None)
    first = next(iter(state.fleet.nodes_of_unit[unit.name]))
    config = state.fleet.group(unit.group)
    # From now on the plan reckons with this capacity instead of the declared one: a machine a little smaller than
    # declared would otherwise be requested again and again for a job that does not fit on it.
    row.observed_capacity, row.observed_declaration = (
        state.nodes[first].capacity,
        declared_shape(config) if config else "",
    )
    state.fleet.group_changed(row)


def _check_boot_timeout(state: State, out: EffectBuffer, unit: CloudUnit) -> None:
    config = state.fleet.group(unit.group)
    if config is None or unit.broken_at is None or state.now - unit.broken_at < config.boot_timeout_s:
        return
    here = len(state.fleet.nodes_of_unit.get(unit.name, ()))
    why = f"{here} of its {unit.hosts} nodes joined within {state.now - unit.broken_at:.0f} s"
    back_off_zone(state, out, unit, "boot", f"{unit.name}: {why}")
    close_unit(state, out, unit, why)


# Waiting requests -----------------------------------------------------------------------------------------------------


def _request_for_waiting(state: State, out: EffectBuffer) -> dict[NodeName, None]:
    """Request units for what waits, and return the machines with free capacity that gangs among it count on."""
    fleet = state.fleet
    fleet.limit_reasons = {}
    used_by_gangs: dict[NodeName, None] = {}
    if not state.queue or not any(config.provider != "fixed" for config in fleet.configs()):
        return used_by_gangs
    packing = new_estimate(state)
    state.pool.now = state.now
    # Requests that fit keep their places until the plan ends, so that no two count on the same free machine.
    trials: list[tuple[PlacementRequest, tuple[Placement, ...]]] = []
    headroom = Headroom(state.shares)
    for shape in _shapes(state):
        before = dict(packing.requested)
        nodes = _request_for_shape(state, packing, shape, trials, headroom)
        used_by_gangs |= nodes
        first = state.queue.head(shape).id
        for at, units in packing.requested.items():
            for _ in range(units - before.get(at, 0)):
                request_unit(state, out, at, f"for {first}")
        if packing.limits:
            fleet.limit_reasons[shape] = tuple(packing.limits)
    for ask, placed in trials:
        state.pool.give_back(ask, placed)
    return used_by_gangs


def _shapes(state: State) -> list[PlacementShape]:
    """Return the waiting shapes in the queue's order, without those that wait for a reservation's machines."""
    shapes = [shape for shape in state.queue.waiting if not shape.reservation]
    return sorted(shapes, key=lambda shape: state.queue.head(shape).entry)[:SHAPES_LIMIT]


def _request_for_shape(
    state: State,
    packing: PackingEstimate,
    shape: PlacementShape,
    trials: list[tuple[PlacementRequest, tuple[Placement, ...]]],
    headroom: Headroom,
) -> dict[NodeName, None]:
    """Pack all requests of one shape, except those that fit into the pool or exceed a quota: these do not wait for
    machines."""
    packing.limits = {}
    count = headroom.admit_waiting(state.queue.waiting[shape])
    if not count:
        return {}
    # The pool itself is asked what fits now, so that no rule of placement is written twice. A request that fits and is
    # still not placed waits for something other than machines.
    placed = state.pool.place(shape.request)
    if placed is not None:
        trials.append((shape.request, placed))
        return _nodes_of(placed)
    only = shape.request.parts[0]
    # Single members and single slices are independent of each other: as many as possible are packed.
    if len(shape.request.parts) == 1 and only.members == max(1, only.slice_hosts):
        packing.pack_some(only, count)
        return {}
    if len(shape.request.parts) == 1 and not shape.request.same:
        return _request_for_gangs(state, packing, only, count, trials)
    for _ in range(min(count, GANGS_LIMIT)):
        if not packing.pack_whole(shape.request):
            break
    return {}


def _request_for_gangs(
    state: State,
    packing: PackingEstimate,
    part: MemberGroup,
    count: int,
    trials: list[tuple[PlacementRequest, tuple[Placement, ...]]],
) -> dict[NodeName, None]:
    """Pack gangs: the first uses what is free and requests the rest; the others request everything."""
    here, placed = _place_as_many(state, part)
    rest = MemberGroup(part.choices, part.members - here, part.slice_hosts)
    if not packing.pack_whole(PlacementRequest((rest,))):
        if placed is not None:
            state.pool.give_back(*placed)
        return {}
    if placed is not None:
        trials.append(placed)
    # What was free is taken by the first gang.
    for _ in range(min(count, GANGS_LIMIT) - 1):
        if not packing.pack_whole(PlacementRequest((part,))):
            break
    return {} if placed is None else _nodes_of(placed[1])


def _nodes_of(placed: tuple[Placement, ...]) -> dict[NodeName, None]:
    return dict.fromkeys(grant.node for one in placed for grant in one.grants)


def _place_as_many(
    state: State, part: MemberGroup
) -> tuple[int, tuple[PlacementRequest, tuple[Placement, ...]] | None]:
    """Place as many of the members as fit now; return their number and their placements, which are taken."""
    run = max(1, part.slice_hosts)
    least, most = 0, part.members // run - 1
    # Bisection: fewer members always fit where more do. All members do not fit, or the gang would have been placed.
    while least < most:
        middle = (least + most + 1) // 2
        ask = PlacementRequest((MemberGroup(part.choices, middle * run, part.slice_hosts),))
        placed = state.pool.place(ask)
        if placed is None:
            most = middle - 1
        else:
            state.pool.give_back(ask, placed)
            least = middle
    if not least:
        return 0, None
    ask = PlacementRequest((MemberGroup(part.choices, least * run, part.slice_hosts),))
    placed = state.pool.place(ask)
    return (0, None) if placed is None else (least * run, (ask, placed))


def new_estimate(state: State) -> PackingEstimate:
    """Return an estimate with what can be requested, and what is on its way."""
    fleet = state.fleet
    limit = fleet.policy.spend_limit_per_hour
    configs = [config for config in fleet.configs() if config.provider != "fixed"]
    live = {config.name: fleet.live_units(config.name) for config in configs}
    packing = PackingEstimate(
        offers=tuple(offer for config in configs for offer in unit_offers(fleet, config, state.now)),
        unit_limits={config.name: config.max - len(live[config.name]) for config in configs},
        budget_per_hour=None if limit is None else limit - fleet.spent_per_hour(),
        request_limit=UNITS_LIMIT,
    )
    for units in live.values():
        for unit in units:
            # What has joined is in the pool, and was counted there.
            if unit.phase is not UnitPhase.JOINED:
                packing.add_stock((unit.group, unit.zone), unit.hosts)
    return packing


def request_unit(state: State, out: EffectBuffer, at: GroupZone, why: str) -> None:
    """Decide to request one more unit: its name is made here, and saved before its provider gets it."""
    fleet = state.fleet
    config = fleet.group(at[0])
    if config is None:
        raise IllegalTransition(f"a unit of the unknown group {at[0]!r} is requested")
    order = state.next_order()
    unit = CloudUnit(
        name=make_unit_name(config.name, fleet.cluster, order),
        group=config.name,
        provider=config.provider,
        order=order,
        zone=at[1],
        since=state.now,
        hosts=config.hosts,
        price_per_hour=config.price(at[1]),
        requested_at=state.now,
        broken_at=state.now,
        reason=why,
    )
    fleet.put_unit(unit)
    out.log_event("", "machine requested", f"{unit.name}{zone_suffix(unit)} {why}")


# Floor and ceiling ----------------------------------------------------------------------------------------------------


def units_to_keep(state: State, config: GroupConfig, units: list[CloudUnit]) -> int:
    """Return how many units stay, whatever waits: those in use or ``min``, and ``buffer``; at most ``max``."""
    used = sum(unit.name in state.fleet.units_in_use for unit in units)
    # The buffer comes on top of ``min`` or of what is in use, whichever is more.
    return min(config.max, max(config.min, used) + config.buffer)


def _request_floor(state: State, out: EffectBuffer, config: GroupConfig) -> None:
    """Request the units missing to that number, in zones that are open."""
    units = state.fleet.live_units(config.name)
    lacking = units_to_keep(state, config, units) - len(units)
    if lacking <= 0:
        return
    packing = new_estimate(state)
    for offer in packing.offers:
        while lacking > 0 and offer.group == config.name and packing.request_one(offer):
            request_unit(state, out, offer.group_zone, "to keep min and buffer")
            lacking -= 1


def _delete_idle(state: State, out: EffectBuffer, group: str, used_by_gangs: dict[NodeName, None]) -> float | None:
    """Close units beyond the group's max, and units idle long enough; return when the next one will be."""
    fleet = state.fleet
    config = fleet.group(group)
    units = fleet.live_units(group)
    if (config.provider if config else units[0].provider if units else "fixed") == "fixed":
        return None
    _close_surplus(state, out, units, config)
    units = fleet.live_units(group)
    if config is None or not units:
        return None
    for name in used_by_gangs:
        # A gang waits with free machines until its other machines have come: these must not be deleted as idle
        # meanwhile.
        fleet.unit_busy_at[unit_name(state.nodes[name])] = state.now
    idle = [unit for unit in units if unit.phase is UnitPhase.JOINED and unit.name not in fleet.units_in_use]
    # The most expensive first, then those idle for longest.
    idle.sort(key=lambda unit: (-unit.price_per_hour, idle_since(state, unit), -unit.order))
    here = sum(unit.phase is UnitPhase.JOINED for unit in units)  # a unit on its way may never join
    surplus = idle[: max(0, here - units_to_keep(state, config, units))]
    for unit in surplus:
        idle_s = state.now - idle_since(state, unit)
        if idle_s >= config.idle_s:
            close_unit(state, out, unit, f"it has been idle for {idle_s:.0f} s")
    return min((idle_since(state, unit) + config.idle_s for unit in surplus if unit.is_live), default=None)


def idle_since(state: State, unit: CloudUnit) -> float:
    """Return when anything last had a place on the unit, or it joined; not before a restart of the controller."""
    fleet = state.fleet
    used = [fleet.node_used_at.get(name, 0.0) for name in fleet.nodes_of_unit.get(unit.name, ())]
    return max([fleet.unit_busy_at.setdefault(unit.name, state.now), *used])


def _close_surplus(state: State, out: EffectBuffer, units: list[CloudUnit], config: GroupConfig | None) -> None:
    """Close units beyond the group's max: first those that have not joined, then idle ones, the last requested
    first."""
    most = config.max if config else 0
    why = f"the group's max is {most}" if config else "its group is no longer in the policy"
    if len(units) <= most:
        return
    order = sorted(units, key=lambda u: (u.phase is UnitPhase.JOINED, u.name in state.fleet.units_in_use, -u.order))
    # Scaling down ends no job, also when max or the policy changes: units are deleted when they are empty.
    for unit in order[: max(0, len(units) - most)]:
        close_unit(state, out, unit, why)


# Units that can be requested ------------------------------------------------------------------------------------------


def unit_offers(fleet: MachineGroupIndex, config: GroupConfig, now: float) -> Iterator[UnitOffer]:
    """Yield one offer for each zone, in order, with the reason if no unit can be requested there now."""
    for zone in config.zones_in_order():
        capacity = host_capacity(fleet, config, zone, "a unit", 0)
        yield UnitOffer(
            config.name, zone, capacity, config.hosts, config.price(zone), zone_closed_reason(fleet, config, zone, now)
        )


def zone_closed_reason(fleet: MachineGroupIndex, config: GroupConfig, zone: str, now: float) -> Reason | None:
    """Return why nothing is requested in a zone now; None: it may be."""
    row = fleet.groups.get(config.name)
    if row is not None and row.stop_reason:
        return Reason(ReasonKind.GROUP_STOPPED, config.name, error=row.stop_reason)
    # After the loss of the store there may be machines without a record: nothing is requested before they are known.
    if config.provider not in fleet.listed_providers:
        error = fleet.provider_errors.get(config.provider, "")
        return Reason(ReasonKind.PROVIDER_UNLISTED, config.provider, error=error)
    backoff = row.backoffs.get(zone) if row is not None else None
    if backoff is None or backoff.until <= now:
        return None
    left_s = backoff.until - now
    return Reason(
        ReasonKind.ZONE_BACKOFF, config.name, zone=zone, left_s=left_s, cause=backoff.kind, message=backoff.message
    )
