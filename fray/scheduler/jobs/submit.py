"""Requests of clients: launches, all or nothing, where a repetition attaches to the first; and terminations."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from fray.errors import FrayError, InvalidRequest, NameInUse, NeverSchedulable
from fray.model.ids import JobId
from fray.model.job_groups import JobGroupSpec
from fray.model.messages.client import Role, TerminateResult
from fray.model.reservations import ReservationSpec
from fray.model.resources import Capacity, Demand, Device
from fray.model.specs import NEEDS_A_JOB, EndReason, EntryKind, JobSpec
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import LaunchRequested, TerminateRequested
from fray.scheduler.jobs.groups import (
    accept_group,
    check_job_group,
    matching_groups,
    no_room_text,
)
from fray.scheduler.jobs.queries import (
    descendants,
    differing_fields,
    living_actor,
    matching_jobs,
    session_text,
)
from fray.scheduler.jobs.registry import name_in_use, registrations_of
from fray.scheduler.jobs.supervision import check_supervised_group
from fray.scheduler.jobs.transitions import accept_job, fail_unschedulable, stop_job
from fray.scheduler.pool.infeasible import contradiction, infeasible_text, is_infeasible
from fray.scheduler.pool.pool import members_held
from fray.scheduler.pool.requests import MemberGroup, part_of
from fray.scheduler.queue.applicant import ApplicantKind
from fray.scheduler.reasons import demand_text
from fray.scheduler.state.known_capacity import all_machines, known_machines
from fray.scheduler.state.owners import owner_jobs
from fray.scheduler.state.rows import JobGroupRow, Session, job_state
from fray.scheduler.state.state import State

POSSIBLE_LIMIT = 1000
"""Parts remembered as feasible, since looking at all machines costs too much for each launch."""


def on_launch_requested(state: State, event: LaunchRequested, out: EffectBuffer) -> None:
    """Accept every job of the request, or refuse with what is wrong with the first bad one."""
    # A repeated launch is answered with the same ids as the first, without a second effect (P4).
    ids = tuple(spec.job_id for spec in event.launch.jobs)
    warnings: tuple[str, ...] = ()
    try:
        specs = _with_namespace(state, event)
        if not _is_repetition(state, specs):
            ids = _accept_all(state, event, specs, out)
            warnings = tuple(_unmatched_texts(state, specs))
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
    else:
        out.reply_launched(event.session, event.ref, ids, warnings)
    # Also after a refusal or a repetition: an attached payload to which no row refers now is deleted.
    for spec in event.launch.jobs:
        out.delete_if_unused(spec.payload)


def _with_namespace(state: State, event: LaunchRequested) -> list[JobSpec]:
    """Return the specs; those without a namespace get that of the session."""
    session = state.sessions.get(event.session)
    own = session.namespace if session is not None else ""
    return [spec if spec.namespace else evolve(spec, namespace=own) for spec in event.launch.jobs]


def _is_repetition(state: State, specs: list[JobSpec]) -> bool:
    """Return whether all jobs of the launch are known already.

    Raises:
        InvalidRequest: some are, or the same ids belong to different requests.
    """
    known = [spec for spec in specs if _is_known(state, spec)]
    for spec in known:
        # An id is one job for ever: to attach silently to another request would give its author a stranger's result.
        if differing := _differing_from_known(state, spec):
            raise InvalidRequest(
                f"job id {spec.job_id!r} belongs to a different request: it differs in {', '.join(differing)}; "
                "launch this one under another id"
            )
    # Some jobs known and others not: no repetition, since launches are all or none.
    if known and not all(spec.adopt_existing or _is_known(state, spec) for spec in specs):
        raise InvalidRequest(f"a repeated launch must name the same jobs; only {known[0].job_id!r}… is known")
    return bool(known) and len(known) == len(specs)


def _differing_from_known(state: State, spec: JobSpec) -> list[str]:
    """Return the fields in which a spec differs from the request of its id; of one that ended long ago only the name is
    known."""
    if spec.job_id in state.jobs:
        return differing_fields(state.jobs[spec.job_id].spec, spec)
    return ["name"] if state.job_tombstones[spec.job_id].name != spec.name else []


def _accept_all(state: State, event: LaunchRequested, specs: list[JobSpec], out: EffectBuffer) -> tuple[JobId, ...]:
    """Return the ids to answer with: those of the new jobs, or of the existing job."""
    # First: a driver whose session has ended may launch nothing, even while its connection is still open.
    session = state.open_session(event.session)
    parent = state.attempts[session.attempt_id].job_id if session.attempt_id else ""
    existing = _existing_actor(state, specs, parent)
    if existing is not None:
        return (existing,)
    adopted = {spec.job_id: found for spec in specs if (found := _adopted_job(state, spec)) is not None}
    fresh = [spec for spec in specs if spec.job_id not in adopted and not _is_known(state, spec)]
    # A command-line tool ends with its command, so nothing may be owned by it.
    owner = session.owner if session.role is not Role.TOOL else ""
    if fresh:
        # All checks come before the first change: a refused launch leaves no trace (all or nothing).
        _check_specs(state, fresh, owner, parent, event.launch.group)
    if event.launch.group is not None:
        if fresh:
            check_job_group(state, event.launch.group, fresh)
            _check_room(state, event.launch.group, fresh)
        # Before its jobs, which look the group up.
        accept_group(state, out, event.launch.group, fresh, session.session)
    for spec in fresh:
        mine = "" if spec.detached else parent if spec.owned_by_job else owner
        root = _root_session(state, session) if mine else ""
        # With a parent also if it is detached: `terminate(tree=True)` follows parents, not owners.
        accept_job(state, out, spec, mine, root, session.session, parent)
    for job_id in adopted.values():
        out.log_event(job_id, "adopted", f"by {session_text(state, session.session)}")
    return tuple(adopted.get(spec.job_id, spec.job_id) for spec in specs)


def _is_known(state: State, spec: JobSpec) -> bool:
    return spec.job_id in state.jobs or spec.job_id in state.job_tombstones


def _adopted_job(state: State, spec: JobSpec) -> JobId | None:
    """Return the living job that a launch with ``adopt_existing`` means; None: launch it.

    Raises:
        NameInUse: the living one is of another request.
    """
    if not spec.adopt_existing or _is_known(state, spec):
        return None  # or it was accepted when the request was first made
    staying = _living_holder(state, spec)
    if staying is None:
        return None
    if differing := differing_fields(state.jobs[staying].spec, spec):
        raise NameInUse(
            f"job name {spec.name!r} is taken in namespace {spec.namespace!r} by a different request: job {staying} "
            f"differs in {', '.join(differing)}; launch the same request, end that job, or choose another name",
            name=spec.name,
            namespace=spec.namespace,
            holder=staying,
            differs=tuple(differing),
        )
    return staying


def _living_holder(state: State, spec: JobSpec) -> JobId | None:
    """Return the job that has the name and is not being ended."""
    holders = state.jobs_by_name.get((spec.namespace, spec.name))
    if holders is None:
        return None
    # A job that is being ended gives its name away: its successor is accepted, and HELD until it is gone.
    return next((job_id for job_id in holders if state.jobs[job_id].stop_cause is None), None)


def _existing_actor(state: State, specs: list[JobSpec], parent: JobId) -> JobId | None:
    """Return the living actor that a launch with ``get_if_exists`` means; None: launch it.

    Raises:
        InvalidRequest: the launch has several jobs, or a job that is not an actor.
        NameInUse: it is to belong to the launching job, ``parent``, and the living one does not.
    """
    asking = [spec for spec in specs if spec.get_if_exists]
    if not asking:
        return None
    # The answer may be another job than the one requested, which a launch of several could not tell apart.
    if len(specs) > 1 or asking[0].entry is not EntryKind.ACTOR:
        raise InvalidRequest(f"job {asking[0].name!r}: get_if_exists is for a launch of one actor by itself")
    found = living_actor(state, asking[0].namespace, asking[0].name)
    # A job that asks for an actor of its own relies on it until its own end: another owner's may end before.
    if found is not None and asking[0].owned_by_job and state.jobs[found].owner != parent:
        raise NameInUse(
            f"actor name {asking[0].name!r} is taken in namespace {asking[0].namespace!r}: {found} has it, which is "
            f"owned by {state.jobs[found].owner or 'the cluster'} and not by job {parent or '(none)'}, as "
            "lifetime='job' requires; end that one, or choose another name",
            name=asking[0].name,
            namespace=asking[0].namespace,
            holder=found,
        )
    return found


def _root_session(state: State, session: Session) -> str:
    if session.attempt_id is None:
        return session.session
    attempt = state.attempts[session.attempt_id]
    return state.jobs[attempt.job_id].root


def _check_specs(state: State, specs: list[JobSpec], owner: str, parent: JobId, group: JobGroupSpec | None) -> None:
    """Raise InvalidRequest, NameInUse or NeverSchedulable if a job of the launch cannot be accepted."""
    if len({spec.job_id for spec in specs}) < len(specs):
        raise InvalidRequest("a launch names the same job id twice")
    # Rows of living jobs cannot be dropped, so this bounds memory, and the time of a start.
    if state.count_living_jobs() + len(specs) > state.config.living_limit:
        raise InvalidRequest(f"the cluster holds its limit of {state.config.living_limit} living jobs; end some first")
    _check_depth(state, specs, parent)
    if any(spec.siblings for spec in specs):
        check_supervised_group(state, specs)
    # Names within the same launch, whose jobs are not in the indexes yet.
    others: dict[tuple[str, str], str] = {}
    for spec in specs:
        _check_spec(spec, owner)
        _check_owned_by_job(spec, parent)
        if group is None and (spec.job_group or spec.role):
            raise InvalidRequest(f"job {spec.name!r} has a role in a group but is launched by itself; use launch_group")
        _check_unshared(state, spec)
        _check_name(state, spec, others)
        _check_size(state, spec)
        _check_band(state, spec)
        others[spec.namespace, spec.name] = spec.job_id


def _check_depth(state: State, specs: list[JobSpec], parent: JobId) -> None:
    # Above the parent by owners and not by parents: only owned jobs end with each other, in one step.
    depth = 2 + sum(1 for _ in owner_jobs(state.jobs, state.jobs[parent])) if parent else 1
    if depth > state.config.depth_limit and not all(spec.detached for spec in specs):
        raise InvalidRequest(
            f"job {specs[0].name!r} would be number {depth} in a chain of jobs that launched each other; "
            f"the limit is {state.config.depth_limit}: does it launch itself? Use "
            "detached=True to launch jobs like this without end"
        )


def _check_spec(spec: JobSpec, owner: str) -> None:
    if spec.members < 1:
        raise InvalidRequest(f"job {spec.name!r}: members={spec.members} must be 1 or more")
    if not owner and not spec.detached:
        raise InvalidRequest(f"job {spec.name!r}: tools own nothing and can only launch with detached=True")


def _check_owned_by_job(spec: JobSpec, parent: JobId) -> None:
    if not spec.owned_by_job:
        return
    if not parent:
        raise InvalidRequest(f"actor {spec.name!r}: {NEEDS_A_JOB}")
    if spec.detached or spec.entry is not EntryKind.ACTOR or spec.siblings is not None:
        raise InvalidRequest(f"job {spec.name!r}: owned_by_job is for actors that are neither detached nor supervised")


def _check_band(state: State, spec: JobSpec) -> None:
    allowed = state.policy.user(spec.user).bands
    if spec.band is not None and spec.band not in allowed:
        whose = f"user {spec.user!r}" if spec.user else "a job without a user"
        raise InvalidRequest(
            f"job {spec.name!r}: {whose} may not have priority={spec.band.value!r} by this cluster's policy, only "
            f"{', '.join(repr(band.value) for band in allowed)}; use one of these, or ask the operator for more"
        )


def _check_unshared(state: State, spec: JobSpec) -> None:
    """Raise if another process holds the actor's name exclusively."""
    # An actor's job and an `ActorServer` share one space of names.
    for holder in registrations_of(state, spec.namespace, spec.name) if spec.entry is EntryKind.ACTOR else ():
        if holder.exclusive:
            raise name_in_use(state, holder)


def _check_name(state: State, spec: JobSpec, others: dict[tuple[str, str], str]) -> None:
    holder = others.get((spec.namespace, spec.name)) or _living_holder(state, spec)
    if holder is None:
        return
    job = state.jobs.get(holder)
    has_it = f"{_kind(job.spec)} {holder} ({job_state(job).value}) has it" if job else "this launch uses it twice"
    advice = ""
    if job is not None and job.spec.entry is spec.entry is EntryKind.ACTOR:
        advice = f"call it with get_actor({spec.name!r}), or create_actor(..., get_if_exists=True); else "
    raise NameInUse(
        f"{_kind(spec)} name {spec.name!r} is taken in namespace {spec.namespace!r}: {has_it}; {advice}"
        f"wait for its end or choose another name",
        name=spec.name,
        namespace=spec.namespace,
        holder=holder,
    )


def _kind(spec: JobSpec) -> str:
    return "actor" if spec.entry is EntryKind.ACTOR else "job"


def _check_size(state: State, spec: JobSpec) -> None:
    if spec.reservation_id:
        check_fits_reservation(state, spec)
        return
    demand = spec.demand
    if demand.regions and demand.zones:
        # A contradiction is the author's error everywhere; other zones may still join the cluster.
        where = contradiction(demand, {zone: state.pool.regions_of(zone) for zone in demand.zones})
        if where:
            raise InvalidRequest(f"job {spec.name!r}: {where}")
    reason = _infeasible_reason_text(state, spec)
    if reason:
        # Refused now rather than queued for ever; only where all machines that can exist are known.
        raise NeverSchedulable(f"job {spec.name!r} can never run here: {reason}", name=spec.name)


def check_feasible(state: State, spec: JobSpec) -> None:
    """Check a spec as a launch would.

    Raises:
        InvalidRequest, NeverSchedulable: no machine of this cluster could ever hold it.
    """
    _check_spec(spec, "any owner")
    _check_size(state, spec)
    _check_band(state, spec)


def _infeasible_reason_text(state: State, spec: JobSpec) -> str:
    """Return why no machine of this cluster could ever hold the job; empty when one might."""
    if not state.knows_all_machines or spec.reservation_id:
        return ""
    part = part_of(spec)
    # Asked of the pool first, which keeps counts of empty machines: a launch must not look at 10,000 machines.
    if state.pool.could_hold(part) or state.feasible_at.get(part) == state.pool.machines_version:
        return ""
    machines = all_machines(state, spec.members)
    if is_infeasible(part, machines):
        return infeasible_text(spec, machines)
    # Emptied as a whole: it is only a cache, and few clusters see so many shapes.
    if len(state.feasible_at) >= POSSIBLE_LIMIT:
        state.feasible_at.clear()
    state.feasible_at[part] = state.pool.machines_version
    return ""


def _unmatched_texts(state: State, specs: list[JobSpec]) -> Iterator[str]:
    """Yield warnings about jobs that no machine of this cluster could hold, while others may still join it."""
    # A cluster without any machine is one that starts: its jobs say what they wait for.
    if state.knows_all_machines or not state.nodes:
        return
    seen: set[MemberGroup] = set()
    for spec in specs:
        # That of the queue, which equal requests share and whose hash is known already.
        applicant = state.queue.applicants.get(spec.job_id)
        part = part_of(spec) if applicant is None else applicant.shape.request.parts[0]
        # Once for each shape: a launch may have 10,000 jobs, and all machines are looked at for each.
        if spec.reservation_id or part in seen:
            continue
        seen.add(part)
        if state.pool.could_hold(part):
            continue
        machines = known_machines(state)
        if is_infeasible(part, machines):
            limit_s = spec.wait_limit_s
            how_long = (
                "without a limit: wait_limit_s sets one" if limit_s is None else f"for {limit_s:g} s (wait_limit_s)"
            )
            yield (
                f"job {spec.name!r} fits no machine of this cluster: {infeasible_text(spec, machines)}; "
                f"it waits until such a machine joins, {how_long}"
            )


def _check_room(state: State, group: JobGroupSpec, specs: list[JobSpec]) -> None:
    """Raise if the jobs of a group would fit one by one, but not together."""
    if not state.knows_all_machines or specs[0].reservation_id:
        return
    if reason := _no_room_text(state, group.config.same, specs):
        name = group.config.name
        raise NeverSchedulable(f"job group {name!r} can never run here: {reason}", name=name)


def _no_room_text(state: State, same: str, specs: list[JobSpec]) -> str:
    """Return why these jobs could never run together; empty when they could."""
    # Existing machines first: the list of obtainable ones may be many times longer.
    reason = no_room_text(known_machines(state), same, specs)
    if reason and state.policy.groups:
        reason = no_room_text(all_machines(state, sum(spec.members for spec in specs)), same, specs)
    return reason


def fail_infeasible_jobs(state: State, out: EffectBuffer) -> None:
    """Fail waiting jobs that can never run, after a restart: the machines may differ from those they were accepted
    for."""
    # Lists, since failing a job changes what is walked over.
    waiting = [applicant.id for applicant in state.queue if applicant.kind is ApplicantKind.JOB]
    for job_id in [*waiting, *state.held_jobs, *(job_id for _, _, job_id in state.backoffs)]:
        job = state.jobs[job_id]
        reason = _infeasible_reason_text(state, job.spec)
        if reason:
            fail_unschedulable(state, out, job, reason)
    for applicant in [each for each in state.queue if each.kind is ApplicantKind.GROUP]:
        _end_if_impossible(state, out, state.job_groups[applicant.id])


def _end_if_impossible(state: State, out: EffectBuffer, group: JobGroupRow) -> None:
    jobs = state.gathered_jobs(group.group_id)
    specs = [job.spec for job in jobs]
    if not state.knows_all_machines or specs[0].reservation_id:
        return
    # Only the first is failed: that decides the group, which ends the others.
    if reason := _no_room_text(state, group.config.same, specs):
        fail_unschedulable(state, out, jobs[0], f"its group {group.config.name}: {reason}")  # the others end by that


def on_terminate_requested(state: State, event: TerminateRequested, out: EffectBuffer) -> None:
    """Request the end of jobs; the reply is immediate and has those that were not being ended already."""
    by = session_text(state, event.session)
    found = dict.fromkeys((*event.jobs, *matching_jobs(state, event)))
    for group in matching_groups(state, event):
        found |= state.group_members[group.group_id].jobs
    # Detached descendants too: they are below it, though not owned by it.
    if event.tree:
        found |= dict.fromkeys(descendants(state, found))
    jobs = [state.jobs[job_id] for job_id in found if job_id in state.jobs]
    # A refused or cancelled launch takes back only what it has launched itself, not what it attached to.
    wanted = [job for job in jobs if not event.own or job.launched_by == event.session]
    ended = tuple(job.job_id for job in wanted if stop_job(state, out, job, EndReason.STOPPED, event.reason, by))
    out.reply(event.session, event.ref, TerminateResult(jobs=ended))


# Jobs in reservations -------------------------------------------------------------------------------------------------


def check_fits_reservation(state: State, spec: JobSpec) -> None:
    """Check that a job may be launched in the reservation it names.

    Raises:
        NoSuchReservation: there is none, or it has ended.
        NeverSchedulable: it would not fit if the reservation had all its units, on machines as large as can be.
    """
    reservation = state.open_reservation(spec.reservation_id)
    # Only sizes are compared: ports, places and preemptibility depend on machines that it does not have yet.
    most = _full_capacity(reservation.spec)
    part = part_of(spec)
    for demand in part.choices:
        asked = evolve(demand, preemptible=True, containers=False, ports=0, regions=(), zones=())
        if (
            _can_share_a_place(demand, reservation.spec.demand)
            and sum(members_held(asked, capacity) for capacity in most) >= part.members
        ):
            return
    members = f"{part.members} members of " if part.members > 1 else ""
    needs = f"{members}{demand_text(spec.demand)}"
    raise NeverSchedulable(
        f"job {spec.name!r} can never run in reservation {reservation.id}: it needs {needs}, and "
        f"the reservation has at most {reservation.spec.max_units} units of {demand_text(reservation.spec.demand)}",
        name=spec.name,
        reservation_id=reservation.id,
    )


def _can_share_a_place(one: Demand, other: Demand) -> bool:
    """Return whether the regions and zones of two demands do not exclude each other."""
    pairs = ((one.regions, other.regions), (one.zones, other.zones))
    return all(not mine or not theirs or set(mine) & set(theirs) for mine, theirs in pairs)


def _full_capacity(spec: ReservationSpec) -> list[Capacity]:
    """Return the reservation's machines if it had all its units: all in one machine, or with several hosts one machine
    each."""
    found = []
    for demand in (spec.demand, *spec.alternatives):
        # Units of one machine are one machine inside, so the most that can ever be free in one place is all units
        # together.
        pieces, machines = (spec.max_units, 1) if spec.hosts == 1 else (1, spec.max_units * spec.hosts)
        count = demand.device_count * pieces
        devices = tuple(
            Device(f"device-{number}", demand.device_kind or "", demand.device_variant) for number in range(count)
        )
        size = demand.cpu_milli * pieces, demand.memory_bytes * pieces, demand.disk_bytes * pieces
        found += [Capacity(*size, devices)] * machines
    return found
