"""Faults of machines: evidence that ends of attempts give against the machine they ran on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import evolve

from fray.model.backoff import backoff_s
from fray.model.ids import ANONYMOUS_PREFIX, stem_of
from fray.model.specs import EndReason, JobSpec, Outcome
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs.retries import PORT_RETRY_LIMIT, outcome_text, retries_spent
from fray.scheduler.lifecycle import Budget, NodePhase
from fray.scheduler.state.rows import AttemptRow, JobRow, Node, NodeFault, Quarantine
from fray.scheduler.state.state import State

QUARANTINE_POINTS = 3
"""Points that put a machine into quarantine."""
MACHINE_FAULT_POINTS = 2
"""Points of an end for which the machine itself takes the fault; other signs have 1."""
START_KILL_S = 10.0
"""A process that is killed within this time was killed at its start."""
DID_WELL_S = 60.0
"""An attempt that ran this long before it ended, however it ended, did not fail because of its machine."""
FAULT_AGE_LIMIT_S = 3600.0
"""Age after which a fault does not count any more."""
FAULTS_KEPT = 8
"""Faults on record for one machine; the oldest are dropped."""
PROBE_WAIT_S, PROBE_WAIT_MAX_S = 60.0, 3600.0
"""Wait before the first probe of a quarantine, and the longest wait: doubled with each failed probe and with each
quarantine in a row."""
RELAPSE_S = 6 * 3600.0
"""A quarantine within this time after the last one is one more in a row."""
TEXT_LIMIT_CHARS = 300


def _always(job: JobRow, attempt: AttemptRow, outcome: Outcome) -> bool:
    return True


def _at_start(job: JobRow, attempt: AttemptRow, outcome: Outcome) -> bool:
    return not attempt.ran or _lived_s(attempt, outcome) < START_KILL_S


def _ports_exhausted(job: JobRow, attempt: AttemptRow, outcome: Outcome) -> bool:
    return retries_spent(job, Budget.PORTS) >= PORT_RETRY_LIMIT


FAULT_CONDITIONS: Mapping[EndReason, Callable[[JobRow, AttemptRow, Outcome], bool]] = {
    EndReason.ENVIRONMENT: _always,
    EndReason.KILLED: _at_start,
    EndReason.PORT_TAKEN: _ports_exhausted,
}
"""Unrequested ends, and when they count as a fault of the machine."""


def fault_points(job: JobRow, attempt: AttemptRow, outcome: Outcome) -> int:
    """Return how many points this end counts against its machine."""
    # An end that Fray requested says nothing about the machine.
    if attempt.stop_cause is not None or job.stop_cause is not None:
        return 0
    if outcome.machine_fault:
        return MACHINE_FAULT_POINTS
    sign = FAULT_CONDITIONS.get(outcome.cause)
    return int(sign is not None and sign(job, attempt, outcome))


def did_well(attempt: AttemptRow, outcome: Outcome) -> bool:
    return outcome.cause is EndReason.SUCCEEDED or (attempt.ran and _lived_s(attempt, outcome) >= DID_WELL_S)


def _lived_s(attempt: AttemptRow, outcome: Outcome) -> float:
    if attempt.started_at is None or attempt.ended_at is None:
        return outcome.duration_s
    return max(outcome.duration_s, attempt.ended_at - attempt.started_at)


def job_kind(spec: JobSpec) -> str:
    """Return a key that is equal for jobs that are alike.

    Parts that were generated for one run are left out: a driver's own namespace, tokens in names.
    """
    # Generated tokens are recognized by their digits. That is a guess: a wrong one makes suspicion slower, not wrong.
    namespace = "" if spec.namespace.startswith(ANONYMOUS_PREFIX) else spec.namespace
    return f"{spec.user}/{namespace}/{stem_of(spec.name)}"


def score_attempt_end(state: State, out: EffectBuffer, attempt: AttemptRow, outcome: Outcome) -> None:
    """Update the faults of its machine, and of others, after the end of an attempt."""
    job, node = state.jobs[attempt.job_id], state.nodes.get(attempt.node)
    if node is None:
        return
    if points := fault_points(job, attempt, outcome):
        what = outcome_text(outcome)[:TEXT_LIMIT_CHARS]
        fault = NodeFault(job_id=job.job_id, kind=job_kind(job.spec), description=what, at=state.now, points=points)
        _set_faults(state, node, (*_recent_faults(state, node), fault))
        _quarantine_if_due(state, out, node)
    elif did_well(attempt, outcome) and state.nodes_by_fault:
        # The machine is cleared of everything: what is broken would not let a job do well.
        _set_faults(state, node, ())
        _mark_proven(state, out, job_kind(job.spec))


def _mark_proven(state: State, out: EffectBuffer, kind: str) -> None:
    """Count faults of jobs of this kind as proven: such jobs do well elsewhere, so the machines are to fault."""
    for name in list(state.nodes_by_fault.get(kind, ())):
        node = state.nodes[name]
        if any(fault.kind == kind and not fault.is_proven for fault in node.faults):
            proven = (evolve(fault, is_proven=True) if fault.kind == kind else fault for fault in node.faults)
            _set_faults(state, node, tuple(proven))
            _quarantine_if_due(state, out, node)


def _recent_faults(state: State, node: Node) -> tuple[NodeFault, ...]:
    return tuple(fault for fault in node.faults if state.now - fault.at < FAULT_AGE_LIMIT_S)


def _set_faults(state: State, node: Node, faults: tuple[NodeFault, ...]) -> None:
    if node.faults != faults:
        state.set_faults(node, faults[-FAULTS_KEPT:])


def fault_score(state: State, node: Node) -> int:
    """Return the points that count against a machine now."""
    counted: dict[str, int] = {}
    for fault in _recent_faults(state, node):
        # The job or the machine? If jobs that are alike fail on two machines, it is the jobs, unless one did well.
        if fault.is_proven or len(state.nodes_by_fault.get(fault.kind, ())) == 1:  # or on this machine alone
            # Unproven, all jobs that are alike count once: a sweep of broken jobs must not close the machine it ran on.
            whose = fault.job_id if fault.is_proven else f"all like {fault.kind}"
            counted[whose] = max(counted.get(whose, 0), fault.points)
    return sum(counted.values())


def _quarantine_if_due(state: State, out: EffectBuffer, node: Node) -> None:
    found = fault_score(state, node)
    jobs = dict.fromkeys(fault.job_id for fault in _recent_faults(state, node))
    # At least two jobs: one that is retried on its preferred node could otherwise close it alone.
    if node.quarantine is not None or found < QUARANTINE_POINTS or len(jobs) < 2:
        return
    why = f"{len(jobs)} jobs in a row failed there; the last: {node.faults[-1].description}"
    # With so much of the fleet closed, the jobs are more likely to be bad than the machines.
    if len(quarantined_nodes(state)) >= quarantine_limit(state):
        out.log_event("", "node suspected", f"{node.name}: {why}; the limit of machines in quarantine is reached")
        return
    node.relapses = (
        node.relapses + 1 if node.probe_passed_at > 0 and state.now - node.probe_passed_at < RELAPSE_S else 0
    )
    node.quarantine = Quarantine(
        since=state.now, reason=why, jobs=tuple(jobs), probe_at=state.now + probe_wait_s(node, 0)
    )
    state.node_changed(node)
    out.log_event("", "node in quarantine", f"{node.name}: {why}")


def quarantine_limit(state: State) -> int:
    """Return how many machines may be in quarantine at a time: a share of all, at least one; never the only one."""
    machines = len(state.nodes) - sum(state.nodes[name].phase is NodePhase.LOST for name in state.not_alive)
    share = int(machines * state.config.quarantine_share)
    return max(1, share) if machines > 1 and state.config.quarantine_share > 0 else 0


def quarantined_nodes(state: State) -> list[Node]:
    """Return the nodes in quarantine that are not lost, the longest first."""
    found = [node for name in state.quarantined if (node := state.nodes[name]).phase is not NodePhase.LOST]
    return sorted(found, key=lambda node: (node.quarantine.since if node.quarantine else 0.0, node.name))


def probe_wait_s(node: Node, probes: int) -> float:
    """Return seconds before the next probe, after so many in this quarantine."""
    return backoff_s(PROBE_WAIT_S, PROBE_WAIT_MAX_S, probes + node.relapses + 1)
