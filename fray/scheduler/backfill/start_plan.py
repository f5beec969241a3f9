"""Plans: the latest start of a waiting applicant, by the time limits of what runs (see `backfill`)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import chain, islice

from fray.model.ids import NodeName
from fray.model.resources import Demand
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.pool.machine import held_empty
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.pool.requests import PlacementRequest, Shares, nodes_of, shares_of
from fray.scheduler.queue.applicant import Applicant, PlacementShape, StartPlan
from fray.scheduler.state.owners import owner_jobs
from fray.scheduler.state.rows import CapacityClaim, JobRow
from fray.scheduler.state.tables import Tables
from fray.scheduler.state.what_if_pool import HypotheticalPool

MARGIN_S = 10.0
"""Seconds from the end of a job's termination until its machines are surely free: cleaning up and reporting."""
MAX_ENDS = 512
"""Maximum number of ends that are considered for one plan."""
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
        count = _fewest_ends(trial, request, closed, ends)
        if count is None:
            return StartPlan(applicant.id, state.now, pool.open_machines)
        # The search leaves fewer jobs ended than the plan needs.
        trial.end(job for _, job in ends.known[len(trial.ended_jobs) : count])
        placed = trial.place(request, closed)
    assert placed is not None
    before = ends.known[:count]
    after = tuple(job.job_id for _, job in before if _runs_on(state, job, nodes_of(placed)))
    # Ends are in the order of time limits; with a long termination an earlier entry may be the last to end.
    at = max((at for at, _ in before), default=state.now)
    return StartPlan(applicant.id, state.now, pool.open_machines, at, shares_of(request, placed), after)


class _ExpectedEnds:
    """Known ends of jobs on machines that a request could use, found as they are needed.

    They come in the order of time limits. Where terminations differ by more than the limits, a plan may be a little
    later than necessary.
    """

    def __init__(self, state: Tables, shape: PlacementShape, closed: Container[NodeName]) -> None:
        self.known: list[tuple[float, JobRow]] = []
        self._state, self._shape, self._closed = state, shape, closed
        self._pool = pool_of(state, shape)
        self._served: dict[NodeName, bool] = {}
        self._iterator = self._find_ends()

    def reach(self, count: int) -> int:
        """Find that many ends, if there are so many; return how many are known now, at most ``count``."""
        self.known.extend(islice(self._iterator, max(0, min(count, MAX_ENDS) - len(self.known))))
        return min(count, len(self.known))

    def _find_ends(self) -> Iterator[tuple[float, JobRow]]:
        state = self._state
        # What is ending already comes first: in most cases it is gone before any time limit.
        for job_id in chain(
            state.ending_jobs, (job_id for _, _, job_id in islice(state.time_limits, MAX_JOBS_EXAMINED))
        ):
            job = state.jobs[job_id]
            if job.spec.reservation_id == self._shape.reservation:
                at = ends_at(state, job)
                # Ends on machines that it cannot use would only add to the number of tries.
                if at is not None and any(self._is_usable(attempt.node) for attempt in state.living_members(job)):
                    yield at, job

    def _is_usable(self, name: NodeName) -> bool:
        known = self._served.get(name)
        if known is None:
            machine = self._pool.machines.get(name)
            is_open = machine is not None and machine.is_open and name not in self._closed
            demands = self._shape.request.demands if is_open else ()
            known = self._served[name] = any(held_empty(demand, self._pool.machines[name]) for demand in demands)
        return known


def _fewest_ends(
    trial: HypotheticalPool, request: PlacementRequest, closed: Container[NodeName], ends: _ExpectedEnds
) -> int | None:
    """Return how many of these ends, soonest first, make it fit; None if all do not. Leaves fewer jobs ended."""
    low, high, stride = 0, 0, 1
    marks = [trial.mark]
    # Galloping, then bisection, as more ends only make more room: each try ends or restores the difference alone, and
    # the number of placements grows with the logarithm of the number of ends.
    while not trial.fits(request, closed):
        low, high, stride = high, ends.reach(high + stride), stride * 2
        if low == high:
            return None
        _end_first(trial, ends, marks, high)
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
    for _, job in ends.known[len(marks) - 1 : count]:
        trial.end((job,))
        marks.append(trial.mark)


def _runs_on(state: Tables, job: JobRow, nodes: Container[NodeName]) -> bool:
    return any(attempt.node in nodes for attempt in state.living_members(job))


def claim_shares(claim: CapacityClaim) -> Shares:
    found: dict[NodeName, list[tuple[Demand, int]]] = {}
    for share in claim.shares:
        found.setdefault(share.node, []).append((share.demand, share.members))
    return {node: tuple(demands) for node, demands in found.items()}
