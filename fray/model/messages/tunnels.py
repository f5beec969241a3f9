"""The one word of tunnels: whom a tunnel is for. All else in it is for its two ends alone."""

from __future__ import annotations

from fray.model.frozen import frozen


@frozen(kw_only=True)
class OpenTunnel:
    """Open a tunnel. The greeting (opaque to whoever relays it) is attached.

    Without ``port`` it leads to the host of actors in a process, and carries messages. With one it leads through the
    node of a job to that port of the job, and carries bytes (`fray.net.tunnels.byte_stream`).

    Errors: ActorDied (``to`` has ended, by the controller's word), Refused (nobody of this name is known, or listens),
    Unreachable (it has no connection now), Unauthorized (the host's word, or a job's that asks beyond its namespace),
    NoSuchJob, ChannelFull (too many tunnels).
    """

    to: str
    """Incarnation: an attempt id or the session id of a driver. To a port: a job id, for which the controller puts the
    attempt id of the member that lives now."""
    by: str = ""
    """The session that asks; whoever relays it writes it in."""
    port: str = ""
    """Name of one of the job's ports."""
    member: int = 0
    """Whose port, by rank."""
