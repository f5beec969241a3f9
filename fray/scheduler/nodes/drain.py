"""Cordons and drains: nodes taken out of service by an operator, or by their own shutdown.

Invariants: A cordon closes a node for new jobs until it is lifted; it outlives restarts of the controller and of the
node. A drain also ends the jobs there: whole jobs, wherever else their members are, as preempted, with their
termination steps, to restart elsewhere as their budgets allow. Jobs that may end by themselves can be given time for
that; actors never end by themselves, so they are ended at once. All hosts of a TPU slice are one unit. A node that
shuts down reports that itself, and is drained until its process ends; a cordon that an operator has set, or sets
meanwhile, is kept for the time after it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

from attrs import evolve

from fray.errors import FrayError, InvalidRequest
from fray.model.ids import NodeName
from fray.model.messages.maintenance import NodesMarked
from fray.model.specs import EntryKind
from fray.model.text import list_text
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import CordonRequested, NodeLeaving, UncordonRequested
from fray.scheduler.jobs.queries import session_text
from fray.scheduler.jobs.transitions import preempt_job
from fray.scheduler.nodes.quarantine import lift_quarantine
from fray.scheduler.nodes.view import node_info, service_state
from fray.scheduler.pool.machine import slice_of
from fray.scheduler.reservations import reservations
from fray.scheduler.state.rows import Cordon, JobRow, Node
from fray.scheduler.state.state import State

NAMES_SHOWN = 10
"""Machines that a message lists."""


# Requests -------------------------------------------------------------------------------------------------------------


def on_cordon_requested(state: State, event: CordonRequested, out: EffectBuffer) -> None:
    """Close nodes, and drain them if requested; all nodes of the request or none."""
    try:
        nodes, notes = _named_units(state, event.nodes)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
        return
    by, until = session_text(state, event.session), state.now + event.finish_s if event.finish_s else None
    for node in nodes:
        before = node.operator_cordon
        # A plain cordon does not weaken a drain that is under way: an operator who means that lifts the drain first.
        if before is not None and before.drain and not event.drain:
            notes.append(f"{node.name} is {service_state(node)} already")
            continue
        # A second request without a reason keeps the first one's: it is what waiting jobs show.
        reason = event.reason or (before.reason if before is not None else "")
        mark = Cordon(since=state.now, by=by, reason=reason, drain=event.drain, until=until)
        _set_cordon(state, out, node, mark)
        if node.cordon is not mark:
            notes.append(f"{node.name} is shutting down; the cordon holds when it returns")
    if event.drain:
        # With time to finish, only actors are ended now: they never end by themselves, and the time would be lost.
        _evict(state, out, nodes, is_endless if until is not None else _is_any)
        for node in nodes:
            # A node that was empty before is drained at once; no attempt will end there to show it.
            _finish_drain(state, out, node)
    _reply_nodes(state, out, event, nodes, notes)


def on_uncordon_requested(state: State, event: UncordonRequested, out: EffectBuffer) -> None:
    """Open nodes again. Jobs that a drain has asked to end still end."""
    try:
        nodes, notes = _named_units(state, event.nodes)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
        return
    for node in nodes:
        # An operator's word stands for a passed probe.
        if node.quarantine is not None:
            lift_quarantine(state, node)
            out.log_event("", "quarantine lifted", f"{node.name} by {session_text(state, event.session)}")
        elif node.cordon is None:
            notes.append(f"{node.name} is in service already")
        if node.cordon is None:
            continue
        if node.operator_cordon is not None:
            out.log_event("", "node uncordoned", f"{node.name} by {session_text(state, event.session)}")
        # A process that shuts down cannot be kept from it: what is placed there would be lost in seconds.
        if node.cordon.is_node_leaving:
            node.cordon = evolve(node.cordon, of_operator=None)
            notes.append(f"{node.name} is shutting down; its cordon ends with its process")
        else:
            node.cordon = None
        state.node_changed(node)
    _reply_nodes(state, out, event, nodes, notes)


def on_node_leaving(state: State, event: NodeLeaving, out: EffectBuffer) -> None:
    """Drain a node that is shutting down, with the time it gives to its jobs."""
    node = state.nodes.get(event.node)
    # The announcement of a process that has been replaced must not drain its successor.
    if node is None or node.incarnation != event.incarnation:
        return
    cordon = Cordon(
        since=state.now,
        by=f"the node {node.name}",
        reason=event.reason,
        drain=True,
        until=state.now + event.finish_s if event.finish_s else None,
        is_node_leaving=True,
        of_operator=node.operator_cordon,
    )
    _set_cordon(state, out, node, cordon)
    _evict(state, out, [node], is_endless if event.finish_s else _is_any, event.finish_s)
    _finish_drain(state, out, node)


def _reply_nodes(
    state: State,
    out: EffectBuffer,
    event: CordonRequested | UncordonRequested,
    nodes: Iterable[Node],
    notes: Iterable[str],
) -> None:
    infos = tuple(node_info(state, node) for node in nodes)
    out.reply(event.session, event.ref, NodesMarked(nodes=infos, notes=tuple(notes)), late=True)


def _named_units(state: State, names: Iterable[NodeName]) -> tuple[list[Node], list[str]]:
    """Return the named machines with all hosts of their slices, in order, and notes about those that were not named.

    Raises:
        InvalidRequest: there is no such machine.
    """
    found: dict[NodeName, Node] = {}
    notes: list[str] = []
    for name in names:
        if name not in state.nodes:
            raise InvalidRequest(_unknown_machine_text(state, name))
        # A slice is used as a whole: with one host closed the others are of no use, and would show as free.
        unit = hosts_of_slice(state, state.nodes[name])
        others = [node.name for node in unit if node.name != name]
        if others and name not in found:
            slice_name = state.nodes[name].capacity.attributes["slice"]
            rest = list_text(others, NAMES_SHOWN)
            notes.append(f"{name} is a host of the slice {slice_name}, which is one unit: {rest} as well")
        found |= {node.name: node for node in unit}
    if not found:
        raise InvalidRequest("no machines given; `fray nodes` lists them")
    return list(found.values()), notes


def hosts_of_slice(state: State, node: Node) -> list[Node]:
    """Return the node and the other hosts of its TPU slice, in the order of their names."""
    slice_id, _ = slice_of(node.capacity)
    if slice_id is None:
        return [node]
    # A walk over all nodes: operators ask for this rarely, and an index would be kept at every join.
    return [other for _, other in sorted(state.nodes.items()) if slice_of(other.capacity)[0] == slice_id]


def _unknown_machine_text(state: State, name: str) -> str:
    near = difflib.get_close_matches(name, state.nodes, n=3)
    known = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"there are: {list_text(sorted(state.nodes), NAMES_SHOWN) or 'none'}"
    )
    return f"no machine is called {name!r}; {known}"


# Eviction -------------------------------------------------------------------------------------------------------------


def _set_cordon(state: State, out: EffectBuffer, node: Node, mark: Cordon) -> None:
    """Set the cordon of an operator or of the node itself, whose own stays in force until its process has ended."""
    is_leaving = node.cordon is not None and node.cordon.is_node_leaving and not mark.is_node_leaving
    node.cordon = evolve(node.cordon, of_operator=mark) if node.cordon is not None and is_leaving else mark
    state.node_changed(node)
    what = "leaving" if mark.is_node_leaving else "draining" if mark.drain else "cordoned"
    why = f": {mark.reason}" if mark.reason else ""
    out.log_event("", f"node {what}", f"{node.name} by {mark.by}{why}")


def is_endless(job: JobRow) -> bool:
    """Return whether the job runs until it is ended: an actor."""
    return job.spec.entry is EntryKind.ACTOR


def _is_any(job: JobRow) -> bool:
    return True


def _evict(
    state: State,
    out: EffectBuffer,
    nodes: Iterable[Node],
    meant: Callable[[JobRow], bool],
    notice_limit_s: float | None = None,
) -> None:
    """End whole jobs with members there, in the order in which they came to these nodes.

    Args:
        notice_limit_s: longest notice: a node that leaves gives no more time than it has.
    """
    for node in nodes:
        reservations.release_cordoned_units(state, out, node.name, _eviction_text(node))
        for job in list(_jobs_on(state, node)):
            if meant(job):
                preempt_job(state, out, job, _eviction_text(node), notice_limit_s)


def _eviction_text(node: Node) -> str:
    assert node.cordon is not None
    if node.cordon.is_node_leaving:
        return f"its machine {node.name} is leaving the cluster: {node.cordon.reason}"
    why = f" ({node.cordon.reason})" if node.cordon.reason else ""
    return f"its machine {node.name} is drained by {node.cordon.by}{why}"


def _jobs_on(state: State, node: Node) -> Iterator[JobRow]:
    # Several members of one gang may be on the node: the job is ended once.
    ids = dict.fromkeys(state.attempts[attempt_id].job_id for attempt_id in state.on_node[node.name])
    return (state.jobs[job_id] for job_id in ids)


def on_timer_drain(state: State, out: EffectBuffer, name: NodeName) -> None:
    """Evict jobs that had time to end by themselves."""
    node = state.nodes.get(name)
    if node is None or node.cordon is None or node.cordon.until is None:
        return
    node.cordon = evolve(node.cordon, until=None)
    state.node_changed(node)
    # The time is used up: now jobs that could have ended by themselves, too.
    _evict(state, out, [node], _is_any, 0.0 if node.cordon.is_node_leaving else None)


def finish_drains(state: State, out: EffectBuffer) -> None:
    """Mark, after every handler, draining nodes on which nothing is left as drained."""
    # Filled by the ends of attempts, so that no step looks at all draining nodes.
    while state.newly_empty:
        name, _ = state.newly_empty.popitem()
        if name in state.nodes:
            _finish_drain(state, out, state.nodes[name])


def _finish_drain(state: State, out: EffectBuffer, node: Node) -> None:
    cordon = node.cordon
    if cordon is None or not cordon.drain or cordon.drained_at is not None or state.on_node[node.name]:
        return
    # `until` goes with it, or its timer would fire for an empty node.
    node.cordon = evolve(cordon, until=None, drained_at=state.now)
    state.node_changed(node)
    out.log_event("", "node drained", f"{node.name}: empty")
