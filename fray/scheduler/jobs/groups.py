"""Job groups: jobs that are placed in one decision, and what the end of one of them means to the others.

Invariants: As long as no member has machines, the living members wait for each other (`holds`), and the group is one
applicant for all of them: all or none, in one region or zone. That is so at first, and again when all have lost their
machines. While some have machines, a member that restarts is placed by itself, in the region or zone of the others. Or
the others are ended without charge to any budget, and all restart together (``restart="group"``).

Machines of later stages are allocated with all others, and reserved: their nodes are asked for nothing before every
living job of the earlier stages runs.

The first end of a member that decides the group (`group_result`) is the group's; then the others are ended. Only the
member that decided owes its scope an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve

from fray.errors import InvalidRequest, NameInUse
from fray.model.gangs import role_of
from fray.model.ids import SessionId
from fray.model.job_groups import AuxiliaryFailure, JobGroupSpec, Restart, Success
from fray.model.resources import Capacity
from fray.model.specs import EndReason, EntryKind, JobSpec, JobState, Outcome
from fray.model.text import plural
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import TerminateRequested
from fray.scheduler.jobs.holds import is_waiting_for_stage
from fray.scheduler.jobs.queries import is_group_in_namespace
from fray.scheduler.jobs.retries import outcome_text, sibling_restart_text
from fray.scheduler.jobs.transitions import (
    begin_stage,
    end_generation,
    hold_job,
    is_stage_open,
    retry_or_commit,
    start_job,
    stop_job,
)
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.pool.requests import (
    Placement,
    PlacementRequest,
    confine_to,
    part_of,
)
from fray.scheduler.state.rows import JobGroupRow, JobRow, job_state
from fray.scheduler.state.state import State

PLACES_SHOWN = 4

# Launch and placement -------------------------------------------------------------------------------------------------


def check_job_group(state: State, group: JobGroupSpec, specs: Sequence[JobSpec]) -> None:
    """Check a launch of a group, beyond its jobs.

    Raises:
        InvalidRequest: not one group of plain jobs, placed and owned alike.
        NameInUse: a living group of the namespace has its name.
    """
    name = group.config.name
    # One space of ids with jobs, as both are targets of requests and keys of events.
    if group.group_id in state.job_groups or group.group_id in state.jobs:
        raise InvalidRequest(
            f"job group {name!r}: its id {group.group_id!r} is taken: all its jobs are launched at once"
        )
    _check_members(name, group, specs)
    _check_alike(name, specs)
    _check_places(name, group.config.same, specs)
    for other in state.group_names.get((specs[0].namespace, name), ()):
        # A group that is decided is ending: its name is free, as that of a job that is being ended.
        if state.job_groups[other].outcome is None:
            raise NameInUse(
                f"job group name {name!r} is taken in namespace {specs[0].namespace!r}: group {other} has it; wait for "
                "its end, end it, or choose another name",
                name=name,
                namespace=specs[0].namespace,
                holder=other,
            )


def _check_members(name: str, group: JobGroupSpec, specs: Sequence[JobSpec]) -> None:
    for spec in specs:
        if spec.job_group != group.group_id:
            raise InvalidRequest(f"job {spec.name!r} is launched with group {name!r} but is not a member of it")
        # Actors never end by themselves, and adopted jobs may be placed already: neither fits "all start, then all
        # end".
        if spec.entry is EntryKind.ACTOR or spec.siblings or spec.adopt_existing or spec.get_if_exists:
            raise InvalidRequest(f"job group {name!r}: {spec.name!r} must be a plain job of its own")
    roles = [role_of(spec) for spec in specs]
    for role in roles:
        other = next(each for each in roles if each.name == role.name)
        if role != other:
            raise InvalidRequest(f"job group {name!r}: role {role.name!r} is described twice: {other} and {role}")
    # Success is decided by primaries: without one the group could never succeed.
    if all(role.auxiliary for role in roles):
        raise InvalidRequest(f"job group {name!r}: all its jobs are auxiliary; at least one must be primary")


def _check_alike(name: str, specs: Sequence[JobSpec]) -> None:
    # The group is one applicant: the shares, quotas and priority of its first job decide for all.
    for what in ("namespace", "user", "band", "detached", "reservation_id"):
        values = list(dict.fromkeys(getattr(spec, what) for spec in specs))
        if len(values) > 1:
            word = {"band": "priority"}.get(what, what)
            raise InvalidRequest(
                f"job group {name!r}: its jobs are placed and owned together, so all must have the same {word}; "
                f"found {' and '.join(map(repr, map(_without_enum, values[:2])))}"
            )


def _check_places(name: str, same: str, specs: Sequence[JobSpec]) -> None:
    """Raise if jobs that must share a region or zone name different ones."""
    named = {"region": "regions", "zone": "zones"}.get(same, "")
    asking = [spec for spec in specs if named and getattr(spec.demand, named)]
    for other in asking[1:]:
        first, mine = getattr(asking[0].demand, named), getattr(other.demand, named)
        # Refused at the launch: otherwise it would be a wait that cannot end.
        if not set(first) & set(mine):
            raise InvalidRequest(
                f"job group {name!r}: all its jobs must be in one {same}, but {asking[0].name!r} asks for "
                f"{' or '.join(first)}, {other.name!r} for {' or '.join(mine)}: name one that both may be in, or set "
                f"JobGroupConfig(same_{same}=False)"
            )


def _without_enum(value: object) -> object:
    return str(value) if isinstance(value, str) else value


def no_room_text(machines: Mapping[str, Capacity], same: str, specs: Sequence[JobSpec]) -> str:
    """Return why these machines could not hold the jobs together, even if they were empty; empty when they could."""
    # Machines without a region count as one unnamed region: same_region=True, the default, has to work on a laptop.
    # The matcher itself on empty machines, and not a second set of rules.
    pool = MachinePool()
    for name, capacity in machines.items():
        pool.add(name, capacity)
    ask = PlacementRequest(tuple(map(part_of, specs)), same)
    if pool.place(ask) is not None:
        return ""
    # Without places, or in the only unnamed one, a list of places would say nothing.
    if not same or pool.localities(same) == [""]:
        lacking = _first_without_place(pool, ask, specs)
        return f"all machines together have no room for its {len(specs)} jobs, even when empty: {lacking}"
    texts = [
        f"in {place or f'no named {same}'} {_first_without_place(pool, confine_to(ask, same, place), specs)}"
        for place in pool.localities(same)[:PLACES_SHOWN]
    ]
    places = "; ".join(texts) or f"there is no {same}"
    return (
        f"no {same} has room for all of its {len(specs)} jobs, even when empty: {places}. "
        f"Ask for less, or allow more with JobGroupConfig(same_{same}=False)"
    )


def _first_without_place(pool: MachinePool, ask: PlacementRequest, specs: Sequence[JobSpec]) -> str:
    """Return the first job for which there is no place beside those before it."""
    # Prefixes, so that the text names the job for which there was no room, and not just "the group".
    for count in range(1, len(specs) + 1):
        if _fits(pool, evolve(ask, parts=ask.parts[:count])) is False:
            beside = f" beside {plural(count - 1, 'other')}" if count > 1 else ""
            return f"{specs[count - 1].name} ({specs[count - 1].members} members) has no place{beside}"
    return "all fit, one by one"


def _fits(pool: MachinePool, ask: PlacementRequest) -> bool:
    placed = pool.place(ask)
    if placed is None:
        return False
    for part, one in zip(ask.parts, placed, strict=True):
        for grant in one.grants:
            # Given back, as the pool is used for the next question.
            pool.release(grant.node, part.choices[one.choice], grant.devices, grant.ports)
    return True


def accept_group(
    state: State, out: EffectBuffer, group: JobGroupSpec, specs: Sequence[JobSpec], session: SessionId
) -> None:
    """Add the row of a new group; its jobs follow."""
    auxiliaries = sum(role_of(spec).auxiliary for spec in specs)
    row = JobGroupRow(
        group_id=group.group_id,
        config=group.config,
        namespace=specs[0].namespace,
        # Taken before its jobs': sorted by order, a group comes before its members after a restart.
        order=state.next_order(),
        launched_by=session,
        launched_at=state.now,
        queued_at=state.now,
        primaries=len(specs) - auxiliaries,
        auxiliaries=auxiliaries,
    )
    state.add_group(row)
    out.log_event(group.group_id, "group launched", ", ".join(spec.name for spec in specs))


def start_group(state: State, out: EffectBuffer, group: JobGroupRow, placed: Sequence[Placement]) -> None:
    """Start all living members: each has its machines."""
    # In the order in which the request was made of them: placements are matched by position.
    jobs = state.gathered_jobs(group.group_id)
    first = state.nodes[placed[0].grants[0].node].capacity.attributes
    # Kept while any member has machines: one that restarts by itself must come back beside the others.
    group.place = first.get(group.config.same, "") if group.config.same else ""
    group.placed_at = state.now if group.placed_at is None else group.placed_at
    state.touch("job_group", group.group_id)
    where = f"{group.config.same} {group.place}" if group.place else ""
    out.log_event(group.group_id, "group placed", where)
    # Stages begin again with every placement of the group as a whole.
    state.group_members[group.group_id].started_stage = None
    for job, one in zip(jobs, placed, strict=True):
        start_job(state, out, job, one)


def matching_groups(state: State, event: TerminateRequested) -> Iterator[JobGroupRow]:
    """Yield the living groups that a request to end jobs names."""
    session = state.sessions.get(event.session)
    own = session.namespace if session is not None else ""
    for group in list(state.job_groups.values()) if event.group else ():
        is_it = event.group == group.config.name and is_group_in_namespace(group, own, event.namespace)
        if group.ended_at is None and (is_it or event.group == group.group_id):
            yield group


# After every step -----------------------------------------------------------------------------------------------------


def apply_member_changes(state: State, out: EffectBuffer) -> None:
    """Apply, after the handler, what the changes of members mean to their groups."""
    while out.group_changes:
        # A queue, since the consequences of one change append others, of this group or of the next.
        job_id, ended = out.group_changes.popleft()
        job = state.jobs[job_id]
        group = state.job_groups[job.spec.job_group]
        if ended:
            _count_end(state, out, group, job)
        elif job.phase is JobPhase.HELD and group.config.restart is Restart.GROUP:
            # HELD means that it restarts: with this setting all others restart with it.
            _restart_others(state, out, group, job)
        _gather_if_unplaced(state, out, group)
        _start_due_stages(state, out, group)


def _restart_others(state: State, out: EffectBuffer, group: JobGroupRow, failed: JobRow) -> None:
    """End all other members that have machines, to be placed again with the failed one."""
    members = state.group_members[group.group_id]
    # A list of both: ending one changes the index.
    for job_id in [*members.phases.get(JobPhase.STARTING, ()), *members.phases.get(JobPhase.RUNNING, ())]:
        other = state.jobs[job_id]
        out.log_event(job_id, "restarting", f"with its group, after {failed.job_id}")
        end_generation(
            state, out, other, Outcome(cause=EndReason.SIBLING, message=sibling_restart_text(failed)), EndReason.SIBLING
        )
        retry_or_commit(state, out, other)


def _gather_if_unplaced(state: State, out: EffectBuffer, group: JobGroupRow) -> None:
    """Make members wait for each other again once none has machines any more."""
    members = state.group_members[group.group_id]
    if not members.is_placed:
        for job_id in list(members.phases.get(JobPhase.QUEUED, ())):
            # Out of the queue, where it would be placed alone, and perhaps in another region than the rest.
            hold_job(state, out, state.jobs[job_id])
        state.enqueue_group_if_complete(group.group_id)


def _start_due_stages(state: State, out: EffectBuffer, group: JobGroupRow) -> None:
    """Start the stages that all earlier ones have made room for."""
    members = state.group_members[group.group_id]
    # This runs for each change of a member, and most changes open no stage.
    if members.blocking_stage == members.started_stage:
        return
    members.started_stage = members.blocking_stage
    for job_id in list(members.phases.get(JobPhase.STARTING, ())):
        job = state.jobs[job_id]
        if is_waiting_for_stage(state, job) and is_stage_open(state, job):
            begin_stage(state, out, job)


# The end --------------------------------------------------------------------------------------------------------------


def group_result(group: JobGroupRow) -> bool | None:
    """Return whether the group has succeeded (True) or can no longer succeed (False); None: not decided yet."""
    won, lost, success = group.primaries_succeeded, group.primaries_unsuccessful, group.config.success
    if success is Success.ANY and won:
        return True
    if won == group.primaries and (success is not Success.ALL or group.auxiliaries_succeeded == group.auxiliaries):
        return True
    if lost == group.primaries or (lost and success is not Success.ANY):
        return False
    if group.auxiliaries_failed and group.config.auxiliary_failure is AuxiliaryFailure.ESCALATE:
        return False
    return False if group.auxiliaries_unsuccessful and success is Success.ALL else None


def _count_end(state: State, out: EffectBuffer, group: JobGroupRow, job: JobRow) -> None:
    """Count the end of a member, which may decide the group or be the last one."""
    _add_to_counts(group, job)
    state.touch("job_group", group.group_id)
    decided = group.outcome is not None
    won = None if decided else group_result(group)
    # Decided by the first end that settles it. Later ends, also of members that are stopped for it, change nothing.
    if won is not None:
        _decide(state, out, group, job, won)
    elif job_state(job) is JobState.FAILED:
        # Its scope hears of one failure a group, even if two members fail in one report.
        job.is_absorbed = True
        out.job_changed(job.job_id)
        if not decided:
            out.log_event(group.group_id, "absorbed", f"the failure of {job.job_id}")
    # Decided and ended are two times: after the decision the others are still being ended.
    if _uncounted_members(group) == 0:
        assert group.outcome is not None
        group.ended_at = state.now
        state.index_group_end(group)
        out.log_event(group.group_id, "group ended", outcome_text(group.outcome))


def _uncounted_members(group: JobGroupRow) -> int:
    """Return the number of members whose end has not been counted yet."""
    ended = (
        group.primaries_succeeded
        + group.primaries_unsuccessful
        + group.auxiliaries_succeeded
        + group.auxiliaries_unsuccessful
    )
    return group.primaries + group.auxiliaries - ended


def _add_to_counts(group: JobGroupRow, job: JobRow) -> None:
    # Counted in the row and not looked up, so that ended members may be forgotten before the group has ended.
    assert job.outcome is not None
    won, auxiliary = job.outcome.cause is EndReason.SUCCEEDED, role_of(job.spec).auxiliary
    if auxiliary:
        group.auxiliaries_succeeded += won
        group.auxiliaries_unsuccessful += not won
        group.auxiliaries_failed += job_state(job) is JobState.FAILED
    else:
        group.primaries_succeeded += won
        group.primaries_unsuccessful += not won


def _decide(state: State, out: EffectBuffer, group: JobGroupRow, job: JobRow, won: bool) -> None:
    """Set the group's outcome, once and for good, and stop the other members."""
    assert job.outcome is not None
    cause, why = job.outcome.cause, outcome_text(job.outcome)
    group.decided_by = job.job_id
    group.outcome = Outcome(cause=EndReason.SUCCEEDED) if won else Outcome(cause=cause, message=f"{job.job_id}: {why}")
    ended = "has succeeded" if won else f"ended: {job.job_id} ended by {why}"
    out.log_event(group.group_id, "group decided", outcome_text(group.outcome))
    # A list, since stopping a waiting member moves it between phases at once.
    for other in [each for phase in list(state.group_members[group.group_id].phases.values()) for each in phase]:
        stop_job(state, out, state.jobs[other], EndReason.GROUP, f"its group {group.config.name} {ended}")
