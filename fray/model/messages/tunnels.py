"""Message that opens a tunnel and names its destination.

Everything else in a tunnel is opaque to its relays.
"""

from __future__ import annotations

from fray.model.frozen import frozen


@frozen(kw_only=True)
class OpenTunnel:
    """Open a tunnel. The greeting (opaque to relays) is attached.

    Without ``port`` it leads to the actor host of a process, and carries messages. With a port it leads through the
    node of a job to that port of the job, and carries bytes (`fray.net.tunnels.byte_stream`).

    Errors: ActorDied (``to`` has ended, reported by the controller), Refused (unknown name, or nothing is listening),
    Unreachable (not connected now), Unauthorized (refused by the host, or requested by a job of another namespace),
    NoSuchJob, ChannelFull (too many tunnels).
    """

    to: str
    """Destination: an attempt id or the session id of a driver. For a port: a job id, which the controller replaces by
    the attempt id of the living member."""
    by: str = ""
    """Requesting session, filled in by the relay."""
    pins: str = ""
    """Fingerprint in the address that a caller of the previous release has dialed, filled in by the relay: such a
    caller has no TLS in its tunnels, and takes the fingerprint for a part of the name."""
    port: str = ""
    """Name of one of the job's ports."""
    member: int = 0
    """Rank of the member whose port is meant."""
