"""Placement passes: which applicants are tried, in which order, and what is held for those that do not fit.

Later applicants may pass one that does not fit. But once it has waited ``starve_s``, they may not take anything of the
machines it could use until it is placed. Not held back are applicants that take nothing, jobs launched by running jobs
(for which those may be waiting), and those whose victims have ended, as their claims keep these machines anyway.

A pass tries what could fit now and did not before: new applicants, those that fit a machine on which something was
freed, and all of them when the pool's version has changed. A few candidates are sorted by their order; otherwise the
queue is walked from its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from fray.scheduler.backfill.backfill import MachineHolds
from fray.scheduler.backfill.starvation import MAX_HELD_FOR, is_starving
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs import groups
from fray.scheduler.jobs.transitions import start_job
from fray.scheduler.pool.free_capacity import FreeCapacity
from fray.scheduler.pool.pool import Machine
from fray.scheduler.pool.requests import Placement, nodes_of
from fray.scheduler.preemption import preemption
from fray.scheduler.queue.applicant import Applicant, ApplicantKind, HeldMachines
from fray.scheduler.queue.indexes import TenantShapeQueue, WaitingShape
from fray.scheduler.queue.order import TenantRoundRobin
from fray.scheduler.queue.quotas import QuotaStatus, quota_status
from fray.scheduler.reservations import reservations
from fray.scheduler.state.state import State

# Candidates are sorted by their order; beyond some number a walk from the head of the queue is cheaper. How far it has
# to go grows with the number of shapes that wait: with 19,300 (1,000,000 jobs) walks were nearly all slow steps.
MAX_CANDIDATES = 200
"""Number of candidate shapes that are always sorted; with more, and more than `CANDIDATE_SHARE` of all, the queue is
walked."""
CANDIDATE_SHARE = 1 / 50
# Freed machines that are compared with the waiting shapes one by one; with more, every shape may fit somewhere.
FEW_MACHINES = 8
MAX_STARVING = 200
MAX_PLACED = 64
"""Number of applicants that are placed beside holds in one pass, which is ten times the work of placing them on a free
machine; the next step continues with the others."""
PHASES = (QuotaStatus.WITHIN, QuotaStatus.BORROWS, QuotaStatus.GROWS)


def _start_job(state: State, out: EffectBuffer, applicant: Applicant, placed: Sequence[Placement]) -> None:
    start_job(state, out, state.jobs[applicant.id], placed[0])


def _start_group(state: State, out: EffectBuffer, applicant: Applicant, placed: Sequence[Placement]) -> None:
    groups.start_group(state, out, state.job_groups[applicant.id], placed)


Starter: TypeAlias = Callable[[State, EffectBuffer, Applicant, Sequence[Placement]], None]
STARTERS: Mapping[ApplicantKind, Starter] = {
    ApplicantKind.JOB: _start_job,
    ApplicantKind.GROUP: _start_group,
    ApplicantKind.RESERVATION: reservations.apply_grant,
    ApplicantKind.GROWTH: reservations.apply_grant,
}
"""Functions that start an applicant on its places; it has left the queue already."""


def place_waiting(state: State, out: EffectBuffer) -> None:
    """Place everything that waits and can be placed, in order; each shape is given up at its first refusal."""
    queue, pool = state.queue, state.pool
    if state.claims:
        # First: a claim that is dropped frees its machines for this very pass.
        preemption.drop_stale_claims(state)
    # Counted for the whole step, over all passes: the controller answers no request meanwhile.
    queue.work = 0
    pool.now = state.now
    state.rank_by_time()
    # Passes are repeated until they change nothing. Victims are sought only then: a search costs more than a pass, and
    # a victim whose attempts have not started ends at once, which makes another pass worth it.
    again = _is_pass_due(state)
    while queue and (again or queue.preemption_candidates):
        again = again and PlacementPass(state, out).run()
        if not again and not _search_preemption(state, out):
            break
        again = True
        if queue.has_spent_work or queue.is_unfinished:
            queue.is_unfinished = True
            preemption.continue_next_step(state)
            break
    if not queue:
        state.start_plans.clear()
        queue.held_machines, queue.last_holder, queue.is_unfinished = {}, "", False
    # Kept only while passes leave applicants out: what was freed was not offered to those.
    if (queue.was_cut_short or queue.is_unfinished) and queue:
        queue.skipped_machines.update(pool.freed)
    else:
        queue.skipped_machines = {}
    pool.freed.clear()
    if queue.is_unfinished:
        return  # the next pass finds what was freed of reservations
    for reservation_id in state.changed_pools:
        state.reservation_pools[reservation_id].freed.clear()
    state.changed_pools.clear()


def _search_preemption(state: State, out: EffectBuffer) -> bool:
    """Search victims for waiting applicants; return whether one ended at once, as its attempts had not started."""
    before = _freed_counts(state)
    if state.queue.preemption_candidates:
        preemption.search_for_candidates(state, out)
    return _freed_counts(state) != before


def _freed_counts(state: State) -> tuple[int, ...]:
    """Return counts that change when something is freed, or is no longer held."""
    pools = (state.pool, *state.reservation_pools.values())
    return tuple(number for pool in pools for number in (pool.freed_count, len(pool.freed)))


def _is_pass_due(state: State) -> bool:
    queue, pool = state.queue, state.pool
    if queue.is_unfinished:
        return True
    something = (
        queue.untried
        or queue.in_reservations
        or queue.held_machines
        or pool.freed
        or queue.skipped_machines
        or queue.seen_version != pool.version
    )
    # Held machines alone would make a pass due in every step: the same inputs give the same result.
    return bool(something) and queue.last_inputs != state.placement_inputs()


class PlacementPass:
    """One walk over the applicants that are worth a try."""

    def __init__(self, state: State, out: EffectBuffer) -> None:
        self.state, self.queue, self.pool = state, state.queue, state.pool
        self.out = out
        self.queue.pass_number += 1
        self.pass_number = self.queue.pass_number
        # The version changes where no list of freed machines tells what may fit now: with the policy, and when a
        # reservation is closed.
        self.is_full = self.queue.seen_version != self.pool.version
        self.queue.seen_version = self.pool.version
        self.starving_lanes = self.queue.aged(state.now - state.config.starve_s, MAX_STARVING)
        """Queues in which something starves; None if there are many."""
        if state.with_surplus and any(name in state.reservations_on for name in self.pool.freed):
            # Reservations could release units on freed machines: each applicant may request that again.
            self.queue.refused.update(dict.fromkeys(self.queue.waiting))
        self.holds = MachineHolds(state)
        freed, skipped = self.pool.freed, self.queue.skipped_machines
        self.has_many_skipped = bool(self.queue.last_holder) or len(skipped) > FEW_MACHINES
        """True if shapes that the last pass did not come to may fit on many machines."""
        if not self.has_many_skipped:
            freed = freed | skipped
        machines = self.pool.machines
        open_machines = [one for name in freed if (one := machines.get(name)) is not None and one.is_open]
        self.has_many_freed = len(open_machines) > FEW_MACHINES
        """True if so many were freed in this step."""
        self.freed_rooms = (
            # Without what is claimed: every shape that fits a victim's machine would be tried there, only to be
            # refused.
            [] if self.has_many_freed else [(machine, self.holds.unclaimed(machine)) for machine in open_machines]
        )
        """Freed machines, with what of them was not claimed when the pass began."""
        self.claiming_shapes = {self.queue.waiting[shape]: None for shape in self.holds.claiming_shapes()}
        self.planned_shapes = {self.queue.waiting[shape]: None for shape in self.holds.waiting_shapes()}
        """Shapes with a plan from the last pass."""
        self.noted_refusals: dict[WaitingShape, None] = {}
        """Shapes whose first refused applicant was passed to `MachineHolds.on_refused`."""
        self.starving_count = 0
        self.phase = QuotaStatus.WITHIN
        self.later_phases: dict[QuotaStatus, None] = {}
        """Quota statuses of applicants that come later in this band."""
        self.is_cut_short = False
        self.last_holder = ""
        """Applicant with whose hold all machines were held."""
        self._blocked_claims: dict[str, None] = {}
        self._claim_changes = -1
        self._claimants_by_shape: dict[WaitingShape, list[str]] = {}
        """Applicants with claims, by shape, after that many changes of claims."""
        self.placed_count = 0
        self.placed_claimant = False
        """True if a claimant was placed since the walk last asked."""
        self.had_holds = bool(self.queue.held_machines or state.claims)
        """True if machines were held in the last pass: what did not fit beside a hold may come before it now."""
        self.freed_before = _freed_counts(self.state)

    def run(self) -> bool:
        """Run the pass; return whether another one may place more."""
        queue, state = self.queue, self.state
        # Replaced, not cleared at the end: what is added during the pass is tried by the next one.
        fresh, queue.untried = queue.untried, {}
        # Too many starving queues to list: the walk from the head holds machines for the first ones, then it stops.
        if self.starving_lanes is None:
            self._walk(None, self._holds_suffice)
        if self.is_cut_short:
            pass  # all machines are held for those that were tried
        elif self.is_full:
            self._walk_to_end(None)
        # Nothing was freed: what is placed only takes room, so the candidates are determined once.
        elif not (self.freed_rooms or self.has_many_freed or self.has_many_skipped):
            self._walk_to_end(self._candidates(fresh))
        else:
            while self._walk(self._candidates(fresh), self._stop_when_placed):
                pass  # the other candidates may no longer fit
        # All machines are held, but never against what takes nothing or belongs to a running job.
        if self.is_cut_short:
            self._walk_to_end([lane.waiting for lane in queue.exempt])
            # Nor against those whose victims have ended: a claim binds all others, so its machines would be idle.
            for want in self.claiming_shapes:
                self._place_claimants(want)
        self.holds.finish()
        self._release_holds(queue.held_machines)
        queue.is_unfinished = self.holds.is_out_of_work
        if queue.is_unfinished:
            # The next pass tries all that this one has not come to, also what nothing but its arrival made worth a try.
            queue.untried = {lane: None for lane in fresh if lane.entries} | queue.untried
            if self.is_full:
                queue.seen_version = -1
            preemption.continue_next_step(state)
        queue.was_cut_short, queue.held_machines = self.is_cut_short, self.holds.held_machines
        queue.last_holder = self.last_holder
        queue.last_inputs = state.placement_inputs()
        freer = _freed_counts(self.state) != self.freed_before
        return freer or queue.seen_version != self.pool.version or bool(queue.untried)

    def _release_holds(self, before: Mapping[str, HeldMachines]) -> None:
        """Mark machines that are no longer held as freed."""
        for applicant_id, held in before.items():
            # Only shapes that the last pass did not come to were refused these machines (`has_many_skipped`). To try
            # all claimants again whenever this applicant changes would be most of the work.
            if applicant_id == self.queue.last_holder:
                continue
            now = self.holds.held_machines.get(applicant_id)
            names = held.nodes if now is None else [name for name in held.nodes if name not in now.nodes]
            if names and (not held.reservation or held.reservation in self.state.reservation_pools):
                self.state.pool_for(held.reservation).mark_freed(names)

    # Candidates

    def _candidates(self, fresh: Iterable[TenantShapeQueue]) -> list[WaitingShape] | None:
        """Return shapes that could fit now and did not before, and starving ones; None if those are most of all."""
        if self.has_many_freed or self.has_many_skipped:
            return None
        found = {
            lane.waiting: None
            for lane in (*fresh, *self.queue.in_reservations)
            if lane.entries and self._may_succeed(lane)
        }
        found |= {lane.waiting: None for lane in self.starving_lanes or () if lane.entries}
        # Even if nothing was freed for them: their machines have to be held before later applicants are tried.
        found |= {want: None for want in (*self.planned_shapes, *self.claiming_shapes) if want.lanes}
        limit = max(MAX_CANDIDATES, CANDIDATE_SHARE * len(self.queue.waiting))
        for machine, capacity in self.freed_rooms:
            for want in self._fitting_shapes(machine, capacity):
                if want.refused_in_pass != self.pass_number:
                    found[want] = None
                    if len(found) > limit:
                        return None
        return list(found)

    def _fitting_shapes(self, machine: Machine, capacity: FreeCapacity) -> Iterator[WaitingShape]:
        """Yield the shapes that may fit there now, after the placements of this pass."""
        cpu_milli, memory_bytes = (
            # The room is that of the beginning of the pass, the machine shows what the pass has taken since: both are
            # limits.
            min(machine.cpu_milli, capacity.cpu_milli),
            min(machine.memory_bytes, capacity.memory_bytes),
        )
        kinds = ["", *dict.fromkeys(kind for (kind, _), count in capacity.devices.items() if count)]
        for kind in kinds:
            needs = self.queue.shape_indexes.get(kind)
            for want in needs.within(cpu_milli, memory_bytes) if needs is not None else ():
                if not kind or (_has_room(machine, want) and _may_fit(capacity, want)):
                    yield want

    def _may_succeed(self, lane: TenantShapeQueue) -> bool:
        """Return whether something has changed since it did not fit, and its shape was not refused in this pass."""
        want = lane.waiting
        if want.refused_in_pass == self.pass_number:
            return False
        # Pools of reservations are small: they have no index by size, and any freed machine is a reason to try.
        if want.shape.reservation:
            pool = self.state.pool_for(want.shape.reservation)
            return want.failed_version != pool.version or self.had_holds or bool(pool.freed)
        version = self.pool.version
        # Beside holds, a refusal may be due to one applicant's time limit or claim, so each queue of the shape is
        # tried.
        if want.failed_version != version or (self.had_holds and lane.failed_version != version):
            return True
        if want.unchanged_in_pass == self.pass_number:
            return False
        # A shape that waits for victims was compared with the skipped machines in the last pass, if that came to it.
        # There may be hundreds of these; of others few are tried until all machines are held.
        was_examined = want.examined_in_pass >= self.pass_number - 1 and self._waits_for_victims(lane)
        if self.has_many_freed or (self.has_many_skipped and not was_examined):
            return True
        for machine, capacity in self.freed_rooms:
            if _has_room(machine, want) and (want in self.claiming_shapes or _may_fit(capacity, want)):
                return True
        # Freed machines only lose room during a pass: the shape need not be compared with them again.
        want.unchanged_in_pass = self.pass_number
        return False

    def _is_candidate(self, lane: TenantShapeQueue) -> bool:
        """Return whether `TenantRoundRobin` should try it now."""
        want = lane.waiting
        if self.is_cut_short and not want.is_exempt:
            return False
        if not self._may_succeed(lane) and not self._needs_hold(lane):
            return False
        stands, whose = QuotaStatus.GROWS if want.shape.is_growth else QuotaStatus.WITHIN, ""
        if self.state.shares.has_quotas:
            stands, whose = quota_status(self.state.shares, lane.tenant_queue.tenant, want)
        if stands is self.phase:
            return True
        want.failed_version = -1  # not tried: it may fit
        if stands is QuotaStatus.WAITS:
            # Tried again when this owner uses less. Freed machines would not lead to that: what ends may run where it
            # cannot fit.
            self.queue.over_quota.setdefault(whose, {})[lane] = None
        elif stands > self.phase:
            self.later_phases[stands] = None
        return False

    def _needs_hold(self, lane: TenantShapeQueue) -> bool:
        """Return whether its first applicant may need a hold and was not passed to `on_refused` yet."""
        if lane.waiting in self.noted_refusals:
            return False
        if lane.waiting in self.planned_shapes and self.queue.first(lane).id in self.state.start_plans:
            return True
        return (
            self.starving_lanes != []
            and self.starving_count < MAX_HELD_FOR
            and is_starving(self.state, self.queue.first(lane))
        )

    # Trying

    def _walk(self, shapes: Sequence[WaitingShape] | None, until: Callable[[bool], bool] | None = None) -> bool:
        """Try queues of these shapes (None for all, until the pass is cut short) in order.

        Args:
            until: function of whether a try succeeded; True ends the walk, and is returned.
        """
        if not shapes if shapes is not None else self.is_cut_short:
            return False
        for rank in sorted(self.queue.tenants):
            # Within a band, applicants of all tenants that are within their quotas come before the first that borrows.
            self.later_phases.clear()
            for phase in PHASES:
                if phase is not QuotaStatus.WITHIN and phase not in self.later_phases:
                    continue
                self.phase = phase
                for lane in TenantRoundRobin(self.queue, rank, shapes, self._is_candidate):
                    placed = self._try_lane(lane)
                    if until is not None and until(placed):
                        return True
                    # Only exempt queues are left, which are tried by themselves: the others may be thousands.
                    if shapes is None and self.is_cut_short:
                        return False
        return False

    def _walk_to_end(self, shapes: Sequence[WaitingShape] | None) -> None:
        """Walk, and start again when a claimant was placed: it may have left a queue that was already passed."""
        while self._walk(shapes, self._has_placed_claimant):
            pass

    def _has_placed_claimant(self, placed: bool) -> bool:
        found, self.placed_claimant = self.placed_claimant, False
        return found

    def _holds_suffice(self, placed: bool) -> bool:
        return self.is_cut_short or self.starving_count >= MAX_HELD_FOR

    @staticmethod
    def _stop_when_placed(placed: bool) -> bool:
        return placed

    def _try_lane(self, lane: TenantShapeQueue) -> bool:
        """Place its first applicant, or hold machines for it; return whether anything was placed."""
        want, applicant = lane.waiting, self.queue.first(lane)
        if self._may_succeed(lane) and self._place(lane, applicant):
            return True
        # Applicants of one shape fit or do not fit together, so the refusal counts for the whole shape until the pass
        # ends.
        want.refused_in_pass = self.pass_number
        if want in self.noted_refusals:
            return False
        self._on_refused(want, applicant)
        # Except for those with claims: an earlier applicant may still wait for its own victims, or for a plan, when the
        # victims of a later one have ended.
        return self._place_claimants(want)

    def _place_claimants(self, want: WaitingShape) -> bool:
        """Place the applicants of a refused shape whose claimed machines are free; return whether there were any."""
        state = self.state
        for applicant_id in self._claimants(want):
            if self._is_claim_blocked(applicant_id):
                continue
            applicant = self.queue.applicants[applicant_id]
            tenant = self.queue.lane_of(applicant).tenant_queue.tenant
            if quota_status(state.shares, tenant, want)[0] is QuotaStatus.WAITS:
                continue
            placed = self.holds.place_on_claim(applicant, state.preferred_nodes(applicant))
            if placed is not None:
                self._start(applicant, placed)
                self.placed_claimant = True
        return self.placed_claimant

    def _claimants(self, want: WaitingShape) -> list[str]:
        """Return the waiting applicants of this shape that have claims, in the order of the claims."""
        # Asked for each refused shape, of which there may be hundreds, as there may be of claims; these seldom change.
        if self.state.claim_changes != self._claim_changes:
            self._claim_changes, self._claimants_by_shape = self.state.claim_changes, {}
            for each in self.state.claims:
                if (applicant := self.queue.applicants.get(each)) is not None:
                    self._claimants_by_shape.setdefault(self.queue.waiting[applicant.shape], []).append(each)
        claimants = self._claimants_by_shape.get(want)
        return [each for each in claimants if each in self.queue] if claimants else []

    def _waits_for_victims(self, lane: TenantShapeQueue) -> bool:
        applicant_id = lane.head[-1]
        return applicant_id in self.state.claims and self._is_claim_blocked(applicant_id)

    def _is_claim_blocked(self, applicant_id: str) -> bool:
        """Return whether a claim surely has to wait for the end of a victim; found out once in a pass."""
        if applicant_id not in self._blocked_claims:
            if not preemption.is_claim_blocked(self.state, self.state.claims[applicant_id]):
                return False
            self._blocked_claims[applicant_id] = None
        return True

    def _on_refused(self, want: WaitingShape, applicant: Applicant) -> None:
        self.noted_refusals[want] = None
        if applicant.id in self.state.claims:
            if self._is_claim_blocked(applicant.id):
                return  # its machines are held by the claim
        elif is_starving(self.state, applicant):
            self.starving_count += 1
        plan = self.holds.on_refused(applicant)
        if self.holds.is_out_of_work:
            # Its plan is made in the next step. Whatever is placed behind it now could be in its way.
            self.is_cut_short = True
            return
        if preemption.try_preempt(self.state, self.out, applicant, self.holds, plan):
            self.holds.on_claimed(applicant)
        # The rest of the queue could place nothing any more, and need not be walked: it may have 100,000 entries.
        if not self.last_holder and self.holds.holds_all():
            self.last_holder, self.is_cut_short = applicant.id, True

    def _place(self, lane: TenantShapeQueue, applicant: Applicant) -> bool:
        want, state = lane.waiting, self.state
        pool = state.pool_for(want.shape.reservation)
        preferred = state.preferred_nodes(applicant)
        placed = self.holds.place(applicant, preferred)
        if placed is None and len(preferred) > 1:  # members of a group differ: one may prefer what only another can use
            placed = self.holds.place(applicant, ())
        if placed is None:
            want.failed_version = lane.failed_version = pool.version
            self.queue.refused[want.shape] = None
            return False
        self._start(applicant, placed)
        return True

    def _start(self, applicant: Applicant, placed: Sequence[Placement]) -> None:
        self.holds.on_placed(applicant, nodes_of(placed))
        if applicant.id in self.state.claims:
            self.state.drop_claim(applicant.id)
        self.queue.remove(applicant.id)
        self.placed_count += 1
        if self.placed_count >= MAX_PLACED and self.had_holds:
            self.holds.is_out_of_work = self.is_cut_short = True
        STARTERS[applicant.kind](self.state, self.out, applicant, placed)


def _has_room(machine: Machine, want: WaitingShape) -> bool:
    """Return whether the shape may fit the machine as it is now, after the placements of this pass."""
    if machine.cpu_milli < want.cpu_milli or machine.memory_bytes < want.memory_bytes:
        return False
    return not want.kind or any(
        len(ids) >= want.count for (kind, _), ids in machine.devices.items() if kind == want.kind
    )


def _may_fit(capacity: FreeCapacity, want: WaitingShape) -> bool:
    """Return whether the shape may fit this room, by a quick check."""
    if capacity.cpu_milli < want.cpu_milli or capacity.memory_bytes < want.memory_bytes:
        return False
    return not want.kind or any(
        count >= want.count for (kind, _), count in capacity.devices.items() if kind == want.kind
    )
