"""Views of nodes: their records for clients, and whether they are in service, as text."""

from __future__ import annotations

from collections.abc import Collection

from fray.model.ids import NodeName
from fray.model.messages.client import NodeInfo
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.reasons import Reason, ReasonKind
from fray.scheduler.state.rows import Cordon, Node
from fray.scheduler.state.state import SILENT_PHASES, State

REASON_EVERY_S = 5.0
"""Time after which the seconds in the reason of a node out of service count as a change."""


def nodes_info(state: State) -> tuple[NodeInfo, ...]:
    return tuple(node_info(state, state.nodes[name]) for name in sorted(state.nodes))


def node_marks(state: State, names: Collection[NodeName] | None = None) -> dict[NodeName, object]:
    """Return of each of these nodes that is there (None: of all) something that differs once its `node_info` does:
    comparing is much cheaper than making those. The seconds in reasons count every `REASON_EVERY_S`.
    """
    found: dict[NodeName, object] = {}
    machines, on_node, period = state.pool.machines, state.on_node, int(state.now // REASON_EVERY_S)
    for name in state.nodes if names is None else names:
        node = state.nodes.get(name)
        if node is None:
            continue
        machine = machines[name]
        has_time = node.cordon is not None or node.quarantine is not None
        found[name] = (
            *(machine.cpu_milli, machine.memory_bytes, machine.attempts, machine.ports.free, tuple(on_node[name])),
            *(node.incarnation, node.phase, node.is_leaving, node.cordon, node.quarantine, period if has_time else 0),
            tuple(node.busy.items()),
        )
    return found


def node_info(state: State, node: Node) -> NodeInfo:
    machine = state.pool.machines[node.name]
    return NodeInfo(
        name=node.name,
        alive=node.phase not in SILENT_PHASES,
        cpu_milli=node.capacity.cpu_milli,
        cpu_milli_free=machine.cpu_milli,
        memory_bytes=node.capacity.memory_bytes,
        memory_bytes_free=machine.memory_bytes,
        devices=tuple(device.id for device in node.capacity.devices),
        attributes=dict(node.capacity.attributes),
        attempts=machine.attempts,
        pid=node.process.pid if node.process else None,
        host=node.host,
        ports=str(node.capacity.ports),
        ports_free=machine.ports.free,
        busy=dict(node.busy),
        standing=service_state(node),
        standing_reason=str(out_of_service_reason(node, state.now) or ""),
        joined_at=node.joined_at,
        granted={device: id_ for id_ in state.on_node.get(node.name, ()) for device in state.attempts[id_].devices},
    )


# Availability ---------------------------------------------------------------------------------------------------------


def service_state(node: Node) -> str:
    """Return ``cordoned``, ``draining``, ``drained``, ``leaving`` or ``quarantined``; empty: in service."""
    # The time matters only for the seconds in the text, which is not used here.
    found = out_of_service_reason(node, 0.0)
    if found is None:
        return ""
    return "leaving" if found.kind is ReasonKind.RETURNING else found.kind.code


def out_of_service_reason(node: Node, now: float) -> Reason | None:
    """Return who or what took the node out of service, and why; None: it is in service."""
    # A decision of the operator explains more than what Fray has found out itself.
    if node.cordon is not None:
        return _cordon_reason(node.cordon, now)
    if node.is_leaving:
        return Reason(ReasonKind.RETURNING)
    found = node.quarantine
    if found is None:
        return None
    next_s = None if found.probe_at is None else max(0.0, found.probe_at - now)
    return Reason(ReasonKind.QUARANTINED, why=found.reason, last=found.probe_message, next_s=next_s)


def _cordon_reason(cordon: Cordon, now: float) -> Reason:
    if cordon.is_node_leaving:
        return Reason(ReasonKind.LEAVING, why=cordon.reason)
    if cordon.drain and cordon.drained_at is not None:
        return Reason(ReasonKind.DRAINED, by=cordon.by, why=cordon.reason)
    left_s = None if cordon.until is None else max(0.0, cordon.until - now)
    kind = ReasonKind.DRAINING if cordon.drain else ReasonKind.CORDONED
    return Reason(kind, by=cordon.by, why=cordon.reason, left_s=left_s)


def closed_reason(node: Node, now: float) -> Reason:
    """Return why nothing is placed on a node, whatever it has free."""
    if node.phase is not NodePhase.ALIVE:
        return Reason(ReasonKind.SILENT, silent_s=now - node.silent_since)
    if found := out_of_service_reason(node, now):
        return found
    if node.stray_attempts:
        return Reason(ReasonKind.STRAY_ATTEMPTS, names=node.stray_attempts)
    return Reason(ReasonKind.NOT_REPORTED)
