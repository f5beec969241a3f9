"""The conversation with one driver, job or tool: its requests become events, news becomes notices.

Law: what changes the cluster goes into the inbox and is answered when it is saved; what only looks is answered at once
from the state, which is always the saved one. News waits here as *which* (job, key, attempt), bounded by what is
subscribed, until the channel has room; so a slow client is told the latest, and a log reader what it missed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import trio
from attrs import evolve

from fray.controller.admission import (
    check_bundles,
    check_checkpoint,
    check_id,
    check_launch,
    heartbeat_s,
    is_goodbye,
)
from fray.controller.house import House
from fray.controller.log_desk import LogDesk, Nodes
from fray.controller.mortality import Witness
from fray.controller.partings import session_ended
from fray.controller.relay import open_relay, open_way_to_port
from fray.controller.secrets import check_secrets
from fray.controller.subscriptions import Audience
from fray.errors import (
    ChannelClosed,
    ChannelFull,
    ConnectionFailed,
    FrayError,
    InvalidRequest,
    ProtocolMismatch,
    SessionEnded,
    StoreError,
)
from fray.model.ids import AttemptId, JobId, Namespace, NodeName, check_name
from fray.model.messages import client as words
from fray.model.messages.bundles import OfferBundle, PutPiece
from fray.model.messages.client import ClientHello, Role
from fray.model.messages.node import ReadLog
from fray.model.messages.tunnels import OpenTunnel
from fray.model.specs import JobInfo
from fray.net.carrier import Carrier, End, Lane
from fray.net.channel import MESSAGE_LIMIT_BYTES, Channel
from fray.net.codec import Kind, decode_message
from fray.net.transport import Bytes
from fray.scheduler import actors, checkpoints, lookup
from fray.scheduler.effects import (
    CheckpointTaken,
    LaunchAsked,
    NameRegistered,
    NameUnregistered,
    SessionClosed,
    SessionLost,
    SessionOpened,
    TerminateAsked,
)
from fray.scheduler.explain import explain

LOGS_WAITING_BYTES = 256 * 1024
"""Lines are sent only while less than this waits for the client: so nothing else waits behind many of them."""
REPLY_LIMIT_BYTES = MESSAGE_LIMIT_BYTES // 2
"""Attachments of one reply; the rest of a message is for the words around them."""

_log = logging.getLogger("fray.controller.clients")

Answer = tuple[object, Sequence[Bytes]] | None
"""A reply with attachments; None: the law answers."""


class Front(Nodes, Protocol):
    """What a link tells those who made it."""

    def client_gone(self, link: ClientLink) -> None:
        """Its channel has ended."""

    def ask_stacks(self, link: ClientLink, ref: int, job_id: JobId) -> None:
        """Look into a job and answer later. Raises NoSuchJob, ChannelFull."""

    def carrier_of(self, incarnation: str) -> Carrier | None:
        """What carries tunnels to this process; None without a conversation."""

    def declared_secrets(self) -> set[str] | None:
        """Names of the secrets that any node knows; None while there is no node."""

    def secrets_moved(self) -> None:
        """A driver has brought some of its secrets again."""

    def carrier_to_node(self, node: NodeName) -> Carrier | None:
        """What carries tunnels to ports of jobs on this node; None without a conversation."""

    def start_soon(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task that may outlive the conversation."""


class ClientLink:
    """Handler of one client's channel.

    Its life: made at the greeting, `on_reset` opens the session, suspensions and resumptions are told to the law, and
    `on_end` ends it. A goodbye closes the session, and so does proof that the process is dead.
    """

    def __init__(
        self,
        house: House,
        audience: Audience[ClientLink],
        front: Front,
        hello: ClientHello,
        namespace: Namespace,
        channel: Channel,
        witness: Witness | None,
    ) -> None:
        self.hello = hello
        self.session = hello.session
        self.namespace = namespace
        self.channel = channel
        self.witness = witness
        self.superseded = False
        """A later channel speaks for this session."""
        self.carrier = Carrier(channel, dialled=False, on_open=self._open_tunnel)
        self._house = house
        self._audience = audience
        self._front = front
        self._logs = LogDesk(house, front, hello.session)
        self._jobs: dict[JobId, JobInfo] = {}
        self._measured: dict[JobId, dict[AttemptId, None]] = {}
        self._names: dict[str, None] = {}
        self._grace_s = house.state.rules.driver_grace_s if hello.grace_s is None else hello.grace_s
        if hello.role is Role.DRIVER:
            channel.heartbeat_s = heartbeat_s(self._grace_s)
        self._left = hello.leaving
        """It has said goodbye itself."""
        self._finish: str | None = None
        self._lost = False
        self._wake = trio.Event()

    def __repr__(self) -> str:
        waiting = len(self._jobs) + len(self._names)
        return f"<ClientLink {self.hello.role} {self.session} in {self.namespace!r}: {waiting} news waiting>"

    # The channel's handler

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if kind == Kind.REQUEST:
            self._request(ref, body)
        elif self.carrier.on_frame(kind, flags, target, ref, body):
            pass
        elif kind == Kind.NOTICE:
            message, _ = decode_message(body)
            if isinstance(message, words.Unwatch):
                self._audience.of_name.drop(message.key, self)

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
        self._audience.leave(self)
        self._front.client_gone(self)
        self._wake.set()
        if self.superseded or self._finish is not None:
            return
        if is_goodbye(error):
            self._tell(SessionClosed(session=self.session, reason=error.details["reason"] or "goodbye"))
        else:
            self._lose()

    def _open_tunnel(self, lane: Lane, message: OpenTunnel, greeting: Bytes, window_bytes: int) -> End:
        state, carrier_of = self._house.state, self._front.carrier_of
        if message.port:
            to_node = self._front.carrier_to_node
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
        self._house.inbox.tell(event)

    # Requests

    def _request(self, ref: int, body: Bytes) -> None:
        try:
            message, blobs = decode_message(body)
            answer = _ANSWERS.get(type(message))
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
            reply, blobs = self._follow_jobs(message.jobs)
        except FrayError as error:
            self.refuse(ref, error)
        else:
            self.reply(ref, reply, blobs)

    # Jobs

    def _launch(self, ref: int, message: words.Launch, blobs: Sequence[Bytes]) -> Answer:
        with self._house.holding(blobs) as attached:
            needed = check_launch(message, attached, self._house.store.has_blob)
            check_bundles(message, self._house.state.jobs, self._house.bundles.has)
            declared = self._front.declared_secrets()
            if declared is not None:
                check_secrets(message.jobs, message.secrets, declared)
            event = LaunchAsked(session=self.session, ref=ref, launch=evolve(message, secrets={}))
            self._house.secrets.bring([spec.job_id for spec in message.jobs if spec.secrets], message.secrets)
            self._house.ask_with(event, needed)
        return None

    def _bring_secrets(self, ref: int, message: words.BringSecrets, blobs: Sequence[Bytes]) -> Answer:
        jobs = self._house.state.jobs
        for job_id, values in message.secrets.items():
            if job_id in jobs and not jobs[job_id].ended and jobs[job_id].launched_by == self.session:
                self._house.secrets.bring([job_id], values)
        self._front.secrets_moved()
        return words.Done(), ()

    def _terminate(self, ref: int, message: words.Terminate, blobs: Sequence[Bytes]) -> Answer:
        what = {field: getattr(message, field) for field in ("jobs", "reason", "name", "prefix", "tree", "own")}
        self._house.inbox.ask(TerminateAsked(session=self.session, ref=ref, namespace=message.namespace, **what))
        return None

    def _find_job(self, ref: int, message: words.FindJob, blobs: Sequence[Bytes]) -> Answer:
        state = self._house.state
        found = lookup.find(state, self.namespace, message.name, message.namespace)
        return self._follow_jobs([state.job_info(found)] if found is not None else [])

    def _watch_jobs(self, ref: int, message: words.WatchJobs, blobs: Sequence[Bytes]) -> Answer:
        return self._follow_jobs([self._house.state.job_info(job) for job in message.jobs])

    def _follow_jobs(self, infos: Sequence[JobInfo]) -> tuple[words.Jobs, list[Bytes]]:
        """The infos with their values, each attached for itself; those that live are followed from now on."""
        told: list[JobInfo] = []
        values: list[Bytes] = []
        for info in infos:
            told_info, value = self._house.with_value(self._house.vitals.complete(info))
            told.append(told_info)
            values += value
            if not info.state.finished:
                self._audience.of_job.add(info.job_id, self)
        size_bytes = sum(map(len, values))
        if size_bytes > REPLY_LIMIT_BYTES:
            raise InvalidRequest(
                f"the results of these {len(infos)} jobs have {size_bytes} bytes together, "
                f"more than one reply carries ({REPLY_LIMIT_BYTES}): ask for fewer jobs at a time",
                size_bytes=size_bytes,
                limit_bytes=REPLY_LIMIT_BYTES,
            )
        return words.Jobs(jobs=tuple(told)), values

    def _list_jobs(self, ref: int, message: words.ListJobs, blobs: Sequence[Bytes]) -> Answer:
        found = self._house.state.list_jobs(
            self._namespace(message.namespace),
            name=message.name,
            prefix=message.prefix,
            states=message.states,
            limit=max(0, message.limit),
        )
        return words.Jobs(jobs=tuple(map(self._house.vitals.listed, found))), ()

    def _ask_stacks(self, ref: int, message: words.AskStacks, blobs: Sequence[Bytes]) -> Answer:
        self._front.ask_stacks(self, ref, message.job)
        return None

    def _namespace(self, asked: Namespace | None) -> Namespace | None:
        """None for all."""
        return self.namespace if asked is None else None if asked == "*" else asked

    def _fetch_blob(self, ref: int, message: words.FetchBlob, blobs: Sequence[Bytes]) -> Answer:
        data = self._house.store.blob(message.blob)
        if data is None:
            raise InvalidRequest(f"the controller keeps no blob {message.blob!r} (any more)")
        return words.Done(), [data]

    def _explain(self, ref: int, message: words.Explain, blobs: Sequence[Bytes]) -> Answer:
        state = self._house.state
        state.job_info(message.job)
        return words.Text(text=explain(state, message.job, self._house.inbox.now)), ()

    def _story(self, ref: int, message: words.Story, blobs: Sequence[Bytes]) -> Answer:
        events = self._house.store.story(message.job)
        if not events:
            self._house.state.job_info(message.job)
        return words.Events(events=events), ()

    # Names

    def _register(self, ref: int, message: words.Register, blobs: Sequence[Bytes]) -> Answer:
        check_name(message.endpoint.name, "an actor")
        check_id(message.endpoint.actor_id, "an actor")
        self._house.inbox.ask(NameRegistered(session=self.session, ref=ref, register=message))
        return None

    def _unregister(self, ref: int, message: words.Unregister, blobs: Sequence[Bytes]) -> Answer:
        self._house.inbox.ask(NameUnregistered(session=self.session, ref=ref, actor_id=message.actor_id))
        return None

    def _watch(self, ref: int, message: words.Watch, blobs: Sequence[Bytes]) -> Answer:
        if message.key.partition(":")[0] not in ("name", "actor"):
            raise InvalidRequest(f"{message.key!r} is no key: write name:NAMESPACE/NAME or actor:ID")
        self._audience.of_name.add(message.key, self)
        self._names.pop(message.key, None)
        return self._names_now(message.key)

    def _names_now(self, key: str) -> tuple[words.Names, list[Bytes]]:
        names = self._house.state.names(key)
        ended, error = self._house.with_error(names.ended)
        return evolve(names, ended=ended), error

    def _unwatch(self, ref: int, message: words.Unwatch, blobs: Sequence[Bytes]) -> Answer:
        self._audience.of_name.drop(message.key, self)
        return words.Done(), ()

    def _list_actors(self, ref: int, message: words.ListActors, blobs: Sequence[Bytes]) -> Answer:
        found = actors.list_actors(self._house.state, self._namespace(message.namespace), message.prefix)
        return words.Actors(actors=found), ()

    def _find_actor(self, ref: int, message: words.FindActor, blobs: Sequence[Bytes]) -> Answer:
        state = self._house.state
        if message.actor_id:
            return words.Actors(actors=actors.find_by_id(state, message.actor_id)), ()
        namespace = self.namespace if message.namespace is None else message.namespace
        return words.Actors(actors=actors.find_by_name(state, namespace, message.name)), ()

    # Checkpoints

    def _save_checkpoint(self, ref: int, message: words.SaveCheckpoint, blobs: Sequence[Bytes]) -> Answer:
        with self._house.holding(blobs) as attached:
            check_checkpoint(message, attached, self._house.store.has_blob)
            event = CheckpointTaken(
                session=self.session, ref=ref, number=message.number, blob=message.blob, location=message.location
            )
            self._house.ask_with(event, [message.blob] if message.blob is not None else [])
        return None

    def _fetch_checkpoint(self, ref: int, message: words.FetchCheckpoint, blobs: Sequence[Bytes]) -> Answer:
        state = self._house.state
        kept = state.jobs[checkpoints.living_actor(state, self.session).job_id].checkpoint
        if kept is None:
            return words.Checkpoint(), ()
        data = self._house.store.blob(kept.blob) if kept.blob is not None else None
        if kept.blob is not None and data is None:
            raise StoreError(f"the checkpoint of {kept.attempt_id} is damaged in the controller's store")
        return words.Checkpoint(blob=kept.blob, location=kept.location), [data] if data is not None else ()

    # Workspaces

    def _about_bundle(self, ref: int, message: object, blobs: Sequence[Bytes]) -> Answer:
        self._house.bundles.admit(message, blobs)
        self._front.start_soon(self._house.bundles.serve, self, ref, message, blobs)
        return None

    # Logs

    def _follow_logs(self, ref: int, message: words.FollowLogs, blobs: Sequence[Bytes]) -> Answer:
        if message.job is not None:
            self._house.state.job_info(message.job)
        key = self.session if message.job is None else message.job
        if message.on:
            self._audience.of_log.add(key, self)
        else:
            self._audience.of_log.drop(key, self)
        self._logs.follow(message)
        self._wake.set()
        return words.Done(), ()

    def _watch_logs(self, ref: int, message: words.WatchLogs, blobs: Sequence[Bytes]) -> Answer:
        sources = self._logs.watch(message)
        who = self._audience.of_tree if message.tree else self._audience.of_news
        (who.add if message.follow else who.drop)(message.job, self)
        return sources, ()

    def _read_log(self, ref: int, message: ReadLog, blobs: Sequence[Bytes]) -> Answer:
        found = self._logs.read_here(message)
        if found is not None:
            return found[0], [found[1]]
        self._logs.reading += 1
        self._front.start_soon(self._read_there, ref, message)
        return None

    async def _read_there(self, ref: int, message: ReadLog) -> None:
        try:
            page, data = await self._logs.read_there(message)
            self.reply(ref, page, [data])
        except FrayError as error:
            self.refuse(ref, error)
        finally:
            self._logs.reading -= 1

    # The cluster

    def _list_nodes(self, ref: int, message: words.ListNodes, blobs: Sequence[Bytes]) -> Answer:
        return words.Nodes(nodes=self._house.vitals.nodes(self._house.state.nodes_info())), ()

    def _end_session(self, ref: int, message: words.EndSession, blobs: Sequence[Bytes]) -> Answer:
        self._house.inbox.ask(SessionClosed(session=self.session, reason=message.reason, ref=ref))
        self._left = True
        return None

    # News

    def job_moved(self, info: JobInfo) -> None:
        self._jobs[info.job_id] = info
        if info.state.finished:
            self._audience.of_job.drop(info.job_id, self)
        self._wake.set()

    def measured(self, job_id: JobId, attempts: tuple[AttemptId, ...]) -> None:
        self._measured.setdefault(job_id, {}).update(dict.fromkeys(attempts))
        self._wake.set()

    def names_moved(self, key: str) -> None:
        self._names[key] = None
        self._wake.set()

    def log_moved(self, attempt: AttemptId) -> None:
        self._logs.printed(attempt)
        self._wake.set()

    def log_watched(self, attempt: AttemptId) -> None:
        if self._logs.hint(attempt):
            self._wake.set()

    def finish(self, reason: str) -> None:
        """Send the news that wait, then close the channel. A driver that did not ask for it is told what has ended, and
        not what that means for each of its jobs."""
        self._finish = self._finish or reason
        if not self._left and self.hello.role is not Role.JOB:
            self._jobs.clear()
            self._names.clear()
        self._wake.set()

    def _parting(self) -> SessionEnded | None:
        """What it is told at the end, where that is not its own doing."""
        known = self._house.state.sessions.get(self.session)
        if self._left or self.hello.role is Role.JOB or known is None or not known.over:
            return None
        return session_ended(self._house.state, known, self._house.inbox.time())

    async def run(self) -> None:
        """Send news as there is room, until the channel has ended."""
        try:
            while self.channel.error is None:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._news_waiting():
                    await self.channel.wait_room(*(() if self._more_than_lines() else (LOGS_WAITING_BYTES,)))
                    self._send(self._send_one)
                if self._finish is not None:
                    await self.channel.close(self._finish, self._parting())
        except ChannelClosed:
            pass  # `on_end` has been told

    def _news_waiting(self) -> bool:
        return self.channel.error is None and (self._more_than_lines() or self._logs.behind() is not None)

    def _more_than_lines(self) -> bool:
        return bool(self._names or self._measured or self._jobs or self._logs.has_hints)

    def _send_one(self) -> None:
        """Names first, then measurements, jobs, each after the lines it has printed so far, the lines of the others."""
        if self._names:
            key = next(iter(self._names))
            del self._names[key]
            self.channel.notice(*self._names_now(key))
        elif self._measured:
            job_id, attempts = self._measured.popitem()
            self.channel.notice(words.JobMeasured(job_id=job_id, vitals=self._house.vitals.of(attempts)))
        elif self._jobs:
            self._send_job(next(iter(self._jobs)))
        elif (hint := self._logs.take_hint()) is not None:
            self.channel.notice(hint)
        else:
            self._send_lines(self._logs.behind())

    def _send_job(self, job_id: JobId) -> None:
        attempt = self._logs.behind(job_id)
        if attempt is not None:
            self._send_lines(attempt)
            return
        info, value = self._house.with_value(self._house.vitals.complete(self._jobs.pop(job_id)))
        self.channel.notice(words.JobChanged(job=info), value)

    def _send_lines(self, attempt: AttemptId | None) -> None:
        found = self._logs.take_lines(attempt) if attempt is not None else None
        if found is not None:
            self.channel.notice(found[0], [found[1]])


_ANSWERS: dict[type, Callable[[ClientLink, int, Any, Sequence[Bytes]], Answer]] = {
    words.Launch: ClientLink._launch,
    words.BringSecrets: ClientLink._bring_secrets,
    words.Terminate: ClientLink._terminate,
    words.WatchJobs: ClientLink._watch_jobs,
    words.FindJob: ClientLink._find_job,
    words.ListJobs: ClientLink._list_jobs,
    words.FetchBlob: ClientLink._fetch_blob,
    words.AskStacks: ClientLink._ask_stacks,
    words.Explain: ClientLink._explain,
    words.Story: ClientLink._story,
    words.FollowLogs: ClientLink._follow_logs,
    words.WatchLogs: ClientLink._watch_logs,
    ReadLog: ClientLink._read_log,
    words.Register: ClientLink._register,
    words.Unregister: ClientLink._unregister,
    words.Watch: ClientLink._watch,
    words.Unwatch: ClientLink._unwatch,
    words.ListActors: ClientLink._list_actors,
    words.FindActor: ClientLink._find_actor,
    words.SaveCheckpoint: ClientLink._save_checkpoint,
    words.FetchCheckpoint: ClientLink._fetch_checkpoint,
    words.ListNodes: ClientLink._list_nodes,
    OfferBundle: ClientLink._about_bundle,
    PutPiece: ClientLink._about_bundle,
    words.EndSession: ClientLink._end_session,
}
