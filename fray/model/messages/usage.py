"""Messages about the queue and the usage of users and namespaces."""

from __future__ import annotations

from attrs import Factory

from fray.model.frozen import frozen
from fray.model.ids import Namespace


@frozen(kw_only=True)
class GetQueue:
    """Get the queue. Reply: `QueueInfo` in the order in which entries are tried; at most ``limit`` entries."""

    limit: int = 100
    user: str | None = None
    """Only entries of this user; positions count all users."""


@frozen(kw_only=True)
class QueueEntry:
    """One entry of the queue."""

    id: str
    kind: str
    """``job``, ``group``, ``reservation`` (its minimum) or ``growth`` (one more unit of a reservation)."""
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
    """Reason for waiting other than a lack of machines: a quota, or machines reserved for a job that has waited too
    long."""


@frozen(kw_only=True)
class QueueInfo:
    total: int
    """Total number of waiting entries, also beyond the limit."""
    entries: tuple[QueueEntry, ...]
    by_user: dict[str, int] = Factory(dict)
    """Number of waiting entries by user."""


@frozen(kw_only=True)
class GetUsage:
    """Get the usage of the cluster. Reply: `UsageInfo`."""

    samples: bool = False
    """Include the samples taken since the start of the controller."""


@frozen(kw_only=True)
class TenantUsage:
    """Usage of one user; with ``namespace``, of one namespace of the user."""

    user: str
    namespace: Namespace | None = None
    weight: float = 1.0
    used: dict[str, float] = Factory(dict)
    """``cpu`` (CPUs), ``memory`` (bytes), ``gpu``, ``tpu``; what is 0 is left out."""
    share: float = 0.0
    """Dominant share: the largest share of any resource."""
    mean: float = 0.0
    """Average of that share over the past, decayed."""
    score: float = 0.0
    """``(share + mean) / weight``: the lowest goes first."""
    waiting: int = 0
    quota: dict[str, float] | None = None
    """Quota in the same form, and ``gpu:h100``; None: no quota."""
    limit: dict[str, float] | None = None
    """Quota plus the amount that may be borrowed beyond it; None: no limit."""
    borrowed: dict[str, float] = Factory(dict)
    """Borrowed part of the usage."""


@frozen(kw_only=True)
class UsageSample:
    """One sample of the usage."""

    at: float
    utilisation: dict[str, float]
    """Fraction of each resource of the cluster that is in use."""
    shares: dict[str, float]
    """Dominant shares of the users with the largest ones; the sum of all others is at ``""``."""
    waiting: int


@frozen(kw_only=True)
class LoopDelay:
    """Delay of the controller's event loop since its start: what became ready waited at most so long for its turn."""

    bounds_s: tuple[float, ...] = ()
    """Upper bounds of the buckets in seconds; the last bucket has none."""
    counts: tuple[int, ...] = ()
    """Passes of the loop by their length, one bucket more than bounds."""
    longest_s: float = 0.0
    """Longest pass in seconds."""
    cpu_counts: tuple[int, ...] = ()
    """The same passes by their CPU time, without what other processes have taken of the core; empty from a controller
    of an earlier release."""
    longest_cpu_s: float = 0.0
    """CPU time of the pass that took most of it, in seconds."""

    def quantile_s(self, part: float) -> float:
        """Return the upper bound of the bucket in which this part of the passes is reached; 0 without any pass."""
        return self._quantile_s(part, self.counts, self.longest_s)

    def cpu_quantile_s(self, part: float) -> float:
        """Return the same of their CPU time."""
        return self._quantile_s(part, self.cpu_counts, self.longest_cpu_s)

    def _quantile_s(self, part: float, counts: tuple[int, ...], longest_s: float) -> float:
        rest = part * sum(counts)
        for bound_s, count in zip(self.bounds_s, counts, strict=False):
            rest -= count
            if rest <= 0:
                return min(bound_s, longest_s)
        return longest_s


@frozen(kw_only=True)
class GetCounts:
    """Get the numbers of jobs and reservations. Reply: `ClusterCounts`."""


@frozen(kw_only=True)
class ClusterCounts:
    """Numbers of jobs and reservations for monitoring. To a user, others' are under the name ``""``."""

    users: dict[str, dict[str, int]]
    """Living jobs by user and state (``pending``, ``running``); under ``""``: users beyond the 1,000 with most."""
    namespaces: dict[str, dict[str, int]]
    """The same by namespace."""
    ended_jobs: dict[str, int]
    """Jobs that have ended since the controller's start, by cause."""
    ended_attempts: dict[str, int]
    """The same of attempts."""
    wait_bounds_s: tuple[float, ...]
    """Upper bounds of the buckets of ``wait_counts`` in seconds; the last bucket has none."""
    wait_counts: tuple[int, ...]
    """Placements of jobs since the controller's start by the time for which the job had waited for machines."""
    waited_s: float
    """Sum of those times in seconds."""
    longest_wait_s: float
    """Time for which the oldest entry of the queue has waited, in seconds; 0: the queue is empty."""
    reservations: dict[str, int]
    """Reservations that have not ended, by state."""
    reserved_units: dict[str, int]
    """Units of those: ``minimum``, which they are to have, and ``held``."""


@frozen(kw_only=True)
class UsageInfo:
    now: float
    """Scheduler time, in seconds since the epoch."""
    half_life_s: float
    capacity: dict[str, float]
    used: dict[str, float]
    users: tuple[TenantUsage, ...]
    """Users, lowest score first."""
    namespaces: tuple[TenantUsage, ...]
    samples: tuple[UsageSample, ...] = ()
    prices: dict[str, float] = Factory(dict)
    """Prices of the policy, for an hour: see `fray.model.policy.policy.Policy`."""
    loop_delay: LoopDelay = LoopDelay()
    """Empty from a controller of an earlier release, and in simulations."""
