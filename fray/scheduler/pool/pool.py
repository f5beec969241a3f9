"""Placement of requests on the machines of a pool. The tests compare it with a slow reference implementation.

Rules:

- A demand without devices goes to the machine with the fewest idle devices, then to the tightest CPU, memory and name.
- A demand for devices goes to the machine with the fewest of these left, then as above.
- A demand for nothing (an actor) goes to the machine with the fewest attempts.
- A part is placed member by member, all or none. Members that prefer a machine (they were there before) get it first
  if they fit; as members are equal, that never keeps a part from fitting.
- A part with ``slice_hosts`` takes whole TPU slices (`fray.scheduler.pool.slices`).
- A part gets one of its choices for all members: the first that fits.
- The parts of a request are placed one after another, the hardest first: slices, then the most devices of a member,
  then the most CPU.
- With ``same`` all parts go into one region or zone: of those where all fit, the one with the earlier choices, then the
  one with the least room left over (for members of these parts, in all their choices), then by name.

For callers:

- `MachinePool.place` takes places or nothing; `give_back` undoes it without any trace.
- `take` and `release` move one member; `version`, `freed` and `changes` say what has happened since.
- `held_now`, `usable` and `could_hold` count without placing; the last two as if machines were empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import TypeVar

from fray.model.ids import NodeName
from fray.model.resources import Capacity, Demand
from fray.scheduler.pool.machine import (
    AUTO,
    Machine,
    Variant,
    admits_demand,
    can_hold,
    fit,
    grant,
    members_held,
    preference,
    variants,
)
from fray.scheduler.pool.machine_index import (
    MAX_LOG,
    AttributeFilter,
    ChangeLog,
    FitCounter,
    Locality,
    PoolListener,
    PreferenceOrder,
    UsableCounter,
    by_attempts,
    by_size,
    by_variant,
)
from fray.scheduler.pool.requests import (
    MemberGroup,
    MemberPlacement,
    MemberShare,
    Placement,
    PlacementRequest,
    is_weightless,
)
from fray.scheduler.pool.slices import Slice, Slices, choose_slices, has_ports
from fray.scheduler.reasons import Reason

__all__ = [
    "AUTO",
    "Locality",
    "Machine",
    "MachinePool",
    "MemberPlacement",
    "Variant",
    "admits_demand",
    "can_hold",
    "fit",
    "fits_when_empty",
    "members_held",
    "preference",
    "variants",
]

MAX_LISTENERS = 512
"""Indexes that are kept; beyond it, those that were not used for longest are dropped first."""
SIZE, CALM = "size", "calm"
F = TypeVar("F", bound=PoolListener)
# Up to this many machines a cached reason is dropped with each change.
FEW_MACHINES = 50
CACHED_TEXT_S = 5.0
MAX_CACHED_TEXTS = 1000


class MachinePool:
    """All machines, with the placement of requests on them."""

    def __init__(self) -> None:
        self.machines: dict[NodeName, Machine] = {}
        self.machines_version = 0
        """Count of the machines that were added or removed."""
        self.open_machines = 0
        self.changes = 0
        """Count of the changes of any machine."""
        self.slices = Slices(self.machines)
        self._log = ChangeLog()
        self._openings = ChangeLog()
        """Only what came, left, opened or closed: all that a `UsableCounter` has to know."""
        self._alike: dict[object, dict[NodeName, None]] = {}
        """Open machines by their kind."""
        self._variants: dict[Variant, int] = {}
        """Number of machines by variant of their devices."""
        self._by_attribute: dict[tuple[str, str], dict[NodeName, None]] = {}
        """Names of machines by attribute and value."""
        self._listeners: dict[object, PoolListener] = {}
        self._orders: dict[tuple[Demand, Locality | None], list[tuple[str, int, PreferenceOrder]]] = {}
        self.now = 0.0
        """Scheduler's clock at the last placement."""
        self.version = 0
        """Count of the changes after which anything that did not fit may fit on any machine."""
        self.freed_count = 0
        """Count of real releases, without those that a `HypotheticalPool` undoes."""
        self.freed: dict[NodeName, None] = {}
        """Machines on which something was freed since the placement pass cleared this."""
        self._reasons: dict[object, tuple[int, float, list[Reason]]] = {}

    # Machines

    def add(self, name: NodeName, capacity: Capacity, open: bool = True) -> None:
        """Add an empty machine; one of the same name is replaced."""
        self.remove(name)
        machine = Machine.empty(name, capacity, False)
        self.machines[machine.name] = machine
        # Only additions and removals: whether a request fits empty machines does not depend on their load.
        self.machines_version += 1
        self.slices.on_machine_changed(machine)
        for attribute in machine.capacity.attributes.items():
            self._by_attribute.setdefault(attribute, {})[machine.name] = None
        for variant in machine.device_counts:
            self._variants[variant] = self._variants.get(variant, 0) + 1
            if self._variants[variant] == 1:
                self._orders.clear()  # demands for any variant have one more order to search
        self.set_open(name, open)

    def remove(self, name: NodeName) -> None:
        machine = self.machines.get(name)
        if machine is None:
            return
        self.set_open(name, False)
        self.freed.pop(name, None)
        self._changed(machine.name)
        self.machines_version += 1
        for attribute in machine.capacity.attributes.items():
            del self._by_attribute[attribute][machine.name]
            if not self._by_attribute[attribute]:
                del self._by_attribute[attribute]
        for variant in machine.device_counts:
            self._variants[variant] -= 1
        del self.machines[machine.name]
        self.slices.on_machine_changed(machine)
        for listener in self._listeners.values():
            listener.forget(machine.name)

    def set_open(self, name: NodeName, open: bool) -> None:
        machine = self.machines[name]
        if machine.is_open is open:
            return
        machine.is_open = open
        if open:
            # An opened machine is like a freed one: waiting applicants may fit there now.
            self.freed[name] = None
            self.open_machines += 1
            self._alike.setdefault(machine.kind, {})[name] = None
        else:
            self.open_machines -= 1
            alike = self._alike[machine.kind]
            del alike[name]
            if not alike:
                del self._alike[machine.kind]
        self.slices.on_machine_changed(machine)
        self._changed(name)
        self._openings.names.append(name)
        if len(self._openings.names) > MAX_LOG:
            self._truncate_log(self._openings)

    def take(self, name: NodeName, demand: Demand, devices: tuple[str, ...], ports: Iterable[int] = ()) -> None:
        """Take a member's share of a machine."""
        machine = self.machines[name]
        machine.shift(demand, devices, -1)
        if ports:
            machine.ports.take(ports)
        self._changed(name)

    def release(self, name: NodeName, demand: Demand, devices: tuple[str, ...], ports: Iterable[int] = ()) -> None:
        """Release a member's share of a machine."""
        self._release(name, demand, devices, ports)
        # Here and not in `_release`, which also undoes trials: these make no room that was not there before.
        self.freed[name] = None

    def _release(self, name: NodeName, demand: Demand, devices: tuple[str, ...], ports: Iterable[int]) -> None:
        machine = self.machines[name]
        machine.shift(demand, devices, +1)
        if ports:
            machine.ports.release(ports)
        self._changed(name)

    def take_all(self, name: NodeName, shares: Iterable[MemberShare]) -> None:
        """Take several members' shares of a machine, as one change."""
        self.machines[name].shift_all(shares, -1)
        self._changed(name)

    def release_all(self, name: NodeName, shares: Iterable[MemberShare]) -> None:
        """Release several members' shares of a machine, as one change."""
        self.machines[name].shift_all(shares, +1)
        self._changed(name)
        self.freed[name] = None

    def take_cpu(self, name: NodeName, cpu_milli: int) -> None:
        """Take more CPU for a member that is there already."""
        self.machines[name].shift_cpu(cpu_milli)
        self._changed(name)

    def withhold(self, name: NodeName, devices: Collection[str]) -> None:
        """Stop giving out exactly these ids of a machine, in use or not."""
        # Also if devices were only added: which of them came back is not examined.
        if self.machines[name].withhold(devices):
            self.freed[name] = None
            self._changed(name)

    def on_ports_released(self, name: NodeName) -> None:
        """Mark a machine as freed whose ports were released through another pool that shares them."""
        # In the log of changes as well: indexes count how many members the free ports are enough for.
        self._changed(name)
        self.freed[name] = None

    def mark_freed(self, names: Iterable[NodeName]) -> None:
        """Mark machines on which less is held for others than before."""
        self.freed.update((name, None) for name in names if name in self.machines)
        # Counted as well, since the machines may be marked already: a pass compares the counts before and after it.
        self.freed_count += 1

    # Placing

    def place(
        self, request: PlacementRequest, closed: Container[NodeName] = (), preferred: Sequence[Sequence[NodeName]] = ()
    ) -> tuple[Placement, ...] | None:
        """Take places for all parts of a request and return them part by part, or return None and take nothing.

        Args:
            closed: machines that may not be used.
            preferred: for each part in turn, the preferred machine of each member; empty for no preference.
        """
        # The usual case: one locality, and the first choice that fits.
        if len(request.parts) == 1 and not request.same:
            one = self._place_part(request.parts[0], None, closed, preferred[0] if preferred else ())
            return None if one is None else (one,)
        best: tuple[tuple[int, ...], Locality | None] | None = None
        for place in self._localities_for(request):
            placed = self._place_all(request, place, closed, preferred)
            if placed is None:
                continue
            choices = tuple(one.choice for one in placed)
            # First choices everywhere: no other locality is better, and this one has the least room left over.
            if not any(choices):
                return placed
            # The order of devices is the author's preference, and comes before the choice of the locality.
            if best is None or choices < best[0]:
                best = choices, place
            self.give_back(request, placed)
        return self._place_all(request, best[1], closed, preferred) if best else None

    def _place_all(
        self,
        request: PlacementRequest,
        place: Locality | None,
        closed: Container[NodeName],
        preferred: Sequence[Sequence[NodeName]],
    ) -> tuple[Placement, ...] | None:
        placed: dict[int, Placement] = {}
        # Greedy, the hardest part first. This may miss a fit that an exhaustive search would find, but bounds the time
        # of a step.
        for index in sorted(range(len(request.parts)), key=lambda index: hardness(request.parts[index])):
            liked = preferred[index] if index < len(preferred) else ()
            one = self._place_part(request.parts[index], place, closed, liked)
            if one is None:
                for done, taken in placed.items():
                    self._give_back(request.parts[done].choices[taken.choice], taken.grants)
                return None
            placed[index] = one
        return tuple(placed[index] for index in range(len(request.parts)))

    def _place_part(
        self, part: MemberGroup, place: Locality | None, closed: Container[NodeName], liked: Sequence[NodeName]
    ) -> Placement | None:
        # All members or none with each choice: members of one part never get different devices.
        for choice, demand in enumerate(part.choices):
            if part.slice_hosts:
                grants = self._place_slices(demand, part, place, closed, liked)
            else:
                grants = self._place_members(demand, part.members, place, closed, liked)
            if grants is not None:
                return Placement(tuple(grants), choice)
        return None

    def give_back(self, request: PlacementRequest, placed: Sequence[Placement]) -> None:
        """Undo a `place` that was only a trial."""
        for part, one in zip(request.parts, placed, strict=True):
            self._give_back(part.choices[one.choice], one.grants)

    def _give_back(self, demand: Demand, grants: Iterable[MemberPlacement]) -> None:
        for one in grants:
            self._release(one.node, demand, one.devices, one.ports)

    # In one region or zone

    def _localities_for(self, request: PlacementRequest) -> list[Locality | None]:
        """Return the places where all parts may fit together, those with the least room first."""
        if not request.same:
            return [None]
        held = [self._held_by_place(part, request.same) for part in request.parts]
        # By counts, before anything is placed. Parts may still compete for the same machines, so each locality is
        # tried.
        common = [place for place in held[0] if all(place in one for one in held)]
        return [*sorted(common, key=lambda place: (sum(one[place] for one in held), place))]

    def _held_by_place(self, part: MemberGroup, same: str) -> dict[Locality, int]:
        """Return regions or zones that can hold the part in one of its choices, with the members of all choices."""
        enough: dict[Locality, int] = {}
        total: dict[Locality, int] = {}
        for demand in part.choices:
            for place, count in self._fits_by_locality(demand, part.slice_hosts).items():
                if place[0] == same and count:
                    total[place] = total.get(place, 0) + count
                    if count >= part.members:
                        enough[place] = 0
        return {place: total[place] for place in enough}

    def _fits_by_locality(self, demand: Demand, slice_hosts: int) -> dict[Locality, int]:
        """Return the number of members that fit now, by region and zone."""
        if not slice_hosts:
            return self._fit_counter(demand).places
        found: dict[Locality, int] = {}
        for one in self._slices(demand, slice_hosts):
            for place in (("region", one.id[0]), ("zone", one.id[1])):
                found[place] = found.get(place, 0) + slice_hosts
        return found

    # Members, one by one

    def _place_members(
        self,
        demand: Demand,
        members: int,
        place: Locality | None,
        closed: Container[NodeName],
        liked: Sequence[NodeName],
    ) -> list[MemberPlacement] | None:
        # Members are alike, so the sum over machines is exact but for ports: no placing and undoing for a gang that
        # cannot fit.
        if members > 1 and self.held_now(demand) < members:
            return None
        if members == 1 and not liked:  # the usual case
            only = self._best(demand, place, closed)
            if only is None:
                return None
            self.take(only.node, demand, only.devices, only.ports)
            return [only]
        grants: dict[int, MemberPlacement] = {}
        # All preferences first: a member without one must not take the machine that another prefers.
        for member, name in enumerate(liked[:members]):
            self._grant(demand, grants, member, self._fit_on(demand, name, closed, place))
        for member in range(members):
            if member not in grants and not self._grant(demand, grants, member, self._best(demand, place, closed)):
                self._give_back(demand, grants.values())
                return None
        return [grants[member] for member in range(members)]

    def _grant(
        self, demand: Demand, grants: dict[int, MemberPlacement], member: int, one: MemberPlacement | None
    ) -> bool:
        if one is None:
            return False
        self.take(one.node, demand, one.devices, one.ports)
        grants[member] = one
        return True

    def _fit_on(
        self, demand: Demand, name: NodeName, closed: Container[NodeName], place: Locality | None
    ) -> MemberPlacement | None:
        machine = self.machines.get(name)
        if machine is None or name in closed:
            return None
        if place is not None and machine.capacity.attributes.get(place[0], "") != place[1]:
            return None
        return fit(demand, machine, self.now)

    def _best(self, demand: Demand, place: Locality | None, closed: Container[NodeName]) -> MemberPlacement | None:
        """Place one member on the best machine by `preference`."""
        orders = self._orders_for(demand, place)
        best: tuple[int, int, int, str, NodeName] | None = None
        for variant, least, order in orders:
            order.catch_up(self._log)
            found = order.first(demand, least, closed)
            if found is None:
                continue
            level, (cpu, memory, name) = found
            # Several orders only for a demand of any variant, one for each variant.
            if len(orders) == 1:
                return grant(demand, self.machines[name], self.now)
            liked = (level, cpu, memory, variant, name)
            best = liked if best is None else min(best, liked)
        return None if best is None else grant(demand, self.machines[best[4]], self.now)

    # Slices

    def _place_slices(
        self,
        demand: Demand,
        part: MemberGroup,
        place: Locality | None,
        closed: Container[NodeName],
        liked: Sequence[NodeName],
    ) -> list[MemberPlacement] | None:
        usable = self._slices(demand, part.slice_hosts, closed, place)
        known = [self.machines[name].slice for name in liked if name in self.machines]
        liked_slices = {id: None for id in known if id is not None}
        chosen = choose_slices(usable, part.members // part.slice_hosts, liked_slices)
        # Ports are counted only now: it takes a look at every host, and there are nearly always enough.
        if chosen is not None and demand.ports and not all(has_ports(demand, one) for one in chosen):
            with_ports = [one for one in usable if has_ports(demand, one)]
            chosen = choose_slices(with_ports, part.members // part.slice_hosts, liked_slices)
        if chosen is None:
            return None
        grants = [one for group in chosen for one in self._take_slice(demand, group.hosts)]
        return grants

    def _take_slice(self, demand: Demand, hosts: list[Machine]) -> list[MemberPlacement]:
        """Take all hosts of a slice at once: `take` for each of up to a thousand hosts would be slow."""
        now, grants = self.now, []
        for host in hosts:
            one = grant(demand, host, now)
            host.shift(demand, one.devices, -1)
            if one.ports:
                host.ports.take(one.ports)
            grants.append(one)
        self._all_changed([host.name for host in hosts])
        return grants

    def cached_reasons(self, key: object, now: float, make: Callable[[], list[Reason]]) -> list[Reason]:
        """Return ``make()``, which examines all machines; in large pools the result may be `CACHED_TEXT_S` old."""
        changes, at, known = self._reasons.get(key, (-1, 0.0, []))
        # Every waiting job's record has this text, and each start or end would make it stale: in large pools it may be
        # older.
        is_new = changes == self.changes or (
            changes >= 0 and now - at < CACHED_TEXT_S and len(self.machines) > FEW_MACHINES
        )
        if not is_new:
            if len(self._reasons) >= MAX_CACHED_TEXTS:
                self._reasons.clear()
            known = make()
            self._reasons[key] = self.changes, now, known
        return known

    # Indexes and the log of changes, which they follow

    def _changed(self, name: NodeName) -> None:
        self.changes += 1
        # A change costs one line. Indexes read the log when they are used, so that unused ones cost nothing.
        names = self._log.names
        names.append(name)
        if len(names) > MAX_LOG:
            self._truncate_log(self._log)

    def _all_changed(self, names: list[NodeName]) -> None:
        self.changes += len(names)
        self._log.names.extend(names)
        if len(self._log.names) > MAX_LOG:
            self._truncate_log(self._log)

    def _truncate_log(self, log: ChangeLog) -> None:
        for listener in (self.slices, *self._listeners.values()):
            if isinstance(listener, UsableCounter) is (log is self._openings):
                listener.before_truncation(log)
        log.truncate()
        # Only here, where all of them are visited anyway: the half that was not used for longest goes.
        if len(self._listeners) > MAX_LISTENERS:
            by_use = sorted(self._listeners, key=lambda key: -self._listeners[key].used_at)
            for key in by_use[MAX_LISTENERS // 2 :]:
                del self._listeners[key]
            # It refers to orders that were dropped.
            self._orders.clear()

    def _listener(self, key: object, make: Callable[[], F], log: ChangeLog | None = None) -> F:
        """Return the index of this key, up to date with that log."""
        log = log or self._log
        known = self._listeners.get(key)
        if known is None:  # not `not known`: an index without machines is falsy
            known = self._listeners[key] = make()
            known.start(log)
        else:
            known.catch_up(log)
        known.used_at = self._log.truncations
        found: F = known  # type: ignore[assignment]  # the key determines the class
        return found

    def _orders_for(self, demand: Demand, place: Locality | None) -> list[tuple[str, int, PreferenceOrder]]:
        """Return the orders to search for the demand: variant, fewest devices, machines in order."""
        # Demands that differ in amounts share an order, but finding it (its filter and its variants) costs more than
        # this lookup.
        key = demand, place
        orders = self._orders.get(key)
        if orders is None:
            if len(self._orders) >= 2 * MAX_LISTENERS:
                self._orders.clear()
            orders = self._orders[key] = self._orders_of(demand, place)
        return orders

    def _orders_of(self, demand: Demand, place: Locality | None) -> list[tuple[str, int, PreferenceOrder]]:
        filter = AttributeFilter.of(demand, place)
        if is_weightless(demand):
            return [("", 0, self._order(filter, CALM))]
        if not demand.device_count:
            return [("", 0, self._order(filter, SIZE))]
        # One order for each variant: machines are ranked by how many devices of that variant they have left.
        return [(v[1], demand.device_count, self._order(filter, v)) for v in variants(demand, self._variants)]

    def _order(self, filter: AttributeFilter, kind: str | Variant) -> PreferenceOrder:
        def make() -> PreferenceOrder:
            where = by_variant(kind) if isinstance(kind, tuple) else by_attempts if kind == CALM else by_size
            order = PreferenceOrder(filter, self.machines, where)
            order.fill(self._likely_machines(filter))
            return order

        return self._listener((filter, kind), make)

    def _likely_machines(self, filter: AttributeFilter) -> Iterable[NodeName]:
        """Return a small set of machines that includes all that pass."""
        found: Collection[NodeName] = self.machines
        for group in filter.likely():
            named = [self._by_attribute.get(attribute, {}) for attribute in group]
            # The smallest group is enough: machines in it are tested in full.
            if sum(map(len, named)) < len(found):
                found = [name for names in named for name in names]
        return found

    def _slices(
        self, demand: Demand, hosts: int, closed: Container[NodeName] = (), place: Locality | None = None
    ) -> list[Slice]:
        return self.slices.usable(demand, hosts, self._log, closed, place)

    # Counting

    def _fit_counter(self, demand: Demand) -> FitCounter:
        def make() -> FitCounter:
            tally = FitCounter(demand, self.machines)
            tally.fill(self._likely_machines(AttributeFilter.of(demand)))
            return tally

        return self._listener(("now", demand), make)

    def held_now(self, demand: Demand) -> int:
        """Return how many members fit beside what runs on open machines: an upper bound, as ports are not examined."""
        return self._fit_counter(demand).total

    def held_by_machine(self, demand: Demand) -> dict[NodeName, int]:
        """Return the open machines on which members fit beside what runs there, and how many. Do not modify."""
        return self._fit_counter(demand).counts

    def usable(self, demand: Demand) -> dict[NodeName, int]:
        """Return open machines that could hold the demand if they were empty, and how many members. Do not modify."""
        return self._usable(demand).counts

    def _usable(self, demand: Demand) -> UsableCounter:
        def make() -> UsableCounter:
            usable = UsableCounter(demand, self.machines)
            usable.fill_alike(self._alike.values())
            return usable

        return self._listener(("usable", demand), make, self._openings)

    def could_hold(self, part: MemberGroup) -> bool:
        """Return whether open machines could hold the part in one of its choices, if they were empty."""
        # Sums of members say nothing about slices: hosts of several incomplete ones make none.
        if not part.slice_hosts:
            return any(self._usable(demand).total >= part.members for demand in part.choices)
        wanted = part.members // part.slice_hosts
        return any(self.slices.could_hold(one, part.slice_hosts, wanted, self._log) for one in part.choices)

    # Localities

    def localities(self, same: str) -> list[str]:
        """Return regions or zones of the machines, in order; empty for machines without the attribute."""
        return sorted({machine.capacity.attributes.get(same, "") for machine in self.machines.values()})

    def regions_of(self, zone: str) -> list[str]:
        """Return the regions of the machines in this zone."""
        named = self._by_attribute.get(("zone", zone), {})
        return sorted({region for name in named if (region := self.machines[name].capacity.attributes.get("region"))})


def fits_when_empty(demand: Demand, members: int, capacities: Iterable[Capacity]) -> bool:
    """Return whether that many members would fit if all these machines were empty."""
    return sum(members_held(demand, capacity) for capacity in capacities) >= members


def hardness(part: MemberGroup) -> tuple[int, int, int]:
    """Return the sort key of a part; the least is placed first."""
    most = max(demand.device_count for demand in part.choices)
    # What has the fewest possible places goes first: whole slices, then machines with many devices.
    return -bool(part.slice_hosts), -most, -max(demand.cpu_milli for demand in part.choices)
