"""The listening end of channels: finds or makes the session of each connection, and keeps it a while without one."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import trio
from attrs import define, field

from fray.errors import ChannelClosed, ConnectionFailed, FrayError, ProtocolMismatch, Unreachable
from fray.model.ids import mint
from fray.model.messages.client import ProcessMark
from fray.model.messages.session import Hello, Refuse, Welcome
from fray.net import codec
from fray.net.channel.channel import Channel, HandlerFactory
from fray.net.channel.connection import Connection
from fray.net.channel.session import (
    PROTOCOL,
    HelloDecision,
    SessionRecord,
    decide_hello,
)
from fray.net.codec import ACK, Bytes, Kind
from fray.net.process_identity import wait_process_exited
from fray.net.transport import PeerIdentity, Transport

logger = logging.getLogger("fray.net")

HELLO_S = 10.0
"""How long a new connection may take to say hello."""
REFUSE_S = 1.0

OnGreeting: TypeAlias = Callable[[PeerIdentity, bytes], tuple[bytes, HandlerFactory]]
"""Called for a session we do not know, with the dialer's greeting: returns ours, and what makes the handler.
Raises `FrayError` to refuse."""


@define
class _Session:
    """One session here: its channel and what is remembered for a redial."""

    seat: SessionRecord
    channel: Channel
    greeting: bytes
    link: Connection
    process: ProcessMark | None
    """The process at the other end, if its end shall be the session's."""
    moved: trio.Event = field(factory=trio.Event)
    """Set when ``link`` changes or the channel ends."""


class Acceptor:
    """Sessions of one listening process. Pass `handle` to `Network.listen`; several listeners may share one acceptor.

    Args:
        incarnation: of this process; a hello that expects another one is refused with `ActorDied`.
        on_greeting: see `OnGreeting`.
        keep_s: how long a session without a connection is kept before its channel ends as `Unreachable`.
        ends_with_process: a session whose peer was a process of this machine, and is gone, ends at once.
        is_closed: while it says so nobody is let in, who was here before neither; they may try again.
    """

    def __init__(
        self,
        incarnation: str,
        on_greeting: OnGreeting,
        *,
        keep_s: float = 60.0,
        ends_with_process: bool = False,
        is_closed: Callable[[], bool] = lambda: False,
        rng: random.Random,
    ) -> None:
        self.incarnation = incarnation
        self._on_greeting = on_greeting
        self._is_closed = is_closed
        self._keep_s, self._ends_with_process = keep_s, ends_with_process
        self._rng = rng
        self._places: dict[str, _Session] = {}
        self._channels: dict[str, Channel] = {}

    def __repr__(self) -> str:
        return f"<Acceptor {self.incarnation}: {len(self._channels)} channels>"

    @property
    def channels(self) -> Mapping[str, Channel]:
        """Living channels by session."""
        return MappingProxyType(self._channels)

    async def handle(self, transport: Transport) -> None:
        """Serve one connection; afterwards wait up to ``keep_s`` for the session's next one.

        When it is cancelled (the listener stops), the channel ends; the peer sees a lost connection, no goodbye.
        """
        try:
            hello, greeting = await self._read_hello(transport)
            place = self._admit(transport, hello, greeting)
        except FrayError as error:
            await self._refuse(transport, error)
            return
        if place is not None:
            await self._serve(place, place.link)

    async def close(self, reason: str) -> None:
        """Say goodbye to every peer; at most 2 s long."""
        async with trio.open_nursery() as nursery:
            for channel in list(self._channels.values()):
                nursery.start_soon(channel.close, reason)

    async def _read_hello(self, transport: Transport) -> tuple[Hello, bytes]:
        with trio.move_on_after(HELLO_S):
            return parse_hello(await transport.receive())
        raise Unreachable(f"the dialer said no hello within {HELLO_S} s")

    # Deciding (plain functions: nothing moves between the verdict and the welcome)

    def _admit(self, transport: Transport, hello: Hello, greeting: bytes) -> _Session | None:
        if self._is_closed():
            raise Unreachable("nobody is let in now: try again")
        place = self._places.get(hello.session)
        if place is not None:
            place.seat.confirmed = place.seat.confirmed or place.link.received_any
        verdict = decide_hello(hello, transport.peer.key_id, place.seat if place else None, self.incarnation)
        if verdict is HelloDecision.STALE:
            return None
        if place is None or verdict is HelloDecision.FRESH:
            if place is not None:
                reason = "its peer restarted"
                place.channel.end(ChannelClosed(reason, reason=reason))
            return self._begin(transport, hello, greeting)
        return self._go_on(place, transport, hello, verdict)

    def _begin(self, transport: Transport, hello: Hello, greeting: bytes) -> _Session:
        answer, make_handler = self._greet(transport.peer, greeting)
        channel = Channel(session=hello.session, incarnation=hello.incarnation, remote=transport.peer.remote)
        channel.begin(make_handler(channel))
        seat = SessionRecord(
            key_id=transport.peer.key_id,
            incarnation=hello.incarnation,
            instance=mint(self._rng),
            dial=hello.dial,
            outbox=channel.outbox,
        )
        link = Connection(channel, transport, opening=self._welcome(seat.instance, False, 0, answer))
        place = _Session(seat, channel, answer, link, transport.peer.process if self._ends_with_process else None)
        self._places[hello.session] = place
        self._channels[hello.session] = channel
        channel.on_ended = lambda: self._leave(place)
        channel.attach(link, greeting)
        return place

    def _greet(self, claim: PeerIdentity, greeting: bytes) -> tuple[bytes, HandlerFactory]:
        try:
            answer, make_handler = self._on_greeting(claim, greeting)
            codec.check_size(len(answer), "the listener's greeting", codec.FRAGMENT_BYTES)
            return answer, make_handler
        except FrayError:
            raise
        except Exception as error:
            logger.exception("greeting of %s failed", claim)
            raise FrayError(f"the listener failed to answer the greeting: {error!r}") from error

    def _go_on(self, place: _Session, transport: Transport, hello: Hello, verdict: HelloDecision) -> _Session:
        resumed = verdict is HelloDecision.RESUME
        channel = place.channel
        place.seat.dial = hello.dial
        welcome = self._welcome(place.seat.instance, resumed, channel.inbox.received, place.greeting)
        link = Connection(channel, transport, opening=welcome)
        old = place.link
        if channel.owns(old):
            channel.supersede(old)
        channel.outbox.rewind(hello.received if resumed else 0)
        moved, place.link, place.moved = place.moved, link, trio.Event()
        moved.set()
        channel.remote = transport.peer.remote
        channel.attach(link, None)
        return place

    def _welcome(self, life: str, resumed: bool, received: int, greeting: bytes) -> bytes:
        welcome = Welcome(
            protocol=PROTOCOL, incarnation=self.incarnation, instance=life, resumed=resumed, received=received
        )
        return ACK.pack(0) + codec.encode_frame(Kind.WELCOME, 0, codec.encode_message(welcome, [greeting]))

    def _leave(self, place: _Session) -> None:
        session = place.channel.session
        if self._places.get(session) is place:
            del self._places[session]
            del self._channels[session]
        place.moved.set()

    # Acting

    async def _serve(self, place: _Session, link: Connection) -> None:
        moved = place.moved
        try:
            await link.run()
            if place.link is link:
                place.channel.suspend(link)
                why = await self._wait_moved(place, moved)
                if why is not None:
                    place.channel.end(Unreachable(why))
        finally:
            if place.link is link and not moved.is_set():
                place.channel.end(ChannelClosed("the listener stopped", reason="stopped"))

    async def _wait_moved(self, place: _Session, moved: trio.Event) -> str | None:
        """Until the session has its next connection; else why it will have none."""
        gone = ""
        async with trio.open_nursery() as nursery:

            async def watch(process: ProcessMark) -> None:
                nonlocal gone
                await wait_process_exited(process)
                gone = f"the peer's process {process.pid} has ended"
                nursery.cancel_scope.cancel()

            if place.process is not None:
                nursery.start_soon(watch, place.process)
            with trio.move_on_after(self._keep_s):
                await moved.wait()
            nursery.cancel_scope.cancel()
        if moved.is_set():
            return None
        return gone or f"the peer did not come back within {self._keep_s} s"

    async def _refuse(self, transport: Transport, error: FrayError) -> None:
        if type(error) in (ConnectionFailed, ChannelClosed, Unreachable):
            return
        logger.warning("refused %s: %s", transport.peer.remote, error)
        refuse = Refuse(protocol=PROTOCOL, incarnation=self.incarnation, error=codec.error_to_dict(error))
        with trio.move_on_after(REFUSE_S):
            try:
                await transport.send([ACK.pack(0), codec.encode_frame(Kind.REFUSE, 0, codec.encode_message(refuse))])
                await transport.aclose()
            except ConnectionFailed as lost:
                logger.info("%s left before it heard the refusal: %s", transport.peer.remote, lost)


def parse_hello(message: Bytes) -> tuple[Hello, bytes]:
    """The hello and the greeting in the first message of a dialer.

    Raises:
        ProtocolMismatch: it is something else.
    """
    codec.read_ack(message)
    frames = [(kind, body) for kind, _, _, _, body in codec.read_frames(message)]
    if len(frames) != 1 or frames[0][0] != Kind.HELLO:
        raise ProtocolMismatch("the first message of a dialer must be a hello")
    hello, blobs = codec.decode_message(frames[0][1])
    if not isinstance(hello, Hello) or len(blobs) != 1:
        raise ProtocolMismatch("the first message of a dialer must be a hello with its greeting")
    return hello, bytes(blobs[0])
