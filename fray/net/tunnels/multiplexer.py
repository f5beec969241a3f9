"""Tunnels on one channel: their frames, their turns, and how many there may be.

Law. A channel that carries tunnels stays a conversation first: a tunnel's frames are not queued behind its own, they
are *pulled* by the writer when it has nothing better, one piece of each tunnel in turn (`Channel.refill`). So a frame
of the conversation waits for one batch of tunnels at most, and a busy tunnel costs a quiet one a turn. What a tunnel
holds is bounded by the credit that its far end has given. Tunnels end with their channel, and when the peer forgot it.

A tunnel opened by the dialer of the channel has an odd number, one opened by its listener an even one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from fray.errors import ChannelFull, ConnectionFailed, FrayError, ProtocolMismatch
from fray.model.messages.tunnels import OpenTunnel
from fray.net import codec
from fray.net.channel.channel import Channel
from fray.net.channel.session import BATCH_BYTES
from fray.net.codec import Bytes, Kind

OPEN, DATA, CREDIT, CLOSE = (
    int(kind) for kind in (Kind.TUNNEL_OPEN, Kind.TUNNEL_DATA, Kind.TUNNEL_CREDIT, Kind.TUNNEL_CLOSE)
)
PART = 2
"""Flag of DATA: the message goes on in the next piece."""
WINDOW_BYTES = 1024 * 1024
"""What one end of a tunnel lets the other send ahead of its reader."""
PIECE_BYTES = 32 * 1024
"""Messages travel in pieces of at most this."""
TUNNELS_LIMIT = 1024
"""Tunnels of one channel at a time."""
PIECE_COST_BYTES = 64
"""What a piece costs of the credit beside its bytes, so that empty ones cost something."""
UNACKED_BYTES = 4 * 1024 * 1024
"""With more than this on its way, a channel carries nothing more for tunnels until some of it has arrived."""


def cost_bytes(body: Bytes) -> int:
    """Of one piece."""
    return len(body) + PIECE_COST_BYTES


class TunnelEndpoint(Protocol):
    """What a lane tells whoever holds its end here. Plain functions that do not raise."""

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        """The far end takes so many bytes more. The first time it says that it has accepted, and ``body`` how."""

    def on_data(self, flags: int, body: Bytes) -> None:
        """One piece."""

    def on_close(self, error: FrayError | None) -> None:
        """The far end closed (None), refused, or the carrier is gone. Nothing more comes."""

    def on_room(self) -> None:
        """A piece has left."""


class TunnelFlow:
    """One tunnel on one channel, seen from one of its ends. Nothing here waits or raises.

    Args:
        credit: what may be sent before the far end says more; None where it is counted elsewhere (a relay).
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

    def __init__(self, carrier: TunnelMultiplexer, ref: int, end: TunnelEndpoint, credit: int | None) -> None:
        self.multiplexer = carrier
        self.ref = ref
        self.endpoint = end
        self.credit = credit
        self.queued_bytes = 0
        self.owed: tuple[int, Bytes] | None = None
        """Credit to tell the far end, and the words of acceptance."""
        self.close_received = False
        self.close_sent = False
        self.turn = False
        """It stands in the carrier's queue."""
        self._queue: deque[tuple[int, int, int, Bytes]] = deque()

    def __repr__(self) -> str:
        state = "closed" if self.close_sent and self.close_received else "open"
        return f"<Lane {self.ref}: {state}, {self.queued_bytes} bytes to send>"

    @property
    def is_gone(self) -> bool:
        return self.multiplexer.flows.get(self.ref) is not self

    def put(self, body: Bytes, flags: int = 0) -> None:
        """Queue one piece of at most `PIECE_BYTES`."""
        self._push(DATA, flags, 0, body)

    def grant(self, size_bytes: int, body: Bytes = b"") -> None:
        """Let the far end send so much more."""
        owed, words = self.owed or (0, b"")
        self.owed = (owed + size_bytes, body or words)
        self.multiplexer.want_turn(self)

    def close(self, error: FrayError | None = None) -> None:
        """Say goodbye behind what is queued."""
        if not self.close_sent:
            self.close_sent = True
            self._push(CLOSE, 0, 0, b"" if error is None else codec.encode_error(error))

    def drop(self, error: FrayError | None = None) -> None:
        """Say goodbye now; what is queued is gone, and so is what comes in from now on."""
        if not self.is_gone:
            if not (self.close_sent and not self._queue):
                self._queue.clear()
                self.queued_bytes, self.owed, self.close_sent = 0, None, False
                self.close(error)
            self.close_received = True
            self.multiplexer.forget_if_finished(self)

    def clear(self) -> None:
        """The carrier is gone."""
        self._queue.clear()
        self.queued_bytes, self.owed = 0, None
        self.close_sent = self.close_received = True

    def has_frame(self) -> bool:
        if self.owed is not None:
            return True
        if not self._queue:
            return False
        kind, _, _, body = self._queue[0]
        return kind != DATA or self.credit is None or cost_bytes(body) <= self.credit

    def take(self) -> tuple[int, int, int, Bytes]:
        """The next frame: kind, flags, target, body. Only if `has_frame`."""
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
        """The first frame of a tunnel that begins here."""
        self._push(OPEN, 0, window_bytes, body)


OnOpen: TypeAlias = Callable[[TunnelFlow, OpenTunnel, Bytes, int], TunnelEndpoint]
"""A tunnel from the other side: its lane, whom it is for, the greeting, and what its opener takes ahead. Returns our
end of it. Raises `FrayError` to refuse."""


class TunnelMultiplexer:
    """All tunnels of one channel. Its handler passes on frames (`on_frame`) and losses (`on_lost`).

    Args:
        dialed: this is the dialer's end of the channel.
        on_open: see `OnOpen`.
    """

    def __init__(self, channel: Channel, *, dialed: bool, on_open: OnOpen) -> None:
        self.channel = channel
        self.flows: dict[int, TunnelFlow] = {}
        self._next = 1 if dialed else 2
        self._on_open = on_open
        self._turns: deque[TunnelFlow] = deque()

    def __repr__(self) -> str:
        return f"<Carrier on {self.channel!r}: {len(self.flows)} tunnels>"

    @property
    def queued_bytes(self) -> int:
        """Waiting to be sent, of all tunnels."""
        return sum(lane.queued_bytes for lane in self.flows.values())

    def check_room(self) -> None:
        """Raises ChannelFull: there is no room for another tunnel."""
        if len(self.flows) >= TUNNELS_LIMIT:
            raise ChannelFull(
                f"{TUNNELS_LIMIT} tunnels, the limit of one conversation, are open to or from "
                f"{self.channel.incarnation}: let go of some actors, or open a way to dial their hosts directly",
                limit=TUNNELS_LIMIT,
            )

    def open(
        self, message: OpenTunnel, greeting: Bytes, endpoint: TunnelEndpoint, *, window_bytes: int, counted: bool
    ) -> TunnelFlow:
        """Begin a tunnel; its end hears of credit when it is accepted.

        Args:
            counted: what is sent is held to the credit given.

        Raises:
            ChannelFull: `TUNNELS_LIMIT`.
        """
        self.check_room()
        lane = TunnelFlow(self, self._next, endpoint, 0 if counted else None)
        self._next += 2
        self.flows[lane.ref] = lane
        lane.push_open(codec.encode_message(message, [greeting]), window_bytes)
        return lane

    # From the channel's handler

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> bool:
        """Take a frame if it is a tunnel's; True if so.

        Raises:
            ProtocolMismatch: it makes no sense.
        """
        if not OPEN <= kind <= CLOSE:
            return False
        lane = self.flows.get(ref)
        if kind == OPEN:
            self._opened(ref, target, body)
        elif lane is None or lane.close_received:
            pass  # it was on its way when the tunnel ended
        elif kind == DATA:
            lane.endpoint.on_data(flags, body)
        elif kind == CREDIT:
            if lane.credit is not None:
                lane.credit += target
            lane.endpoint.on_credit(target, body)
            self.want_turn(lane)
        else:
            lane.close_received = True
            lane.endpoint.on_close(codec.decode_error(body) if len(body) else None)
            self.forget_if_finished(lane)
        return True

    def _opened(self, ref: int, window_bytes: int, body: Bytes) -> None:
        message, blobs = codec.decode_message(body)
        sound = isinstance(message, OpenTunnel) and len(blobs) == 1
        if not sound or ref % 2 == self._next % 2 or ref in self.flows or len(self.flows) > 2 * TUNNELS_LIMIT:
            raise ProtocolMismatch("the peer opens a tunnel in a way that makes no sense")
        lane = TunnelFlow(self, ref, _NOBODY, window_bytes)
        full = len(self.flows) >= TUNNELS_LIMIT
        self.flows[ref] = lane
        try:
            if full:
                raise ChannelFull(f"{TUNNELS_LIMIT} tunnels, the limit of one conversation, are open there")
            lane.endpoint = self._on_open(lane, message, blobs[0], window_bytes)
        except FrayError as error:
            lane.drop(error)

    def on_lost(self, error: ConnectionFailed) -> None:
        """The channel has ended, or the peer forgot it: all tunnels are gone."""
        lanes, self.flows = self.flows, {}
        self._turns.clear()
        self.channel.refill = None
        for lane in lanes.values():
            lane.clear()
            lane.endpoint.on_close(error)

    # Turns

    def want_turn(self, lane: TunnelFlow) -> None:
        """The lane may have something to send."""
        if lane.turn or not lane.has_frame():
            return
        lane.turn = True
        self._turns.append(lane)
        if self.channel.refill is None:
            self.channel.refill = self._refill
        self.channel.wake()

    def forget_if_finished(self, lane: TunnelFlow) -> None:
        """Forget a lane that is over on both sides and has nothing to say any more."""
        if lane.close_received and lane.close_sent and lane.is_empty() and self.flows.get(lane.ref) is lane:
            del self.flows[lane.ref]

    def _refill(self) -> None:
        channel, turns = self.channel, self._turns
        outbox = channel.outbox
        while turns and outbox.unsent_bytes < BATCH_BYTES and outbox.size_bytes < UNACKED_BYTES:
            lane = turns.popleft()
            lane.turn = False
            if not lane.has_frame():
                continue
            kind, flags, target, body = lane.take()
            channel.fill(kind, lane.ref, body, target=target, flags=flags)
            if lane.has_frame():
                lane.turn = True
                turns.append(lane)
            self.forget_if_finished(lane)
            if kind == DATA:
                lane.endpoint.on_room()
        if not turns:
            channel.refill = None


class _NullReceiver:
    """Holds the end of a lane before anybody does."""

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        pass

    def on_data(self, flags: int, body: Bytes) -> None:
        pass

    def on_close(self, error: FrayError | None) -> None:
        pass

    def on_room(self) -> None:
        pass


_NOBODY = _NullReceiver()
