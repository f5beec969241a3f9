"""The conversation with one driver, job or tool: its session, its requests, and the news it is told.

Who answers which request is in `fray.controller.connections.client_requests`; what waits to be told in
`fray.controller.connections.client_updates`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from fray.controller.connections.client_logs import ClientLogs, NodeConnections
from fray.controller.connections.client_requests import HANDLERS, follow_jobs
from fray.controller.connections.client_updates import ClientUpdates
from fray.controller.connections.relay import open_relay, open_way_to_port
from fray.controller.connections.session_errors import session_ended
from fray.controller.connections.subscriptions import SubscriptionIndex
from fray.controller.connections.validation import heartbeat_s, is_goodbye
from fray.controller.context import ControllerContext
from fray.controller.process_watch import ProcessWatch
from fray.errors import ChannelClosed, ChannelFull, ConnectionFailed, FrayError, ProtocolMismatch, SessionEnded
from fray.model.ids import JobId, Namespace, NodeName
from fray.model.messages import client as words
from fray.model.messages.client import ClientHello, Role
from fray.model.messages.tunnels import OpenTunnel
from fray.net.channel.public import Channel
from fray.net.codec import Kind, decode_message
from fray.net.transport import Bytes
from fray.net.tunnels.multiplexer import TunnelEndpoint, TunnelFlow, TunnelMultiplexer
from fray.scheduler.effects import SessionClosed, SessionLost, SessionOpened


class ConnectionHub(NodeConnections, Protocol):
    """What a link tells those who made it."""

    def client_gone(self, link: ClientConnection) -> None:
        """Its channel has ended."""

    def ask_stacks(self, link: ClientConnection, ref: int, job_id: JobId) -> None:
        """Look into a job and answer later. Raises NoSuchJob, ChannelFull."""

    def carrier_of(self, incarnation: str) -> TunnelMultiplexer | None:
        """What carries tunnels to this process; None without a conversation."""

    def declared_secrets(self) -> set[str] | None:
        """Names of the secrets that any node knows; None while there is no node."""

    def secrets_moved(self) -> None:
        """A driver has brought some of its secrets again."""

    def carrier_to_node(self, node: NodeName) -> TunnelMultiplexer | None:
        """What carries tunnels to ports of jobs on this node; None without a conversation."""

    def start_soon(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task that may outlive the conversation."""


class ClientConnection:
    """Handler of one client's channel.

    Its life: made at the greeting, `on_reset` opens the session, suspensions and resumptions are told to the law, and
    `on_end` ends it. A goodbye closes the session, and so does proof that the process is dead.
    """

    def __init__(
        self,
        house: ControllerContext,
        audience: SubscriptionIndex[ClientConnection],
        front: ConnectionHub,
        hello: ClientHello,
        namespace: Namespace,
        channel: Channel,
        witness: ProcessWatch | None,
    ) -> None:
        self.hello = hello
        self.session = hello.session
        self.namespace = namespace
        self.channel = channel
        self.witness = witness
        self.superseded = False
        """A later channel speaks for this session."""
        self.carrier = TunnelMultiplexer(channel, dialled=False, on_open=self._open_tunnel)
        self.house = house
        self.audience = audience
        self.front = front
        self.logs = ClientLogs(house, front, hello.session)
        self.news = ClientUpdates(house, self.logs)
        self._grace_s = house.state.rules.driver_grace_s if hello.grace_s is None else hello.grace_s
        if hello.role is Role.DRIVER:
            channel.heartbeat_s = heartbeat_s(self._grace_s)
        self.has_left = hello.leaving
        """It has said goodbye itself."""
        self._finish: str | None = None
        self._lost = False

    def __repr__(self) -> str:
        return f"<ClientConnection {self.hello.role} {self.session} in {self.namespace!r}: {self.news!r}>"

    # The channel's handler

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if kind == Kind.REQUEST:
            self._request(ref, body)
        elif self.carrier.on_frame(kind, flags, target, ref, body):
            pass
        elif kind == Kind.NOTICE:
            message, _ = decode_message(body)
            if isinstance(message, words.Unwatch):
                self.audience.of_name.drop(message.key, self)

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        self._open()

    def on_suspended(self, why: str) -> None:
        if self.witness is not None and self.witness.dead():
            self.died("its process is gone")
        else:
            self._lose()

    def on_resumed(self) -> None:
        self._open()

    def on_end(self, error: FrayError) -> None:
        self.carrier.on_lost(ConnectionFailed(f"{self.session} has left the relay: {error}"))
        self.audience.leave(self)
        self.front.client_gone(self)
        self.news.wake()
        if self.superseded or self._finish is not None:
            return
        if is_goodbye(error):
            self._tell(SessionClosed(session=self.session, reason=error.details["reason"] or "goodbye"))
        else:
            self._lose()

    def _open_tunnel(self, lane: TunnelFlow, message: OpenTunnel, greeting: Bytes, window_bytes: int) -> TunnelEndpoint:
        state, carrier_of = self.house.state, self.front.carrier_of
        if message.port:
            to_node = self.front.carrier_to_node
            return open_way_to_port(state, to_node, self.session, lane, message, greeting, window_bytes)
        return open_relay(state, carrier_of, self.session, lane, message, greeting, window_bytes)

    def _open(self) -> None:
        hello = self.hello
        self._lost = False
        self._tell(
            SessionOpened(
                session=self.session,
                role=hello.role,
                namespace=self.namespace,
                grace_s=self._grace_s,
                attempt_id=hello.attempt_id,
                user=hello.user,
                process=hello.process if self.witness is not None else None,
            )
        )

    def _lose(self) -> None:
        if not self._lost and not self.superseded:
            self._lost = True
            self._tell(SessionLost(session=self.session))

    def died(self, reason: str) -> None:
        """Its process is proven dead: nobody will come back for what it owns."""
        if not self.superseded:
            self._lost = True
            self._tell(SessionClosed(session=self.session, reason=reason))

    def _tell(self, event: SessionOpened | SessionLost | SessionClosed) -> None:
        self.house.inbox.tell(event)

    # Requests

    def _request(self, ref: int, body: Bytes) -> None:
        try:
            message, blobs = decode_message(body)
            answer = HANDLERS.get(type(message))
            if answer is None:
                raise ProtocolMismatch(f"{type(message).__name__} is nothing to ask a controller")
            reply = answer(self, ref, message, blobs)
            if reply is not None:
                self.reply(ref, *reply)
        except FrayError as error:
            self.refuse(ref, error)

    def reply(self, ref: int, message: object, blobs: Sequence[Bytes] = ()) -> None:
        self._send(lambda: self.channel.reply(ref, message, blobs))

    def refuse(self, ref: int, error: FrayError) -> None:
        self._send(lambda: self.channel.fail(ref, error))

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
        except ChannelClosed:
            pass  # `on_end` has been told
        except ChannelFull as error:
            self.channel.end(error)  # without a word: it dials again, and asks again for what it still wants

    def law_answers(self, ref: int, message: object) -> None:
        """The law's reply to a request of this session; it follows what it has launched."""
        if not isinstance(message, words.Jobs):
            self.reply(ref, message)
            return
        try:
            reply, blobs = follow_jobs(self, message.jobs)
        except FrayError as error:
            self.refuse(ref, error)
        else:
            self.reply(ref, reply, blobs)

    # The end, and what is told until then

    def finish(self, reason: str) -> None:
        """Send the news that wait, then close the channel. A driver that did not ask for it is told what has ended, and
        not what that means for each of its jobs."""
        self._finish = self._finish or reason
        if not self.has_left and self.hello.role is not Role.JOB:
            self.news.forget()
        self.news.wake()

    def _parting(self) -> SessionEnded | None:
        """What it is told at the end, where that is not its own doing."""
        known = self.house.state.sessions.get(self.session)
        if self.has_left or self.hello.role is Role.JOB or known is None or not known.over:
            return None
        return session_ended(self.house.state, known, self.house.inbox.time())

    async def run(self) -> None:
        """Send news as there is room, until the channel has ended."""
        try:
            while self.channel.error is None:
                await self.news.wait()
                while self.channel.error is None and self.news:
                    await self.channel.wait_room(*self.news.room_bytes)
                    self._send(lambda: self.news.tell_one(self.channel))
                if self._finish is not None:
                    await self.channel.close(self._finish, self._parting())
        except ChannelClosed:
            pass  # `on_end` has been told
