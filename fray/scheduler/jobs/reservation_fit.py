"""Whether a job fits into the reservation that it names."""

from __future__ import annotations

from attrs import evolve

from fray.errors import NeverSchedulable
from fray.model.reservations import ReservationSpec
from fray.model.resources import Capacity, Demand, Device
from fray.model.specs import JobSpec
from fray.scheduler.pool.pool import members_held
from fray.scheduler.pool.requests import part_of
from fray.scheduler.pool.resource_text import needs
from fray.scheduler.state.state import State


def check_fits_reservation(state: State, spec: JobSpec) -> None:
    """Whether a job may be launched in the reservation it names.

    Raises:
        NoSuchReservation: there is none, or it is over.
        NeverSchedulable: it would not fit if the reservation had all it may have, on machines as large as can be.
    """
    reservation = state.open_reservation(spec.reservation_id)
    most = _at_most(reservation.spec)
    part = part_of(spec)
    for demand in part.choices:
        asked = evolve(demand, preemptible=True, containers=False, ports=0, regions=(), zones=())
        if (
            _together(demand, reservation.spec.demand)
            and sum(members_held(asked, capacity) for capacity in most) >= part.members
        ):
            return
    gang = f"{part.members} members of " if part.members > 1 else ""
    raise NeverSchedulable(
        f"job {spec.name!r} can never run in reservation {reservation.id}: it needs {gang}{needs(spec.demand)}, and "
        f"that one has at most {reservation.spec.max_units} units of {needs(reservation.spec.demand)}",
        name=spec.name,
        reservation_id=reservation.id,
    )


def _together(one: Demand, other: Demand) -> bool:
    """Their places do not exclude each other."""
    pairs = ((one.regions, other.regions), (one.zones, other.zones))
    return all(not mine or not theirs or set(mine) & set(theirs) for mine, theirs in pairs)


def _at_most(spec: ReservationSpec) -> list[Capacity]:
    """Its machines if it had all its units: in one machine, or of several hosts, one each."""
    found = []
    for demand in (spec.demand, *spec.alternatives):
        pieces, machines = (spec.max_units, 1) if spec.hosts == 1 else (1, spec.max_units * spec.hosts)
        count = demand.device_count * pieces
        devices = tuple(
            Device(f"device-{number}", demand.device_kind or "", demand.device_variant) for number in range(count)
        )
        size = demand.cpu_milli * pieces, demand.memory_bytes * pieces, demand.disk_bytes * pieces
        found += [Capacity(*size, devices)] * machines
    return found
