"""Multiplexer of tunnels on one channel: their frames, their turns, and their number.

Contract: a tunnel never delays its channel: its frames are not queued behind the channel's own, they are *pulled* by
the writer when that has nothing else to send, one part of each tunnel in turn (`Channel.refill`). So a frame of the
channel waits for one batch of tunnels at most, and a busy tunnel costs a quiet one a turn. The data of a tunnel is
bounded by the credit that its far end has granted; relays only check it. Tunnels end with their channel, and when the
peer has lost its state.

A tunnel opened by the dialer of the channel has an odd number, one opened by its listener an even one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from fray.errors import ChannelFull, ConnectionFailed, FrayError, InvalidRequest, ProtocolMismatch
from fray.model.messages.tunnels import OpenTunnel
from fray.net import codec
from fray.net.channel.channel import Channel
from fray.net.channel.session import BATCH_BYTES
from fray.net.codec import Bytes, Kind

OPEN, DATA, CREDIT, CLOSE = (
    int(kind) for kind in (Kind.TUNNEL_OPEN, Kind.TUNNEL_DATA, Kind.TUNNEL_CREDIT, Kind.TUNNEL_CLOSE)
)
PART = 2
"""Flag of DATA: the message continues in the next part."""
WINDOW_BYTES = 1024 * 1024
"""Bytes that one end of a tunnel may send ahead of the other's reader."""
PART_BYTES = 32 * 1024
"""Largest part of a message."""
TUNNELS_LIMIT = 1024
"""Limit of open tunnels on one channel."""
PART_COST_BYTES = 64
"""Credit that a part costs beside its bytes, so that empty parts are not free."""
UNACKED_BYTES = 4 * 1024 * 1024
"""Unacknowledged bytes from which on a channel sends nothing for tunnels."""


def cost_bytes(body: Bytes) -> int:
    """Return the credit that one part costs."""
    return len(body) + PART_COST_BYTES


class TunnelEndpoint(Protocol):
    """Callbacks of a tunnel's flow to the owner of its end here: plain functions that do not raise."""

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        """Handle more credit of the far end. The first call means that it has accepted; ``body`` is its answer."""

    def on_data(self, flags: int, body: Bytes) -> None:
        """Handle one part."""

    def on_close(self, error: FrayError | None) -> None:
        """Handle the end: the far end closed (None), refused, or the channel was lost. No more calls follow."""

    def on_room(self) -> None:
        """Handle that a part was sent, so there is room for more."""


class TunnelFlow:
    """State of one tunnel at one end of its channel. Nothing here waits or raises.

    Args:
        credit: bytes that may be sent before the far end grants more; None where others count it (a relay).
    """

    __slots__ = (
        "_queue",
        "close_received",
        "close_sent",
        "credit",
        "endpoint",
        "multiplexer",
        "owed",
        "queued_bytes",
        "ref",
        "turn",
    )

    def __init__(self, multiplexer: TunnelMultiplexer, ref: int, endpoint: TunnelEndpoint, credit: int | None) -> None:
        self.multiplexer = multiplexer
        self.ref = ref
        self.endpoint = endpoint
        self.credit = credit
        self.queued_bytes = 0
        self.owed: tuple[int, Bytes] | None = None
        """Credit to send to the far end, and the body of the acceptance."""
        self.close_received = False
        self.close_sent = False
        self.turn = False
        """Set while it is in the multiplexer's queue of turns."""
        self._queue: deque[tuple[int, int, int, Bytes]] = deque()

    def __repr__(self) -> str:
        state = "closed" if self.close_sent and self.close_received else "open"
        return f"<TunnelFlow {self.ref}: {state}, {self.queued_bytes} bytes to send>"

    @property
    def is_gone(self) -> bool:
        return self.multiplexer.flows.get(self.ref) is not self

    def put(self, body: Bytes, flags: int = 0) -> None:
        """Queue one part of at most `PART_BYTES`."""
        self._push(DATA, flags, 0, body)

    def grant(self, size_bytes: int, body: Bytes = b"") -> None:
        """Allow the far end to send so many more bytes."""
        # Added up until the flow's turn comes: several grants travel as one frame.
        owed, acceptance = self.owed or (0, b"")
        self.owed = (owed + size_bytes, body or acceptance)
        self.multiplexer.want_turn(self)

    def close(self, error: FrayError | None = None) -> None:
        """Close after all queued parts."""
        if not self.close_sent:
            self.close_sent = True
            self._push(CLOSE, 0, 0, b"" if error is None else codec.encode_error(error))

    def drop(self, error: FrayError | None = None) -> None:
        """Close now; queued parts are dropped, and so is everything received from now on."""
        if not self.is_gone:
            # Unless its CLOSE has been passed to the channel already, one is sent now, ahead of what was queued.
            if not (self.close_sent and not self._queue):
                self._queue.clear()
                self.queued_bytes, self.owed, self.close_sent = 0, None, False
                self.close(error)
            # Frames that the far end sent before it learns of this are ignored.
            self.close_received = True
            self.multiplexer.forget_if_finished(self)

    def clear(self) -> None:
        """Drop everything, after the channel was lost."""
        self._queue.clear()
        self.queued_bytes, self.owed = 0, None
        # There is no far end any more that could answer a CLOSE.
        self.close_sent = self.close_received = True

    def has_frame(self) -> bool:
        if self.owed is not None:
            return True
        if not self._queue:
            return False
        kind, _, _, body = self._queue[0]
        return kind != DATA or self.credit is None or cost_bytes(body) <= self.credit

    def take(self) -> tuple[int, int, int, Bytes]:
        """Return the next frame: kind, flags, target, body. Only if `has_frame`."""
        # Credit first: it must not wait for credit of this side, or both sides could wait for each other.
        if self.owed is not None:
            (size_bytes, body), self.owed = self.owed, None
            return CREDIT, 0, size_bytes, body
        frame = self._queue.popleft()
        if frame[0] == DATA:
            self.queued_bytes -= cost_bytes(frame[3])
            if self.credit is not None:
                self.credit -= cost_bytes(frame[3])
        return frame

    def is_empty(self) -> bool:
        return not self._queue and self.owed is None

    def _push(self, kind: int, flags: int, target: int, body: Bytes) -> None:
        if self.is_gone:
            return
        self._queue.append((kind, flags, target, body))
        self.queued_bytes += cost_bytes(body) if kind == DATA else 0
        self.multiplexer.want_turn(self)

    def push_open(self, body: bytes, window_bytes: int) -> None:
        """Queue the first frame of a tunnel opened here."""
        self._push(OPEN, 0, window_bytes, body)


OnOpen: TypeAlias = Callable[[TunnelFlow, OpenTunnel, Bytes, int], TunnelEndpoint]
"""Callback for a tunnel opened by the peer, called with its flow, the opening message, the greeting and the opener's
window in bytes; returns this side's endpoint. Raises `FrayError` to refuse."""


class TunnelMultiplexer:
    """All tunnels of one channel, whose handler forwards frames (`on_frame`) and losses (`on_lost`).

    Args:
        dialed: whether this is the dialer's end of the channel.
        on_open: see `OnOpen`.
    """

    def __init__(self, channel: Channel, *, dialed: bool, on_open: OnOpen) -> None:
        self.channel = channel
        self.flows: dict[int, TunnelFlow] = {}
        self._next = 1 if dialed else 2
        self._on_open = on_open
        self._turns: deque[TunnelFlow] = deque()

    def __repr__(self) -> str:
        return f"<TunnelMultiplexer on {self.channel!r}: {len(self.flows)} tunnels>"

    @property
    def queued_bytes(self) -> int:
        """Bytes waiting to be sent, of all tunnels."""
        return sum(flow.queued_bytes for flow in self.flows.values())

    def check_room(self) -> None:
        """Raise ChannelFull if `TUNNELS_LIMIT` tunnels are open."""
        if len(self.flows) >= TUNNELS_LIMIT:
            raise ChannelFull(
                f"{TUNNELS_LIMIT} tunnels, the limit of one channel, are open to or from "
                f"{self.channel.incarnation}: release some actors, or make their hosts reachable directly",
                limit=TUNNELS_LIMIT,
            )

    def open(
        self, message: OpenTunnel, greeting: Bytes, endpoint: TunnelEndpoint, *, window_bytes: int, counted: bool
    ) -> TunnelFlow:
        """Open a tunnel; its endpoint gets credit when it is accepted.

        Args:
            counted: whether sending is limited by the granted credit.

        Raises:
            ChannelFull: `TUNNELS_LIMIT` tunnels are open.
            Unsupported: a command, and the peer is of an earlier release.
        """
        self.check_room()
        if message.command is not None:
            # A peer that does not know the field would ignore it.
            self.channel.peer_release.adapt(message.command)
        flow = TunnelFlow(self, self._next, endpoint, 0 if counted else None)
        # Odd and even numbers, so that both ends may open tunnels at the same time without asking.
        self._next += 2
        self.flows[flow.ref] = flow
        flow.push_open(codec.encode_message(message, [greeting]), window_bytes)
        return flow

    # From the channel's handler

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> bool:
        """Handle a frame of a tunnel; return False for other frames.

        Raises:
            ProtocolMismatch: an invalid opening.
        """
        if not OPEN <= kind <= CLOSE:
            return False
        flow = self.flows.get(ref)
        if kind == OPEN:
            self._opened(ref, target, body)
        elif flow is None or flow.close_received:
            pass  # sent before its author learned of the tunnel's end
        elif kind == DATA:
            flow.endpoint.on_data(flags, body)
        elif kind == CREDIT:
            # A relay passes the credit on and does not count it: the two ends bound what is in flight.
            if flow.credit is not None:
                flow.credit += target
            flow.endpoint.on_credit(target, body)
            # The flow may have had parts and no credit, in which case it has left the queue of turns.
            self.want_turn(flow)
        else:
            flow.close_received = True
            flow.endpoint.on_close(codec.decode_error(body) if len(body) else None)
            # A tunnel counts against the limit until both sides have closed it.
            self.forget_if_finished(flow)
        return True

    def _opened(self, ref: int, window_bytes: int, body: Bytes) -> None:
        invalid: InvalidRequest | None = None
        try:
            message, blobs = codec.decode_checked(body, codec.TextRule.REFUSE)
        except InvalidRequest as error:
            message, blobs, invalid = OpenTunnel(to=""), [memoryview(b"")], error
        sound = isinstance(message, OpenTunnel) and len(blobs) == 1
        # One limit more is tolerated: tunnels that are being refused still count until both sides have closed them.
        if not sound or ref % 2 == self._next % 2 or ref in self.flows or len(self.flows) > 2 * TUNNELS_LIMIT:
            raise ProtocolMismatch("the peer sent an invalid request for a tunnel")
        flow = TunnelFlow(self, ref, _NULL_RECEIVER, window_bytes)
        full = len(self.flows) >= TUNNELS_LIMIT
        # Entered before it is accepted: `on_open` may already send on it, and a refusal is sent as its CLOSE.
        self.flows[ref] = flow
        try:
            if invalid is not None:
                raise invalid
            if full:
                raise ChannelFull(f"{TUNNELS_LIMIT} tunnels, the limit of one channel, are open there")
            flow.endpoint = self._on_open(flow, message, blobs[0], window_bytes)
        except FrayError as error:
            flow.drop(error)

    def on_lost(self, error: ConnectionFailed) -> None:
        """End all tunnels, after the channel has ended or the peer has lost its state."""
        # Emptied first: endpoints that close their flows in response find them gone.
        flows, self.flows = self.flows, {}
        self._turns.clear()
        self.channel.refill = None
        for flow in flows.values():
            flow.clear()
            flow.endpoint.on_close(error)

    # Turns

    def want_turn(self, flow: TunnelFlow) -> None:
        """Queue a flow for its turn, if it has something to send."""
        # At most once in the queue, so a flow with many parts gets no more turns than others.
        if flow.turn or not flow.has_frame():
            return
        flow.turn = True
        self._turns.append(flow)
        if self.channel.refill is None:
            self.channel.refill = self._refill
        self.channel.wake()

    def forget_if_finished(self, flow: TunnelFlow) -> None:
        """Remove a flow that is closed on both sides and has nothing left to send."""
        if flow.close_received and flow.close_sent and flow.is_empty() and self.flows.get(flow.ref) is flow:
            del self.flows[flow.ref]

    def _refill(self) -> None:
        channel, turns = self.channel, self._turns
        outbox = channel.outbox
        # Pulled one part per tunnel, and only while little is unacknowledged: a frame of the channel that is sent next
        # then waits for one batch at most, however many tunnels are busy.
        while turns and outbox.unsent_bytes < BATCH_BYTES and outbox.size_bytes < UNACKED_BYTES:
            flow = turns.popleft()
            flow.turn = False
            if not flow.has_frame():
                continue
            kind, flags, target, body = flow.take()
            channel.fill(kind, flow.ref, body, target=target, flags=flags)
            if flow.has_frame():
                flow.turn = True
                turns.append(flow)
            self.forget_if_finished(flow)
            # The endpoint may put its next part at once, which queues the flow behind all others.
            if kind == DATA:
                flow.endpoint.on_room()
        if not turns:
            channel.refill = None


class _NullReceiver:
    """Endpoint of a flow before it has another one."""

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        pass

    def on_data(self, flags: int, body: Bytes) -> None:
        pass

    def on_close(self, error: FrayError | None) -> None:
        pass

    def on_room(self) -> None:
        pass


_NULL_RECEIVER = _NullReceiver()
