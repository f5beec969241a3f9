"""Who gets a machine next: whose turn it is (`turns`), whole gangs; and nobody starves.

What does not fit lets later ones pass. But once it has waited ``starve_s``, later ones may no longer take anything of
the machines it could use, until it has its place. Those that take nothing, and jobs launched by running ones (which
those may be waiting for), are not held back.

A pass looks at what could fit now and did not before: what has just come, what fits into a machine that has become
freer, and everything when the pool says that anything may fit. If that is little, it is sorted by turn; else the line
is walked from its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from fray.scheduler.backfill.backfill import MachineHolds
from fray.scheduler.backfill.starvation import KEPT_FOR, starving
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs import groups
from fray.scheduler.jobs.transitions import start_job
from fray.scheduler.pool.free_capacity import FreeCapacity
from fray.scheduler.pool.pool import Machine
from fray.scheduler.pool.requests import Placement
from fray.scheduler.preemption import preemption
from fray.scheduler.queue.indexes import TenantShapeQueue, WaitingShape
from fray.scheduler.queue.order import TenantRoundRobin
from fray.scheduler.queue.queue import Applicant, ApplicantKind
from fray.scheduler.queue.quotas import QuotaStatus, quota_status
from fray.scheduler.reservations import reservations
from fray.scheduler.state.start_plans import HeldMachines
from fray.scheduler.state.state import State

MOST = 200
"""So many wants are looked for; with more, the line is walked."""
FEW_MACHINES = 8
FEW_AGED = 200
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
"""Who makes something of the places an applicant was given; it is out of the queue already."""


def place_waiting(state: State, out: EffectBuffer) -> None:
    """Place all that waits and can be placed, in order; each shape is given up at its first refusal."""
    queue, pool = state.queue, state.pool
    preemption.drop_stale_claims(state)
    queue.searches = 0
    pool.now = state.now
    state.rank_by_time()
    pool.freed.update((name, None) for name in queue.missed if name in pool.machines)
    again = _is_due(state)
    while queue and (again or queue.seeking):
        again = again and PlacementPass(state, out).run()
        if not again and not _seek(state, out):
            break
        again = True
    queue.missed = dict(pool.freed) if queue.cut and queue else {}
    if not queue:
        state.plans.clear()
        queue.holders = {}
    pool.freed.clear()
    for reservation_id in state.stirred:
        state.reserved[reservation_id].freed.clear()
    state.stirred.clear()


def _seek(state: State, out: EffectBuffer) -> bool:
    """Whether anybody whose place was taken has ended at once: he had not begun yet."""
    before = _freed(state)
    if state.queue.seeking:
        preemption.seek_for_others(state, out)
    return _freed(state) != before


def _freed(state: State) -> tuple[int, ...]:
    """Whether it has changed says that something has become free, or is kept for somebody no more."""
    pools = (state.pool, *state.reserved.values())
    return tuple(number for pool in pools for number in (pool.loosened, len(pool.freed)))


def _is_due(state: State) -> bool:
    queue, pool = state.queue, state.pool
    something = queue.fresh or queue.apart or queue.holders or pool.freed or queue.seen != pool.version
    return bool(something) and queue.looked != _looked(state)


def _looked(state: State) -> object:
    """While this is the same, so is what a pass would come to."""
    pools = [pool.changes for pool in state.reserved.values()]
    return state.pool.changes, state.pool.version, state.queue.changes, state.shares.ranked_at, pools


class PlacementPass:
    """One walk over what is worth a try."""

    def __init__(self, state: State, out: EffectBuffer) -> None:
        self.state, self.queue, self.pool = state, state.queue, state.pool
        self.out = out
        self.queue.turn += 1
        self.turn = self.queue.turn
        self.everything = self.queue.seen != self.pool.version
        self.queue.seen = self.pool.version
        self.aged = self.queue.aged(state.now - state.rules.starve_s, FEW_AGED)
        """Lanes in which something starves; None: they are many."""
        if state.lending and any(name in state.units_on for name in self.pool.freed):
            # with what reservations give back there something may fit now: everybody may ask for that again
            self.queue.refused.update(dict.fromkeys(self.queue.waiting))
        self.keeps = MachineHolds(state)
        freed = [machine for name in self.pool.freed if (machine := self.pool.machines[name]).open]
        self.many = len(freed) > FEW_MACHINES
        """Machines that have become freer: too many to look at each."""
        self.rooms = [] if self.many else [(machine, self.keeps.unclaimed(machine)) for machine in freed]
        """Machines that have become freer, and what of them was claimed by nobody when the pass began."""
        self.claimants = {self.queue.waiting[shape]: None for shape in self.keeps.claiming_shapes()}
        self.planned = {self.queue.waiting[shape]: None for shape in self.keeps.waiting_shapes()}
        """Those that have a plan from the pass before."""
        self.noted: dict[WaitingShape, None] = {}
        """Those of which the first that was refused has been told to `keeps`."""
        self.starved = 0
        self.phase = QuotaStatus.WITHIN
        self.behind: dict[QuotaStatus, None] = {}
        """Standings of those that come later in this band."""
        self.cut = False
        self.is_kept = bool(self.queue.holders or state.claims)
        """Something was kept at the last pass: who did not fit beside it may be before it now."""
        self.freed = _freed(self.state)

    def run(self) -> bool:
        """Whether another pass may find more."""
        queue, state = self.queue, self.state
        fresh, queue.fresh = queue.fresh, {}
        if self.aged is None:
            self._walk(None, self._keeps_enough)
        if self.cut:
            pass  # all machines are kept for those who were tried
        elif self.everything:
            self._walk(None)
        elif not self.rooms and not self.many:
            self._walk(self._in_question(fresh))
        else:
            while self._walk(self._in_question(fresh), self._has_placed):
                pass  # what was in question may no longer fit
        if self.cut:
            self._walk([lane.want for lane in queue.exempt])
        self.keeps.end()
        self._loosen(queue.holders)
        queue.cut, queue.holders = self.cut, self.keeps.kept
        queue.looked = _looked(state)
        freer = _freed(self.state) != self.freed
        return freer or queue.seen != self.pool.version or bool(queue.fresh)

    def _loosen(self, before: Mapping[str, HeldMachines]) -> None:
        """Machines that are kept for somebody no more may be used by others."""
        for applicant_id, kept in before.items():
            now = self.keeps.kept.get(applicant_id)
            names = kept.nodes if now is None else [name for name in kept.nodes if name not in now.nodes]
            if names and (not kept.reservation or kept.reservation in self.state.reserved):
                self.state.pool_for(kept.reservation).loosen(names)

    # What is worth a try

    def _in_question(self, fresh: Iterable[TenantShapeQueue]) -> list[WaitingShape] | None:
        """What could fit now and did not before, and what starves; None: that is most of it."""
        if self.many:
            return None
        found = {lane.want: None for lane in (*fresh, *self.queue.apart) if lane.line and self._hopeful(lane)}
        found |= {lane.want: None for lane in self.aged or () if lane.line}
        found |= {want: None for want in (*self.planned, *self.claimants) if want.lanes}
        for machine, room in self.rooms:
            for want in self._fitting(machine, room):
                if want.turn != self.turn:
                    found[want] = None
                    if len(found) > MOST:
                        return None
        return list(found)

    def _fitting(self, machine: Machine, room: FreeCapacity) -> Iterator[WaitingShape]:
        """Those that may fit there as it is now: somebody may just have been placed there."""
        cpu_milli, memory_bytes = min(machine.cpu_milli, room.cpu_milli), min(machine.memory_bytes, room.memory_bytes)
        kinds = ["", *dict.fromkeys(kind for (kind, _), count in room.devices.items() if count)]
        for kind in kinds:
            for mark in ("", "!"):
                needs = self.queue.needs.get(mark + kind)
                for want in needs.within(cpu_milli, memory_bytes) if needs is not None else ():
                    if not kind or (_has_room(machine, want) and _may_fit(room, want)):
                        yield want

    def _hopeful(self, lane: TenantShapeQueue) -> bool:
        """Something has changed for it since it last did not fit, and its like was not refused in this pass."""
        want = lane.want
        if want.turn == self.turn:
            return False
        if want.shape.reservation:
            pool = self.state.pool_for(want.shape.reservation)
            return want.failed != pool.version or self.is_kept or bool(pool.freed)
        version = self.pool.version
        if want.failed != version or (self.is_kept and lane.failed != version):
            return True
        if self.many:
            return True
        if want.hopeless == self.turn:
            return False
        for machine, room in self.rooms:
            if _has_room(machine, want) and (want in self.claimants or _may_fit(room, want)):
                return True
        want.hopeless = self.turn
        return False

    def _consider(self, lane: TenantShapeQueue) -> bool:
        """See `turns.Round`."""
        want = lane.want
        if self.cut and not want.exempt:
            return False
        if not self._hopeful(lane) and not self._keeps(lane):
            return False
        stands, whose = quota_status(self.state.shares, lane.space.tenant, want)
        if stands is self.phase:
            return True
        want.failed = -1  # it may fit by now, and was not tried
        if stands is QuotaStatus.WAITS:
            self.queue.over_quota.setdefault(whose, {})[lane] = None
        elif stands > self.phase:
            self.behind[stands] = None
        return False

    def _keeps(self, lane: TenantShapeQueue) -> bool:
        """Something may have to be kept for its first, and was not yet."""
        if lane.want in self.noted:
            return False
        if lane.want in self.planned and self.queue.first(lane).id in self.state.plans:
            return True
        return self.aged != [] and self.starved < KEPT_FOR and starving(self.state, self.queue.first(lane))

    # Trying

    def _walk(self, wants: Sequence[WaitingShape] | None, until: Callable[[bool], bool] | None = None) -> bool:
        """Try lanes of these wants (None: of all) in their order.

        Args:
            until: told after each try whether it was placed; True ends the walk, and is returned.
        """
        if wants is not None and not wants:
            return False
        for rank in sorted(self.queue.spaces):
            self.behind.clear()
            for phase in PHASES:
                if phase is not QuotaStatus.WITHIN and phase not in self.behind:
                    continue
                self.phase = phase
                for lane in TenantRoundRobin(self.queue, rank, wants, self._consider):
                    placed = self._try(lane)
                    if until is not None and until(placed):
                        return True
        return False

    def _keeps_enough(self, placed: bool) -> bool:
        return self.cut or self.starved >= KEPT_FOR

    @staticmethod
    def _has_placed(placed: bool) -> bool:
        return placed

    def _try(self, lane: TenantShapeQueue) -> bool:
        """Place its first, or keep for it what the law says."""
        want, applicant = lane.want, self.queue.first(lane)
        if self._hopeful(lane) and self._place(lane, applicant):
            return True
        want.turn = self.turn
        if want not in self.noted:
            self._refused(want, applicant)
        return False

    def _refused(self, want: WaitingShape, applicant: Applicant) -> None:
        self.noted[want] = None
        self.starved += starving(self.state, applicant)
        plan = self.keeps.refused(applicant)
        if preemption.try_preempt(self.state, self.out, applicant, self.keeps, plan):
            self.keeps.claimed(applicant)
        self.cut = self.keeps.keeps_all()

    def _place(self, lane: TenantShapeQueue, applicant: Applicant) -> bool:
        want, state = lane.want, self.state
        pool = state.pool_for(want.shape.reservation)
        liked = state.places_of(applicant)
        placed = self.keeps.place(applicant, liked)
        if placed is None and len(liked) > 1:  # members of a group are unlike: one may like what only another can use
            placed = self.keeps.place(applicant, ())
        if placed is None:
            want.failed = lane.failed = pool.version
            self.queue.refused[want.shape] = None
            return False
        self.keeps.placed(applicant)
        if applicant.id in state.claims:
            state.drop_claim(applicant.id)
        self.queue.remove(applicant.id)
        STARTERS[applicant.kind](state, self.out, applicant, placed)
        return True


def _has_room(machine: Machine, want: WaitingShape) -> bool:
    """As it is now: somebody may just have been placed there."""
    if machine.cpu_milli < want.cpu_milli or machine.memory_bytes < want.memory_bytes:
        return False
    return not want.kind or any(
        len(ids) >= want.count for (kind, _), ids in machine.devices.items() if kind == want.kind
    )


def _may_fit(room: FreeCapacity, want: WaitingShape) -> bool:
    """As far as can be told at a glance."""
    if room.cpu_milli < want.cpu_milli or room.memory_bytes < want.memory_bytes:
        return False
    return not want.kind or any(count >= want.count for (kind, _), count in room.devices.items() if kind == want.kind)
