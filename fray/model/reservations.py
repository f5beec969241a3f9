"""Reservations in words: what a user asks for, what travels, and what is told of one."""

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
"""``{name}-{token}``, as job ids."""

TTL_LIMIT_S = 366 * 86_400.0
NOTICE_LIMIT_S = 3600.0
UNITS_LIMIT = 10_000
EXPIRY_NOTICE_S = 60.0
"""So long before its end an expiring reservation warns; half its time to live, if that is less."""
EVENTS_LIMIT = 64
"""Changes of a reservation that are remembered."""


# What is asked --------------------------------------------------------------------------------------------------------


@frozen
class ReservationConfig:
    """Machines to be held for jobs to come (seed 000).

    They are counted in units: a unit is one replica of ``min_resources`` (or ``max_resources``); of a TPU type of
    several hosts it is one whole slice. Minimum and maximum describe the same replica and differ in ``replicas``. If
    they differ in amounts instead (``cpu=4`` and ``cpu=16``), the maximum counts as so many times the minimum, and has
    to be a whole multiple of it.

    Attributes:
        min_resources: held for sure once it is there. None: nothing, it takes what is left over.
        max_resources: grown to, unit by unit, while nobody else has a use for it. Default: the minimum.
        priority: among reservations, the higher grows first and gives back last. Default 0.
        ttl_seconds: how long it lasts from its creation, from the moment its minimum is held, and from each renewal.
            Default 3600.
        preemptible: an earlier band may take all of it; it waits for its minimum again then. Default True.
        name: for people; ids begin with it. Default ``"reservation"``.
        band: whose turn it is to be placed: ``system``, ``production``, ``interactive``, ``batch``. Default: of the job
            that asks for it, else interactive.
        notice_s: how long a unit in use stays after it was asked back, so that what runs on it can be put away, before
            its jobs are ended by their ladders. Default 5; 0: at once.
        detached: it outlives whoever created it. Default False.
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
        """What one unit is, and how many of them at least and at most.

        Raises:
            InvalidRequest: neither minimum nor maximum, minimum above maximum, or two that are not of one kind.
        """
        for what in ("min_resources", "max_resources"):
            value = getattr(self, what)
            if value is not None and not isinstance(value, ResourceConfig):
                raise InvalidRequest(f"ReservationConfig({what}={value!r}) must be a ResourceConfig or None")
        least, most = self.min_resources, self.max_resources
        if least is None and most is None:
            raise InvalidRequest("ReservationConfig needs min_resources=, max_resources=, or both")
        unit = _one(most if least is None or (most is not None and not least.replicas) else least)
        least_units = _replicas(least, "min_resources") if least is not None else 0
        most_units = least_units if most is None else _replicas(most, "max_resources") * _times(unit, _one(most))
        if most_units < 1:
            raise InvalidRequest("a reservation of nothing: max_resources must have 1 replica or more")
        if least_units > most_units:
            raise InvalidRequest(
                f"min_resources ({least_units} units) is more than max_resources ({most_units}): exchange them"
            )
        if most_units > UNITS_LIMIT:
            raise InvalidRequest(f"a reservation has at most {UNITS_LIMIT} units, not {most_units}")
        return unit, least_units, most_units

    def checked_band(self) -> Band | None:
        """Raises InvalidRequest: there is none of this name."""
        return None if self.band is None else parse_band(self.band, "ReservationConfig")


def _one(resources: ResourceConfig | None) -> ResourceConfig:
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


def _times(unit: ResourceConfig, whole: ResourceConfig) -> int:
    """How many units make one replica of the maximum."""
    small, large = unit.demand(), whole.demand()
    if _bare(small) != _bare(large):
        raise InvalidRequest(
            "min_resources and max_resources must describe the same replica and differ in replicas: these differ in "
            "their devices, places or kinds of machines"
        )
    is_default = unit.memory is None and whole.memory is None  # nobody has said how much
    amounts = [name for name in _AMOUNTS if name != "memory_bytes" or not is_default]
    pairs = {name: (getattr(small, name), getattr(large, name)) for name in amounts}
    ratios = {have / want if want else 0.0 for want, have in pairs.values() if (want, have) != (0, 0)}
    times = ratios.pop() if len(ratios) == 1 else 0.0
    if times < 1 or times != int(times):
        told = ", ".join(f"{_AMOUNTS[name]} {want} and {have}" for name, (want, have) in pairs.items() if have != want)
        raise InvalidRequest(
            f"max_resources is no whole multiple of min_resources ({told}): describe one replica in both, and how many "
            "in replicas=, as in ResourceConfig(cpu=4, replicas=4)"
        )
    return int(times)


def _bare(demand: Demand) -> Demand:
    """Without amounts."""
    return evolve(demand, cpu_milli=0, memory_bytes=0, disk_bytes=0, device_count=0)


@frozen(kw_only=True)
class ReservationSpec:
    """One reservation as its author asks for it."""

    reservation_id: ReservationId
    name: str
    demand: Demand
    """Of one host of a unit."""
    alternatives: tuple[Demand, ...] = ()
    """Any-of devices, as in `JobSpec`."""
    hosts: int = 1
    """Machines of a unit: those of one TPU slice."""
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
    """Raises InvalidRequest: an amount that cannot be."""
    what = f"reservation {spec.name!r}"
    if not 0 <= spec.min_units <= spec.max_units or not 1 <= spec.max_units <= UNITS_LIMIT or spec.hosts < 1:
        raise InvalidRequest(f"{what}: {spec.min_units} to {spec.max_units} units cannot be")
    if not _number(spec.ttl_s) or not 0 < spec.ttl_s <= TTL_LIMIT_S:
        raise InvalidRequest(f"{what}: ttl_seconds={spec.ttl_s!r} must be more than 0, and {TTL_LIMIT_S:.0f} at most")
    if not _number(spec.notice_s) or not 0 <= spec.notice_s <= NOTICE_LIMIT_S:
        raise InvalidRequest(f"{what}: notice_s={spec.notice_s!r} must be 0 to {NOTICE_LIMIT_S:.0f} seconds")
    if not isinstance(spec.priority, int) or isinstance(spec.priority, bool) or abs(spec.priority) > 1_000_000:
        raise InvalidRequest(f"{what}: priority={spec.priority!r} must be a whole number within a million of 0")
    demand = spec.demand
    if not any((demand.cpu_milli, demand.memory_bytes, demand.disk_bytes, demand.device_count)):
        raise InvalidRequest(f"{what} is of nothing: ask for CPUs, memory, disk or devices")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


# What is told ---------------------------------------------------------------------------------------------------------


class ReservationState(StrEnum):
    WAITING = "waiting"
    """Its minimum has not been had yet, or was taken by an earlier band: all of it waits."""
    HELD = "held"
    """It has its minimum, or more."""
    DEGRADED = "degraded"
    """It has lost units to dead machines and has less than its minimum now."""
    CLOSING = "closing"
    """It is being given back; what runs in it is being ended."""
    ENDED = "ended"

    @property
    def finished(self) -> bool:
        return self in (ReservationState.CLOSING, ReservationState.ENDED)


class ReservationEventKind(StrEnum):
    """What can happen to a reservation."""

    HELD = "held"
    """Its minimum is there: the units it names are all there are."""
    GROWN = "grown"
    """One unit more."""
    SHRINKING = "shrinking"
    """A unit was asked back: ``jobs`` will be ended in ``notice_s`` seconds."""
    SHRUNK = "shrunk"
    """It has been given back."""
    LOST = "lost"
    """A machine of it is gone, and so is the unit."""
    PREEMPTED = "preempted"
    """An earlier band takes all of it."""
    EXPIRING = "expiring"
    """In ``notice_s`` seconds it ends, unless it is renewed."""
    RENEWED = "renewed"
    CLOSING = "closing"
    """It ends now: released, expired, or with its owner (``text`` says which)."""
    ENDED = "ended"
    """Nothing of it is left."""
    MISSED = "missed"
    """This listener has been away for more changes than are kept: look at ``info`` for what there is."""


@frozen(kw_only=True)
class ReservationEvent:
    """One thing that has happened to a reservation."""

    number: int
    """They are numbered from 1, without a gap."""
    kind: ReservationEventKind
    time: float
    """Seconds since the epoch, by the controller's clock."""
    unit: int | None = None
    """Which unit; numbers are never used again."""
    nodes: tuple[NodeName, ...] = ()
    jobs: tuple[JobId, ...] = ()
    notice_s: float = 0.0
    text: str = ""


@frozen(kw_only=True)
class UnitInfo:
    """One unit that is held."""

    number: int
    nodes: tuple[NodeName, ...]
    """One, or the hosts of its slice."""
    devices: tuple[str, ...] = ()
    leaving: bool = False
    """It was asked back."""


@frozen(kw_only=True)
class ReservationInfo:
    """A reservation's state. The first five are seed 000's; times are seconds since the epoch."""

    reservation_id: ReservationId
    demand: Demand
    """Of one host of a unit."""
    jobs: tuple[JobId, ...]
    """Those inside that have not ended, oldest first."""
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
    """All it holds, also those that were asked back."""
    reason: str = ""
    """Why it waits, or why it has ended."""
    events: tuple[ReservationEvent, ...] = Factory(tuple)
    """The last ones, oldest first."""
    created_at: float = 0.0
    held_at: float | None = None
    """When it first had its minimum."""
    ended_at: float | None = None

    @property
    def held_units(self) -> int:
        """Without those that were asked back."""
        return sum(not unit.leaving for unit in self.units)

    @property
    def allocated_resources(self) -> ResourceConfig:
        """What it holds: one unit, and how many of them in ``replicas`` (0: none yet)."""
        return resources_of(self.demand, self.held_units)

    @property
    def pending_resources(self) -> ResourceConfig:
        """What it still waits for, up to its maximum, in the same way."""
        waits = 0 if self.state.finished else self.max_units - self.held_units
        return resources_of(self.demand, waits)


def resources_of(demand: Demand, replicas: int) -> ResourceConfig:
    """The user's word for so many units."""
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
