"""Tunnels between two conversations: pieces go from one to the other, unopened.

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

HELD_LIMIT_BYTES = 64 * 1024 * 1024
"""Waiting for one peer, of all its tunnels."""

FindCarrier = Callable[[str], TunnelMultiplexer | None]


class RelayEndpoint:
    """One side of a relayed tunnel (`fray.net.tunnels.multiplexer.End`)."""

    def __init__(self, allowed_bytes: int) -> None:
        self.lane: TunnelFlow
        self.other: RelayEndpoint
        self.allowed_bytes = allowed_bytes
        """What the far end may still send us."""

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        other = self.other
        other.allowed_bytes += size_bytes
        if other.allowed_bytes > WINDOW_BYTES:
            self.cut(ProtocolMismatch(f"a tunnel may be given {WINDOW_BYTES} bytes of credit, not more"))
        else:
            other.lane.grant(size_bytes, bytes(body))

    def on_data(self, flags: int, body: Bytes) -> None:
        self.allowed_bytes -= cost_bytes(body)
        if self.allowed_bytes < 0:
            self.cut(ProtocolMismatch("a tunnel sends more than its credit"))
        elif self.other.lane.carrier.queued_bytes + len(body) > HELD_LIMIT_BYTES:
            self.cut(ConnectionFailed(f"{HELD_LIMIT_BYTES} bytes wait at the relay for {self.other.lane.carrier!r}"))
        else:
            self.other.lane.put(bytes(body), flags)  # a copy: the piece would keep its whole message

    def on_close(self, error: FrayError | None) -> None:
        self.other.lane.close(error)

    def on_room(self) -> None:
        pass

    def cut(self, error: FrayError) -> None:
        """Both sides lose it."""
        self.lane.drop(error)
        self.other.lane.drop(error)


def splice(
    lane: TunnelFlow, there: TunnelMultiplexer, message: OpenTunnel, greeting: Bytes, window_bytes: int
) -> RelayEndpoint:
    """Go on from ``lane`` to the process behind ``there``; returns the end of ``lane``.

    Raises:
        ChannelFull: too many tunnels there.
        ProtocolMismatch: the window is larger than one.
    """
    if window_bytes > WINDOW_BYTES:
        raise ProtocolMismatch(f"a tunnel may be given {WINDOW_BYTES} bytes of credit, not {window_bytes}")
    near, far = RelayEndpoint(0), RelayEndpoint(window_bytes)
    near.other, far.other = far, near
    near.lane = lane
    lane.credit = None
    far.lane = there.open(message, bytes(greeting), far, window_bytes=window_bytes, counted=False)
    return near


def check_alive(state: State, to: str) -> None:
    """What the controller knows of a process that somebody wants to talk to.

    Raises:
        ActorDied: it has ended.
        Refused: nobody of this name is known.
    """
    attempt, session = state.attempts.get(to), state.sessions.get(SessionId(to))
    if (session is not None and session.over) or (attempt is not None and not state.attempt_living(to)):
        reason = session.reason if session is not None else ""
        raise ActorDied(f"{to} has ended{f' ({reason})' if reason else ''}, says the controller", incarnation=to)
    if session is None and attempt is None:
        raise Refused(f"the controller knows nobody of the name {to!r}", incarnation=to)


def open_relay(
    state: State,
    carrier_of: FindCarrier,
    by: SessionId,
    lane: TunnelFlow,
    message: OpenTunnel,
    greeting: Bytes,
    window: int,
) -> RelayEndpoint:
    """Answer session ``by``, which asks for a tunnel.

    Raises:
        FrayError: see `OpenTunnel`.
    """
    check_alive(state, message.to)
    there = carrier_of(message.to)
    if there is None or not there.channel.connected:
        raise Unreachable(f"{message.to} has no connection to the controller now", incarnation=message.to)
    return splice(lane, there, evolve(message, by=by), greeting, window)


def open_way_to_port(
    state: State,
    carrier_of: FindCarrier,
    by: SessionId,
    lane: TunnelFlow,
    message: OpenTunnel,
    greeting: Bytes,
    window: int,
) -> RelayEndpoint:
    """Answer session ``by``, which asks for a tunnel to a port of a job: the node of its living member goes on.

    Raises:
        FrayError: see `OpenTunnel`.
    """
    attempt = _living_member(state, by, message)
    if message.port not in attempt.ports:
        ports = ", ".join(attempt.ports) or "none"
        raise Refused(f"job {message.to} has no port {message.port!r}; its ports: {ports}")
    there = carrier_of(attempt.node)
    if there is None or not there.channel.connected:
        raise Unreachable(
            f"node {attempt.node}, where {attempt.attempt_id} runs, has no connection to the controller now"
        )
    return splice(lane, there, evolve(message, to=attempt.attempt_id, by=by), greeting, window)


def _living_member(state: State, by: SessionId, message: OpenTunnel) -> AttemptRow:
    """Of the job asked for. Whoever has the cluster's token may ask for any; a job only for those of its namespace."""
    info = state.job_info(message.to)
    session, job = state.sessions.get(by), state.jobs[message.to]
    if session is None or (session.role is Role.JOB and session.namespace != job.spec.namespace):
        raise Unauthorized(f"job {message.to} is of another namespace")
    for attempt in state.living_members(job):
        if attempt.member == message.member:
            return attempt
    raise Refused(f"job {message.to} is {info.state.value}: it has no living member {message.member}")
