"""Where the controller meets the world: who may come in, which link speaks for whom, and effects to those they concern.

One acceptor serves all listeners; the class of the greeting tells clients from nodes. Nothing here decides anything
about jobs: links turn words into events, `Gateway.carry_out` hands the saved effects to links.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence

import trio

from fray.controller.connections.client import ClientConnection
from fray.controller.connections.client_logs import ancestors
from fray.controller.connections.node import NodeConnection
from fray.controller.connections.session_errors import session_ended, session_unknown
from fray.controller.connections.subscriptions import SubscriptionIndex
from fray.controller.connections.validation import (
    ATTEMPT_KEY,
    CLUSTER_KEY,
    check_capacity,
    check_client,
    default_namespace,
    is_over,
)
from fray.controller.context import ControllerContext
from fray.controller.join_tokens import (
    GreetingOnlyHandler,
    check_place,
    close_after_grace,
    end_with,
)
from fray.controller.metrics.stack_captures import StackCaptures
from fray.controller.process_watch import ProcessWatch, wait_gone
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
from fray.model.ids import AttemptId, JobId, Namespace, NodeName, SessionId, check_name, split_attempt
from fray.model.messages.client import ClientHello, ControllerHello, ProcessMark, Role, Stacks
from fray.model.messages.node import CaptureRequest, JoinRequest, NodeHello, StackCapture
from fray.net.channel.public import (
    Acceptor,
    Channel,
    Handler,
    HandlerFactory,
)
from fray.net.codec import decode_message, encode_message
from fray.net.transport import PeerIdentity
from fray.net.tunnels.multiplexer import TunnelMultiplexer
from fray.scheduler.effects import (
    CloseSession,
    DeleteBlobs,
    DesiredAttemptsChanged,
    Effect,
    Event,
    JobInfoChanged,
    LaunchRequested,
    NamesChanged,
    NodeDied,
    NodeJoined,
    NodeProbed,
    ProbeWanted,
    Refusal,
    Reply,
    ReservationInfoChanged,
    SessionClosed,
)
from fray.scheduler.state.rows import NodePhase, Session, SessionPhase

LINKS_LIMIT = 20_000
"""Conversations at a time."""
KEEP_S = 60.0
"""How long a conversation without a connection can be resumed without loss."""

_log = logging.getLogger("fray.controller")


class Gateway:
    """All conversations of one controller.

    Args:
        token: of the cluster; attempts have keys of their own.
    """

    def __init__(self, house: ControllerContext, token: str, nursery: trio.Nursery, rng: random.Random) -> None:
        self._house = house
        self._token = token
        self._nursery = nursery
        self._audience: SubscriptionIndex[ClientConnection] = SubscriptionIndex()
        self._clients: dict[SessionId, ClientConnection] = {}
        self._nodes: dict[NodeName, NodeConnection] = {}
        self._links = 0
        self._captures = StackCaptures(house.state)
        nursery.start_soon(house.vitals.run, self._measured)
        self._revision = 0
        self.acceptor = Acceptor(f"{house.cluster_id}.{house.epoch}", self._on_greeting, keep_s=KEEP_S, rng=rng)

    def __repr__(self) -> str:
        return f"<Gateway {len(self._clients)} clients, {len(self._nodes)} nodes>"

    # Who comes in

    def authorize(self, key_id: str) -> str | None:
        """The key behind a key id; None for attempts that are not wanted (any more), and for anything else."""
        if key_id == CLUSTER_KEY:
            return self._token
        attempt = key_id.removeprefix(ATTEMPT_KEY)
        if attempt == key_id:
            return self._house.joins.key_of(key_id)
        return self._house.attempt_key(attempt) if self._house.state.attempt_living(attempt) else None

    def _on_greeting(self, claim: PeerIdentity, greeting: bytes) -> tuple[bytes, HandlerFactory]:
        if self._links >= LINKS_LIMIT:
            raise ChannelFull(f"the controller holds {LINKS_LIMIT} conversations, its limit", limit=LINKS_LIMIT)
        hello, _ = decode_message(greeting)
        if isinstance(hello, NodeHello):
            return self._greet_node(claim, hello)
        if isinstance(hello, ClientHello):
            return self._greet_client(claim, hello)
        if isinstance(hello, JoinRequest):
            return self._greet_joining(claim, hello)
        raise ProtocolMismatch(f"a controller is greeted by a client or a node, not with {type(hello).__name__}")

    def _greet_client(self, claim: PeerIdentity, hello: ClientHello) -> tuple[bytes, HandlerFactory]:
        known = self._house.state.sessions.get(hello.session)
        check_client(hello, claim.key_id, known)
        if is_over(hello, known):
            raise self._parting(hello.session, known)
        namespace = known.namespace if known is not None else self._namespace_for(hello)
        answer = ControllerHello(
            cluster_id=self._house.cluster_id,
            epoch=self._house.epoch,
            namespace=namespace,
            session_known=known is not None,
            in_place=self._house.in_place,
        )
        return encode_message(answer), lambda channel: self._add_client(hello, namespace, channel)

    def _parting(self, name: SessionId, known: Session | None) -> SessionEnded:
        if known is None:
            return session_unknown(name)
        return session_ended(self._house.state, known, self._house.inbox.time())

    def _namespace_for(self, hello: ClientHello) -> Namespace:
        """A job's is its job's; a driver's what it asks for, or its own."""
        if hello.attempt_id is not None:
            job = self._house.state.jobs.get(split_attempt(hello.attempt_id)[0])
            return job.spec.namespace if job is not None else ""
        return hello.namespace or ("" if hello.role is Role.TOOL else default_namespace(hello.session))

    def _greet_joining(self, claim: PeerIdentity, asked: JoinRequest) -> tuple[bytes, HandlerFactory]:
        try:
            given = self._house.joins.spend(claim.key_id, asked, claim.remote, self._house.inbox.time())
        except (Unauthorized, InvalidRequest, ChannelFull):
            raise
        except Exception as error:
            # what was not saved may not be told, and no controller lives after a save that failed: as in its loop
            self._nursery.start_soon(end_with, error)
            raise Unreachable("the controller is ending") from error
        return encode_message(given), self._see_off

    def _see_off(self, channel: Channel) -> Handler:
        self._nursery.start_soon(close_after_grace, channel)
        return GreetingOnlyHandler()

    def _greet_node(self, claim: PeerIdentity, hello: NodeHello) -> tuple[bytes, HandlerFactory]:
        if claim.key_id != CLUSTER_KEY:
            self._house.joins.check_member(claim.key_id, hello)
            check_place(hello, self._house.state.fleet.units)
        check_name(hello.node, "a node")
        check_capacity(hello.node, hello.capacity)
        lease_s = self._house.state.rules.lease_s
        if hello.lease_s > lease_s:
            raise InvalidRequest(
                f"node {hello.node!r} would keep its attempts for {hello.lease_s:g} s of silence, and this controller "
                f"gives them up after {lease_s:g} s: start fray-node with --lease-s {lease_s:g}"
            )
        there = self._nodes.get(hello.node)
        if there is not None and there.incarnation != hello.incarnation:
            self._make_way(there, hello, claim)
        house = self._house
        answer = ControllerHello(cluster_id=house.cluster_id, epoch=house.epoch, env_vars=house.env_vars)
        return encode_message(answer), lambda channel: self._add_node(hello, channel)

    def _make_way(self, there: NodeConnection, hello: NodeHello, claim: PeerIdentity) -> None:
        """Another incarnation takes over a name only from one that is gone: dead, or without a connection.

        Raises:
            NodeNameInUse: the first one lives.
        """
        if hello.process is not None and hello.process == there.hello.process:
            return  # one process is never two nodes: a hello of an earlier life, heard late (we were stopped)
        if there.channel.connected and not there.proven_dead():
            raise NodeNameInUse(
                f"node name {hello.node!r} is taken: a living fray-node at {there.channel.remote} has it; "
                f"give the one at {claim.remote} another --name, or end the first",
                node=hello.node,
                holder=there.channel.remote,
            )

    # Links

    def _add_client(self, hello: ClientHello, namespace: Namespace, channel: Channel) -> Handler:
        witness = ProcessWatch.of(hello.process)
        link = ClientConnection(self._house, self._audience, self, hello, namespace, channel, witness)
        old = self._clients.get(hello.session)
        self._clients[hello.session] = link
        if old is not None:
            self._supersede(old)
        self._start(link)
        return link

    def _add_node(self, hello: NodeHello, channel: Channel) -> Handler:
        link = NodeConnection(self._house, self, hello, channel, ProcessWatch.of(hello.process))
        old = self._nodes.get(hello.node)
        self._nodes[hello.node] = link
        if old is not None:
            self._supersede(old)
        self._start(link)
        return link

    def _supersede(self, link: ClientConnection | NodeConnection) -> None:
        link.superseded = True
        link.channel.abort(ChannelClosed("a newer conversation took over", reason="superseded"))

    def _start(self, link: ClientConnection | NodeConnection) -> None:
        self._links += 1
        self._nursery.start_soon(link.run)
        if link.witness is not None:
            self._nursery.start_soon(self._watch_death, link, link.witness)

    async def _watch_death(self, link: ClientConnection | NodeConnection, witness: ProcessWatch) -> None:
        """The process may be gone long before its connection (a child may have inherited the socket)."""
        try:
            await witness.wait_dead()
        except trio.ClosedResourceError:
            return  # the link has ended first
        link.died("its process is gone")
        link.channel.end(ChannelClosed("the process of the peer is gone", reason="stopped"))

    def watch_absent(self) -> None:
        """Processes of this machine that the last controller knew: who of them has died is not waited for."""
        if not self._house.same_world:
            return
        state, gone = self._house.state, "its process is gone"
        for session in state.sessions.values():
            if session.phase is SessionPhase.LOST and session.process is not None:
                event = SessionClosed(session=session.session, reason=gone)
                self._nursery.start_soon(self._when_gone, session.process, event)
        for node in state.nodes.values():
            if node.phase is NodePhase.SILENT and node.process is not None:
                died = NodeDied(node=node.name, incarnation=node.incarnation, reason=gone)
                self._nursery.start_soon(self._when_gone, node.process, died)

    async def _when_gone(self, mark: ProcessMark, event: SessionClosed | NodeDied) -> None:
        await wait_gone(mark)
        self._house.inbox.tell(event)

    def client_gone(self, link: ClientConnection) -> None:
        if self._clients.get(link.session) is link:
            del self._clients[link.session]
        self._forget(link)

    def carrier_of(self, incarnation: str) -> TunnelMultiplexer | None:
        link = self._clients.get(incarnation)
        return link.carrier if link is not None else None

    def node_link(self, node: NodeName) -> NodeConnection | None:
        return self._nodes.get(node)

    def declared_secrets(self) -> set[str] | None:
        """What any node knows; None while there is no node."""
        links = [link for link in self._nodes.values() if link.channel.connected]
        return {name for link in links for name in link.hello.secrets} if links else None

    def secrets_moved(self) -> None:
        """A driver has brought some again."""
        for link in self._nodes.values():
            link.secrets_moved()

    def carrier_to_node(self, node: NodeName) -> TunnelMultiplexer | None:
        link = self._nodes.get(node)
        return link.carrier if link is not None else None

    def node_gone(self, link: NodeConnection) -> None:
        if self._nodes.get(link.node) is link:
            del self._nodes[link.node]
        self._forget(link)

    def _forget(self, link: ClientConnection | NodeConnection) -> None:
        self._links -= 1
        if link.witness is not None:
            link.witness.close()

    def start_soon(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        self._nursery.start_soon(task, *args)

    def next_revision(self) -> int:
        self._revision += 1
        return self._revision

    # What follows from a saved batch

    def carry_out(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """Hand each effect to the links it concerns. Nothing here waits."""
        for event in events:
            if isinstance(event, NodeJoined):
                self._node_joined(event.hello)
        for effect in effects:
            self._carry_out(effect)
        self._forget_secrets(events, effects)
        self._house.unpin(events)

    def _forget_secrets(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """Of jobs that were refused, and of those that have ended."""
        refused = [spec.job_id for event in events if isinstance(event, LaunchRequested) for spec in event.launch.jobs]
        moved = [effect.job_id for effect in effects if isinstance(effect, JobInfoChanged)]
        state = self._house.state
        self._house.secrets.forget_all_but([*refused, *moved], lambda job_id: not state.job_ended(job_id))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Reply() | Refusal() | CloseSession():
                self._to_client(effect)
            case JobInfoChanged(job_id=job_id):
                self._job_moved(job_id)
            case ReservationInfoChanged(reservation_id=name):
                for link in self._audience.of_reservation.of(name):
                    link.news.reservation_moved(name)
            case NamesChanged(key=key):
                for link in self._audience.of_name.of(key):
                    link.news.names_moved(key)
            case DesiredAttemptsChanged(node=name, changed=changed, gone=gone):
                if name in self._nodes:
                    self._nodes[name].wishes_moved((*changed, *gone))
            case ProbeWanted(node=name, incarnation=incarnation):
                self._nursery.start_soon(self._probe, name, incarnation)
            case DeleteBlobs(blobs=blobs):
                self._house.forget(blobs)

    def _to_client(self, effect: Reply | Refusal | CloseSession) -> None:
        link = self._clients.get(effect.session)
        if link is None:
            return
        if isinstance(effect, Reply):
            link.law_answers(effect.ref, effect.message)
        elif isinstance(effect, Refusal):
            link.refuse(effect.ref, effect.error)
        else:
            link.finish(effect.reason)

    def _job_moved(self, job_id: JobId) -> None:
        links = list(self._audience.of_job.of(job_id))
        if not links:
            return
        try:
            info = self._house.state.job_info(job_id)
        except NoSuchJob:
            return  # forgotten within the same batch
        for link in links:
            link.news.job_moved(info)
            if info.state.finished:
                self._audience.of_job.drop(job_id, link)

    def _node_joined(self, hello: NodeHello) -> None:
        link = self._nodes.get(hello.node)
        if link is not None and link.incarnation == hello.incarnation:
            link.joined()

    # Measurements and stacks: no business of the law

    def _measured(self, job_id: JobId, attempts: tuple[AttemptId, ...]) -> None:
        for link in list(self._audience.of_job.of(job_id)):
            link.news.measured(job_id, attempts)

    def ask_stacks(self, link: ClientConnection, ref: int, job_id: JobId) -> None:
        """Answer later. Raises NoSuchJob, ChannelFull."""
        self._nursery.start_soon(self._answer_stacks, link, ref, self._captures.begin(job_id, self._ask_node))

    def _ask_node(self, node: NodeName, asked: CaptureRequest) -> bool:
        return node in self._nodes and self._nodes[node].ask_stacks(asked)

    async def _answer_stacks(self, link: ClientConnection, ref: int, question: int) -> None:
        link.reply(ref, Stacks(stacks=dict(await self._captures.answer(question))))

    def captured(self, link: NodeConnection, message: StackCapture) -> None:
        self._captures.heard(link.node, message)

    async def _probe(self, node: NodeName, incarnation: str) -> None:
        """The law has decided when; what comes of it is an event."""
        link = self._nodes.get(node)
        there = link is not None and link.incarnation == incarnation
        trouble = await link.probe() if link is not None and there else "it is not connected"
        self._house.inbox.tell(NodeProbed(node=node, incarnation=incarnation, trouble=trouble))

    def log_moved(self, attempt: AttemptId) -> None:
        job_id = split_attempt(attempt)[0]
        links = dict.fromkeys(self._audience.of_log.of(job_id))
        job = self._house.state.jobs.get(job_id)
        if job is not None and job.root and job.spec.log_to_owner:
            links |= dict.fromkeys(self._audience.of_log.of(job.root))
        for link in links:
            link.news.log_moved(attempt)
        self._tell_readers(attempt, job_id)

    def _tell_readers(self, attempt: AttemptId, job_id: JobId) -> None:
        for link in list(self._audience.of_news.of(job_id)):
            link.news.log_watched(attempt)
        if self._audience.of_tree:
            for ancestor in ancestors(self._house.state, job_id):
                for link in list(self._audience.of_tree.of(ancestor)):
                    link.news.log_watched(attempt)
