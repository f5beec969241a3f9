"""Messages between a caller and an actor host. Calls and results themselves are opaque pickles (`fray.runtime`)."""

from __future__ import annotations

from fray.model.frozen import frozen
from fray.model.ids import ActorId, SessionId


@frozen(kw_only=True)
class CallerHello:
    """Greeting of a caller. ``caller`` is the channel whose sequence numbers identify its calls."""

    caller: SessionId
    expects: str | None = None
    """Expected incarnation of the host (attempt id or session id); another incarnation refuses. None: any."""
    known: bool = False
    """Set if this incarnation has welcomed the caller before, so a repeated call may have run already."""


@frozen(kw_only=True)
class HostHello:
    incarnation: str


@frozen(kw_only=True)
class LookUpActor:
    """Look up the number of an actor by name on this host. Reply: `ActorNumber`. Error: NoSuchActor."""

    name: str


@frozen(kw_only=True)
class ActorNumber:
    number: int
    actor_id: ActorId
    incarnation: str


@frozen(kw_only=True)
class GetMetrics:
    """Get the metrics of an actor on this host. Reply: `ActorMetrics`. Error: NoSuchActor."""

    number: int


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
class RequestShutdown:
    """Request that an actor of this host ends in order. Reply: `ShutdownAccepted`, at once. Error: NoSuchActor."""

    number: int
    reason: str


@frozen(kw_only=True)
class ShutdownAccepted:
    pass


@frozen(kw_only=True)
class CallMeta:
    """Options of one call, in front of its pickle when the frame says so."""

    deadline_s: float | None = None
    """Seconds from now: clocks differ between machines, so only durations are sent."""
    chain: tuple[str, ...] = ()
    """Links (`fray.runtime.calls`) of the enclosing calls, outermost first."""
