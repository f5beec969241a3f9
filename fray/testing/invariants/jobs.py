"""What is always true of jobs: their budgets, groups, limits and owners (see `invariants`)."""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.ids import attempt_id, split_attempt
from fray.model.specs import EndReason, JobState
from fray.scheduler.backfill.backfill import capacity_after_pending
from fray.scheduler.jobs.holds import blocking_jobs
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


def _job(state: State, job: JobRow) -> Iterator[str]:
    """Gangs are whole, budgets are kept, phases and outcomes agree, and the dead own nothing."""
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
        yield "a member is being stopped while the job goes on"
    if job.phase is JobPhase.CLOSING and not all(a.stop_cause for a in living):
        yield "closing, and a member has not been asked to stop"
    if job.phase is JobPhase.RUNNING and not all(a.ran for a in members):
        yield "running, and not every member has been seen running"
    if job.outcome and job.outcome.cause is EndReason.GANG:
        yield "ended by its own gang"
    if placed and not living and job.phase is not JobPhase.CLOSING:
        yield "goes on without a living member"
    kept = job.checkpoint
    if kept is not None and (job.ended or split_attempt(kept.attempt_id)[:1] != (job.job_id,)):
        yield f"keeps a checkpoint of {kept.attempt_id} and is {job.phase.value}"
    if kept is not None and split_attempt(kept.attempt_id)[1] > job.generation:
        yield f"keeps a checkpoint of {kept.attempt_id}, which is still to come"
    yield from _budgets(job)
    yield from _must_start(state, job)
    yield from _owner(state, job)


def _limits(state: State) -> Iterator[str]:
    """No job runs when its time is over, and whoever has a limit has a timer."""
    for job in state.jobs.values():
        if job.is_active and job.time_limit_at is not None and job.time_limit_at <= state.now:
            yield f"{job.job_id} runs on, though its time was over at {job.time_limit_at}"


def _preemption(state: State) -> Iterator[str]:
    """Nobody is ended for the sake of others too often, and claims are those of waiting ones, on open machines."""
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
    yield from _promised_once(state)


def _too_often(state: State, job: JobRow) -> Iterator[str]:
    rule = state.policy.preemption
    if list(job.preempted_at) != sorted(job.preempted_at) or job.preempted_at[-1] > state.now:
        yield f"{job.job_id} was preempted at {job.preempted_at}"
    for at in job.preempted_at:
        times = sum(at - rule.period_s < other <= at for other in job.preempted_at)
        if times > rule.limit:
            yield f"{job.job_id} was preempted {times} times in {rule.period_s:g} s, the limit is {rule.limit}"
    if job.is_active and job.preempted_at[-1] > (job.placed_at or 0.0):
        yield f"{job.job_id} goes on, and was preempted at {job.preempted_at[-1]}"


def _promised_once(state: State) -> Iterator[str]:
    """What is free, or will be when all has ended that is being ended, is enough for all claims together.

    A device that somebody holds who has no right to (most often what is left of the victim) counts as free.
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
    """A held job waits for something; what waits for a time has an alarm."""
    alarm = (job.held_until, job.order, job.job_id)
    held = job.job_id in state.held_jobs or alarm in state.backoffs
    if job.is_gathered and (held or job.phase is not JobPhase.HELD):
        yield f"{job.phase.value}, and gathered with its group, held: {held}"
    if (job.phase is JobPhase.HELD) is not (held or job.is_gathered):
        yield f"{job.phase.value}, and held: {job.job_id in state.held_jobs}, with an alarm: {alarm in state.backoffs}"
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


def _alone_with_its_name(state: State) -> Iterator[str]:
    """Of the jobs that want a name for themselves one at most is placed or in the queue; the next waits for its end."""
    for (_, name), holders in state.jobs_by_name.items():
        active = [job_id for job_id in holders if state.jobs[job_id].phase is not JobPhase.HELD]
        for job_id in active:
            earlier = [other for other in holders if state.jobs[other].order < state.jobs[job_id].order]
            if earlier and state.jobs[job_id].spec.exclusive_name:
                yield f"{job_id} goes on with the name {name}, and {earlier} had it first"


def _groups(state: State) -> Iterator[str]:
    """Siblings begin anew together: none is placed while another is being ended for that; none outlives the group."""
    for name, members in state.sibling_groups.items():
        mates = [state.jobs[job_id] for job_id in members]
        leaving = [
            m
            for m in mates
            if m.phase is JobPhase.CLOSING and m.first_outcome and m.first_outcome.cause is EndReason.SIBLING
        ]
        for mate in mates:
            if mate.stop_cause is None and mate.phase in (JobPhase.QUEUED, JobPhase.STARTING) and mate.spec.siblings:
                taken = [m.job_id for m in leaving if m.stop_cause is None and _falls(mate, m) and _fell_with(mate, m)]
                if mate.generation and taken:
                    yield f"{mate.job_id} of group {name} begins anew before {taken} have ended"
        over = [job for job in state.jobs.values() if job.spec.siblings and job.ended and _group(job) == name]
        if any(job_state(job) is JobState.FAILED for job in over) and not all(m.stop_cause for m in mates):
            yield f"group {name} has failed, and a member of it goes on"


def _falls(one: JobRow, other: JobRow) -> bool:
    """A restart of ``one`` would have taken ``other`` along."""
    return bool(one.spec.siblings and other.spec.siblings and restarts_with(one.spec.siblings, other.spec.siblings))


def _fell_with(one: JobRow, other: JobRow) -> bool:
    """It did: not with another one that failed after ``one`` had begun anew already."""
    return other.first_outcome is not None and other.first_outcome.message == sibling_restart_text(one)


def _group(job: JobRow) -> str:
    return job.spec.siblings.group_id if job.spec.siblings else ""


def _budgets(job: JobRow) -> Iterator[str]:
    """No budget is overspent, and each generation but the first has been paid for."""
    if not job.retries:  # nearly all: this is asked for every job after every step
        if job.generation:
            yield f"generation {job.generation} after no retries"
        return
    config = restart_config(job)
    for budget in Budget:
        most, used = retry_limit(job.spec, budget), retries_spent(job, budget)
        if config is None and used > (most or 0) >= 0:
            yield f"spent {used} of {most} {budget.value} retries"
    for cause in job.retries:
        if BUDGETS[cause] is None:
            yield f"was retried after {cause.value}, which no budget pays for"
    if config is not None and config.max_restarts is not None and 0 <= config.max_restarts < _most_within(job):
        yield f"was restarted {_most_within(job)} times within {config.restart_period_s} s of {config.max_restarts}"
    if sum(job.retries.values()) != job.generation:
        yield f"generation {job.generation} after retries {job.retries}"


def _must_start(state: State, job: JobRow) -> Iterator[str]:
    """What the constructor of an actor that must start raised in its first incarnation is final."""
    if not job.retries or job.spec.actor is None or not job.spec.actor.must_start:
        return
    first = state.attempts.get(attempt_id(job.job_id, 0, 0))
    outcome = first.outcome if first is not None else None
    if outcome is not None and outcome.constructing and job.retries.keys() == {EndReason.FAILURE}:
        yield f"was made anew although its constructor had raised {outcome.message}"


def _most_within(job: JobRow) -> int:
    """The most restarts on its own account that ever fell into one period."""
    config = restart_config(job)
    period_s = config.restart_period_s if config else None
    if period_s is None:
        return counted_restarts(job)
    return max((sum(at - period_s < other <= at for other in job.restart_times) for at in job.restart_times), default=0)


def _owner(state: State, job: JobRow) -> Iterator[str]:
    """A living job has a living owner, or is being ended for the lack of it."""
    if job.ended or not job.owner or job.stop_cause:
        return
    session = state.sessions.get(job.owner)
    if not state.is_attempt_living(job.owner) and (session is None or session.is_ending):
        yield f"goes on without its owner {job.owner}"


JOB_RULES: tuple[Rule, ...] = (jobs, _limits, _preemption, _alone_with_its_name, _groups)
