"""Reservations in the tables: their units, the pool that each of them is, and who waits for which.

A unit's share is taken out of the fleet's pool as an attempt's is. The units of a reservation that lie on one node are
one machine of its own pool, of the sum, so that every rule of placement holds inside, too. Ports stay those of the
node: the machine in here and the one out there have the same `Ports`.
"""

from __future__ import annotations

from fray.model.ids import JobId, NodeName
from fray.model.reservations import ReservationId, ReservationState
from fray.model.resources import Capacity, Demand
from fray.scheduler.nodes.availability import takes_work
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.queue.fair_share import Tenant
from fray.scheduler.queue.queue import (
    NEVER,
    Applicant,
    ApplicantKind,
    PlacementShape,
)
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
        self.reserved: dict[ReservationId, MachinePool] = {}
        """Machines of those that have not ended."""
        self.inside: dict[ReservationId, dict[JobId, None]] = {}
        """Living jobs."""
        self.units_on: dict[NodeName, dict[ReservationId, None]] = {}
        """Who has units there."""
        self.reserved_by: dict[str, dict[ReservationId, None]] = {}
        """Those that have not ended, by owner."""
        self.lending: dict[ReservationId, None] = {}
        """Those that hold more than their minimum."""
        self.unsettled: dict[ReservationId, None] = {}
        """Those that are giving units back."""
        self.reserved_over: dict[ReservationId, None] = {}
        """Ended ones, oldest end first."""
        self.stirred: dict[ReservationId, None] = {}
        """In whose pool something has become free since the last look."""

    def pool_for(self, reservation_id: ReservationId) -> MachinePool:
        """Whose machines are taken: the fleet's where the id is empty."""
        return self.reserved[reservation_id] if reservation_id else self.pool

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
        del self.reservations[reservation.id], self.reserved_over[reservation.id]
        self.touch("reservation", reservation.id)

    def _index_reservation(self, reservation: ReservationRow) -> None:
        if reservation.phase is not ReservationState.ENDED:
            self.reserved[reservation.id] = MachinePool()
            if reservation.owner:
                self.reserved_by.setdefault(reservation.owner, {})[reservation.id] = None
        for unit in reservation.units:
            for host in unit.hosts:
                self.pool.take(host.node, reservation.demand_of(unit), host.devices)
                self.shares.count(*self._charged_unit(reservation, unit, host), 1, self.now)
                self.units_on.setdefault(host.node, {})[reservation.id] = None
        for node in self._nodes_of(reservation):
            self._rebuild(reservation, node)
        self._reindex(reservation)

    def _nodes_of(self, reservation: ReservationRow) -> dict[NodeName, None]:
        return {node: None for unit in reservation.units for node in unit.nodes}

    def _reindex(self, reservation: ReservationRow) -> None:
        name = reservation.id
        has = {
            "lending": reservation.spare > 0,
            "unsettled": reservation.phase is ReservationState.CLOSING or any(u.leaving for u in reservation.units),
        }
        for index, belongs in has.items():
            if belongs:
                getattr(self, index)[name] = None
            else:
                getattr(self, index).pop(name, None)
        self.timers.set((RESERVATION, name), reservation.next_time)
        self._queue_reservation(reservation)
        if reservation.phase is ReservationState.ENDED and name not in self.reserved_over:
            self._index_over(reservation)

    def _index_over(self, reservation: ReservationRow) -> None:
        discard(self.reserved_by, reservation.owner, reservation.id)
        self.reserved.pop(reservation.id, None)
        self.stirred.pop(reservation.id, None)
        self.reserved_over[reservation.id] = None

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
            return self._owed(reservation, spec.min_units)
        if phase is ReservationState.DEGRADED:
            return self._owed(reservation, 1)
        grows = len(reservation.units) < spec.max_units and not reservation.grows_from
        if phase is not ReservationState.HELD or not grows:
            return None
        return Applicant(
            f"growth:{reservation.id}",
            PlacementShape(reservation.ask(1), growth=True),
            GROWTH_ORDER + reservation.order,
            NEVER,  # what may be had is never owed: it cannot starve
            ApplicantKind.GROWTH,
            reservation.band,
            self.shares.tenant(spec.user, spec.namespace),
            priority=spec.priority,
        )

    def _owed(self, reservation: ReservationRow, units: int) -> Applicant:
        spec = reservation.spec
        return Applicant(
            f"reservation:{reservation.id}",
            PlacementShape(reservation.ask(units), bool(reservation.owner) and reservation.owner != reservation.root),
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
            self.charge(*self._charged_unit(reservation, unit, host), 1)
        for node in unit.nodes:
            self.units_on.setdefault(node, {})[reservation.id] = None
            self._rebuild(reservation, node)

    def _charged_unit(self, reservation: ReservationRow, unit: ReservedUnit, host: Host) -> tuple[Tenant, Demand, str]:
        """All of it is its user's, whoever runs in it."""
        tenant = self.shares.tenant(reservation.spec.user, reservation.spec.namespace)
        return tenant, reservation.demand_of(unit), self.variant_of(host.node, host.devices)

    def unit_leaves(self, reservation: ReservationRow, unit: ReservedUnit) -> None:
        """Nothing new is placed on its machines."""
        for node in unit.nodes:
            self._open_reserved(reservation, node)

    def drop_unit(self, reservation: ReservationRow, unit: ReservedUnit, only: NodeName | None = None) -> None:
        """Its share is the fleet's again: all of it, or what it had of one machine."""
        going = [host for host in unit.hosts if only in (None, host.node)]
        unit.hosts = tuple(host for host in unit.hosts if host not in going)
        if not unit.hosts:
            reservation.units.remove(unit)
        for host in going:
            self.pool.release(host.node, reservation.demand_of(unit), host.devices)
            self.charge(*self._charged_unit(reservation, unit, host), -1)
        for node in dict.fromkeys(host.node for host in going):
            if not any(node in other.nodes for other in reservation.units):
                discard(self.units_on, node, reservation.id)
            self._rebuild(reservation, node)

    def expect_inside(self, reservation_id: ReservationId, node: NodeName) -> None:
        """An attempt of it lives there, with a unit or (if it takes nothing) without."""
        if reservation_id and node not in self.reserved[reservation_id].machines:
            self._rebuild(self.reservations[reservation_id], node, is_used=True)

    def _rebuild(self, reservation: ReservationRow, node: NodeName, is_used: bool = False) -> None:
        """Its machine of this node, as units and attempts say."""
        pool = self.reserved[reservation.id]
        inside = self.attempts_inside(reservation.id, node)
        units = [unit for unit in reservation.units if node in unit.nodes]
        if not (units or inside or is_used):
            pool.remove(node)
            return
        pool.add(node, self._sum(reservation, units, node), False)
        pool.machines[node].ports = self.pool.machines[node].ports
        for attempt in inside:
            pool.take(node, self.demand(self.jobs[attempt.job_id]), attempt.devices)
        self._open_reserved(reservation, node)

    def attempts_inside(self, reservation_id: ReservationId, node: NodeName) -> list[AttemptRow]:
        """Living ones on this node."""
        here = (self.attempts[attempt_id] for attempt_id in self.on_node[node])
        return [attempt for attempt in here if self.jobs[attempt.job_id].spec.reservation_id == reservation_id]

    def _sum(self, reservation: ReservationRow, units: list[ReservedUnit], node: NodeName) -> Capacity:
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

    def _open_reserved(self, reservation: ReservationRow, name: NodeName) -> None:
        """Whether anything may be placed on its machine of this node, and on which devices."""
        pool, node = self.reserved[reservation.id], self.nodes[name]
        if name in pool.machines:
            units = [unit for unit in reservation.units if name in unit.nodes]
            pool.set_open(name, bool(units) and takes_work(node) and not any(unit.leaving for unit in units))
            pool.withhold(name, node.busy)
            self.stirred[reservation.id] = None

    def reserved_on(self, name: NodeName) -> None:
        """The node has changed, and with it the machines that reservations have of it."""
        for reservation_id in self.units_on.get(name, ()):
            self._open_reserved(self.reservations[reservation_id], name)

    def vacated_inside(self, reservation_id: ReservationId, name: NodeName) -> None:
        """An attempt in it has ended. One that took nothing may have been all it still had on this node."""
        self.stirred[reservation_id] = None
        if reservation_id not in self.units_on.get(name, ()):
            self._rebuild(self.reservations[reservation_id], name)

    def ports_released(self, name: NodeName) -> None:
        """They are those of all machines of this node."""
        self.pool.freed[name] = None
        for reservation_id in self.units_on.get(name, ()):
            if name in self.reserved[reservation_id].machines:
                self.reserved[reservation_id].freed[name] = None
                self.stirred[reservation_id] = None
