"""Call counters of one actor: a few additions for each call, read only on request."""

from __future__ import annotations

from fray.model.monitoring.served_calls import ActorMetrics

_BUCKETS = 64


class Counters:
    """Counters of one hosted actor since it began. The hot path adds to these fields itself."""

    __slots__ = ("buckets", "cancelled", "errors", "not_run")

    def __init__(self) -> None:
        self.errors = 0
        self.cancelled = 0
        self.not_run = 0
        """Calls answered without having been run."""
        # 64 powers of two hold every possible duration, so no call needs a check of the range.
        self.buckets = [0] * _BUCKETS
        """Ended calls by the time from arrival to end, queueing included: see `ActorMetrics.latency_buckets`."""

    def snapshot(self, *, running: int, queued: int) -> ActorMetrics:
        buckets = self.buckets
        last = max((index for index, count in enumerate(buckets) if count), default=-1)
        return ActorMetrics(
            calls=sum(buckets) + self.not_run,
            errors=self.errors,
            cancelled=self.cancelled,
            running=running,
            queued=queued,
            latency_buckets=tuple(buckets[: last + 1]),
        )
