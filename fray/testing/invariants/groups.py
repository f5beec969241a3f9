"""Invariants of job groups (see `check`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from fray.model.gangs import role_of
from fray.model.job_groups import Restart
from fray.model.specs import EndReason, JobState
from fray.scheduler.jobs.groups import group_result
from fray.scheduler.lifecycle import AttemptPhase, JobPhase
from fray.scheduler.state.indexes import PLACED, stage_of
from fray.scheduler.state.rows import AttemptRow, JobGroupRow, JobRow, job_state
from fray.scheduler.state.state import State

Members: TypeAlias = dict[str, list[JobRow]]


def _members(state: State) -> Members:
    """Return the members by the rows, without the index."""
    found: dict[str, list[JobRow]] = {group_id: [] for group_id in state.job_groups}
    for job in state.jobs.values():
        if job.spec.job_group:
            found.setdefault(job.spec.job_group, []).append(job)
    return found


def job_groups_are_sound(state: State) -> Iterator[str]:
    """Yield violations of all invariants of job groups."""
    if state.job_groups:
        members = _members(state)
        for rule in (are_whole, are_together, keep_their_order, end_by_their_rules):
            yield from rule(state, members)


def are_whole(state: State, members: Members) -> Iterator[str]:
    """Yield groups with a waiting member while others have machines: all are placed at once, or none."""
    for group_id, jobs in members.items():
        group = state.job_groups.get(group_id)
        if group is None or not jobs:
            yield f"group {group_id} has {len(jobs)} jobs, and on record: {group is not None}"
            continue
        living = [job for job in jobs if not job.ended]
        gathered = [job.job_id for job in living if job.is_gathered]
        placed = [job.job_id for job in living if job.phase in PLACED]
        alone = [job.job_id for job in living if job.phase is JobPhase.QUEUED]
        if gathered and placed and group.config.restart is Restart.MEMBER:
            yield f"{gathered} wait with group {group_id}, and {placed} of it have machines"
        if alone and (not placed or group.config.restart is Restart.GROUP):
            yield f"{alone} wait by themselves, and none of group {group_id} has machines"
        if placed and group.placed_at is None:
            yield f"{placed} of group {group_id} have machines, and it has never been placed"
        ready = bool(living) and len(gathered) == len(living)
        if ready is not (group_id in state.queue):
            yield f"group {group_id} has gathered: {ready}, and is in the queue: {group_id in state.queue}"


def are_together(state: State, members: Members) -> Iterator[str]:
    """Yield living members outside the region or zone that their group was given."""
    for group_id, jobs in members.items():
        group = state.job_groups.get(group_id)
        if group is None or not group.config.same:
            continue
        for attempt in [one for job in jobs if not job.ended for one in state.living_members(job)]:
            node = state.nodes.get(attempt.node)
            where = node.capacity.attributes.get(group.config.same, "") if node is not None else group.place
            if where != group.place:
                yield f"{attempt.attempt_id} is in {group.config.same} {where!r}, and its group in {group.place!r}"


def keep_their_order(state: State, members: Members) -> Iterator[str]:
    """Yield stages that start before, or not right after, all earlier ones run; each has its machines from the
    start."""
    for group_id, jobs in members.items():
        living = [job for job in jobs if not job.ended]
        blocking = min((stage_of(job.spec) for job in living if job.phase is not JobPhase.RUNNING), default=None)
        for job in living:
            attempts = [attempt for attempt in state.members(job) if attempt.living]
            reserved = [attempt.attempt_id for attempt in attempts if attempt.phase is AttemptPhase.RESERVED]
            stage = stage_of(job.spec)
            if reserved and (blocking is None or stage <= blocking or len(reserved) < len(attempts)):
                yield f"{reserved} of group {group_id} are reserved, and their stage {stage} has started"
            before = [other.job_id for other in living if stage_of(other.spec) < stage and other.started_at is None]
            if before and any(map(_has_started, attempts)):
                yield f"{job.job_id} of stage {stage} has started, and {before} have never run"


def _has_started(attempt: AttemptRow) -> bool:
    return attempt.phase is not AttemptPhase.RESERVED


def end_by_their_rules(state: State, members: Members) -> Iterator[str]:
    """Yield groups not decided exactly when their rules say so, or with running members afterwards."""
    for group_id, jobs in members.items():
        group = state.job_groups.get(group_id)
        if group is None:
            continue
        yield from (f"group {group_id}: {sentence}" for sentence in _ends(group, jobs))


def _ends(group: JobGroupRow, jobs: list[JobRow]) -> Iterator[str]:
    living = [job for job in jobs if not job.ended]
    if (group.outcome is None) is not (group_result(group) is None and bool(living)):
        yield f"{group_result(group)} by its rules, and its outcome is {group.outcome}"
    if group.outcome is not None and (running := [job.job_id for job in living if job.stop_cause is None]):
        yield f"it is decided, and {running} still run"
    if (group.ended_at is None) is not bool(living):
        yield f"ended at {group.ended_at}, and {len(living)} of its jobs live"
    if len(jobs) == group.primaries + group.auxiliaries:
        yield from _counted(group, jobs)
    for job in jobs:
        failed = job.ended and job_state(job) is JobState.FAILED
        if job.is_absorbed is not (failed and job.job_id != group.decided_by):
            yield f"{job.job_id} failed, absorbed: {job.is_absorbed}, and {group.decided_by or 'no job'} decided"


def _counted(group: JobGroupRow, jobs: list[JobRow]) -> Iterator[str]:
    found: Counter[str] = Counter()
    for job in jobs:
        if job.outcome is not None:
            kind = "auxiliaries" if role_of(job.spec).auxiliary else "primaries"
            found[f"{kind}_succeeded" if job.outcome.cause is EndReason.SUCCEEDED else f"{kind}_unsuccessful"] += 1
            found["auxiliaries_failed"] += kind == "auxiliaries" and job_state(job) is JobState.FAILED
    for what in (
        "primaries_succeeded",
        "primaries_unsuccessful",
        "auxiliaries_succeeded",
        "auxiliaries_unsuccessful",
        "auxiliaries_failed",
    ):
        if getattr(group, what) != found[what]:
            yield f"{what} is {getattr(group, what)}, its jobs say {found[what]}"
