"""Job groups in words: what is told of one, and why its members wait."""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.gangs import role_of
from fray.model.ids import Namespace
from fray.model.job_groups import JobGroupInfo, MemberInfo
from fray.model.resources import Demand
from fray.model.specs import EndReason, JobState
from fray.scheduler.jobs.holds import is_waiting_for_stage
from fray.scheduler.jobs.queries import is_group_in_namespace
from fray.scheduler.lifecycle import FINAL_STATE, JobPhase
from fray.scheduler.pool.pool import can_hold
from fray.scheduler.state.rows import JobGroupRow, JobRow, job_state
from fray.scheduler.state.tables import Tables

SHOWN = 4


def member_list(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def group_info(state: Tables, group: JobGroupRow) -> JobGroupInfo:
    """What users see of it."""
    jobs = [state.jobs[job_id] for job_id in state.group_members[group.group_id].jobs]
    return JobGroupInfo(
        group_id=group.group_id,
        name=group.config.name,
        namespace=group.namespace,
        state=group_state(state, group).value,
        error_message=_trouble(group),
        decided_by=group.decided_by,
        place=(group.place or "") if state.group_members[group.group_id].is_placed else "",
        same=group.config.same,
        launch_time=group.launched_at,
        start_time=group.placed_at,
        end_time=group.ended_at,
        reason=group_reason(state, group),
        members=tuple(map(_member, jobs)),
    )


def _trouble(group: JobGroupRow) -> str | None:
    outcome = group.outcome
    return outcome.message if outcome is not None and outcome.cause is not EndReason.SUCCEEDED else None


def _member(job: JobRow) -> MemberInfo:
    role = role_of(job.spec)
    return MemberInfo(
        job_id=job.job_id,
        name=job.spec.name,
        role=role.name,
        stage=role.stage,
        auxiliary=role.auxiliary,
        state=job_state(job).value,
        absorbed=job.is_absorbed,
    )


def group_state(state: Tables, group: JobGroupRow) -> JobState:
    if group.ended_at is not None and group.outcome is not None:
        return FINAL_STATE[group.outcome.cause]
    return JobState.RUNNING if state.group_members[group.group_id].is_placed else JobState.PENDING


def group_reason(state: Tables, group: JobGroupRow) -> str:
    """Why it is not there yet, or not over; empty: nothing stands in its way."""
    muster = state.group_members[group.group_id]
    if group.ended_at is not None:
        return ""
    if group.outcome is not None:
        return f"ending {muster.living_count} of its jobs"
    if group.group_id in state.queue:
        position = queue_position_text(state, group)
        return f"needs room for all of its {len(muster.gathered)} jobs at once{locality_text(group)}; {position}"
    missing = [job_id for phase in (JobPhase.HELD,) for job_id in muster.phases.get(phase, ())]
    missing = [job_id for job_id in missing if job_id not in muster.gathered]
    return f"waits for {member_list(missing)}" if missing else ""


def locality_text(group: JobGroupRow) -> str:
    return f", in one {group.config.same}" if group.config.same else ""


def queue_position_text(state: Tables, group: JobGroupRow) -> str:
    return f"number {state.queue.count_ahead(group.group_id) + 1} of {len(state.queue)} in the queue"


def list_groups(state: Tables, own: Namespace, asked: Namespace | None, name: str = "") -> tuple[JobGroupInfo, ...]:
    """Those on record, newest last: of a namespace, and of a name or id."""
    return tuple(
        group_info(state, group)
        for group in state.job_groups.values()
        if (not name or name in (group.config.name, group.group_id))
        and (name == group.group_id or is_group_in_namespace(group, own, asked))
    )


# For `explain` --------------------------------------------------------------------------------------------------------


def waits_with_group(state: Tables, job: JobRow) -> str:
    """Of a member that waits for nothing but its group; in a line."""
    group = state.job_groups[job.spec.job_group]
    why = group_reason(state, group)
    return f"waits with its group {group.config.name}, which {why}"


def waits_for_stage(state: Tables, job: JobRow) -> str:
    """Of a member that has its machines, and may not begin; empty of any other."""
    if not job.spec.job_group or not is_waiting_for_stage(state, job):
        return ""
    muster = state.group_members[job.spec.job_group]
    earlier = [
        job_id
        for phase, jobs in muster.phases.items()
        if phase is not JobPhase.RUNNING
        for job_id in jobs
        if role_of(state.jobs[job_id].spec).stage < role_of(job.spec).stage
    ]
    nodes = list(dict.fromkeys(attempt.node for attempt in state.living_members(job)))
    return f"has its place on {member_list(nodes)}, and begins when {member_list(earlier)} of its group {_run(earlier)}"


def _run(names: list[str]) -> str:
    return "runs" if len(names) == 1 else "run"


def choices(state: Tables, job: JobRow) -> tuple[Demand, ...]:
    """What each member needs now, in any of these ways: one of a group that is placed goes where the others are."""
    return state.request_of(job).parts[0].choices if job.spec.job_group else (job.spec.demand, *job.spec.alternatives)


def locality_suffix(state: Tables, job: JobRow) -> str:
    """Why it has to go where it says, behind its needs."""
    group = state.job_groups[job.spec.job_group] if job.spec.job_group else None
    return f" (with its group {group.config.name})" if group is not None and group.config.same and group.place else ""


def waiting_members(state: Tables, job: JobRow) -> list[JobRow]:
    """Those that wait with it, itself included; the first few."""
    return state.gathered_jobs(job.spec.job_group)[:SHOWN]


def group_lines(state: Tables, job: JobRow) -> Iterator[str]:
    """For the whole page: where there is room for which of its jobs, place by place."""
    group = state.job_groups[job.spec.job_group]
    jobs = state.gathered_jobs(group.group_id)
    pool = state.pool_for(job.spec.reservation_id)
    for place in pool.localities(group.config.same) if group.config.same else [""]:
        machines = [
            machine
            for machine in pool.machines.values()
            if not group.config.same or machine.capacity.attributes.get(group.config.same, "") == place
        ]
        where = (
            f"{group.config.same} {place}" if place else "the cluster" if not group.config.same else "no named place"
        )
        counts = [
            f"{sum(can_hold(m, each.spec.demand) for m in machines)} for {each.spec.name}" for each in jobs[:SHOWN]
        ]
        yield f"  {where}: of {len(machines)} machines with room for a member now: {', '.join(counts)}"
