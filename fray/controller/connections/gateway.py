"""Gateway of the controller: accepts connections and routes the scheduler's effects to them.

One acceptor serves all listeners; the class of the greeting distinguishes clients, nodes and joining hosts. The gateway
decides nothing about jobs: connections turn messages into events, and `Gateway.carry_out` passes saved effects to
connections.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

import trio

from fray.controller.accepted_tokens import AcceptedTokens
from fray.controller.connections.access import AccessScope, job_of
from fray.controller.connections.changes import JobChanges, NodeChanges
from fray.controller.connections.client import ClientConnection
from fray.controller.connections.client_logs import LogFeed
from fray.controller.connections.client_requests import handle_request
from fray.controller.connections.defects import Defects
from fray.controller.connections.keys import ConnectionKeys
from fray.controller.connections.node import NodeConnection
from fray.controller.connections.session_errors import internal_error, session_ended, session_unknown
from fray.controller.connections.subscriptions import SubscriptionIndex
from fray.controller.connections.validation import (
    check_capacity,
    check_client,
    check_host,
    default_namespace,
    is_session_ended,
)
from fray.controller.context import ControllerContext
from fray.controller.join_tokens import (
    GreetingOnlyHandler,
    check_unit_attributes,
    close_after_grace,
    raise_error,
)
from fray.controller.metrics.stack_captures import StackCaptures
from fray.controller.workspaces.bundles import RequestOrigin
from fray.errors import (
    ChannelClosed,
    ChannelFull,
    InvalidRequest,
    NodeNameInUse,
    NoSuchJob,
    ProtocolMismatch,
    SessionEnded,
    Unauthorized,
    Unreachable,
)
from fray.model.access.roles import Access, AccessRole, Identity, access_of
from fray.model.access.user_keys import USER_KEY
from fray.model.ids import AttemptId, JobId, Namespace, NodeName, SessionId, check_name, split_attempt
from fray.model.messages.client import ClientHello, ControllerHello, Launch, ProcessMark, Role, Stacks
from fray.model.messages.node import CaptureRequest, JoinRequest, NodeHello, StackCapture
from fray.model.messages.people import AuditRecord, RedeemInvitation
from fray.model.messages.session import VERSION
from fray.model.specs import JobState
from fray.net.channel.public import (
    Acceptor,
    Channel,
    Handler,
    HandlerFactory,
)
from fray.net.channel.requests import Requests
from fray.net.cluster_token import CLUSTER_KEY
from fray.net.codec import TextRule, decode_checked, encode_message
from fray.net.limited_log import LimitedLog
from fray.net.process_identity import ProcessWatch, account_name, wait_process_exited
from fray.net.tls.identity import NODE_URI
from fray.net.transport import PeerIdentity
from fray.net.tunnels.multiplexer import TunnelMultiplexer
from fray.scheduler.effects import (
    CloseSession,
    DeleteBlobs,
    DesiredAttemptsChanged,
    Effect,
    Event,
    EventRefused,
    JobInfoChanged,
    LaunchRequested,
    NamesChanged,
    NodeDied,
    NodeJoined,
    NodeProbed,
    PolicyChanged,
    ProbeWanted,
    Refusal,
    Reply,
    ReservationInfoChanged,
    SessionClosed,
)
from fray.scheduler.explain.diagnosis import job_reason_text
from fray.scheduler.lifecycle import NodePhase, SessionPhase
from fray.scheduler.state.rows import Session, job_state
from fray.scheduler.views import job_info

CONNECTIONS_LIMIT = 20_000
"""Connections at a time."""
RESUMABLE_S = 60.0
"""Seconds for which a channel without a transport can be resumed without loss."""

_log = logging.getLogger("fray.controller")


class Gateway:
    """Registry of all connections of one controller.

    Args:
        tokens: of the cluster; attempts have keys of their own.
    """

    def __init__(
        self, context: ControllerContext, tokens: AcceptedTokens, nursery: trio.Nursery, rng: random.Random
    ) -> None:
        self._context = context
        self.keys = ConnectionKeys(context, tokens, lambda: {one.channel.remote for one in self._all_connections()})
        tokens.on_change = self._on_tokens_changed
        self._nursery = nursery
        self._subscriptions: SubscriptionIndex[ClientConnection] = SubscriptionIndex(
            JobChanges(context.epoch), NodeChanges(context.epoch)
        )
        self._log_feed = LogFeed(context)
        self._clients: dict[SessionId, ClientConnection] = {}
        self._nodes: dict[NodeName, NodeConnection] = {}
        self._connections = 0
        self._defects = Defects(context, self._clients, self._nodes, nursery)
        self._captures = StackCaptures(context.state)
        nursery.start_soon(context.attempt_metrics.run, self._on_metrics)
        nursery.start_soon(self._subscriptions.waiting.run, self._refresh_reason)
        self._revision = 0
        self.acceptor = Acceptor(
            f"{context.cluster_id}.{context.epoch}", self._on_greeting, keep_s=RESUMABLE_S, rng=rng
        )

        self.foreign_attempts = LimitedLog(_log, logging.WARNING)
        for lines in (self.acceptor.refusals, self.foreign_attempts):
            nursery.start_soon(lines.run)

    def __repr__(self) -> str:
        return f"<Gateway {len(self._clients)} clients, {len(self._nodes)} nodes>"

    # Greetings

    def _on_greeting(self, claim: PeerIdentity, greeting: bytes) -> tuple[bytes, HandlerFactory]:
        if self._connections >= CONNECTIONS_LIMIT:
            raise ChannelFull(f"too many connections (limit {CONNECTIONS_LIMIT})", limit=CONNECTIONS_LIMIT)
        hello, _ = decode_checked(greeting, TextRule.REFUSE)
        try:
            return self._greet(claim, hello)
        except Unauthorized as error:
            # Not the refusals for other reasons: a driver that was away for too long has attempted nothing.
            self._audit(type(hello).__name__, claim, f"refused: {error}")
            raise

    def _audit(self, action: str, claim: PeerIdentity, outcome: str) -> None:
        at = self._context.inbox.current_time()
        record = AuditRecord(
            at=at, user="", role="", action=action, outcome=outcome, remote=claim.remote, key=claim.key_id
        )
        self._context.audit.write(record)

    def _audit_local(self, action: str, target: str) -> None:
        """Record a change that was made on this machine, by a signal or in a file of the controller."""
        # By this account or by root: no other can send it signals or write its store.
        record = AuditRecord(
            at=self._context.inbox.current_time(),
            user=account_name(),
            role="local",
            action=action,
            outcome="done",
            target=target,
        )
        self._context.audit.write(record)

    def _greet(self, claim: PeerIdentity, hello: object) -> tuple[bytes, HandlerFactory]:
        context, key_id = self._context, claim.key_id
        if isinstance(hello, NodeHello):
            return self._greet_node(claim, hello)
        if isinstance(hello, ClientHello):
            return self._greet_client(claim, hello)
        if isinstance(hello, JoinRequest):
            return self._greet_joining(claim, lambda now: context.join_tokens.redeem(key_id, hello, claim.remote, now))
        if isinstance(hello, RedeemInvitation):
            return self._greet_joining(claim, lambda now: context.people.redeem(key_id, hello, claim.remote, now))
        raise ProtocolMismatch(f"expected ClientHello, NodeHello or JoinRequest, got {type(hello).__name__}")

    def _greet_client(self, claim: PeerIdentity, hello: ClientHello) -> tuple[bytes, HandlerFactory]:
        known = self._context.state.sessions.get(hello.session)
        check_client(hello, claim.key_id, known)
        identity = self._identify(claim, hello)
        # The session's jobs are its user's, and may hold secrets: another person may not continue it.
        if known is not None and not identity.is_stated and known.user != identity.user:
            raise Unauthorized(f"session {hello.session!r} belongs to another user")
        # Refused at the greeting: a driver that was away for too long gets one error, before any of its requests.
        if is_session_ended(hello, known):
            raise self._session_ended_error(hello.session, known)
        # A session keeps the namespace of its first greeting: its jobs are registered there.
        namespace = known.namespace if known is not None else self._namespace_for(hello)
        context = self._context
        if known is None and hello.namespace and access_of(identity.role, Launch) is not Access.ALL:
            own = AccessScope(context.state, context.people, identity, "", job_of(hello.attempt_id))
            own.check_namespace(namespace)
        answer = ControllerHello(
            cluster_id=self._context.cluster_id,
            epoch=self._context.epoch,
            namespace=namespace,
            user="" if identity.is_stated else identity.user,
            # So that a driver knows whether this controller has anything of its session, or begins with it.
            session_known=known is not None,
            in_place=self._context.in_place,
            version=VERSION,
            now=self._context.inbox.current_time(),
        )
        return encode_message(answer), lambda channel: self._add_client(hello, identity, namespace, channel)

    def _identify(self, claim: PeerIdentity, hello: ClientHello) -> Identity:
        """Return who has proven a key. Raises Unauthorized: the key was revoked or has expired since."""
        if claim.key_id.startswith(USER_KEY):
            role, user = self._context.people.identify(claim.key_id, self._context.inbox.current_time())
            return Identity(role, user, claim.key_id)
        if hello.attempt_id is None:
            return Identity(AccessRole.ADMIN, hello.user, claim.key_id, is_stated=True)
        job = self._context.state.jobs.get(split_attempt(hello.attempt_id)[0])
        return Identity(AccessRole.JOB, job.spec.user if job is not None else "", claim.key_id)

    def _session_ended_error(self, name: SessionId, known: Session | None) -> SessionEnded:
        if known is None:
            return session_unknown(name)
        return session_ended(self._context.state, known, self._context.inbox.current_time())

    def _namespace_for(self, hello: ClientHello) -> Namespace:
        """Return the namespace of a job; for a driver the one it asks for, or one of its own."""
        if hello.attempt_id is not None:
            job = self._context.state.jobs.get(split_attempt(hello.attempt_id)[0])
            return job.spec.namespace if job is not None else ""
        # A driver without a namespace gets one of its own, so that names in two scripts do not collide.
        return hello.namespace or ("" if hello.role is Role.TOOL else default_namespace(hello.session))

    def _greet_joining(self, claim: PeerIdentity, redeem: Callable[[float], object]) -> tuple[bytes, HandlerFactory]:
        """Answer a greeting that exchanges a token or an invitation for a key, and carries nothing else."""
        try:
            grant = redeem(self._context.inbox.current_time())
        except (Unauthorized, InvalidRequest, ChannelFull):
            raise
        except Exception as error:
            # What was not saved may not be announced, and no controller survives a failed save, as in its loop.
            self._nursery.start_soon(raise_error, error)
            raise Unreachable("the controller is shutting down") from error
        self._audit(type(grant).__name__, claim, "done")
        return encode_message(grant), self._add_joining

    def _add_joining(self, channel: Channel) -> Handler:
        self._nursery.start_soon(close_after_grace, channel)
        return GreetingOnlyHandler()

    def _greet_node(self, claim: PeerIdentity, hello: NodeHello) -> tuple[bytes, HandlerFactory]:
        # The cluster's token may name any node; a machine's own key only the node for which it was given.
        if claim.key_id != CLUSTER_KEY:
            self._context.join_tokens.check_member(claim.key_id, hello)
            check_unit_attributes(hello, self._context.state.fleet.units)
        _check_certificate(claim, hello.node)
        check_name(hello.node, "a node")
        check_capacity(hello.node, hello.capacity)
        check_host(hello.node, hello.host)
        lease_s = self._context.state.config.lease_s
        # Such a node would still run its attempts after they have been started elsewhere.
        if hello.lease_s > lease_s:
            raise InvalidRequest(
                f"node {hello.node!r} would keep its attempts for {hello.lease_s:g} s of silence, but this controller "
                f"gives them up after {lease_s:g} s: start fray-node with --lease-s {lease_s:g}"
            )
        present = self._nodes.get(hello.node)
        if present is not None and present.incarnation != hello.incarnation:
            self._check_takeover(present, hello, claim)
        context = self._context
        answer = ControllerHello(
            cluster_id=context.cluster_id,
            epoch=context.epoch,
            env_vars=context.env_vars,
            now=context.inbox.current_time(),
        )
        return encode_message(answer), lambda channel: self._add_node(hello, channel)

    def _check_takeover(self, present: NodeConnection, hello: NodeHello, claim: PeerIdentity) -> None:
        """Check that another incarnation may take over a name: only from a node that is dead or has no connection.

        Raises:
            NodeNameInUse: the first one is alive.
        """
        if hello.process is not None and hello.process == present.hello.process:
            # One process is never two nodes: this is an older hello, received late. A controller that was suspended for
            # an hour reads hundreds of them and must not send the living node away.
            return
        # A node holds the lock of its state directory before it dials, so the one before has ended, even if its
        # connection has not: the machine was rebooted, or had another address by then, and nothing was received.
        if hello.state_id and hello.state_id == present.hello.state_id and _is_later(hello, present.hello):
            return
        # Two machines configured with one name: the second is refused, or the two would take the name from each other
        # for ever.
        if present.channel.connected and not present.is_proven_dead():
            raise NodeNameInUse(
                f"node name {hello.node!r} is in use by the fray-node at {present.channel.remote}; "
                f"start the one at {claim.remote} with another --name, or end the first",
                node=hello.node,
                holder=present.channel.remote,
            )

    # Connections

    def _add_client(self, hello: ClientHello, identity: Identity, namespace: Namespace, channel: Channel) -> Handler:
        process_watch = ProcessWatch.open(hello.process)
        connection = ClientConnection(
            self._context,
            self._subscriptions,
            self._log_feed,
            self,
            hello,
            namespace,
            channel,
            process_watch,
            handle_request,
            identity,
        )
        old = self._clients.get(hello.session)
        # Entered before the old one is ended: its end then finds another channel under the name and leaves the entry
        # alone.
        self._clients[hello.session] = connection
        if old is not None:
            self._supersede(old)
        self._start(connection)
        return connection

    def _add_node(self, hello: NodeHello, channel: Channel) -> Handler:
        connection = NodeConnection(
            self._context, self._log_feed, self, hello, channel, ProcessWatch.open(hello.process)
        )
        self._nursery.start_soon(connection.watch_ends)
        old = self._nodes.get(hello.node)
        self._nodes[hello.node] = connection
        if old is not None:
            self._supersede(old)
        self._start(connection)
        return connection

    def _supersede(self, connection: ClientConnection | NodeConnection) -> None:
        connection.superseded = True
        # Ended without waiting: the old transport may be dead, and what is queued for it is outdated.
        connection.channel.abort(ChannelClosed("a newer connection took over", reason="superseded"))

    def _start(self, connection: ClientConnection | NodeConnection) -> None:
        self._connections += 1
        self._nursery.start_soon(self._defects.run_connection, connection)
        if connection.process_watch is not None:
            self._nursery.start_soon(self._watch_process, connection, connection.process_watch)

    async def _watch_process(self, connection: ClientConnection | NodeConnection, process_watch: ProcessWatch) -> None:
        """Report the end of the peer's process: its connection may outlive it, in a child that has inherited the
        socket."""
        try:
            await process_watch.wait_exited()
        except trio.ClosedResourceError:
            return  # the connection has ended first
        # Before the channel ends, which would otherwise count as a loss with a grace period.
        connection.mark_dead("its process is gone")
        connection.channel.end(ChannelClosed("the process of the peer is gone", reason="stopped"))

    def watch_absent_processes(self) -> None:
        """Watch the processes of this machine that the previous controller knew: no grace period is needed for those
        that have exited."""
        # In another namespace the recorded pids are those of unrelated processes, or of none.
        if not self._context.same_pid_namespace:
            return
        state, gone = self._context.state, "its process is gone"
        for session in state.sessions.values():
            if session.phase is SessionPhase.LOST and session.process is not None:
                event = SessionClosed(session=session.session, reason=gone)
                # Harmless if the session comes back first: then the watch of its connection reports the same end.
                self._nursery.start_soon(self._post_on_exit, session.process, event)
        for node in state.nodes.values():
            if node.phase is NodePhase.SILENT and node.process is not None:
                died = NodeDied(node=node.name, incarnation=node.incarnation, reason=gone)
                self._nursery.start_soon(self._post_on_exit, node.process, died)

    async def _post_on_exit(self, mark: ProcessMark, event: SessionClosed | NodeDied) -> None:
        await wait_process_exited(mark)
        self._context.inbox.post(event)

    def client_ended(self, session: SessionId, channel: Channel) -> None:
        known = self._clients.get(session)
        # A newer connection may have the name by now.
        if known is not None and known.channel is channel:
            del self._clients[session]
        self._connections -= 1

    def node_ended(self, node: NodeName, channel: Channel) -> None:
        known = self._nodes.get(node)
        if known is not None and known.channel is channel:
            del self._nodes[node]
        self._connections -= 1

    def node_requests(self, node: NodeName) -> Requests | None:
        connection = self._nodes.get(node)
        # A suspended channel would keep the request for up to a minute; the caller has something else to answer with.
        return connection.requests if connection is not None and connection.channel.connected else None

    def client_tunnels(self, incarnation: str) -> TunnelMultiplexer | None:
        connection = self._clients.get(SessionId(incarnation))
        return connection.tunnels if connection is not None else None

    def node_tunnels(self, node: NodeName) -> TunnelMultiplexer | None:
        connection = self._nodes.get(node)
        return connection.tunnels if connection is not None else None

    def declared_secrets(self) -> set[str] | None:
        connections = [connection for connection in self._nodes.values() if connection.channel.connected]
        # None while no node is connected: unknown, which is not the same as no secrets.
        return {name for connection in connections for name in connection.hello.secrets} if connections else None

    def secrets_changed(self) -> None:
        for connection in self._nodes.values():
            connection.secrets_changed()

    def drop_keys(self, key_ids: Collection[str], reason: str) -> None:
        for connection in list(self._clients.values()):
            if connection.identity.key_id in key_ids:
                error = Unauthorized(f"this connection was closed by the controller: {reason}")
                # In order, so that the client is sent the answer to its own request, and the reason. What its session
                # owns ends with it.
                self._nursery.start_soon(connection.channel.close, reason, error)

    def previous_token_users(self) -> tuple[str, ...]:
        found = {f"node {name}": node.channel for name, node in self._nodes.items()}
        for one in self._clients.values():
            found[f"{one.hello.role} of {one.identity.user or 'no user'}, {one.session}"] = one.channel
        return tuple(
            f"{what} ({channel.remote})"
            for what, channel in sorted(found.items())
            if channel.connected and channel.key_id == CLUSTER_KEY and self.keys.has_previous_token(channel.remote)
        )

    def _all_connections(self) -> Iterator[ClientConnection | NodeConnection]:
        yield from self._clients.values()
        yield from self._nodes.values()

    def _on_tokens_changed(self, dropped: tuple[str, ...]) -> None:
        what = "the previous one is accepted no longer" if dropped else "replaced; the previous one is accepted, too"
        self._audit_local("token", what)
        # Peers with the present token continue their sessions on another connection, and those without are refused.
        self.acceptor.drop_connections(
            lambda channel: channel.key_id == CLUSTER_KEY and self.keys.has_token_of(channel.remote, dropped),
            "the token with which it was opened is accepted no longer",
        )

    def on_authority_replaced(self, before: Sequence[str], pins: Sequence[str]) -> None:
        """Record that the certificate authority was changed, by its fingerprints before and after."""
        what = "the previous one is accepted, too" if pins[1:] else "the previous one is accepted no longer"
        if pins[0] != before[0]:
            what = f"replaced by {pins[0]}; {what}"
        self._audit_local("ca", what)

    def start_soon(
        self, task: Callable[..., Awaitable[object]], origin: RequestOrigin, ref: int, *args: object
    ) -> None:
        self._nursery.start_soon(self._defects.serve, task, origin, ref, *args)

    def next_revision(self) -> int:
        self._revision += 1
        return self._revision

    # Effects of a saved batch

    def carry_out(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """Hand each effect to the connections it concerns, without waiting."""
        for event in events:
            # The scheduler has processed the join: only now the saved state says what this incarnation shall run.
            if isinstance(event, NodeJoined):
                self._on_node_joined(event.hello)
            elif isinstance(event, PolicyChanged):
                self._audit_local("policy", "reloaded on SIGHUP")
        for effect in effects:
            try:
                self._carry_out(effect)
            except Exception as error:  # noqa: BLE001 - a defect must not end the controller
                _log.exception("%s could not be carried out", effect)
                for session in self._clients_of(effect):
                    self._defects.end_client(session, internal_error("a change could not be reported", error))
        if events or effects:
            self._subscriptions.waiting.cluster_changed()
            self._subscriptions.node_changes.note(events, effects)
            self._subscriptions.saved.add()
        if self._context.secrets.by_job:
            self._forget_secrets(events, effects)
        # Last: by now rows refer to the blobs that are needed, and the others go.
        self._context.unpin_blobs(events)

    def _forget_secrets(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """Remove the secrets of jobs that were refused or have ended."""
        # Those of refused launches are in no effect; `remove_ended` finds out which of them live.
        refused = [spec.job_id for event in events if isinstance(event, LaunchRequested) for spec in event.launch.jobs]
        moved = [effect.job_id for effect in effects if isinstance(effect, JobInfoChanged)]
        state = self._context.state
        self._context.secrets.remove_ended([*refused, *moved], lambda job_id: not state.has_job_ended(job_id))

    def _clients_of(self, effect: Effect) -> list[SessionId]:
        """Return the clients that wait for an effect."""
        match effect:
            case Reply(session=session) | Refusal(session=session) | CloseSession(session=session):
                return [session]
            case JobInfoChanged(job_id=job_id):
                return [connection.session for connection in self._subscriptions.jobs.subscribers(job_id)]
            case _:
                return []

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Reply() | Refusal() | CloseSession():
                self._send_to_client(effect)
            case JobInfoChanged(job_id=job_id):
                self._on_job_changed(job_id)
            case ReservationInfoChanged(reservation_id=name):
                for connection in self._subscriptions.reservations.subscribers(name):
                    connection.updates.reservation_changed(name)
            case NamesChanged(key=key):
                for connection in self._subscriptions.names.subscribers(key):
                    connection.updates.names_changed(key)
            case DesiredAttemptsChanged(node=name, changed=changed, gone=gone):
                # A node without a connection gets the full set when it joins.
                if name in self._nodes:
                    self._nodes[name].desired_changed((*changed, *gone))
            case ProbeWanted(node=name, incarnation=incarnation):
                self._nursery.start_soon(self._probe, name, incarnation)
            case EventRefused():
                self._defects.on_event_refused(effect)
                if isinstance(effect.event, LaunchRequested):
                    self._forget_secrets([effect.event], ())
            case DeleteBlobs(blobs=blobs):
                # Not deleted outright: an event that is still in the inbox may have pinned one of them.
                self._context.drop_unreferenced(blobs)

    def _send_to_client(self, effect: Reply | Refusal | CloseSession) -> None:
        connection = self._clients.get(effect.session)
        # Gone: its client asks again after reconnecting, and a repeated request is answered from the state.
        if connection is None:
            return
        if isinstance(effect, Reply):
            connection.on_scheduler_reply(effect.ref, effect.message)
        elif isinstance(effect, Refusal):
            connection.refuse(effect.ref, effect.error)
        else:
            connection.finish(effect.reason)

    def _on_job_changed(self, job_id: JobId) -> None:
        self._subscriptions.changes.record(job_id)
        # A copy, since finished jobs are unsubscribed below; and no record is made if no client follows the job.
        connections = list(self._subscriptions.jobs.subscribers(job_id))
        if not connections:
            return
        try:
            info = job_info(self._context.state, job_id)
        except NoSuchJob:
            return  # forgotten within the same batch
        self._subscriptions.waiting.record(info)
        for connection in connections:
            connection.updates.job_changed(info)
            if info.state.finished:
                self._subscriptions.jobs.drop(job_id, connection)

    def _refresh_reason(self, job_id: JobId, sent: str | None) -> bool:
        """Send a job to the clients that follow it, if its reason is not the one last sent.

        Return whether it is followed and waits.
        """
        row = self._context.state.jobs.get(job_id)
        if row is None or job_state(row) is not JobState.PENDING or not self._subscriptions.jobs.subscribers(job_id):
            return False
        try:
            if job_reason_text(self._context.state, row) != sent:
                self._on_job_changed(job_id)
        except Exception:  # noqa: BLE001 - a defect must not end the controller
            _log.exception("the reason why %s waits could not be found", job_id)
            return False
        return True

    def _on_node_joined(self, hello: NodeHello) -> None:
        connection = self._nodes.get(hello.node)
        if connection is not None and connection.incarnation == hello.incarnation:
            connection.on_joined()

    # Measurements and stacks, which the scheduler does not handle

    def _on_metrics(self, job_id: JobId, attempts: tuple[AttemptId, ...]) -> None:
        for connection in list(self._subscriptions.jobs.subscribers(job_id)):
            connection.updates.metrics_changed(job_id, attempts)

    def request_stacks(self, origin: RequestOrigin, ref: int, job_id: JobId) -> None:
        capture = self._captures.start(job_id, self._request_capture)
        self._nursery.start_soon(self._reply_stacks, origin, ref, capture)

    def _request_capture(self, node: NodeName, request: CaptureRequest) -> bool:
        return node in self._nodes and self._nodes[node].request_stacks(request)

    async def _reply_stacks(self, origin: RequestOrigin, ref: int, capture: int) -> None:
        origin.reply(ref, Stacks(stacks=dict(await self._captures.answer(capture))))

    def stacks_captured(self, node: NodeName, capture: StackCapture) -> None:
        self._captures.on_capture(node, capture)

    async def _probe(self, node: NodeName, incarnation: str) -> None:
        """Probe a node when the scheduler has decided so; the result is an event."""
        connection = self._nodes.get(node)
        present = connection is not None and connection.incarnation == incarnation
        # Of this incarnation only: the answer of a restarted node says nothing about the suspected one.
        trouble = await connection.probe() if connection is not None and present else "it is not connected"
        self._context.inbox.post(NodeProbed(node=node, incarnation=incarnation, problem=trouble))


def _is_later(hello: NodeHello, other: NodeHello) -> bool:
    """Return whether a node of the same state directory was started after another, as far as that is known: within one
    boot, a hello may be that of the earlier one, received late."""
    if hello.boot_id != other.boot_id:
        return True
    if hello.process is None or other.process is None:
        return False
    return hello.process.start_ticks > other.process.start_ticks


def _check_certificate(claim: PeerIdentity, node: NodeName) -> None:
    """Check that a certificate, if one was shown, is of this node.

    Raises:
        Unauthorized: it is of another one.
    """
    shown = [uri.removeprefix(NODE_URI) for uri in claim.uris if uri.startswith(NODE_URI)]
    if shown and node not in shown:
        raise Unauthorized(
            f"the certificate shown is of node {shown[0]!r}, not of node {node!r}: nodes must not share a --state-dir"
        )
