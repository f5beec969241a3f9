"""Caller with host: only the words around the calls; calls and results are opaque pickles (`fray.runtime`)."""

from __future__ import annotations

from attrs import frozen

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
class Bind:
    """Ask which number an actor name has on this host (`FixedResolver`). Reply: `Bound`. Error: NoSuchActor."""

    name: str


@frozen(kw_only=True)
class Bound:
    number: int
    actor_id: ActorId
    incarnation: str


@frozen(kw_only=True)
class CallMeta:
    """Options of one call, in front of its pickle when the frame says so."""

    deadline_s: float | None = None
    """Seconds from now (durations cross wires, times do not)."""
    chain: tuple[str, ...] = ()
    """Actor ids of the calls this one is part of, outermost first."""
