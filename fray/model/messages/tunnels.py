"""Message that opens a tunnel and names its destination.

Everything else in a tunnel is opaque to its relays.
"""

from __future__ import annotations

from fray.model.frozen import frozen
from fray.model.ids import JobId

ARGV_LIMIT_BYTES = 64 * 1024


@frozen(kw_only=True)
class RunCommand:
    """Command to run in the environment of a living member of a job: its machine, account, control group, namespaces,
    directory and variables. It ends with the attempt and with the tunnel that carries its frames
    (`fray.model.messages.command_frames`).

    Sent within `OpenTunnel`; a class of its own, so that it has its own row among the roles.
    """

    job: JobId
    member: int = 0
    """Rank of the member."""
    argv: tuple[str, ...]
    terminal: bool = False
    """Run it on a terminal of its own; otherwise it has three pipes."""
    rows: int = 0
    columns: int = 0
    term: str = ""
    """Type of the terminal (``TERM``)."""
    record_s: int = 0
    """Instead of ``argv``, record native stacks of the member with the machine's py-spy for so many seconds; the output
    is a file of speedscope. It is in no control group of the job, and its memory is not that of the job."""


@frozen(kw_only=True)
class OpenTunnel:
    """Open a tunnel. The greeting (opaque to relays) is attached.

    With a ``command`` it leads through the node of a job to that command, and carries bytes as with a port. Else,
    without ``port``, it leads to the actor host of a process, and carries messages. With a port it leads through the
    node of a job to that port of the job, and carries bytes (`fray.net.tunnels.byte_stream`).

    Errors: InvalidRequest (no command, or one that is too long), ActorDied (``to`` has ended, reported by the
    controller), Refused (unknown name, or nothing is listening), Unreachable (not connected now), Unauthorized (refused
    by the host, or requested by a job of another namespace), NoSuchJob, ChannelFull (too many tunnels).
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
    command: RunCommand | None = None
    """Command to run, in place of a port."""
