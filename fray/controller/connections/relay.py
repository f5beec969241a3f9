"""Tunnels between two conversations: pieces go from one to the peer, unopened.

Law. Nothing here is decided by the law or kept in the store: a tunnel is gone when the controller is, and its two ends
dial again. Whoever has a conversation with this controller may ask for a tunnel to any process that has one; what
protects a host is its own key, which it asks for itself, inside the tunnel. Credit travels end to end, so the two ends
bound what waits here; a pair that breaks the rule, or would hold more than its share, loses its tunnel.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from fray.errors import ActorDied, ConnectionFailed, FrayError, ProtocolMismatch, Refused, Unauthorized, Unreachable
from fray.model.ids import SessionId
from fray.model.messages.client import Role
from fray.model.messages.tunnels import OpenTunnel
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
"""Waiting for one peer, of all its tunnels."""

FindTunnels = Callable[[str], TunnelMultiplexer | None]


class RelayEndpoint:
    """One side of a relayed tunnel (`fray.net.tunnels.multiplexer.End`)."""

    def __init__(self, credit_bytes: int) -> None:
        self.flow: TunnelFlow
        self.peer: RelayEndpoint
        self.credit_bytes = credit_bytes
        """What the far end may still send us."""

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        peer = self.peer
        peer.credit_bytes += size_bytes
        if peer.credit_bytes > WINDOW_BYTES:
            self.abort(ProtocolMismatch(f"a tunnel may be given {WINDOW_BYTES} bytes of credit, not more"))
        else:
            peer.flow.grant(size_bytes, bytes(body))

    def on_data(self, flags: int, body: Bytes) -> None:
        self.credit_bytes -= cost_bytes(body)
        if self.credit_bytes < 0:
            self.abort(ProtocolMismatch("a tunnel sends more than its credit"))
        elif self.peer.flow.multiplexer.queued_bytes + len(body) > QUEUED_LIMIT_BYTES:
            self.abort(
                ConnectionFailed(f"{QUEUED_LIMIT_BYTES} bytes wait at the relay for {self.peer.flow.multiplexer!r}")
            )
        else:
            self.peer.flow.put(bytes(body), flags)  # a copy: the piece would keep its whole message

    def on_close(self, error: FrayError | None) -> None:
        self.peer.flow.close(error)

    def on_room(self) -> None:
        pass

    def abort(self, error: FrayError) -> None:
        """Both sides lose it."""
        self.flow.drop(error)
        self.peer.flow.drop(error)


def splice(
    flow: TunnelFlow, target: TunnelMultiplexer, message: OpenTunnel, greeting: Bytes, window_bytes: int
) -> RelayEndpoint:
    """Go on from ``flow`` to the process behind ``target``; returns the end of ``flow``.

    Raises:
        ChannelFull: too many tunnels target.
        ProtocolMismatch: the window is larger than one.
    """
    if window_bytes > WINDOW_BYTES:
        raise ProtocolMismatch(f"a tunnel may be given {WINDOW_BYTES} bytes of credit, not {window_bytes}")
    near, far = RelayEndpoint(0), RelayEndpoint(window_bytes)
    near.peer, far.peer = far, near
    near.flow = flow
    flow.credit = None
    far.flow = target.open(message, bytes(greeting), far, window_bytes=window_bytes, counted=False)
    return near


def check_alive(state: State, to: str) -> None:
    """What the controller knows of a process that somebody wants to talk to.

    Raises:
        ActorDied: it has ended.
        Refused: nobody of this name is known.
    """
    attempt, session = state.attempts.get(to), state.sessions.get(SessionId(to))
    if (session is not None and session.is_ending) or (attempt is not None and not state.is_attempt_living(to)):
        reason = session.reason if session is not None else ""
        raise ActorDied(f"{to} has ended{f' ({reason})' if reason else ''}, says the controller", incarnation=to)
    if session is None and attempt is None:
        raise Refused(f"the controller knows nobody of the name {to!r}", incarnation=to)


def open_relay(
    state: State,
    find_tunnels: FindTunnels,
    by: SessionId,
    flow: TunnelFlow,
    message: OpenTunnel,
    greeting: Bytes,
    window: int,
) -> RelayEndpoint:
    """Answer session ``by``, which asks for a tunnel.

    Raises:
        FrayError: see `OpenTunnel`.
    """
    check_alive(state, message.to)
    target = find_tunnels(message.to)
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
    """Answer session ``by``, which asks for a tunnel to a port of a job: the node of its living member goes on.

    Raises:
        FrayError: see `OpenTunnel`.
    """
    attempt = _find_member(state, by, message)
    if message.port not in attempt.ports:
        ports = ", ".join(attempt.ports) or "none"
        raise Refused(f"job {message.to} has no port {message.port!r}; its ports: {ports}")
    target = find_tunnels(attempt.node)
    if target is None or not target.channel.connected:
        raise Unreachable(
            f"node {attempt.node}, where {attempt.attempt_id} runs, has no connection to the controller now"
        )
    return splice(flow, target, evolve(message, to=attempt.attempt_id, by=by), greeting, window)


def _find_member(state: State, by: SessionId, message: OpenTunnel) -> AttemptRow:
    """Of the job asked for. Whoever has the cluster's token may ask for any; a job only for those of its namespace."""
    info = job_info(state, message.to)
    session, job = state.sessions.get(by), state.jobs[message.to]
    if session is None or (session.role is Role.JOB and session.namespace != job.spec.namespace):
        raise Unauthorized(f"job {message.to} is of another namespace")
    for attempt in state.living_members(job):
        if attempt.member == message.member:
            return attempt
    raise Refused(f"job {message.to} is {info.state.value}: it has no living member {message.member}")
