"""Machines coming, falling silent, coming back, and being given up.

Silence is not death: what a silent machine holds is placed again only after its lease, or after proof. A node that
ends and starts again has another incarnation, and that is proof for all that the old one held.
"""

from __future__ import annotations

from fray.model.ids import AttemptId
from fray.model.messages.node import NodeHello, ObservedState
from fray.model.specs import ObservedAttempt, Phase
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import AttemptAnnotated, NodeDied, NodeJoined, NodeReported, NodeSilent
from fray.scheduler.jobs.registry import refresh_actors_on_node
from fray.scheduler.jobs.transitions import (
    mark_attempt_lost,
    observe_attempt,
    reconcile_missing_attempt,
    retry_or_commit,
)
from fray.scheduler.lifecycle import NODE_TABLE, NodeEvent, NodePhase, next_phase
from fray.scheduler.nodes import quarantine
from fray.scheduler.reservations import reservations
from fray.scheduler.state.rows import AttemptRow, Node
from fray.scheduler.state.state import State, node_deadline

ANNOTATION_LIMIT_CHARS = 1000
"""Of one line that a node asks for."""


def on_node_joined(state: State, event: NodeJoined, out: EffectBuffer) -> None:
    """First, again, or as a new incarnation."""
    hello = event.hello
    node = state.nodes.get(hello.node)
    if node is not None and node.incarnation == hello.incarnation:
        _rejoined(state, out, node)
        return
    fresh = _new(hello)
    if node is not None:
        _give_up(state, out, node, f"the node {node.name} was started anew", last_seen_at(state, node))
        fresh.cordon = node.cordon if node.cordon is not None and not node.cordon.is_node_leaving else None
        quarantine.carry_over(node, fresh)
    state.put_node(fresh)
    quarantine.probe_on_join(state, fresh)
    out.log_event("", "node joined", f"{hello.node} ({hello.incarnation})")


def _new(hello: NodeHello) -> Node:
    return Node(
        name=hello.node,
        incarnation=hello.incarnation,
        boot_id=hello.boot_id,
        capacity=hello.capacity,
        host=hello.host,
        process=hello.process,
        has_reported=not hello.known_payloads,
        log_archive=hello.log_archive,
        busy=hello.busy,
    )


def _rejoined(state: State, out: EffectBuffer, node: Node) -> None:
    """It holds what it held; nothing new before it has told us what that is."""
    was_hidden = node.phase in (NodePhase.SUSPECT, NodePhase.LOST)
    node.phase = next_phase(NODE_TABLE, node.phase, NodeEvent.JOINED)
    node.has_reported = False
    state.node_changed(node)
    quarantine.probe_on_join(state, node)
    if was_hidden:
        _tell_all(state, out, node)
    out.log_event("", "node rejoined", node.name)


def last_seen_at(state: State, node: Node) -> float:
    """When it was last there."""
    return state.now if node.phase is NodePhase.ALIVE else node.silent_since


def _tell_all(state: State, out: EffectBuffer, node: Node) -> None:
    """Its jobs and actors show whether it is suspect."""
    refresh_actors_on_node(state, out, node.name)
    for attempt_id in state.on_node[node.name]:
        out.job_changed(state.attempts[attempt_id].job_id)


# Reports --------------------------------------------------------------------------------------------------------------


def on_node_reported(state: State, event: NodeReported, out: EffectBuffer) -> None:
    """What the node holds, or what changed of it. Reports of another incarnation say nothing."""
    node = state.nodes.get(event.node)
    report = event.report
    if node is None or node.incarnation != event.incarnation:
        _unused_values(report, out)
        return
    is_latest = not report.serial or report.serial > node.serial
    node.serial = max(node.serial, report.serial)
    if is_latest and node.busy != report.busy:
        _withhold(state, out, node, report.busy)
    for observed in report.observed:
        _observed(state, out, node, observed)
    if is_latest:
        _reconcile_report(state, out, node, report)
    _unused_values(report, out)


def _withhold(state: State, out: EffectBuffer, node: Node, busy: dict[str, str]) -> None:
    """Before the ends in the same report: what they give back may be among it."""
    news = [f"{device} ({why})" for device, why in busy.items() if device not in node.busy]
    freed = [device for device in node.busy if device not in busy]
    node.busy = busy
    state.node_changed(node)
    if news:
        out.log_event("", "devices busy", f"{node.name}: {', '.join(news)}")
    if freed:
        out.log_event("", "devices free", f"{node.name}: {', '.join(freed)}")


def _observed(state: State, out: EffectBuffer, node: Node, observed: ObservedAttempt) -> None:
    attempt = state.attempts.get(observed.attempt_id)
    if attempt is not None and attempt.living and attempt.node == node.name:
        observe_attempt(state, out, attempt, observed)


def on_attempt_annotated(state: State, event: AttemptAnnotated, out: EffectBuffer) -> None:
    """For the story; of an attempt that is not its any more a node has nothing to say."""
    attempt = state.attempts.get(event.attempt_id)
    if attempt is None or not attempt.living or (attempt.node, attempt.incarnation) != (event.node, event.incarnation):
        return
    text = f"{event.attempt_id} on {event.node}" + (f": {event.text}" if event.text else "")
    out.log_event(attempt.job_id, event.kind, text[:ANNOTATION_LIMIT_CHARS])


def _unused_values(report: ObservedState, out: EffectBuffer) -> None:
    """A late report's values are nobody's."""
    for observed in report.observed:
        if observed.outcome is not None:
            out.delete_if_unused(observed.outcome.value)


def _reconcile_report(state: State, out: EffectBuffer, node: Node, report: ObservedState) -> None:
    """What it holds, against what is wanted of it."""
    seen = {observed.attempt_id: observed.phase for observed in report.observed}
    missing = list(report.removed)
    if report.full:
        missing = [attempt_id for attempt_id in state.on_node[node.name] if attempt_id not in seen]
        node.has_reported = True
    for attempt_id in missing:
        attempt = state.attempts.get(attempt_id)
        if attempt is not None and attempt.living and attempt.node == node.name:
            reconcile_missing_attempt(state, out, attempt)
    node.stray_attempts = _unwanted_attempts(state, node, report, seen)
    state.node_changed(node)


def _unwanted_attempts(
    state: State, node: Node, report: ObservedState, seen: dict[AttemptId, Phase]
) -> tuple[AttemptId, ...]:
    """Living attempts it holds that are not wanted of it."""
    known = {} if report.full else dict.fromkeys(node.stray_attempts)
    for attempt_id, phase in seen.items():
        known.pop(attempt_id, None)
        if phase is not Phase.ENDED and attempt_id not in state.on_node[node.name]:
            known[attempt_id] = None
    return tuple(attempt_id for attempt_id in known if attempt_id not in report.removed)


# Silence and death ----------------------------------------------------------------------------------------------------


def on_node_silent(state: State, event: NodeSilent, out: EffectBuffer) -> None:
    """Its connection is gone: the suspect timer starts."""
    node = state.nodes.get(event.node)
    if node is not None and node.incarnation == event.incarnation and node.phase is NodePhase.ALIVE:
        _fall_silent(state, node, NodeEvent.LOST_CONNECTION, event.silent_s)
        out.log_event("", "node silent", node.name)


def _fall_silent(state: State, node: Node, turn: NodeEvent, silent_s: float = 0.0) -> None:
    node.phase = next_phase(NODE_TABLE, node.phase, turn)
    node.silent_since = state.now - max(0.0, min(silent_s, state.config.suspect_s))
    state.node_changed(node)


def on_node_died(state: State, event: NodeDied, out: EffectBuffer) -> None:
    """Proof of death: nothing of this incarnation lives."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return
    _give_up(state, out, node, f"the node {node.name} is gone: {event.reason}", last_seen_at(state, node))
    if _remembered(state, node):
        node.phase, node.silent_since = next_phase(NODE_TABLE, node.phase, NodeEvent.DIED), state.now
        state.node_changed(node)
    else:
        state.drop_node(node)
    out.log_event("", "node died", f"{node.name}: {event.reason}")


def _remembered(state: State, node: Node) -> bool:
    """What is said of it shall still hold when it is back. A machine of a provider never is: its name is used once."""
    if node.capacity.attributes.get("machine") in state.fleet.units:
        return False
    return node.quarantine is not None or (node.cordon is not None and not node.cordon.is_node_leaving)


def _give_up(state: State, out: EffectBuffer, node: Node, message: str, since: float) -> None:
    ran = reservations.jobs_inside_on_node(state, node.name)
    for attempt in _held(state, node):
        if attempt.living:
            mark_attempt_lost(state, out, attempt, message, since)
    reservations.drop_node_units(state, out, node.name, message, ran)


def _held(state: State, node: Node) -> list[AttemptRow]:
    return [state.attempts[attempt_id] for attempt_id in state.on_node[node.name]]


def on_controller_start(state: State, out: EffectBuffer) -> None:
    """Every connection is gone with the old controller; silence is counted from now."""
    quarantine.on_controller_start(state)
    for node in state.nodes.values():
        was_hidden = node.phase is NodePhase.SUSPECT
        if node.phase is not NodePhase.LOST:
            _fall_silent(state, node, NodeEvent.CONTROLLER_STARTED)
        if was_hidden:
            _tell_all(state, out, node)


def on_tick(state: State, out: EffectBuffer) -> None:
    """Turns of silent nodes that are due."""
    for name in sorted(state.not_alive):
        node = state.nodes[name]
        while node.name in state.nodes and node_deadline(node, state.config) <= state.now:
            _due(state, out, node)


def _due(state: State, out: EffectBuffer, node: Node) -> None:
    if node.phase is NodePhase.LOST:
        state.drop_node(node)
        return
    node.phase = next_phase(NODE_TABLE, node.phase, NodeEvent.TIMED_OUT)
    state.node_changed(node)
    out.log_event("", f"node {node.phase.value}", f"{node.name} has been silent since {node.silent_since:.0f}")
    if node.phase is NodePhase.LOST:
        lease = f"the node {node.name} has been silent for {state.config.lease_s:.0f} s"
        _give_up(state, out, node, lease, node.silent_since)
        return
    for attempt in _held(state, node):
        if _may_overlap(state, attempt):
            text = f"the node {node.name} has been silent for {state.config.suspect_s:.0f} s, and it may overlap"
            mark_attempt_lost(state, out, attempt, text, node.silent_since)
    _tell_all(state, out, node)
    for attempt in _held(state, node):
        retry_or_commit(state, out, state.jobs[attempt.job_id])


def _may_overlap(state: State, attempt: AttemptRow) -> bool:
    """Its author would rather have two for a while than none."""
    config = state.jobs[attempt.job_id].spec.actor
    return config is not None and config.may_overlap
