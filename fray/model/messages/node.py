"""Messages between node and controller: desired sets of attempts down, observed sets up.

Full sets on connection, deltas between; each keyed by attempt id, so a lost message needs no repair.
"""

from __future__ import annotations

from attrs import Factory, field

from fray.model.frozen import frozen
from fray.model.ids import AttemptId, NodeName
from fray.model.messages.client import ProcessMark
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.resources import Capacity
from fray.model.specs import DesiredAttempt, ObservedAttempt


@frozen(kw_only=True)
class NodeHello:
    """Greeting of a node (inside `fray.net`'s hello). Errors: NodeNameInUse."""

    node: NodeName
    incarnation: str
    """Random, new at each start of ``fray-node``. A node that starts holds no attempts."""
    boot_id: str
    capacity: Capacity
    process: ProcessMark | None = None
    known_payloads: tuple[AttemptId, ...] = ()
    """Attempts whose payload this node already has."""
    host: str = ""
    """Host or IP under which peers reach listeners on this machine."""
    secrets: tuple[str, ...] = ()
    """Names of the secrets configured on this node by its operator."""
    lease_s: float = 600.0
    """Lease: the node ends its attempts before the controller has been silent for so long."""
    log_archive: str = ""
    """Address to which it copies the logs of its attempts; empty: none."""
    busy: dict[str, str] = Factory(dict)
    """Busy accelerators; see `ObservedState`."""
    state_id: str = ""
    """Id of its state directory, which one node at a time holds locked: this proves that an earlier one has ended.
    Empty: not known."""


@frozen(kw_only=True)
class JoinRequest:
    """Greeting of a machine with a join token (`fray.model.join_tokens`), proven by the handshake. Reply: `JoinGrant`.

    Errors: Unauthorized (expired, or used by another machine), InvalidRequest.
    """

    node: NodeName
    worker: int
    """Index of the host in its unit, from 0."""
    claim: str = field(repr=False)
    """Random value of this machine, so that it may present the token again with the same claim."""


@frozen(kw_only=True)
class JoinGrant:
    """Reply with the host's own key, with which it dials from now on; the channel is closed after it."""

    key_id: str
    key: str = field(repr=False)


@frozen(kw_only=True)
class SignCertificate:
    """Issue a certificate for the node's key (request up), valid for a day; repeated at half of that. Reply:
    `SignedCertificate`.

    Errors: InvalidRequest (damaged, or this controller has no TLS listener).
    """

    request: str
    """Signing request, in PEM. It names nothing: the controller knows the node."""


@frozen(kw_only=True)
class SignedCertificate:
    certificate: str
    """Certificate in PEM."""
    authorities: str
    """Certificates (PEM) of the authorities that the controller's own certificate may be of: the current one first."""


@frozen(kw_only=True)
class DesiredState:
    """Notice down: the desired set. Payloads of attempts that are new to the node are attached.

    A node ignores a set below the highest (``epoch``, ``revision``) it has seen.
    """

    epoch: int
    revision: int
    full: bool
    """True: the whole set. False: a delta of replaced or added entries, and ``removed`` ones."""
    desired: tuple[DesiredAttempt, ...] = ()
    removed: tuple[AttemptId, ...] = ()


@frozen(kw_only=True)
class ObservedState:
    """Notice up: the observed set (or its changes). Values of ended attempts are attached."""

    full: bool
    observed: tuple[ObservedAttempt, ...] = ()
    removed: tuple[AttemptId, ...] = ()
    """Attempts forgotten because the desired set no longer has them."""
    busy: dict[str, str] = Factory(dict)
    """Accelerators that are not available now, and the process that holds each: all of them, in every report. An
    accelerator is listed before the end of its last attempt is reported."""
    serial: int = 0
    """Not used: reports arrive in their order. A field of a message stays, for the release before."""


@frozen(kw_only=True)
class AttemptLog:
    """Notice up: new lines of an attempt, in order; sent before the report of its end.

    Attached: the records (`fray.model.log_records`) of lines ``first`` to before ``end``. A slow node skips some, or
    sends only ``end``: all of them are on its disk (`ReadLog`).
    """

    attempt_id: AttemptId
    first: int
    end: int
    ended: bool = False
    """Set once the attempt has ended: there is nothing after ``end``. Always sent, unless the node has gone first."""


@frozen(kw_only=True)
class ReadLog:
    """Read a page of an attempt's log (request down, and of clients to the controller). Reply: `LogPage`.

    It begins with line ``first``; else with the last ``tail`` matching lines, with those of the last ``since_s``
    seconds (the later of both), or with the oldest line.
    """

    attempt_id: AttemptId
    first: int | None = None
    tail: int | None = None
    since_s: float | None = None
    stream: str = ""
    """Only ``out``, ``err`` or ``sys``; empty: all."""
    contains: str = ""
    """Only lines that contain this text. The reply may also have others."""
    limit_bytes: int = 256 * 1024


@frozen(kw_only=True)
class LogPage:
    """Reply with records of lines attached, in order; lines that do not match may be missing or included."""

    attempt_id: AttemptId
    start: int
    """Number of the requested line."""
    first: int
    """Lines from ``start`` to before this are lost, or (if ``retry``) unavailable now."""
    next: int
    """Number of the line at which to continue. Other lines missing from ``first`` to here did not match."""
    caught_up: bool = True
    """No line from ``next`` on exists at this moment."""
    ended: bool = False
    """Set once the attempt has ended: once caught up, nothing follows."""
    missing: str = ""
    """Reason for missing lines; empty when none are, or when retention has dropped them."""
    retry: bool = False
    """Set if missing lines may be available later: the machine is silent."""
    archive: str = ""
    """Address of the machine's log archive, if the machine is gone and had one."""


@frozen(kw_only=True)
class AttemptMetricsReport:
    """Notice up: metrics of attempts; the latest replaces earlier ones. Sent before their ends."""

    metrics: tuple[AttemptMetrics, ...]


DETAILS_LIMIT = 20
DETAIL_LIMIT_CHARS = 1000


@frozen(kw_only=True)
class NodeDetails:
    """Notice up: details of the node for display; replaces earlier ones. No decision depends on them."""

    details: dict[str, str]


@frozen(kw_only=True)
class NodeMoved:
    """Notice up: other machines reach this one at another address now."""

    host: str
    """Host or IP address, see `NodeHello.host`."""


CLOCK_OFFSET = "clock offset"
"""Detail of a node whose clock differs from the controller's: ``-45 s`` if it is behind."""


def truncate_details(details: dict[str, str]) -> dict[str, str]:
    """Return the details, truncated to the limits of the controller."""
    first = list(details.items())[:DETAILS_LIMIT]
    return {topic[:DETAIL_LIMIT_CHARS]: text[:DETAIL_LIMIT_CHARS] for topic, text in first}


@frozen(kw_only=True)
class AttemptAnnotation:
    """Notice up: an event for the history of an attempt's job."""

    attempt_id: AttemptId
    what: str
    """Type of the event: ``stalled``, ``recovered``, ``unwell`` or ``well``."""
    text: str = ""


@frozen(kw_only=True)
class Probe:
    """Check the health of this machine (request down): start a process as jobs are started, write and read its disk,
    look for its devices. Reply: `ProbeResult`, in bounded time."""


@frozen(kw_only=True)
class ProbeResult:
    trouble: str = ""
    """Problem found, in one line; empty: none."""


@frozen(kw_only=True)
class CaptureRequest:
    """Notice down: capture the stacks of these attempts now. Each is answered by `StackCapture`, in bounded time."""

    ref: int
    attempts: tuple[AttemptId, ...]
    limit_bytes: int
    """Limit of each capture."""


@frozen(kw_only=True)
class StackCapture:
    """Notice up: captured stacks of one attempt."""

    ref: int
    attempt_id: AttemptId
    text: str


@frozen(kw_only=True)
class NodeLeaves:
    """Notice up: the node has been asked to end. Nothing new may be placed there, and its jobs move elsewhere; those
    that may end by themselves have ``finish_s``, and the others are ended then."""

    finish_s: float = 0.0
    reason: str = ""


@frozen(kw_only=True)
class NodeGoodbye:
    """Notice up: the node leaves in order, after ending every attempt and reporting it."""

    reason: str = ""
