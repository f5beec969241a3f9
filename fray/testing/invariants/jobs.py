"""Invariants of jobs: their budgets, groups, limits and owners (see `check`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fray.model.ids import JobId, attempt_id, split_attempt
from fray.model.specs import EndReason, JobState
from fray.scheduler.backfill.backfill import capacity_after_pending
from fray.scheduler.jobs.holds import blocking_jobs
from fray.scheduler.jobs.retention import GENERATIONS_SKIPPED
from fray.scheduler.jobs.retries import (
    counted_restarts,
    restart_config,
    restarts_with,
    retries_spent,
    retry_limit,
    sibling_restart_text,
)
from fray.scheduler.lifecycle import BUDGETS, Budget, JobPhase
from fray.scheduler.pool.free_capacity import FreeCapacity
from fray.scheduler.state.rows import JobRow, job_state
from fray.scheduler.state.state import State
from fray.testing.invariants.machines import Rule


def jobs(state: State) -> Iterator[str]:
    for job in state.jobs.values():
        yield from (f"{job.job_id}: {sentence}" for sentence in _job(state, job))


def living_jobs(state: State) -> Iterator[str]:
    for job in state.jobs.values():
        if not job.ended:
            yield from (f"{job.job_id}: {sentence}" for sentence in _job(state, job))


def jobs_of(state: State, job_ids: Iterable[JobId]) -> Iterator[str]:
    for job_id in job_ids:
        if (job := state.jobs.get(job_id)) is not None:
            yield from (f"{job_id}: {sentence}" for sentence in _job(state, job))


def concerned_jobs(state: State) -> set[JobId] | None:
    """Return the jobs that changes since the last save concern: changed ones, those of changed attempts, and those
    owned by either, or by changed sessions. None: nothing was changed."""
    touched, found = list(state.touched()), set[JobId]()
    for table, key in touched:
        if table in ("job", "attempt"):
            found.add(key if table == "job" else split_attempt(key)[0])
        if table in ("job", "attempt", "session"):
            found.update(state.children.get(key, ()))
    return found if touched else None


def _job(state: State, job: JobRow) -> Iterator[str]:
    """Yield violations of one job: gangs are whole, budgets are respected, phases and outcomes agree, the dead own
    nothing."""
    members, living = state.members(job), state.living_members(job)
    placed = job.phase in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.CLOSING)
    if placed and len(members) != job.spec.members:
        yield f"{len(members)} of {job.spec.members} members placed"
    if job.phase is JobPhase.QUEUED and members:
        yield "queued with members placed"
    if (job.phase is JobPhase.QUEUED) is not (job.job_id in state.queue):
        yield f"{job.phase.value}, and in the queue: {job.job_id in state.queue}"
    yield from _held(state, job)
    if job.ended is not (job.outcome is not None) or (job.phase is JobPhase.CLOSING) is not (
        job.first_outcome is not None
    ):
        yield f"{job.phase.value} with outcome {job.outcome} and first cause {job.first_outcome}"
    if placed and job.phase is not JobPhase.CLOSING and any(a.stop_cause for a in living):
        yield "a member is being stopped while the job runs"
    if job.phase is JobPhase.CLOSING and not all(a.stop_cause for a in living):
        yield "closing, and a member has not been asked to stop"
    if job.phase is JobPhase.RUNNING and not all(a.ran for a in members):
        yield "running, and not every member has been seen running"
    if job.outcome and job.outcome.cause is EndReason.GANG:
        yield "ended by its own gang"
    if placed and not living and job.phase is not JobPhase.CLOSING:
        yield "runs without a living member"
    stored = job.checkpoint
    if stored is not None and (job.ended or split_attempt(stored.attempt_id)[:1] != (job.job_id,)):
        yield f"has a checkpoint of {stored.attempt_id} and is {job.phase.value}"
    if stored is not None and split_attempt(stored.attempt_id)[1] > job.generation:
        yield f"has a checkpoint of {stored.attempt_id}, which does not exist yet"
    yield from _budgets(job)
    yield from _must_start(state, job)
    yield from _owner(state, job)


def _limits(state: State) -> Iterator[str]:
    """Yield jobs that run beyond their time limit, and limits without a timer."""
    for job in state.jobs.values():
        if job.spec.time_limit_s is None:  # nearly all, and all are asked after every step
            continue
        if job.time_limit_at is not None and job.time_limit_at <= state.now and job.is_active:
            yield f"{job.job_id} runs beyond its time limit at {job.time_limit_at}"


def _preemption(state: State) -> Iterator[str]:
    """Yield jobs preempted too often, and claims of applicants that do not wait, or on machines that are gone."""
    for job in state.jobs.values():
        if job.preempted_at:
            yield from _too_often(state, job)
    for claim in state.claims.values():
        if claim.applicant not in state.queue:
            yield f"{claim.applicant} has a claim, and does not wait"
        if not claim.shares or not claim.victims:
            yield f"{claim.applicant} claims {len(claim.shares)} shares of {len(claim.victims)} victims"
        for share in claim.shares:
            if share.node not in state.pool.machines:
                yield f"{claim.applicant} claims something of {share.node}, which is gone"
    yield from _claims_are_covered(state)


def _too_often(state: State, job: JobRow) -> Iterator[str]:
    rule = state.policy.preemption
    if list(job.preempted_at) != sorted(job.preempted_at) or job.preempted_at[-1] > state.now:
        yield f"{job.job_id} was preempted at {job.preempted_at}"
    # Only when it happens: the policy may have another limit later, and earlier preemptions were right under theirs.
    times = sum(state.now - rule.period_s < at <= state.now for at in job.preempted_at)
    if job.preempted_at[-1] == state.now and times > rule.limit:
        yield f"{job.job_id} was preempted {times} times in {rule.period_s:g} s, the limit is {rule.limit}"
    if job.is_active and job.preempted_at[-1] > (job.placed_at or 0.0):
        yield f"{job.job_id} runs, and was preempted at {job.preempted_at[-1]}"


def _claims_are_covered(state: State) -> Iterator[str]:
    """Yield claims for which the capacity, once all ending jobs have ended, is not enough for all claims together.

    A device that is held without right (usually by what is left of the victim) counts as free.
    """
    rooms: dict[tuple[str, str], FreeCapacity] = {}
    for claim in state.claims.values():
        for share in claim.shares:
            machine = state.pool_for(claim.reservation).machines.get(share.node)
            if machine is None:
                continue
            key = claim.reservation, share.node
            if key not in rooms:
                rooms[key] = capacity_after_pending(state, machine, claim.reservation)
                for device in machine.withheld:
                    rooms[key].devices[machine.device_places[device][0]] += 1
            room = rooms[key]
            if not all(room.take(share.demand) for _ in range(share.members)):
                yield f"{claim.applicant} claims more of {share.node} than there will be"


def _held(state: State, job: JobRow) -> Iterator[str]:
    """Yield held jobs that wait for nothing, or for a time without a timer."""
    timer = (job.held_until, job.order, job.job_id)
    held = job.job_id in state.held_jobs or timer in state.backoffs
    if job.is_gathered and (held or job.phase is not JobPhase.HELD):
        yield f"{job.phase.value}, and gathered with its group, held: {held}"
    if (job.phase is JobPhase.HELD) is not (held or job.is_gathered):
        yield f"{job.phase.value}, and held: {job.job_id in state.held_jobs}, with a timer: {timer in state.backoffs}"
    if job.phase is not JobPhase.HELD:
        goes_on = job.phase in (JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RUNNING)
        if goes_on and job.held_until is not None and job.held_until > state.now:
            yield f"{job.phase.value}, and its back-off lasts until {job.held_until}"
        return
    over = job.held_until is None or job.held_until <= state.now
    if over and not job.is_gathered and next(blocking_jobs(state, job), None) is None:
        yield "held for nothing"
    if state.members(job):
        yield "held with members placed"


def _names(state: State) -> Iterator[str]:
    """Yield jobs that are placed or queued while an earlier one has the name."""
    for (_, name), holders in state.jobs_by_name.items():
        if len(holders) < 2:
            continue
        active = [job_id for job_id in holders if state.jobs[job_id].phase is not JobPhase.HELD]
        for job_id in active:
            earlier = [other for other in holders if state.jobs[other].order < state.jobs[job_id].order]
            if earlier:
                yield f"{job_id} continues with the name {name}, and {earlier} had it first"


def _groups(state: State) -> Iterator[str]:
    """Yield siblings that are placed while another is being ended to restart with them, or that outlive their group."""
    for name, members in state.sibling_groups.items():
        mates = [state.jobs[job_id] for job_id in members]
        leaving = [
            m
            for m in mates
            if m.phase is JobPhase.CLOSING and m.first_outcome and m.first_outcome.cause is EndReason.SIBLING
        ]
        for mate in mates:
            if mate.stop_cause is None and mate.phase in (JobPhase.QUEUED, JobPhase.STARTING) and mate.spec.siblings:
                taken = [
                    m.job_id
                    for m in leaving
                    if m.stop_cause is None and _would_restart_with(mate, m) and _restarted_with(mate, m)
                ]
                if mate.generation and taken:
                    yield f"{mate.job_id} of group {name} restarts before {taken} have ended"
        over = [job for job in state.jobs.values() if job.spec.siblings and job.ended and _group(job) == name]
        if any(job_state(job) is JobState.FAILED for job in over) and not all(m.stop_cause for m in mates):
            yield f"group {name} has failed, and a member of it continues"


def _would_restart_with(one: JobRow, other: JobRow) -> bool:
    """Return whether a restart of ``one`` would have restarted ``other`` as well."""
    return bool(one.spec.siblings and other.spec.siblings and restarts_with(one.spec.siblings, other.spec.siblings))


def _restarted_with(one: JobRow, other: JobRow) -> bool:
    """Return whether it did, and not with another sibling that failed after ``one`` had restarted."""
    return other.first_outcome is not None and other.first_outcome.message == sibling_restart_text(one)


def _group(job: JobRow) -> str:
    return job.spec.siblings.group_id if job.spec.siblings else ""


def _budgets(job: JobRow) -> Iterator[str]:
    """Yield overspent budgets, and generations that no budget has paid for."""
    # After a restore of the store some were skipped.
    is_counted = job.generation < GENERATIONS_SKIPPED
    if not job.retries:  # nearly all: this is asked for every job after every step
        if job.generation != job.requeues and is_counted:
            yield f"generation {job.generation} after no retries and {job.requeues} requeues"
        return
    config = restart_config(job)
    for budget in Budget:
        most, used = retry_limit(job.spec, budget), retries_spent(job, budget)
        if config is None and used > (most or 0) >= 0:
            yield f"spent {used} of {most} {budget.value} retries"
    for cause in job.retries:
        if BUDGETS[cause] is None:
            yield f"was retried after {cause.value}, which no budget pays for"
    if (
        config is not None
        and config.max_restarts is not None
        and 0 <= config.max_restarts < _most_restarts_in_period(job)
    ):
        times = _most_restarts_in_period(job)
        yield f"was restarted {times} times within {config.restart_period_s} s of {config.max_restarts}"
    if is_counted and sum(job.retries.values()) + job.requeues != job.generation:
        yield f"generation {job.generation} after retries {job.retries} and {job.requeues} requeues"


def _must_start(state: State, job: JobRow) -> Iterator[str]:
    """Yield restarts of an actor that must start, after its constructor had raised in the first incarnation."""
    if not job.retries or job.spec.actor is None or not job.spec.actor.must_start:
        return
    first = state.attempts.get(attempt_id(job.job_id, 0, 0))
    outcome = first.outcome if first is not None else None
    if outcome is not None and outcome.constructing and job.retries.keys() == {EndReason.FAILURE}:
        yield f"was restarted although its constructor had raised {outcome.message}"


def _most_restarts_in_period(job: JobRow) -> int:
    """Return the largest number of restarts on its own account within one period."""
    config = restart_config(job)
    period_s = config.restart_period_s if config else None
    if period_s is None:
        return counted_restarts(job)
    return max((sum(at - period_s < other <= at for other in job.restart_times) for at in job.restart_times), default=0)


def _owner(state: State, job: JobRow) -> Iterator[str]:
    """Yield living jobs whose owner has ended and that are not being ended."""
    if job.ended or not job.owner or job.stop_cause:
        return
    if job.spec.owned_by_job:
        if state.has_job_ended(job.owner):
            yield f"continues without the job {job.owner}, which owns it"
        return
    session = state.sessions.get(job.owner)
    if not state.is_attempt_living(job.owner) and (session is None or session.is_ending):
        yield f"continues without its owner {job.owner}"


JOB_RULES: tuple[Rule, ...] = (jobs, _limits, _preemption, _names, _groups)
