"""Invariants of machines and of the attempts on them (see `check`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from fray.model.gangs import port_names
from fray.model.policy.machine_groups import MachineState
from fray.scheduler.jobs.node_faults import quarantine_limit, quarantined_nodes
from fray.scheduler.lifecycle import AttemptPhase, NodePhase
from fray.scheduler.placement.lending import attempts_above
from fray.scheduler.state.rows import AttemptRow, Node
from fray.scheduler.state.state import State
from fray.scheduler.state.unit_rows import UnitPhase
from fray.testing.invariants.reservations import devices_add_up, units_by_node

Rule: TypeAlias = Callable[[State], Iterator[str]]


_Living: TypeAlias = "defaultdict[str, list[AttemptRow]]"
_grouped: dict[int, tuple[list[Node], _Living]] = {}
"""Nodes to look at, and living attempts by node, for states that are being checked: several invariants need them."""


@contextmanager
def looked_at(state: State, names: Iterable[str] | None = None) -> Iterator[None]:
    """Context in which the state does not change, and its living attempts are collected once.

    Args:
        names: nodes to look at, with the attempts that the index has on them. Default: all nodes and attempts.
    """
    if names is None:
        _grouped[id(state)] = list(state.nodes.values()), _group_living(state)
    else:
        nodes = [node for name in names if (node := state.nodes.get(name)) is not None]
        _grouped[id(state)] = nodes, _living_on(state, nodes)
    try:
        yield
    finally:
        del _grouped[id(state)]


def concerned_nodes(state: State) -> set[str]:
    """Return the nodes that changes since the last save concern: changed ones, those of changed attempts and
    reservations, and all that are cordoned, whose time to be drained comes without a change."""
    found = {node.name for node in state.nodes.values() if node.cordon is not None}
    for table, key in state.touched():
        if table == "node":
            found.add(key)
        elif table == "attempt" and key in state.attempts:
            found.add(state.attempts[key].node)
        elif table == "reservation" and key in state.reservations:
            found.update(node for unit in state.reservations[key].units for node in unit.nodes)
    return found


def _capacity(state: State) -> Iterator[str]:
    """Yield machines whose free capacity is not what living attempts leave, is negative, or whose devices are given
    twice."""
    living = _living_by_node(state)
    shares = units_by_node(state)
    for node in _nodes_to_check(state):
        held = [attempt for attempt in living[node.name] if not state.jobs[attempt.job_id].spec.reservation_id]
        units = shares[node.name]
        demands = [*[state.share_of(a) for a in held], *[demand for demand, _ in units]]
        cpu_milli, memory_bytes, disk_bytes = (
            node.capacity.cpu_milli,
            node.capacity.memory_bytes,
            node.capacity.disk_bytes,
        )
        for demand in demands:
            cpu_milli -= demand.cpu_milli
            memory_bytes -= demand.memory_bytes
            disk_bytes -= demand.disk_bytes
        free = cpu_milli, memory_bytes, disk_bytes
        machine = state.pool.machines[node.name]
        if min(free) < 0:
            yield f"node {node.name} is allocated more than once: {free} left"
        if free != (machine.cpu_milli, machine.memory_bytes, machine.disk_bytes) or machine.attempts != len(demands):
            yield f"the pool differs on node {node.name}"
        if machine.is_open != node.is_schedulable:
            yield f"the pool has node {node.name} open={machine.is_open}"
        reserved = [device for _, host in units for device in host.devices]
        yield from devices_add_up(state, held, machine, reserved)


def _ports(state: State) -> Iterator[str]:
    """Yield attempts without the ports they requested, with ports the machine does not offer, or that others have."""
    given: dict[tuple[str, int], str] = {}
    ports: defaultdict[str, list[int]] = defaultdict(list)
    for attempt in (one for here in _living_by_node(state).values() for one in here):
        spec, node = state.jobs[attempt.job_id].spec, state.nodes.get(attempt.node)
        if node is None:
            continue
        asked = port_names(spec)[: spec.demand.ports] if spec.demand.ports else ()
        if (asked or attempt.ports) and sorted(attempt.ports) != sorted(asked):
            yield f"{attempt.attempt_id} requested ports {asked} and has {attempt.ports}"
        for port in attempt.ports.values():
            other = given.setdefault((node.name, port), attempt.attempt_id)
            if other != attempt.attempt_id or not 0 <= port - node.capacity.ports.first < node.capacity.ports.count:
                yield f"port {port} of {node.name} is allocated to {other} and to {attempt.attempt_id}"
    for name, port in given:
        ports[name].append(port)
    for node in _nodes_to_check(state):
        pooled = state.pool.machines[node.name].ports.given
        if (pooled or ports[node.name]) and sorted(ports[node.name]) != sorted(pooled):
            yield f"the pool differs on the ports of {node.name}"


def _nodes(state: State) -> Iterator[str]:
    """Yield timers of nodes that are alive, nodes without timers that are not, and lost machines that hold attempts."""
    silent = sorted(node.name for node in state.nodes.values() if node.phase is not NodePhase.ALIVE)
    if silent != sorted(state.not_alive):
        yield f"nodes without connection are {silent}, timers run for {sorted(state.not_alive)}"
    for node in state.nodes.values():
        if node.phase is NodePhase.LOST and state.on_node[node.name]:
            yield f"the lost node {node.name} still holds {list(state.on_node[node.name])}"


def _cordons(state: State) -> Iterator[str]:
    """Yield attempts placed on cordoned machines, attempts left on drained ones, and machines that are not drained
    in time."""
    by_node = _living_by_node(state)
    for node in _nodes_to_check(state):
        cordon = node.cordon
        if cordon is None:
            continue
        for attempt in by_node[node.name]:
            if attempt.placed_at > cordon.since:
                yield f"{attempt.attempt_id} was placed on {node.name}, which is cordoned since {cordon.since}"
            if cordon.drain and cordon.until is None and not attempt.stop_cause:
                yield f"{attempt.attempt_id} stays on {node.name}, which is drained"
        if cordon.drained_at is not None and by_node[node.name]:
            yield f"{node.name} counts as drained and holds {[one.attempt_id for one in by_node[node.name]]}"
        if cordon.drain and cordon.drained_at is None and not by_node[node.name]:
            yield f"{node.name} holds nothing and does not count as drained"


def _requests_within_limits(state: State) -> Iterator[str]:
    """Yield units that the last plan requested beyond max or the spend limit."""
    fleet = state.fleet
    # They may have been lowered in the same moment, after the plan; the next one closes what is too many.
    if fleet.limits_changed_at == state.now:
        return
    for config in fleet.configs():
        made = [
            unit
            for unit in fleet.live_units(config.name)
            if unit.requested_at == state.now and unit.phase is UnitPhase.WANTED
        ]
        if made and len(fleet.live_units(config.name)) > config.max:
            yield f"{made[-1].name} was requested, and group {config.name} has {config.max} units at most"
    limit = fleet.policy.spend_limit_per_hour
    new = [unit for unit in fleet.units.values() if unit.phase is UnitPhase.WANTED and unit.requested_at == state.now]
    if limit is not None and any(unit.price_per_hour for unit in new) and fleet.spent_per_hour() > limit + 1e-6:
        yield f"{new[-1].name} was requested, and {fleet.spent_per_hour():g} an hour is over the limit of {limit:g}"


def _fleet(state: State) -> Iterator[str]:
    """Yield units requested beyond max or the spend limit, open while they leave, or deleted while in use."""
    fleet = state.fleet
    if not fleet.units:
        return
    yield from _requests_within_limits(state)
    for unit in fleet.units.values():
        nodes = [state.nodes[name] for name in fleet.nodes_of_unit.get(unit.name, ())]
        if not unit.is_live and any(state.pool.machines[node.name].is_open for node in nodes):
            yield f"{unit.name} is {unit.phase.value}, and open for jobs"
        if (
            unit.phase is UnitPhase.DELETING
            and unit.provider_state is not MachineState.DELETING
            and not unit.delete_failures
        ):
            held = [attempt for node in nodes for attempt in state.on_node[node.name]]
            if held:
                yield f"{unit.name} is being deleted, and holds {held}"


def _quarantine(state: State) -> Iterator[str]:
    """Yield machines in quarantine for a single job or beyond the limit, and attempts that were placed there."""
    if len(quarantined_nodes(state)) > quarantine_limit(state):
        yield f"{sorted(state.quarantined)} are in quarantine, the limit is {quarantine_limit(state)}"
    for node in state.nodes.values():
        found = node.quarantine
        if found is None:
            continue
        if len(set(found.jobs)) < 2:
            yield f"{node.name} is in quarantine because of {list(found.jobs)} alone"
        for attempt_id in state.on_node[node.name]:
            if state.attempts[attempt_id].placed_at > found.since:
                yield f"{attempt_id} was placed on {node.name}, which is in quarantine since {found.since}"


# Attempts -------------------------------------------------------------------------------------------------------------


def attempts(state: State) -> Iterator[str]:
    """Yield attempts not held by the living incarnation of their node for their job's generation."""
    for attempt in state.attempts.values():
        if attempt.job_id not in state.jobs:
            yield f"{attempt.attempt_id} is on record without its job"
        if (attempt.outcome is None) is not attempt.living:
            yield f"{attempt.attempt_id} is {attempt.phase.value} with outcome {attempt.outcome}"
    yield from living_attempts(state)


def _loans(state: State, attempt: AttemptRow) -> Iterator[str]:
    """Yield loans of an attempt from others than living attempts above it on its machine, or of more than it needs."""
    above = {one.attempt_id: one for one in attempts_above(state, state.jobs[attempt.job_id].owner)}
    for lender, cpu_milli in attempt.loans.items():
        if lender not in above or above[lender].node != attempt.node or cpu_milli <= 0:
            yield f"{attempt.attempt_id} on {attempt.node} uses {cpu_milli} of {lender}"
    if state.share_of(attempt).cpu_milli < 0:
        yield f"{attempt.attempt_id} is lent more CPUs than it needs"


def living_attempts(state: State) -> Iterator[str]:
    """Yield the same violations of living attempts only."""
    for attempt in (one for here in _living_by_node(state).values() for one in here):
        job, node = state.jobs.get(attempt.job_id), state.nodes.get(attempt.node)
        if node is None or node.incarnation != attempt.incarnation:
            yield f"{attempt.attempt_id} lives on a dead incarnation of {attempt.node}"
        if attempt.loans:
            yield from _loans(state, attempt)
        if state.cpu_to_lend(attempt) < 0:
            yield f"{attempt.attempt_id} lends more CPUs than it has"
        if job is not None and attempt.generation != job.generation:
            yield f"{attempt.attempt_id} outlives its generation"
        if job is not None and job.ended and not (state.is_suspect(attempt) or attempt.stop_cause):
            yield f"{attempt.attempt_id} outlives its job"


def desired_attempts(state: State) -> Iterator[str]:
    """Yield nodes whose desired attempts are not their living attempts, except those reserved for a later stage."""
    by_node = _living_by_node(state)
    for node in state.nodes:
        wanted = [desired.attempt_id for desired in state.desired_attempts(node)]
        living = [attempt.attempt_id for attempt in by_node[node] if attempt.phase is not AttemptPhase.RESERVED]
        if sorted(wanted) != sorted(living):
            yield f"node {node} should run {wanted}, living there: {living}"


def _living_by_node(state: State) -> _Living:
    """Return living attempts by node by the rows, without the index."""
    found = _grouped.get(id(state))
    return _group_living(state) if found is None else found[1]


def _nodes_to_check(state: State) -> Iterable[Node]:
    found = _grouped.get(id(state))
    return state.nodes.values() if found is None else found[0]


def _living_on(state: State, nodes: Iterable[Node]) -> _Living:
    living: _Living = defaultdict(list)
    for node in nodes:
        living[node.name] = [state.attempts[attempt_id] for attempt_id in state.on_node[node.name]]
    return living


def _group_living(state: State) -> _Living:
    living: _Living = defaultdict(list)
    for attempt in state.attempts.values():
        if attempt.living:
            living[attempt.node].append(attempt)
    return living


RULES_OF_NODES: tuple[Rule, ...] = (_capacity, _ports, _cordons, living_attempts)
"""Rules that check the nodes of `looked_at` alone."""
RULES_OF_MOMENTS: tuple[Rule, ...] = (_fleet,)
"""Rules about what a step does, whose violations the next step may hide."""
MACHINE_RULES: tuple[Rule, ...] = (_capacity, _ports, _nodes, _cordons, _fleet, _quarantine, attempts, desired_attempts)
