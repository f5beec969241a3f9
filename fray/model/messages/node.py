"""Node with controller: complete wanted sets down, complete observed sets up.

Full sets on connection, deltas between; each keyed by attempt id, so a lost message needs no repair.
"""

from __future__ import annotations

from fray.model.ids import AttemptId, NodeName
from fray.model.messages.client import ProcessMark
from fray.model.resources import Capacity
from fray.model.specs import Observed, Wish
from fray.model.vitals import Vital
from fray.model.word import frozen


@frozen(kw_only=True)
class NodeHello:
    """Greeting of a node (inside `fray.net`'s hello). Errors: NodeNameTaken."""

    node: NodeName
    incarnation: str
    """Random, new at each start of ``fray-node``. A node that starts holds no attempts."""
    boot_id: str
    capacity: Capacity
    process: ProcessMark | None = None
    holds: tuple[AttemptId, ...] = ()
    """Attempts whose payload this node need not be sent again."""
    host: str = ""
    """Host or IP under which peers reach what listens on this machine."""
    lease_s: float = 600.0
    """It ends its attempts itself before it has heard nothing for so long."""


@frozen(kw_only=True)
class Wanted:
    """Notice down. Payloads of attempts the node does not hold yet are attached.

    A node refuses (ignores) what is below the highest (``epoch``, ``revision``) it has seen.
    """

    epoch: int
    revision: int
    full: bool
    """True: the whole set. False: these entries replace or join, ``gone`` leaves."""
    wishes: tuple[Wish, ...] = ()
    gone: tuple[AttemptId, ...] = ()


@frozen(kw_only=True)
class Report:
    """Notice up: the observed set (or what changed of it). Values of ended attempts are attached."""

    full: bool
    observed: tuple[Observed, ...] = ()
    gone: tuple[AttemptId, ...] = ()
    """Forgotten because the wanted set no longer has them."""
    serial: int = 0
    """Grows with every report of this incarnation, so that an old full set is not taken for news. 0: not numbered."""


@frozen(kw_only=True)
class AttemptLog:
    """Notice up: lines of an attempt, in order; sent before the report of its end."""

    attempt_id: AttemptId
    lines: tuple[tuple[str, float, str], ...]


@frozen(kw_only=True)
class Measured:
    """Notice up: what is measured of attempts; the latest replaces what was told before. Sent before their ends."""

    vitals: tuple[Vital, ...]


@frozen(kw_only=True)
class AttemptNoted:
    """Notice up: something for the story of an attempt's job."""

    attempt_id: AttemptId
    what: str
    """``stalled``, ``recovered``, ``unwell`` or ``well``."""
    text: str = ""


@frozen(kw_only=True)
class CaptureAsked:
    """Notice down: the stacks of these attempts are wanted now. Each is answered by `Captured`, in bounded time."""

    ref: int
    attempts: tuple[AttemptId, ...]
    limit_bytes: int
    """Of each."""


@frozen(kw_only=True)
class Captured:
    """Notice up: one of them."""

    ref: int
    attempt_id: AttemptId
    text: str


@frozen(kw_only=True)
class NodeGoodbye:
    """The node leaves in order: it has ended every attempt and reported it."""

    reason: str = ""
