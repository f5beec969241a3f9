"""Plans: the latest start of a waiting applicant, by the time limits of what runs (see `backfill`)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import TypeAlias

from fray.model.ids import JobId, NodeName
from fray.model.resources import Demand
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.pool.free_capacity import FreeCapacity
from fray.scheduler.pool.pool import Machine, MachinePool
from fray.scheduler.pool.requests import PlacedShare, Placement, PlacementRequest, Shares, nodes_of, shares_of
from fray.scheduler.queue.applicant import Applicant, PlacementShape, StartPlan
from fray.scheduler.state.owners import owner_jobs
from fray.scheduler.state.rows import CapacityClaim, JobRow
from fray.scheduler.state.tables import Tables
from fray.scheduler.state.what_if_pool import HypotheticalPool

MARGIN_S = 10.0
"""Seconds from the end of a job's termination until its machines are surely free: cleaning up and reporting."""
MAX_ENDS = 512
"""Maximum number of ends that are considered for one plan."""
PLAN_WORK = 40
"""Work of a plan (see `Queue.work`), besides two units for each of these ends."""
MAX_JOBS_EXAMINED = 1024
"""Maximum number of jobs, those with the soonest time limits, among which these ends are sought."""


def pool_of(state: Tables, shape: PlacementShape) -> MachinePool:
    """Return the pool of the machines it takes."""
    return state.pool_for(shape.reservation)


# Times ----------------------------------------------------------------------------------------------------------------


def termination_s(job: JobRow) -> float:
    """Return seconds from the request to end a job until its last process is killed."""
    return job.spec.termination.cancel_s + job.spec.termination.term_s + MARGIN_S


def ends_at(state: Tables, job: JobRow) -> float | None:
    """Return when the job's machines are free at the latest; None if unknown. A machine that falls silent is later."""
    if job.phase is JobPhase.CLOSING:
        # Overdue ends (a machine may be silent) are expected now: no plan may begin in the past.
        return max(job.first_outcome_at + job.notice_s + termination_s(job), state.now)
    return None if job.time_limit_at is None else max(job.time_limit_at + termination_s(job), state.now)


def occupied_s(state: Tables, applicant: Applicant) -> float | None:
    """Return seconds from its start until its machines are free again; None if unknown."""
    if applicant.time_limit_s is None:
        return None
    job = state.job_of(applicant)
    # A time limit is when the termination begins: the machines are free only after it.
    return applicant.time_limit_s + (termination_s(job) if job is not None else MARGIN_S)


def is_ending(state: Tables, job: JobRow) -> bool:
    """Return whether the end of the job, or of a job that owns it, is decided."""
    if job.phase is JobPhase.CLOSING:
        return True
    # A child is ended only when its owner has ended, but then it surely is.
    for owner in owner_jobs(state.jobs, job):
        # What a job owns as a whole stays while it restarts.
        if owner.phase is JobPhase.CLOSING and (owner.stop_cause is not None or not job.spec.owned_by_job):
            return True
        job = owner
    return False


# Plans ----------------------------------------------------------------------------------------------------------------


def make_plan(state: Tables, applicant: Applicant, closed: Container[NodeName] = ()) -> StartPlan:
    """Return a plan for the earliest time at which the applicant surely fits; without a time if none is known."""
    pool, request = pool_of(state, applicant.shape), applicant.shape.request
    ends = _ExpectedEnds(state, applicant.shape, closed)
    with HypotheticalPool(state, applicant.shape.reservation) as trial:
        found = _place_after_fewest_ends(trial, request, closed, ends)
    state.queue.work += PLAN_WORK + 2 * len(ends.known)
    if found is None:
        return StartPlan(applicant.id, state.now, pool.open_machines)
    count, placed = found
    before, nodes = ends.known[:count], nodes_of(placed)
    after = tuple(job.job_id for _, job, shares in before if _is_on(shares, nodes))
    # Ends are in the order of time limits; with a long termination an earlier entry may be the last to end.
    at = max((at for at, _, _ in before), default=state.now)
    return StartPlan(applicant.id, state.now, pool.open_machines, at, shares_of(request, placed), after)


_ExpectedEnd: TypeAlias = tuple[float, JobRow, list[PlacedShare]]
"""Time at which a job has ended at the latest, the job, and what becomes free."""


class _ExpectedEnds:
    """Known ends of jobs on machines that a request could use, found as they are needed.

    They come in the order of time limits. Where terminations differ by more than the limits, a plan may be a little
    later than necessary.
    """

    def __init__(self, state: Tables, shape: PlacementShape, closed: Container[NodeName]) -> None:
        self.known: list[_ExpectedEnd] = []
        self._state, self._shape = state, shape
        pool = pool_of(state, shape)
        self._usable = {
            name: None for demand in shape.request.demands for name in pool.usable(demand) if name not in closed
        }
        self._iterator = self._find_ends()

    def reach(self, count: int) -> int:
        """Find that many ends, if there are so many; return how many are known now, at most ``count``."""
        self.known.extend(islice(self._iterator, max(0, min(count, MAX_ENDS) - len(self.known))))
        return min(count, len(self.known))

    def __iter__(self) -> Iterator[_ExpectedEnd]:
        """Iterate over the ends that are not known yet, until there are `MAX_ENDS`."""
        for end in islice(self._iterator, MAX_ENDS - len(self.known)):
            self.known.append(end)
            yield end

    def _find_ends(self) -> Iterator[_ExpectedEnd]:
        state, now, jobs = self._state, self._state.now, self._state.jobs
        # What is ending already comes first: in most cases it is gone before any time limit.
        for job in map(jobs.__getitem__, state.ending_jobs):
            shares = self._usable_shares(job)
            if shares and (at := ends_at(state, job)) is not None:
                yield at, job, shares
        for limit_at, _, job_id in islice(state.time_limits, MAX_JOBS_EXAMINED):
            job = jobs[job_id]
            if shares := self._usable_shares(job):
                yield max(limit_at + termination_s(job), now), job, shares

    def _usable_shares(self, job: JobRow) -> list[PlacedShare]:
        """Return what the job takes; nothing if it is on machines that the shape cannot use, whose ends do not help."""
        usable = self._usable
        if job.spec.reservation_id == self._shape.reservation:
            shares = self._state.machine_shares(job)
            for node, _ in shares:
                if node in usable:
                    return shares
        return []


def _place_after_fewest_ends(
    trial: HypotheticalPool, request: PlacementRequest, closed: Container[NodeName], ends: _ExpectedEnds
) -> tuple[int, tuple[Placement, ...]] | None:
    """Return how many of these ends, soonest first, make it fit, and its places then; None if all do not."""
    placed = trial.place(request, closed)
    if placed is not None:
        return 0, placed
    # Plain numbers first: a try in the pool costs as much as the ends before it, and ten were needed.
    room = _RoomAfterEnds(trial, request, closed)
    least = room.count_ends(ends)
    if least is None:
        return None
    mark = trial.mark
    # The others free nothing that it could use.
    trial.end(job for _, job, shares in ends.known[:least] if _is_on(shares, room.holding))
    placed = trial.place(request, closed)
    if placed is not None:
        return least, placed
    # Ports, whole slices, one locality for all, and parts that compete may need more than room for each member.
    trial.undo_to(mark)
    count = _fewest_ends(trial, request, closed, ends, least)
    if count is None:
        return None
    # The search leaves fewer jobs ended than the plan needs.
    trial.end(job for _, job, _ in ends.known[:count])
    placed = trial.place(request, closed)
    assert placed is not None
    return count, placed


class _RoomAfterEnds:
    """Number of members of a request that machines hold after some ends: an upper bound of what can be placed."""

    def __init__(self, trial: HypotheticalPool, request: PlacementRequest, closed: Container[NodeName]) -> None:
        self._pool, self._closed = trial.pool, closed
        self._usable = {demand: self._pool.usable(demand) for demand in request.demands}
        self._parts = request.parts
        self._rooms: dict[NodeName, tuple[Machine, FreeCapacity, dict[Demand, int]]] = {}
        """Machines, what is free of them after the ends, and how many members of each demand that holds."""
        self.holding: dict[NodeName, None] = {}
        """Machines with room for a member of any demand, among those with ends and those that had it before."""
        self._totals: dict[Demand, int] = {}
        for demand in self._usable:
            held = {name: n for name, n in self._pool.held_by_machine(demand).items() if name not in closed}
            self._totals[demand] = sum(held.values())
            self.holding |= dict.fromkeys(held)

    def count_ends(self, ends: _ExpectedEnds) -> int | None:
        """Return the fewest of the ends, soonest first, after which each part has room; None if there are too few."""
        seen: dict[JobId, None] = {}
        if self._suffices():
            return 0
        for _, job, shares in ends:
            # A job that is ending may have a time limit as well.
            if job.spec.job_id not in seen:
                seen[job.spec.job_id] = None
                if self._end(shares) and self._suffices():
                    return len(ends.known)
        return None

    def _suffices(self) -> bool:
        return all(any(self._totals[demand] >= part.members for demand in part.choices) for part in self._parts)

    def _end(self, shares: Iterable[PlacedShare]) -> bool:
        """Count the end of a job; return whether there is room for more members."""
        has_grown = False
        for node, (share, devices, _) in shares:
            room = self._rooms.get(node)
            if room is None:
                room = self._rooms[node] = self._room_of(node)
            machine, free, held = room
            if held:
                free.add(machine, share, devices)
            for demand, before in held.items():
                now = held[demand] = free.count(demand)
                if now:
                    self.holding[node] = None
                if now != before:
                    self._totals[demand] += now - before
                    has_grown = True
        return has_grown

    def _room_of(self, name: NodeName) -> tuple[Machine, FreeCapacity, dict[Demand, int]]:
        """Return the machine before any end, with the demands of which it holds members when it is empty."""
        machine = self._pool.machines[name]
        free = FreeCapacity.of(machine)
        usable = self._usable.items() if name not in self._closed else ()
        return machine, free, {demand: free.count(demand) for demand, names in usable if name in names}


def _fewest_ends(
    trial: HypotheticalPool, request: PlacementRequest, closed: Container[NodeName], ends: _ExpectedEnds, low: int
) -> int | None:
    """Return how many of these ends, more than ``low``, make it fit; None if all do not. Leaves fewer jobs ended."""
    high, stride = ends.reach(low + 1), 2
    marks = [trial.mark]
    # Galloping, then bisection, as more ends only make more room: each try ends or restores the difference alone, and
    # the number of placements grows with the logarithm of the number of ends.
    while low < high:
        _end_first(trial, ends, marks, high)
        if trial.fits(request, closed):
            break
        low, high, stride = high, ends.reach(high + stride), stride * 2
    if low == high:
        return None
    while high - low > 1:  # fits after ``high`` ends, not after ``low``
        middle = (low + high) // 2
        _end_first(trial, ends, marks, middle)
        low, high = (low, middle) if trial.fits(request, closed) else (middle, high)
    _end_first(trial, ends, marks, low)
    return high


def _end_first(trial: HypotheticalPool, ends: _ExpectedEnds, marks: list[int], count: int) -> None:
    """End exactly the first ``count`` jobs in the trial."""
    del marks[count + 1 :]
    # Marks of the undo log after each end: the trial can return to any of these states.
    trial.undo_to(marks[-1])
    for _, job, _ in ends.known[len(marks) - 1 : count]:
        trial.end((job,))
        marks.append(trial.mark)


def _is_on(shares: Iterable[PlacedShare], nodes: Container[NodeName]) -> bool:
    return any(node in nodes for node, _ in shares)


def claim_shares(claim: CapacityClaim) -> Shares:
    found: dict[NodeName, list[tuple[Demand, int]]] = {}
    for share in claim.shares:
        found.setdefault(share.node, []).append((share.demand, share.members))
    return {node: tuple(demands) for node, demands in found.items()}
