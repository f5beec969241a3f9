"""Reservations: what users request, what is sent, and the state clients see."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from attrs import Factory, evolve

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.ids import JobId, Namespace, NodeName
from fray.model.policy.priority import Band, parse_band
from fray.model.resources import CpuConfig, Demand, GpuConfig, ResourceConfig, TpuConfig

ReservationId: TypeAlias = str
"""``{name}-{token}``, like job ids."""

TTL_LIMIT_S = 366 * 86_400.0
NOTICE_LIMIT_S = 3600.0
UNITS_LIMIT = 10_000
EXPIRY_NOTICE_S = 60.0
"""Seconds before its end at which an expiring reservation warns; half its time to live, if that is less."""
EVENTS_LIMIT = 64
"""Number of past events that a reservation keeps."""


# Requests ------------------------------------------------------------------------------------------------------------


@frozen
class ReservationConfig:
    """Machines to hold for future jobs.

    They are counted in units: a unit is one replica of ``min_resources`` (or ``max_resources``); for a TPU type of
    several hosts, one whole slice. Minimum and maximum describe the same replica and differ in ``replicas``. If
    they differ in amounts instead (``cpu=4`` and ``cpu=16``), the maximum counts as a multiple of the minimum, and has
    to be a whole one.

    Attributes:
        min_resources: guaranteed once held. None: nothing is guaranteed, only surplus machines are used.
        max_resources: limit of its growth, unit by unit, into machines no job is waiting for. Default: the minimum.
        priority: among reservations, the higher grows first and shrinks last. Default 0.
        ttl_seconds: lifetime from its creation, from the moment its minimum is held, and from each renewal. Default
            3600.
        preemptible: an earlier band may take all of it; it then waits for its minimum again. Default True.
        name: display name and prefix of its id. Default ``"reservation"``.
        band: priority band: ``system``, ``production``, ``interactive``, ``batch``. Default: the band of the job that
            creates it, else interactive.
        notice_s: seconds between the reclaim of a unit in use and the termination of its jobs. Default 5; 0: at once.
        detached: owned by the cluster: it outlives the job or driver that created it. Default False.
    """

    min_resources: ResourceConfig | None = None
    max_resources: ResourceConfig | None = None
    priority: int = 0
    ttl_seconds: float = 3600
    preemptible: bool = True
    name: str = "reservation"
    band: Band | str | None = None
    notice_s: float = 5.0
    detached: bool = False

    def unit(self) -> tuple[ResourceConfig, int, int]:
        """Return the resources of one unit, and the minimum and maximum number of units.

        Raises:
            InvalidRequest: neither minimum nor maximum, minimum above maximum, or two of different kinds.
        """
        for what in ("min_resources", "max_resources"):
            value = getattr(self, what)
            if value is not None and not isinstance(value, ResourceConfig):
                raise InvalidRequest(f"ReservationConfig({what}={value!r}) must be a ResourceConfig or None")
        least, most = self.min_resources, self.max_resources
        if least is None and most is None:
            raise InvalidRequest("ReservationConfig needs min_resources=, max_resources=, or both")
        unit = _single_replica(most if least is None or (most is not None and not least.replicas) else least)
        least_units = _replicas(least, "min_resources") if least is not None else 0
        most_units = least_units
        if most is not None:
            most_units = _replicas(most, "max_resources") * _units_per_replica(unit, _single_replica(most))
        if most_units < 1:
            raise InvalidRequest("empty reservation: max_resources must have 1 replica or more")
        if least_units > most_units:
            raise InvalidRequest(
                f"min_resources ({least_units} units) is more than max_resources ({most_units}): swap them"
            )
        if most_units > UNITS_LIMIT:
            raise InvalidRequest(f"a reservation has at most {UNITS_LIMIT} units, not {most_units}")
        return unit, least_units, most_units

    def checked_band(self) -> Band | None:
        """Return the priority band. Raises InvalidRequest: an unknown band."""
        return None if self.band is None else parse_band(self.band, "ReservationConfig")


def _single_replica(resources: ResourceConfig | None) -> ResourceConfig:
    assert resources is not None
    return evolve(resources, replicas=1)


def _replicas(resources: ResourceConfig, what: str) -> int:
    count = resources.replicas
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise InvalidRequest(f"{what}: replicas={count!r} must be a whole number, 0 or more")
    return count


_AMOUNTS = {
    "cpu_milli": "milli-CPUs",
    "memory_bytes": "bytes of memory",
    "disk_bytes": "bytes of disk",
    "device_count": "devices",
}


def _units_per_replica(unit: ResourceConfig, whole: ResourceConfig) -> int:
    """Return how many units make one replica of the maximum."""
    small, large = unit.demand(), whole.demand()
    if _without_amounts(small) != _without_amounts(large):
        raise InvalidRequest(
            "min_resources and max_resources must describe the same replica and differ in replicas: these differ in "
            "their devices, places or kinds of machines"
        )
    is_default = unit.memory is None and whole.memory is None  # neither gives an amount
    amounts = [name for name in _AMOUNTS if name != "memory_bytes" or not is_default]
    pairs = {name: (getattr(small, name), getattr(large, name)) for name in amounts}
    ratios = {have / want if want else 0.0 for want, have in pairs.values() if (want, have) != (0, 0)}
    times = ratios.pop() if len(ratios) == 1 else 0.0
    if times < 1 or times != int(times):
        different = [name for name, (want, have) in pairs.items() if have != want]
        differences = ", ".join(f"{_AMOUNTS[name]} {pairs[name][0]} and {pairs[name][1]}" for name in different)
        raise InvalidRequest(
            f"max_resources is not a whole multiple of min_resources ({differences}): describe one replica in "
            "both, and their number in replicas=, as in ResourceConfig(cpu=4, replicas=4)"
        )
    return int(times)


def _without_amounts(demand: Demand) -> Demand:
    return evolve(demand, cpu_milli=0, memory_bytes=0, disk_bytes=0, device_count=0)


@frozen(kw_only=True)
class ReservationSpec:
    """One reservation as requested by its author."""

    reservation_id: ReservationId
    name: str
    demand: Demand
    """Demand on one host of a unit."""
    alternatives: tuple[Demand, ...] = ()
    """Alternative devices, as in `JobSpec`."""
    hosts: int = 1
    """Number of machines of a unit (the hosts of one TPU slice)."""
    min_units: int = 0
    max_units: int = 1
    priority: int = 0
    ttl_s: float = 3600.0
    preemptible: bool = True
    band: Band | None = None
    notice_s: float = 5.0
    detached: bool = False
    namespace: Namespace = ""
    user: str = ""


def check_reservation(spec: ReservationSpec) -> None:
    """Raise InvalidRequest unless all amounts are valid."""
    what = f"reservation {spec.name!r}"
    if not 0 <= spec.min_units <= spec.max_units or not 1 <= spec.max_units <= UNITS_LIMIT or spec.hosts < 1:
        raise InvalidRequest(f"{what}: {spec.min_units} to {spec.max_units} units is not a valid range")
    if not _is_finite_number(spec.ttl_s) or not 0 < spec.ttl_s <= TTL_LIMIT_S:
        raise InvalidRequest(f"{what}: ttl_seconds={spec.ttl_s!r} must be more than 0, and {TTL_LIMIT_S:.0f} at most")
    if not _is_finite_number(spec.notice_s) or not 0 <= spec.notice_s <= NOTICE_LIMIT_S:
        raise InvalidRequest(f"{what}: notice_s={spec.notice_s!r} must be 0 to {NOTICE_LIMIT_S:.0f} seconds")
    if not isinstance(spec.priority, int) or isinstance(spec.priority, bool) or abs(spec.priority) > 1_000_000:
        raise InvalidRequest(f"{what}: priority={spec.priority!r} must be a whole number within a million of 0")
    demand = spec.demand
    if not any((demand.cpu_milli, demand.memory_bytes, demand.disk_bytes, demand.device_count)):
        raise InvalidRequest(f"{what} is empty: request CPUs, memory, disk or devices")


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


# State ---------------------------------------------------------------------------------------------------------------


class ReservationState(StrEnum):
    WAITING = "waiting"
    """Minimum not reached yet, or taken by an earlier band: all of it waits."""
    HELD = "held"
    """Minimum or more is held."""
    DEGRADED = "degraded"
    """Units were lost to dead machines; less than the minimum is held now."""
    CLOSING = "closing"
    """Being released; what runs in it is being ended."""
    ENDED = "ended"

    @property
    def finished(self) -> bool:
        return self in (ReservationState.CLOSING, ReservationState.ENDED)


class ReservationEventKind(StrEnum):
    """Kind of a reservation's event."""

    HELD = "held"
    """Minimum reached: the event's units are all it holds."""
    GROWN = "grown"
    """One more unit is held."""
    SHRINKING = "shrinking"
    """A unit is being reclaimed: ``jobs`` will be ended in ``notice_s`` seconds."""
    SHRUNK = "shrunk"
    """A reclaimed unit has been released."""
    LOST = "lost"
    """A machine was lost, and its unit with it."""
    PREEMPTED = "preempted"
    """An earlier band takes all of it."""
    EXPIRING = "expiring"
    """Ends in ``notice_s`` seconds unless renewed."""
    RENEWED = "renewed"
    CLOSING = "closing"
    """Ends now: released, expired, or with its owner (``text`` says which)."""
    ENDED = "ended"
    """All units are released."""
    MISSED = "missed"
    """The listener missed more events than are kept; ``info`` has the current state."""


@frozen(kw_only=True)
class ReservationEvent:
    """One event of a reservation."""

    number: int
    """Sequence number from 1, without gaps."""
    kind: ReservationEventKind
    time: float
    """Seconds since the epoch, by the controller's clock."""
    unit: int | None = None
    """Number of the unit; never reused."""
    nodes: tuple[NodeName, ...] = ()
    jobs: tuple[JobId, ...] = ()
    notice_s: float = 0.0
    text: str = ""


@frozen(kw_only=True)
class UnitInfo:
    """One held unit."""

    number: int
    nodes: tuple[NodeName, ...]
    """Machine of the unit, or the hosts of its slice."""
    devices: tuple[str, ...] = ()
    leaving: bool = False
    """Being reclaimed."""


@frozen(kw_only=True)
class ReservationInfo:
    """A reservation's state. Times are seconds since the epoch."""

    reservation_id: ReservationId
    demand: Demand
    """Demand on one host of a unit."""
    jobs: tuple[JobId, ...]
    """Jobs inside that have not ended, oldest first."""
    expires_at: float
    state: ReservationState
    name: str = ""
    namespace: Namespace = ""
    user: str = ""
    owner: str = ""
    """Session or attempt whose end ends it; empty when detached."""
    band: Band = Band.INTERACTIVE
    priority: int = 0
    preemptible: bool = True
    ttl_s: float = 3600.0
    notice_s: float = 5.0
    hosts: int = 1
    min_units: int = 0
    max_units: int = 1
    units: tuple[UnitInfo, ...] = ()
    """All held units, including those being reclaimed."""
    reason: str = ""
    """Reason for waiting, or for its end."""
    events: tuple[ReservationEvent, ...] = Factory(tuple)
    """Latest events, oldest first."""
    created_at: float = 0.0
    held_at: float | None = None
    """Time when its minimum was first held."""
    ended_at: float | None = None

    @property
    def held_units(self) -> int:
        """Number of held units that are not being reclaimed."""
        return sum(not unit.leaving for unit in self.units)

    @property
    def allocated_resources(self) -> ResourceConfig:
        """Resources held: one unit, and the number of units in ``replicas`` (0: none yet)."""
        return resources_of(self.demand, self.held_units)

    @property
    def pending_resources(self) -> ResourceConfig:
        """Resources still missing up to its maximum, in the same form."""
        waits = 0 if self.state.finished else self.max_units - self.held_units
        return resources_of(self.demand, waits)


def resources_of(demand: Demand, replicas: int) -> ResourceConfig:
    """Return ``replicas`` units as a `ResourceConfig`."""
    return ResourceConfig(
        device=_device(demand),
        cpu=demand.cpu_milli / 1000,
        memory=demand.memory_bytes,
        disk=demand.disk_bytes,
        replicas=replicas,
        preemptible=demand.preemptible,
        regions=demand.regions,
        zones=demand.zones,
        constraints=demand.constraints,
    )


def _device(demand: Demand) -> CpuConfig | GpuConfig | TpuConfig:
    if demand.device_kind == "tpu":
        return TpuConfig(variant=demand.device_variant)
    if demand.device_kind == "gpu":
        return GpuConfig(variant=demand.device_variant, count=demand.device_count)
    return CpuConfig()
