"""Quarantine of suspected nodes: no new jobs until a probe of the node finds no problem.

Invariants: Some ends of attempts are faults of the machine they ran on (`jobs.node_faults`): they count points, until a
job has done well there. Points of jobs that are alike (of one user and namespace, with names that differ only in
digits, or in generated parts) count once, and not at all once such jobs have ended so on another machine: then the jobs
are bad. Unless such a job has done well elsewhere: that proves the jobs good, and each fault counts.
`QUARANTINE_POINTS` points of at least two jobs put the machine into quarantine, unless
`SchedulerConfig.quarantine_share` of the fleet is there already. Jobs that run there stay. From time to time the
machine is asked to probe itself; when it finds no problem, or an operator says so, it is back in service.
"""

from __future__ import annotations

from attrs import evolve

from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import NodeProbed
from fray.scheduler.jobs.node_faults import TEXT_LIMIT_CHARS, probe_wait_s, quarantine_limit, quarantined_nodes
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.state.rows import Node
from fray.scheduler.state.state import State


def enforce_quarantine_limit(state: State, out: EffectBuffer) -> None:
    """Return the oldest nodes to service, after every handler, if the fleet has become too small for so many."""
    if not state.quarantined:
        return
    # The limit always holds: a fleet that shrinks must not end up with most of its machines in quarantine.
    for node in quarantined_nodes(state)[: max(0, len(quarantined_nodes(state)) - quarantine_limit(state))]:
        lift_quarantine(state, node)
        out.log_event("", "quarantine lifted", f"{node.name}: the limit of machines in quarantine has become smaller")


# Coming back ----------------------------------------------------------------------------------------------------------


def on_timer_probe(state: State, out: EffectBuffer, name: str) -> None:
    """Send a probe that is due, or give up on one that was not answered."""
    node = state.nodes.get(name)
    if node is None or node.quarantine is None:
        return
    # One timer for both: when a probe is due, and when it should have been answered.
    if node.quarantine.probe_sent_at is not None:
        _record_failed_probe(state, out, node, f"it did not answer within {state.config.probe_limit_s:g} s")
    elif node.phase is NodePhase.ALIVE:
        # Marked as sent before it is: a crash in between is repaired by `on_controller_start`.
        node.quarantine = evolve(node.quarantine, probe_sent_at=state.now, probe_at=None)
        state.node_changed(node)
        out.request_probe(node)
    else:
        node.quarantine = evolve(node.quarantine, probe_at=None)  # due when it is back
        state.node_changed(node)


def on_node_probed(state: State, event: NodeProbed, out: EffectBuffer) -> None:
    """Apply the result of a probe."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return
    if node.quarantine is None or node.quarantine.probe_sent_at is None:
        return  # back in service meanwhile, or probed again
    if event.problem:
        _record_failed_probe(state, out, node, event.problem[:TEXT_LIMIT_CHARS])
    else:
        lift_quarantine(state, node)
        node.probe_passed_at = state.now
        out.log_event("", "node back in service", f"{node.name}: its probe found no problem")


def _record_failed_probe(state: State, out: EffectBuffer, node: Node, problem: str) -> None:
    assert node.quarantine is not None
    probes = node.quarantine.failed_probes + 1
    # Doubled: a broken machine is not tried every minute for days.
    next_s = probe_wait_s(node, probes)
    node.quarantine = evolve(
        node.quarantine, failed_probes=probes, probe_message=problem, probe_sent_at=None, probe_at=state.now + next_s
    )
    state.node_changed(node)
    out.log_event("", "probe failed", f"{node.name}: {problem}; next probe in {next_s:g} s")


def lift_quarantine(state: State, node: Node) -> None:
    """Return a node to service, and forget its faults."""
    # With its old faults it would be back in quarantine after the first new one.
    node.quarantine = None
    state.set_faults(node, ())
    state.node_changed(node)


def probe_on_join(state: State, node: Node) -> None:
    """Probe a node in quarantine that has joined (again), if a probe was due meanwhile."""
    # A restart may have been the repair.
    if node.quarantine is not None and node.quarantine.probe_at is None:
        node.quarantine = evolve(node.quarantine, probe_at=state.now, probe_sent_at=None)
        state.node_changed(node)


def on_controller_start(state: State) -> None:
    """Forget probes that were sent: their answers went to the old controller."""
    for name in list(state.quarantined):
        node = state.nodes[name]
        if node.quarantine is not None and node.quarantine.probe_sent_at is not None:
            node.quarantine = evolve(node.quarantine, probe_sent_at=None)
            state.node_changed(node)


def carry_over(old: Node, new: Node) -> None:
    """Copy faults and quarantine to the new incarnation; a probe shows whether a restart was all it needed."""
    new.faults, new.relapses, new.probe_passed_at = old.faults, old.relapses, old.probe_passed_at
    if old.quarantine is not None:
        new.quarantine = evolve(old.quarantine, probe_sent_at=None, probe_at=None)
