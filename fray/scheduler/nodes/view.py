"""Views of nodes: their records for clients, and whether they are in service, as text."""

from __future__ import annotations

from fray.model.messages.client import NodeInfo
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.state.rows import Cordon, Node, Quarantine
from fray.scheduler.state.state import SILENT_PHASES, State


def nodes_info(state: State) -> tuple[NodeInfo, ...]:
    return tuple(node_info(state, state.nodes[name]) for name in sorted(state.nodes))


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
        standing_reason=out_of_service_text(node, state.now),
        granted={device: id_ for id_ in state.on_node.get(node.name, ()) for device in state.attempts[id_].devices},
    )


# Availability ---------------------------------------------------------------------------------------------------------

SHOWN = 4


def service_state(node: Node) -> str:
    """Return ``cordoned``, ``draining``, ``drained``, ``leaving`` or ``quarantined``; empty: in service."""
    if node.cordon is None and node.is_leaving:
        return "leaving"
    if node.cordon is None:
        return "quarantined" if node.quarantine is not None else ""
    if node.cordon.is_node_leaving:
        return "leaving"
    if not node.cordon.drain:
        return "cordoned"
    return "draining" if node.cordon.drained_at is None else "drained"


def availability_text(node: Node) -> str:
    """Return the service state, also of a node that is in service but cannot be used: ``silent``, ``not ready yet``."""
    if node.phase is not NodePhase.ALIVE:
        return "silent"
    return service_state(node) or "not ready yet"


def out_of_service_text(node: Node, now: float) -> str:
    """Return who or what took the node out of service, and why; empty: it is in service."""
    if node.cordon is not None:
        return _cordon_text(node, node.cordon, now)
    if node.is_leaving:
        return "is being returned to its provider"
    return _quarantine_text(node.quarantine, now) if node.quarantine is not None else ""


def _quarantine_text(found: Quarantine, now: float) -> str:
    last = f"; the last probe reported: {found.probe_message}" if found.probe_message else ""
    if found.probe_at is not None:
        return f"is in quarantine ({found.reason}){last}; next probe in {max(0.0, found.probe_at - now):.0f} s"
    return f"is in quarantine ({found.reason}){last}; it is being probed"


def _cordon_text(node: Node, cordon: Cordon, now: float) -> str:
    if cordon.is_node_leaving:
        return f"is leaving: {cordon.reason}"
    why = f" ({cordon.reason})" if cordon.reason else ""
    until = ""
    if cordon.until is not None:
        until = f"; jobs have {max(0.0, cordon.until - now):.0f} s left to end by themselves"
    doing = "being drained" if service_state(node) == "draining" else service_state(node)
    return f"is {doing} by {cordon.by}{why}{until}"


def closed_text(node: Node, now: float) -> str:
    """Return why nothing is placed on a node, whatever it has free, as the sentence behind its name."""
    if node.phase is not NodePhase.ALIVE:
        return f"has been silent for {now - node.silent_since:.0f} s"
    if out := out_of_service_text(node, now):
        return out
    if node.is_leaving:
        return "is being returned to its provider"
    if node.stray_attempts:
        return f"is still ending {', '.join(node.stray_attempts[:SHOWN])}"
    return "has not reported what it holds yet"
