"""Nodes that join, report, fall silent, come back, and are given up.

Silence is not death: what a silent node holds is placed again only after its lease, or after proof. A node that ends
and starts again has another incarnation, which is proof for everything the old one held.
"""

from __future__ import annotations

from attrs import evolve

from fray.model.ids import AttemptId
from fray.model.messages.node import NodeHello, ObservedState
from fray.model.specs import ObservedAttempt, Phase
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import AttemptAnnotated, NodeDied, NodeJoined, NodeReported, NodeSilent
from fray.scheduler.history import node_record
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
from fray.scheduler.state.rows import AttemptRow, Cordon, Node
from fray.scheduler.state.state import State, node_deadline

ANNOTATION_LIMIT_CHARS = 1000
"""Limit of one event that a node reports."""


def on_node_joined(state: State, event: NodeJoined, out: EffectBuffer) -> None:
    """Add a node that joins, mark it present again, or replace its old incarnation."""
    hello = event.hello
    node = state.nodes.get(hello.node)
    # The same process after a lost connection, or with a new controller: what it holds still runs.
    if node is not None and node.incarnation == hello.incarnation:
        # Its machine may have another address than before.
        node.host = hello.host
        _rejoined(state, out, node)
        return
    fresh = _new_node(hello, state.now)
    if node is not None:
        # A `fray-node` ends its attempts when it ends, so another incarnation proves that they are gone.
        _give_up(state, out, node, f"the node {node.name} was restarted", last_seen_at(state, node))
        out.record(node_record(node, last_seen_at(state, node), "its process was replaced by a new one"))
        fresh.cordon = _cordon_after_end(state, node)
        quarantine.carry_over(node, fresh)
    state.put_node(fresh)
    quarantine.probe_on_join(state, fresh)
    out.log_event("", "node joined", f"{hello.node} ({hello.incarnation})")


def _cordon_after_end(state: State, node: Node) -> Cordon | None:
    """Return the cordon that a node has when its incarnation has ended, and with it all attempts there."""
    # A cordon belongs to the machine, not to the process: it is often set for a repair, with restarts. Only the node's
    # own announcement to leave ends with its process.
    cordon = node.operator_cordon
    if cordon is None or cordon is node.cordon:
        return cordon
    return evolve(cordon, until=None, drained_at=state.now if cordon.drain else None)


def _new_node(hello: NodeHello, now: float) -> Node:
    return Node(
        name=hello.node,
        incarnation=hello.incarnation,
        boot_id=hello.boot_id,
        capacity=hello.capacity,
        host=hello.host,
        joined_at=now,
        process=hello.process,
        # A process that has just started holds nothing, and can be given work at once. One that holds attempts of which
        # this controller does not know has to report them first, or devices would be given twice.
        has_reported=not hello.known_payloads,
        log_archive=hello.log_archive,
        busy=hello.busy,
    )


def _rejoined(state: State, out: EffectBuffer, node: Node) -> None:
    """Mark a node present again; nothing new is placed there before it has reported what it holds."""
    was_hidden = node.phase in (NodePhase.SUSPECT, NodePhase.LOST)
    node.phase = next_phase(NODE_TABLE, node.phase, NodeEvent.JOINED)
    # What ended during the silence is not known yet: its devices may be free, or held by what should have ended.
    node.has_reported = False
    state.node_changed(node)
    quarantine.probe_on_join(state, node)
    if was_hidden:
        _notify_watchers(state, out, node)
    out.log_event("", "node rejoined", node.name)


def last_seen_at(state: State, node: Node) -> float:
    """Return when the node was last present."""
    return state.now if node.phase is NodePhase.ALIVE else node.silent_since


def _notify_watchers(state: State, out: EffectBuffer, node: Node) -> None:
    """Update the records of its jobs and actors, which show whether it is suspect."""
    refresh_actors_on_node(state, out, node.name)
    for attempt_id in state.on_node[node.name]:
        out.job_changed(state.attempts[attempt_id].job_id)


# Reports --------------------------------------------------------------------------------------------------------------


def on_node_reported(state: State, event: NodeReported, out: EffectBuffer) -> None:
    """Apply a report of what the node holds, or of changes. Reports of other incarnations are ignored."""
    node = state.nodes.get(event.node)
    report = event.report
    if node is None or node.incarnation != event.incarnation:
        _delete_unused_values(report, out)
        return
    before = node.has_reported, node.stray_attempts
    # Each report is the latest: a node's connection is aborted before its next one begins.
    #
    # Before the ends in the same report, which free devices in the pool: otherwise a device that a leftover process
    # holds would be given away in between.
    if node.busy != report.busy:
        _withhold(state, out, node, report.busy)
    for observed in report.observed:
        _apply_observation(state, out, node, observed)
    _reconcile_report(state, out, node, report)
    # Most reports are of attempts alone: the row of the node would be saved again as it is.
    if (node.has_reported, node.stray_attempts) != before:
        state.node_changed(node)
    _delete_unused_values(report, out)


def _withhold(state: State, out: EffectBuffer, node: Node, busy: dict[str, str]) -> None:
    """Update devices that the node cannot allocate, before the ends in the same report, which may free them."""
    added = [f"{device} ({why})" for device, why in busy.items() if device not in node.busy]
    freed = [device for device in node.busy if device not in busy]
    node.busy = busy
    state.node_changed(node)
    if added:
        out.log_event("", "devices busy", f"{node.name}: {', '.join(added)}")
    if freed:
        out.log_event("", "devices free", f"{node.name}: {', '.join(freed)}")


def _apply_observation(state: State, out: EffectBuffer, node: Node, observed: ObservedAttempt) -> None:
    attempt = state.attempts.get(observed.attempt_id)
    if attempt is not None and attempt.living and attempt.node == node.name:
        observe_attempt(state, out, attempt, observed)


def on_attempt_annotated(state: State, event: AttemptAnnotated, out: EffectBuffer) -> None:
    """Log an event that a node reports of an attempt that is still its own."""
    attempt = state.attempts.get(event.attempt_id)
    if attempt is None or not attempt.living or (attempt.node, attempt.incarnation) != (event.node, event.incarnation):
        return
    text = f"{event.attempt_id} on {event.node}" + (f": {event.text}" if event.text else "")
    out.log_event(attempt.job_id, event.kind, text[:ANNOTATION_LIMIT_CHARS])


def _delete_unused_values(report: ObservedState, out: EffectBuffer) -> None:
    """Delete values of a late report unless a row refers to them."""
    for observed in report.observed:
        if observed.outcome is not None:
            out.delete_if_unused(observed.outcome.value)


def _reconcile_report(state: State, out: EffectBuffer, node: Node, report: ObservedState) -> None:
    """Compare what the node holds with its desired attempts."""
    seen = {observed.attempt_id: observed.phase for observed in report.observed}
    missing = list(report.removed)
    if report.full:
        # A full set says what it leaves out, too. So a lost message needs no repair: the next full set contains its
        # content.
        missing = [attempt_id for attempt_id in state.on_node[node.name] if attempt_id not in seen]
        node.has_reported = True
    for attempt_id in missing:
        attempt = state.attempts.get(attempt_id)
        if attempt is not None and attempt.living and attempt.node == node.name:
            reconcile_missing_attempt(state, out, attempt)
    # A node that was given up after its lease may return and still hold what has been started elsewhere: its devices
    # and ports are not free before that has ended.
    node.stray_attempts = _unwanted_attempts(state, node, report, seen)


def _unwanted_attempts(
    state: State, node: Node, report: ObservedState, seen: dict[AttemptId, Phase]
) -> tuple[AttemptId, ...]:
    """Return living attempts that the node holds but should not."""
    # A delta says nothing about what it does not name.
    known = {} if report.full else dict.fromkeys(node.stray_attempts)
    for attempt_id, phase in seen.items():
        known.pop(attempt_id, None)
        if phase is not Phase.ENDED and attempt_id not in state.on_node[node.name]:
            known[attempt_id] = None
    return tuple(attempt_id for attempt_id in known if attempt_id not in report.removed)


# Silence and death ----------------------------------------------------------------------------------------------------


def on_node_silent(state: State, event: NodeSilent, out: EffectBuffer) -> None:
    """Start the suspect timer of a node whose connection was lost."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return
    # Only the first loss of a connection starts the timer.
    if node.phase is NodePhase.ALIVE:
        _fall_silent(state, node, NodeEvent.LOST_CONNECTION, event.silent_s)
        out.log_event("", "node silent", node.name)
    # No proof of death, so its lease still runs; but most probably the process was killed.
    if event.has_answered and node.phase is NodePhase.SILENT:
        _on_time_limit(state, out, node)


def _fall_silent(state: State, node: Node, event: NodeEvent, silent_s: float = 0.0) -> None:
    node.phase = next_phase(NODE_TABLE, node.phase, event)
    # At most `suspect_s` back: the suspicion may be due at once, the lease never is.
    node.silent_since = state.now - max(0.0, min(silent_s, state.config.suspect_s))
    state.node_changed(node)


def on_node_died(state: State, event: NodeDied, out: EffectBuffer) -> None:
    """Give up an incarnation that is proven to be dead."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return
    _give_up(state, out, node, f"the node {node.name} is gone: {event.reason}", last_seen_at(state, node))
    out.record(node_record(node, last_seen_at(state, node), event.reason))
    # Its cordon or quarantine holds for the machine: a new process under the name would otherwise begin without it.
    node.cordon = _cordon_after_end(state, node)
    if _stays_on_record(state, node):
        node.phase, node.silent_since = next_phase(NODE_TABLE, node.phase, NodeEvent.DIED), state.now
        state.node_changed(node)
    else:
        state.drop_node(node)
    out.log_event("", "node died", f"{node.name}: {event.reason}")


def _stays_on_record(state: State, node: Node) -> bool:
    """Return whether a dead node stays on record, with its cordon or quarantine.

    A provider's machine never does: its name is used once.
    """
    if node.capacity.attributes.get("machine") in state.fleet.units:
        return False
    return node.quarantine is not None or node.cordon is not None


def _give_up(state: State, out: EffectBuffer, node: Node, message: str, since: float) -> None:
    # Asked before the attempts end: afterwards the rows do not say which jobs ran inside.
    ran = reservations.jobs_inside_on_node(state, node.name)
    for attempt in _attempts_on(state, node):
        if attempt.living:
            mark_attempt_lost(state, out, attempt, message, since)
    reservations.drop_node_units(state, out, node.name, message, ran)


def _attempts_on(state: State, node: Node) -> list[AttemptRow]:
    return [state.attempts[attempt_id] for attempt_id in state.on_node[node.name]]


def on_controller_start(state: State, out: EffectBuffer) -> None:
    """Count silence from now: every connection was lost with the old controller."""
    quarantine.on_controller_start(state)
    # In full: for how long nodes could not be heard because there was no controller proves nothing about them.
    for node in state.nodes.values():
        was_hidden = node.phase is NodePhase.SUSPECT
        if node.phase is not NodePhase.LOST:
            _fall_silent(state, node, NodeEvent.CONTROLLER_STARTED)
        if was_hidden:
            _notify_watchers(state, out, node)


def on_tick(state: State, out: EffectBuffer) -> None:
    """Apply the time limits of silent nodes."""
    # A list, and in an order that does not depend on when each fell silent: steps are the same in each run.
    for name in sorted(state.not_alive):
        node = state.nodes[name]
        # Several limits may have passed at once, after a pause of this process; each has its own consequences.
        while node.name in state.nodes and node_deadline(node, state.config) <= state.now:
            _on_time_limit(state, out, node)


def _on_time_limit(state: State, out: EffectBuffer, node: Node) -> None:
    if node.phase is NodePhase.LOST:
        out.record(node_record(node, node.silent_since, "it fell silent, and did not come back"))
        state.drop_node(node)
        return
    node.phase = next_phase(NODE_TABLE, node.phase, NodeEvent.TIMED_OUT)
    state.node_changed(node)
    out.log_event("", f"node {node.phase.value}", f"{node.name} has been silent since {node.silent_since:.0f}")
    if node.phase is NodePhase.LOST:
        lease = f"the node {node.name} has been silent for {state.config.lease_s:.0f} s"
        _give_up(state, out, node, lease, node.silent_since)
        return
    for attempt in _attempts_on(state, node):
        if _may_overlap(state, attempt):
            # Its author prefers two incarnations for a while to none, so the next one need not wait for the lease.
            silent_s = state.now - node.silent_since
            text = f"the node {node.name} has been silent for {silent_s:.0f} s, and it may overlap"
            mark_attempt_lost(state, out, attempt, text, node.silent_since)
    _notify_watchers(state, out, node)
    for attempt in _attempts_on(state, node):
        # An end without retry does not wait for a suspect machine, and until now it was not suspect.
        retry_or_commit(state, out, state.jobs[attempt.job_id])


def _may_overlap(state: State, attempt: AttemptRow) -> bool:
    """Return whether the job's author prefers two incarnations for a while to none."""
    config = state.jobs[attempt.job_id].spec.actor
    return config is not None and config.may_overlap
