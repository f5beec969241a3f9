"""Supervised groups: the consequences of one member's failure for the others, with the strategies of Erlang/OTP.

Invariants: A member that fails and may restart takes the members its strategy names with it: they are ended, without
charge to any budget, and once the last of them has ended they all restart, in the order of their creation. A member
that fails for good (the group's restarts are used up) ends the whole group; its error is the group's.
"""

from __future__ import annotations

from fray.errors import InvalidRequest
from fray.model.specs import EndReason, EntryKind, JobSpec, Outcome
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs.retries import restarts_with, sibling_restart_text
from fray.scheduler.jobs.transitions import (
    end_generation,
    hold_job,
    retry_or_commit,
    stop_job,
)
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.state import State


def restart_siblings(state: State, out: EffectBuffer) -> None:
    """Restart or end, after the handler, the siblings of members that restart or have failed."""
    # A queue and no recursion: the end of a sibling may append further members.
    while out.supervised_changes:
        job = state.jobs[out.supervised_changes.pop(0)]
        if job.ended:
            _end_group(state, out, job)
        elif job.phase in (JobPhase.QUEUED, JobPhase.HELD):
            # Anything else has been restarted or stopped meanwhile, by an entry before it.
            _restart_others(state, out, job)


def _restart_others(state: State, out: EffectBuffer, failed: JobRow) -> None:
    mine = failed.spec.siblings
    assert mine is not None
    for other in state.siblings_of(failed):
        theirs = other.spec.siblings
        # A member that is being stopped for good does not come back with the others.
        if theirs is not None and other.stop_cause is None and restarts_with(mine, theirs):
            _restart_with_sibling(state, out, other, failed)
    # The failed member waits, too: all restart together, once the last of them has ended.
    if ending := [mate for mate in state.siblings_of(failed) if mate.phase is JobPhase.CLOSING]:
        hold_job(state, out, failed)
        out.log_event(failed.job_id, "waiting", f"for the end of {', '.join(mate.job_id for mate in ending)}")


def _restart_with_sibling(state: State, out: EffectBuffer, job: JobRow, failed: JobRow) -> None:
    """End a member, or hold it back, until all can start."""
    if job.phase in (JobPhase.STARTING, JobPhase.RUNNING):
        out.log_event(job.job_id, "restarting", f"with its sibling {failed.job_id}")
        # The same back-off for all, or the failed one would find its siblings running without it.
        job.held_until = failed.held_until
        end_generation(
            state, out, job, Outcome(cause=EndReason.SIBLING, message=sibling_restart_text(failed)), EndReason.SIBLING
        )
        retry_or_commit(state, out, job)
    elif job.phase in (JobPhase.QUEUED, JobPhase.HELD):
        hold_job(state, out, job, until=failed.held_until)


def _end_group(state: State, out: EffectBuffer, failed: JobRow) -> None:
    assert failed.outcome is not None
    why = failed.outcome.message or failed.outcome.cause.value
    for other in state.siblings_of(failed):
        # Its own end was committed before.
        if other is not failed:
            stop_job(state, out, other, EndReason.SIBLING, f"its group ended: {failed.job_id} failed: {why}")


def check_supervised_group(state: State, specs: list[JobSpec]) -> None:
    """Raise InvalidRequest unless the launch is all of one new group of actors, with consecutive indexes."""
    groups = {spec.siblings.group_id if spec.siblings else None for spec in specs}
    members = [spec.siblings for spec in specs if spec.siblings is not None]
    name = members[0].group_id
    # Restarts are one account of all members, counted from their rows, so the members may not change.
    if len(groups) > 1 or name in state.sibling_groups or len({mate.strategy for mate in members}) > 1:
        raise InvalidRequest(f"supervised group {name!r}: all its members, and no others, are launched together, once")
    if sorted(mate.index for mate in members) != list(range(len(members))):
        raise InvalidRequest(f"supervised group {name!r}: its members must be numbered from 0 in order")
    if any(spec.entry is not EntryKind.ACTOR for spec in specs):
        raise InvalidRequest(f"supervised group {name!r}: its members must be actors")
