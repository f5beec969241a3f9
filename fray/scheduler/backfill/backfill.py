"""Back-fill: later ones may run in the gaps, and never delay the first that does not fit.

The law (EASY: Lifka, JSSPP 1995; Mu'alem and Feitelson, IEEE TPDS 2001). The first applicant that does not fit gets a
plan: the earliest time at which it surely fits by the time limits of what runs, and its share of the machines then.
A later one may use a planned machine only

- if its own time limit ends before that time, or
- beside the plan: what is free then is enough for both.

Where the limits tell no time there is no plan; once the applicant starves, all machines it could use are kept for it
(`starvation`). A claim (`preemption`) is kept like a plan, and from everybody but its owner. Those that take nothing
are held back by nobody; children of running jobs, which a plan may be waiting for, only by claims.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from attrs import Factory, define, frozen

from fray.model.ids import NodeName
from fray.model.resources import Demand
from fray.scheduler.backfill.start_plan import claim_shares, ends_at, is_ending, make_plan, occupied_s
from fray.scheduler.backfill.starvation import is_starving, nodes_to_hold, starving_heads
from fray.scheduler.pool.free_capacity import FreeCapacity
from fray.scheduler.pool.pool import Machine, MachinePool, can_hold
from fray.scheduler.pool.requests import Placement, PlacementRequest, Shares, nodes_of
from fray.scheduler.queue.applicant import Applicant, ApplicantKind, HeldMachines, PlacementShape, StartPlan
from fray.scheduler.queue.order import order_key
from fray.scheduler.state.rows import CapacityClaim, JobRow
from fray.scheduler.state.tables import Tables
from fray.scheduler.state.what_if_pool import HypotheticalPool

MAX_PLANS = 8
"""So many have a plan at a time: the first that does not fit, and starving ones."""
RETRY_PLAN_S = 5.0
"""A plan that could not be made is tried again after this time; one that was, after `RENEWED_S`."""
RENEW_PLAN_S = 60.0


def _capacity_without(
    state: Tables, machine: Machine, reservation: str, gone: Callable[[JobRow], bool]
) -> FreeCapacity:
    """What is free there without what these jobs of that reservation (of the fleet) have, and units that leave."""
    room = FreeCapacity.of(machine)
    for attempt_id in state.on_node[machine.name]:
        attempt = state.attempts[attempt_id]
        job = state.jobs[attempt.job_id]
        if job.spec.reservation_id == reservation and gone(job):
            room.add(machine, state.demand(job), attempt.devices)
    for name in state.reservations_on.get(machine.name, ()) if not reservation else ():
        row = state.reservations[name]
        for unit in (unit for unit in row.units if unit.leaving):
            for host in (host for host in unit.hosts if host.node == machine.name):
                room.add(machine, row.demand_of(unit), host.devices)
    return room


def capacity_after_pending(state: Tables, machine: Machine, reservation: str) -> FreeCapacity:
    """What is free there when all has ended whose end is decided."""
    return _capacity_without(state, machine, reservation, lambda job: is_ending(state, job))


@frozen(eq=False)
class MachineHold:
    """What is kept of some machines for one applicant, at a time or (a claim) as soon as what ends has ended."""

    applicant: str
    reservation: str
    shares: Shares
    at: float | None

    def capacity_beside(self, state: Tables, machine: Machine) -> FreeCapacity | None:
        """What is left of a machine at that time, when its owner has its share; None: not even he has room."""
        return self.capacity_left(self.capacity_then(state, machine), machine)

    def capacity_then(self, state: Tables, machine: Machine) -> FreeCapacity:
        """What is free there at that time, for its owner, too."""
        return _capacity_without(state, machine, self.reservation, lambda job: self._is_gone(state, job))

    def capacity_left(self, room: FreeCapacity, machine: Machine) -> FreeCapacity | None:
        """Of this room, which is taken from, when its owner has its share; None: not even he has room."""
        for demand, count in self.shares[machine.name]:
            for _ in range(count):
                if not room.take(demand):
                    return None
        return room

    def _is_gone(self, state: Tables, job: JobRow) -> bool:
        if self.at is None:
            return is_ending(state, job)
        at = ends_at(state, job)
        return at is not None and at <= self.at


class _ClaimedShares(Mapping[NodeName, tuple[tuple[Demand, int], ...]]):
    """The shares of all claims of one pool but one applicant's. Claims come true at the same time, so there has to be
    room for all of them beside whoever comes."""

    def __init__(self, claims: Iterable[MachineHold]) -> None:
        self._but = ""
        self._whose: dict[str, None] = {}
        self._found: dict[NodeName, list[tuple[str, tuple[Demand, int]]]] = {}
        for claim in claims:
            self._whose[claim.applicant] = None
            for node, demands in claim.shares.items():
                self._found.setdefault(node, []).extend((claim.applicant, demand) for demand in demands)

    def without(self, applicant: str) -> _ClaimedShares:
        """The same without that one's; costs nothing."""
        other = _ClaimedShares(())
        other._but, other._whose, other._found = applicant, self._whose, self._found
        return other

    @property
    def is_empty(self) -> bool:
        """Nobody else has a claim."""
        return len(self._whose) == (self._but in self._whose)

    def __getitem__(self, node: NodeName) -> tuple[tuple[Demand, int], ...]:
        found = tuple(demand for whose, demand in self._found.get(node, ()) if whose != self._but)
        if not found:
            raise KeyError(node)
        return found

    def __contains__(self, node: object) -> bool:
        return any(whose != self._but for whose, _ in self._found.get(node, ()))  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[NodeName]:
        return (node for node in self._found if node in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RemainingCapacity:
    """What is left of machines beside what is kept. What is free there then is remembered until somebody comes or goes:
    in one pass it is asked again and again, for one applicant after the other."""

    def __init__(self, state: Tables) -> None:
        self._state = state
        self._cache: dict[tuple[str, float | None, NodeName], tuple[int, FreeCapacity]] = {}

    def beside(self, keep: MachineHold, machine: Machine) -> FreeCapacity | None:
        """As `Keep.room_beside`."""
        key = keep.reservation, keep.at, machine.name
        known = self._cache.get(key)
        if known is None or known[0] != machine.shifts:
            known = self._cache[key] = machine.shifts, keep.capacity_then(self._state, machine)
        return keep.capacity_left(known[1].copy(), machine)

    def clear(self) -> None:
        """Somebody has begun, or is being ended."""
        self._cache.clear()


class _ExcludedMachines:
    """The machines that one applicant may not use: a container of names, asked for those that come into question."""

    def __init__(
        self,
        rooms: RemainingCapacity,
        pool: MachinePool,
        ask: PlacementRequest,
        keeps: Sequence[MachineHold],
        held: Container[NodeName],
    ) -> None:
        self._rooms, self._pool, self._demands, self._keeps, self._held = rooms, pool, ask.demands, keeps, held
        self._known: dict[NodeName, bool] = {}

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = name in self._held or any(map(self._is_kept_by(name), self._keeps))
        return known

    def _is_kept_by(self, name: NodeName) -> Callable[[MachineHold], bool]:
        def keeps_off(keep: MachineHold) -> bool:
            if name not in keep.shares:
                return False
            room = self._rooms.beside(keep, self._pool.machines[name])
            return room is None or not all(map(room.holds, self._demands))

        return keeps_off


@define(eq=False)
class _PoolHolds:
    """What is kept of one pool (of the fleet, or of one reservation) for those that were refused so far."""

    plans: list[MachineHold] = Factory(list)
    starving_nodes: dict[NodeName, str] = Factory(dict)
    """All machines of starving ones without a plan, and the first for whom each is kept."""
    plans_in_use: dict[str, StartPlan] = Factory(dict)
    """By applicant, also those that say nothing."""


class MachineHolds:
    """What is kept during one pass over the queue: claims of whomever, and plans of those that were refused so far."""

    def __init__(self, state: Tables) -> None:
        self.state = state
        self.claims = [_hold_of_claim(claim) for claim in state.claims.values()]
        self.remaining = RemainingCapacity(state)
        self._claimed: dict[str, _ClaimedShares] = {}
        """By reservation, when somebody has asked."""
        self._pool_holds: dict[str, _PoolHolds] = {}
        self.held_machines: dict[str, HeldMachines] = {}
        """By applicant, in their order."""

    def waiting_shapes(self) -> Iterator[PlacementShape]:
        """Of those that have a plan: they are refused first, so that what is theirs is kept."""
        for applicant_id in self.state.start_plans:
            if applicant_id in self.state.queue:
                yield self.state.queue.applicants[applicant_id].shape

    def claiming_shapes(self) -> Iterator[PlacementShape]:
        """Of those that have a claim to machines of the fleet."""
        for claim in self.state.claims.values():
            if claim.applicant in self.state.queue and not claim.reservation:
                yield self.state.queue.applicants[claim.applicant].shape

    def unclaimed(self, machine: Machine) -> FreeCapacity:
        """What of a machine of the fleet is free, and would be beside all claims: nobody else is given more."""
        room = FreeCapacity.of(machine)
        for keep in self.claims:
            if machine.name in keep.shares and not keep.reservation:
                beside = self.remaining.beside(keep, machine)
                room = room.minimum(beside) if beside is not None else FreeCapacity(0, 0, 0, 0, {})
        return room

    def _holds_for(self, applicant: Applicant) -> _PoolHolds:
        return self._pool_holds.setdefault(applicant.shape.reservation, _PoolHolds())

    def _pool(self, applicant: Applicant) -> MachinePool:
        return self.state.pool_for(applicant.shape.reservation)

    # Placing

    def place(self, applicant: Applicant, preferred: Sequence[Sequence[NodeName]]) -> tuple[Placement, ...] | None:
        """Take places for it that delay nobody for whom something is kept; None: there are none."""
        pool, ask = self._pool(applicant), applicant.shape.request
        if not self.claims and not self._pool_holds:
            return pool.place(ask, (), preferred)  # nothing is kept yet: by far the most
        keeps, held = self._binding_holds(applicant), self._starving_nodes_for(applicant)
        if not keeps:
            return pool.place(ask, held, preferred)
        with HypotheticalPool(self.state, applicant.shape.reservation) as trial:
            placed = self._place_beside(trial, ask, keeps, held, preferred)
            if placed is not None:
                trial.commit()
        return placed

    def place_in_trial(
        self, trial: HypotheticalPool, applicant: Applicant, preferred: Sequence[Sequence[NodeName]] = ()
    ) -> tuple[Placement, ...] | None:
        """The same within a trial."""
        keeps, held = self._binding_holds(applicant), self._starving_nodes_for(applicant)
        return self._place_beside(trial, applicant.shape.request, keeps, held, preferred)

    def _place_beside(
        self,
        trial: HypotheticalPool,
        ask: PlacementRequest,
        keeps: Sequence[MachineHold],
        held: Mapping[NodeName, str],
        preferred: Sequence[Sequence[NodeName]],
    ) -> tuple[Placement, ...] | None:
        """Places beside what is kept, and on none of the machines that are held."""
        pool, mark = trial.pool, trial.mark
        placed = trial.place(ask, _ExcludedMachines(self.remaining, pool, ask, keeps, held), preferred)
        if placed is None or not self._overcommits(pool, keeps, nodes_of(placed)):
            return placed
        trial.undo_to(mark)
        return trial.place(ask, {*held, *(node for keep in keeps for node in keep.shares)}, preferred)

    def place_on_claim(
        self, applicant: Applicant, preferred: Sequence[Sequence[NodeName]]
    ) -> tuple[Placement, ...] | None:
        """Take places for it on the machines of its claim only; None if it does not fit there yet."""
        machines, shares = self._pool(applicant).machines, claim_shares(self.state.claims[applicant.id])
        for node, demands in shares.items():
            if node not in machines or not all(can_hold(machines[node], demand) for demand, _ in demands):
                return None  # something on it has not ended yet: by far the most
        closed = {*machines.keys() - shares.keys(), *self._starving_nodes_for(applicant)}
        keeps, request = self._binding_holds(applicant), applicant.shape.request
        with HypotheticalPool(self.state, applicant.shape.reservation) as trial:
            excluded = _ExcludedMachines(self.remaining, trial.pool, request, keeps, closed)
            placed = trial.place(request, excluded, preferred)
            if placed is None or self._overcommits(trial.pool, keeps, nodes_of(placed)):
                return None
            trial.commit()
        return placed

    def _starving_nodes_for(self, applicant: Applicant) -> Mapping[NodeName, str]:
        exempt = applicant.shape.is_child or applicant.shape.request.is_weightless
        return {} if exempt else self._holds_for(applicant).starving_nodes

    def _binding_holds(self, applicant: Applicant) -> list[MachineHold]:
        ask = applicant.shape.request
        if ask.is_weightless and not any(demand.ports for demand in ask.demands):
            return []
        keeps = self._claims_of_others(applicant)
        if applicant.shape.is_child or ask.is_weightless:
            return keeps
        over_s = occupied_s(self.state, applicant)
        plans = self._holds_for(applicant).plans
        return [*keeps, *(k for k in plans if over_s is None or k.at is None or self.state.now + over_s > k.at)]

    def _claims_of_others(self, applicant: Applicant) -> list[MachineHold]:
        mine = applicant.shape.reservation
        claimed = self._claimed.get(mine)
        if claimed is None:
            claimed = self._claimed[mine] = _ClaimedShares(keep for keep in self.claims if keep.reservation == mine)
        shares = claimed.without(applicant.id)
        return [] if shares.is_empty else [MachineHold("", mine, shares, None)]

    def _invalidate(self) -> None:
        self._claimed.clear()
        self.remaining.clear()

    def _overcommits(self, pool: MachinePool, keeps: Iterable[MachineHold], nodes: Iterable[NodeName]) -> bool:
        """Several members together take more of a machine than there is beside what is kept."""
        found = list(nodes)
        return any(
            self.remaining.beside(keep, pool.machines[node]) is None
            for keep in keeps
            for node in found
            if node in keep.shares
        )

    def on_placed(self, applicant: Applicant) -> None:
        """It has its places: what was kept for it may fit others."""
        self.claims = [keep for keep in self.claims if keep.applicant != applicant.id]
        self._invalidate()
        plan = self.state.start_plans.pop(applicant.id, None)
        if plan is not None:
            self._pool(applicant).mark_freed(plan.shares)

    # Keeping

    def on_refused(self, applicant: Applicant) -> StartPlan | None:
        """It does not fit: keep for it what the law says."""
        shape = applicant.shape
        if (
            shape.is_child
            or shape.request.is_weightless
            or applicant.kind is ApplicantKind.GROWTH
            or applicant.id in self.state.claims
        ):
            return None
        book, starves = self._holds_for(applicant), is_starving(self.state, applicant)
        plan = None
        if not book.plans_in_use or (starves and len(book.plans_in_use) < MAX_PLANS):
            plan = book.plans_in_use[applicant.id] = self._plan_for(applicant, book)
        self._hold(applicant, plan)
        return plan

    def restore_hold(self, applicant: Applicant) -> None:
        """It did not fit before: keep for it what it was given then."""
        self._hold(applicant, self.state.start_plans.get(applicant.id))

    def _hold(self, applicant: Applicant, plan: StartPlan | None) -> None:
        book = self._holds_for(applicant)
        if plan is not None and plan.at is not None:
            book.plans.append(MachineHold(applicant.id, applicant.shape.reservation, plan.shares, plan.at))
            self.held_machines[applicant.id] = HeldMachines(applicant.shape.reservation, dict.fromkeys(plan.shares))
        elif is_starving(self.state, applicant) and len(book.starving_nodes) < self._pool(applicant).open_machines:
            nodes = dict.fromkeys(nodes_to_hold(self.state, applicant))
            self.held_machines[applicant.id] = HeldMachines(applicant.shape.reservation, nodes)
            for node in nodes:
                book.starving_nodes.setdefault(node, applicant.id)

    def holds_all(self, reservation: str = "") -> bool:
        """No machine of this pool is left for those that come later."""
        book = self._pool_holds.get(reservation)
        return book is not None and len(book.starving_nodes) >= self.state.pool_for(reservation).open_machines

    def _plan_for(self, applicant: Applicant, book: _PoolHolds) -> StartPlan:
        """The one it has, as long as that may come true."""
        pool, before = self._pool(applicant), self.state.start_plans.get(applicant.id)
        if before is not None and _is_plan_current(self.state, pool, before):
            return before
        # A machine held for an earlier applicant is not free at the planned time, however early the plan says it is.
        held = self.nodes_held_for_others(applicant) | {node: None for claim in self.claims for node in claim.shares}
        plan = self.state.start_plans[applicant.id] = make_plan(self.state, applicant, held)
        if before is not None:
            pool.mark_freed(before.shares)
        return plan

    def nodes_held_for_others(self, applicant: Applicant) -> dict[NodeName, None]:
        """Machines that are kept for those before it. (Claims are reckoned with as what they are: shares.)"""
        book = self._holds_for(applicant)
        held = {node: None for node, whose in book.starving_nodes.items() if whose != applicant.id}
        return held | {node: None for keep in book.plans if keep.applicant != applicant.id for node in keep.shares}

    def on_claimed(self, applicant: Applicant) -> None:
        """Others are being ended for its sake: that is its plan now."""
        book = self._holds_for(applicant)
        self.claims.append(_hold_of_claim(self.state.claims[applicant.id]))
        self._invalidate()
        book.plans = [keep for keep in book.plans if keep.applicant != applicant.id]
        book.plans_in_use.pop(applicant.id, None)

    def finish(self) -> None:
        """The pass is over: plans of those that are no longer the first are forgotten, and may have been in the way."""
        before = self.state.start_plans
        self.state.start_plans = {
            name: plan for book in self._pool_holds.values() for name, plan in book.plans_in_use.items()
        }
        for name, plan in before.items():
            if name not in self.state.start_plans and name in self.state.queue:
                self._pool(self.state.queue.applicants[name]).mark_freed(plan.shares)


def current_holds(state: Tables, applicant: Applicant) -> MachineHolds:
    """What would be kept from one that does not wait yet, if the next pass came now."""
    keeps = MachineHolds(state)
    heads = {head.id: head for head in starving_heads(state)}
    heads |= {name: state.queue.applicants[name] for name in state.start_plans if name in state.queue}
    mine = order_key(state.queue, applicant)
    for place, head in sorted((order_key(state.queue, head), head.id) for head in heads.values()):
        if place < mine and head not in state.claims:
            keeps.restore_hold(heads[head])
    return keeps


def _hold_of_claim(claim: CapacityClaim) -> MachineHold:
    return MachineHold(claim.applicant, claim.reservation, claim_shares(claim), None)


def _is_plan_current(state: Tables, pool: MachinePool, plan: StartPlan) -> bool:
    if plan.at is None:
        return state.now < plan.made_at + RETRY_PLAN_S and plan.machines == pool.open_machines
    soon = state.now < min(plan.at, plan.made_at + RENEW_PLAN_S) or plan.made_at == state.now
    return soon and all(node in pool.machines and pool.machines[node].is_open for node in plan.shares)
