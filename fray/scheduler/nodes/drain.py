"""Machines taken out of service by somebody's word: nothing new comes (cordoned), and what is there goes (drained).

The law. A cordon closes a machine until somebody lifts it; it outlives restarts of the controller and of the machine.
Draining also ends what runs there: whole jobs, wherever else their members are, as preempted, with their ladder, to
begin elsewhere as their budgets allow. Jobs that may end by themselves can be given time for that; actors never do end,
so they go at once. All hosts of a TPU slice are one unit. A machine that leaves says so itself, and is drained until
its process ends.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

from attrs import evolve

from fray.errors import FrayError, InvalidRequest
from fray.model.ids import NodeName
from fray.model.messages.maintenance import NodesMarked
from fray.model.specs import EntryKind
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import CordonRequested, NodeLeaving, UncordonRequested
from fray.scheduler.jobs.queries import session_text
from fray.scheduler.jobs.transitions import preempt_job
from fray.scheduler.nodes.quarantine import lift_quarantine
from fray.scheduler.nodes.view import node_info, service_state
from fray.scheduler.reservations import reservations
from fray.scheduler.state.rows import Cordon, JobRow, Node
from fray.scheduler.state.state import State

NAMES_SHOWN = 10
"""Machines that a sentence lists."""


# Asking ---------------------------------------------------------------------------------------------------------------


def on_cordon_requested(state: State, event: CordonRequested, out: EffectBuffer) -> None:
    """Close machines, and empty them if that is asked for; all of the request or nothing."""
    try:
        nodes, told = _units(state, event.nodes)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
        return
    by, until = session_text(state, event.session), state.now + event.finish_s if event.finish_s else None
    for node in nodes:
        if node.cordon is not None and node.cordon.drain and not event.drain:
            told.append(f"{node.name} is {service_state(node)} already")
        else:
            reason = event.reason or (node.cordon.reason if node.cordon is not None else "")
            _mark(state, out, node, Cordon(since=state.now, by=by, reason=reason, drain=event.drain, until=until))
    if event.drain:
        _evict(state, out, nodes, is_endless if until is not None else _any)
        for node in nodes:
            _drained(state, out, node)
    _answer(state, out, event, nodes, told)


def on_uncordon_requested(state: State, event: UncordonRequested, out: EffectBuffer) -> None:
    """Open machines again. What a drain has asked to end ends all the same."""
    try:
        nodes, told = _units(state, event.nodes)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
        return
    for node in nodes:
        if node.quarantine is not None:
            lift_quarantine(state, node)
            out.log_event("", "quarantine lifted", f"{node.name} by {session_text(state, event.session)}")
        elif node.cordon is None:
            told.append(f"{node.name} is in service already")
        if node.cordon is None:
            continue
        if node.cordon.is_node_leaving:
            told.append(f"{node.name} is leaving by itself: that ends with its process")
        else:
            node.cordon = None
            state.node_changed(node)
            out.log_event("", "node uncordoned", f"{node.name} by {session_text(state, event.session)}")
    _answer(state, out, event, nodes, told)


def on_node_leaving(state: State, event: NodeLeaving, out: EffectBuffer) -> None:
    """It has been asked to end, and says what time it gives to what it runs."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return
    until = state.now + event.finish_s if event.finish_s else None
    if node.cordon is None:
        said = Cordon(
            since=state.now, by=f"the node {node.name}", reason=event.reason, drain=True, is_node_leaving=True
        )
        _mark(state, out, node, evolve(said, until=until))
    else:  # what others have said stands, and outlives this process
        node.cordon = evolve(node.cordon, drain=True, until=until)
        state.node_changed(node)
    _evict(state, out, [node], is_endless if event.finish_s else _any)
    _drained(state, out, node)


def _answer(
    state: State,
    out: EffectBuffer,
    event: CordonRequested | UncordonRequested,
    nodes: Iterable[Node],
    told: Iterable[str],
) -> None:
    infos = tuple(node_info(state, node) for node in nodes)
    out.reply(event.session, event.ref, NodesMarked(nodes=infos, notes=tuple(told)), late=True)


def _units(state: State, names: Iterable[NodeName]) -> tuple[list[Node], list[str]]:
    """The machines that are meant, whole slices, in order; and what to say of those that nobody has named.

    Raises:
        InvalidRequest: there is no such machine.
    """
    found: dict[NodeName, Node] = {}
    told: list[str] = []
    for name in names:
        if name not in state.nodes:
            raise InvalidRequest(_unknown(state, name))
        unit = hosts_of_slice(state, state.nodes[name])
        others = [node.name for node in unit if node.name != name]
        if others and name not in found:
            slice_name = state.nodes[name].capacity.attributes["slice"]
            told.append(f"{name} is a host of the slice {slice_name}, which is one unit: {_some(others)} as well")
        found |= {node.name: node for node in unit}
    if not found:
        raise InvalidRequest("say which machines: `fray nodes` lists them")
    return list(found.values()), told


def hosts_of_slice(state: State, node: Node) -> list[Node]:
    """It, and the other hosts of its TPU slice, in the order of their names."""
    of = node.capacity.attributes.get("slice")
    if not of:
        return [node]
    return [state.nodes[name] for name in sorted(state.nodes) if _slice(state.nodes[name]) == of]


def _slice(node: Node) -> str | None:
    return node.capacity.attributes.get("slice")


def _unknown(state: State, name: str) -> str:
    near = difflib.get_close_matches(name, state.nodes, n=3)
    known = f"do you mean {' or '.join(near)}?" if near else f"there are: {_some(sorted(state.nodes)) or 'none'}"
    return f"no machine is called {name!r}; {known}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


# Doing ----------------------------------------------------------------------------------------------------------------


def _mark(state: State, out: EffectBuffer, node: Node, mark: Cordon) -> None:
    node.cordon = mark
    state.node_changed(node)
    said = f": {mark.reason}" if mark.reason else ""
    out.log_event("", f"node {service_state(node)}", f"{node.name} by {mark.by}{said}")


def is_endless(job: JobRow) -> bool:
    """Whether it goes on until somebody ends it: an actor."""
    return job.spec.entry is EntryKind.ACTOR


def _any(job: JobRow) -> bool:
    return True


def _evict(state: State, out: EffectBuffer, nodes: Iterable[Node], meant: Callable[[JobRow], bool]) -> None:
    """End whole jobs with members there, in the order in which they came to these machines."""
    for node in nodes:
        reservations.release_cordoned_units(state, out, node.name, _why(node))
        for job in list(_jobs_on(state, node)):
            if meant(job):
                preempt_job(state, out, job, _why(node))


def _why(node: Node) -> str:
    assert node.cordon is not None
    if node.cordon.is_node_leaving:
        return f"its machine {node.name} leaves the cluster: {node.cordon.reason}"
    said = f" ({node.cordon.reason})" if node.cordon.reason else ""
    return f"its machine {node.name} is drained by {node.cordon.by}{said}"


def _jobs_on(state: State, node: Node) -> Iterator[JobRow]:
    ids = dict.fromkeys(state.attempts[attempt_id].job_id for attempt_id in state.on_node[node.name])
    return (state.jobs[job_id] for job_id in ids)


def on_timer_drain(state: State, out: EffectBuffer, name: NodeName) -> None:
    """The time is over that those had which may end by themselves."""
    node = state.nodes.get(name)
    if node is None or node.cordon is None or node.cordon.until is None:
        return
    node.cordon = evolve(node.cordon, until=None)
    state.node_changed(node)
    _evict(state, out, [node], _any)


def finish_drains(state: State, out: EffectBuffer) -> None:
    """After every handler: of draining machines, those on which nothing is left."""
    while state.newly_empty:
        name, _ = state.newly_empty.popitem()
        if name in state.nodes:
            _drained(state, out, state.nodes[name])


def _drained(state: State, out: EffectBuffer, node: Node) -> None:
    cordon = node.cordon
    if cordon is None or not cordon.drain or cordon.drained_at is not None or state.on_node[node.name]:
        return
    node.cordon = evolve(cordon, until=None, drained_at=state.now)
    state.node_changed(node)
    out.log_event("", "node drained", f"{node.name}: nothing is left there")
