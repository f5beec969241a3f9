"""Estimate of the units that would hold what waits: bin packing on empty machines.

`PackingEstimate` gets the stock of units on their way, the units that are offered, and then one request after another.
It fills the stock first, then the cheapest group that can hold the request. Equal units are counted, not iterated: a
thousand machines are one entry of the stock, so the cost grows with the kinds of machines and of requests, not with
their number.

The result is an estimate: a gang counts places one by one, and machines that have joined are in the pool (see `plan`).
Too few units are corrected by the next plan, too many are deleted when they have been idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import TypeAlias

from attrs import define, field, frozen

from fray.model.resources import Capacity, Demand
from fray.scheduler.pool.pool import AUTO, Machine, Variant, admits_demand
from fray.scheduler.pool.requests import MemberGroup, PlacementRequest
from fray.scheduler.reasons import Reason, ReasonKind

_MANY = 1 << 30
GroupZone: TypeAlias = tuple[str, str]
"""(group, zone)."""


@frozen(cache_hash=True)
class HostRoom:
    """Capacity that one host has left."""

    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    ports: int
    devices: tuple[tuple[Variant, int], ...] = ()

    @classmethod
    def empty(cls, capacity: Capacity) -> HostRoom:
        counts = Machine.empty("", capacity).device_counts
        size = capacity.cpu_milli, capacity.memory_bytes, capacity.disk_bytes, capacity.ports.count
        return cls(*size, tuple(sorted(counts.items())))


@frozen
class UnitOffer:
    """Units of a group that can be requested in one of its zones."""

    group: str
    zone: str
    capacity: Capacity
    """Capacity of one host."""
    hosts: int = 1
    price_per_hour: float = 0.0
    closed: Reason | None = None
    """Reason why none can be requested there now; None: they can."""

    @property
    def group_zone(self) -> GroupZone:
        return self.group, self.zone

    def locality(self, same: str) -> str:
        """Return the region or zone of its machines, for a request whose parts must share it."""
        return self.capacity.attributes.get(same, "") if same else ""


# A key of the stock: equal units with equal rooms are one entry, however many there are.
@frozen(cache_hash=True)
class PackedUnit:
    """Unit that is on its way, or would be requested, with the capacity each host has left."""

    group_zone: GroupZone
    rooms: tuple[HostRoom, ...]


def members_that_fit(demand: Demand, room: HostRoom) -> int:
    """Return how many members the host still holds."""
    pairs = (
        (room.cpu_milli, demand.cpu_milli),
        (room.memory_bytes, demand.memory_bytes),
        (room.disk_bytes, demand.disk_bytes),
        (room.ports, demand.ports),
    )
    count = min((have // want for have, want in pairs if want), default=_MANY)
    if not demand.device_count:
        return count
    return min(count, sum(have // demand.device_count for _, have in _serving(demand, room)))


def _serving(demand: Demand, room: HostRoom) -> list[tuple[Variant, int]]:
    wanted = demand.device_variant.lower()
    return [(v, have) for v, have in room.devices if v[0] == demand.device_kind and wanted in (AUTO, v[1])]


def with_members(demand: Demand, room: HostRoom, members: int) -> HostRoom:
    """Return the same host with so many members on it; they fit."""
    devices = dict(room.devices)
    left = members if demand.device_count else 0
    # Best fit, as in the pool: larger groups of devices stay whole.
    for variant, have in sorted(_serving(demand, room), key=lambda item: (item[1], item[0])):
        here = min(left, have // demand.device_count)
        devices[variant] -= here * demand.device_count
        left -= here
    return HostRoom(
        room.cpu_milli - members * demand.cpu_milli,
        room.memory_bytes - members * demand.memory_bytes,
        room.disk_bytes - members * demand.disk_bytes,
        room.ports - members * demand.ports,
        tuple(sorted(devices.items())),
    )


@define
class PackingEstimate:
    """Estimate for one plan.

    Attributes:
        offers: in the order of the groups in the policy, and of the zones in each; including those closed now.
        unit_limits: how many more units each group may have.
        budget_per_hour: how much more may be spent; None: any amount.
        request_limit: how many units this plan may request.
        stock: units on their way, and how many of each.
        requested: units to request by group and zone, in the order in which they were first needed.
        limits: why the last request could not be held; empty: it could.
    """

    offers: tuple[UnitOffer, ...]
    unit_limits: dict[str, int]
    budget_per_hour: float | None = None
    request_limit: int = _MANY
    stock: dict[PackedUnit, int] = field(factory=dict)
    requested: dict[GroupZone, int] = field(factory=dict)
    limits: dict[Reason, None] = field(factory=dict)
    _by_group_zone: dict[GroupZone, UnitOffer] = field(init=False)
    _empty: dict[GroupZone, HostRoom] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._by_group_zone = {offer.group_zone: offer for offer in self.offers}
        self._empty = {offer.group_zone: HostRoom.empty(offer.capacity) for offer in self.offers}

    def add_stock(self, at: GroupZone, hosts: int, count: int = 1) -> None:
        """Add empty units of a group that are on their way, or idle; units that are not offered do not count."""
        # The zone may have left the policy since.
        if at in self._by_group_zone:
            unit = PackedUnit(at, (self._empty[at],) * hosts)
            self.stock[unit] = self.stock.get(unit, 0) + count

    # Requests

    def pack_some(self, part: MemberGroup, count: int) -> int:
        """Make room for as many of ``count`` requests for one run of a part as possible, and return how many."""
        self.limits = {}
        run = max(1, part.slice_hosts)
        left = count * run
        for demand in part.choices:
            left = self._fill(demand, left, part.slice_hosts, "", "")
        return count - left // run

    def pack_whole(self, request: PlacementRequest) -> bool:
        """Make room for all parts, or for none."""
        self.limits = {}
        best: tuple[float, PackingEstimate] | None = None
        for place in self._localities(request.same):
            # Each locality is tried on a copy: half a gang must leave no requests behind.
            trial = self._copy()
            if all(trial._pack_part(part, request.same, place) for part in request.parts):
                # Including what was requested before: this is the same for all localities, and the cheapest total wins.
                cost = sum(self._by_group_zone[at].price_per_hour * n for at, n in trial.requested.items())
                if best is None or cost < best[0]:
                    best = cost, trial
            self.limits |= trial.limits
        if best is None:
            return False
        self._adopt(best[1])
        self.limits = {}
        return True

    def _copy(self) -> PackingEstimate:
        other = copy(self)
        other.unit_limits, other.stock, other.requested, other.limits = (
            dict(self.unit_limits),
            dict(self.stock),
            dict(self.requested),
            {},
        )
        return other

    def _adopt(self, other: PackingEstimate) -> None:
        self.stock, self.requested, self.unit_limits = other.stock, other.requested, other.unit_limits
        self.budget_per_hour, self.request_limit = other.budget_per_hour, other.request_limit

    def _localities(self, same: str) -> Iterable[str]:
        """Return each region or zone that may hold a request; a single empty one if it may be anywhere."""
        return dict.fromkeys(offer.locality(same) for offer in self.offers)

    def _pack_part(self, part: MemberGroup, same: str, place: str) -> bool:
        for demand in part.choices:
            trial = self._copy()
            if not trial._fill(demand, part.members, part.slice_hosts, same, place):
                self._adopt(trial)
                return True
            self.limits |= trial.limits
        return False

    def request_one(self, offer: UnitOffer) -> bool:
        """Request one unit for any purpose; False: none can be requested there now."""
        if self._closed(offer):
            return False
        self._request(offer, 1)
        return True

    # Members of one demand

    def _fill(self, demand: Demand, members: int, slice_hosts: int, same: str, place: str) -> int:
        """Put members where there is room, in stock or in units to request, and return how many are left."""
        left = self._fill_stock(demand, members, slice_hosts, same, place)
        while left:
            # Stock first: units on their way cost nothing more.
            offer = self._cheapest(demand, left, slice_hosts, same, place)
            if offer is None:
                break
            self._request(offer, self._units(offer, demand, left, slice_hosts))
            before, left = left, self._fill_stock(demand, left, slice_hosts, same, place)
            if left == before:
                break  # cannot happen: a requested unit holds at least one
        return left

    def _fill_stock(self, demand: Demand, left: int, slice_hosts: int, same: str, place: str) -> int:
        for unit in list(self.stock):
            while left and self.stock.get(unit, 0):
                if not self._serves(self._by_group_zone[unit.group_zone], demand, slice_hosts, same, place):
                    break
                full, members = _filled(demand, unit, left, slice_hosts)
                if not members:
                    break
                # Equal units are filled alike in one move.
                times = min(self.stock[unit], left // members)
                self._move(unit, full, times)
                left -= times * members
        return left

    def _move(self, unit: PackedUnit, to: PackedUnit, times: int) -> None:
        self.stock[unit] -= times
        if not self.stock[unit]:
            del self.stock[unit]
        self.stock[to] = self.stock.get(to, 0) + times

    def _serves(self, offer: UnitOffer, demand: Demand, slice_hosts: int, same: str, place: str) -> bool:
        return (
            offer.locality(same) == place
            and (not slice_hosts or offer.hosts == slice_hosts)
            and admits_demand(demand, offer.capacity)
            and members_that_fit(demand, self._empty[offer.group_zone]) > 0
        )

    # More units

    def _cheapest(self, demand: Demand, left: int, slice_hosts: int, same: str, place: str) -> UnitOffer | None:
        """Return the cheapest of the first open zone of each group.

        Machines with accelerators come last for members that need none; among equals the plainest machine comes first,
        then the order of the policy.
        """
        firsts: dict[str, UnitOffer] = {}
        for offer in self.offers:
            if self._serves(offer, demand, slice_hosts, same, place):
                if why := self._closed(offer):
                    self.limits[why] = None
                else:
                    # Zones of a group are in the order of preference, so only groups compete by their prices.
                    firsts.setdefault(offer.group, offer)
        return min(firsts.values(), key=lambda offer: self._cost(offer, demand, left, slice_hosts), default=None)

    def _closed(self, offer: UnitOffer) -> Reason | None:
        """Return why no further unit may be requested there; None: it may."""
        if offer.closed:
            return offer.closed
        if self.unit_limits.get(offer.group, 0) < 1:
            return Reason(ReasonKind.GROUP_AT_MAX, offer.group)
        if self.request_limit < 1:
            return Reason(ReasonKind.REQUEST_LIMIT)
        # A unit without a price may be requested even if the limit is exceeded already.
        if self.budget_per_hour is not None and offer.price_per_hour > max(0.0, self.budget_per_hour):
            left = max(0.0, self.budget_per_hour)
            return Reason(ReasonKind.SPEND_LIMIT, offer.group, price=offer.price_per_hour, left=left)
        return None

    def _cost(self, offer: UnitOffer, demand: Demand, left: int, slice_hosts: int) -> tuple[bool, float, int, int]:
        # By the price of all units that are needed: a large machine may be cheaper than many small ones.
        units = -(-left // self._per_unit(offer, demand, slice_hosts))
        devices = len(offer.capacity.devices) * offer.hosts
        # Machines with accelerators last, whatever their price: the devices would be idle.
        wasted = devices > 0 and not demand.device_count
        return wasted, offer.price_per_hour * units, devices, offer.hosts

    def _per_unit(self, offer: UnitOffer, demand: Demand, slice_hosts: int) -> int:
        return slice_hosts or offer.hosts * members_that_fit(demand, self._empty[offer.group_zone])

    def _units(self, offer: UnitOffer, demand: Demand, left: int, slice_hosts: int) -> int:
        """Return how many units to request: as many as needed and allowed; at least one."""
        units = min(
            -(-left // self._per_unit(offer, demand, slice_hosts)), self.unit_limits[offer.group], self.request_limit
        )
        if self.budget_per_hour is not None and offer.price_per_hour:
            units = min(units, int(self.budget_per_hour / offer.price_per_hour))
        return max(1, units)

    def _request(self, offer: UnitOffer, units: int) -> None:
        self.unit_limits[offer.group] -= units
        self.request_limit -= units
        if self.budget_per_hour is not None:
            self.budget_per_hour -= units * offer.price_per_hour
        self.requested[offer.group_zone] = self.requested.get(offer.group_zone, 0) + units
        self.add_stock(offer.group_zone, offer.hosts, units)


def _filled(demand: Demand, unit: PackedUnit, left: int, slice_hosts: int) -> tuple[PackedUnit, int]:
    """Return the unit with as many of these members as it takes, and how many that are."""
    if slice_hosts:
        if (
            left < slice_hosts
            or len(unit.rooms) != slice_hosts
            or not all(members_that_fit(demand, room) for room in unit.rooms)
        ):
            return unit, 0
        return PackedUnit(unit.group_zone, tuple(with_members(demand, room, 1) for room in unit.rooms)), slice_hosts
    rooms: list[HostRoom] = []
    members = 0
    for room in unit.rooms:
        here = min(left - members, members_that_fit(demand, room))
        rooms.append(with_members(demand, room, here) if here else room)
        members += here
    return PackedUnit(unit.group_zone, tuple(rooms)), members
