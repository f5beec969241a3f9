"""Events of providers: orders accepted or refused, lists of machines, and what these mean for nodes and groups.

A provider's list may be older than it seems: a unit that was just created may be missing, one that was just deleted may
still be there. So a unit is missed only after a while (`UNSEEN_S`, `VANISHED_S`), a deleted one is remembered for a
while (`REMEMBERED_S`), and no unit is created twice, because every name is made, and saved, once.
"""

from __future__ import annotations

from fray.errors import InvalidRequest
from fray.model.backoff import backoff_s
from fray.model.messages.client import Done
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)
from fray.scheduler.autoscaler.view import unknown_group_text
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import GroupScaled, MachineAnswered, MachinesListed, NodeDied
from fray.scheduler.nodes.nodes import on_node_died
from fray.scheduler.state.machine_groups import zone_suffix
from fray.scheduler.state.state import State
from fray.scheduler.state.unit_rows import (
    CloudUnit,
    UnitEvent,
    UnitPhase,
    next_backoff,
)

UNSEEN_S = 120.0
"""A requested unit that is not listed this long after the request was never created."""
VANISHED_S = 30.0
"""A listed unit that has been missing from lists this long is gone."""
REAPPEARED_S = 60.0
"""A deleted unit that is listed this long after the deletion has to be deleted again."""
REMEMBERED_S = 3600.0
"""Time for which the name of a deleted unit is remembered."""
DELETE_RETRY_S, DELETE_RETRY_MAX_S = 5.0, 300.0
"""Wait before the first retry of a deletion, doubled after each, and the longest wait."""

DEAD_STATES = (MachineState.PREEMPTED, MachineState.FAILED)
STOPPING_ERRORS = (ErrorKind.INVALID, ErrorKind.PERMISSION)


# Answers to orders ----------------------------------------------------------------------------------------------------


def on_machine_answered(state: State, event: MachineAnswered, out: EffectBuffer) -> None:
    """Apply the answer to an order; an answer that is not awaited any more is ignored."""
    unit = state.fleet.units.get(event.name)
    if unit is None:
        return
    if event.is_delete:
        _on_delete_answered(state, event, unit, out)
    elif unit.phase is UnitPhase.WANTED:
        _on_create_answered(state, event, unit, out)


def _on_create_answered(state: State, event: MachineAnswered, unit: CloudUnit, out: EffectBuffer) -> None:
    if event.error is None:
        state.fleet.apply_event(unit, UnitEvent.TAKEN, state.now)
        return
    out.log_event("", "machine refused", f"{unit.name}{zone_suffix(unit)}: {event.error.value}: {event.message}")
    _record_create_failure(state, out, unit, event.error, event.message)
    event_of_unit = (
        # After a timeout the unit may exist: it is deleted under its name. Other errors prove that it was not created.
        UnitEvent.DOOMED if event.error is ErrorKind.TRANSIENT else UnitEvent.ENDED
    )
    state.fleet.apply_event(unit, event_of_unit, state.now)


def _record_create_failure(state: State, out: EffectBuffer, unit: CloudUnit, kind: ErrorKind, message: str) -> None:
    """Back off the unit's zone, or stop its whole group."""
    unit.reason = f"{kind.value}: {message}"
    # A wrong request or a missing permission fails in every zone and every time, until the operator has changed
    # something.
    if kind not in STOPPING_ERRORS:
        back_off_zone(state, out, unit, kind, message)
        return
    row = state.fleet.row(unit.group)
    row.stop_reason = unit.reason
    state.fleet.group_changed(row)
    out.log_event("", "group stopped", f"{unit.group}: {unit.reason}")


def back_off_zone(state: State, out: EffectBuffer, unit: CloudUnit, kind: str, message: str) -> None:
    """Request nothing in the unit's zone for a while."""
    row = state.fleet.row(unit.group)
    before = row.backoffs.get(unit.zone)
    after = row.backoffs[unit.zone] = next_backoff(before, kind, message, state.now)
    if after != before:
        state.fleet.group_changed(row)
        why = f"{after.kind}, {after.streak} in a row: {message}"
        text = f"{unit.group}{zone_suffix(unit)} for {after.until - state.now:.0f} s after {why}"
        out.log_event("", "zone back-off", text)


def _on_delete_answered(state: State, event: MachineAnswered, unit: CloudUnit, out: EffectBuffer) -> None:
    if unit.phase is not UnitPhase.DELETING:
        return
    if event.error is None:
        unit.delete_accepted, unit.since = True, state.now
        state.fleet.unit_changed(unit)
        return
    unit.provider_message = f"{event.error.value}: {event.message}"
    # Never given up: a machine that stays costs money.
    unit.order_not_before = state.now + backoff_s(DELETE_RETRY_S, DELETE_RETRY_MAX_S, unit.delete_failures + 1)
    unit.delete_failures += 1
    state.fleet.unit_changed(unit)
    out.log_event("", "machine not deleted", f"{unit.name}{zone_suffix(unit)}: {unit.provider_message}")


# Lists ----------------------------------------------------------------------------------------------------------------


def on_machines_listed(state: State, event: MachinesListed, out: EffectBuffer) -> None:
    """Compare a provider's machines with the units on record."""
    fleet = state.fleet
    if event.error:
        fleet.provider_errors[event.provider] = event.error
        return
    fleet.provider_errors.pop(event.provider, None)
    if event.provider not in fleet.listed_providers:
        # Requests may begin now: what exists is known.
        fleet.listed_providers[event.provider] = None
        fleet.is_plan_due_soon = True
    seen = {machine.name: machine for machine in event.machines}
    for unit in [unit for unit in fleet.units.values() if unit.provider == event.provider]:
        machine = seen.pop(unit.name, None)
        if machine is None:
            # By the time of the request for the list: what was decided later cannot be in it.
            _on_unlisted(state, out, unit, event.asked_at)
        else:
            _match_listed_unit(state, out, unit, machine, event.asked_at)
    for machine in seen.values():
        _adopt_or_delete_unknown(state, out, event.provider, machine)


def _match_listed_unit(state: State, out: EffectBuffer, unit: CloudUnit, machine: SeenMachine, asked_at: float) -> None:
    before = unit.provider_state, unit.unlisted_at, unit.zone
    unit.provider_state, unit.unlisted_at, unit.zone = machine.state, None, machine.zone or unit.zone
    unit.provider_message = machine.message or unit.provider_message
    if before != (unit.provider_state, unit.unlisted_at, unit.zone):
        state.fleet.unit_changed(unit)
    if unit.phase in (UnitPhase.GONE, UnitPhase.DELETING):
        _reappeared_after_delete(state, out, unit, asked_at)
    elif machine.state in DEAD_STATES:
        _on_dead(state, out, unit, f"its provider says it is {machine.state.value}", machine)
    # Its nodes leave soon, so nothing new is placed there.
    elif machine.state is MachineState.DELETING:
        order_delete(state, out, unit, "deleted outside Fray")
    elif unit.phase in (UnitPhase.WANTED, UnitPhase.ASKED):
        state.fleet.apply_event(unit, UnitEvent.LISTED, state.now)
    elif unit.phase is UnitPhase.JOINED and machine.state is MachineState.RUNNING and machine.hosts < unit.hosts:
        close_unit(state, out, unit, f"its provider lists {machine.hosts} of its {unit.hosts} hosts")


def _reappeared_after_delete(state: State, out: EffectBuffer, unit: CloudUnit, asked_at: float) -> None:
    """Delete a unit again that is listed although it was deleted, unless the list is old."""
    done = unit.phase is UnitPhase.GONE or unit.delete_accepted
    # Lists of clouds lag behind: deleting again at once would repeat the order with each list.
    if not done or asked_at - unit.since < REAPPEARED_S or unit.provider_state is MachineState.DELETING:
        return
    if unit.phase is UnitPhase.GONE:
        state.fleet.apply_event(unit, UnitEvent.BACK, state.now)
    unit.delete_accepted, unit.order_not_before = False, state.now
    state.fleet.unit_changed(unit)
    out.log_event("", "machine still there", f"{unit.name}{zone_suffix(unit)} was deleted, and is deleted again")


def _on_dead(state: State, out: EffectBuffer, unit: CloudUnit, why: str, machine: SeenMachine) -> None:
    """Handle proof of death: jobs restart elsewhere at once, and what is left of the unit is deleted."""
    if machine.error is not None and unit.phase in (UnitPhase.WANTED, UnitPhase.ASKED, UnitPhase.SEEN):
        _record_create_failure(state, out, unit, machine.error, machine.message)  # accepted, and refused later
    elif machine.state is MachineState.FAILED and unit.phase is not UnitPhase.JOINED:
        back_off_zone(state, out, unit, "boot", machine.message or why)
    # Proof: jobs need not wait for the lease of a silent node.
    mark_nodes_dead(state, out, unit, why)
    order_delete(state, out, unit, why)


def _on_unlisted(state: State, out: EffectBuffer, unit: CloudUnit, asked_at: float) -> None:
    match unit.phase:
        case UnitPhase.WANTED:
            return
        case UnitPhase.GONE:
            if asked_at - unit.since >= REMEMBERED_S:
                state.fleet.drop_unit(unit)
        case UnitPhase.DELETING:
            # Only a list that was requested after the deletion was accepted proves that the unit is gone.
            if unit.delete_accepted and asked_at > unit.since:
                _mark_gone(state, out, unit, unit.reason)
        case UnitPhase.ASKED:
            if asked_at - unit.since >= UNSEEN_S:
                message = f"requested {asked_at - unit.since:.0f} s ago and not listed"
                back_off_zone(state, out, unit, "boot", message)
                close_unit(state, out, unit, message)
        case _:
            _on_missing(state, out, unit, asked_at)


def _on_missing(state: State, out: EffectBuffer, unit: CloudUnit, asked_at: float) -> None:
    if unit.provider_state is None and asked_at - unit.since < UNSEEN_S:
        return  # its nodes joined before its provider listed it
    # A list may be old, so that a unit must be missing for a while; bad news (preempted, failed) count at once.
    if unit.unlisted_at is None:
        unit.unlisted_at = asked_at
        state.fleet.unit_changed(unit)
    elif asked_at - unit.unlisted_at >= VANISHED_S:
        _mark_gone(state, out, unit, "its provider does not list it any more")


def _mark_gone(state: State, out: EffectBuffer, unit: CloudUnit, why: str) -> None:
    mark_nodes_dead(state, out, unit, why)
    unit.reason = why
    state.fleet.apply_event(unit, UnitEvent.ENDED, state.now)
    out.log_event("", "machine gone", f"{unit.name}: {why}")


def _adopt_or_delete_unknown(state: State, out: EffectBuffer, provider: str, machine: SeenMachine) -> None:
    """Adopt a machine with our label that is not on record if its group has room for it, else delete it."""
    config = state.fleet.group(machine.group)
    # After the loss of the store: machines of this cluster are used if the policy allows for so many, and deleted
    # otherwise.
    room = (
        config is not None and config.provider == provider and len(state.fleet.live_units(machine.group)) < config.max
    )
    usable = machine.state in (MachineState.CREATING, MachineState.RUNNING)
    if provider == "fixed" and config is None:
        return
    unit = CloudUnit(
        name=machine.name,
        group=machine.group,
        provider=provider,
        order=state.next_order(),
        zone=machine.zone,
        phase=UnitPhase.SEEN,
        since=state.now,
        hosts=config.hosts if config else max(1, machine.hosts),
        price_per_hour=config.price(machine.zone) if config else 0.0,
        requested_at=state.now,
        broken_at=state.now,
        provider_state=machine.state,
        provider_message=machine.message,
        reason="found in the provider's list",
    )
    state.fleet.put_unit(unit)
    if room and usable:
        out.log_event("", "machine adopted", f"{unit.name} of group {unit.group}{zone_suffix(unit)}")
    elif machine.state in DEAD_STATES:
        _on_dead(state, out, unit, f"its provider says it is {machine.state.value}", machine)
    else:
        close_unit(state, out, unit, "not requested by this cluster" if usable else "it is being deleted")


# Closing and deleting units -------------------------------------------------------------------------------------------


def is_unit_in_use(state: State, unit: CloudUnit) -> bool:
    """Return whether anything has a place on the unit: an attempt, or a reservation."""
    machines = state.pool.machines
    for name in state.fleet.nodes_of_unit.get(unit.name, ()):
        if machines[name].attempts > 0 or state.on_node[name]:
            return True
    return False


def close_unit(state: State, out: EffectBuffer, unit: CloudUnit, why: str) -> None:
    """Close a unit for new jobs; it is deleted when it is empty, which may be now."""
    if not is_unit_in_use(state, unit):
        order_delete(state, out, unit, why)
        return
    unit.reason = why
    state.fleet.apply_event(unit, UnitEvent.CLOSED, state.now)
    out.log_event("", "machine draining", f"{unit.name}: {why}")
    _close_nodes(state, unit)


def order_delete(state: State, out: EffectBuffer, unit: CloudUnit, why: str) -> None:
    """Order the deletion of a unit."""
    unit.reason = why
    state.fleet.apply_event(unit, UnitEvent.DOOMED, state.now)
    out.log_event("", "machine deleting", f"{unit.name}{zone_suffix(unit)}: {why}")
    _close_nodes(state, unit)


def _close_nodes(state: State, unit: CloudUnit) -> None:
    for name in state.fleet.nodes_of_unit.get(unit.name, ()):
        state.nodes[name].is_leaving = True
        state.node_changed(state.nodes[name])


def mark_nodes_dead(state: State, out: EffectBuffer, unit: CloudUnit, why: str) -> None:
    """Mark the unit's nodes as dead, with its provider's report as proof: what they held may restart elsewhere."""
    for name in list(state.fleet.nodes_of_unit.get(unit.name, ())):
        on_node_died(state, NodeDied(node=name, incarnation=state.nodes[name].incarnation, reason=why), out)


# Operators ------------------------------------------------------------------------------------------------------------


def on_group_scaled(state: State, event: GroupScaled, out: EffectBuffer) -> None:
    """Set a group's minimum and maximum, or return to those of the policy."""
    written = next((group for group in state.fleet.policy.groups if group.name == event.group), None)
    problem = _invalid_text(state, event, written)
    if problem:
        out.refuse(event.session, event.ref, InvalidRequest(problem))
        return
    row = state.fleet.row(event.group)
    row.min, row.max = event.min, event.max
    state.fleet.group_changed(row)
    state.fleet.limits_changed_at = state.now
    out.log_event("", "group scaled", f"{event.group}: min {_limit_text(event.min)}, max {_limit_text(event.max)}")
    out.reply(event.session, event.ref, Done())


def _limit_text(number: int | None) -> str:
    return "as in the policy" if number is None else str(number)


def _invalid_text(state: State, event: GroupScaled, written: GroupConfig | None) -> str:
    if written is None:
        return unknown_group_text(state, event.group)
    if written.provider == "fixed":
        return f"group {event.group!r} has provider 'fixed': its machines cannot be created or deleted"
    minimum = written.min if event.min is None else event.min
    maximum = written.max if event.max is None else event.max
    if event.max is not None and event.min is None:
        # A new maximum below the minimum of the policy lowers it, too: the operator need not give both.
        minimum = min(minimum, maximum)
    if not 0 <= minimum <= maximum:
        return f"group {event.group!r}: min={minimum} and max={maximum}; expected 0 <= min <= max"
    return ""
