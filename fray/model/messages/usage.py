"""What is asked of the controller about who waits and who has how much."""

from __future__ import annotations

from attrs import Factory

from fray.model.frozen import frozen
from fray.model.ids import Namespace


@frozen(kw_only=True)
class GetQueue:
    """Reply: `QueueInfo`: what waits, in the order in which it is tried; at most ``limit`` lines."""

    limit: int = 100
    user: str | None = None
    """Only what is this user's; his places are those among all."""


@frozen(kw_only=True)
class QueueEntry:
    """One line of the queue."""

    id: str
    kind: str
    """``job``, ``group``, ``reservation`` (its minimum) or ``growth`` (a unit more of one)."""
    position: int
    """1 is tried first."""
    user: str
    namespace: Namespace
    band: str
    standing: str
    """``within`` its quota, ``borrows``, ``grows`` (a reservation) or ``waits`` for a quota."""
    priority: int
    request: str
    waiting_s: float
    reason: str = ""
    """What keeps it, apart from the lack of machines: a quota, or somebody who has waited too long."""


@frozen(kw_only=True)
class QueueInfo:
    total: int
    """Of all that waits, also beyond the limit."""
    entries: tuple[QueueEntry, ...]
    by_user: dict[str, int] = Factory(dict)
    """How many of each user's wait."""


@frozen(kw_only=True)
class GetUsage:
    """Reply: `UsageInfo`."""

    samples: bool = False
    """With what was sampled since the controller has started."""


@frozen(kw_only=True)
class TenantUsage:
    """What a user has of the cluster; with ``namespace``, what one namespace of his has."""

    user: str
    namespace: Namespace | None = None
    weight: float = 1.0
    used: dict[str, float] = Factory(dict)
    """``cpu`` (CPUs), ``memory`` (bytes), ``gpu``, ``tpu``; what is 0 is left out."""
    share: float = 0.0
    """Of the resource of which most is used: the dominant share."""
    mean: float = 0.0
    """Of that share over the past, decayed."""
    score: float = 0.0
    """``(share + mean) / weight``: the lowest goes first."""
    waiting: int = 0
    quota: dict[str, float] | None = None
    """In the same words, and ``gpu:h100``; None: there is none."""
    limit: dict[str, float] | None = None
    """The quota and what may be borrowed beyond it; None: there is no limit."""
    borrowed: dict[str, float] = Factory(dict)
    """What of it is borrowed now."""


@frozen(kw_only=True)
class UsageSample:
    """One moment."""

    at: float
    utilisation: dict[str, float]
    """Part of each resource of the cluster that is in use."""
    shares: dict[str, float]
    """Of the users who have most; the rest of them together are ``""``."""
    waiting: int


@frozen(kw_only=True)
class UsageInfo:
    now: float
    """By the law's time, seconds since the epoch."""
    half_life_s: float
    capacity: dict[str, float]
    used: dict[str, float]
    users: tuple[TenantUsage, ...]
    """The one who has had least for his weight first."""
    namespaces: tuple[TenantUsage, ...]
    samples: tuple[UsageSample, ...] = ()
