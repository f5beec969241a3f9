"""A controller on a network in memory, with clients and nodes that do what the test says."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio

from fray.controller.serve import RunningController, run_controller
from fray.controller.store import Store
from fray.errors import FrayError
from fray.model.access.user_keys import InvitationText, derive_verifier, read_invitation
from fray.model.ids import mint
from fray.model.log_records import record, records
from fray.model.messages.client import ClientHello, ControllerHello, JobChanged, Jobs, Launch, ProcessMark, Role
from fray.model.messages.node import AttemptLog, DesiredState, NodeGoodbye, NodeHello, ObservedState, ReadLog
from fray.model.messages.people import AddUser, KeyGrant, RedeemInvitation
from fray.model.resources import Capacity, Demand
from fray.model.specs import DesiredAttempt, EndReason, EntryKind, JobInfo, JobSpec, ObservedAttempt, Outcome, Phase
from fray.net.channel.public import Channel, RedialPolicy, run_dialed
from fray.net.channel.requests import Requests
from fray.net.codec import Bytes, Kind, blob_id, decode_message, encode_message
from fray.net.transport import AnyCredential, Credential
from fray.net.transports.memory import MemoryNetwork
from fray.node.logs.pages import read_page
from fray.scheduler.state.rows import SchedulerConfig

T = TypeVar("T")
TOKEN = "a-long-random-token"
ADDRESS = "memory:controller/main"
GB = 1024**3


def spec(name: str = "work", payload: bytes = b"payload", **more: Any) -> JobSpec:
    entry = more.pop("entry", EntryKind.CALLABLE)
    return JobSpec(
        job_id=more.pop("job_id", f"{name}-1"),
        name=name,
        namespace=more.pop("namespace", ""),
        entry=entry,
        payload=None if entry is EntryKind.BINARY else blob_id(payload),
        demand=more.pop("demand", Demand(cpu_milli=1000)),
        **more,
    )


def succeeded(value: bytes = b"value") -> tuple[Outcome, bytes]:
    return Outcome(cause=EndReason.SUCCEEDED, value=blob_id(value)), value


class Peer:
    """One end of a channel to the controller; keeps all notices, in order."""

    def __init__(self, greeting: Callable[[], object]) -> None:
        self.greeting = greeting
        self.notices: list[tuple[Any, list[bytes]]] = []
        self.channel: Channel | None = None
        self.requests: Requests | None = None
        self.welcomes: list[ControllerHello] = []
        self.suspensions = 0
        self.patience_s = 60.0
        self.channel_session: str | None = None
        self.ended: FrayError | None = None
        self.scope = trio.CancelScope()
        self._changed = trio.Event()
        self._seen = 0

    def make(self, channel: Channel) -> Peer:
        self.channel = channel
        self.requests = Requests(channel)
        return self

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        assert self.requests is not None
        if self.requests.on_frame(kind, flags, target, ref, body):
            return
        if kind == Kind.REQUEST:
            self.asked(ref, decode_message(body)[0])
            return
        assert kind == Kind.NOTICE
        message, blobs = decode_message(body)
        self.notices.append((message, [bytes(blob) for blob in blobs]))
        self.heard(message, self.notices[-1][1])
        self._poke()

    def heard(self, message: Any, blobs: list[bytes]) -> None:
        pass

    def asked(self, ref: int, message: Any) -> None:
        pass

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        self.welcomes.append(decode_message(greeting)[0])
        assert self.requests is not None
        self.requests.on_reset()
        self._poke()

    def on_suspended(self, why: str) -> None:
        self.suspensions += 1
        self._poke()

    def on_resumed(self) -> None:
        self._poke()

    def on_end(self, error: FrayError) -> None:
        self.ended = error
        assert self.requests is not None
        self.requests.on_end(error)
        self._poke()

    def _poke(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, condition: Callable[[], T | None]) -> T:
        """The first true value of ``condition``, asked again after each thing that happens here."""
        with trio.fail_after(self.patience_s):
            while not (found := condition()):
                await self._changed.wait()
        return found

    async def next_notice(
        self, cls: type[T], where: Callable[[T], bool] = lambda notice: True
    ) -> tuple[T, list[bytes]]:
        """The next notice of a class, after the last one this returned."""

        def find() -> tuple[T, list[bytes]] | None:
            for index in range(self._seen, len(self.notices)):
                message, blobs = self.notices[index]
                if isinstance(message, cls) and where(message):
                    self._seen = index + 1
                    return message, blobs
            return None

        return await self.until(find)

    async def ask(self, message: object, blobs: Sequence[Bytes] = ()) -> Any:
        return (await self.ask_blobs(message, blobs))[0]

    async def ask_blobs(self, message: object, blobs: Sequence[Bytes] = ()) -> tuple[Any, list[bytes]]:
        assert self.requests is not None
        with trio.fail_after(60):
            reply, attached = await self.requests.request(message, blobs)
        return reply, [bytes(blob) for blob in attached]


class Client(Peer):
    """A driver, job or tool."""

    async def launch(self, *specs: JobSpec, payload: bytes = b"payload") -> tuple[JobInfo, ...]:
        payloads = [payload] if any(one.payload for one in specs) else []
        reply = await self.ask(Launch(jobs=specs), payloads)
        assert isinstance(reply, Jobs)
        return reply.jobs

    async def job(self, job_id: str, where: Callable[[JobInfo], bool]) -> tuple[JobInfo, list[bytes]]:
        """The next news of a job that fits."""
        notice, blobs = await self.next_notice(JobChanged, lambda n: n.job.job_id == job_id and where(n.job))
        return notice.job, blobs

    async def job_ended(self, job_id: str) -> tuple[JobInfo, list[bytes]]:
        return await self.job(job_id, lambda info: info.state.finished)


class Node(Peer):
    """A machine whose attempts run (and stop) when the test says so, or at once."""

    def __init__(self, greeting: Callable[[], NodeHello], *, obedient: bool = True) -> None:
        super().__init__(greeting)
        self.name = greeting().node
        self.obedient = obedient
        self.desired: dict[str, DesiredAttempt] = {}
        self.held: dict[str, ObservedAttempt] = {}
        self.values: dict[str, bytes] = {}
        self.payloads: dict[str, bytes] = {}
        self.logs: dict[str, list[tuple[int, bytes]]] = {}
        """Records on its disk by the number of their first line, without those that `print_lines` has only pushed."""
        self.answers = True

    def on_reset(self, greeting: bytes) -> None:
        super().on_reset(greeting)
        self.report(full=True)

    def report(self, *attempts: str, full: bool = False, gone: Sequence[str] = ()) -> None:
        observed = tuple(self.held.values()) if full else tuple(self.held[attempt] for attempt in attempts)
        values = [self.values[one.attempt_id] for one in observed if one.outcome is not None and one.outcome.value]
        assert self.channel is not None
        self.channel.notice(ObservedState(full=full, observed=observed, removed=tuple(gone)), values)

    def heard(self, message: Any, blobs: list[bytes]) -> None:
        if isinstance(message, DesiredState):
            self.payloads |= {blob_id(blob): blob for blob in blobs}
            if message.full:
                self.desired = {}
            self.desired |= {desired.attempt_id: desired for desired in message.desired}
            for attempt in message.removed:
                self.desired.pop(attempt, None)
            if self.obedient:
                self.obey()

    def obey(self) -> None:
        """Start, stop and forget attempts as desired."""
        gone = [attempt for attempt in self.held if attempt not in self.desired]
        for attempt in gone:
            del self.held[attempt]
        if gone:
            self.report(gone=gone)
        for attempt, desired in self.desired.items():
            held = self.held.get(attempt)
            if desired.stop and (held is None or held.phase is not Phase.ENDED):
                self.end(attempt, Outcome(cause=desired.stop_cause))
            elif held is None:
                self.held[attempt] = ObservedAttempt(attempt_id=attempt, phase=Phase.RUNNING, pid=77)
                self.report(attempt)

    def end(self, attempt: str, outcome: Outcome, value: bytes = b"") -> None:
        assert self.channel is not None
        end = self.next_line(attempt)
        self.channel.notice(AttemptLog(attempt_id=attempt, first=end, end=end, ended=True))
        self.held[attempt] = ObservedAttempt(attempt_id=attempt, phase=Phase.ENDED, outcome=outcome)
        self.values[attempt] = value
        self.report(attempt)

    def succeed(self, attempt: str, value: bytes = b"value") -> None:
        self.end(attempt, *succeeded(value))

    def print_lines(self, attempt: str, *texts: str) -> None:
        assert self.channel is not None
        first, end, data = self.write_lines(attempt, *texts)
        self.channel.notice(AttemptLog(attempt_id=attempt, first=first, end=end), [data])

    def write_lines(self, attempt: str, *texts: str) -> tuple[int, int, bytes]:
        """Write lines to its disk only."""
        first = self.next_line(attempt)
        data = record("out", first, 1.0 + first, "".join(f"{text}\n" for text in texts).encode())
        self.logs.setdefault(attempt, []).append((first, data))
        return first, first + len(texts), data

    def next_line(self, attempt: str) -> int:
        kept = self.logs.get(attempt)
        return next(found[2] + found[3] for found, _, _ in records(kept[-1][1])) if kept else 0

    def asked(self, ref: int, message: Any) -> None:
        assert isinstance(message, ReadLog)
        assert self.channel is not None
        if self.answers:
            kept = self.logs.get(message.attempt_id, [])
            page, data = read_page([(first, lambda data=data: data) for first, data in kept], message, 1000.0)  # type: ignore[misc]
            self.channel.reply(ref, page, [data])

    def say_goodbye(self) -> None:
        assert self.channel is not None
        self.channel.notice(NodeGoodbye(reason="drained"))

    async def wait_desired(self, attempt: str) -> DesiredAttempt:
        return await self.until(lambda: self.desired.get(attempt))


class Stage:
    """One cluster: a store, a network, and at most one controller at a time."""

    def __init__(self, nursery: trio.Nursery, store: Store, **options: Any) -> None:
        self.nursery = nursery
        self.store = store
        self.rng = random.Random(7)
        self.network = MemoryNetwork(self.rng)
        self.options = options
        self.controller: RunningController = None  # type: ignore[assignment]
        self._scope = trio.CancelScope()
        self._down = trio.Event()

    async def start(self) -> RunningController:
        """Start the controller (again)."""
        self._scope, self._down = trio.CancelScope(), trio.Event()
        self.controller = await self.nursery.start(self._run)
        return self.controller

    async def _run(self, task_status: trio.TaskStatus[RunningController]) -> None:
        try:
            with self._scope:
                network = self.network.at("controller")
                options = {"token": TOKEN, **self.options}
                await run_controller(self.store, network, [ADDRESS], rng=self.rng, task_status=task_status, **options)
        finally:
            self._down.set()

    async def crash(self) -> None:
        """End the controller in the middle of whatever it does."""
        self._scope.cancel()
        await self._down.wait()
        self.network.crash("controller")

    async def client(
        self,
        session: str | None = None,
        role: Role = Role.DRIVER,
        *,
        host: str = "driver",
        attempt_id: str | None = None,
        namespace: str | None = None,
        grace_s: float = 30.0,
        process: ProcessMark | None = None,
        credential: AnyCredential = None,
        user: str = "",
    ) -> Client:
        hello = ClientHello(
            session=session or attempt_id or f"session-{mint(self.rng)}",
            role=role,
            attempt_id=attempt_id,
            namespace=namespace,
            grace_s=grace_s,
            process=process,
            user=user,
        )
        client = Client(lambda: hello)
        await self.dial(client, host, credential)
        return client

    async def person(self, user: str, role: str, admin: Client | None = None) -> Credential:
        """Invite a person and make its key, as ``fray user add`` and ``fray login`` do."""
        admin = admin or await self.client(role=Role.TOOL, host="admin")
        invitation = read_invitation((await admin.ask(AddUser(user=user, role=role))).text)
        grant = await self.redeem(invitation, "secret of " + user)
        return Credential(grant.key_id, derive_verifier("secret of " + user, invitation.key_id))

    async def redeem(self, invitation: InvitationText, secret: str) -> KeyGrant:
        """Redeem an invitation for a key of this secret."""
        verifier = derive_verifier(secret, invitation.key_id)
        peer = Peer(lambda: RedeemInvitation(verifier=verifier, label="laptop"))
        own = derive_verifier(invitation.secret, invitation.key_id)
        await self.dial(peer, "laptop", Credential(invitation.key_id, own))
        grant: Any = peer.welcomes[0]
        peer.scope.cancel()
        assert isinstance(grant, KeyGrant)
        return grant

    async def node(
        self,
        name: str = "n1",
        *,
        incarnation: str | None = None,
        cpu: int = 4,
        holds: Sequence[str] = (),
        process: ProcessMark | None = None,
        obedient: bool = True,
        credential: AnyCredential = None,
        log_archive: str = "",
        lease_s: float = 600.0,
        attributes: Mapping[str, str] | None = None,
        boot_id: str = "boot",
        state_id: str = "",
    ) -> Node:
        incarnation = incarnation or mint(self.rng)

        def hello() -> NodeHello:
            return NodeHello(
                node=name,
                incarnation=incarnation,
                boot_id=boot_id,
                state_id=state_id,
                capacity=Capacity(
                    cpu_milli=cpu * 1000, memory_bytes=16 * GB, disk_bytes=GB, attributes=dict(attributes or {})
                ),
                process=process,
                log_archive=log_archive,
                lease_s=lease_s,
                known_payloads=tuple({*holds, *(node.held if node is not None else ())}),
            )

        node: Node | None = None
        node = Node(hello, obedient=obedient)
        node.held |= {held: ObservedAttempt(attempt_id=held, phase=Phase.RUNNING, pid=77) for held in holds}
        await self.dial(node, name, credential)
        return node

    async def dial(self, peer: Peer, host: str, credential: AnyCredential = None) -> None:
        """Hold the peer's channel in the background; raises what its first connection is refused for."""
        await self.nursery.start(self._hold, peer, host, credential or Credential("cluster", TOKEN))

    async def _hold(self, peer: Peer, host: str, credential: AnyCredential, task_status: trio.TaskStatus[None]) -> None:
        failed: list[FrayError] = []
        with peer.scope:
            async with trio.open_nursery() as nursery:

                async def run(task_status: trio.TaskStatus[Channel]) -> None:
                    try:
                        await run_dialed(
                            self.network.at(host),
                            [ADDRESS],
                            credential,
                            greeting=lambda: encode_message(peer.greeting()),
                            handler=peer.make,
                            incarnation=mint(self.rng),
                            policy=RedialPolicy(refused_is_final=False, give_up_s=None),
                            rng=self.rng,
                            session=peer.channel_session,
                            task_status=task_status,
                        )
                    except FrayError as error:
                        if peer.channel is not None:
                            raise
                        failed.append(error)
                        task_status.started(None)

                await nursery.start(run)
                if not failed:
                    task_status.started()
        if failed:
            raise failed[0]


@asynccontextmanager
async def stage(store: Store | None = None, *, begin: bool = True, **options: Any) -> AsyncIterator[Stage]:
    """A cluster in memory; all of it ends with the block."""
    options.setdefault("rules", SchedulerConfig())
    try:
        async with trio.open_nursery() as nursery:
            place = Stage(nursery, store or Store.memory(), **options)
            with trio.fail_after(100_000):
                if begin:
                    await place.start()
                yield place
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None
