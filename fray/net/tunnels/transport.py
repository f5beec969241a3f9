"""The same `Transport` inside the frames of a conversation: how two processes talk that cannot dial one another.

Addresses are ``relay:INCARNATION``. Both processes hold a conversation with the controller; it forwards the pieces of
one to the other and opens none of them (`fray.controller.connections.relay`). Caller and host prove their key to each
other as on
any connection: question and answer ride on the frames that open the tunnel.

A tunnel is one connection: it is lost when either conversation with the controller ends or begins anew (the controller
was restarted), and whoever talks over it dials again, as after any cut.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import trio

from fray.errors import (
    ConnectionFailed,
    FrayError,
    InvalidRequest,
    MessageTooLarge,
    ProtocolMismatch,
    Refused,
    Unauthorized,
    Unreachable,
)
from fray.model.messages.tunnels import OpenTunnel
from fray.net import auth
from fray.net.channel.channel import Channel
from fray.net.codec import Bytes
from fray.net.transport import RELAY_SCHEME, Authorize, Credential, PeerIdentity, Transport
from fray.net.transports.listener import AuthenticatedListener
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES, too_large
from fray.net.tunnels.byte_stream import ByteStreamTunnel
from fray.net.tunnels.multiplexer import (
    PART,
    PIECE_BYTES,
    WINDOW_BYTES,
    TunnelFlow,
    TunnelMultiplexer,
    cost_bytes,
)

SEND_AHEAD_BYTES = 128 * 1024
"""More than this unsent makes `send` wait."""
GRANT_FROM_BYTES = WINDOW_BYTES // 4
"""Credit is told in steps of at least this."""
CLOSE_S = 1.0


class TunnelTransport:
    """One end of a tunnel."""

    def __init__(self, peer: PeerIdentity) -> None:
        self.peer = peer
        self.accepted: bytes | None = None
        """The far end's words when it accepted."""
        self._lane: TunnelFlow | None = None
        self._gone: FrayError | None = None
        """Nothing more can be sent; and nothing received behind what is there."""
        self._closed = False
        self._outstanding = 0
        """Credit given and not used yet."""
        self._pieces: list[Bytes] = []
        self._pieces_bytes = self._pieces_cost = 0
        self._messages: deque[tuple[int, bytes]] = deque()
        """With what each costs of the window."""
        self._messages_cost = 0
        self._news = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<TunnelTransport {self.peer.remote}: {self._gone or 'open'}>"

    def begin(self, lane: TunnelFlow) -> None:
        """It goes by this lane; the far end was told of one window."""
        self._lane = lane
        self._outstanding = WINDOW_BYTES

    async def wait_accepted(self) -> bytes:
        """The far end's words. Raises what it refused with, or why the tunnel is lost."""
        while self.accepted is None and self._gone is None:
            await self._news.park()
        if self.accepted is None:
            assert self._gone is not None
            raise self._gone
        return self.accepted

    # Sending

    async def send(self, parts: Sequence[Bytes]) -> None:
        """See `Transport.send`."""
        message = _join(parts)
        try:
            while self._gone is None and not self._has_room():
                await self._news.park()
        except trio.Cancelled:
            self._gone = self._gone or ConnectionFailed("a cancelled send left this connection unusable")
            raise
        self._put(message)
        await trio.lowlevel.cancel_shielded_checkpoint()

    def send_now(self, parts: Sequence[Bytes]) -> bool:
        """Send without waiting; False if that is not possible now."""
        if self._gone is not None or not self._has_room():
            return False
        self._put(_join(parts))
        return True

    def _has_room(self) -> bool:
        return self._lane is not None and self._lane.queued_bytes < SEND_AHEAD_BYTES

    def _put(self, message: bytes) -> None:
        if self._gone is not None or self._lane is None:
            raise self._failure()
        if len(message) <= PIECE_BYTES:
            self._lane.put(message)
            return
        view = memoryview(message)
        for at in range(0, len(view), PIECE_BYTES):
            self._lane.put(view[at : at + PIECE_BYTES], PART if at + PIECE_BYTES < len(view) else 0)

    def _failure(self) -> ConnectionFailed:
        gone = self._gone
        return ConnectionFailed(str(gone or "the tunnel is not open")) if type(gone) is not MessageTooLarge else gone  # type: ignore[return-value]

    # Receiving

    async def receive(self) -> Bytes:
        """See `Transport.receive`."""
        while not self._messages:
            if self._gone is not None:
                raise self._failure()
            await self._news.park()
        cost, message = self._messages.popleft()
        self._messages_cost -= cost
        self._regrant()
        return message

    def _regrant(self) -> None:
        """Keep what may be under way and what lies here within one window; a message that is not whole yet does not
        count, so that any may pass."""
        more = WINDOW_BYTES - self._messages_cost - self._outstanding
        if more >= GRANT_FROM_BYTES and self._gone is None and self._lane is not None:
            self._outstanding += more
            self._lane.grant(more)

    # Ending

    async def aclose(self) -> None:
        """See `Transport.aclose`: what was sent is still delivered."""
        if self._lane is not None and self._gone is None:
            self._lane.close()
            with trio.move_on_after(CLOSE_S):
                while self._gone is None:
                    self._messages.clear()
                    await self._news.park()
        self.abort()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._gone = self._gone or ConnectionFailed("the connection was closed here")
        if not self._closed:
            self._closed = True
            self._messages.clear()
            self._pieces = []
            if self._lane is not None:
                self._lane.drop()
        self._news.unpark_all()

    def refuse(self, error: FrayError) -> None:
        """End it and say why."""
        self._gone = self._gone or error
        self._closed = True
        if self._lane is not None:
            self._lane.drop(error)
        self._news.unpark_all()

    # What the lane tells (`fray.net.carrier.End`)

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        if self.accepted is None:
            self.accepted = bytes(body)
        self._news.unpark_all()

    def on_room(self) -> None:
        if self._news:
            self._news.unpark_all()

    def on_data(self, flags: int, body: Bytes) -> None:
        self._outstanding -= cost_bytes(body)
        self._pieces_bytes += len(body)
        self._pieces_cost += cost_bytes(body)
        if self._outstanding < 0:
            self.refuse(ProtocolMismatch("the far end of a tunnel sends more than it may"))
            return
        if self._pieces_bytes > TRANSPORT_LIMIT_BYTES:
            self.refuse(too_large(self._pieces_bytes))
            return
        self._pieces.append(body)
        if not flags & PART:
            self._messages.append((self._pieces_cost, b"".join(self._pieces)))
            self._messages_cost += self._pieces_cost
            self._pieces, self._pieces_bytes, self._pieces_cost = [], 0, 0
            self._news.unpark_all()
        self._regrant()

    def on_close(self, error: FrayError | None) -> None:
        self._gone = self._gone or error or ConnectionFailed("the peer closed the connection")
        if self._lane is not None:
            self._lane.drop()  # answered at once: what came before stays to be received, and nothing can be sent
        self._news.unpark_all()


def _join(parts: Sequence[Bytes]) -> bytes:
    message = b"".join(parts)
    if len(message) > TRANSPORT_LIMIT_BYTES:
        raise too_large(len(message))
    return message


class Tunnels:
    """The network of ``relay:`` addresses over one conversation with the controller.

    Whoever handles that conversation says when it is there (`attach`), and passes on frames and losses.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._carrier: TunnelMultiplexer | None = None
        self._ready = trio.Event()
        self._ended: FrayError | None = None
        self._doors: dict[str, AuthenticatedListener] = {}
        self.on_use: Callable[[], object] = lambda: None
        """Called when a tunnel is dialed or listened for: the connection to the controller is needed now."""

    def __repr__(self) -> str:
        return f"<Tunnels: {len(self)} open>"

    def __len__(self) -> int:
        return len(self._carrier.flows) if self._carrier is not None else 0

    # From the conversation's handler

    def attach(self, channel: Channel) -> None:
        """The conversation has a channel, whose dialer we are."""
        self._carrier = TunnelMultiplexer(channel, dialed=True, on_open=self._on_open)

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> bool:
        """See `Carrier.on_frame`."""
        return self._carrier is not None and self._carrier.on_frame(kind, flags, target, ref, body)

    def on_reset(self) -> None:
        """The controller does not know (any more) what was before."""
        self._lose("the controller that relayed this was restarted, or forgot us")
        self._ready.set()

    def on_end(self, error: FrayError) -> None:
        """Nothing is relayed any more."""
        self._ended = error
        self._lose(f"the conversation with the controller has ended: {error}")
        self._ready.set()

    def _lose(self, why: str) -> None:
        if self._carrier is not None:
            self._carrier.on_lost(ConnectionFailed(why))

    # Network

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        """See `Network.dial`.

        Raises:
            ActorDied: the controller says that this process has ended.
            Refused: nobody of this name is known, or serves there; or there is no conversation with the controller.
            Unreachable: no answer within ``timeout_s``, or it has no connection to the controller either.
            ChannelFull: too many tunnels.
        """
        with trio.move_on_after(timeout_s):
            return await self._dial(address, credential)
        raise Unreachable(f"no answer from {address} within {timeout_s:.3g} s", address=address)

    async def _dial(self, address: str, credential: Credential | None) -> Transport:
        self.on_use()
        await self._ready.wait()
        if self._ended is not None or self._carrier is None:
            raise Refused(f"nobody relays to {address}: the conversation with the controller has ended")
        key_id, key = (credential.key_id, credential.key) if credential else ("", "")
        asked = auth.make_request(key_id, key, self._rng)
        transport = TunnelTransport(PeerIdentity(key_id, address))
        message = OpenTunnel(to=address.removeprefix(RELAY_SCHEME))
        greeting = auth.write_request(asked).encode()
        transport.begin(self._carrier.open(message, greeting, transport, window_bytes=WINDOW_BYTES, counted=True))
        try:
            answer = await transport.wait_accepted()
            if credential is not None:
                auth.verify_listener(asked, key, auth.read_response(answer.decode("latin-1")))
        except BaseException:
            transport.abort()
            raise
        return transport

    async def open_pipe(self, message: OpenTunnel, end: ByteStreamTunnel) -> None:
        """Begin a tunnel to a port; ``end`` hears what comes of it (`Splice.wait_accepted`).

        Raises:
            Refused: there is no conversation with the controller.
            ChannelFull: too many tunnels.
        """
        self.on_use()
        await self._ready.wait()
        if self._ended is not None or self._carrier is None:
            raise Refused(f"nobody leads to {message.to}: the conversation with the controller has ended")
        end.begin(self._carrier.open(message, b"", end, window_bytes=WINDOW_BYTES, counted=True))

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `Network.listen`."""
        if address in self._doors:
            raise InvalidRequest(f"{address} is taken: another listener serves there")
        self.on_use()
        async with trio.open_nursery() as nursery:
            door = self._doors[address] = AuthenticatedListener(
                auth.Authenticator(authorize, self._rng), handler, nursery
            )
            try:
                task_status.started(address)
                await trio.sleep_forever()
            finally:
                if self._doors.get(address) is door:
                    del self._doors[address]

    def _on_open(self, lane: TunnelFlow, message: OpenTunnel, greeting: Bytes, window_bytes: int) -> TunnelTransport:
        address = f"{RELAY_SCHEME}{message.to}"
        door = self._doors.get(address)
        if door is None:
            raise Refused(f"nobody listens at {address}", address=address)
        asked = auth.read_request(bytes(greeting).decode("latin-1"))
        answer = door.authenticator.authenticate(asked)
        if answer is None:
            raise Unauthorized(f"{address} does not accept the key {asked.key_id!r}: check the token", address=address)
        transport = TunnelTransport(PeerIdentity(asked.key_id, f"{RELAY_SCHEME}{message.by}"))
        transport.accepted = b""
        transport.begin(lane)
        lane.grant(WINDOW_BYTES, auth.write_response(answer).encode())
        door.begin(transport)
        return transport
