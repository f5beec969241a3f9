"""Connection of one driver, job or tool: its session, its requests and the updates sent to it.

Requests are answered by `fray.controller.connections.client_requests`; what waits to be sent is in
`fray.controller.connections.client_updates`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from attrs import evolve

from fray.controller.connections.access import AccessScope, admit, job_of, scope_for
from fray.controller.connections.client_audit import ClientAudit
from fray.controller.connections.client_logs import ClientLogs, LogFeed
from fray.controller.connections.client_updates import ClientUpdates
from fray.controller.connections.hide_others import hide_others
from fray.controller.connections.hub import ConnectionHub
from fray.controller.connections.relay import (
    of_previous_release,
    open_command_relay,
    open_port_relay,
    open_relay,
)
from fray.controller.connections.session_errors import internal_error, session_ended
from fray.controller.connections.subscriptions import SubscriptionIndex
from fray.controller.connections.validation import heartbeat_s, is_goodbye
from fray.controller.context import ControllerContext
from fray.errors import (
    ChannelClosed,
    ChannelFull,
    ConnectionFailed,
    FrayError,
    InvalidRequest,
    SessionEnded,
    Unsupported,
)
from fray.model.access.roles import Access, Identity, access_of
from fray.model.access.user_keys import USER_KEY
from fray.model.ids import Namespace
from fray.model.messages import client as messages
from fray.model.messages.client import ClientHello, Role
from fray.model.messages.tunnels import OpenTunnel
from fray.model.specs import JobInfo
from fray.net.channel.public import MESSAGE_LIMIT_BYTES, Channel
from fray.net.channel.versions import explain_unsupported
from fray.net.codec import Kind, TextRule, decode_checked, decode_message
from fray.net.process_identity import ProcessWatch
from fray.net.transport import Bytes
from fray.net.tunnels.multiplexer import TunnelEndpoint, TunnelFlow, TunnelMultiplexer
from fray.scheduler.effects import SessionClosed, SessionLost, SessionOpened

Answer: TypeAlias = tuple[object, Sequence[Bytes]] | None
"""A reply with attachments, or None if the reply is sent later."""
RequestHandler: TypeAlias = "Callable[[ClientConnection, int, object, Sequence[Bytes]], Answer]"
"""Called with the connection, the request's number, the message and its attachments. A `FrayError` it raises is sent
back as the reply."""

_log = logging.getLogger("fray.controller.connections.client")

REPLY_LIMIT_BYTES = MESSAGE_LIMIT_BYTES // 2
"""Attachments of one reply; the rest of a message is for the records around them."""


class ClientConnection:
    """Handler of one client's channel.

    Lifecycle: made at the greeting; `on_reset` opens the session; suspensions and resumptions are reported to the
    scheduler; `on_end` ends it. A goodbye closes the session, and so does proof that the process is dead.
    """

    def __init__(
        self,
        context: ControllerContext,
        subscriptions: SubscriptionIndex[ClientConnection],
        log_feed: LogFeed,
        hub: ConnectionHub,
        hello: ClientHello,
        namespace: Namespace,
        channel: Channel,
        process_watch: ProcessWatch | None,
        handle_request: RequestHandler,
        identity: Identity,
    ) -> None:
        self.hello = hello
        self.session = hello.session
        self.namespace = namespace
        self.channel = channel
        self.process_watch = process_watch
        self.superseded = False
        """True after a later channel has taken over this session."""
        self.tunnels = TunnelMultiplexer(channel, dialed=False, on_open=self._open_tunnel)
        self.context = context
        self.subscriptions = subscriptions
        self.hub = hub
        self._handle_request = handle_request
        self._identity = identity
        job, past = job_of(hello.attempt_id), context.store.history.reservation
        self.scope = AccessScope(context.state, context.people, identity, namespace, job, past)
        self.audit = ClientAudit(context, lambda: self._identity, hello.session, namespace, channel)
        self.logs = ClientLogs(context, log_feed, hub, hello.session)
        self.updates = ClientUpdates(
            context, self.logs, lambda: scope_for(self, messages.Watch), hide_others=self._hide_others
        )
        self._grace_s = context.state.config.driver_grace_s if hello.grace_s is None else hello.grace_s
        # Only drivers have a grace period; for a job's process its attempt decides, and tools own nothing.
        if hello.role is Role.DRIVER:
            channel.heartbeat_s = heartbeat_s(self._grace_s)
        self.held_back = 0
        """Requests that wait for a change (`ListJobs.wait_s`)."""
        self.has_left = hello.leaving
        """True if the client itself has asked for the end of its session."""
        self._finish_reason: str | None = None
        self._lost = False

    def __repr__(self) -> str:
        return f"<ClientConnection {self.hello.role} {self.session} in {self.namespace!r}: {self.updates!r}>"

    @property
    def identity(self) -> Identity:
        """Identity that has opened this connection."""
        return self._identity

    def identify(self) -> Identity:
        """Return the identity as it is now.

        Raises:
            Unauthorized: its key has expired or was revoked.
        """
        identity = self._identity
        # Looked up with each request: an expired key, or a role that was taken away, ends nothing else by itself.
        if identity.key_id.startswith(USER_KEY):
            role, user = self.context.people.identify(identity.key_id, self.context.inbox.current_time())
            if (role, user) != (identity.role, identity.user):
                self._identity = evolve(identity, role=role, user=user)
        return self._identity

    # The channel's handler

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if kind == Kind.REQUEST:
            self._request(ref, body)
        elif self.tunnels.on_frame(kind, flags, target, ref, body):
            pass
        elif kind == Kind.NOTICE:
            message, _ = decode_message(body)
            if isinstance(message, messages.Unwatch):
                self.subscriptions.names.drop(message.key, self)

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        self._open_session()

    def on_suspended(self, why: str) -> None:
        # A process that is proven dead cannot come back: what it owns ends at once, without the grace period.
        if self.process_watch is not None and self.process_watch.has_exited():
            self.mark_dead("its process is gone")
        else:
            self._on_lost()

    def on_resumed(self) -> None:
        self._open_session()

    def on_end(self, error: FrayError) -> None:
        self.tunnels.on_lost(ConnectionFailed(f"{self.session} has disconnected from the controller: {error}"))
        self.subscriptions.remove(self)
        self.logs.close()
        self.audit.close()
        self.hub.client_ended(self.session, self.channel)
        if self.process_watch is not None:
            self.process_watch.close()
        # Its sender waits for updates and must see that the channel has ended.
        self.updates.wake()
        # The session lives on in the newer connection, or has been ended by the scheduler itself.
        if self.superseded or self._finish_reason is not None:
            return
        # Any other end of the channel, also one for a reason on this side, is a loss: the client may dial again.
        if is_goodbye(error):
            self._post(SessionClosed(session=self.session, reason=error.details["reason"] or "goodbye"))
        else:
            self._on_lost()

    def _open_tunnel(self, flow: TunnelFlow, message: OpenTunnel, greeting: Bytes, window_bytes: int) -> TunnelEndpoint:
        state = self.context.state
        message = of_previous_release(message)
        asked = message if message.command is None else message.command
        try:
            admit(self, asked)
        except FrayError as error:
            self.audit.record(asked, error)
            raise
        if message.command is not None:
            self.audit.record(message.command)
            nodes, command = self.hub.node_tunnels, message.command
            return open_command_relay(state, nodes, self.session, flow, command, greeting, window_bytes)
        if message.port:
            self.audit.record(message)
            return open_port_relay(state, self.hub.node_tunnels, self.session, flow, message, greeting, window_bytes)
        return open_relay(state, self.hub.client_tunnels, self.session, flow, message, greeting, window_bytes)

    def _open_session(self) -> None:
        hello = self.hello
        self._lost = False
        self._post(
            SessionOpened(
                session=self.session,
                role=hello.role,
                namespace=self.namespace,
                grace_s=self._grace_s,
                attempt_id=hello.attempt_id,
                user=self._identity.user,
                # Only a process that was proven to run on this machine: a pid of another machine or container proves
                # nothing.
                process=hello.process if self.process_watch is not None else None,
            )
        )

    def _on_lost(self) -> None:
        if not self._lost and not self.superseded:
            self._lost = True
            self._post(SessionLost(session=self.session))

    def mark_dead(self, reason: str) -> None:
        """Close the session: its process is proven dead, so it needs no grace period."""
        if not self.superseded:
            # The suspension that follows this must not start a grace period.
            self._lost = True
            self._post(SessionClosed(session=self.session, reason=reason))

    def _post(self, event: SessionOpened | SessionLost | SessionClosed) -> None:
        self.context.inbox.post(event)

    # Requests

    def _request(self, ref: int, body: Bytes) -> None:
        try:
            message, blobs = decode_checked(body, TextRule.REFUSE)
            self.audit.begin(ref, message)
            reply = self._handle_request(self, ref, admit(self, message), blobs)
            if reply is not None:
                self.reply(ref, *reply)
        except Unsupported as error:
            self.refuse(ref, explain_unsupported(error, self.channel.peer_release))
        except FrayError as error:
            self.refuse(ref, error)
        except Exception as error:  # noqa: BLE001 - a defect must not end the controller
            # A defect costs this request; the channel, and with it the session and all its jobs, stays.
            _log.exception("a request of %s failed", self.session)
            self.refuse(ref, internal_error("the controller could not handle this request", error))

    def reply(self, ref: int, message: object, blobs: Sequence[Bytes] = ()) -> None:
        self.audit.end(ref)
        answer = self._hide_others(message)
        self._send(lambda: self.channel.reply(ref, answer, blobs))

    def _hide_others(self, message: Any) -> Any:
        # By the role of the last request: a key that has expired since gets the answer to what was still admitted.
        if access_of(self._identity.role, messages.Explain) is Access.ALL:
            return message
        return hide_others(self.context.state, self.scope, message)

    def refuse(self, ref: int, error: FrayError) -> None:
        self.audit.end(ref, error)
        self._send(lambda: self.channel.fail(ref, error))

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
        except ChannelClosed:
            pass  # `on_end` was called
        except ChannelFull as error:
            # Ended without an error to the client: it reconnects and asks again for what it still wants.
            self.channel.end(error)

    def on_scheduler_reply(self, ref: int, message: object) -> None:
        """Send the scheduler's reply to a request of this session, and follow the jobs that it has launched."""
        # The launcher of a job follows it from this reply on. No change can be missed, since effects are carried out
        # without an await.
        if not isinstance(message, messages.Jobs):
            self.reply(ref, message)
            return
        try:
            reply, blobs = self.follow_jobs(message.jobs)
        except FrayError as error:
            self.refuse(ref, error)
        else:
            self.reply(ref, evolve(reply, warnings=message.warnings), blobs)

    def follow_jobs(self, infos: Sequence[JobInfo]) -> tuple[messages.Jobs, list[Bytes]]:
        """Return these jobs with their values attached, and subscribe to those that have not ended.

        Raises:
            InvalidRequest: the values are too large for one reply.
        """
        jobs: list[JobInfo] = []
        values: list[Bytes] = []
        for info in infos:
            job, value = self.context.attach_value(info.with_metrics(self.context.attempt_metrics.last_reported))
            jobs.append(job)
            values += value
            # A finished job does not change any more.
            if not info.state.finished:
                self.subscriptions.jobs.add(info.job_id, self)
                self.subscriptions.waiting.follow(info)
        size_bytes = sum(map(len, values))
        if size_bytes > REPLY_LIMIT_BYTES:
            raise InvalidRequest(
                f"the results of these {len(infos)} jobs have {size_bytes} bytes together, "
                f"more than one reply carries ({REPLY_LIMIT_BYTES}): ask for fewer jobs at a time",
                size_bytes=size_bytes,
                limit_bytes=REPLY_LIMIT_BYTES,
            )
        return messages.Jobs(jobs=tuple(jobs)), values

    # The end of the session

    def finish(self, reason: str) -> None:
        """Send the pending updates, then close the channel.

        A driver that did not ask for this is sent one error that says what has ended, not what that means for each of
        its jobs.
        """
        self._finish_reason = self._finish_reason or reason
        # Else a driver that comes back after its grace period would be sent the end of each of its jobs before the
        # reason.
        if not self.has_left and self.hello.role is not Role.JOB:
            self.updates.clear()
        self.updates.finish(self._close)

    def _session_ended_error(self) -> SessionEnded | None:
        """Return the error to send at the end; None if the client has ended the session itself."""
        known = self.context.state.sessions.get(self.session)
        if self.has_left or self.hello.role is Role.JOB or known is None or not known.is_ending:
            return None
        return session_ended(self.context.state, known, self.context.inbox.current_time())

    def run(self) -> Awaitable[None]:
        """Send updates whenever the channel has room, until it has ended."""
        return self.updates.run(self.channel)

    async def _close(self) -> None:
        await self.channel.close(self._finish_reason or "", self._session_ended_error())
