"""Views of nodes for clients."""

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
    """``cordoned``, ``draining``, ``drained``, ``leaving`` or ``quarantined``; empty: nothing is said against it."""
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
    """The same, also of one that nobody has taken out of service: ``silent``, ``not ready yet``."""
    if node.phase is not NodePhase.ALIVE:
        return "silent"
    return service_state(node) or "not ready yet"


def out_of_service_text(node: Node, now: float) -> str:
    """Who or what has taken it out of service, and why; empty: it is not."""
    if node.cordon is not None:
        return _cordoned(node, node.cordon, now)
    if node.is_leaving:
        return "is being given back to its provider"
    return _suspected(node.quarantine, now) if node.quarantine is not None else ""


def _suspected(found: Quarantine, now: float) -> str:
    last = f"; its last probe said: {found.probe_message}" if found.probe_message else ""
    if found.probe_at is not None:
        return f"is in quarantine ({found.reason}){last}; it is probed in {max(0.0, found.probe_at - now):.0f} s"
    return f"is in quarantine ({found.reason}){last}; it is being probed"


def _cordoned(node: Node, cordon: Cordon, now: float) -> str:
    if cordon.is_node_leaving:
        return f"is leaving: {cordon.reason}"
    said = f" ({cordon.reason})" if cordon.reason else ""
    until = ""
    if cordon.until is not None:
        until = f"; what ends by itself has {max(0.0, cordon.until - now):.0f} s left"
    doing = "being drained" if service_state(node) == "draining" else service_state(node)
    return f"is {doing} by {cordon.by}{said}{until}"


def closed_text(node: Node, now: float) -> str:
    """Why nothing is placed on it, whatever it has free: the beginning of that sentence is its name."""
    if node.phase is not NodePhase.ALIVE:
        return f"has been silent for {now - node.silent_since:.0f} s"
    if out := out_of_service_text(node, now):
        return out
    if node.is_leaving:
        return "is being given back to its provider"
    if node.stray_attempts:
        return f"is still ending {', '.join(node.stray_attempts[:SHOWN])}"
    return "has not yet told what it holds"
