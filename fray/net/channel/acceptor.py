"""Listening end of channels: finds or creates the session of each connection, and keeps it for a while without one."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import trio
from attrs import define, field

from fray.errors import ChannelClosed, ConnectionFailed, FrayError, ProtocolMismatch, Unreachable, Unsupported
from fray.model.ids import mint
from fray.model.messages.client import ProcessMark
from fray.model.messages.session import Hello, Refuse, Welcome
from fray.net import codec
from fray.net.channel.channel import Channel, HandlerFactory
from fray.net.channel.connection import Connection
from fray.net.channel.session import (
    PROTOCOL,
    WAITING_HEARTBEAT_S,
    WAITING_PINGS_PER_S,
    HelloDecision,
    SessionRecord,
    decide_hello,
)
from fray.net.channel.versions import explain_unsupported, own_fields, release_of
from fray.net.codec import ACK, Bytes, Kind
from fray.net.limited_log import LimitedLog
from fray.net.own_address import ip_of
from fray.net.process_identity import wait_process_exited
from fray.net.transport import PeerIdentity, Transport

logger = logging.getLogger("fray.net")

HELLO_S = 10.0
"""Longest wait for the hello of a new connection."""
REFUSE_S = 1.0

OnGreeting: TypeAlias = Callable[[PeerIdentity, bytes], tuple[bytes, HandlerFactory]]
"""Callback for an unknown session, called with the dialer's identity and greeting: returns the listener's greeting and
the factory of the handler. Raises `FrayError` to refuse."""


@define
class _Session:
    """One session: its channel and the state needed for a redial."""

    record: SessionRecord
    channel: Channel
    greeting: bytes
    connection: Connection
    process: ProcessMark | None
    """Process at the other end, if the session ends with it."""
    changed: trio.Event = field(factory=trio.Event)
    """Set when ``connection`` changes or the channel ends."""


class Acceptor:
    """Sessions of one listening process. Pass `handle` to `Network.listen`; several listeners may share one acceptor.

    Args:
        incarnation: incarnation of this process; a hello that expects another one is refused with `ActorDied`.
        on_greeting: see `OnGreeting`.
        keep_s: seconds for which a session without a connection is kept before its channel ends as `Unreachable`.
        ends_with_process: end a session at once when its peer was a process of this machine that has ended.
        is_closed: while it returns True every connection is dropped, also of known sessions; they may retry.
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
        self._sessions: dict[str, _Session] = {}
        self._channels: dict[str, Channel] = {}
        self.refusals = LimitedLog(logger, logging.WARNING)
        """Log of refusals; its `run` may be run by the owner of this acceptor."""

    def __repr__(self) -> str:
        return f"<Acceptor {self.incarnation}: {len(self._channels)} channels>"

    @property
    def channels(self) -> Mapping[str, Channel]:
        """Open channels by session."""
        return MappingProxyType(self._channels)

    async def handle(self, transport: Transport) -> None:
        """Serve one connection, then wait up to ``keep_s`` for the session's next one.

        When it is cancelled (the listener stops), the channel ends; the peer sees a lost connection, no goodbye.
        """
        try:
            hello, greeting = await self._read_hello(transport)
            session = self._admit(transport, hello, greeting)
        except FrayError as error:
            await self._refuse(transport, error)
            return
        if session is not None:
            await self._serve(session, session.connection)

    async def close(self, reason: str) -> None:
        """Close every channel in order; takes at most 2 s."""
        async with trio.open_nursery() as nursery:
            for channel in list(self._channels.values()):
                nursery.start_soon(channel.close, reason)

    def drop_connections(self, is_meant: Callable[[Channel], bool], reason: str) -> None:
        """Drop the present connections of some channels. A dialer whose key still counts continues on another one."""
        for session in list(self._sessions.values()):
            if session.channel.connected and is_meant(session.channel):
                session.connection.drop(ConnectionFailed(reason))

    async def _read_hello(self, transport: Transport) -> tuple[Hello, bytes]:
        with trio.move_on_after(HELLO_S):
            return parse_hello(await transport.receive())
        raise Unreachable(f"the dialer sent no hello within {HELLO_S} s")

    # Deciding (plain functions: the state cannot change between the decision and the welcome)

    def _admit(self, transport: Transport, hello: Hello, greeting: bytes) -> _Session | None:
        # Also for known sessions: a host of actors is closed while its lease is in doubt. `_refuse` sends nothing for
        # this error, so the dialer tries again.
        if self._is_closed():
            raise Unreachable("not accepting connections; retry later")
        session = self._sessions.get(hello.session)
        if session is not None:
            # Any frame of the dialer on the last connection proves that it has read the welcome.
            session.record.confirmed = session.record.confirmed or session.connection.received_any
        decision = decide_hello(hello, transport.peer.key_id, session.record if session else None, self.incarnation)
        if decision is HelloDecision.STALE:
            return None
        if session is None or decision is HelloDecision.FRESH:
            if session is not None:
                reason = "its peer restarted"
                # Ended first: its handler gets `on_end` before the new one is made, so that one session never has two.
                session.channel.end(ChannelClosed(reason, reason=reason))
            return self._start_session(transport, hello, greeting)
        return self._continue_session(session, transport, hello, resumed=decision is HelloDecision.RESUME)

    def _start_session(self, transport: Transport, hello: Hello, greeting: bytes) -> _Session:
        # First, since it may refuse: nothing has been created then.
        answer, make_handler = self._answer_greeting(transport.peer, hello, greeting)
        channel = Channel(
            session=hello.session,
            incarnation=hello.incarnation,
            remote=transport.peer.remote,
            key_id=transport.peer.key_id,
        )
        channel.peer_release = release_of(hello)
        channel.begin(make_handler(channel))
        record = SessionRecord(
            key_id=transport.peer.key_id,
            incarnation=hello.incarnation,
            instance=mint(self._rng),
            dial=hello.dial,
            outbox=channel.outbox,
        )
        connection = Connection(channel, transport, opening=self._welcome(channel, record.instance, False, 0, answer))
        process = transport.peer.process if self._ends_with_process else None
        session = _Session(record, channel, answer, connection, process)
        self._sessions[hello.session] = session
        self._channels[hello.session] = channel
        channel.on_ended = lambda: self._forget(session)
        # Last: `on_reset` may send, or end the channel, which removes the session.
        channel.attach(connection, greeting)
        return session

    def _answer_greeting(self, peer: PeerIdentity, hello: Hello, greeting: bytes) -> tuple[bytes, HandlerFactory]:
        try:
            answer, make_handler = self._on_greeting(peer, greeting)
            # The welcome is one frame: the dialer waits for a single message and reassembles no fragments.
            codec.check_size(len(answer), "the listener's greeting", codec.FRAGMENT_BYTES)
            return answer, make_handler
        except Unsupported as error:
            raise explain_unsupported(error, release_of(hello)) from None
        except FrayError:
            raise
        except Exception as error:
            # A bug in the callback must not end the listener; the dialer gets its text.
            logger.exception("greeting of %s failed", peer)
            raise FrayError(f"the listener failed to answer the greeting: {error!r}") from error

    def _continue_session(self, session: _Session, transport: Transport, hello: Hello, *, resumed: bool) -> _Session:
        channel = session.channel
        session.record.dial = hello.dial
        channel.remote = transport.peer.remote
        welcome = self._welcome(channel, session.record.instance, resumed, channel.inbox.received, session.greeting)
        connection = Connection(channel, transport, opening=welcome)
        old = session.connection
        # A connection whose peer has lost power or its route seems alive until the heartbeat ends it, up to 60 s. The
        # new dial proves that its dialer has given it up.
        if channel.owns(old):
            channel.supersede(old)
        # An instance that is offered again starts at zero: the dialer has read none of its frames.
        channel.outbox.rewind(hello.received if resumed else 0)
        changed, session.connection, session.changed = session.changed, connection, trio.Event()
        # Ends the task of the old connection, which may be waiting for this one.
        changed.set()
        # Without a greeting also for an offered instance: this end has lost nothing, so its handler is not reset.
        channel.attach(connection, None)
        return session

    def _welcome(self, channel: Channel, instance: str, resumed: bool, received: int, greeting: bytes) -> bytes:
        # The dialer pings, since only it can dial again. The more dialers there are, the less often: 5,000 of them
        # would cost a third of a core.
        waiting_s = max(WAITING_HEARTBEAT_S, len(self._channels) / WAITING_PINGS_PER_S)
        welcome = Welcome(
            protocol=PROTOCOL,
            incarnation=self.incarnation,
            instance=instance,
            resumed=resumed,
            received=received,
            heartbeat_s=min(channel.heartbeat_s, waiting_s),
            seen_from=ip_of(channel.remote),
            **own_fields(),
        )
        return ACK.pack(0) + codec.encode_frame(Kind.WELCOME, 0, codec.encode_message(welcome, [greeting]))

    def _forget(self, session: _Session) -> None:
        name = session.channel.session
        # A restarted dialer may have a new session of the same name already.
        if self._sessions.get(name) is session:
            del self._sessions[name]
            del self._channels[name]
        session.changed.set()

    # Acting

    async def _serve(self, session: _Session, connection: Connection) -> None:
        # The event of this connection: the next connection of the session has another one.
        changed = session.changed
        try:
            await connection.run()
            if session.connection is connection:
                session.channel.suspend(connection)
                why = await self._wait_redial(session, changed)
                if why is not None:
                    session.channel.end(Unreachable(why))
        finally:
            # Only if this task was cancelled, since the listener stops. Otherwise the event is set, or the connection
            # replaced.
            if session.connection is connection and not changed.is_set():
                session.channel.end(ChannelClosed("the listener stopped", reason="stopped"))

    async def _wait_redial(self, session: _Session, changed: trio.Event) -> str | None:
        """Wait for the session's next connection and return None, or return the reason why there will be none."""
        gone = ""
        async with trio.open_nursery() as nursery:

            async def wait_for_exit(process: ProcessMark) -> None:
                nonlocal gone
                await wait_process_exited(process)
                gone = f"the peer's process {process.pid} has ended"
                nursery.cancel_scope.cancel()

            # The death of a process of this machine is certain, so its session needs no grace period.
            if session.process is not None:
                nursery.start_soon(wait_for_exit, session.process)
            with trio.move_on_after(self._keep_s):
                await changed.wait()
            nursery.cancel_scope.cancel()
        if changed.is_set():
            return None
        return gone or f"the peer did not reconnect within {self._keep_s} s"

    async def _refuse(self, transport: Transport, error: FrayError) -> None:
        # A refusal is final for the dialer, and these errors concern this connection only: it is dropped, and dialed
        # again.
        if type(error) in (ConnectionFailed, ChannelClosed, Unreachable):
            return
        self.refusals.write("refused %s: %s", transport.peer.remote, error)
        refuse = Refuse(
            protocol=PROTOCOL, incarnation=self.incarnation, error=codec.error_to_dict(error), **own_fields()
        )
        # A dialer that does not read must not keep this task and its descriptor.
        with trio.move_on_after(REFUSE_S):
            try:
                await transport.send([ACK.pack(0), codec.encode_frame(Kind.REFUSE, 0, codec.encode_message(refuse))])
                await transport.aclose()
            except ConnectionFailed as lost:
                logger.info("%s disconnected before the refusal was sent: %s", transport.peer.remote, lost)


def parse_hello(message: Bytes) -> tuple[Hello, bytes]:
    """Return the hello and the greeting in the first message of a dialer.

    Raises:
        ProtocolMismatch: any other message.
    """
    codec.read_ack(message)
    frames = [(kind, body) for kind, _, _, _, body in codec.read_frames(message)]
    if len(frames) != 1 or frames[0][0] != Kind.HELLO:
        raise ProtocolMismatch("the first message of a dialer must be a hello")
    hello, blobs = codec.decode_message(frames[0][1])
    if not isinstance(hello, Hello) or len(blobs) != 1:
        raise ProtocolMismatch("the first message of a dialer must be a hello with its greeting")
    return hello, bytes(blobs[0])
