"""Calls of one actor, and those that the process of an attempt serves: of which actors, and from whom."""

from __future__ import annotations

import json
from typing import Any

from fray.model.frozen import frozen
from fray.model.ids import ActorId

ACTORS_LIMIT = 10
"""Actors in one report: the busiest."""
CALLERS_LIMIT = 20
"""Callers in one report: those with the most calls under way."""
NAME_LIMIT_CHARS = 80
_BUCKETS_LIMIT = 64


LATENCY_STEPS_PER_S = 1 << 20


@frozen(kw_only=True)
class ActorMetrics:
    """Counters of an actor since its current incarnation began."""

    calls: int
    """Calls that have ended in any way."""
    errors: int
    """Ended calls that raised an error."""
    cancelled: int
    """Ended calls that were cancelled by their caller, also before they began."""
    running: int
    """Calls running now."""
    queued: int
    """Calls waiting for their turn now."""
    latency_buckets: tuple[int, ...] = ()
    """Number ``i`` counts the calls that took less than ``2 ** (i - 20)`` seconds (bucket 20: one second), and no less
    than half of that, from their arrival at the actor's process to their end. A stream counts with all its items."""

    def latency_s(self, share: float) -> float:
        """Return an upper bound in seconds of the latency of this share (0 to 1) of the calls; 0 without calls."""
        still = share * sum(self.latency_buckets)
        for index, count in enumerate(self.latency_buckets):
            still -= count
            if count and still <= 0:
                return 2.0**index / LATENCY_STEPS_PER_S
        return 0.0


@frozen(kw_only=True)
class ActorCalls:
    """Calls of one actor."""

    actor_id: ActorId
    name: str
    metrics: ActorMetrics


@frozen(kw_only=True)
class CallingProcess:
    """Process that is connected and has called."""

    incarnation: str
    """Attempt id, or session id of a driver."""
    calls: int
    """Calls that have arrived over its connections."""
    running: int
    """Calls that have not been answered."""


@frozen(kw_only=True)
class ServedCalls:
    """Calls that one process serves, as it last reported them: every few seconds while there are any."""

    actors: tuple[ActorCalls, ...] = ()
    callers: tuple[CallingProcess, ...] = ()
    more_actors: int = 0
    """Actors that are not in ``actors``."""
    more_callers: int = 0

    def metrics_of(self, actor_id: ActorId) -> ActorMetrics | None:
        """Return the metrics of one actor; None if it is not among those that were reported."""
        return next((each.metrics for each in self.actors if each.actor_id == actor_id), None)


def to_text(served: ServedCalls, limit_bytes: int) -> str:
    """Return a line of JSON of at most so many bytes, which `from_text` reads; with fewer actors and callers if need
    be.
    """
    actors = [_actor_list(each) for each in served.actors]
    callers = [[each.incarnation, each.calls, each.running] for each in served.callers]
    more_actors, more_callers = served.more_actors, served.more_callers
    while True:
        text = json.dumps([actors, more_actors, callers, more_callers], separators=(",", ":"))
        if len(text) <= limit_bytes:  # JSON of ASCII characters
            return text
        if callers:
            callers.pop()
            more_callers += 1
        else:
            actors.pop()
            more_actors += 1


def _actor_list(each: ActorCalls) -> list[Any]:
    metrics = each.metrics
    # Most calls of an actor take about the same time: the empty buckets before are many.
    first = next((index for index, count in enumerate(metrics.latency_buckets) if count), 0)
    numbers = [metrics.running, metrics.queued, metrics.calls, metrics.errors, metrics.cancelled]
    return [each.actor_id, each.name[:NAME_LIMIT_CHARS], *numbers, first, *metrics.latency_buckets[first:]]


def from_text(text: str) -> ServedCalls | None:
    """Return what `to_text` has written; None for anything else: a job may write what it likes."""
    try:
        actors, more_actors, callers, more_callers = json.loads(text)
        return ServedCalls(
            actors=tuple(_actor_of(*each) for each in actors[:ACTORS_LIMIT]),
            callers=tuple(_caller_of(*each) for each in callers[:CALLERS_LIMIT]),
            more_actors=_count(more_actors),
            more_callers=_count(more_callers),
        )
    except (ValueError, TypeError, RecursionError):
        return None


def _actor_of(actor_id: Any, name: Any, *numbers: Any) -> ActorCalls:
    running, queued, calls, errors, cancelled, first, *buckets = map(_count, numbers)
    if first + len(buckets) > _BUCKETS_LIMIT:
        raise ValueError("too many buckets")
    metrics = ActorMetrics(
        calls=calls,
        errors=errors,
        cancelled=cancelled,
        running=running,
        queued=queued,
        latency_buckets=(*(0,) * first, *buckets),
    )
    return ActorCalls(actor_id=_word(actor_id), name=_word(name), metrics=metrics)


def _caller_of(incarnation: Any, calls: Any, running: Any) -> CallingProcess:
    return CallingProcess(incarnation=_word(incarnation), calls=_count(calls), running=_count(running))


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError("not a count")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("not a printable text")
    return value
