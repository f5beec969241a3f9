"""Views of nodes for clients."""

from __future__ import annotations

from fray.model.messages.client import NodeInfo
from fray.scheduler.nodes.availability import out_of_service_text, service_state
from fray.scheduler.state.rows import Node
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
