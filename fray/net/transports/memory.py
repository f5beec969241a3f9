"""`Transport` inside one process, with named hosts, delays, and every way a network can fail.

Addresses are ``memory:HOST/PORT`` (``memory:NAME`` is host ``NAME``). A dialer is a host too: ``network.at("driver")``
is the network as seen from there. Nothing runs by itself: a receiver waits for the messages in flight to it, so the
order of events depends only on the clock, Trio's scheduler and the given generator.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeAlias

import trio
from attrs import define, field, frozen

from fray.errors import ConnectionFailed, InvalidRequest, MessageTooLarge, Refused, Unauthorized, Unreachable
from fray.net import auth
from fray.net.alarm import Alarm
from fray.net.auth import Authorize
from fray.net.transport import Bytes, Credential, PeerIdentity, Transport
from fray.net.transports.listener import AuthenticatedListener

TRANSPORT_LIMIT_BYTES = 1024 * 1024
"""Largest transport message."""
PIPE_LIMIT_BYTES = 1024 * 1024
"""Limit of bytes in flight in one direction of one connection, at which `send` waits, as on a socket."""
CLOSE_S = 1.0
NEVER = float("inf")


class MessageFault(Enum):
    """Action of a fault hook on one message."""

    DELIVER = "deliver"
    LOSE = "the connection and the message are lost; the sender gets an error"
    LAST = "the message arrives, then the connection is lost; the sender gets the same error"


@frozen
class InFlightMessage:
    """One message about to be sent."""

    source: str
    target: str
    connection: int
    """Number of the connection in this network, from 1."""
    number: int
    """Number of the message in this direction of the connection, from 1."""
    size_bytes: int


Delay: TypeAlias = Callable[[str, str, random.Random], float]


@define(eq=False)
class _Pipe:
    """One direction of one connection. Times are those at which the other end learns of an event."""

    source: str
    target: str
    queue: deque[tuple[float, bytes]] = field(factory=deque)
    queued_bytes: int = 0
    sent: int = 0
    last_arrival: float = 0.0
    ended_at: float = NEVER
    """Time of the sender's end: after it and the queue there is nothing to receive."""
    dead_at: float = NEVER
    """Time of the receiver's end: from then on sending fails."""
    changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    arrival: Alarm | None = None
    """Wait at the receiver's end (in `receive` or `aclose`), which ends with the next arrival."""

    def clear(self) -> None:
        self.queue.clear()
        self.queued_bytes = 0


class MemoryTransport:
    """One end of a connection."""

    def __init__(self, network: MemoryNetwork, number: int, peer: PeerIdentity, out: _Pipe, back: _Pipe) -> None:
        self.peer = peer
        self.number = number
        self._network = network
        self._out = out
        self._back = back
        self._closed_reason: str | None = None
        """Reason why this end can neither send nor receive; None while open."""

    def __repr__(self) -> str:
        return f"<MemoryTransport {self.number} {self._out.source} to {self._out.target}>"

    async def send(self, parts: Sequence[Bytes]) -> None:
        """See `Transport.send`; waits while `PIPE_LIMIT_BYTES` are in flight."""
        message = self._join(parts)
        try:
            while not self._may_send():
                # The receiver's end is learned one delay later, as on a wire.
                with trio.move_on_at(self._out.dead_at):
                    await self._out.changed.park()
        except trio.Cancelled:
            # Nothing has been sent, but real transports break here, and simulations have to show it.
            self._closed_reason = self._closed_reason or "a cancelled send left this connection unusable"
            raise
        self._put(message)
        await trio.lowlevel.cancel_shielded_checkpoint()

    def send_now(self, parts: Sequence[Bytes]) -> bool:
        """Send without waiting; False if that is not possible now."""
        # The end of the peer is left to `send`, which raises the reason.
        out = self._out
        if (
            self._closed_reason is not None
            or out.dead_at <= trio.current_time()
            or out.queued_bytes >= PIPE_LIMIT_BYTES
        ):
            return False
        message = self._join(parts)
        try:
            self._put(message)
        except ConnectionFailed:
            return False
        return True

    async def receive(self) -> Bytes:
        """See `Transport.receive`."""
        pipe = self._back
        while True:
            if self._closed_reason is not None:
                raise ConnectionFailed(self._closed_reason)
            due = self._next_event_at(pipe)
            if due > trio.current_time():
                # No task delivers messages: a virtual clock jumps to the next arrival by this deadline.
                pipe.arrival = Alarm(due)
                await pipe.arrival.wait(pipe.changed)
            elif pipe.queue:
                return self._take(pipe)
            else:
                raise ConnectionFailed("the peer closed the connection", by_peer=True)

    async def aclose(self) -> None:
        """See `Transport.aclose`: sent messages are still delivered."""
        # As a message of its own: the end arrives after everything sent before.
        self._out.ended_at = min(self._out.ended_at, self._arrival())
        self._out.changed.unpark_all()
        with trio.move_on_after(CLOSE_S):
            while self._closed_reason is None and self._next_event_at(self._back) > trio.current_time():
                self._back.arrival = Alarm(self._next_event_at(self._back))
                await self._back.arrival.wait(self._back.changed)
        self.abort()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """See `Transport.abort`: the peer still receives messages in flight."""
        self._closed_reason = self._closed_reason or "the connection was closed here"
        self._out.ended_at = min(self._out.ended_at, self._arrival())
        # The peer may still send until it learns of this end; such messages are lost, as in a socket's buffer.
        self._back.dead_at = min(self._back.dead_at, self._arrival())
        self._back.clear()
        self._network.forget(self)
        self.wake()

    def break_off(self) -> None:
        """Lose the connection at this end, with all messages in flight to it."""
        self._closed_reason = self._closed_reason or "the connection was lost"
        # Only what is in flight to this end; `drop` calls this at both ends.
        self._back.clear()
        self._network.forget(self)
        self.wake()

    @property
    def hosts(self) -> tuple[str, str]:
        """Names of this host and of the peer's."""
        return self._out.source, self._out.target

    def touches(self, a: str, b: str | None) -> bool:
        """Return whether this connection joins host ``a`` with ``b`` (None: with any)."""
        ends = {self._out.source, self._out.target}
        return a in ends and (b is None or ends == {a, b})

    def wake(self) -> None:
        """Wake waiting tasks, after a change of the network."""
        self._out.changed.unpark_all()
        self._back.changed.unpark_all()

    def _next_event_at(self, pipe: _Pipe) -> float:
        """Return the time at which there is a message to receive, or the end."""
        if self._network.holds(pipe.source, pipe.target):
            return NEVER
        return pipe.queue[0][0] if pipe.queue else pipe.ended_at

    def _take(self, pipe: _Pipe) -> bytes:
        message = pipe.queue.popleft()[1]
        pipe.queued_bytes -= len(message)
        if pipe.changed:
            pipe.changed.unpark_all()
        # When it is received, not when it arrives: transcripts show what the receiver has seen.
        self._network.on_delivery(pipe.source, pipe.target, self.number, message)
        return message

    def _join(self, parts: Sequence[Bytes]) -> bytes:
        message = b"".join(parts)
        if len(message) > TRANSPORT_LIMIT_BYTES:
            raise too_large(len(message))
        return message

    def _may_send(self) -> bool:
        """Return whether `_put` can decide at once (also that the connection is lost)."""
        out = self._out
        # True also for a lost connection, so that `_put` raises its reason and `send` does not wait for it.
        return (
            self._closed_reason is not None or out.dead_at <= trio.current_time() or out.queued_bytes < PIPE_LIMIT_BYTES
        )

    def _arrival(self) -> float:
        delay_s = self._network.delay_s(self._out.source, self._out.target)
        # Never before an earlier message: random delays must not change the order of one connection.
        return max(self._out.last_arrival, trio.current_time() + delay_s)

    def _put(self, message: bytes) -> None:
        pipe = self._out
        if self._closed_reason is not None:
            raise ConnectionFailed(self._closed_reason)
        # In a partition the sender cannot learn of the end, so its message vanishes without an error.
        if pipe.dead_at != NEVER and (
            pipe.dead_at <= trio.current_time() and not self._network.holds(pipe.target, pipe.source)
        ):
            raise ConnectionFailed("the peer closed the connection", by_peer=True)
        pipe.sent += 1
        fault, hook = MessageFault.DELIVER, self._network.on_message_sent
        if hook is not None:
            fault = hook(InFlightMessage(pipe.source, pipe.target, self.number, pipe.sent, len(message)))
        # After the receiver's end messages are lost, even before the sender has learned of it.
        if fault is not MessageFault.LOSE and pipe.dead_at == NEVER:
            pipe.last_arrival = self._arrival()
            pipe.queue.append((pipe.last_arrival, message))
            pipe.queued_bytes += len(message)
            if len(pipe.queue) == 1:
                self._announce_arrival()
        if fault is not MessageFault.DELIVER:
            # The sender gets the same error whether the message arrives or not, as on a wire: it must conclude nothing
            # from it.
            self.abort()
            raise ConnectionFailed("the connection was lost")

    def _announce_arrival(self) -> None:
        """Let the receiver wait until the arrival of the only message: to wake it up twice for each one is slow."""
        pipe = self._out
        if pipe.last_arrival <= trio.current_time():
            pipe.changed.unpark_all()
        elif pipe.arrival is not None and not self._network.holds(pipe.source, pipe.target):
            pipe.arrival.deadline = min(pipe.arrival.deadline, pipe.last_arrival)


def too_large(size_bytes: int) -> MessageTooLarge:
    """Return the error of both memory and WebSocket transports."""
    return MessageTooLarge(
        f"a transport message of {size_bytes} bytes is over the limit of {TRANSPORT_LIMIT_BYTES}",
        size_bytes=size_bytes,
        limit_bytes=TRANSPORT_LIMIT_BYTES,
    )


class MemoryNetwork:
    """All hosts of one simulated network, seen from host ``""``; see `at`.

    Args:
        rng: generator of delays and nonces.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.on_message_sent: Callable[[InFlightMessage], MessageFault] | None = None
        """Fault hook, called for each message as it is sent. Default: each is delivered."""
        self.on_delivery: Callable[[str, str, int, bytes], None] = lambda source, target, connection, message: None
        """Called with each message as it is received: hosts, number of the connection, content."""
        self._listeners: dict[str, AuthenticatedListener] = {}
        self._living: dict[tuple[int, str], MemoryTransport] = {}
        self._delays: dict[tuple[str, str], tuple[float, float]] = {}
        self._cut: set[tuple[str, str]] = set()
        self._suspended: set[str] = set()
        self._frozen: set[str] = set()
        self._rejected: set[tuple[str, str]] = set()
        self._changed = trio.lowlevel.ParkingLot()
        self._connections = 0

    def __repr__(self) -> str:
        return f"<MemoryNetwork: {len(self._listeners)} listeners, {len(self._living) // 2} connections>"

    def at(self, host: str) -> MemoryHost:
        """Return the network as seen from ``host``."""
        return MemoryHost(self, host)

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        """See `Network.dial`; from host ``""``."""
        return await self.at("").dial(address, credential, timeout_s=timeout_s)

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `Network.listen`."""
        if address in self._listeners:
            raise InvalidRequest(f"{address} is already in use by another listener")
        async with trio.open_nursery() as nursery:
            self._listeners[address] = listener = AuthenticatedListener(
                auth.Authenticator(authorize, self.rng), handler, nursery
            )
            try:
                task_status.started(address)
                await trio.sleep_forever()
            finally:
                # After a crash of the host, a new process may listen on the address already.
                if self._listeners.get(address) is listener:
                    del self._listeners[address]

    # Hooks

    def set_delay(self, a: str, b: str, low_s: float, high_s: float | None = None, *, both: bool = True) -> None:
        """Delay messages from ``a`` to ``b`` by ``low_s`` to ``high_s`` seconds."""
        for pair in ((a, b), (b, a)) if both else ((a, b),):
            self._delays[pair] = (low_s, low_s if high_s is None else high_s)

    def delay_s(self, a: str, b: str) -> float:
        """Return the delay of the next message."""
        low_s, high_s = self._delays.get((a, b), (0.0, 0.0))
        # No random number for a fixed delay, so that setting one does not shift the numbers of everything else.
        return low_s if low_s == high_s else self.rng.uniform(low_s, high_s)

    def machine_of(self, host: str) -> str:
        """Return the machine of a host: here each is one of its own."""
        return host

    def suspend(self, machine: str) -> None:
        """Let no listener there answer a handshake until `resume`, as if its processes had got SIGSTOP."""
        self._suspended.add(machine)

    def resume(self, machine: str) -> None:
        """End `suspend`."""
        self._suspended.discard(machine)
        self._changed.unpark_all()

    def cut(self, a: str, b: str, *, both: bool = True) -> None:
        """Separate two hosts: no message from ``a`` reaches ``b`` until `heal`; connections stay, dials time out."""
        self._cut.update({(a, b), (b, a)} if both else {(a, b)})

    def heal(self, a: str, b: str) -> None:
        """End a `cut`: delayed messages arrive."""
        self._cut.difference_update({(a, b), (b, a)})
        # Waiting tasks have no deadline while messages are held, so they have to look again.
        self._wake()

    def reject(self, a: str, b: str) -> None:
        """Answer everything between two hosts with resets, like a firewall, until `accept`."""
        self._rejected.update({(a, b), (b, a)})
        self.drop(a, b)

    def accept(self, a: str, b: str) -> None:
        """End a `reject`."""
        self._rejected.difference_update({(a, b), (b, a)})

    def freeze(self, host: str) -> None:
        """Stop a host like SIGSTOP: it sends and receives nothing until `thaw`; dials to it are not answered."""
        # Tasks of the host continue to run: only its network stops, which is all that its peers can see.
        self._frozen.add(host)

    def thaw(self, host: str) -> None:
        """End a `freeze`."""
        self._frozen.discard(host)
        self._wake()

    def drop(self, a: str, b: str | None = None) -> int:
        """Lose all connections between ``a`` and ``b`` (None: of ``a``) and messages in flight; return their number."""
        affected = [transport for transport in self._living.values() if transport.touches(a, b)]
        for transport in affected:
            transport.break_off()
        return len({transport.number for transport in affected})

    def crash(self, host: str) -> None:
        """Kill a host like SIGKILL: its listeners are gone (dials are refused) and its connections are lost."""
        # From now on dials are refused, which proves to a peer that the process has ended.
        for address in [address for address in self._listeners if host_of(address) == host]:
            del self._listeners[address]
        self.drop(host)

    def holds(self, a: str, b: str) -> bool:
        """Return whether no message from ``a`` reaches ``b`` now."""
        return (a, b) in self._cut or a in self._frozen or b in self._frozen

    # Connecting

    async def connect(self, source: str, address: str, credential: Credential | None) -> MemoryTransport:
        """Dial from ``source``, without a time-out."""
        host = host_of(address)
        if (source, host) in self._rejected:
            raise Refused(f"connection refused: nothing is listening on {address}", address=address)
        # Request and answer, so that both directions of a partition and of a delay take part in dialing.
        await self._wait_handshake_message(source, host)
        while self.machine_of(host) in self._suspended:
            await self._changed.park()
        listener = self._listeners.get(address)
        await self._wait_handshake_message(host, source)
        # Compared again: the host may have crashed, or been replaced by another process, during the handshake.
        if listener is None or self._listeners.get(address) is not listener:
            raise Refused(f"connection refused: nothing is listening on {address}", address=address, proves_end=True)
        key_id, key = (credential.key_id, credential.key) if credential else ("", "")
        challenge = listener.authenticator.challenge({address}, remote=f"memory:{source}")
        proof = auth.DialerProof(key_id, key, (address,))
        request = proof.answer(challenge.nonce, self.rng) if credential else auth.AuthRequest()
        response = challenge.authenticate(request)
        if isinstance(response, auth.Rejection):
            raise Unauthorized(
                f"{address} does not accept the key {key_id!r}: check the token", address=address, key_refused=True
            )
        if credential is not None:
            proof.verify(response)
        return self._join(source, host, address, key_id, listener)

    def _join(
        self, source: str, host: str, address: str, key_id: str, listener: AuthenticatedListener
    ) -> MemoryTransport:
        self._connections += 1
        there, back = _Pipe(source, host), _Pipe(host, source)
        dialer_end = MemoryTransport(self, self._connections, PeerIdentity(key_id, address), there, back)
        listener_end = MemoryTransport(self, self._connections, PeerIdentity(key_id, f"memory:{source}"), back, there)
        self._living[self._connections, "dialer"] = dialer_end
        self._living[self._connections, "listener"] = listener_end
        listener.begin(listener_end)
        return dialer_end

    async def _wait_handshake_message(self, a: str, b: str) -> None:
        """Wait for one message of the handshake from ``a`` to ``b``."""
        await trio.sleep(self.delay_s(a, b))
        # A partition stops a handshake until it is healed, or until the dialer's time-out.
        while self.holds(a, b):
            await self._changed.park()

    def forget(self, transport: MemoryTransport) -> None:
        """Remove a closed connection."""
        # By identity: both ends have the same number, and either may be removed first.
        for side in ("dialer", "listener"):
            if self._living.get((transport.number, side)) is transport:
                del self._living[transport.number, side]

    def _wake(self) -> None:
        self._changed.unpark_all()
        for transport in list(self._living.values()):
            transport.wake()


@frozen
class MemoryHost:
    """A `Network` as seen from one host."""

    network: MemoryNetwork
    host: str

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        """See `Network.dial`."""
        if not address.startswith("memory:"):
            raise Unreachable(f"{address} is not an address of this network", address=address)
        with trio.move_on_after(timeout_s):
            return await self.network.connect(self.host, address, credential)
        raise Unreachable(f"no answer from {address} within {timeout_s} s", address=address)

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `Network.listen`; the address should belong to this host."""
        await self.network.listen(address, authorize, handler, task_status=task_status)


def host_of(address: str) -> str:
    """Return the host of ``memory:HOST/PORT``."""
    return address.removeprefix("memory:").split("/", 1)[0]


def is_memory(address: str) -> bool:
    """Return whether it is an address within this process."""
    return address.startswith("memory:")
