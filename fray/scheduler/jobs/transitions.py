"""Transitions of jobs and attempts through the tables of `lifecycle`, and what follows from each.

An end also ends what is owned: the end of an attempt removes the names it had and stops the jobs it launched, but for
those that belong to its job as a whole; these end with the final end of the job.
"""

from __future__ import annotations

from attrs import evolve

from fray.model.gangs import port_names
from fray.model.ids import JobId, SessionId, attempt_id
from fray.model.specs import EndReason, EntryKind, JobSpec, JobState, ObservedAttempt, Outcome
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.history import attempt_record
from fray.scheduler.jobs.node_faults import score_attempt_end
from fray.scheduler.jobs.registry import drop_incarnation
from fray.scheduler.jobs.retention import (
    begin_generation,
    forget_generations,
    strip_ended_job,
    strip_value,
    truncate_outcome,
)
from fray.scheduler.jobs.retries import (
    FREE_BUDGETS,
    apply_exit_rule,
    charge_retry,
    crash_loop_text,
    final_outcome,
    first_cause,
    first_member_text,
    is_free_restart,
    outcome_figures_text,
    outcome_text,
    preferred_nodes,
    recent_restarts,
    restart_config,
    retries_spent,
    retry_budget,
    retry_limit,
)
from fray.scheduler.lifecycle import (
    ATTEMPT_TABLE,
    JOB_TABLE,
    SUCCESS_OVERRIDES,
    AttemptObservation,
    AttemptPhase,
    Budget,
    JobEvent,
    JobPhase,
    next_phase,
)
from fray.scheduler.pool.ports import AVOID_S
from fray.scheduler.pool.requests import MemberPlacement, Placement
from fray.scheduler.state.indexes import stage_of
from fray.scheduler.state.rows import AttemptRow, JobRow, job_state
from fray.scheduler.state.state import State

# Placement ------------------------------------------------------------------------------------------------------------


def accept_job(
    state: State, out: EffectBuffer, spec: JobSpec, owner: str, root: SessionId, session: SessionId, parent: JobId = ""
) -> None:
    """Add a new job at the end of the queue."""
    # A child without a band of its own gets its parent's: a production job must not wait for children that queue behind
    # interactive work. Not one of another user, who may have no right to that band.
    above = state.jobs.get(parent)
    inherited = above.band if above is not None and above.spec.user == spec.user else None
    job = JobRow(
        spec=spec,
        order=state.next_order(),
        owner=owner,
        root=root,
        launched_by=session,
        parent=parent,
        launched_at=state.now,
        queued_at=state.now,
        generation=state.meta.first_generation,
        oldest=state.meta.first_generation,
        # Members of a group wait for one another first; `holds` puts the whole group into the queue.
        phase=JobPhase.HELD if spec.job_group else JobPhase.QUEUED,
        band=spec.band or inherited or state.policy.user(spec.user).band,
    )
    state.add_job(job)
    out.job_changed(spec.job_id)
    lifetime = f" (owned by job {owner})" if spec.owned_by_job else "" if owner else " (detached)"
    out.log_event(spec.job_id, "launched", f"by {session if spec.owned_by_job else owner or session}{lifetime}")
    if not spec.job_group and len(state.jobs_by_name[spec.namespace, spec.name]) > 1:
        hold_job(state, out, job)  # the holders of its name are being ended, or it would have been refused


def start_job(state: State, out: EffectBuffer, job: JobRow, placed: Placement) -> None:
    """Create the attempts of a placed job; the pool has allocated their shares already."""
    grants, job.choice, job.placed_at = placed.grants, placed.choice, state.now
    # Placed with its group, which was in the queue for it.
    if job.phase is JobPhase.HELD:
        state.unindex_hold(job)
    # After `placed_at` is set: the indexes of running jobs are keyed by it.
    change_phase(state, out, job, JobEvent.PLACED)
    job_id, generation, now = job.job_id, job.generation, state.now
    # Counts belong to the generation that begins here.
    state.generation_counts[job_id].ran = 0
    # Later stages of a group have their machines from the start: all or none means that no group waits half-started.
    phase = AttemptPhase.DESIRED if is_stage_open(state, job) else AttemptPhase.RESERVED
    names = port_names(job.spec) if grants[0].ports else ()
    for member, grant in enumerate(grants):
        node = state.nodes[grant.node]
        attempt = AttemptRow(
            attempt_id=attempt_id(job_id, generation, member),
            job_id=job_id,
            generation=generation,
            member=member,
            node=grant.node,
            # Bound to the node's incarnation: a node that restarts under the name never held this attempt (P5).
            incarnation=node.incarnation,
            devices=grant.devices,
            ports=dict(zip(names, grant.ports, strict=False)) if names else {},
            host=node.host,
            phase=phase,
            loans=dict(grant.loans) if grant.loans else {},
            placed_at=now,
        )
        state.add_attempt(attempt)
        if phase is AttemptPhase.DESIRED:
            out.desired_changed(attempt)
    out.log_event(job_id, "placed", ", ".join(map(_placement_text, grants)))


def is_stage_open(state: State, job: JobRow) -> bool:
    """Return whether all living jobs of earlier stages of its group run."""
    if not job.spec.job_group:
        return True
    blocking = state.group_members[job.spec.job_group].blocking_stage
    return blocking is None or stage_of(job.spec) <= blocking


def begin_stage(state: State, out: EffectBuffer, job: JobRow) -> None:
    """Ask its nodes to run a job whose machines were reserved until its stage."""
    # Only the nodes learn of it now; the pool has counted these shares since the placement.
    for attempt in state.living_members(job):
        attempt.phase = next_phase(ATTEMPT_TABLE, attempt.phase, AttemptObservation.STAGE_REACHED)
        state.touch("attempt", attempt.attempt_id)
        out.desired_changed(attempt)
    out.job_changed(job.job_id)
    out.log_event(job.job_id, "starting", f"stage {stage_of(job.spec)} of its group")


def _placement_text(grant: MemberPlacement) -> str:
    lent = f" on {sum(cpu for _, cpu in grant.loans) / 1000:g} CPUs lent by "
    lenders = lent + ", ".join(lender for lender, _ in grant.loans) if grant.loans else ""
    return (f"{grant.node}[{','.join(grant.devices)}]" if grant.devices else grant.node) + lenders


def change_phase(state: State, out: EffectBuffer, job: JobRow, what: JobEvent) -> None:
    """Apply an event to a job; the only place where a job's phase changes."""
    # One place, so that no index can miss a change. The table refuses what would be a bug of the caller.
    before = job.phase
    job.phase = next_phase(JOB_TABLE, before, what)
    state.on_phase_changed(job, before)
    if job.spec.job_group:
        state.on_member_phase_changed(job, before)
    out.job_changed(job.job_id)


def hold_job(state: State, out: EffectBuffer, job: JobRow, until: float | None = None) -> None:
    """Hold back a waiting job, until a time or until `holds.release_held_jobs` finds that it waits for nothing else."""
    _dequeue(state, job)
    change_phase(state, out, job, JobEvent.HELD_BACK)
    # The longer of the two waits counts: a back-off is not shortened by a sibling's.
    job.held_until = until if job.held_until is None else max(job.held_until, until or 0.0)
    state.index_hold(job)


# Reports of nodes -----------------------------------------------------------------------------------------------------


def observe_attempt(state: State, out: EffectBuffer, attempt: AttemptRow, observed: ObservedAttempt) -> None:
    """Apply a node's report of a living attempt."""
    if attempt.phase is AttemptPhase.RESERVED:
        return  # its node was not asked to run it
    observation = AttemptObservation(observed.phase.value)
    # Reports are sets of what is, sent again and again: only a change touches the row, and is written.
    if observed.pid is not None and observed.pid != attempt.pid:
        attempt.pid = observed.pid
        state.touch("attempt", attempt.attempt_id)
    if observation is AttemptObservation.ENDED:
        # An end without an outcome is an end all the same; KILLED is charged as a failure.
        outcome = observed.outcome or Outcome(cause=EndReason.KILLED, message="its node reported no outcome")
        end_attempt(state, out, attempt, observation, outcome)
        return
    phase = next_phase(ATTEMPT_TABLE, attempt.phase, observation)
    if phase is attempt.phase:
        return
    attempt.phase = phase
    state.touch("attempt", attempt.attempt_id)
    if phase is AttemptPhase.RUNNING:
        _mark_succeeded_or_running(state, out, attempt, state.now)


def _mark_succeeded_or_running(state: State, out: EffectBuffer, attempt: AttemptRow, since: float) -> None:
    """Mark that the attempt runs, or has run to success; the last member to do so makes the job RUNNING."""
    # Reports may skip phases: of a short job the node sends only the latest state, and a success implies that it ran.
    if attempt.ran:
        return
    attempt.ran = True
    # The node measures the duration by its own clock; the start that it implies may lie before the placement.
    attempt.started_at = max(since, attempt.placed_at)
    state.touch("attempt", attempt.attempt_id)
    job = state.jobs[attempt.job_id]
    counts = state.generation_counts[attempt.job_id]
    counts.ran += 1
    out.member_changed(job)
    # A gang is RUNNING with its last member, not with its first: it can do nothing in common before.
    if job.phase is JobPhase.STARTING and counts.ran == job.spec.members:
        change_phase(state, out, job, JobEvent.ALL_RAN)
        # Of the first generation: users ask how long a job has been running, with its retries.
        job.started_at = attempt.started_at if job.started_at is None else job.started_at
        out.log_event(attempt.job_id, "running")
        _notify_group(out, job)


def reconcile_missing_attempt(state: State, out: EffectBuffer, attempt: AttemptRow) -> None:
    """Handle that its node, asked for everything it holds, did not list it."""
    if attempt.phase is AttemptPhase.RESERVED:
        return
    # A node that has reported an attempt before and does not list it has lost it. Before its first report the request
    # may still be on its way, so it is sent again.
    if next_phase(ATTEMPT_TABLE, attempt.phase, AttemptObservation.ABSENT) is AttemptPhase.ENDED:
        gone = Outcome(cause=EndReason.KILLED, message=f"the node {attempt.node} no longer has it")
        end_attempt(state, out, attempt, AttemptObservation.ABSENT, gone)
    else:
        out.desired_changed(attempt)


def mark_attempt_lost(state: State, out: EffectBuffer, attempt: AttemptRow, message: str, since: float) -> None:
    """End an attempt whose machine is gone, by proof or by lease."""
    outcome = Outcome(cause=EndReason.MACHINE_LOST, message=message)
    # From when the machine fell silent and not from now: `first_cause` compares these times.
    end_attempt(state, out, attempt, AttemptObservation.LOST, outcome, max(since, attempt.placed_at))


# Ending ---------------------------------------------------------------------------------------------------------------


def end_attempt(
    state: State,
    out: EffectBuffer,
    attempt: AttemptRow,
    observation: AttemptObservation,
    outcome: Outcome,
    at: float | None = None,
) -> None:
    """End an attempt that is proven not to live any more: names go, children stop, its share is free, its gang
    follows."""
    spec = state.jobs[attempt.job_id].spec
    outcome = truncate_outcome(apply_exit_rule(spec, outcome), spec.members)
    # The table lets only RUNNING jobs succeed, so a success whose start was never reported passes through RUNNING here.
    if outcome.cause is EndReason.SUCCEEDED:
        _mark_succeeded_or_running(state, out, attempt, state.now - outcome.duration_s)
    elif attempt.started_at is None and outcome.duration_s:
        attempt.started_at = max(attempt.placed_at, state.now - outcome.duration_s)
    if outcome.cause is EndReason.PORT_TAKEN:
        # Another process holds one of them, and which one is not known: all are avoided for a while.
        state.avoid_ports(attempt, state.now + AVOID_S)
    attempt.phase = next_phase(ATTEMPT_TABLE, attempt.phase, observation)
    attempt.outcome = outcome
    attempt.ended_at = state.now if at is None else at
    # Before the share is released, which ends loans to and by the attempt.
    out.record(attempt_record(state, attempt))
    # Referred to from here on; the event's pin on it ends with this batch.
    state.blob_refs.add(outcome.value)
    # Capacity is free from here on, and the rest of this step may place others there.
    state.release_attempt(attempt)
    out.desired_changed(attempt)
    job = state.jobs[attempt.job_id]
    out.member_changed(job)
    text = f"{attempt.attempt_id} on {attempt.node}: {outcome_text(outcome)}{outcome_figures_text(outcome)}"
    out.log_event(job.job_id, "attempt ended", text)
    _release_attempt(state, out, attempt, outcome)
    # A success matters only where a machine is under suspicion, which is rare.
    if state.nodes_by_fault or outcome.cause is not EndReason.SUCCEEDED:
        score_attempt_end(state, out, attempt, outcome)
    _apply_attempt_end(state, out, job, attempt, outcome)


def _release_attempt(state: State, out: EffectBuffer, attempt: AttemptRow, outcome: Outcome) -> None:
    """Remove everything an ended attempt owns: its names, the jobs it launched, its sessions."""
    out.ended_attempts.append(attempt.attempt_id)
    if attempt.attempt_id in state.registrations_by_incarnation:
        # Names go in the same step as the attempt: no lookup finds a process that is known to be dead.
        reason = f"its process {attempt.attempt_id} ended: {outcome_text(outcome)}"
        drop_incarnation(state, out, attempt.attempt_id, reason)
    stop_owned(state, out, attempt.attempt_id, f"its owner {attempt.attempt_id} ended ({outcome.cause.value})")


def _apply_attempt_end(state: State, out: EffectBuffer, job: JobRow, attempt: AttemptRow, outcome: Outcome) -> None:
    """Apply the consequences of a member's end for its job."""
    # Its job was committed while its machine was silent.
    if job.ended:
        _orphaned_attempt(state, out, job, attempt)
        return
    if outcome.cause is not EndReason.SUCCEEDED and job.phase in (JobPhase.STARTING, JobPhase.RUNNING):
        if outcome.cause is EndReason.SIBLING:  # reported without request
            outcome = evolve(outcome, cause=EndReason.FAILURE)
        # The rest of a gang cannot finish without this member: it ends now and not at the timeout of its next
        # collective.
        end_generation(state, out, job, outcome, EndReason.GANG, attempt.member)
    # All have run, or it would not be RUNNING; a failure would have made it CLOSING. So all have succeeded.
    if job.phase is JobPhase.RUNNING and not state.generation_counts[job.job_id].living:
        _succeed(state, out, job)
    retry_or_commit(state, out, job)


def _orphaned_attempt(state: State, out: EffectBuffer, job: JobRow, attempt: AttemptRow) -> None:
    """Clean up after an attempt on a silent machine that its job did not wait for (see `retry_or_commit`)."""
    strip_value(state, out, attempt)
    if not state.generation_counts[job.job_id].living:
        out.release_blob(job.spec.payload)
        strip_ended_job(state, job)


def end_generation(
    state: State, out: EffectBuffer, job: JobRow, first: Outcome, cause: EndReason, member: int | None = None
) -> None:
    """End this generation, because of a ``member`` or on request: every living member is asked to end."""
    # First: ending a reserved member below calls back into `_apply_attempt_end`, which must see the job as CLOSING.
    change_phase(state, out, job, JobEvent.CANCELLED)
    job.first_outcome, job.first_outcome_at, job.first_member = first, state.now, member
    for attempt in state.living_members(job):
        attempt.stop_cause = cause
        state.touch("attempt", attempt.attempt_id)
        # Its node was never asked to run it, so no report of its end will come.
        if attempt.phase is AttemptPhase.RESERVED:
            end_attempt(
                state, out, attempt, AttemptObservation.WITHDRAWN, Outcome(cause=cause, message="it had not started")
            )
        else:
            out.desired_changed(attempt)


def stop_job(state: State, out: EffectBuffer, job: JobRow, cause: EndReason, reason: str, by: str = "") -> bool:
    """End a job on request of ``by``, or with its owner; False: that was decided before, and nothing has changed."""
    # The first cause stays: a later request does not replace its reason.
    if job.ended or job.stop_cause is not None:
        return False
    job.stop_cause, job.stop_reason, job.ended_by = cause, reason, by or reason
    out.job_changed(job.job_id)
    out.log_event(job.job_id, "stopping", reason + (f" (by {by})" if by else ""))
    first = Outcome(cause=cause, message=reason)
    # Nothing runs: the end is final at once.
    if job.phase in (JobPhase.QUEUED, JobPhase.HELD):
        _dequeue(state, job)
        change_phase(state, out, job, JobEvent.COMMITTED)
        _commit(state, out, job, first)
    elif job.phase is not JobPhase.CLOSING:
        # In CLOSING its members are being ended already; `stop_cause` alone turns the coming retry into an end.
        end_generation(state, out, job, first, cause)
    # With its members on silent machines, no report would come that decides it.
    retry_or_commit(state, out, job)
    return True


def preempt_job(
    state: State,
    out: EffectBuffer,
    job: JobRow,
    why: str,
    notice_limit_s: float | None = None,
    what: str = "preempted",
) -> bool:
    """End a placed job as a whole, for the sake of others, to restart as its budgets allow.

    Args:
        notice_limit_s: longest notice; None: that of the policy alone.
        what: name of the event, whose text is ``why``; the outcome begins with it unless it is ``preempted``.

    Returns:
        False: it is not placed, or its end was decided before.
    """
    if job.phase not in (JobPhase.STARTING, JobPhase.RUNNING):
        return False
    # The author asks for a notice and the operator bounds it: others wait for these machines.
    limit_s = state.policy.preemption.notice_limit_s
    job.notice_s = min(job.spec.notice_s, limit_s if notice_limit_s is None else min(limit_s, notice_limit_s))
    out.log_event(job.job_id, what, why + (f"; it has {job.notice_s:g} s notice" if job.notice_s else ""))
    message = why if what == "preempted" else f"{what}: {why}"
    end_generation(state, out, job, Outcome(cause=EndReason.PREEMPTED, message=message), EndReason.PREEMPTED)
    retry_or_commit(state, out, job)
    return True


def fail_unschedulable(state: State, out: EffectBuffer, job: JobRow, reason: str) -> None:
    """End a waiting job that no machine will ever hold."""
    _dequeue(state, job)
    change_phase(state, out, job, JobEvent.COMMITTED)
    _commit(state, out, job, Outcome(cause=EndReason.UNSCHEDULABLE, message=reason))


def _dequeue(state: State, job: JobRow) -> None:
    if job.phase is JobPhase.HELD:
        state.unindex_hold(job)
        return
    state.queue.remove(job.job_id)


def stop_owned(state: State, out: EffectBuffer, owner: str, reason: str) -> None:
    """Stop all jobs whose owner has ended."""
    # Recursive through the ends of jobs and attempts; `SchedulerConfig.depth_limit` bounds the depth of one step.
    for job_id in list(state.children.get(owner, ())):
        stop_job(state, out, state.jobs[job_id], EndReason.OWNER_ENDED, reason)


# Retry or end ---------------------------------------------------------------------------------------------------------


def retry_or_commit(state: State, out: EffectBuffer, job: JobRow) -> None:
    """Retry or commit a CLOSING job if that can be decided now.

    It can when every member has ended. If the others are on machines that have been silent for ``suspect_s``, a retry
    has to wait for proof, but an end without retry does not: those attempts keep their machines' shares until then.
    """
    if job.phase is not JobPhase.CLOSING:
        return
    members = state.members(job)
    living = [attempt for attempt in members if attempt.living]
    # A member on a machine that answers will report its end.
    if not all(map(state.is_suspect, living)):
        return
    # Judged as if the silent ones had been lost when they fell silent, which may turn out to be the first cause.
    expected = [_as_lost(state, attempt) if attempt.living else attempt for attempt in members]
    # A job that finished within its notice has done its work: to run it again would waste it.
    if _was_done(job, members):
        change_phase(state, out, job, JobEvent.COMMITTED)
        _commit(state, out, job, expected[0].outcome or Outcome(cause=EndReason.SUCCEEDED))
        return
    first, job.first_member = first_cause(job, expected, state.config.suspect_s)
    budget = retry_budget(state, job, first)
    # With a member that may still run, a second generation could run beside the first (P4); the lease ends that.
    if budget is not None and not living:
        _retry(state, out, job, members, budget, first)
    elif budget is None:
        change_phase(state, out, job, JobEvent.COMMITTED)
        _commit(state, out, job, final_outcome(state, job, first, expected))


def _was_done(job: JobRow, members: list[AttemptRow]) -> bool:
    """Return whether the job had finished before it noticed that the scheduler had requested its end."""
    return (
        job.stop_cause is None
        and job.first_outcome is not None
        and job.first_outcome.cause in SUCCESS_OVERRIDES
        and all(attempt.outcome is not None and attempt.outcome.cause is EndReason.SUCCEEDED for attempt in members)
    )


def _as_lost(state: State, attempt: AttemptRow) -> AttemptRow:
    """Return a silent machine's attempt as it will have ended."""
    node = state.nodes[attempt.node]
    message = f"its machine {node.name} is silent"
    return evolve(
        attempt,
        outcome=Outcome(cause=EndReason.MACHINE_LOST, message=message),
        ended_at=max(node.silent_since, attempt.placed_at),
    )


def _retry(
    state: State, out: EffectBuffer, job: JobRow, members: list[AttemptRow], budget: Budget, first: Outcome
) -> None:
    crashed = crash_loop_text(job)
    # Before `generation` counts up: the jitter and the texts are derived from the generation that ended.
    charge_retry(state, job, budget, first, members)
    job.previous_nodes = preferred_nodes(job, members)
    for attempt in members:
        strip_value(state, out, attempt)
    change_phase(state, out, job, JobEvent.RETRIED)
    _log_retry(state, out, job, budget, first)
    if crash_loop_text(job) and not crashed:
        out.log_event(job.job_id, "crash_loop", crash_loop_text(job))
    begin_generation(state, job, job.generation + 1)
    job.queued_at = state.now
    job.first_outcome = job.first_member = None
    job.notice_s = 0.0
    # A crash loop may make thousands of generations, each with a row for every member.
    forget_generations(state, job)
    # Through HELD also without a back-off: siblings wait for those that are still being ended, and members of a group
    # for the decision whether they are placed alone.
    if job.held_until is not None or budget is Budget.SIBLING or job.spec.job_group:
        change_phase(state, out, job, JobEvent.HELD_BACK)
        state.index_hold(job)
    else:
        state.enqueue(job)
    if job.spec.siblings is not None and (budget is Budget.REQUEUE or budget not in FREE_BUDGETS):
        out.supervised_changes.append(job.job_id)
    _notify_group(out, job)


def _log_retry(state: State, out: EffectBuffer, job: JobRow, budget: Budget, first: Outcome) -> None:
    wait = f", in {job.held_until - state.now:.4g} s" if job.held_until is not None else ""
    member = first_member_text(state, job)
    text = f"{_budget_text(state, job, budget, first.cause)} after {outcome_text(first)}" + (
        f" ({member})" if member else ""
    )
    out.log_event(job.job_id, "retrying", text + wait)


def _budget_text(state: State, job: JobRow, budget: Budget, cause: EndReason) -> str:
    """Return how much of a budget is spent, as text."""
    config = restart_config(job)
    if budget is Budget.REQUEUE:
        return f"{budget.value} {job.requeues}, which costs no retry,"
    if is_free_restart(job, cause):
        return f"{budget.value} {job.retries[cause]}, which costs no restart,"
    if config is None or budget in FREE_BUDGETS:
        most, used = retry_limit(job.spec, budget) or 0, retries_spent(job, budget)
    else:
        most, used = config.max_restarts or 0, len(recent_restarts(state, job))
    within = f" within {config.restart_period_s:g} s" if config and config.restart_period_s else ""
    return f"{budget.value} {used}" + (f" of {most}{within}" if most >= 0 else "")


def _succeed(state: State, out: EffectBuffer, job: JobRow) -> None:
    """Commit a job whose members have all succeeded; the first one's value is the job's."""
    own = state.members(job)[0].outcome
    assert own is not None
    change_phase(state, out, job, JobEvent.ALL_SUCCEEDED)
    _commit(state, out, job, own)


def _commit(state: State, out: EffectBuffer, job: JobRow, outcome: Outcome) -> None:
    """Set the job's outcome, once and for good."""
    # Exactly once: the table has no transition out of ENDED.
    job.outcome, job.ended_at, job.first_outcome = outcome, state.now, None
    # A reference of its own: the members' values, of which it is one, are released below.
    state.blob_refs.add(outcome.value)
    # A checkpoint serves restarts only.
    if job.checkpoint is not None:
        out.release_blob(job.checkpoint.blob)
        job.checkpoint = None
    state.index_job_end(job)
    for attempt in state.members(job):
        strip_value(state, out, attempt)
        # On a silent machine: the attempt keeps its share of it, but its names and jobs must not wait for the lease.
        if attempt.living:
            _release_attempt(state, out, attempt, outcome)
    # Here alone: what the job owns as a whole stays while it restarts.
    stop_owned(state, out, job.job_id, f"its owner {job.job_id} ended ({outcome.cause.value})")
    if not state.generation_counts[job.job_id].living:
        out.release_blob(job.spec.payload)
        strip_ended_job(state, job)
    # Callers that look for the actor now get how it ended.
    if job.spec.entry is EntryKind.ACTOR:
        out.actor_changed(job.job_id)
    if job.spec.siblings is not None and job_state(job) is JobState.FAILED:
        out.supervised_changes.append(job.job_id)
    out.log_event(job.job_id, "ended", outcome_text(outcome))
    _notify_group(out, job, ended=True)


def _notify_group(out: EffectBuffer, job: JobRow, ended: bool = False) -> None:
    """Queue the change for `groups.apply_member_changes`."""
    if job.spec.job_group:
        out.group_changes.append((job.job_id, ended))


# Time limits ----------------------------------------------------------------------------------------------------------

# The time of a job counts from the moment its machines are allocated, again with each generation: preparing its
# environment is part of it, since others wait for those machines all the same. When ``time_limit_s`` have passed, the
# job is terminated and has failed, as ``time_limit``; it is not retried. A job that succeeds meanwhile has succeeded.


def end_overdue(state: State, out: EffectBuffer) -> None:
    """End, after every step, the jobs whose time limit has expired, earliest first."""
    # Terminates: `end_generation` takes the job out of this index.
    while state.time_limits and state.time_limits[0][0] <= state.now:
        job = state.jobs[state.time_limits[0][2]]
        text = f"it ran for its time limit of {job.spec.time_limit_s:g} s"
        out.log_event(job.job_id, "time limit", text)
        end_generation(state, out, job, Outcome(cause=EndReason.TIME_LIMIT, message=text), EndReason.TIME_LIMIT)
        retry_or_commit(state, out, job)
