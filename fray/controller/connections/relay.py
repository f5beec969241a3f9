"""Relay of tunnels between two connections of the controller; their bytes are not looked into.

A tunnel is neither the scheduler's nor the store's: it ends with the controller, and its two ends dial again. Any
session of the cluster may open a tunnel to any process that has a connection; a host is protected by its own key, which
it checks itself, inside the tunnel. Credit travels end to end, so the two ends bound what waits here; a tunnel that
breaks the rule, or would queue more than its share, is closed.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from fray.errors import (
    ActorDied,
    ConnectionFailed,
    FrayError,
    InvalidRequest,
    ProtocolMismatch,
    Refused,
    Unauthorized,
    Unreachable,
)
from fray.model.ids import JobId, SessionId
from fray.model.messages.client import Role
from fray.model.messages.tunnels import ARGV_LIMIT_BYTES, OpenTunnel, RunCommand
from fray.net.transport import Bytes
from fray.net.tunnels.multiplexer import (
    WINDOW_BYTES,
    TunnelFlow,
    TunnelMultiplexer,
    cost_bytes,
)
from fray.scheduler.state.rows import AttemptRow
from fray.scheduler.state.state import State
from fray.scheduler.views import job_info

QUEUED_LIMIT_BYTES = 64 * 1024 * 1024
"""Queued for one peer, by all its tunnels."""

FindTunnels = Callable[[str], TunnelMultiplexer | None]


class RelayEndpoint:
    """Side of a relayed tunnel (`fray.net.tunnels.multiplexer.TunnelEndpoint`)."""

    def __init__(self, credit_bytes: int) -> None:
        self.flow: TunnelFlow
        self.peer: RelayEndpoint
        self.credit_bytes = credit_bytes
        """Bytes that the far end may still send."""

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        peer = self.peer
        peer.credit_bytes += size_bytes
        # Checked here although both ends count: a relay serves peers that may be broken, and its memory is all
        # tenants'.
        if peer.credit_bytes > WINDOW_BYTES:
            self.abort(ProtocolMismatch(f"the credit of a tunnel is limited to {WINDOW_BYTES} bytes"))
        else:
            peer.flow.grant(size_bytes, bytes(body))

    def on_data(self, flags: int, body: Bytes) -> None:
        self.credit_bytes -= cost_bytes(body)
        if self.credit_bytes < 0:
            self.abort(ProtocolMismatch("a tunnel has sent more than its credit"))
        elif self.peer.flow.multiplexer.queued_bytes + len(body) > QUEUED_LIMIT_BYTES:
            # One tunnel cannot exceed its window, but one peer may have very many: their sum is bounded by closing the
            # one that exceeds it, never by slowing down the others.
            self.abort(
                ConnectionFailed(f"{QUEUED_LIMIT_BYTES} bytes wait at the relay for {self.peer.flow.multiplexer!r}")
            )
        else:
            # A copy: a view would keep the whole message in memory.
            self.peer.flow.put(bytes(body), flags)

    def on_close(self, error: FrayError | None) -> None:
        self.peer.flow.close(error)

    def on_room(self) -> None:
        pass

    def abort(self, error: FrayError) -> None:
        """Close both sides."""
        # Without waiting for what is queued: the rule was broken, or there is too much of it.
        self.flow.drop(error)
        self.peer.flow.drop(error)


def splice(
    flow: TunnelFlow, target: TunnelMultiplexer, message: OpenTunnel, greeting: Bytes, window_bytes: int
) -> RelayEndpoint:
    """Connect ``flow`` to the process behind ``target``; return the endpoint of ``flow``.

    Raises:
        ChannelFull: the target has too many tunnels.
        ProtocolMismatch: the window is too large.
    """
    if window_bytes > WINDOW_BYTES:
        raise ProtocolMismatch(f"the credit of a tunnel is limited to {WINDOW_BYTES} bytes, not {window_bytes}")
    near, far = RelayEndpoint(0), RelayEndpoint(window_bytes)
    near.peer, far.peer = far, near
    near.flow = flow
    # Sending is limited by the far end's credit, which the two endpoints count; the relay's own flows would count it
    # twice.
    flow.credit = None
    far.flow = target.open(message, bytes(greeting), far, window_bytes=window_bytes, counted=False)
    return near


def check_alive(state: State, to: str) -> None:
    """Check that a process may still be reached.

    Raises:
        ActorDied: it has ended.
        Refused: no process of this name is known.
    """
    # What the controller says of an ended process is final, so it is an `ActorDied`. "Not connected now" and "unknown"
    # prove nothing, and callers keep trying.
    attempt, session = state.attempts.get(to), state.sessions.get(SessionId(to))
    if (session is not None and session.is_ending) or (attempt is not None and not state.is_attempt_living(to)):
        reason = session.reason if session is not None else ""
        raise ActorDied(
            f"{to} has ended{f' ({reason})' if reason else ''}, according to the controller", incarnation=to
        )
    if session is None and attempt is None:
        raise Refused(f"no process registered under {to!r}", incarnation=to)


def of_previous_release(message: OpenTunnel) -> OpenTunnel:
    """Return the opening as this release writes it."""
    to, _, pins = message.to.partition("#")
    return evolve(message, to=to, pins=pins)


def open_relay(
    state: State,
    find_tunnels: FindTunnels,
    by: SessionId,
    flow: TunnelFlow,
    message: OpenTunnel,
    greeting: Bytes,
    window: int,
) -> RelayEndpoint:
    """Open a tunnel from session ``by`` to a process.

    Raises:
        FrayError: see `OpenTunnel`.
    """
    check_alive(state, message.to)
    target = find_tunnels(message.to)
    # The channel to it may be suspended: what is put there would wait for up to a minute.
    if target is None or not target.channel.connected:
        raise Unreachable(f"{message.to} has no connection to the controller now", incarnation=message.to)
    return splice(flow, target, evolve(message, by=by), greeting, window)


def open_port_relay(
    state: State,
    find_tunnels: FindTunnels,
    by: SessionId,
    flow: TunnelFlow,
    message: OpenTunnel,
    greeting: Bytes,
    window: int,
) -> RelayEndpoint:
    """Open a tunnel from session ``by`` to a port of a job, by way of the node of its living member.

    Forwards always go by way of the controller, even where the port could be dialed: one way that works everywhere,
    and no port of a job's network has to be open.

    Raises:
        FrayError: see `OpenTunnel`.
    """
    # By the job and its member, not by an attempt: a forward continues to work after a retry.
    attempt = _find_member(state, by, message.to, message.member)
    if message.port not in attempt.ports:
        ports = ", ".join(attempt.ports) or "none"
        raise Refused(f"job {message.to} has no port {message.port!r}; its ports: {ports}")
    return _splice_to_node(find_tunnels, attempt, flow, evolve(message, by=by), greeting, window)


def open_command_relay(
    state: State,
    find_tunnels: FindTunnels,
    by: SessionId,
    flow: TunnelFlow,
    command: RunCommand,
    greeting: Bytes,
    window: int,
) -> RelayEndpoint:
    """Open a tunnel from session ``by`` to a command that the node of a job's living member runs.

    Raises:
        FrayError: see `OpenTunnel`.
    """
    if not command.argv or not command.argv[0]:
        raise InvalidRequest("no command given")
    if sum(len(word.encode()) for word in command.argv) > ARGV_LIMIT_BYTES:
        raise InvalidRequest(f"the command is longer than {ARGV_LIMIT_BYTES} bytes; write a script to a file")
    attempt = _find_member(state, by, command.job, command.member)
    message = OpenTunnel(to=attempt.attempt_id, by=by, command=command)
    return _splice_to_node(find_tunnels, attempt, flow, message, greeting, window)


def _splice_to_node(
    find_tunnels: FindTunnels,
    attempt: AttemptRow,
    flow: TunnelFlow,
    message: OpenTunnel,
    greeting: Bytes,
    window: int,
) -> RelayEndpoint:
    target = find_tunnels(attempt.node)
    if target is None or not target.channel.connected:
        raise Unreachable(
            f"node {attempt.node}, where {attempt.attempt_id} runs, has no connection to the controller now"
        )
    return splice(flow, target, evolve(message, to=attempt.attempt_id), greeting, window)


def _find_member(state: State, by: SessionId, job_id: JobId, member: int) -> AttemptRow:
    """Return the living member that was asked for. Drivers and tools may ask for any job, jobs only for those of their
    namespace."""
    info = job_info(state, job_id)
    session, job = state.sessions.get(by), state.jobs[job_id]
    # Holders of the cluster's token may do anything; user code reaches ports of its own namespace only.
    if session is None or (session.role is Role.JOB and session.namespace != job.spec.namespace):
        raise Unauthorized(f"job {job_id} is in another namespace")
    for attempt in state.living_members(job):
        if attempt.member == member:
            return attempt
    raise Refused(f"job {job_id} is {info.state.value}: it has no living member {member}")
