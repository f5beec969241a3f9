"""Caller with host: only the words around the calls; calls and results are opaque pickles (`fray.runtime`)."""

from __future__ import annotations

from fray.model.frozen import frozen
from fray.model.ids import ActorId, SessionId


@frozen(kw_only=True)
class CallerHello:
    """Greeting of a caller. ``caller`` names the conversation whose sequence numbers name its calls."""

    caller: SessionId
    expects: str | None = None
    """The host's incarnation (attempt id or session id); another one answers with `WrongIncarnation`. None: any."""
    known: bool = False
    """This incarnation has welcomed the caller before: what comes again may have been run."""


@frozen(kw_only=True)
class HostHello:
    incarnation: str


@frozen(kw_only=True)
class LookUpActor:
    """Ask which number an actor name has on this host (`FixedResolver`). Reply: `Bound`. Error: NoSuchActor."""

    name: str


@frozen(kw_only=True)
class ActorNumber:
    number: int
    actor_id: ActorId
    incarnation: str


@frozen(kw_only=True)
class GetMetrics:
    """Ask what an actor of this host has counted. Reply: `ActorMetrics`. Error: NoSuchActor."""

    number: int


LATENCY_STEPS_PER_S = 1 << 20


@frozen(kw_only=True)
class ActorMetrics:
    """What an actor has counted since its present incarnation began."""

    calls: int
    """Calls that have ended, whichever way."""
    errors: int
    """Of those: ended with an error."""
    cancelled: int
    """Of those: cancelled by their caller, also before they began."""
    running: int
    """Under way now."""
    queued: int
    """Waiting for their turn now."""
    latency_buckets: tuple[int, ...] = ()
    """Number ``i`` counts the calls that took less than ``2 ** (i - 20)`` seconds (bucket 20: one second), and no less
    than half of that, from their arrival at the actor's process to their end. A stream counts with all its items."""

    def latency_s(self, share: float) -> float:
        """An upper bound, in seconds, of the latency of this share (0 to 1) of the calls; 0 when there were none."""
        still = share * sum(self.latency_buckets)
        for index, count in enumerate(self.latency_buckets):
            still -= count
            if count and still <= 0:
                return 2.0**index / LATENCY_STEPS_PER_S
        return 0.0


@frozen(kw_only=True)
class RequestShutdown:
    """Ask an actor of this host to end in order. Reply: `Asked`, at once. Error: NoSuchActor."""

    number: int
    reason: str


@frozen(kw_only=True)
class ShutdownAccepted:
    pass


@frozen(kw_only=True)
class CallMeta:
    """Options of one call, in front of its pickle when the frame says so."""

    deadline_s: float | None = None
    """Seconds from now (durations cross wires, times do not)."""
    chain: tuple[str, ...] = ()
    """Links (`fray.runtime.deadlock`) of the calls this one is part of, outermost first."""
