"""How often what has ended may begin anew, who pays for it, and how long it waits before.

Two kinds of accounts. A job has a budget for failures and one for lost machines, for its whole life. An actor has one
for both: ``max_restarts`` within ``restart_period_s``, and a supervised group has that one for all its members. A
restart that only follows a sibling's costs nothing.
"""

from __future__ import annotations

from attrs import evolve

from fray.model.restarts import allows, back_off_s, counting, next_streak
from fray.model.specs import ActorConfig, Cause, JobSpec, Outcome, Siblings, Strategy
from fray.scheduler.lifecycle import BUDGETS, Budget
from fray.scheduler.rows import Attempt, Job
from fray.scheduler.tables import Tables


def limit(spec: JobSpec, budget: Budget) -> int:
    """Retries the budget has; negative: no limit."""
    if budget is Budget.SIBLING:
        return -1
    return spec.max_retries_failure if budget is Budget.FAILURE else spec.max_retries_preemption


def spent(job: Job, budget: Budget) -> int:
    """Retries it has paid for."""
    if budget is Budget.SIBLING:
        return job.with_siblings
    return job.failures if budget is Budget.FAILURE else job.preemptions


def policy(job: Job) -> ActorConfig | None:
    """What counts an actor's restarts; None: the job's budgets do."""
    config = job.spec.actor
    return config if config is not None and config.max_restarts is not None else None


def recent(state: Tables, job: Job) -> list[float]:
    """When it and its siblings were made anew, as far as that counts now; oldest first.

    Siblings that fell at the same instant (with their machine) had one setback; one of this instant is its own too.
    """
    config = policy(job) or ActorConfig()
    if job.spec.siblings is None:
        return counting(config, job.restarts, state.now)
    others = {at for mate in state.group_of(job) if mate is not job for at in mate.restarts}
    others -= {*job.restarts, state.now}
    return sorted(counting(config, (*job.restarts, *others), state.now))


def affordable(state: Tables, job: Job, cause: Cause) -> Budget | None:
    """The budget that would pay for a retry after ``cause``."""
    budget = BUDGETS[cause]
    config = policy(job)
    if budget is None:
        return None
    if config is None or budget is Budget.SIBLING:
        most, used = limit(job.spec, budget), spent(job, budget)
    else:
        most, used = config.max_restarts or 0, len(recent(state, job))
    return budget if allows(most, used) else None


def paying(state: Tables, job: Job, cause: Cause) -> Budget | None:
    """The budget that pays for a retry after ``cause``; None: no retry."""
    return None if job.stop_cause is not None else affordable(state, job, cause)


def pay(state: Tables, job: Job, budget: Budget, first: Outcome, members: list[Attempt]) -> None:
    """Write a retry down, and until when it has to wait."""
    config = policy(job)
    if budget is Budget.SIBLING:
        job.with_siblings += 1
        return
    if budget is Budget.FAILURE:
        job.failures += 1
    else:
        job.preemptions += 1
    if config is None:
        return
    if not recent(state, job):
        job.spree = told(first)
    job.streak = next_streak(config, job.streak, _lived_s(members))
    most = max(0, config.max_restarts or 0)
    job.restarts = (*job.restarts, state.now)[-(most + 1) :]  # one more than may be: `invariants` would see it
    wait_s = back_off_s(config, job.streak)
    job.held_until = state.now + wait_s if wait_s else None


def _lived_s(members: list[Attempt]) -> float:
    spans = (a.ended_at - a.started_at for a in members if a.ended_at is not None and a.started_at is not None)
    return max(spans, default=0.0)


def told(outcome: Outcome) -> str:
    """An outcome in a line."""
    return f"{outcome.cause.value}: {outcome.message}" if outcome.message else outcome.cause.value


def concerns(failed: Siblings, other: Siblings) -> bool:
    """Whether a restart of ``failed`` takes ``other`` with it."""
    if failed.strategy is Strategy.ONE_FOR_ALL:
        return failed.index != other.index
    return failed.strategy is Strategy.REST_FOR_ONE and other.index > failed.index


# The end -------------------------------------------------------------------------------------------------------------


def final_outcome(state: Tables, job: Job, first: Outcome, members: list[Attempt]) -> Outcome:
    """What is committed when no retry follows ``first``."""
    if job.stop_cause is None:
        return _with_spree(state, job, first)
    if members and all(attempt.outcome and attempt.outcome.cause is Cause.SUCCEEDED for attempt in members):
        own = members[0].outcome
        assert own is not None
        return own  # it was done before the request arrived
    if affordable(state, job, first.cause) is None:
        return first
    again = f"it would have been retried after: {first.message or first.cause.value}"
    text = job.stop_reason if first.cause is Cause.SIBLING else f"{job.stop_reason}; {again}"
    return evolve(first, cause=job.stop_cause, message=text, value=None)


def _with_spree(state: Tables, job: Job, last: Outcome) -> Outcome:
    """The last error, and that it was not the first."""
    times = recent(state, job) if BUDGETS[last.cause] is not None else []
    if not times or policy(job) is None:
        return last
    count = "once" if len(times) == 1 else f"{len(times)} times"
    whose = "its group was" if job.spec.siblings else "it was"
    first = f"; the first was needed after {job.spree}" if job.spree not in ("", told(last)) else ""
    spree = f"{whose} restarted {count} in {state.now - times[0]:.4g} s{first}"
    return evolve(last, message=f"{last.message or last.cause.value} ({spree})")
