"""Reservations in the tables: their units, the pool that each of them is, and who waits for which.

A unit's share is taken out of the fleet's pool as an attempt's is. The units of a reservation that lie on one node are
one machine of its own pool, of the sum, so that every rule of placement holds inside, too. Ports stay those of the
node: the machine in here and the one out there have the same `Ports`.
"""

from __future__ import annotations

from fray.model.ids import JobId, NodeName
from fray.model.reservations import ReservationId, ReservationState
from fray.model.resources import Capacity, Demand
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.queue.applicant import NEVER, Applicant, ApplicantKind, PlacementShape
from fray.scheduler.queue.fair_share import Tenant
from fray.scheduler.state.base import discard
from fray.scheduler.state.reservation_rows import Host, ReservationRow, ReservedUnit
from fray.scheduler.state.rows import AttemptRow
from fray.scheduler.state.usage import UsageTables

GROWTH_ORDER = 1 << 60
"""Growth comes after everybody else of its band, the higher priority first."""
RESERVATION = "reservation"
"""Of `timers`: when something of a reservation is due."""


class ReservedTables(UsageTables):
    """What `Tables` knows of reservations."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.reservation_pools: dict[ReservationId, MachinePool] = {}
        """Machines of those that have not ended."""
        self.jobs_inside: dict[ReservationId, dict[JobId, None]] = {}
        """Living jobs."""
        self.reservations_on: dict[NodeName, dict[ReservationId, None]] = {}
        """Who has units there."""
        self.reservations_by_owner: dict[str, dict[ReservationId, None]] = {}
        """Those that have not ended, by owner."""
        self.with_surplus: dict[ReservationId, None] = {}
        """Those that hold more than their minimum."""
        self.releasing: dict[ReservationId, None] = {}
        """Those that are giving units back."""
        self.ended_reservations: dict[ReservationId, None] = {}
        """Ended ones, oldest end first."""
        self.changed_pools: dict[ReservationId, None] = {}
        """In whose pool something has become free since the last look."""

    def pool_for(self, reservation_id: ReservationId) -> MachinePool:
        """Whose machines are taken: the fleet's where the id is empty."""
        return self.reservation_pools[reservation_id] if reservation_id else self.pool

    # Rows

    def add_reservation(self, reservation: ReservationRow) -> None:
        self.reservations[reservation.id] = reservation
        self._index_reservation(reservation)
        self.touch("reservation", reservation.id)

    def reservation_changed(self, reservation: ReservationRow) -> None:
        """Its phase, units or times may have changed."""
        self._reindex(reservation)
        self.touch("reservation", reservation.id)

    def drop_reservation(self, reservation: ReservationRow) -> None:
        """Of an ended one nothing is remembered any more."""
        del self.reservations[reservation.id], self.ended_reservations[reservation.id]
        self.touch("reservation", reservation.id)

    def _index_reservation(self, reservation: ReservationRow) -> None:
        if reservation.phase is not ReservationState.ENDED:
            self.reservation_pools[reservation.id] = MachinePool()
            if reservation.owner:
                self.reservations_by_owner.setdefault(reservation.owner, {})[reservation.id] = None
        for unit in reservation.units:
            for host in unit.hosts:
                self.pool.take(host.node, reservation.demand_of(unit), host.devices)
                self.shares.count_members(*self.unit_charge(reservation, unit, host), 1, self.now)
                self.reservations_on.setdefault(host.node, {})[reservation.id] = None
        for node in self._nodes_of(reservation):
            self._rebuild_reserved_machine(reservation, node)
        self._reindex(reservation)

    def _nodes_of(self, reservation: ReservationRow) -> dict[NodeName, None]:
        return {node: None for unit in reservation.units for node in unit.nodes}

    def _reindex(self, reservation: ReservationRow) -> None:
        name = reservation.id
        is_releasing = reservation.phase is ReservationState.CLOSING or any(unit.leaving for unit in reservation.units)
        for index, belongs in ((self.with_surplus, reservation.surplus_units > 0), (self.releasing, is_releasing)):
            if belongs:
                index[name] = None
            else:
                index.pop(name, None)
        self.timers.set((RESERVATION, name), reservation.next_deadline)
        self._queue_reservation(reservation)
        if reservation.phase is ReservationState.ENDED and name not in self.ended_reservations:
            self._index_over(reservation)

    def _index_over(self, reservation: ReservationRow) -> None:
        discard(self.reservations_by_owner, reservation.owner, reservation.id)
        self.reservation_pools.pop(reservation.id, None)
        self.changed_pools.pop(reservation.id, None)
        self.ended_reservations[reservation.id] = None

    # The queue

    def _queue_reservation(self, reservation: ReservationRow) -> None:
        wanted = self.reservation_applicant(reservation)
        for applicant_id in (f"reservation:{reservation.id}", f"growth:{reservation.id}"):
            known = self.queue.applicants.get(applicant_id)
            if known is not None and known != wanted:
                self.queue.remove(applicant_id)
        if wanted is not None and wanted.id not in self.queue:
            self.queue.add(wanted)

    def reservation_applicant(self, reservation: ReservationRow) -> Applicant | None:
        """What it waits for: its minimum as a whole, what it has lost of that, or one unit more."""
        spec, phase = reservation.spec, reservation.phase
        if phase is ReservationState.WAITING:
            return self._minimum_applicant(reservation, spec.min_units)
        if phase is ReservationState.DEGRADED:
            return self._minimum_applicant(reservation, 1)
        grows = len(reservation.units) < spec.max_units and not reservation.grow_not_before
        if phase is not ReservationState.HELD or not grows:
            return None
        return Applicant(
            f"growth:{reservation.id}",
            PlacementShape(reservation.request_for(1), is_growth=True),
            GROWTH_ORDER + reservation.order,
            NEVER,  # what may be had is never owed: it cannot starve
            ApplicantKind.GROWTH,
            reservation.band,
            self.shares.tenant(spec.user, spec.namespace),
            priority=spec.priority,
        )

    def _minimum_applicant(self, reservation: ReservationRow, units: int) -> Applicant:
        spec = reservation.spec
        return Applicant(
            f"reservation:{reservation.id}",
            PlacementShape(
                reservation.request_for(units), bool(reservation.owner) and reservation.owner != reservation.root
            ),
            reservation.order,
            reservation.queued_at,
            ApplicantKind.RESERVATION,
            reservation.band,
            self.shares.tenant(spec.user, spec.namespace),
            priority=spec.priority,
        )

    # Units

    def add_unit(self, reservation: ReservationRow, unit: ReservedUnit) -> None:
        """Its share has been taken of the fleet's pool (`Pool.place`). `reservation_changed` comes after it."""
        reservation.units.append(unit)
        for host in unit.hosts:
            self.charge(*self.unit_charge(reservation, unit, host), 1)
        for node in unit.nodes:
            self.reservations_on.setdefault(node, {})[reservation.id] = None
            self._rebuild_reserved_machine(reservation, node)

    def unit_charge(self, reservation: ReservationRow, unit: ReservedUnit, host: Host) -> tuple[Tenant, Demand, str]:
        """All of it is its user's, whoever runs in it."""
        tenant = self.shares.tenant(reservation.spec.user, reservation.spec.namespace)
        return tenant, reservation.demand_of(unit), self.variant_of(host.node, host.devices)

    def close_unit_machines(self, reservation: ReservationRow, unit: ReservedUnit) -> None:
        """Nothing new is placed on its machines."""
        for node in unit.nodes:
            self._refresh_reserved_machine(reservation, node)

    def drop_unit(self, reservation: ReservationRow, unit: ReservedUnit, only: NodeName | None = None) -> None:
        """Its share is the fleet's again: all of it, or what it had of one machine."""
        going = [host for host in unit.hosts if only in (None, host.node)]
        unit.hosts = tuple(host for host in unit.hosts if host not in going)
        if not unit.hosts:
            reservation.units.remove(unit)
        for host in going:
            self.pool.release(host.node, reservation.demand_of(unit), host.devices)
            self.charge(*self.unit_charge(reservation, unit, host), -1)
        for node in dict.fromkeys(host.node for host in going):
            if not any(node in other.nodes for other in reservation.units):
                discard(self.reservations_on, node, reservation.id)
            self._rebuild_reserved_machine(reservation, node)

    def ensure_machine_inside(self, reservation_id: ReservationId, node: NodeName) -> None:
        """An attempt of it lives there, with a unit or (if it takes nothing) without."""
        if reservation_id and node not in self.reservation_pools[reservation_id].machines:
            self._rebuild_reserved_machine(self.reservations[reservation_id], node, is_used=True)

    def _rebuild_reserved_machine(self, reservation: ReservationRow, node: NodeName, is_used: bool = False) -> None:
        """Its machine of this node, as units and attempts say."""
        pool = self.reservation_pools[reservation.id]
        inside = self.attempts_inside(reservation.id, node)
        units = [unit for unit in reservation.units if node in unit.nodes]
        if not (units or inside or is_used):
            pool.remove(node)
            return
        pool.add(node, self._reserved_capacity(reservation, units, node), False)
        pool.machines[node].ports = self.pool.machines[node].ports
        for attempt in inside:
            pool.take(node, self.demand(self.jobs[attempt.job_id]), attempt.devices)
        self._refresh_reserved_machine(reservation, node)

    def attempts_inside(self, reservation_id: ReservationId, node: NodeName) -> list[AttemptRow]:
        """Living ones on this node."""
        here = (self.attempts[attempt_id] for attempt_id in self.on_node[node])
        return [attempt for attempt in here if self.jobs[attempt.job_id].spec.reservation_id == reservation_id]

    def _reserved_capacity(self, reservation: ReservationRow, units: list[ReservedUnit], node: NodeName) -> Capacity:
        """What its units have of this node, together."""
        whole = self.nodes[node].capacity
        shares = [(reservation.demand_of(unit), host) for unit in units for host in unit.hosts if host.node == node]
        mine = {device for _, host in shares for device in host.devices}
        return Capacity(
            cpu_milli=sum(demand.cpu_milli for demand, _ in shares),
            memory_bytes=sum(demand.memory_bytes for demand, _ in shares),
            disk_bytes=sum(demand.disk_bytes for demand, _ in shares),
            devices=tuple(device for device in whole.devices if device.id in mine),
            attributes=whole.attributes,
            ports=whole.ports,
        )

    def _refresh_reserved_machine(self, reservation: ReservationRow, name: NodeName) -> None:
        """Whether anything may be placed on its machine of this node, and on which devices."""
        pool, node = self.reservation_pools[reservation.id], self.nodes[name]
        if name in pool.machines:
            units = [unit for unit in reservation.units if name in unit.nodes]
            pool.set_open(name, bool(units) and node.is_schedulable and not any(unit.leaving for unit in units))
            pool.withhold(name, node.busy)
            self.changed_pools[reservation.id] = None

    def refresh_reserved_machines(self, name: NodeName) -> None:
        """The node has changed, and with it the machines that reservations have of it."""
        for reservation_id in self.reservations_on.get(name, ()):
            self._refresh_reserved_machine(self.reservations[reservation_id], name)

    def on_attempt_ended_inside(self, reservation_id: ReservationId, name: NodeName) -> None:
        """An attempt in it has ended. One that took nothing may have been all it still had on this node."""
        self.changed_pools[reservation_id] = None
        if reservation_id not in self.reservations_on.get(name, ()):
            self._rebuild_reserved_machine(self.reservations[reservation_id], name)

    def on_ports_released(self, name: NodeName) -> None:
        """They are those of all machines of this node."""
        self.pool.freed[name] = None
        for reservation_id in self.reservations_on.get(name, ()):
            if name in self.reservation_pools[reservation_id].machines:
                self.reservation_pools[reservation_id].freed[name] = None
                self.changed_pools[reservation_id] = None
