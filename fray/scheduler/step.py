"""Entry point of the scheduler: `step(state, event, now) -> effects`.

`HANDLERS` maps each class of event to its handler; a new event needs a line there. After the handler, whatever it did:
siblings and job groups follow their members, held jobs that need not wait any more enter the queue, the autoscaler
plans (if a plan is due), reservations release idle units, waiting jobs are placed, finished sessions end, and old
records are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from fray.scheduler import sessions
from fray.scheduler.autoscaler import plan, provider_events
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import (
    AttemptAnnotated,
    CheckpointTaken,
    ControllerStarted,
    CordonRequested,
    Effect,
    Event,
    GroupScaled,
    LaunchRequested,
    MachineAnswered,
    MachinesListed,
    NameRegistered,
    NameUnregistered,
    NodeDied,
    NodeJoined,
    NodeLeaving,
    NodeProbed,
    NodeReported,
    NodeSilent,
    PolicyChanged,
    RequeueRequested,
    ReservationReleased,
    ReservationRenewed,
    ReservationRequested,
    SessionClosed,
    SessionLost,
    SessionOpened,
    TerminateRequested,
    Tick,
    UncordonRequested,
    WaitReported,
)
from fray.scheduler.explain.diagnosis import job_reason_text
from fray.scheduler.jobs import checkpoints, groups, holds, registry, requeue, submit, supervision
from fray.scheduler.jobs.retention import forget_finished
from fray.scheduler.jobs.transitions import end_overdue, fail_unschedulable
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.nodes import drain, nodes, quarantine
from fray.scheduler.placement import lending
from fray.scheduler.placement.placement import place_waiting
from fray.scheduler.preemption import preemption
from fray.scheduler.reservations import reservations
from fray.scheduler.reservations.reclaim_surplus import reclaim_for_refused
from fray.scheduler.reservations.view import reservation_info
from fray.scheduler.state.machine_tables import RESERVATION
from fray.scheduler.state.state import State
from fray.scheduler.views import job_info


def on_timer_wait(state: State, out: EffectBuffer, job_id: str) -> None:
    """Fail a job that has waited for machines as long as its ``wait_limit_s`` allows."""
    # Each wait in the queue counts from zero. Back-off, names in use and restarting siblings do not count.
    job = state.jobs.get(job_id)
    # A gathered member is HELD, but its group is in the queue for it: that is a wait for machines as well.
    if job is None or not (job.phase is JobPhase.QUEUED or job.is_gathered):
        return
    fail_unschedulable(
        state, out, job, f"it waited {job.spec.wait_limit_s:g} s for machines, its limit: {job_reason_text(state, job)}"
    )


TIMER_HANDLERS: Mapping[str, Callable[[State, EffectBuffer, str], None]] = {
    "drain": drain.on_timer_drain,
    "probe": quarantine.on_timer_probe,
    RESERVATION: reservations.on_timer_reservation,
    "seek": preemption.retry_preemption,
    "trapped": lending.fail_trapped_jobs,
    "wait": on_timer_wait,
}
"""Handler of each kind of timer, called with the key of the row."""


def on_timers_due(state: State, out: EffectBuffer) -> None:
    """Call the handlers of all timers that are due, in the order of their times."""
    # They are removed before the first handler runs: a handler that sets its timer again is not called twice in a step.
    for what, key in state.timers.take_due(state.now):
        TIMER_HANDLERS[what](state, out, key)


def _on_controller_start(state: State, event: ControllerStarted, out: EffectBuffer) -> None:
    state.meta.epoch = event.epoch
    state.declares_all_nodes = event.declares_all_nodes
    state.declared_nodes = event.declared
    # The policy is not stored. Until here the state has default weights and half-life, by which usage must not be
    # accrued.
    state.set_policy(event.policy, is_initial=True)
    state.touch("meta", "meta")
    plan.on_controller_start(state, event.cluster, event.policy)
    # Every connection was lost with the old controller, and no node could report: time limits of silence begin now, or
    # an outage longer than ``lease_s`` would end every job.
    nodes.on_controller_start(state, out)
    sessions.on_controller_start(state)
    reservations.on_controller_start(state)
    # The machines that this controller declares may be other ones than before.
    submit.fail_infeasible_jobs(state, out)


def _on_policy_changed(state: State, event: PolicyChanged, out: EffectBuffer) -> None:
    state.set_policy(event.policy)
    # The cache is keyed by a version of the machines, which a change of the policy's groups does not increase.
    state.feasible_at.clear()
    plan.on_policy_changed(state, event.policy)


def _on_tick(state: State, event: Tick, out: EffectBuffer) -> None:
    nodes.on_tick(state, out)
    sessions.on_tick(state, out)
    on_timers_due(state, out)


HANDLERS: Mapping[type, Callable[[State, Any, EffectBuffer], None]] = {
    ControllerStarted: _on_controller_start,
    PolicyChanged: _on_policy_changed,
    SessionOpened: sessions.on_session_opened,
    SessionLost: sessions.on_session_lost,
    SessionClosed: sessions.on_session_closed,
    LaunchRequested: submit.on_launch_requested,
    TerminateRequested: submit.on_terminate_requested,
    RequeueRequested: requeue.on_requeue_requested,
    NodeJoined: nodes.on_node_joined,
    NodeReported: nodes.on_node_reported,
    NodeSilent: nodes.on_node_silent,
    NodeDied: nodes.on_node_died,
    NodeLeaving: drain.on_node_leaving,
    NodeProbed: quarantine.on_node_probed,
    CordonRequested: drain.on_cordon_requested,
    UncordonRequested: drain.on_uncordon_requested,
    AttemptAnnotated: nodes.on_attempt_annotated,
    NameRegistered: registry.on_name_registered,
    NameUnregistered: registry.on_name_unregistered,
    CheckpointTaken: checkpoints.on_checkpoint_taken,
    WaitReported: lending.on_wait_reported,
    MachineAnswered: provider_events.on_machine_answered,
    MachinesListed: provider_events.on_machines_listed,
    GroupScaled: provider_events.on_group_scaled,
    ReservationRequested: reservations.on_reservation_requested,
    ReservationRenewed: reservations.on_reservation_renewed,
    ReservationReleased: reservations.on_reservation_released,
    Tick: _on_tick,
}


Rule: TypeAlias = tuple[Callable[[State, EffectBuffer], object], Callable[[State, EffectBuffer], object]]
"""A condition, and what is done if it holds. Most steps concern one job, so that most conditions do not hold; each is a
look at an index that is kept anyway."""

RULES_FOR_ATTEMPTS: Sequence[Rule] = (
    (lambda state, out: state.time_limits, end_overdue),
    (lambda state, out: out.supervised_changes, supervision.restart_siblings),
    # A smaller fleet may have fewer machines in quarantine: some return to service when others leave.
    (lambda state, out: state.quarantined, quarantine.enforce_quarantine_limit),
)
"""Applied once after the handler, in this order: they end attempts and change which machines take work."""

RULES_FOR_CAPACITY: Sequence[Rule] = (
    # Groups and held jobs enter the queue before the pass, so that what an end allows to start is placed in the same
    # step.
    (lambda state, out: out.group_changes, groups.apply_member_changes),
    (lambda state, out: state.newly_empty, drain.finish_drains),
    (lambda state, out: state.held_jobs or state.backoffs, holds.release_held_jobs),
    # Before the pass: an applicant for which a unit is requested here does not preempt others in it.
    (lambda state, out: state.has_machine_groups, plan.replan_if_needed),
    (lambda state, out: state.reservations, reservations.expire_and_release),
    # Unconditional: `place_waiting` itself finds out, from counters, whether anything has changed since its last pass.
    (lambda state, out: True, place_waiting),
    # After the pass: loans are for what does not fit without them.
    (lambda state, out: state.lenders and state.queue.children, lending.place_on_loans),
)
"""Applied after those, in this order, and again as long as `reclaim_for_refused` frees capacity or groups change."""

RULES_FOR_RECORDS: Sequence[Rule] = (
    (lambda state, out: state.queue.new_owners, lending.watch_new_owners),
    (
        lambda state, out: (
            state.closing_sessions
            or state.ended_sessions
            or any(attempt_id in state.sessions_of for attempt_id in out.ended_attempts)
        ),
        sessions.end_finished_sessions,
    ),
    (lambda state, out: state.finished_jobs or state.job_tombstones, forget_finished),
    (lambda state, out: state.actor_tombstones, lambda state, out: registry.forget_tombstones(state)),
)
"""Applied last: nothing they do frees capacity."""


def _apply(rules: Sequence[Rule], state: State, out: EffectBuffer) -> None:
    for has_work, rule in rules:
        if has_work(state, out):
            rule(state, out)


def _free_and_place(state: State, out: EffectBuffer) -> None:
    _apply(RULES_FOR_CAPACITY, state, out)
    # Idle units are free at once and worth another round; units in use free nothing before their notice ends. The
    # rounds are finite: a reservation that has released a unit does not grow again within the step (`grow_not_before`).
    has_freed = bool(state.reservations and state.queue.refused) and reclaim_for_refused(state, out)
    if has_freed or out.group_changes:
        _free_and_place(state, out)


def step(state: State, event: Event, now: float) -> list[Effect]:
    """Handle one event; ``state`` is changed in place.

    Args:
        now: seconds since the epoch. A time before the latest one the scheduler has seen counts as that one.

    Returns:
        Effects to carry out, in this order, after the state has been saved.
    """
    # The wall clock may be set back, also between two controllers (`now` is stored): no lease may become longer by
    # that.
    state.meta.now = max(state.meta.now, now)
    out = EffectBuffer(state)
    HANDLERS[type(event)](state, event, out)
    _apply(RULES_FOR_ATTEMPTS, state, out)
    _free_and_place(state, out)
    _apply(RULES_FOR_RECORDS, state, out)
    # The reason why a job waits needs a look at all machines, too much for each launch: `JobInfoChanged` brings it.
    return out.effects(partial(job_info, state, explained=False), partial(reservation_info, state))
