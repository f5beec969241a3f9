"""Checks of the promises: what Fray did against what really happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import trio

from fray.model.ids import JobId
from fray.model.monitoring.health import OnStall
from fray.model.reservations import ReservationState
from fray.model.specs import EndReason
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.nodes.view import nodes_info
from fray.scheduler.state.state import State
from fray.scheduler.views import job_info
from fray.testing.ground_truth import GroundTruth, ProcessRun
from fray.testing.invariants import check
from fray.testing.sim_cluster import CONTROLLER, EPOCH_S, DriverProcess
from tests.simulation import causes

if TYPE_CHECKING:
    from tests.simulation.scenario import Scenario

LIVING_EVERY_STEPS = 20
"""Mean distance of steps after which everything that lives is checked."""
THOROUGH_EVERY_STEPS = 60
"""Mean distance of steps after which also what has ended is checked, and each index is built again and compared: three
quarters of the cost, for violations that last."""
NEAR_S = 100.0
"""Time for which a fault may show after it has ended: heartbeats take a minute."""
FOLLOWS_S = 10.0
"""Time within which a node that can be reached ends what the controller gave up, and the controller knows of its busy
devices."""
AWAY_S = 150.0
"""Time a controller must be away before nodes may give it up."""


def invariants(truth: GroundTruth, state: State, chance: float = 0.0) -> None:
    """Check the invariants of the scheduler's state after a step.

    Args:
        chance: random number from 0 to 1, which decides whether all rows are checked, all that live, or those that the
            step has changed. Default: all rows.
    """
    if chance * LIVING_EVERY_STEPS >= 1.0:
        found = check.check_changed(state)
    else:
        found = check.check(state, thorough=chance * THOROUGH_EVERY_STEPS < 1.0)
    for sentence in found:
        truth.breach("invariant", sentence)


def saved(truth: GroundTruth, state: State, decided: check.CommittedOutcomes) -> None:
    """P4: check that saved decisions stay. (A step whose save fails has never happened.)"""
    for sentence in decided.check(state):
        truth.breach("P4", sentence)


def hanging(scenario: Scenario, drivers: Sequence[DriverProcess]) -> None:
    """P3: report operations that still wait when the scenario's time has ended, each with its chain of causes."""
    for number, act in scenario.open_acts.items():
        scenario.truth.breach("P3", f"still waits: {act}", causes.causes_of_act(scenario, f"a{number}"))
    if not scenario.open_acts:
        names = " or ".join(driver.name for driver in drivers)
        why = [line for driver in drivers for line in causes.causes_of_driver(scenario, driver)]
        scenario.truth.breach("P3", f"no act is open, and {names} does not end", why)


# P1 ------------------------------------------------------------------------------------------------------------------


def lives(scenario: Scenario, bound_s: float) -> None:
    """P1: check that no process outlives its owner (or the order to end) by more than the limit, where it can be
    reached."""
    now = trio.current_time()
    for life in list(scenario.truth.living.values()):
        for since, commander, why in _reasons_to_end(scenario, life):
            fine = scenario.fault_history.fine_since(life.machine, commander)
            if fine is not None and now - max(since, fine) > bound_s:
                scenario.truth.breach("P1", f"{life.attempt_id} lives on {life.machine}: {why} at {since:.1f}")


def _reasons_to_end(scenario: Scenario, life: ProcessRun) -> Iterable[tuple[float, str, str]]:
    """Yield since when it should be ending, which process must be reachable for that, and why."""
    doom = scenario.doomed.get(life.spec.name)
    if doom is not None and doom[0] >= life.began:
        yield doom[0], doom[1], f"{life.spec.name} was ended"
    if life.spec.stall_s is not None and life.spec.on_stall is OnStall.RESTART:
        beaten = life.began if life.progressed_at is None else life.progressed_at
        yield beaten + life.spec.stall_s, life.machine, f"{life.spec.name} stalled"
    if life.spec.time_limit_s is not None:
        yield life.began + life.spec.time_limit_s, CONTROLLER, f"the time limit of {life.spec.name} has expired"
    owner = scenario.truth.owners.get(life.job_id)
    if owner is None:
        return
    controller = scenario.sim.controller.running
    whole = controller.state.jobs.get(owner) if controller is not None and life.spec.owned_by_job else None
    if whole is not None and whole.ended_at is not None:
        yield whole.ended_at - EPOCH_S - scenario.sim.clock_ahead_s, CONTROLLER, f"its job {owner} ended"
    driver = scenario.truth.drivers.get(owner)
    if driver is not None and driver.ended is not None:
        grace_s = driver.grace_s if driver.vanished else 0.0
        yield driver.ended + grace_s, driver.machine, f"its driver {owner} ended"
    parent = scenario.truth.processes.get(owner)
    if parent is not None and parent.ended is not None:
        yield parent.ended, parent.machine, f"its parent {owner} ended"


def nodes_follow(scenario: Scenario) -> None:
    """P1 and P6: check that nodes end the attempts that were given up, which the controller may have started elsewhere,
    and that the controller withholds the devices that are busy on a node."""
    running = scenario.sim.controller.running
    if running is None:
        return
    latest = trio.current_time() - FOLLOWS_S
    for machine in scenario.sim.machines.values():
        node, fine = running.state.nodes.get(machine.name), scenario.fault_history.fine_since(machine.name)
        if node is None or node.phase is not NodePhase.ALIVE or machine.launcher is None or fine is None:
            continue
        busy = machine.launcher.busy
        if busy.keys() != node.busy.keys() and max(machine.launcher.busy_since, fine) < latest:
            text = f"the controller withholds {sorted(node.busy)} of {machine.name}, where {sorted(busy)} are busy"
            scenario.truth.breach("P6", text)
        for life in scenario.truth.on(machine.name):
            attempt = running.state.attempts.get(life.attempt_id)
            if attempt is None or attempt.ended_at is None or attempt.outcome is None:
                continue
            ended = attempt.ended_at - EPOCH_S - scenario.sim.clock_ahead_s
            if max(ended, fine) < latest:
                text = f"{life.attempt_id} lives on {machine.name} and was given up: {attempt.outcome.message}"
                scenario.truth.breach("P1", text)


# At the end ----------------------------------------------------------------------------------------------------------


def final(scenario: Scenario) -> None:
    """Check the end, when every driver has left: nothing lives, everything accepted has its outcome."""
    _nothing_lives(scenario)
    running = scenario.sim.controller.running
    if running is None:
        scenario.truth.breach("P7", "no controller serves")
        return
    _all_accepted_ended(scenario, running.state)
    _reservations_ended(scenario, running.state)
    _outcomes_stand(scenario, running.state)
    _history_is_whole(scenario, running.state)
    _nothing_is_held(scenario, running.state)
    _preemptions_had_effect(scenario, running.state)
    _the_dead_were_dead(scenario, running.state)
    _cloud_is_small(scenario, running.state)
    if running.state.policy != scenario.sim.policy:
        scenario.truth.breach("P7", "the controller has another policy than its operator has written")
    invariants(scenario.truth, running.state)
    saved(scenario.truth, running.state, scenario.decided)


def _nothing_lives(scenario: Scenario) -> None:
    for life in scenario.truth.living.values():
        scenario.truth.breach("P1", f"{life.attempt_id} lives on {life.machine} at the end")
    for run in scenario.truth.open_runs.values():
        if run.token in scenario.cancelled and scenario.truth.is_alive(run.incarnation):
            scenario.truth.breach("P1", f"{run.token} still runs in {run.incarnation} though it was cancelled")


def _all_accepted_ended(scenario: Scenario, state: State) -> None:
    """P7: check that no accepted job is lost or left open, whatever happened to the controller."""
    for job_id, token in scenario.accepted.items():
        job = state.jobs.get(job_id)
        if job is None:
            scenario.truth.breach("P7", f"{job_id} of {token} was accepted and is not on record")
    for job_id, job in state.jobs.items():
        if not job.ended:
            text = f"{job_id} has not come to an end: it is {job.phase.value}"
            scenario.truth.breach("P7", text, causes.causes_of_job(scenario, job_id))


def _cloud_is_small(scenario: Scenario, state: State) -> None:
    """Check that no machine of the cloud was created twice, is unknown, or is unused."""
    cloud = scenario.sim.cloud
    for sentence in cloud.breaches(state, calm=True) if cloud is not None else ():
        scenario.truth.breach("cloud", sentence)


def _reservations_ended(scenario: Scenario, state: State) -> None:
    """P1: check that every reservation has ended with its owner, and holds nothing."""
    for reservation in state.reservations.values():
        if reservation.phase is not ReservationState.ENDED:
            scenario.truth.breach("P1", f"reservation {reservation.id} is {reservation.phase.value} at the end")


def _outcomes_stand(scenario: Scenario, state: State) -> None:
    """P4: check that a reported outcome stays the outcome, except of what a restored backup has lost."""
    if scenario.sim.controller.restores:
        return
    for job_id, infos in scenario.seen.items():
        job = state.jobs.get(job_id)
        outcomes = {(info.state, info.cause, info.value) for info in infos}
        if job is None or job.outcome is None:
            continue
        outcomes.add((job_info(state, job_id).state, job.outcome.cause, job.outcome.value))
        if len({each[:2] for each in outcomes}) > 1 or len({each[2] for each in outcomes if each[2]}) > 1:
            scenario.truth.breach("P4", f"{job_id} has had several outcomes: {sorted(map(str, outcomes))}")


def _history_is_whole(scenario: Scenario, state: State) -> None:
    """P7: check that the history has one record of each end, whatever happened to the controller, and the right one."""
    tables = scenario.sim.controller.store.history
    records, after = tables.attempts(0, 0.0)
    while after:
        page, after = tables.attempts(after, 0.0)
        records += page
    # Ids of jobs that were forgotten may be used again; times are not.
    for (attempt_id, _), count in Counter((one.attempt_id, one.placed_at) for one in records).items():
        if count > 1:
            scenario.truth.breach("P7", f"the history has {count} records of the end of {attempt_id}")
    ends = {one.attempt_id: (one.node, one.placed_at, one.ended_at, one.cause, one.user) for one in records}
    for attempt_id, row in state.attempts.items():
        if row.living or row.outcome is None:
            continue
        user = state.jobs[row.job_id].spec.user
        end = (row.node, row.placed_at, row.ended_at, row.outcome.cause.value, user)
        if ends.get(attempt_id) != end:
            scenario.truth.breach("P7", f"{attempt_id} ended as {end}; the history has {ends.get(attempt_id)}")


def _preemptions_had_effect(scenario: Scenario, state: State) -> None:
    """Check that each job that preempted others started, unless it was ended, or machines were lost."""
    for job in state.jobs.values():
        other = state.jobs.get(job.preempted_for)
        if not job.preempted_at or other is None or other.stop_cause is not None:
            continue
        started = other.placed_at is not None and other.placed_at >= job.preempted_at[-1]
        if not started and not any(
            scenario.fault_history.was_trouble(name, 0.0, trio.current_time()) for name in state.nodes
        ):
            scenario.truth.breach("P6", f"{job.job_id} was ended for {job.preempted_for}, which never came")


def _the_dead_were_dead(scenario: Scenario, state: State) -> None:
    """P7: check that no attempt is given up unless its machine had a fault, or the controller was away for long."""
    for attempt in state.attempts.values():
        life = scenario.truth.processes.get(attempt.attempt_id)
        if life is None or attempt.outcome is None or life.how in ("with its machine", "crashed"):
            continue
        if attempt.outcome.cause in (EndReason.MACHINE_LOST, EndReason.KILLED):
            ended = life.ended if life.ended is not None else trio.current_time()
            near = life.began - NEAR_S, ended + NEAR_S
            away = scenario.fault_history.was_trouble(CONTROLLER, *near, at_least_s=AWAY_S)
            if not away and not scenario.fault_history.was_trouble(life.machine, *near):
                scenario.truth.breach("P7", f"{life.attempt_id} was given up for nothing: {attempt.outcome.message}")


def _nothing_is_held(scenario: Scenario, state: State) -> None:
    """Check that nodes have forgotten what ended, and that every share is free again."""
    for machine in scenario.sim.machines.values():
        held: list[JobId] = list(machine.launcher.held) if machine.launcher is not None else []
        if held:
            scenario.truth.breach("P1", f"the node {machine.name} still holds {held}")
    for info in nodes_info(state):
        if info.cpu_milli_free != info.cpu_milli or info.memory_bytes_free != info.memory_bytes:
            scenario.truth.breach("P6", f"shares of {info.name} are taken and nothing runs")
        if not info.alive:
            scenario.truth.breach("P3", f"the node {info.name} has not come back")
