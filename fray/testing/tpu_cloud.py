"""Simulated TPU cloud behind `fray.testing.tpu_server`.

Contract: state changes only by time passing (`TpuCloud.advance`, or a given clock) and by calls of a test: capacity and
quotas of zones, preemption, hosts that never exist, calls that fail. Lists lag behind (`list_lag_s`), single resources
do not. Operations are accepted first and succeed or fail later, and refusals have the same texts, as at Google.
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
    """Error with which a call is refused."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@define
class Zone:
    """Capacity and quota of item zone, in chips; None: unlimited."""

    capacity: int | None = None
    quota: int | None = None


@define
class Operation:
    """Accepted operation in progress."""

    name: str
    target: str
    verb: str
    done: bool = False
    error: tuple[str, str] | None = None
    result: Any = None


@define
class FakeResource:
    """One resource with its history."""

    what: Any
    operation: Operation
    history: list[tuple[float, Any]] = field(factory=list)
    changes: list[tuple[float, Callable[[], None]]] = field(factory=list)
    """Scheduled changes, with their times."""


@define(eq=False)
class TpuCloud:
    """One project.

    Attributes:
        zones: zones by name; others are refused as Google does.
        create_s, delete_s, queue_s: duration of a node's creation and deletion, and of the selection of a queued item.
        list_lag_s: age of the state that lists show.
        page: maximum number of entries of a page.
        clock: running clock in seconds; None: time passes by `advance` alone.
        on_ready, on_gone: record_call when the hosts of a node begin and end to exist (in any thread).
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
    """Zones whose lists are incomplete."""
    nodes: dict[str, FakeResource] = field(factory=dict)
    queued: dict[str, FakeResource] = field(factory=dict)
    operations: dict[str, Operation] = field(factory=dict)
    calls: list[str] = field(factory=list)
    """Names of all record_call methods, in order."""
    lock: threading.RLock = field(factory=threading.RLock)
    _now: float = 0.0
    _moment: float | None = None
    """Time of the change that is being applied; None outside of `apply_due`."""
    _faults: list[tuple[str, str, str]] = field(factory=list)
    _host_limits: list[int] = field(factory=list)
    _gone: dict[str, FakeResource] = field(factory=dict)
    """Removed resources, which lists may still show."""

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
            self.apply_due()

    def apply_due(self) -> None:
        """Apply all changes that are due, in order and with their own time."""
        until = self.now
        while True:
            due = [
                (at, index, resource)
                for resource in [*self.nodes.values(), *self.queued.values()]
                for index, (at, _) in enumerate(resource.changes)
                if at <= until
            ]
            if not due:
                break
            self._moment, index, resource = min(due, key=lambda item: item[0])
            _, change = resource.changes.pop(index)
            change()
        self._moment = None

    # Called by tests

    def fail_next(self, method: str, status: str, message: str, times: int = 1) -> None:
        """Refuse the next calls of this method."""
        self._faults += [(method, status, message)] * times

    def limit_next_hosts(self, hosts: int) -> None:
        """Create only so many hosts of the next node."""
        self._host_limits.append(hosts)

    def preempt(self, name: str) -> None:
        """Preempt a node: it is PREEMPTED; a queued item is deleted, and its queued resource SUSPENDED."""
        with self.lock:
            path, resource = self._find(self.nodes, name)
            self.on_gone(resource.what)
            self._set_node(resource, States.PREEMPTED)
            owner = self.queued.get(resource.what.queued_resource)
            if owner is not None:
                self._set_queued(owner, QueueStates.SUSPENDING, initiator="SERVICE")
                owner.changes.append((self.now + self.delete_s, lambda: self._suspend(owner, path)))

    def set_state(self, name: str, state: str, remark: str = "") -> None:
        """Move a node into a state by itself: REPAIRING, TERMINATED, STOPPED, …"""
        with self.lock:
            _, resource = self._find(self.nodes, name)
            resource.what.health_description = remark
            if state in ("TERMINATED", "STOPPED", "HIDDEN", "UNKNOWN"):
                self.on_gone(resource.what)
            self._set_node(resource, States[state])

    def _find(self, resources: Mapping[str, FakeResource], name: str) -> tuple[str, FakeResource]:
        return next((path, resource) for path, resource in resources.items() if path.endswith(f"/{name}"))

    def _suspend(self, owner: FakeResource, node: str) -> None:
        self._remove(self.nodes, node)
        self._set_queued(owner, QueueStates.SUSPENDED, initiator="SERVICE")

    # Calls

    def record_call(self, method: str, place: str = "") -> None:
        """Record a call, apply due changes, and refuse it if a failure is set."""
        self.calls.append(method)
        self.apply_due()
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
        self.record_call("CreateNode", parent)
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
        """Return the number of chips in use in the zone of a path."""
        zone = path.split("/")[3]
        return sum(
            _chips(resource.what)
            for name, resource in self.nodes.items()
            if name.split("/")[3] == zone and _is_alive(resource.what)
        )

    def _has_room(self, path: str, node: tpu_v2.Node) -> bool:
        capacity = self.zones[path.split("/")[3]].capacity
        return capacity is None or self._chips(path) + _chips(node) <= capacity

    def _make(self, path: str, node: tpu_v2.Node, operation: Operation, queued: str = "") -> None:
        """Create a node, which is CREATING at once; a lack of capacity shows halfway."""
        made = tpu_v2.Node(node)
        made.name, made.queued_resource = path, queued
        room = self._has_room(path, node)
        resource = self.nodes[path] = FakeResource(made, operation)
        self._set_node(resource, States.CREATING)
        if not room:
            resource.changes.append((self.now + self.create_s / 2, lambda: self._no_capacity(path, operation)))
            return
        wanted = _hosts(node)
        hosts = min(wanted, self._host_limits.pop(0)) if self._host_limits else wanted
        resource.changes.append((self.now + self.create_s, lambda: self._ready(resource, hosts)))

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

    def _ready(self, resource: FakeResource, hosts: int) -> None:
        resource.what.network_endpoints = [
            tpu_v2.NetworkEndpoint(ip_address=f"10.0.{len(self.nodes)}.{host + 1}", port=8470) for host in range(hosts)
        ]
        self._set_node(resource, States.READY)
        resource.operation.done, resource.operation.result = True, tpu_v2.Node(resource.what)
        owner = self.queued.get(resource.what.queued_resource)
        if owner is not None:
            self._set_queued(owner, QueueStates.ACTIVE)
        self.on_ready(resource.what)

    def delete_node(self, path: str) -> Operation:
        self.record_call("DeleteNode", path)
        return self._delete_node(path)

    def _delete_node(self, path: str) -> Operation:
        resource = self.nodes.get(path)
        if resource is None:
            raise ApiRefusal("NOT_FOUND", f"Resource '{path}' was not found")
        operation = self._begin(path, "delete")
        if resource.what.state == States.READY:
            self.on_gone(resource.what)
        self._set_node(resource, States.DELETING)
        resource.changes = [(self.now + self.delete_s, lambda: self._deleted(path, operation))]
        return operation

    def _deleted(self, path: str, operation: Operation) -> None:
        self._remove(self.nodes, path)
        operation.done = True

    # Queued resources

    def create_queued(self, parent: str, name: str, queued: tpu_v2.QueuedResource) -> Operation:
        self.record_call("CreateQueuedResource", parent)
        path = f"{parent}/queuedResources/{name}"
        spec = queued.tpu.node_spec[0]
        self._check_new(name, path, self.queued, spec.node)
        operation = self._begin(path, "create")
        made = tpu_v2.QueuedResource(queued)
        made.name = path
        resource = self.queued[path] = FakeResource(made, operation)
        self._set_queued(resource, QueueStates.ACCEPTED)
        operation.done, operation.result = True, tpu_v2.QueuedResource(made)
        resource.changes.append((self.now + self.queue_s, lambda: self._select(resource)))
        wait_limit = queued.queueing_policy.valid_until_duration
        if wait_limit:
            resource.changes.append((self.now + wait_limit.total_seconds(), lambda: self._give_up(resource)))
        return operation

    def _select(self, resource: FakeResource) -> None:
        spec = resource.what.tpu.node_spec[0]
        path = f"{spec.parent}/nodes/{spec.node_id}"
        if not self._has_room(path, spec.node):
            self._set_queued(resource, QueueStates.WAITING_FOR_RESOURCES)
            resource.changes.append((self.now + self.queue_s, lambda: self._select(resource)))
            return
        self._set_queued(resource, QueueStates.PROVISIONING)
        node = tpu_v2.Node(spec.node)
        if "spot" in resource.what:
            node.scheduling_config = tpu_v2.SchedulingConfig(spot=True)
        self._make(path, node, self._begin(path, "create"), resource.what.name)

    def _give_up(self, resource: FakeResource) -> None:
        if resource.what.state.state in (QueueStates.ACCEPTED, QueueStates.WAITING_FOR_RESOURCES):
            resource.changes.clear()
            self._set_queued(resource, QueueStates.FAILED)
            error = resource.what.state.failed_data.error
            error.code, error.message = (
                8,
                "The queued resource could not be fulfilled: no more capacity before valid_until",
            )
            self._note(resource)

    def delete_queued(self, path: str, force: bool) -> Operation:
        self.record_call("DeleteQueuedResource", path)
        resource = self.queued.get(path)
        if resource is None:
            raise ApiRefusal("NOT_FOUND", f"Resource '{path}' was not found")
        mine = [name for name, node in self.nodes.items() if node.what.queued_resource == path]
        state = resource.what.state.state.name
        if not force and mine and state not in STARTABLE:
            raise ApiRefusal("FAILED_PRECONDITION", f"{path} is {state}; delete its nodes first")
        operation = self._begin(path, "delete")
        for name in mine:
            self._delete_node(name)
        self._set_queued(resource, QueueStates.DELETING)
        resource.changes = [(self.now + self.delete_s, lambda: self._queued_deleted(path, operation))]
        return operation

    def _queued_deleted(self, path: str, operation: Operation) -> None:
        self._remove(self.queued, path)
        operation.done = True

    # Lists

    def page_of(self, method: str, parent: str, kind: str, size: int, token: str) -> tuple[list[Any], str]:
        """Return item page of the state `list_lag_s` ago, and the token of the next page."""
        self.record_call(method, parent)
        there = self.nodes if kind == "nodes" else self.queued
        all_ever = sorted({**self._gone, **there}.items())
        states = [
            _state_at(resource.history, self.now - self.list_lag_s)
            for path, resource in all_ever
            if path.startswith(f"{parent}/{kind}/")
        ]
        seen = [state for state in states if state is not None]
        start = int(token or 0)
        end = start + min(size or self.page, self.page)
        return seen[start:end], str(end) if end < len(seen) else ""

    # Inside

    def _begin(self, target: str, verb: str) -> Operation:
        name = f"{'/'.join(target.split('/')[:4])}/operations/operation-{len(self.operations)}"
        operation = self.operations[name] = Operation(name, target, verb)
        return operation

    def _set_node(self, resource: FakeResource, state: Any) -> None:
        resource.what.state = state
        if state in (States.PREEMPTED, States.TERMINATED):
            resource.changes.clear()
        self._note(resource)

    def _set_queued(self, resource: FakeResource, state: Any, initiator: str = "SERVICE") -> None:
        initiators: Any = tpu_v2.QueuedResourceState.StateInitiator
        resource.what.state = tpu_v2.QueuedResourceState(state=state, state_initiator=initiators[initiator])
        self._note(resource)

    def _note(self, resource: FakeResource) -> None:
        resource.history.append((self.now, type(resource.what)(resource.what)))

    def _remove(self, resources: dict[str, FakeResource], path: str) -> None:
        resource = resources.pop(path, None)
        if resource is not None:
            resource.history.append((self.now, None))
            self._gone[path] = resource


def _state_at(history: list[tuple[float, Any]], then: float) -> Any:
    """Return the state of a resource at that time; None if it did not exist."""
    return next((state for at, state in reversed(history) if at <= then), None)


def _hosts(node: tpu_v2.Node) -> int:
    topology = find_topology(node.accelerator_type)
    return topology.hosts if topology is not None else 1


def _chips(node: tpu_v2.Node) -> int:
    topology = find_topology(node.accelerator_type)
    return topology.chips if topology is not None else 1


def _is_alive(node: tpu_v2.Node) -> bool:
    return node.state not in (States.PREEMPTED, States.TERMINATED)
