"""Row of a reservation and of its units, with what can be read from it alone."""

from __future__ import annotations

from attrs import Factory, define, frozen

from fray.model.ids import JobId, NodeName, SessionId
from fray.model.policy.priority import Band
from fray.model.reservations import EXPIRY_NOTICE_S, ReservationEvent, ReservationId, ReservationSpec, ReservationState
from fray.model.resources import Demand
from fray.model.specs import EndReason
from fray.scheduler.pool.requests import MemberGroup, PlacementRequest

HELD_NODES_LIMIT = 1_000


@frozen
class Host:
    """One machine's part of a unit."""

    node: NodeName
    devices: tuple[str, ...] = ()


@define(kw_only=True)
class ReservedUnit:
    """One unit a reservation holds; its share is taken out of the cluster's pool."""

    number: int
    hosts: tuple[Host, ...]
    """One host, or all hosts of its slice; fewer once a machine of it is lost."""
    choice: int = 0
    """Index of the alternative devices it has."""
    leaving: bool = False
    """True if it is being released or has lost a host: nothing new is placed on its machines."""
    leaves_at: float | None = None
    """End of its notice while it is leaving; None once its jobs are being stopped."""
    jobs_to_end: tuple[JobId, ...] = ()
    """Jobs that have to end before it is released."""
    reason: str = ""
    lost: bool = False

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        return tuple(dict.fromkeys(host.node for host in self.hosts))

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for host in self.hosts for device in host.devices)


@define(kw_only=True)
class ReservationRow:
    spec: ReservationSpec
    order: int
    """Place in the order of acceptance."""
    owner: str
    """Session or attempt whose end ends it; empty when detached."""
    root: SessionId = ""
    created_by: SessionId = ""
    created_at: float = 0.0
    band: Band = Band.INTERACTIVE
    phase: ReservationState = ReservationState.WAITING
    queued_at: float = 0.0
    """Time since which it waits for its minimum."""
    expires_at: float = 0.0
    warned: bool = False
    """True if its expiry was announced."""
    held_at: float | None = None
    ended_at: float | None = None
    units: list[ReservedUnit] = Factory(list)
    last_unit: int = 0
    """Number of the last unit it was given."""
    held_nodes: tuple[NodeName, ...] = ()
    """Machines of the units it was given, in that order; at most the first `HELD_NODES_LIMIT`."""
    revoked_at: tuple[float, ...] = ()
    """Times of the last seizures of the whole reservation by an earlier band."""
    grow_not_before: float = 0.0
    """Earliest time of its next growth, after it has released a unit that was in use."""
    events: tuple[ReservationEvent, ...] = ()
    last_event: int = 0
    """Number of the last event."""
    reason: str = ""
    """Reason of its end."""
    ended_by: str = ""
    stop_cause: EndReason | None = None
    """Cause with which the jobs inside end, while CLOSING."""

    @property
    def id(self) -> ReservationId:
        return self.spec.reservation_id

    @property
    def is_closed(self) -> bool:
        return self.phase.finished

    @property
    def staying_units(self) -> list[ReservedUnit]:
        """Units that are not being released."""
        return [unit for unit in self.units if not unit.leaving]

    @property
    def leaving_units(self) -> list[ReservedUnit]:
        """Units that are being released: all of them if it is being closed."""
        return [unit for unit in self.units if unit.leaving or self.is_closed]

    @property
    def surplus_units(self) -> int:
        """Number of units beyond its minimum."""
        return 0 if self.is_closed else max(0, len(self.staying_units) - self.spec.min_units)

    def demand_of(self, unit: ReservedUnit) -> Demand:
        """Return the demand of one host of a unit."""
        return (self.spec.demand, *self.spec.alternatives)[unit.choice]

    def request_for(self, units: int) -> PlacementRequest:
        """Return the request for that many units at once."""
        hosts = self.spec.hosts
        choices = (self.spec.demand, *self.spec.alternatives)
        return PlacementRequest((MemberGroup(choices, units * hosts, hosts if hosts > 1 else 0),))

    @property
    def next_deadline(self) -> float | None:
        """Next time at which something of it is due."""
        if self.phase is ReservationState.ENDED:
            return None
        times = [unit.leaves_at for unit in self.units if unit.leaves_at is not None]
        # It has neither expiry nor growth any more.
        if self.phase is ReservationState.CLOSING:
            return min(times, default=None)
        if self.phase is ReservationState.HELD and self.grow_not_before and len(self.units) < self.spec.max_units:
            times.append(self.grow_not_before)
        return min([*times, self.expires_at if self.warned else self.warns_at])

    @property
    def warns_at(self) -> float:
        """Time at which its expiry is announced."""
        # A short reservation is warned half-way: with the whole notice the warning would come at its start.
        return self.expires_at - min(EXPIRY_NOTICE_S, self.spec.ttl_s / 2)
