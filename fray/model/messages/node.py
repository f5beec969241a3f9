"""Node with controller: complete wanted sets down, complete observed sets up.

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
    """Attempts whose payload this node need not be sent again."""
    host: str = ""
    """Host or IP under which peers reach what listens on this machine."""
    secrets: tuple[str, ...] = ()
    """Names of those that its operator has given it."""
    lease_s: float = 600.0
    """It ends its attempts itself before it has heard nothing for so long."""
    log_archive: str = ""
    """Where it copies the logs of its attempts to; empty: nowhere."""
    busy: dict[str, str] = Factory(dict)
    """As in `Report`."""


@frozen(kw_only=True)
class JoinRequest:
    """Greeting of a machine that has a join token (`fray.model.join_tokens`), proven by the handshake. Answer:
    `JoinGrant`.
    Errors: Unauthorized (expired, or spent by another machine), InvalidRequest."""

    node: NodeName
    worker: int
    """Which host of its unit it is, from 0."""
    claim: str = field(repr=False)
    """Made up by this machine: who shows the token again with the same claim is the same machine."""


@frozen(kw_only=True)
class JoinGrant:
    """The host's own key, with which it dials from now on; there is nothing else to say in this conversation."""

    key_id: str
    key: str = field(repr=False)


@frozen(kw_only=True)
class DesiredState:
    """Notice down. Payloads of attempts the node does not hold yet are attached.

    A node refuses (ignores) what is below the highest (``epoch``, ``revision``) it has seen.
    """

    epoch: int
    revision: int
    full: bool
    """True: the whole set. False: these entries replace or join, ``gone`` leaves."""
    desired: tuple[DesiredAttempt, ...] = ()
    removed: tuple[AttemptId, ...] = ()


@frozen(kw_only=True)
class ObservedState:
    """Notice up: the observed set (or what changed of it). Values of ended attempts are attached."""

    full: bool
    observed: tuple[ObservedAttempt, ...] = ()
    removed: tuple[AttemptId, ...] = ()
    """Forgotten because the wanted set no longer has them."""
    busy: dict[str, str] = Factory(dict)
    """Accelerators nobody may be given now, and who holds them: all of them, in every report. One is in here before the
    end of the attempt that had it is told."""
    serial: int = 0
    """Grows with every report of this incarnation, so that an old full set is not taken for news. 0: not numbered."""


@frozen(kw_only=True)
class AttemptLog:
    """Notice up: lines of an attempt as they come, in order; sent before the report of its end. Attached: the records
    (`fray.model.log_records`) of lines ``first`` to before ``end``.

    A node that is behind skips some, or says only ``end``: all of them are on its disk (`ReadLog`).
    """

    attempt_id: AttemptId
    first: int
    end: int
    ended: bool = False
    """It has ended: there is nothing after ``end``. Always said, unless the node has gone first."""


@frozen(kw_only=True)
class ReadLog:
    """Request down, and of a client to the controller: a page of an attempt's log. Reply: `LogPage`.

    It begins with line ``first``; else with the last ``tail`` lines that are wanted, with those of the last ``since_s``
    seconds (the later of both), or with the oldest.
    """

    attempt_id: AttemptId
    first: int | None = None
    tail: int | None = None
    since_s: float | None = None
    stream: str = ""
    """Only ``out``, ``err`` or ``sys``; empty: all."""
    contains: str = ""
    """Only lines with this in them. Whoever answers may also send others."""
    limit_bytes: int = 256 * 1024


@frozen(kw_only=True)
class LogPage:
    """Attached: records of lines, in order; those that were not wanted may be missing among them, or be there."""

    attempt_id: AttemptId
    start: int
    """The number of the line that was asked for."""
    first: int
    """Lines from ``start`` to before this are lost, or (if ``retry``) cannot be had now."""
    next: int
    """Where to go on. Whatever else is missing between ``first`` and this was not wanted, if only some were."""
    caught_up: bool = True
    """There is nothing from ``next`` on at this moment."""
    ended: bool = False
    """The attempt has ended: once caught up, nothing follows."""
    missing: str = ""
    """Why lines are missing, in words; empty when none are, or when retention has dropped them."""
    retry: bool = False
    """They may be had later: the machine is silent."""
    archive: str = ""
    """Where the machine has copied its logs to, if it is gone and had an archive."""


@frozen(kw_only=True)
class AttemptMetricsReport:
    """Notice up: what is measured of attempts; the latest replaces what was told before. Sent before their ends."""

    metrics: tuple[AttemptMetrics, ...]


DETAILS_LIMIT = 20
DETAIL_LIMIT_CHARS = 1000


@frozen(kw_only=True)
class NodeDetails:
    """Notice up: what the node tells people of itself; replaces what it told before. Nothing is decided by it."""

    details: dict[str, str]


def truncate_details(told: dict[str, str]) -> dict[str, str]:
    """As much of it as is kept."""
    return {about[:DETAIL_LIMIT_CHARS]: text[:DETAIL_LIMIT_CHARS] for about, text in list(told.items())[:DETAILS_LIMIT]}


@frozen(kw_only=True)
class AttemptAnnotation:
    """Notice up: something for the story of an attempt's job."""

    attempt_id: AttemptId
    what: str
    """``stalled``, ``recovered``, ``unwell`` or ``well``."""
    text: str = ""


@frozen(kw_only=True)
class Probe:
    """Request down: look whether this machine is well: start a process as jobs are started, write and read its disk,
    look for its devices. Reply: `Probed`, in bounded time."""


@frozen(kw_only=True)
class ProbeResult:
    trouble: str = ""
    """What is wrong, in a line; empty: nothing was found."""


@frozen(kw_only=True)
class CaptureRequest:
    """Notice down: the stacks of these attempts are wanted now. Each is answered by `Captured`, in bounded time."""

    ref: int
    attempts: tuple[AttemptId, ...]
    limit_bytes: int
    """Of each."""


@frozen(kw_only=True)
class StackCapture:
    """Notice up: one of them."""

    ref: int
    attempt_id: AttemptId
    text: str


@frozen(kw_only=True)
class NodeLeaves:
    """Notice up: the node has been asked to end. Nothing new shall come, and what it runs shall go elsewhere; what may
    end by itself has ``finish_s``, and whatever is left then is ended."""

    finish_s: float = 0.0
    reason: str = ""


@frozen(kw_only=True)
class NodeGoodbye:
    """The node leaves in order: it has ended every attempt and reported it."""

    reason: str = ""
