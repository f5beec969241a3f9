"""The one word of tunnels: whom a tunnel is for. All else in it is for its two ends alone."""

from __future__ import annotations

from fray.model.word import frozen


@frozen(kw_only=True)
class OpenTunnel:
    """Open a tunnel. The greeting (opaque to whoever relays it) is attached.

    Errors: ActorDied (``to`` has ended, by the controller's word), Refused (nobody of this name is known),
    Unreachable (it has no connection now), Unauthorized (the host's word), ChannelFull (too many tunnels).
    """

    to: str
    """Incarnation: an attempt id or the session id of a driver."""
    by: str = ""
    """The session that asks; whoever relays it writes it in."""
