"""Machines in the tables: whether anything may be placed there, and what speaks against it."""

from __future__ import annotations

from fray.model.ids import NodeName
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.state.base import discard
from fray.scheduler.state.reservations import ReservedTables
from fray.scheduler.state.rows import Node, NodeFault
from fray.scheduler.state.usage import counted_capacity


class MachineTables(ReservedTables):
    """What `Tables` knows of nodes."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.not_alive: dict[NodeName, None] = {}
        """Nodes that are not alive."""
        self.nodes_by_fault: dict[str, dict[NodeName, None]] = {}
        """On which machines jobs that are alike have ended badly; see `quarantine`."""
        self.quarantined: dict[NodeName, None] = {}
        self.newly_empty: dict[NodeName, None] = {}
        """Nodes whose last attempt has ended since the last look; whoever looks clears it (`drain.settle`)."""

    def put_node(self, node: Node) -> None:
        """A new one, or another incarnation."""
        if node.name in self.nodes:
            self.set_faults(self.nodes[node.name], ())
        self.nodes[node.name] = node
        node.is_leaving = self.fleet.is_leaving(node)
        self.index_node(node)
        self._set_node_capacity(node.name, counted_capacity(node))
        self.touch("node", node.name)

    def index_node(self, node: Node) -> None:
        self.pool.add(node.name, node.capacity, node.is_schedulable)
        self.pool.machines[node.name].ports.avoided = {taken.port: taken.until for taken in node.taken_ports}
        self.pool.withhold(node.name, node.busy)
        self.on_node.setdefault(node.name, {})
        self.fleet.on_node_joined(node)
        self._index_node_phase(node)
        self._index_faults(node)

    def _index_node_phase(self, node: Node) -> None:
        if node.phase is NodePhase.ALIVE:
            self.not_alive.pop(node.name, None)
        else:
            self.not_alive[node.name] = None
        self.timers.set(("drain", node.name), node.cordon.until if node.cordon is not None else None)
        self._index_quarantine(node)

    def _index_quarantine(self, node: Node) -> None:
        found, at = node.quarantine, None
        if found is None:
            self.quarantined.pop(node.name, None)
        else:
            self.quarantined[node.name] = None
            at = found.probe_at if found.probe_sent_at is None else found.probe_sent_at + self.config.probe_limit_s
        self.timers.set(("probe", node.name), at)

    def set_faults(self, node: Node, faults: tuple[NodeFault, ...]) -> None:
        """What speaks against it."""
        for blame in node.faults:
            discard(self.nodes_by_fault, blame.kind, node.name)
        node.faults = faults
        self._index_faults(node)
        self.touch("node", node.name)

    def _index_faults(self, node: Node) -> None:
        for blame in node.faults:
            self.nodes_by_fault.setdefault(blame.kind, {})[node.name] = None

    def node_changed(self, node: Node) -> None:
        """Its phase, strays, settledness, busy devices or cordon may have changed."""
        self._index_node_phase(node)
        self._set_node_capacity(node.name, counted_capacity(node))
        self.pool.set_open(node.name, node.is_schedulable)
        self.pool.withhold(node.name, node.busy)
        self.refresh_reserved_machines(node.name)
        self.touch("node", node.name)

    def drop_node(self, node: Node) -> None:
        node.quarantine = node.cordon = None
        self.set_faults(node, ())
        self._index_node_phase(node)
        del self.nodes[node.name], self.on_node[node.name]
        self.fleet.on_node_dropped(node)
        self.not_alive.pop(node.name, None)
        self.pool.remove(node.name)
        self._set_node_capacity(node.name, None)
        self.touch("node", node.name)
