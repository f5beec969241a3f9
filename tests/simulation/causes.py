"""Chain of causes of a wait that does not end: from the act of a driver to the job, the attempt, its node, its process.

Each link compares what the controller believes with the ground truth, so that the last line names the part that should
have moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fray.model.ids import JobId
from fray.scheduler.explain.diagnosis import job_reasons
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.reasons import reasons_text
from fray.scheduler.state.rows import AttemptRow, JobRow
from fray.scheduler.state.state import State
from fray.testing.sim_cluster import DriverProcess

if TYPE_CHECKING:
    from tests.simulation.scenario import Scenario

LINES_LIMIT = 12
DEPTH_LIMIT = 4


def causes_of_act(scenario: Scenario, token: str) -> tuple[str, ...]:
    """Return why an act has not ended, by the jobs and calls that have its token."""

    def is_of_act(name: str) -> bool:
        return name == token or name.startswith((f"{token}.", f"{token}+"))

    return _chain(scenario, lambda state: [job for job in state.jobs.values() if is_of_act(job.spec.name)], is_of_act)


def causes_of_driver(scenario: Scenario, driver: DriverProcess) -> tuple[str, ...]:
    """Return why a driver does not end, by the jobs that it owns."""
    return _chain(scenario, lambda state: [job for job in state.jobs.values() if job.owner == driver.session])


def causes_of_job(scenario: Scenario, job_id: JobId) -> tuple[str, ...]:
    """Return why a job has not ended."""
    return _chain(scenario, lambda state: [state.jobs[job_id]])


def _chain(
    scenario: Scenario,
    jobs_of: Callable[[State], list[JobRow]],
    is_of_act: Callable[[str], bool] = lambda name: False,
) -> tuple[str, ...]:
    running = scenario.sim.controller.running
    if running is None:
        return ("no controller runs",)
    jobs = jobs_of(running.state)
    own = {attempt.attempt_id for job in jobs for attempt in running.state.living_members(job)}
    lines = [line for job in jobs if not job.ended for line in _job(scenario, running.state, job, DEPTH_LIMIT)]
    lines += [
        f"{run.incarnation} has executed {run.token} since {run.began:.1f}"
        for run in scenario.truth.open_runs.values()
        if is_of_act(run.token) and run.incarnation not in own
    ]
    if not lines:
        ended = [f"{job.job_id} ({job.outcome.cause.value})" for job in jobs if job.outcome is not None]
        over = f"{', '.join(ended[-3:])} has ended, of which the waiter has not heard" if ended else ""
        lines = [over or "no job, attempt or call of it is left in the cluster"]
    more = [f"{len(lines) - LINES_LIMIT} more"] if len(lines) > LINES_LIMIT else []
    return (*lines[:LINES_LIMIT], *more)


def _job(scenario: Scenario, state: State, job: JobRow, depth: int) -> Iterator[str]:
    if job.phase in (JobPhase.QUEUED, JobPhase.HELD):
        running = scenario.sim.controller.running
        # By the clock, and not `State.now`, which is the time of the last step: it may be the one that is missing.
        waited_s = (running.loop.current_time() if running is not None else state.now) - job.queued_at
        yield f"{job.job_id} has been {job.phase.value} for {waited_s:.1f} s: {_reason(state, job)}"
        return
    stop = f", to end as {job.stop_cause.value}" if job.stop_cause is not None else ""
    yield f"{job.job_id} is {job.phase.value}{stop}"
    for attempt in state.living_members(job):
        yield from _attempt(scenario, state, attempt)
        below = [each for each in state.jobs.values() if each.owner == attempt.attempt_id and not each.ended]
        for child in below if depth else ():
            yield from _job(scenario, state, child, depth - 1)


def _reason(state: State, job: JobRow) -> str:
    # A defect of the queue may be the cause.
    if job.phase is JobPhase.QUEUED and job.job_id not in state.queue.applicants:
        return "the queue does not have it"
    return reasons_text(job_reasons(state, job)) or "no reason is known"


def _attempt(scenario: Scenario, state: State, attempt: AttemptRow) -> Iterator[str]:
    node = state.nodes.get(attempt.node)
    stop = f", asked to end as {attempt.stop_cause.value}" if attempt.stop_cause is not None else ""
    phase = node.phase.value if node is not None else "not on record"
    yield f"{attempt.attempt_id} is {attempt.phase.value}{stop} on {attempt.node}, which is {phase}"
    machine = scenario.sim.machines.get(attempt.node)
    launcher = machine.launcher if machine is not None else None
    process = scenario.truth.living.get(attempt.attempt_id)
    if launcher is None:
        yield f"{attempt.node} is down"
    elif process is not None:
        yield f"its process lives since {process.began:.1f}"
    elif attempt.attempt_id in launcher.held:
        yield f"{attempt.node} holds it, without a process"
    else:
        yield f"{attempt.node} does not hold it"
    for run in scenario.truth.open_runs.values():
        if run.incarnation == attempt.attempt_id:
            yield f"it executes {run.token} since {run.began:.1f}"
