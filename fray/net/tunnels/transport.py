"""`Transport` inside a channel to the controller: connects two processes that cannot dial one another.

Addresses are ``relay:INCARNATION#FINGERPRINT``. Both processes have a channel to the controller; it forwards the parts
of one to the other and opens none of them (`fray.controller.connections.relay`). With a fingerprint, that of the host's
certificate, all messages are inside TLS (`fray.net.tunnels.tls`); in a cluster without TLS the address has none. Caller
and host prove their key to each other as on any connection: the challenge accepts the tunnel, and its first message
each way is the proof. So any session of the cluster may open one; the host's own key, which is in the registry,
protects it.

A tunnel is one connection: it is lost when either channel to the controller ends or is reset (the controller was
restarted), and its user dials again, as after any lost connection.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import trio
from attrs import evolve

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
from fray.net.auth import Authorize
from fray.net.channel.channel import Channel
from fray.net.codec import Bytes
from fray.net.transport import RELAY_SCHEME, Credential, PeerIdentity, Transport
from fray.net.transports.listener import AuthenticatedListener
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES, too_large
from fray.net.tunnels.byte_stream import ByteStreamTunnel
from fray.net.tunnels.multiplexer import (
    PART,
    PART_BYTES,
    WINDOW_BYTES,
    TunnelFlow,
    TunnelMultiplexer,
    cost_bytes,
)

if TYPE_CHECKING:
    # With TLS only, and then imported by those who make one.
    from fray.net.transports.tls_listener import TlsServer
    from fray.net.tunnels.tls import TunnelTls

SEND_AHEAD_BYTES = 128 * 1024
"""Unsent bytes from which on `send` waits."""
GRANT_FROM_BYTES = WINDOW_BYTES // 4
"""Smallest step in which credit is granted."""
CLOSE_S = 1.0
TLS_FOLLOWS = b"\n"
"""Separates the greeting, and the answer to it, from this end's part of the TLS handshake."""
TLS_OVERHEAD_BYTES = 8 * 1024
"""Bytes by which TLS makes the largest message longer, at most: 22 for each 16 KiB, its length, and the end of the
handshake."""


class TunnelTransport:
    """One end of a tunnel."""

    def __init__(self, peer: PeerIdentity) -> None:
        self.peer = peer
        self.accepted: bytes | None = None
        """Answer of the far end when it accepted; None before."""
        self._flow: TunnelFlow | None = None
        self._error: FrayError | None = None
        """Reason why nothing more can be sent or received, except for messages that are already here; None while
        open."""
        self._closed = False
        self._outstanding = 0
        """Granted credit that is not used yet."""
        self._parts: list[Bytes] = []
        self._parts_bytes = self._parts_cost = 0
        self._messages: deque[tuple[int, bytes]] = deque()
        """Received messages, with the window cost of each."""
        self._messages_cost = 0
        self.tls: TunnelTls | None = None
        """TLS of this end, set before the first message; None without."""
        self._changed = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<TunnelTransport {self.peer.remote}: {self._error or 'open'}>"

    @property
    def error(self) -> FrayError | None:
        """Reason of the end; None while open."""
        return self._error

    def begin(self, flow: TunnelFlow) -> None:
        """Bind the endpoint to its flow; the far end has been granted one window."""
        self._flow = flow
        self._outstanding = WINDOW_BYTES

    async def wait_accepted(self) -> bytes:
        """Return the answer of the far end; raises its refusal, or the reason why the tunnel is lost."""
        while self.accepted is None and self._error is None:
            await self._changed.park()
        if self.accepted is None:
            assert self._error is not None
            raise self._error
        return self.accepted

    # Sending

    async def send(self, parts: Sequence[Bytes]) -> None:
        """See `Transport.send`."""
        message = _join(parts)
        try:
            # Little is queued ahead: the rest waits in the channel inside this tunnel, whose urgent frames can still
            # overtake it.
            while self._error is None and not self._has_room():
                await self._changed.park()
        # Nothing has been sent, but a channel relies on the same rule for all transports.
        except trio.Cancelled:
            self._error = self._error or ConnectionFailed("a cancelled send left this connection unusable")
            raise
        self._put(message)
        # Shielded: the message is queued, so this must not end as if it were not.
        await trio.lowlevel.cancel_shielded_checkpoint()

    def send_now(self, parts: Sequence[Bytes]) -> bool:
        """Send without waiting; False if that is not possible now."""
        if self._error is not None or not self._has_room():
            return False
        self._put(_join(parts))
        return True

    def _has_room(self) -> bool:
        return self._flow is not None and self._flow.queued_bytes < SEND_AHEAD_BYTES

    def _put(self, message: bytes) -> None:
        if self._error is not None or self._flow is None:
            raise self._failure()
        if self.tls is not None:
            # Only here: what is sealed must be sent, and in this order.
            message = self.tls.seal(message)
        if len(message) <= PART_BYTES:
            self._flow.put(message)
            return
        view = memoryview(message)
        for at in range(0, len(view), PART_BYTES):
            # In parts, so that other tunnels get their turn within a large message.
            self._flow.put(view[at : at + PART_BYTES], PART if at + PART_BYTES < len(view) else 0)

    def _failure(self) -> ConnectionFailed | MessageTooLarge:
        if isinstance(self._error, MessageTooLarge):
            return self._error
        return ConnectionFailed(str(self._error or "the tunnel is not open"))

    # Receiving

    async def receive(self) -> Bytes:
        """See `Transport.receive`."""
        while not self._messages:
            # Only after the last message: what arrived before the loss can still be received.
            if self._error is not None:
                raise self._failure()
            await self._changed.park()
        cost, message = self._messages.popleft()
        self._messages_cost -= cost
        self._regrant()
        if self.tls is None:
            return message
        try:
            return self.tls.open(message)
        except ConnectionFailed as error:
            # Nothing after it can be read, and the far end must not wait for an answer.
            self._messages.clear()
            self.refuse(error)
            raise

    def _regrant(self) -> None:
        """Grant credit so that data in flight and unread messages stay within one window."""
        # An incomplete message does not count: one that is larger than the window would otherwise wait for itself.
        more = WINDOW_BYTES - self._messages_cost - self._outstanding
        if more >= GRANT_FROM_BYTES and self._error is None and self._flow is not None:
            self._outstanding += more
            self._flow.grant(more)

    # Ending

    async def aclose(self) -> None:
        """See `Transport.aclose`: sent messages are still delivered."""
        if self._flow is not None and self._error is None:
            self._flow.close()
            # Waits for the CLOSE of the far end, which follows ours and all parts in front of it.
            with trio.move_on_after(CLOSE_S):
                while self._error is None:
                    # Discarded unread, so the far end gets no new credit for them.
                    self._messages.clear()
                    await self._changed.park()
        self.abort()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._error = self._error or ConnectionFailed("the connection was closed here")
        if not self._closed:
            self._closed = True
            self._messages.clear()
            self._parts = []
            if self._flow is not None:
                self._flow.drop()
        self._changed.unpark_all()

    def refuse(self, error: FrayError) -> None:
        """End the tunnel and send the reason."""
        self._error = self._error or error
        self._closed = True
        if self._flow is not None:
            self._flow.drop(error)
        self._changed.unpark_all()

    # Callbacks of the flow (`fray.net.tunnels.multiplexer.TunnelEndpoint`)

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        if self.accepted is None:
            self.accepted = bytes(body)
        self._changed.unpark_all()

    def on_room(self) -> None:
        if self._changed:
            self._changed.unpark_all()

    def on_data(self, flags: int, body: Bytes) -> None:
        self._outstanding -= cost_bytes(body)
        self._parts_bytes += len(body)
        self._parts_cost += cost_bytes(body)
        # Checked here too, and not only by the relay: it bounds the memory of this process.
        if self._outstanding < 0:
            self.refuse(ProtocolMismatch("the far end of the tunnel exceeded its credit"))
            return
        # An incomplete message is not bounded by the window, so it needs a limit of its own.
        if self._parts_bytes > TRANSPORT_LIMIT_BYTES + (TLS_OVERHEAD_BYTES if self.tls is not None else 0):
            self.refuse(too_large(self._parts_bytes))
            return
        self._parts.append(body)
        if not flags & PART:
            self._messages.append((self._parts_cost, b"".join(self._parts)))
            self._messages_cost += self._parts_cost
            self._parts, self._parts_bytes, self._parts_cost = [], 0, 0
            self._changed.unpark_all()
        self._regrant()

    def on_close(self, error: FrayError | None) -> None:
        self._error = self._error or error or ConnectionFailed("the peer closed the connection")
        if self._flow is not None:
            self._flow.drop()  # answered at once: earlier messages can still be received, and nothing can be sent
        self._changed.unpark_all()


def _join(parts: Sequence[Bytes]) -> bytes:
    message = b"".join(parts)
    if len(message) > TRANSPORT_LIMIT_BYTES:
        raise too_large(len(message))
    return message


class Tunnels:
    """Network of ``relay:`` addresses over one channel to the controller.

    The handler of that channel calls `attach` when it is open, and forwards frames and losses.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._multiplexer: TunnelMultiplexer | None = None
        self._ready = trio.Event()
        self._ended: FrayError | None = None
        self._listeners: dict[str, AuthenticatedListener] = {}
        self.tls: TlsServer | None = None
        """Certificate that listeners show; None in a cluster without TLS."""
        self.on_use: Callable[[], object] = lambda: None
        """Called when a tunnel is dialed or listened for: the connection to the controller is needed now."""

    def __repr__(self) -> str:
        return f"<Tunnels: {len(self)} open>"

    def __len__(self) -> int:
        return len(self._multiplexer.flows) if self._multiplexer is not None else 0

    # Called by the channel's handler

    def attach(self, channel: Channel) -> None:
        """Use this channel, of which this process is the dialer."""
        self._multiplexer = TunnelMultiplexer(channel, dialed=True, on_open=self._on_open)

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> bool:
        """See `TunnelMultiplexer.on_frame`."""
        return self._multiplexer is not None and self._multiplexer.on_frame(kind, flags, target, ref, body)

    def on_reset(self) -> None:
        """End all tunnels, after the controller has lost the session's state (or on the first connection)."""
        self._end_tunnels("the relaying controller was restarted, or has lost this session")
        # Only now: before the first welcome there is nothing to open a tunnel in.
        self._ready.set()

    def on_end(self, error: FrayError) -> None:
        """End all tunnels, after the channel has ended."""
        self._ended = error
        self._end_tunnels(f"the channel to the controller has ended: {error}")
        self._ready.set()

    def _end_tunnels(self, why: str) -> None:
        if self._multiplexer is not None:
            self._multiplexer.on_lost(ConnectionFailed(why))

    # Network

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        """See `Network.dial`.

        Raises:
            ActorDied: the controller reports that this process has ended.
            Unauthorized: the key or the certificate is not that of the address.
            Refused: unknown process, or nothing is listening there; or there is no channel to the controller.
            Unreachable: no answer within ``timeout_s``, or it has no connection to the controller either.
            ChannelFull: too many tunnels.
        """
        with trio.move_on_after(timeout_s):
            return await self._dial(address, credential)
        raise Unreachable(f"no answer from {address} within {timeout_s:.3g} s", address=address)

    async def _dial(self, address: str, credential: Credential | None) -> Transport:
        # A job connects to the controller when it first needs to, and waits for that here, within the time-out of the
        # dial.
        self.on_use()
        await self._ready.wait()
        if self._ended is not None or self._multiplexer is None:
            raise Refused(f"{address} cannot be reached: the channel to the controller has ended")
        key_id = credential.key_id if credential else ""
        transport = TunnelTransport(PeerIdentity(key_id, address))
        place, _, pins = address.partition("#")
        if pins:
            # The listener's TLS handshake ends with the dialer's first message, so it always proves a key.
            credential = credential or Credential("", "")
        message = OpenTunnel(to=place.removeprefix(RELAY_SCHEME))
        greeting = auth.write_request(auth.AuthRequest(key_id)).encode() if credential else b""
        tls = None
        if pins:
            from fray.net.tunnels.tls import dial_tls

            tls = dial_tls(place)
            greeting += TLS_FOLLOWS + tls.begin()
        # `begin` follows without a checkpoint, so no frame of the tunnel arrives before the transport knows its flow.
        transport.begin(self._multiplexer.open(message, greeting, transport, window_bytes=WINDOW_BYTES, counted=True))
        # Both ends prove the host's key inside the tunnel: the relay is trusted with bytes, not with identities.
        try:
            answer, _, flight = (await transport.wait_accepted()).partition(TLS_FOLLOWS)
            if tls is not None:
                tls.finish(flight, tuple(pins.split(",")))
                transport.tls = tls
            if credential is not None:
                await self._prove(transport, auth.read_challenge(answer.decode("latin-1")), credential, place)
        except BaseException:
            transport.abort()
            raise
        return transport

    async def _prove(self, transport: TunnelTransport, challenge: str, credential: Credential, address: str) -> None:
        if not challenge:
            raise auth.impostor(credential.key_id)
        binding = transport.tls.binding if transport.tls is not None else ""
        proof = auth.DialerProof(credential.key_id, credential.key, (address,), binding)
        try:
            await transport.send([auth.write_request(proof.answer(challenge, self._rng)).encode()])
            response = bytes(await transport.receive()).decode("latin-1")
        except ConnectionFailed as error:
            # The reason as the far end has sent it: a refusal of the key is final, a lost tunnel is not.
            raise transport.error or error from None
        proof.verify(auth.read_response(response))

    async def open_pipe(self, message: OpenTunnel, end: ByteStreamTunnel) -> None:
        """Open a tunnel to a port; ``end`` waits for its acceptance (`ByteStreamTunnel.wait_accepted`).

        Raises:
            Refused: there is no channel to the controller.
            ChannelFull: too many tunnels.
        """
        self.on_use()
        await self._ready.wait()
        if self._ended is not None or self._multiplexer is None:
            raise Refused(f"{message.to} cannot be reached: the channel to the controller has ended")
        end.begin(self._multiplexer.open(message, b"", end, window_bytes=WINDOW_BYTES, counted=True))

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `Network.listen`. Reports ``relay:INCARNATION#FINGERPRINT`` as started, with TLS."""
        if address in self._listeners:
            raise InvalidRequest(f"{address} is already in use by another listener")
        self.on_use()
        pins: tuple[str, ...] = ()
        if self.tls is not None:
            self.tls.prepare()
            pins = self.tls.pins
        async with trio.open_nursery() as nursery:
            listener = self._listeners[address] = AuthenticatedListener(
                auth.Authenticator(authorize, self._rng), handler, nursery
            )
            try:
                task_status.started(f"{address}#{','.join(pins)}" if pins else address)
                await trio.sleep_forever()
            finally:
                if self._listeners.get(address) is listener:
                    del self._listeners[address]

    def _on_open(self, flow: TunnelFlow, message: OpenTunnel, greeting: Bytes, window_bytes: int) -> TunnelTransport:
        address = f"{RELAY_SCHEME}{message.to}"
        listener = self._listeners.get(address)
        if listener is None:
            raise Refused(f"connection refused: nothing is listening on {address}", address=address)
        request, _, flight = bytes(greeting).partition(TLS_FOLLOWS)
        offered = request.decode("latin-1")
        transport = TunnelTransport(PeerIdentity("", f"{RELAY_SCHEME}{message.by}"))
        # The accepting side has nothing to wait for.
        transport.accepted = b""
        answer, known_as = b"", address
        if self.tls is not None:
            from fray.net.tunnels.tls import accept_tls, missing_tls

            if flight:
                transport.tls = accept_tls(self.tls, transport.peer.remote)
                answer = TLS_FOLLOWS + transport.tls.begin(flight)
            # A caller of the previous release dials the whole entry of the registry, without TLS. It has the host's
            # key, as the relay has, too: this opens nothing that is closed, and callers of this release insist on TLS.
            elif message.pins == ",".join(self.tls.pins):
                known_as = f"{address}#{message.pins}"
            else:
                raise missing_tls(address)
        challenge = listener.authenticator.challenge({known_as}, transport.tls.binding if transport.tls else "")
        if auth.is_challenge_wanted(offered):
            transport.begin(flow)
            # The first credit carries the challenge, so accepting needs no frame of its own.
            flow.grant(WINDOW_BYTES, auth.write_challenge(challenge.nonce).encode() + answer)
            listener.begin(transport, partial(_admit, transport, challenge, address))
            return transport
        if isinstance(challenge.authenticate(auth.read_request(offered)), auth.Rejection):
            raise _unauthorized(address, "")
        transport.begin(flow)
        flow.grant(WINDOW_BYTES, answer)
        listener.begin(transport)
        return transport


async def _admit(transport: TunnelTransport, challenge: auth.Challenge, address: str) -> bool:
    """Check the dialer's proof and answer with this end's; return whether it was valid."""
    request = auth.read_request(bytes(await transport.receive()).decode("latin-1"))
    response = challenge.authenticate(request)
    if isinstance(response, auth.Rejection):
        transport.refuse(_unauthorized(address, request.key_id))
        return False
    transport.peer = evolve(transport.peer, key_id=request.key_id)
    await transport.send([auth.write_response(response).encode()])
    return True


def _unauthorized(address: str, key_id: str) -> Unauthorized:
    return Unauthorized(f"{address} does not accept the key {key_id!r}: check the token", address=address)
