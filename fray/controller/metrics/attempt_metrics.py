"""Measurements of attempts, in memory: nodes report them again to a new controller.

Invariants: no decision depends on them. Clients that follow a job are notified of changes at most every
`NOTIFY_EVERY_S`, whatever the number of its members; `complete` adds the latest values to every answer about a job.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import trio
from attrs import evolve

from fray.model.actors import ActorInfo
from fray.model.ids import AttemptId, JobId, NodeName, split_attempt
from fray.model.messages.client import NodeInfo
from fray.model.messages.node import truncate_details
from fray.model.monitoring.attempt_metrics import AttemptMetrics, truncate_middle
from fray.model.specs import AttemptInfo, JobInfo

NOTIFY_EVERY_S = 0.5
KEPT_LIMIT = 50_000
"""Attempts; those that changed longest ago are dropped first."""
CAPTURED_LIMIT_BYTES = 32 * 1024 * 1024
"""Stacks of stalled attempts, all together; the oldest are dropped first."""
NODES_LIMIT = 10_000
"""Nodes whose details are kept; those that reported longest ago are dropped first."""
LISTED_LIMIT_BYTES = 1_000
"""Limit of the message of an attempt in a list of jobs."""
NOTIFIED_LIMIT = 200
"""Attempts of one job in one notification; of a larger gang the others are in the next answer about the job."""


def _shortened(attempt: AttemptInfo) -> AttemptInfo:
    return evolve(attempt, captured="", calls=None, message=truncate_middle(attempt.message, LISTED_LIMIT_BYTES))


def _is_shortened(attempt: AttemptInfo) -> bool:
    return bool(attempt.captured or attempt.calls or len(attempt.message) > LISTED_LIMIT_BYTES)


class AttemptMetricsStore:
    """Latest measurements of all attempts."""

    def __init__(self) -> None:
        self.last_reported: OrderedDict[AttemptId, AttemptMetrics] = OrderedDict()
        """Last report of each attempt; that of the least recently reported attempt comes first."""
        self._captured: OrderedDict[AttemptId, int] = OrderedDict()
        self._captured_bytes = 0
        self._changed: dict[JobId, dict[AttemptId, None]] = {}
        self._nodes: OrderedDict[NodeName, dict[str, str]] = OrderedDict()
        self._wake = trio.Event()

    def __repr__(self) -> str:
        return f"<AttemptMetricsStore: {len(self.last_reported)} attempts, {self._captured_bytes} bytes of stacks>"

    def record(self, measured: Iterable[AttemptMetrics], now: float) -> None:
        """Take measurements of a node; ``now`` in seconds since the epoch."""
        for metrics in measured:
            self._merge(metrics, now)
        self._wake.set()

    def _merge(self, metrics: AttemptMetrics, now: float) -> None:
        attempt_id = metrics.attempt_id
        before = self.last_reported.get(attempt_id)
        # Nodes send ages and not times, so that the clocks of machines need not agree.
        if metrics.progress is not None:
            metrics = evolve(metrics, progress=evolve(metrics.progress, time=now - metrics.age_s), age_s=0.0)
        if metrics.captured:
            self._make_room(attempt_id, len(metrics.captured))
        elif before is not None:
            # Stacks come once and measurements twice a second: the next report must not erase them.
            metrics = evolve(metrics, captured=before.captured)
        self.last_reported[attempt_id] = metrics
        self.last_reported.move_to_end(attempt_id)
        self._changed.setdefault(split_attempt(attempt_id)[0], {})[attempt_id] = None
        while len(self.last_reported) > KEPT_LIMIT:
            self._captured_bytes -= self._captured.pop(self.last_reported.popitem(last=False)[0], 0)

    def _make_room(self, attempt_id: AttemptId, size_bytes: int) -> None:
        self._captured_bytes += size_bytes - self._captured.pop(attempt_id, 0)
        self._captured[attempt_id] = size_bytes
        # Only the stacks go; the numbers of the attempt stay.
        while self._captured_bytes > CAPTURED_LIMIT_BYTES:
            oldest, freed_bytes = self._captured.popitem(last=False)
            self._captured_bytes -= freed_bytes
            self.last_reported[oldest] = evolve(self.last_reported[oldest], captured="")

    def listed(self, info: JobInfo) -> JobInfo:
        """Return the job for a list: complete, but without stacks and calls, and with messages of at most
        `LISTED_LIMIT_BYTES`.
        """
        info = info.with_metrics(self.last_reported)
        # Mostly nothing is to be cut, and then the record is not copied.
        if not any(map(_is_shortened, info.attempts)):
            return info
        return evolve(info, attempts=tuple(map(_shortened, info.attempts)))

    def latest(self, attempts: Iterable[AttemptId]) -> tuple[AttemptMetrics, ...]:
        """Return the measurements of those of these attempts that have any."""
        return tuple(self.last_reported[attempt_id] for attempt_id in attempts if attempt_id in self.last_reported)

    def with_calls(self, actors: Iterable[ActorInfo]) -> tuple[ActorInfo, ...]:
        """Return the actors with what their processes have reported of their calls; of ended ones, the last report."""
        return tuple(map(self._with_calls, actors))

    def _with_calls(self, actor: ActorInfo) -> ActorInfo:
        metrics = self.last_reported.get(actor.incarnation)
        if metrics is None or metrics.calls is None:
            return actor
        if actor.ended is not None:
            last = metrics.calls.metrics_of(actor.actor_id)
            return evolve(actor, calls=evolve(last, running=0, queued=0) if last is not None else None)
        return evolve(actor, calls=metrics.calls.metrics_of(actor.actor_id), callers=metrics.calls.callers)

    def record_node_details(self, node: NodeName, details: dict[str, str]) -> None:
        """Take what a node reports of itself."""
        self._nodes[node] = truncate_details(details)
        self._nodes.move_to_end(node)
        while len(self._nodes) > NODES_LIMIT:
            self._nodes.popitem(last=False)

    def with_details(self, known: Iterable[NodeInfo]) -> tuple[NodeInfo, ...]:
        """Return the nodes with what they have reported of themselves."""
        return tuple(evolve(one, details=self._nodes.get(one.name, {})) for one in known)

    async def run(self, notify: Callable[[JobId, tuple[AttemptId, ...]], object]) -> None:
        """Call ``notify`` with the changed attempts of each job, at most every `NOTIFY_EVERY_S`, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            # Sleeping comes after notifying: the first change is reported at once, and those of the next half second
            # together.
            changed, self._changed = self._changed, {}
            for job_id, attempts in changed.items():
                notify(job_id, tuple(attempts)[:NOTIFIED_LIMIT])
            await trio.sleep(NOTIFY_EVERY_S)
