"""Explanation of a job for its user: a page with its state, why it waits, and what would let it start."""

from __future__ import annotations

from collections.abc import Iterator

from fray.errors import NoSuchJob
from fray.model.ids import JobId
from fray.scheduler.autoscaler.view import machine_request_reasons
from fray.scheduler.backfill.starvation import is_starving
from fray.scheduler.explain.diagnosis import (
    group_of_locality,
    held_capacity,
    held_for_earlier,
    job_reason_text,
    machine_counts,
    machine_reason,
    member_choices,
    members_or_none,
    planned_start,
    preempting_reason,
    queue_position,
    reservation_reason,
)
from fray.scheduler.explain.forecast import forecast_lines
from fray.scheduler.jobs.retries import (
    FREE_BUDGETS,
    recent_restarts,
    restart_config,
    retries_spent,
    retry_limit,
)
from fray.scheduler.lifecycle import Budget, JobPhase
from fray.scheduler.placement.lending import loan_lines
from fray.scheduler.pool.infeasible import infeasible_text, is_infeasible
from fray.scheduler.pool.pool import can_hold
from fray.scheduler.pool.requests import part_of
from fray.scheduler.queue.quotas import quota_reason
from fray.scheduler.reasons import Reason, ReasonKind, demand_text, reasons_text
from fray.scheduler.state.rows import AttemptRow, JobRow, job_state
from fray.scheduler.state.tables import Tables

NODES_SHOWN = 20
GROUP_JOBS_SHOWN = 4
QUOTA_HINTS = {
    ReasonKind.QUOTA_EXCEEDED: "it would start if some of what counts there ended, or if the policy allowed more",
    ReasonKind.QUOTA_TOO_SMALL: "only another policy would let it start",
}


def explain(state: Tables, job_id: JobId, now: float) -> str:
    """Return a page about the job: its state, why, and what would change it.

    Raises:
        NoSuchJob: there is no such job on record.
    """
    job = state.jobs.get(job_id)
    if job is None and job_id in state.job_tombstones:
        past = state.job_tombstones[job_id]
        message = f": {past.message}" if past.message else ""
        return f"{job_id} ended long ago ({past.cause.value.replace('_', ' ')}){message}; no more is on record"
    if job is None:
        raise NoSuchJob(f"no job {job_id!r} on record", job_id=job_id)
    lines = [f"{job_id} is {job_state(job).value}{_state_reason(state, job)}"]
    if job.phase is JobPhase.QUEUED:
        lines += _queued_lines(state, job, max(now, state.now))
    if job.is_gathered:
        lines += _group_lines(state, job)
        if job.spec.job_group in state.queue:
            lines += forecast_lines(state, state.queue.applicants[job.spec.job_group].shape)
    lines += [f"retries: {_retries_text(state, job)}"]
    if job.requeued_by:
        lines += [f"requeues: {job.requeues + job.is_requeued}, the last one: {job.requeued_by}"]
    lines += [_attempt_line(attempt) for attempt in state.attempt_records(job)]
    lines += loan_lines(state, job)
    return "\n".join(lines)


def _state_reason(state: Tables, job: JobRow) -> str:
    if job.outcome is not None:
        cause = job.outcome.cause.value.replace("_", " ")
        return f" ({cause})" + (f": {job.outcome.message}" if job.outcome.message else "")
    text = "" if job.phase is JobPhase.QUEUED else job_reason_text(state, job)
    return f": {text}" if text else ""


def _queued_lines(state: Tables, job: JobRow, now: float) -> Iterator[str]:
    applicant = state.queue.applicants[job.job_id]
    members = f"{job.spec.members} members at once, each " if job.spec.members > 1 else ""
    group = group_of_locality(state, job)
    yield f"needs {members}{demand_text(*member_choices(state, job))}" + (f" (with its group {group})" if group else "")
    yield f"{queue_position(state, job.job_id)}; waiting for {now - job.queued_at:.0f} s"
    # Machines are not what it waits for, so they are not listed.
    if quota := quota_reason(state.queue, applicant):
        yield f"{quota}: {QUOTA_HINTS[quota.kind]}"
        return
    if held := held_for_earlier(state, applicant) or held_capacity(state, applicant):
        yield str(held)
    if own := preempting_reason(state, applicant) or planned_start(state, applicant):
        yield str(own)
    elif is_starving(state, applicant):
        yield str(Reason(ReasonKind.MACHINES_HELD))
    if job.spec.reservation_id:
        yield str(reservation_reason(state, job) or "")
        yield from forecast_lines(state, applicant.shape)
        return
    yield from _machine_lines(state, job)
    # A forecast by the ends of jobs makes sense only if empty machines could hold it.
    yield from list(_too_large(state, job)) or forecast_lines(state, applicant.shape)


def _machine_lines(state: Tables, job: JobRow) -> Iterator[str]:
    if not state.nodes:
        yield str(Reason(ReasonKind.NO_MACHINE))
    requests = machine_request_reasons(state, state.queue.applicants[job.job_id].shape)
    if requests:
        is_coming = requests[0].kind is ReasonKind.MACHINES_REQUESTED
        yield f"machines {reasons_text(requests)}" if is_coming else reasons_text(requests)
    nodes = [state.nodes[name] for name in sorted(state.nodes)]
    # The first ones in detail, all of them as counts: one page, also for a thousand machines.
    for node in nodes[:NODES_SHOWN]:
        yield f"  {machine_reason(state, job, node)}"
    if len(nodes) > NODES_SHOWN:
        yield f"  and {len(nodes) - NODES_SHOWN} more; {reasons_text(machine_counts(state, job))}"


def _too_large(state: Tables, job: JobRow) -> Iterator[str]:
    machines = {node.name: node.capacity for node in state.nodes.values()}
    part = part_of(job.spec)
    # The pool's counters answer for open machines at once; only if they say no are all machines examined.
    if machines and not state.pool.could_hold(part) and is_infeasible(part, machines):
        yield f"no change of load will help, more machines would: {infeasible_text(job.spec, machines)}"


def _group_lines(state: Tables, job: JobRow) -> Iterator[str]:
    """Yield what the waiting jobs of its group need, and where there is room for which, place by place."""
    config = state.job_groups[job.spec.job_group].config
    jobs = state.gathered_jobs(job.spec.job_group)[:GROUP_JOBS_SHOWN]
    for each in jobs:
        times = f"{each.spec.members} times " if members_or_none(each) else ""
        yield f"  {each.job_id} needs {times}{demand_text(*member_choices(state, each))}"
    pool = state.pool_for(job.spec.reservation_id)
    for place in pool.localities(config.same) if config.same else [""]:
        machines = [
            machine
            for machine in pool.machines.values()
            if not config.same or machine.capacity.attributes.get(config.same, "") == place
        ]
        where = f"{config.same} {place}" if place else "the cluster" if not config.same else f"no named {config.same}"
        # Each machine is looked at, as this page is made on request only.
        counts = (f"{sum(can_hold(m, each.spec.demand) for m in machines)} for {each.spec.name}" for each in jobs)
        yield f"  {where}: of {len(machines)} machines with room for a member now: {', '.join(counts)}"


def _retries_text(state: Tables, job: JobRow) -> str:
    config = restart_config(job)
    if config is None:
        budgets = [b for b in Budget if b not in FREE_BUDGETS and retry_limit(job.spec, b) is not None]
        return ", ".join(
            f"{retries_spent(job, budget)} of {_limit_text(retry_limit(job.spec, budget))} after {budget.value}"
            for budget in budgets
        )
    within = f" in {config.restart_period_s:g} s" if config.restart_period_s else ""
    whose = " for its group" if job.spec.siblings else ""
    return f"{len(recent_restarts(state, job))} of {_limit_text(config.max_restarts)}{within}{whose}"


def _limit_text(limit: int | None) -> str:
    return "any number" if limit is not None and limit < 0 else str(limit or 0)


def _attempt_line(attempt: AttemptRow) -> str:
    if attempt.outcome is None:
        return f"  {attempt.attempt_id} on {attempt.node}: {attempt.phase.value}"
    message = attempt.outcome.message.replace("\n", "\n    ")
    return f"  {attempt.attempt_id} on {attempt.node}: {attempt.outcome.cause.value}" + (
        f": {message}" if message else ""
    )
