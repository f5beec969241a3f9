"""What is due by the clock (`fray.scheduler.timers`), and who sees to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.explain.explain import reason
from fray.scheduler.jobs.transitions import fail_unschedulable
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.nodes import drain, quarantine
from fray.scheduler.preemption import preemption
from fray.scheduler.reservations import reservations
from fray.scheduler.state.reservations import RESERVATION
from fray.scheduler.state.state import State


def on_timer_wait(state: State, out: EffectBuffer, job_id: str) -> None:
    """It has waited as long as it may."""
    job = state.jobs.get(job_id)
    if job is None or not (job.phase is JobPhase.QUEUED or job.is_gathered):
        return
    fail_unschedulable(
        state, out, job, f"it waited {job.spec.wait_limit_s:g} s for machines, its limit: {reason(state, job)}"
    )


TIMER_HANDLERS: Mapping[str, Callable[[State, EffectBuffer, str], None]] = {
    "drain": drain.on_timer_drain,
    "probe": quarantine.on_timer_probe,
    RESERVATION: reservations.on_timer_reservation,
    "seek": preemption.retry_preemption,
    "wait": on_timer_wait,
}
"""By what is due: told of which row."""


def on_timers_due(state: State, out: EffectBuffer) -> None:
    """Everything whose time has come, in the order of their times."""
    for what, key in state.timers.take_due(state.now):
        TIMER_HANDLERS[what](state, out, key)
