"""Cost of ending a job: work that is lost, what ends with it, and how large it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from attrs import field, frozen

from fray.model.policy.priority import Band
from fray.model.resources import Demand
from fray.model.specs import EndReason, Outcome
from fray.scheduler.jobs.retries import retry_budget
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.tables import Tables

# The weights only have to order victims of one band. Which of two bands loses is decided before (see `cost_of`).
DEVICE_MILLI = 16_000
"""CPUs (in thousandths) as which a device counts."""
MEMORY_MILLI = 4 * 1024**3
"""Bytes of memory that count as one CPU."""

Cost: TypeAlias = tuple[int, ...]
"""Work lost by band, earliest first; then the number of ended jobs."""
_PREEMPTED = Outcome(cause=EndReason.PREEMPTED)
NO_COST: Cost = (0,) * (len(Band) + 1)


def add_costs(one: Cost, other: Cost) -> Cost:
    return tuple(map(int.__add__, one, other))


@frozen(eq=False)
class PreemptionUnit:
    """Jobs that end together.

    Attributes:
        key: id of the job or job group that is ended.
        roots: that job, or all members of that group that have machines; the other jobs are owned by these.
        cost: cost of their end.
    """

    key: str
    roots: tuple[JobRow, ...]
    jobs: tuple[JobRow, ...]
    cost: Cost
    order: tuple[Cost, int] = field(init=False)
    """Sort key; the cheapest comes first. Of equal costs, the job that was accepted last."""

    @order.default
    def _make_order(self) -> tuple[Cost, int]:
        return self.cost, -self.roots[0].order


def total_cost(units: Iterable[PreemptionUnit]) -> Cost:
    costs = [unit.cost for unit in units]
    if len(costs) == 1:
        return costs[0]
    return tuple(map(sum, zip(*costs, strict=True))) if costs else NO_COST


def weighted_size(demand: Demand) -> int:
    """Return the size of one member in thousandths of a CPU."""
    return demand.cpu_milli + demand.memory_bytes * 1000 // MEMORY_MILLI + demand.device_count * DEVICE_MILLI


def lost_work_s(state: Tables, job: JobRow) -> float:
    """Return seconds of work it would have to repeat: since its last checkpoint, if it saves any."""
    since = job.placed_at or 0.0
    if job.checkpoint is not None:
        since = max(since, job.checkpoint.saved_at)
    return max(0.0, state.now - since)


def cost_of(state: Tables, job: JobRow) -> Cost:
    # Integers: a sum of floats would depend on the order in which victims are added.
    work = round(lost_work_s(state, job) * weighted_size(state.demand(job)) * job.spec.members / 1000)
    # Tuples compare from the earliest band on, so any work there outweighs all work of later bands. At least 1: a job
    # placed just now would otherwise cost nothing in its band, and could be chosen before one of a later band.
    rank = job.band.rank
    return *NO_COST[:rank], max(1, work), *NO_COST[rank + 2 :], 1


def roots_of(state: Tables, job: JobRow) -> tuple[JobRow, ...]:
    """Return the job itself, or all running members of its job group."""
    if not job.spec.job_group:
        return (job,)
    phases = state.group_members[job.spec.job_group].phases
    mates = (state.jobs[job_id] for phase in (JobPhase.STARTING, JobPhase.RUNNING) for job_id in phases.get(phase, ()))
    return tuple(sorted(mates, key=lambda mate: mate.order))


def unit_of(state: Tables, job: JobRow) -> PreemptionUnit:
    """Return the job (or its whole group) with all that it owns."""
    roots = roots_of(state, job)
    # What it owns ends with it, so its cost counts.
    jobs = tuple(one for root in roots for one in (root, *descendants(state, root)))
    cost = cost_of(state, jobs[0])
    for one in jobs[1:]:
        cost = add_costs(cost, cost_of(state, one))
    return PreemptionUnit(job.spec.job_group or job.job_id, roots, jobs, cost)


def descendants(state: Tables, job: JobRow) -> Iterator[JobRow]:
    """Yield living jobs that end with it, as it is ending or would be preempted."""
    # A search asks this of thousands of jobs; where all are detached there is nothing to look up.
    if not state.children:
        return
    owners = [attempt.attempt_id for attempt in state.living_members(job)]
    # What it owns as a whole stays, if it restarts.
    if job.job_id in state.children and retry_budget(state, job, job.first_outcome or _PREEMPTED) is None:
        owners.append(job.job_id)
    for owner in owners:
        for job_id in state.children.get(owner, ()):
            yield state.jobs[job_id]
            yield from descendants(state, state.jobs[job_id])


def ancestors(state: Tables, job: JobRow) -> Iterator[JobRow]:
    """Return the job whose attempt owns it, and so on upwards, up to one that would not end it by a restart."""
    return (state.jobs[attempt.job_id] for attempt in state.owner_attempts(job.owner))
