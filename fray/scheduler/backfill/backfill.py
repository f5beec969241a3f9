"""Backfill: later applicants use gaps without delaying the first one that does not fit.

This is EASY backfill (Lifka, JSSPP 1995; Mu'alem and Feitelson, IEEE TPDS 2001). The first applicant that does not fit
gets a plan: the earliest time at which it surely fits by the time limits of what runs, and its share of the machines
at that time. A later applicant may use a planned machine only

- if its own time limit ends before that time, or
- beside the plan: what is free at that time is enough for both.

Where the time limits give no time there is no plan; once the applicant starves, all machines it could use are held for
it (`starvation`). A claim (`preemption`) is held like a plan, and against every other applicant. Applicants that take
nothing are never held back; children of running jobs, for which a plan may be waiting, only by claims.
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
"""Maximum number of plans at a time: of the first applicant that does not fit, and of starving ones."""
RETRY_PLAN_S = 5.0
"""Seconds after which a plan that could not be made is tried again; a plan is renewed after `RENEW_PLAN_S`."""
RENEW_PLAN_S = 60.0


def _capacity_without(
    state: Tables, machine: Machine, reservation: str, gone: Callable[[JobRow], bool]
) -> FreeCapacity:
    """Return what is free without these jobs of that reservation (or the cluster), and without leaving units."""
    capacity = FreeCapacity.of(machine)
    for attempt_id in state.on_node[machine.name]:
        attempt = state.attempts[attempt_id]
        job = state.jobs[attempt.job_id]
        # A job inside a reservation takes nothing from the cluster's pool: its unit does.
        if job.spec.reservation_id == reservation and gone(job):
            capacity.add(machine, state.share_of(attempt), attempt.devices)
    for name in state.reservations_on.get(machine.name, ()) if not reservation else ():
        row = state.reservations[name]
        for unit in row.leaving_units:
            for host in (host for host in unit.hosts if host.node == machine.name):
                capacity.add(machine, row.demand_of(unit), host.devices)
    return capacity


def capacity_after_pending(state: Tables, machine: Machine, reservation: str) -> FreeCapacity:
    """Return what is free on a machine once everything has ended whose end is decided."""
    return _capacity_without(state, machine, reservation, lambda job: is_ending(state, job))


@frozen(eq=False)
class MachineHold:
    """Machines held for one applicant, from a time on or (a claim) from the end of what is ending."""

    applicant: str
    reservation: str
    shares: Shares
    at: float | None

    def capacity_then(self, state: Tables, machine: Machine) -> FreeCapacity:
        """Return what is free there at that time, including the owner's share."""
        return _capacity_without(state, machine, self.reservation, lambda job: self._is_gone(state, job))

    def capacity_left(self, capacity: FreeCapacity, machine: Machine) -> FreeCapacity | None:
        """Take the owner's share from this room and return it; None if the share does not fit."""
        for demand, count in self.shares[machine.name]:
            for _ in range(count):
                if not capacity.take(demand):
                    return None
        return capacity

    def _is_gone(self, state: Tables, job: JobRow) -> bool:
        if self.at is None:
            return is_ending(state, job)
        at = ends_at(state, job)
        # A job without a known end stays, as far as a plan can tell.
        return at is not None and at <= self.at


class _ClaimedShares(Mapping[NodeName, tuple[tuple[Demand, int], ...]]):
    """Shares of all claims of one pool except one applicant's.

    Claims are fulfilled at the same time, so there must be room for all of them beside another applicant.
    """

    def __init__(self, claims: Iterable[MachineHold]) -> None:
        self._without = ""
        self._whose: dict[str, None] = {}
        self._found: dict[NodeName, dict[str, list[tuple[Demand, int]]]] = {}
        for claim in claims:
            self._whose[claim.applicant] = None
            for node, demands in claim.shares.items():
                self._found.setdefault(node, {}).setdefault(claim.applicant, []).extend(demands)

    def without(self, applicant: str) -> _ClaimedShares:
        """Return the same without that applicant's claim, in constant time."""
        # The tables are shared: a copy for each applicant that is tried would cost the number of all claims.
        other = _ClaimedShares(())
        other._without, other._whose, other._found = applicant, self._whose, self._found
        return other

    def has_claim(self, applicant: str) -> bool:
        return applicant in self._whose

    @property
    def is_empty(self) -> bool:
        """Return whether no other applicant has a claim."""
        return len(self._whose) == (self._without in self._whose)

    def __getitem__(self, node: NodeName) -> tuple[tuple[Demand, int], ...]:
        if node not in self:
            raise KeyError(node)
        return tuple(one for whose, demands in self._found[node].items() if whose != self._without for one in demands)

    def __contains__(self, node: object) -> bool:
        found = self._found.get(node)  # type: ignore[call-overload]
        return bool(found) and (len(found) > 1 or self._without not in found)

    def left_out(self, node: NodeName) -> str:
        """Return the applicant whose share of this machine is left out, or an empty string."""
        return self._without if self._without in self._found.get(node, ()) else ""

    def __iter__(self) -> Iterator[NodeName]:
        return (node for node in self._found if node in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RemainingCapacity:
    """Remaining capacity of machines beside holds.

    What is free at the time of a hold, and beside its share, is cached until something is placed or ends: in one pass
    it is used again and again, for one applicant after another.
    """

    def __init__(self, state: Tables) -> None:
        self._state = state
        self._cache: dict[NodeName, dict[tuple[str, float | None], tuple[int, FreeCapacity]]] = {}
        self._beside: dict[NodeName, dict[object, tuple[int, FreeCapacity | None]]] = {}

    def beside(self, hold: MachineHold, machine: Machine) -> FreeCapacity | None:
        """Return what is left of a machine then beside the owner's share; None if that does not fit. Do not modify."""
        shares = hold.shares
        # Of all claims it is the same for every applicant without a share of this machine.
        whose = shares.left_out(machine.name) if isinstance(shares, _ClaimedShares) else hold
        known, key = self._beside.setdefault(machine.name, {}), (whose, hold.reservation)
        left = known.get(key)
        # Trials move the machine, too, until they are undone; its stamp is another one then.
        if left is None or left[0] != machine.stamp:
            room = hold.capacity_left(self._then(hold, machine).copy(), machine)
            left = known[key] = machine.stamp, room
        return left[1]

    def _then(self, hold: MachineHold, machine: Machine) -> FreeCapacity:
        """Return the same as `MachineHold.capacity_then`. Do not modify."""
        known, key = self._cache.setdefault(machine.name, {}), (hold.reservation, hold.at)
        then = known.get(key)
        if then is None or then[0] != machine.stamp:
            then = known[key] = machine.stamp, hold.capacity_then(self._state, machine)
        return then[1]

    def forget(self, nodes: Iterable[NodeName]) -> None:
        """Clear the cache of these machines, on which something was placed: it may have been asked in the trial, before
        the new attempt was known."""
        for node in nodes:
            self._cache.pop(node, None)
            self._beside.pop(node, None)

    def clear(self) -> None:
        """Clear the cache, after something is being ended, or a claim was made or dropped."""
        self._cache.clear()
        self._beside.clear()


class _ExcludedMachines:
    """Container of the names of machines that one applicant may not use, evaluated for the examined machines only."""

    def __init__(
        self,
        remaining: RemainingCapacity,
        pool: MachinePool,
        request: PlacementRequest,
        holds: Sequence[MachineHold],
        held: Container[NodeName],
    ) -> None:
        self._remaining, self._pool, self._demands, self._holds, self._held = (
            remaining,
            pool,
            request.demands,
            holds,
            held,
        )
        self._known: dict[NodeName, bool] = {}

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = name in self._held or self._is_needed(name)
        return known

    def _is_needed(self, name: NodeName) -> bool:
        """Return whether the request does not fit there beside one of the holds."""
        for hold in self._holds:
            if name in hold.shares:
                capacity = self._remaining.beside(hold, self._pool.machines[name])
                # All demands, since the pool does not say for which part of the request it asks: too strict for a
                # request of several parts. Members that take too much together are found by `_overcommits`.
                if capacity is None or not all(map(capacity.holds, self._demands)):
                    return True
        return False


@define(eq=False)
class _PoolHolds:
    """Holds of one pool for the applicants that were refused so far in this pass."""

    plans: list[MachineHold] = Factory(list)
    starving_nodes: dict[NodeName, str] = Factory(dict)
    """Machines held for starving applicants without a plan, and the first applicant of each."""
    plans_in_use: dict[str, StartPlan] = Factory(dict)
    """Plans by applicant, also those without a time."""


class MachineHolds:
    """Holds during one pass over the queue: all claims, and the plans of the applicants that were refused so far."""

    def __init__(self, state: Tables) -> None:
        self.state = state
        if state.claim_holds[0] != state.claim_changes:
            holds = [_hold_of_claim(claim) for claim in state.claims.values()]
            state.claim_holds = state.claim_changes, holds, {}
        self.claims: list[MachineHold] = state.claim_holds[1]
        self.remaining = RemainingCapacity(state)
        # Shared by all passes until a claim is made or dropped. A pass that does so replaces both.
        self._claimed: dict[str, _ClaimedShares] = state.claim_holds[2]
        """Claimed shares by reservation, as far as they were needed."""
        self._claims_but: dict[tuple[str, str], list[MachineHold]] = {}
        """The same as a hold, by reservation and the claimant that it does not bind."""
        self._pool_holds: dict[str, _PoolHolds] = {}
        self.held_machines: dict[str, HeldMachines] = {}
        """Held machines by applicant, in their order."""
        self.is_out_of_work = False
        """True if a plan, or the rest of the pass, is left to the next step: nothing more may be placed in this one."""

    def waiting_shapes(self) -> Iterator[PlacementShape]:
        """Yield the shapes of applicants with a plan: they are tried first, so that their machines are held."""
        for applicant_id in self.state.start_plans:
            if applicant_id in self.state.queue:
                yield self.state.queue.applicants[applicant_id].shape

    def claiming_shapes(self) -> Iterator[PlacementShape]:
        """Yield the shapes of applicants with a claim to machines of the cluster."""
        for claim in self.state.claims.values():
            if claim.applicant in self.state.queue and not claim.reservation:
                yield self.state.queue.applicants[claim.applicant].shape

    def unclaimed(self, machine: Machine) -> FreeCapacity:
        """Return what is free of a machine of the cluster, now and beside all claims."""
        capacity = FreeCapacity.of(machine)
        for hold in self.claims:
            if machine.name in hold.shares and not hold.reservation:
                beside = self.remaining.beside(hold, machine)
                capacity = capacity.minimum(beside) if beside is not None else FreeCapacity(0, 0, 0, 0, {})
        return capacity

    def _holds_for(self, applicant: Applicant) -> _PoolHolds:
        return self._pool_holds.setdefault(applicant.shape.reservation, _PoolHolds())

    def _pool(self, applicant: Applicant) -> MachinePool:
        return self.state.pool_for(applicant.shape.reservation)

    # Placing

    def place(self, applicant: Applicant, preferred: Sequence[Sequence[NodeName]]) -> tuple[Placement, ...] | None:
        """Place an applicant without delaying any for which something is held; None if that is not possible."""
        pool, request = self._pool(applicant), applicant.shape.request
        if not self.claims and not self._pool_holds:
            # The usual case is a pool without holds, and a trial costs more than a placement.
            return pool.place(request, (), preferred)
        holds, held = self._binding_holds(applicant), self._starving_nodes_for(applicant)
        if not holds:
            return pool.place(request, held, preferred)
        # In a trial: whether members respect a hold together is only known when all of them are placed.
        with HypotheticalPool(self.state, applicant.shape.reservation) as trial:
            placed = self._place_beside(trial, request, holds, held, preferred)
            if placed is not None:
                trial.commit()
        return placed

    def place_in_trial(
        self, trial: HypotheticalPool, applicant: Applicant, preferred: Sequence[Sequence[NodeName]] = ()
    ) -> tuple[Placement, ...] | None:
        """Place it within a trial."""
        holds, held = self._binding_holds(applicant), self._starving_nodes_for(applicant)
        return self._place_beside(trial, applicant.shape.request, holds, held, preferred)

    def _place_beside(
        self,
        trial: HypotheticalPool,
        request: PlacementRequest,
        holds: Sequence[MachineHold],
        held: Mapping[NodeName, str],
        preferred: Sequence[Sequence[NodeName]],
    ) -> tuple[Placement, ...] | None:
        """Place it beside the holds, and on none of the held machines."""
        pool, mark = trial.pool, trial.mark
        placed = trial.place(request, _ExcludedMachines(self.remaining, pool, request, holds, held), preferred)
        if placed is None or not self._overcommits(pool, holds, nodes_of(placed)):
            return placed
        # Each member fits beside the hold, all together do not. The second try stays off the held machines: trying
        # subsets of them would have no bound.
        trial.undo_to(mark)
        return trial.place(request, {*held, *(node for hold in holds for node in hold.shares)}, preferred)

    def place_on_claim(
        self, applicant: Applicant, preferred: Sequence[Sequence[NodeName]]
    ) -> tuple[Placement, ...] | None:
        """Place it on the machines of its claim only; None if it does not fit there yet."""
        machines, shares = self._pool(applicant).machines, claim_shares(self.state.claims[applicant.id])
        for node, demands in shares.items():
            if node not in machines or not all(can_hold(machines[node], demand) for demand, _ in demands):
                return None  # something there has not ended yet: the usual case
        # Also on machines held for starving applicants, which the claim keeps from these anyway.
        closed = machines.keys() - shares.keys()
        holds, request = self._binding_holds(applicant), applicant.shape.request
        with HypotheticalPool(self.state, applicant.shape.reservation) as trial:
            excluded = _ExcludedMachines(self.remaining, trial.pool, request, holds, closed)
            placed = trial.place(request, excluded, preferred)
            if placed is None or self._overcommits(trial.pool, holds, nodes_of(placed)):
                return None
            trial.commit()
        return placed

    def _starving_nodes_for(self, applicant: Applicant) -> Mapping[NodeName, str]:
        # A starving applicant may be waiting for the end of a child's parent, which may be waiting for the child.
        exempt = applicant.shape.is_child or applicant.shape.request.is_weightless
        return {} if exempt else self._holds_for(applicant).starving_nodes

    def _binding_holds(self, applicant: Applicant) -> list[MachineHold]:
        request = applicant.shape.request
        # Ports are all that such a request could take from a hold.
        if request.is_weightless and not any(demand.ports for demand in request.demands):
            return []
        holds = self._claims_of_others(applicant)
        # Plans may wait for the parent, and so for the child. Claims wait for ends that are bounded, so they bind
        # children too.
        if applicant.shape.is_child or request.is_weightless:
            return holds
        over_s = occupied_s(self.state, applicant)
        plans = self._holds_for(applicant).plans
        # The rule of EASY: a plan binds only what may still run at its time.
        return [*holds, *(k for k in plans if over_s is None or k.at is None or self.state.now + over_s > k.at)]

    def _claims_of_others(self, applicant: Applicant) -> list[MachineHold]:
        reservation = applicant.shape.reservation
        claimed = self._claimed.get(reservation)
        if claimed is None:
            claims = (hold for hold in self.claims if hold.reservation == reservation)
            claimed = self._claimed[reservation] = _ClaimedShares(claims)
        key = reservation, applicant.id if claimed.has_claim(applicant.id) else ""
        holds = self._claims_but.get(key)
        if holds is None:
            shares = claimed.without(key[1])
            # All claims are one hold: a third applicant may fit beside each of two claims, and yet take what both need
            # together.
            holds = [] if shares.is_empty else [MachineHold("", reservation, shares, None)]
            self._claims_but[key] = holds
        return holds

    def _set_claims(self, claims: list[MachineHold]) -> None:
        self.claims, self._claimed, self._claims_but = claims, {}, {}

    def _overcommits(self, pool: MachinePool, holds: Iterable[MachineHold], nodes: Iterable[NodeName]) -> bool:
        """Return whether several members together take more of a machine than there is beside the holds."""
        found = list(nodes)
        return any(
            self.remaining.beside(hold, pool.machines[node]) is None
            for hold in holds
            for node in found
            if node in hold.shares
        )

    def respects_claims(self, pool: MachinePool, applicant: Applicant, nodes: Iterable[NodeName]) -> bool:
        """Return whether an applicant that was placed on these machines leaves others' claims what they hold."""
        return not self._overcommits(pool, self._claims_of_others(applicant), nodes)

    def on_placed(self, applicant: Applicant, nodes: Iterable[NodeName]) -> None:
        """Drop what was held for an applicant that was placed on these machines: others may fit there now."""
        if applicant.id in self.state.claims:
            self._set_claims([hold for hold in self.claims if hold.applicant != applicant.id])
            self.remaining.clear()
        self.remaining.forget(nodes)
        plan = self.state.start_plans.pop(applicant.id, None)
        if plan is not None:
            self._pool(applicant).mark_freed(plan.shares)

    # Holding

    def on_refused(self, applicant: Applicant) -> StartPlan | None:
        """Hold machines for an applicant that does not fit, and return its plan."""
        shape = applicant.shape
        if (
            shape.is_child
            or shape.request.is_weightless
            or applicant.kind is ApplicantKind.GROWTH
            or applicant.id in self.state.claims
        ):
            return None
        pool_holds, starves = self._holds_for(applicant), is_starving(self.state, applicant)
        plan = None
        # One plan, for the first that is refused: every further one keeps more machines idle. Only starving applicants
        # get one as well.
        if not pool_holds.plans_in_use or (starves and len(pool_holds.plans_in_use) < MAX_PLANS):
            plan = self._plan_for(applicant, pool_holds)
            if plan is None:
                return None
            pool_holds.plans_in_use[applicant.id] = plan
        self._hold(applicant, plan)
        return plan

    def restore_hold(self, applicant: Applicant) -> None:
        """Hold the same machines as before for an applicant that did not fit."""
        self._hold(applicant, self.state.start_plans.get(applicant.id))

    def _hold(self, applicant: Applicant, plan: StartPlan | None) -> None:
        pool_holds = self._holds_for(applicant)
        if plan is not None and plan.at is not None:
            pool_holds.plans.append(MachineHold(applicant.id, applicant.shape.reservation, plan.shares, plan.at))
            self.held_machines[applicant.id] = HeldMachines(applicant.shape.reservation, dict.fromkeys(plan.shares))
        elif (
            is_starving(self.state, applicant) and len(pool_holds.starving_nodes) < self._pool(applicant).open_machines
        ):
            nodes = nodes_to_hold(self.state, applicant)
            self.held_machines[applicant.id] = HeldMachines(applicant.shape.reservation, nodes)
            # The first applicant in order has the machine; the later ones wait for others.
            pool_holds.starving_nodes = dict.fromkeys(nodes, applicant.id) | pool_holds.starving_nodes

    def holds_all(self, reservation: str = "") -> bool:
        """Return whether all machines of this pool are held, so that later applicants need not be tried."""
        pool_holds = self._pool_holds.get(reservation)
        return (
            pool_holds is not None and len(pool_holds.starving_nodes) >= self.state.pool_for(reservation).open_machines
        )

    def _plan_for(self, applicant: Applicant, pool_holds: _PoolHolds) -> StartPlan | None:
        """Return its plan as long as that may be kept, else a new one; None if that is left to the next step."""
        pool, before = self._pool(applicant), self.state.start_plans.get(applicant.id)
        if before is not None and _is_plan_current(self.state, pool, before):
            return before
        if self.state.queue.has_spent_work:
            # A plan that is only to be renewed still keeps its promise.
            if before is not None and _is_plan_kept(self.state, pool, before):
                return before
            self.is_out_of_work = True
            return None
        # A machine held for an earlier applicant is not free at the planned time, however early the plan says it is.
        held = self.nodes_held_for_others(applicant) | {node: None for claim in self.claims for node in claim.shares}
        # Not a stored row: made again after a restart of the controller, from limits and placements, a plan is never
        # later.
        plan = self.state.start_plans[applicant.id] = make_plan(self.state, applicant, held)
        if before is not None:
            # The new plan may hold other machines than the old one.
            pool.mark_freed(before.shares)
        return plan

    def nodes_held_for_others(self, applicant: Applicant) -> dict[NodeName, None]:
        """Return machines held for earlier applicants, without claims, of which only shares are held."""
        pool_holds = self._holds_for(applicant)
        held = {node: None for node, whose in pool_holds.starving_nodes.items() if whose != applicant.id}
        return held | {
            node: None for hold in pool_holds.plans if hold.applicant != applicant.id for node in hold.shares
        }

    def on_claimed(self, applicant: Applicant) -> None:
        """Replace the plan of an applicant by its claim, after victims were chosen for it."""
        pool_holds = self._holds_for(applicant)
        self._set_claims([*self.claims, _hold_of_claim(self.state.claims[applicant.id])])
        self.remaining.clear()
        # Plan and claim together would hold its share twice.
        pool_holds.plans = [hold for hold in pool_holds.plans if hold.applicant != applicant.id]
        pool_holds.plans_in_use.pop(applicant.id, None)

    def finish(self) -> None:
        """Drop the plans of applicants that are no longer the first; others may fit where they were in the way."""
        before = self.state.start_plans
        self.state.start_plans = {
            name: plan for pool_holds in self._pool_holds.values() for name, plan in pool_holds.plans_in_use.items()
        }
        if self.is_out_of_work:
            # The pass has not come to the others, which may need their plans when it continues.
            self.state.start_plans = before | self.state.start_plans
        for name, plan in before.items():
            if name not in self.state.start_plans and name in self.state.queue:
                self._pool(self.state.queue.applicants[name]).mark_freed(plan.shares)


def current_holds(state: Tables, applicant: Applicant) -> MachineHolds:
    """Return what would be held against an applicant that does not wait yet, if the next pass came now."""
    holds = MachineHolds(state)
    heads = {head.id: head for head in starving_heads(state)}
    heads |= {name: state.queue.applicants[name] for name in state.start_plans if name in state.queue}
    own_key = order_key(state.queue, applicant)
    for place, head in sorted((order_key(state.queue, head), head.id) for head in heads.values()):
        # Applicants behind it hold nothing against it. Claims are in force already.
        if place < own_key and head not in state.claims:
            holds.restore_hold(heads[head])
    return holds


def _hold_of_claim(claim: CapacityClaim) -> MachineHold:
    return MachineHold(claim.applicant, claim.reservation, claim_shares(claim), None)


def _is_plan_current(state: Tables, pool: MachinePool, plan: StartPlan) -> bool:
    if plan.at is None:
        # A new machine may make a plan possible before the pause has passed.
        return state.now < plan.made_at + RETRY_PLAN_S and plan.machines == pool.open_machines
    # It is renewed now and then, as jobs end before their limits; within one step it is never made twice.
    is_recent = state.now < plan.made_at + RENEW_PLAN_S or plan.made_at == state.now
    return is_recent and _is_plan_kept(state, pool, plan)


def _is_plan_kept(state: Tables, pool: MachinePool, plan: StartPlan) -> bool:
    """Return whether a plan still keeps its promise, if it has a time."""
    if plan.at is None:
        return True
    soon = state.now < plan.at or plan.made_at == state.now
    return soon and all(node in pool.machines and pool.machines[node].is_open for node in plan.shares)
