"""Views of machine groups and their units, and why no machine is requested for what waits."""

from __future__ import annotations

from collections import Counter

from fray.errors import InvalidRequest
from fray.model.messages.machine_groups import (
    GroupInfo,
    MachineInfo,
    Machines,
    ZoneBackoff,
)
from fray.model.policy.machine_groups import GroupConfig
from fray.scheduler.queue.applicant import PlacementShape
from fray.scheduler.reasons import Reason, ReasonKind
from fray.scheduler.state.tables import Tables
from fray.scheduler.state.unit_rows import LIVE, CloudUnit, UnitPhase

_SEEN = (UnitPhase.SEEN, UnitPhase.JOINED)
_ASKED = (UnitPhase.ASKED, *_SEEN)


def machine_request_reasons(state: Tables, shape: PlacementShape) -> list[Reason]:
    """Return which machines are on their way, and why no more are requested for a waiting request."""
    fleet = state.fleet
    if not fleet.policy.groups or shape.reservation:
        return []
    # By group and not by request: a unit on its way serves whatever comes first in the queue.
    coming = Counter(unit.group for unit in fleet.units.values() if unit.is_live and unit.phase is not UnitPhase.JOINED)
    groups = tuple(f"{count} of group {name}" for name, count in coming.items())
    requested = [Reason(ReasonKind.MACHINES_REQUESTED, groups=groups)] if groups else []
    return [*requested, *fleet.limit_reasons.get(shape, ())]


def list_fleet(state: Tables, group: str = "") -> Machines:
    """Return all groups and units, or one group with its units.

    Raises:
        InvalidRequest: there is no such group.
    """
    groups = [info for info in list_groups(state) if group in ("", info.name)]
    if group and not groups:
        raise InvalidRequest(unknown_group_text(state, group))
    return Machines(
        groups=tuple(groups),
        machines=list_machines(state, group),
        cost_per_hour=state.fleet.spent_per_hour(),
        spend_limit_per_hour=state.policy.spend_limit_per_hour,
    )


def unknown_group_text(state: Tables, group: str) -> str:
    """Return the error for an unknown group."""
    names = ", ".join(group.name for group in state.fleet.policy.groups) or "none"
    return f"there is no group {group!r}; groups of the policy: {names}"


def list_groups(state: Tables) -> tuple[GroupInfo, ...]:
    """Return the groups of the policy, and those of which only units are left."""
    names = dict.fromkeys([config.name for config in state.policy.groups])
    # A group that has left the policy is shown until its last unit is deleted: its units still cost money.
    names |= dict.fromkeys(unit.group for unit in state.fleet.units.values())
    return tuple(_group_info(state, name) for name in names)


def _group_info(state: Tables, name: str) -> GroupInfo:
    fleet = state.fleet
    config, row = fleet.group(name), fleet.groups.get(name)
    units = [unit for unit in fleet.units.values() if unit.group == name and unit.phase is not UnitPhase.GONE]
    backoffs = row.backoffs if row is not None else {}
    return GroupInfo(
        name=name,
        provider=config.provider if config else units[0].provider if units else "",
        kind=_kind_text(config) if config else "no longer in the policy",
        min=config.min if config else 0,
        buffer=config.buffer if config else 0,
        max=config.max if config else 0,
        wanted=sum(unit.phase in LIVE for unit in units),
        asked=sum(unit.phase in _ASKED for unit in units),
        seen=sum(unit.is_live and unit.provider_state is not None for unit in units),
        joined=sum(unit.phase is UnitPhase.JOINED for unit in units),
        leaving=sum(not unit.is_live for unit in units),
        cost_per_hour=sum(unit.price_per_hour for unit in units),
        stopped=row.stop_reason if row is not None else "",
        trouble=fleet.provider_errors.get(config.provider, "") if config else "",
        backoffs=tuple(
            ZoneBackoff(
                zone=zone,
                kind=str(backoff.kind),
                remaining_s=backoff.until - state.now,
                failures=backoff.streak,
                message=backoff.message,
            )
            for zone, backoff in backoffs.items()
            # Expired pauses stay in the row, as the next failure doubles them.
            if backoff.until > state.now
        ),
    )


def _kind_text(config: GroupConfig) -> str:
    """Describe one unit in a few words."""
    if config.tpu:
        kind = f"{config.tpu} ({config.hosts} hosts)"
    elif config.gpus:
        kind = f"{config.gpus} {config.gpu}, {config.cpu:g} CPUs"
    else:
        kind = f"{config.cpu:g} CPUs"
    return kind + (", spot" if config.spot else "")


def list_machines(state: Tables, group: str = "") -> tuple[MachineInfo, ...]:
    """Return the units by group and age, without those that are gone."""
    found = [unit for unit in state.fleet.units.values() if group in ("", unit.group)]
    return tuple(_machine_info(state, unit) for unit in found if unit.phase is not UnitPhase.GONE)


def _machine_info(state: Tables, unit: CloudUnit) -> MachineInfo:
    nodes = tuple(state.fleet.nodes_of_unit.get(unit.name, ()))
    return MachineInfo(
        name=unit.name,
        group=unit.group,
        zone=unit.zone,
        phase=unit.phase.value,
        age_s=state.now - unit.requested_at,
        hosts=unit.hosts,
        nodes=nodes,
        attempts=sum(len(state.on_node[name]) for name in nodes),
        state=unit.provider_state.value if unit.provider_state else "",
        price_per_hour=unit.price_per_hour,
        reason=unit.reason,
        provider_message=unit.provider_message,
    )
