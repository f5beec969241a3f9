"""Machines that are suspected: what speaks against one, when nothing new is placed there, and how it comes back.

The law. Some ends of attempts speak against the machine they were on (`SIGNS`): points, until a job has done well
there. Points of jobs that are alike (of one user and namespace, with names that differ only in digits, or in what Fray
made up) count once, and not at all once jobs like them have ended so on another machine: they are bad themselves.
Unless one has done well elsewhere: that proves them good, and each counts. `ENOUGH` points of at least two jobs put the
machine into quarantine, unless `Rules.quarantine_share` of the fleet is there already. What runs there stays. From time
to time the machine is asked to probe itself; when it finds nothing wrong it is back in service, and so it is when an
operator says so.
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
    """After every handler: when the fleet has become smaller, those that came first are let back."""
    if not state.quarantined:
        return
    for node in quarantined_nodes(state)[: max(0, len(quarantined_nodes(state)) - quarantine_limit(state))]:
        lift_quarantine(state, node)
        out.log_event("", "quarantine lifted", f"{node.name}: too many of the machines that are left would be there")


# Coming back ----------------------------------------------------------------------------------------------------------


def on_timer_probe(state: State, out: EffectBuffer, name: str) -> None:
    """It is time to probe, or too late for an answer."""
    node = state.nodes.get(name)
    if node is None or node.quarantine is None:
        return
    if node.quarantine.probe_sent_at is not None:
        _unwell(state, out, node, f"it did not answer within {state.config.probe_limit_s:g} s")
    elif node.phase is NodePhase.ALIVE:
        node.quarantine = evolve(node.quarantine, probe_sent_at=state.now, probe_at=None)
        state.node_changed(node)
        out.request_probe(node)
    else:
        node.quarantine = evolve(node.quarantine, probe_at=None)  # when it is back
        state.node_changed(node)


def on_node_probed(state: State, event: NodeProbed, out: EffectBuffer) -> None:
    """What it has found."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return
    if node.quarantine is None or node.quarantine.probe_sent_at is None:
        return  # somebody has let it back meanwhile, or it is asked anew
    if event.problem:
        _unwell(state, out, node, event.problem[:TEXT_LIMIT_CHARS])
    else:
        lift_quarantine(state, node)
        node.probe_passed_at = state.now
        out.log_event("", "node back in service", f"{node.name}: its probe found nothing wrong")


def _unwell(state: State, out: EffectBuffer, node: Node, trouble: str) -> None:
    assert node.quarantine is not None
    probes = node.quarantine.failed_probes + 1
    next_s = probe_wait_s(node, probes)
    node.quarantine = evolve(
        node.quarantine, failed_probes=probes, probe_message=trouble, probe_sent_at=None, probe_at=state.now + next_s
    )
    state.node_changed(node)
    out.log_event("", "probe failed", f"{node.name}: {trouble}; the next one in {next_s:g} s")


def lift_quarantine(state: State, node: Node) -> None:
    """It is in service again, and nothing is held against it."""
    node.quarantine = None
    state.set_faults(node, ())
    state.node_changed(node)


def probe_on_join(state: State, node: Node) -> None:
    """A machine in quarantine has joined (again): what could not be asked meanwhile is asked now."""
    if node.quarantine is not None and node.quarantine.probe_at is None:
        node.quarantine = evolve(node.quarantine, probe_at=state.now, probe_sent_at=None)
        state.node_changed(node)


def on_controller_start(state: State) -> None:
    """Whoever was asked has nobody to answer any more."""
    for name in list(state.quarantined):
        node = state.nodes[name]
        if node.quarantine is not None and node.quarantine.probe_sent_at is not None:
            node.quarantine = evolve(node.quarantine, probe_sent_at=None)
            state.node_changed(node)


def carry_over(old: Node, new: Node) -> None:
    """What is held against a machine outlives its process; a probe shows whether that was all it needed."""
    new.faults, new.relapses, new.probe_passed_at = old.faults, old.relapses, old.probe_passed_at
    if old.quarantine is not None:
        new.quarantine = evolve(old.quarantine, probe_sent_at=None, probe_at=None)
