"""Messages between a caller and an actor host. Calls and results themselves are opaque pickles (`fray.runtime`)."""

from __future__ import annotations

from fray.model.frozen import frozen
from fray.model.ids import ActorId, SessionId
from fray.model.monitoring.served_calls import ActorMetrics as ActorMetrics  # a message, too


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
