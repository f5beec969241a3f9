"""A cloud that has TPUs, as far as its API shows: what `fray.testing.tpu_server` answers from.

Law. Nothing happens but by time passing (`TpuCloud.advance`, or a clock that is given) and by what a test does to it:
capacity and quotas of zones, preemption, hosts that never come, calls that fail. Lists lag behind (`list_lag_s`),
single resources do not. Operations are accepted first and succeed or fail later, as Google's do; refusals have
Google's words.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field
from google.cloud import tpu_v2

from fray.model.topology import find_topology

NODE_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?\Z")
STARTABLE = ("ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED")
"""States in which a queued resource is deleted without force."""

States: Any = tpu_v2.Node.State
QueueStates: Any = tpu_v2.QueuedResourceState.State


class ApiRefusal(Exception):
    """What a call is refused with."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@define
class Zone:
    """What there is in one zone, in chips; None: more than anybody asks for."""

    capacity: int | None = None
    quota: int | None = None


@define
class Operation:
    """Something that was accepted and takes its time."""

    name: str
    target: str
    verb: str
    done: bool = False
    error: tuple[str, str] | None = None
    result: Any = None


@define
class FakeResource:
    """One resource, and how it looked at which time."""

    what: Any
    operation: Operation
    history: list[tuple[float, Any]] = field(factory=list)
    moves: list[tuple[float, Callable[[], None]]] = field(factory=list)
    """What will happen to it, and when."""


@define(eq=False)
class TpuCloud:
    """One project.

    Attributes:
        zones: by name; others are refused as Google does.
        create_s, delete_s, queue_s: how long a node takes to be made, to be deleted, and a queued one to be selected.
        list_lag_s: lists show how things were so long ago.
        page: entries of a page of a list, at most.
        clock: seconds that grow by themselves; None: time passes by `advance` alone.
        on_ready, on_gone: told when the hosts of a node begin and end to exist (from whatever thread noticed it).
    """

    project: str = "lab"
    zones: dict[str, Zone] = field(factory=lambda: {"us-west4-a": Zone()})
    create_s: float = 60.0
    delete_s: float = 30.0
    queue_s: float = 10.0
    list_lag_s: float = 0.0
    page: int = 100
    clock: Callable[[], float] | None = None
    on_ready: Callable[[tpu_v2.Node], None] = lambda node: None
    on_gone: Callable[[tpu_v2.Node], None] = lambda node: None
    unreachable: set[str] = field(factory=set)
    """Zones whose lists are not whole."""
    nodes: dict[str, FakeResource] = field(factory=dict)
    queued: dict[str, FakeResource] = field(factory=dict)
    operations: dict[str, Operation] = field(factory=dict)
    calls: list[str] = field(factory=list)
    """Names of all methods that were called."""
    lock: threading.RLock = field(factory=threading.RLock)
    _now: float = 0.0
    _moment: float | None = None
    """When that is due which happens now."""
    _faults: list[tuple[str, str, str]] = field(factory=list)
    _half: list[int] = field(factory=list)
    _gone: dict[str, FakeResource] = field(factory=dict)
    """What lists may still show."""

    # Time

    @property
    def now(self) -> float:
        if self._moment is not None:
            return self._moment
        return self._now if self.clock is None else self.clock()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        with self.lock:
            self._now += seconds
            self.settle()

    def settle(self) -> None:
        """Let everything happen that is due, in order, and at its time."""
        until = self.now
        while True:
            due = [
                (at, index, kept)
                for kept in [*self.nodes.values(), *self.queued.values()]
                for index, (at, _) in enumerate(kept.moves)
                if at <= until
            ]
            if not due:
                break
            self._moment, index, kept = min(due, key=lambda one: one[0])
            _, move = kept.moves.pop(index)
            move()
        self._moment = None

    # What a test does to it

    def fail_next(self, method: str, status: str, message: str, times: int = 1) -> None:
        """The next calls of this method are refused."""
        self._faults += [(method, status, message)] * times

    def half_next(self, hosts: int) -> None:
        """Of the next node that is made only so many hosts come into being."""
        self._half.append(hosts)

    def preempt(self, name: str) -> None:
        """Take it away: the node is PREEMPTED; a queued one is deleted, and its queued resource SUSPENDED."""
        with self.lock:
            path, kept = self._find(self.nodes, name)
            self.on_gone(kept.what)
            self._set_node(kept, States.PREEMPTED)
            owner = self.queued.get(kept.what.queued_resource)
            if owner is not None:
                self._set_queued(owner, QueueStates.SUSPENDING, initiator="SERVICE")
                owner.moves.append((self.now + self.delete_s, lambda: self._suspend(owner, path)))

    def become(self, name: str, state: str, remark: str = "") -> None:
        """The node gets into a state by itself: REPAIRING, TERMINATED, STOPPED, …"""
        with self.lock:
            _, kept = self._find(self.nodes, name)
            kept.what.health_description = remark
            if state in ("TERMINATED", "STOPPED", "HIDDEN", "UNKNOWN"):
                self.on_gone(kept.what)
            self._set_node(kept, States[state])

    def _find(self, resources: Mapping[str, FakeResource], name: str) -> tuple[str, FakeResource]:
        return next((path, kept) for path, kept in resources.items() if path.endswith(f"/{name}"))

    def _suspend(self, owner: FakeResource, node: str) -> None:
        self._remove(self.nodes, node)
        self._set_queued(owner, QueueStates.SUSPENDED, initiator="SERVICE")

    # Calls

    def called(self, method: str, place: str = "") -> None:
        """Count it, let what is due happen, and refuse it if it shall fail."""
        self.calls.append(method)
        self.settle()
        for fault in self._faults:
            if fault[0] == method:
                self._faults.remove(fault)
                raise ApiRefusal(fault[1], fault[2])
        if place:
            self._check_place(place)

    def _check_place(self, parent: str) -> None:
        _, project, _, zone = parent.split("/")[:4]
        if project != self.project:
            raise ApiRefusal("PERMISSION_DENIED", f"Permission denied on resource project {project}.")
        if zone not in self.zones:
            raise ApiRefusal("PERMISSION_DENIED", f"Permission denied on 'locations/{zone}' (or it may not exist).")

    def create_node(self, parent: str, node_id: str, node: tpu_v2.Node) -> Operation:
        self.called("CreateNode", parent)
        path = f"{parent}/nodes/{node_id}"
        self._check_new(node_id, path, self.nodes, node)
        operation = self._begin(path, "create")
        self._make(path, node, operation)
        return operation

    def _check_new(self, name: str, path: str, there: Mapping[str, FakeResource], node: tpu_v2.Node) -> None:
        if not NODE_ID.match(name):
            raise ApiRefusal("INVALID_ARGUMENT", f"Invalid resource id {name!r}: must match {NODE_ID.pattern}")
        if path in there:
            raise ApiRefusal("ALREADY_EXISTS", f"Resource '{path}' already exists")
        if find_topology(node.accelerator_type) is None:
            raise ApiRefusal(
                "INVALID_ARGUMENT",
                f'Cloud TPU received a bad request. accelerator type "{node.accelerator_type}" not found',
            )
        if not node.runtime_version:
            raise ApiRefusal("INVALID_ARGUMENT", "Cloud TPU received a bad request. runtime_version must be set")
        zone = self.zones[path.split("/")[3]]
        if zone.quota is not None and self._chips(path) + _chips(node) > zone.quota:
            raise ApiRefusal(
                "RESOURCE_EXHAUSTED",
                f"Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: {zone.quota} in zone "
                f"{path.split('/')[3]}.",
            )

    def _chips(self, path: str) -> int:
        """In use in the zone of a path."""
        zone = path.split("/")[3]
        return sum(
            _chips(kept.what) for name, kept in self.nodes.items() if name.split("/")[3] == zone and _lives(kept.what)
        )

    def _has_room(self, path: str, node: tpu_v2.Node) -> bool:
        capacity = self.zones[path.split("/")[3]].capacity
        return capacity is None or self._chips(path) + _chips(node) <= capacity

    def _make(self, path: str, node: tpu_v2.Node, operation: Operation, queued: str = "") -> None:
        """It is CREATING at once; whether there is capacity shows halfway."""
        made = tpu_v2.Node(node)
        made.name, made.queued_resource = path, queued
        room = self._has_room(path, node)
        kept = self.nodes[path] = FakeResource(made, operation)
        self._set_node(kept, States.CREATING)
        if not room:
            kept.moves.append((self.now + self.create_s / 2, lambda: self._no_capacity(path, operation)))
            return
        wanted = _hosts(node)
        hosts = min(wanted, self._half.pop(0)) if self._half else wanted
        kept.moves.append((self.now + self.create_s, lambda: self._ready(kept, hosts)))

    def _no_capacity(self, path: str, operation: Operation) -> None:
        self._remove(self.nodes, path)
        operation.done, operation.error = (
            True,
            (
                "RESOURCE_EXHAUSTED",
                f'There is no more capacity in the zone "{path.split("/")[3]}"; you can try in another zone where '
                "Cloud TPU Nodes are offered (see https://cloud.google.com/tpu/docs/regions)",
            ),
        )

    def _ready(self, kept: FakeResource, hosts: int) -> None:
        kept.what.network_endpoints = [
            tpu_v2.NetworkEndpoint(ip_address=f"10.0.{len(self.nodes)}.{host + 1}", port=8470) for host in range(hosts)
        ]
        self._set_node(kept, States.READY)
        kept.operation.done, kept.operation.result = True, tpu_v2.Node(kept.what)
        owner = self.queued.get(kept.what.queued_resource)
        if owner is not None:
            self._set_queued(owner, QueueStates.ACTIVE)
        self.on_ready(kept.what)

    def delete_node(self, path: str) -> Operation:
        self.called("DeleteNode", path)
        return self._delete_node(path)

    def _delete_node(self, path: str) -> Operation:
        kept = self.nodes.get(path)
        if kept is None:
            raise ApiRefusal("NOT_FOUND", f"Resource '{path}' was not found")
        operation = self._begin(path, "delete")
        if kept.what.state == States.READY:
            self.on_gone(kept.what)
        self._set_node(kept, States.DELETING)
        kept.moves = [(self.now + self.delete_s, lambda: self._deleted(path, operation))]
        return operation

    def _deleted(self, path: str, operation: Operation) -> None:
        self._remove(self.nodes, path)
        operation.done = True

    # Queued resources

    def create_queued(self, parent: str, name: str, queued: tpu_v2.QueuedResource) -> Operation:
        self.called("CreateQueuedResource", parent)
        path = f"{parent}/queuedResources/{name}"
        spec = queued.tpu.node_spec[0]
        self._check_new(name, path, self.queued, spec.node)
        operation = self._begin(path, "create")
        made = tpu_v2.QueuedResource(queued)
        made.name = path
        kept = self.queued[path] = FakeResource(made, operation)
        self._set_queued(kept, QueueStates.ACCEPTED)
        operation.done, operation.result = True, tpu_v2.QueuedResource(made)
        kept.moves.append((self.now + self.queue_s, lambda: self._select(kept)))
        patience = queued.queueing_policy.valid_until_duration
        if patience:
            kept.moves.append((self.now + patience.total_seconds(), lambda: self._give_up(kept)))
        return operation

    def _select(self, kept: FakeResource) -> None:
        spec = kept.what.tpu.node_spec[0]
        path = f"{spec.parent}/nodes/{spec.node_id}"
        if not self._has_room(path, spec.node):
            self._set_queued(kept, QueueStates.WAITING_FOR_RESOURCES)
            kept.moves.append((self.now + self.queue_s, lambda: self._select(kept)))
            return
        self._set_queued(kept, QueueStates.PROVISIONING)
        node = tpu_v2.Node(spec.node)
        if "spot" in kept.what:
            node.scheduling_config = tpu_v2.SchedulingConfig(spot=True)
        self._make(path, node, self._begin(path, "create"), kept.what.name)

    def _give_up(self, kept: FakeResource) -> None:
        if kept.what.state.state in (QueueStates.ACCEPTED, QueueStates.WAITING_FOR_RESOURCES):
            kept.moves.clear()
            self._set_queued(kept, QueueStates.FAILED)
            error = kept.what.state.failed_data.error
            error.code, error.message = (
                8,
                "The queued resource could not be fulfilled: no more capacity before valid_until",
            )
            self._note(kept)

    def delete_queued(self, path: str, force: bool) -> Operation:
        self.called("DeleteQueuedResource", path)
        kept = self.queued.get(path)
        if kept is None:
            raise ApiRefusal("NOT_FOUND", f"Resource '{path}' was not found")
        mine = [name for name, node in self.nodes.items() if node.what.queued_resource == path]
        if not force and mine and kept.what.state.state.name not in STARTABLE:
            raise ApiRefusal("FAILED_PRECONDITION", f"{path} is {kept.what.state.state.name}; delete its nodes first")
        operation = self._begin(path, "delete")
        for name in mine:
            self._delete_node(name)
        self._set_queued(kept, QueueStates.DELETING)
        kept.moves = [(self.now + self.delete_s, lambda: self._queued_deleted(path, operation))]
        return operation

    def _queued_deleted(self, path: str, operation: Operation) -> None:
        self._remove(self.queued, path)
        operation.done = True

    # Lists

    def page_of(self, method: str, parent: str, kind: str, size: int, token: str) -> tuple[list[Any], str]:
        """One page of what there was a while ago, and where the next begins."""
        self.called(method, parent)
        there = self.nodes if kind == "nodes" else self.queued
        all_ever = sorted({**self._gone, **there}.items())
        looks = [
            _as_of(kept.history, self.now - self.list_lag_s)
            for path, kept in all_ever
            if path.startswith(f"{parent}/{kind}/")
        ]
        seen = [look for look in looks if look is not None]
        start = int(token or 0)
        end = start + min(size or self.page, self.page)
        return seen[start:end], str(end) if end < len(seen) else ""

    # Inside

    def _begin(self, target: str, verb: str) -> Operation:
        name = f"{'/'.join(target.split('/')[:4])}/operations/operation-{len(self.operations)}"
        operation = self.operations[name] = Operation(name, target, verb)
        return operation

    def _set_node(self, kept: FakeResource, state: Any) -> None:
        kept.what.state = state
        if state in (States.PREEMPTED, States.TERMINATED):
            kept.moves.clear()
        self._note(kept)

    def _set_queued(self, kept: FakeResource, state: Any, initiator: str = "SERVICE") -> None:
        initiators: Any = tpu_v2.QueuedResourceState.StateInitiator
        kept.what.state = tpu_v2.QueuedResourceState(state=state, state_initiator=initiators[initiator])
        self._note(kept)

    def _note(self, kept: FakeResource) -> None:
        kept.history.append((self.now, type(kept.what)(kept.what)))

    def _remove(self, resources: dict[str, FakeResource], path: str) -> None:
        kept = resources.pop(path, None)
        if kept is not None:
            kept.history.append((self.now, None))
            self._gone[path] = kept


def _as_of(history: list[tuple[float, Any]], then: float) -> Any:
    """The look of a resource at that time; None if it was not there."""
    return next((look for at, look in reversed(history) if at <= then), None)


def _hosts(node: tpu_v2.Node) -> int:
    topology = find_topology(node.accelerator_type)
    return topology.hosts if topology is not None else 1


def _chips(node: tpu_v2.Node) -> int:
    topology = find_topology(node.accelerator_type)
    return topology.chips if topology is not None else 1


def _lives(node: tpu_v2.Node) -> bool:
    return node.state not in (States.PREEMPTED, States.TERMINATED)
