"""Tables of Google's states, failed operations and errors for TPU VMs, in the scheduler's terms. Pure.

PREEMPTED and FAILED are proof of death: what ran there is restarted elsewhere at once. So a unit is reported as such
only when its VMs are gone or will never exist; while they are being deleted (a queued resource that is SUSPENDING) it
is DELETING, while they are repaired RUNNING.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import evolve, frozen

from fray.controller.providers.base import ProviderError
from fray.model.policy.machine_groups import ErrorKind, MachineState, SeenMachine

_S = MachineState
NODE_STATES: Mapping[str, MachineState] = {
    "STATE_UNSPECIFIED": _S.CREATING,
    "CREATING": _S.CREATING,
    "STARTING": _S.CREATING,
    "UNHIDING": _S.CREATING,
    "READY": _S.RUNNING,
    "RESTARTING": _S.RUNNING,
    "REIMAGING": _S.RUNNING,
    "REPAIRING": _S.RUNNING,
    "STOPPING": _S.DELETING,
    "DELETING": _S.DELETING,
    "HIDING": _S.DELETING,
    "HIDDEN": _S.FAILED,
    "STOPPED": _S.FAILED,
    "UNKNOWN": _S.FAILED,
    "TERMINATED": _S.FAILED,
    "PREEMPTED": _S.PREEMPTED,
}
"""States of a node, which is one slice with all its hosts. TERMINATED is also the end of a spot node: then it is
PREEMPTED."""
QUEUE_STATES: Mapping[str, MachineState] = {
    "STATE_UNSPECIFIED": _S.CREATING,
    "CREATING": _S.CREATING,
    "ACCEPTED": _S.CREATING,
    "WAITING_FOR_RESOURCES": _S.CREATING,
    "PROVISIONING": _S.CREATING,
    "ACTIVE": _S.RUNNING,
    "FAILED": _S.FAILED,
    "DELETING": _S.DELETING,
    "SUSPENDING": _S.DELETING,
    "SUSPENDED": _S.PREEMPTED,
}
"""States of a queued resource. SUSPENDED: its nodes have been deleted, mostly since spot capacity was reclaimed."""
_ENDINGS = ("FAILED", "DELETING", "SUSPENDING", "SUSPENDED")
_REMARKS = ("REPAIRING", "RESTARTING", "REIMAGING", "STOPPED", "UNKNOWN", "TERMINATED", "HIDDEN")


@frozen(kw_only=True)
class SeenNode:
    """Node as the API lists it."""

    name: str
    group: str
    zone: str
    state: str
    hosts: int
    spot: bool = False
    remark: str = ""


@frozen(kw_only=True)
class SeenQueued:
    """Queued resource as the API lists it; it has the name of its node."""

    name: str
    group: str
    zone: str
    state: str
    remark: str = ""
    error: ErrorKind | None = None


def seen_unit(node: SeenNode | None, queued: SeenQueued | None) -> SeenMachine:
    """Return one unit from what is listed of it: a node, a queued resource, or both."""
    # The node says more than the queue, except at the end: a queue that is suspended or failed decides, as its node is
    # being deleted or never existed.
    if queued is None or (node is not None and queued.state not in _ENDINGS):
        assert node is not None
        return _of_node(node)
    hosts = node.hosts if node is not None else 0
    seen = SeenMachine(
        queued.name, queued.group, queued.zone, QUEUE_STATES.get(queued.state, _S.CREATING), hosts, _of_queue(queued)
    )
    if queued.state == "FAILED":
        return evolve(seen, error=queued.error)
    # ACTIVE without a node: the list of nodes is older than that of queued resources, or the node was deleted by hand
    return evolve(seen, state=_S.CREATING) if queued.state == "ACTIVE" else seen


def _of_node(node: SeenNode) -> SeenMachine:
    # An unknown state of a later API counts as CREATING: it is neither proof of death nor of life.
    state = NODE_STATES.get(node.state, _S.CREATING)
    if node.state == "TERMINATED" and node.spot:
        state = _S.PREEMPTED
    words = node.state.lower() if node.state in _REMARKS else ""
    message = ": ".join(filter(None, (words, node.remark)))
    return SeenMachine(node.name, node.group, node.zone, state, node.hosts, message)


def _of_queue(queued: SeenQueued) -> str:
    words = f"queued resource {queued.state.lower().replace('_', ' ')}"
    return f"{words}: {queued.remark}" if queued.remark else words


# Refusals ------------------------------------------------------------------------------------------------------------

ERRORS: Mapping[str, ErrorKind] = {
    "INVALID_ARGUMENT": ErrorKind.INVALID,
    "NOT_FOUND": ErrorKind.INVALID,
    "OUT_OF_RANGE": ErrorKind.INVALID,
    "UNIMPLEMENTED": ErrorKind.INVALID,
    "PERMISSION_DENIED": ErrorKind.PERMISSION,
    "UNAUTHENTICATED": ErrorKind.PERMISSION,
}
"""Kind of error by gRPC status; other errors are transient, unless `kind_of` finds something else in the message."""
_RATE = re.compile(r"per (minute|second|100 seconds)|PerMinute|rate limit|too many requests", re.IGNORECASE)
_NONE_LEFT = re.compile(r"no more capacity|stock ?-?out|not enough resources|insufficient capacity", re.IGNORECASE)
_QUOTA = re.compile("quota|limit", re.IGNORECASE)
_FOR_EVER = re.compile(r"constraints/|organization policy|not supported|not available in", re.IGNORECASE)


def kind_of(status: str, message: str) -> ErrorKind:
    """Return the kind of an error. RESOURCE_EXHAUSTED is a quota, a zone without capacity, or too many requests a
    minute."""
    if status == "RESOURCE_EXHAUSTED":
        # Three meanings of one status, distinguished only by the message: too many requests a minute pass by
        # themselves, while a quota or an empty zone calls for a long pause.
        if _RATE.search(message):
            return ErrorKind.TRANSIENT
        return ErrorKind.QUOTA if _QUOTA.search(message) and not _NONE_LEFT.search(message) else ErrorKind.STOCKOUT
    if status in ("UNAVAILABLE", "FAILED_PRECONDITION", "INTERNAL", "ABORTED") and _NONE_LEFT.search(message):
        return ErrorKind.STOCKOUT
    if status == "FAILED_PRECONDITION" and _FOR_EVER.search(message):
        return ErrorKind.INVALID
    return ERRORS.get(status, ErrorKind.TRANSIENT)


def refusal(status: str, message: str) -> ProviderError:
    """Return an error of the API as a provider error, cut to 500 characters."""
    text = " ".join(message.split())[:500] or "no reason given"
    return ProviderError(kind_of(status, message), f"Google says {status}: {text}")


def failed(seen: SeenMachine, status: str, message: str) -> SeenMachine:
    """Return a unit whose create operation has ended with an error."""
    error = refusal(status, message)
    return evolve(seen, state=_S.FAILED, hosts=0, message=str(error), error=error.kind)
