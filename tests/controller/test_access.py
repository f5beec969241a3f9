"""Every request of the protocol, by every role, against a controller: what is answered is what the table says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define

from fray.controller.connections.access import FILTERED, NARROWED, OF_SENDER
from fray.controller.connections.client_requests import HANDLERS
from fray.errors import FrayError, ProtocolMismatch, Refused, Unauthorized
from fray.model.access.roles import ACCESS, Access, AccessRole, access_of, table_lines
from fray.model.messages import bundles, client, history, machine_groups, maintenance, node, people, tunnels, usage
from fray.model.messages.client import ActorEndpoint, Role
from fray.model.messages.large_values import value_name
from fray.model.reservations import ReservationSpec
from fray.model.resources import Demand
from fray.model.specs import EndReason, EntryKind, JobState, Outcome
from fray.net.channel.channel import Channel
from fray.net.codec import MESSAGES, Bytes, blob_id
from fray.net.transport import Credential
from fray.net.tunnels.multiplexer import TunnelEndpoint, TunnelFlow, TunnelMultiplexer
from tests.support.controller import Client, Stage, spec, stage

REQUESTS = sorted(ACCESS, key=lambda each: each.__name__)
ALLOWED, DENIED = "allowed", "denied"


def test_every_request_of_the_protocol_has_a_row() -> None:
    """Look at their docstrings, which say the reply: a request without a row is refused to all, and fails here."""
    said = {cls for cls in MESSAGES.values() if "Reply: `" in (cls.__doc__ or "")}
    of_others = {node.JoinRequest, people.RedeemInvitation}  # greetings, which keys of their own allow
    of_nodes_and_hosts = {cls for cls in said if cls.__module__.endswith(("messages.node", "messages.calls"))}
    rows = set(ACCESS)
    assert said - of_others - (of_nodes_and_hosts - {node.ReadLog}) <= rows
    assert set(HANDLERS) | {bundles.FetchBundle, tunnels.OpenTunnel, tunnels.RunCommand} == rows


def test_every_row_that_says_own_is_narrowed_filtered_or_about_the_sender() -> None:
    own = {request for request, row in ACCESS.items() if Access.OWN in row.values()}
    assert own == {*NARROWED, *FILTERED, *OF_SENDER}
    assert not set(NARROWED) & set(FILTERED)
    assert not set(OF_SENDER) & {*NARROWED, *FILTERED}


def test_the_page_about_security_has_the_table() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "security.md").read_text()
    assert "\n".join(table_lines()) in page


def test_strangers_may_do_nothing_and_viewers_run_nothing() -> None:
    assert all(row[AccessRole.NONE] is Access.NO for row in ACCESS.values())
    runs_code = {
        client.Launch,
        client.Register,
        client.Watch,
        tunnels.OpenTunnel,
        tunnels.RunCommand,
        client.CreateJoinToken,
    }
    runs_code |= {client.GetStacks, client.ProvideSecrets, client.SaveCheckpoint, bundles.OfferBundle}
    assert all(ACCESS[request][AccessRole.VIEWER] is Access.NO for request in runs_code)


@define
class Side:
    """Things of one user in the cluster."""

    user: str
    job: str = ""
    running: str = ""
    attempt: str = ""
    value: str = ""
    chunk: str = ""
    reservation: str = ""
    namespace: str = ""
    session: str = ""
    key: str = ""

    @property
    def actor(self) -> str:
        return f"{self.user}-actor"


SAMPLES: dict[type, Callable[[Side], Any]] = {
    client.Launch: lambda side: client.Launch(jobs=(_program(f"{side.user}-new", side.namespace),)),
    client.ProvideSecrets: lambda side: client.ProvideSecrets(secrets={side.running: {"A": "b"}}),
    client.Terminate: lambda side: client.Terminate(jobs=(side.running,)),
    client.Requeue: lambda side: client.Requeue(generations={side.running: 0}),
    client.WatchJobs: lambda side: client.WatchJobs(jobs=(side.running,)),
    client.FindJob: lambda side: client.FindJob(name=f"{side.user}-work", namespace="*"),
    client.ListJobs: lambda side: client.ListJobs(namespace="*"),
    client.ListGroups: lambda side: client.ListGroups(namespace="*"),
    client.FetchBlob: lambda side: client.FetchBlob(blob=blob_id(b"payload")),
    client.GetStacks: lambda side: client.GetStacks(job=side.running),
    client.Explain: lambda side: client.Explain(job=side.running),
    client.GetEvents: lambda side: client.GetEvents(job=side.running),
    client.GetJobSpec: lambda side: client.GetJobSpec(job=side.running),
    client.FollowLogs: lambda side: client.FollowLogs(job=side.running),
    client.WatchLogs: lambda side: client.WatchLogs(job=side.running, tree=True),
    node.ReadLog: lambda side: node.ReadLog(attempt_id=side.attempt),
    client.CreateReservation: lambda side: client.CreateReservation(spec=_reservation(f"{side.user}-more", side)),
    client.RenewReservation: lambda side: client.RenewReservation(reservation_id=side.reservation),
    client.ReleaseReservation: lambda side: client.ReleaseReservation(reservation_id=side.reservation),
    client.WatchReservation: lambda side: client.WatchReservation(reservation_id=side.reservation),
    client.ListReservations: lambda side: client.ListReservations(namespace="*"),
    client.Register: lambda side: client.Register(endpoint=_endpoint("some", "some-actor")),
    client.Unregister: lambda side: client.Unregister(actor_id="some-actor"),
    client.Watch: lambda side: client.Watch(key=f"actor:{side.actor}"),
    client.Unwatch: lambda side: client.Unwatch(key=f"actor:{side.actor}"),
    client.ListActors: lambda side: client.ListActors(namespace="*"),
    client.FindActor: lambda side: client.FindActor(actor_id=side.actor),
    client.SaveCheckpoint: lambda side: client.SaveCheckpoint(number=1, location="file:///state"),
    client.FetchCheckpoint: lambda side: client.FetchCheckpoint(),
    client.ReportWait: lambda side: client.ReportWait(waiting=True),
    client.ListNodes: lambda side: client.ListNodes(),
    client.CreateJoinToken: lambda side: client.CreateJoinToken(machine="m"),
    client.EndSession: lambda side: client.EndSession(),
    machine_groups.ListMachines: lambda side: machine_groups.ListMachines(),
    machine_groups.ScaleGroup: lambda side: machine_groups.ScaleGroup(group="g", max=1),
    maintenance.CordonNodes: lambda side: maintenance.CordonNodes(nodes=("n1",)),
    maintenance.UncordonNodes: lambda side: maintenance.UncordonNodes(nodes=("n1",)),
    maintenance.WhatIf: lambda side: maintenance.WhatIf(job=_program("forecast", "")),
    usage.GetQueue: lambda side: usage.GetQueue(),
    usage.GetUsage: lambda side: usage.GetUsage(),
    usage.GetCounts: lambda side: usage.GetCounts(),
    history.GetAttempts: lambda side: history.GetAttempts(),
    history.SumAttempts: lambda side: history.SumAttempts(by="job", since=0.0, until=4e9),
    history.GetNodeHistory: lambda side: history.GetNodeHistory(),
    history.FindEvents: lambda side: history.FindEvents(),
    history.GetReservationHistory: lambda side: history.GetReservationHistory(),
    history.GetCapacity: lambda side: history.GetCapacity(since=0.0, until=4e9),
    bundles.OfferBundle: lambda side: bundles.OfferBundle(bundle="a" * 64, parts=("b" * 64,), size_bytes=10),
    bundles.PutChunk: lambda side: bundles.PutChunk(chunk=blob_id(b"chunk")),
    bundles.OfferValue: lambda side: bundles.OfferValue(value=side.value, size_bytes=5, parts=(side.chunk,)),
    bundles.FetchBundle: lambda side: bundles.FetchBundle(bundle="a" * 64),
    bundles.FetchChunk: lambda side: bundles.FetchChunk(chunk=side.chunk, value=side.value),
    bundles.FetchValue: lambda side: bundles.FetchValue(value=side.value),
    people.AddUser: lambda side: people.AddUser(user="carl", role="admin"),
    people.RemoveUser: lambda side: people.RemoveUser(user=side.user),
    people.ListUsers: lambda side: people.ListUsers(),
    people.GetLaunchUsers: lambda side: people.GetLaunchUsers(),
    people.ListKeys: lambda side: people.ListKeys(user=side.user),
    people.RevokeKeys: lambda side: people.RevokeKeys(keys=(side.key,)),
    people.ShareNamespace: lambda side: people.ShareNamespace(namespace=side.namespace, users=("carl",)),
    people.ListNamespaces: lambda side: people.ListNamespaces(),
    people.ReadAudit: lambda side: people.ReadAudit(),
    tunnels.OpenTunnel: lambda side: tunnels.OpenTunnel(to=side.running, port="http"),
    tunnels.RunCommand: lambda side: tunnels.RunCommand(job=side.running, member=1, argv=("true",)),
}
ATTACHED: dict[type, bytes] = {bundles.PutChunk: b"chunk"}


def _program(name: str, namespace: str) -> Any:
    return spec(name, namespace=namespace, entry=EntryKind.BINARY, argv=("true",))


def _endpoint(name: str, actor_id: str) -> ActorEndpoint:
    return ActorEndpoint(actor_id=actor_id, name=name, job_id="", namespace="", addresses=("tcp:a:1",), key="secret")


def _reservation(name: str, side: Side) -> ReservationSpec:
    demand = Demand(cpu_milli=10_000_000)
    return ReservationSpec(reservation_id=f"{name}-1", name=name, namespace=side.namespace, demand=demand)


class World:
    """A cluster with the things of two users, and a client for each role of the first."""

    def __init__(self, cluster: Stage) -> None:
        self.cluster = cluster
        self.sides = {"ada": Side("ada"), "bob": Side("bob")}

    async def set_up(self) -> None:
        cluster = self.cluster
        admin = await cluster.client(role=Role.TOOL)
        self.node = await cluster.node(cpu=64)
        for side in self.sides.values():
            await self._fill(side, await cluster.person(side.user, "user", admin))
        self.viewer = await cluster.person("vic", AccessRole.VIEWER, admin)
        self.admin = admin

    async def _fill(self, side: Side, credential: Credential) -> None:
        driver = await self.cluster.client(credential=credential, namespace=f"{side.user}s-space")
        side.namespace, side.session, side.key = f"{side.user}s-space", driver.greeting().session, credential.key_id  # type: ignore[attr-defined]
        await driver.launch(spec(f"{side.user}-work"), spec(f"{side.user}-done"))
        side.running, side.job, side.attempt = f"{side.user}-work-1", f"{side.user}-done-1", f"{side.user}-work-1:0:0"
        desired = await self.node.wait_desired(side.attempt)
        await self.node.wait_desired(f"{side.job}:0:0")
        await driver.job(side.running, lambda info: info.state is JobState.RUNNING)
        content = side.user.encode().ljust(5)
        side.chunk = hashlib.sha256(content).hexdigest()
        side.value = value_name(5, (side.chunk,))
        await driver.ask(bundles.PutChunk(chunk=side.chunk), [content])
        assert (await driver.ask(bundles.OfferValue(value=side.value, size_bytes=5, parts=(side.chunk,)))).complete
        self.node.end(f"{side.job}:0:0", Outcome(cause=EndReason.SUCCEEDED, value=side.value))
        await driver.job_ended(side.job)
        await driver.ask(client.Register(endpoint=_endpoint(f"{side.user}-name", side.actor)))
        await driver.ask(client.CreateReservation(spec=_reservation(f"{side.user}-held", side)))
        side.reservation = f"{side.user}-held-1"
        self.node.print_lines(side.attempt, f"line of {side.user}")
        if side.user == "ada":
            self.own = credential
            self.job_key = Credential(f"attempt:{side.attempt}", desired.key)

    async def ask(self, role: AccessRole, message: Any) -> str:
        """Send a request by a connection of this role; return whether it is allowed, and the answer as text."""
        if role is AccessRole.NODE:
            peer: Any = self.node
        elif role is AccessRole.NONE:
            with pytest.raises(Unauthorized):
                await self.cluster.client(credential=Credential("user:unknown", "no key"))
            return DENIED
        else:
            peer = await self._client(role)
        try:
            if isinstance(message, tunnels.RunCommand):
                return await _open_tunnel(peer, tunnels.OpenTunnel(to=message.job, command=message))
            if isinstance(message, tunnels.OpenTunnel):
                return await _open_tunnel(peer, message)
            blobs = [ATTACHED[type(message)]] if type(message) in ATTACHED else []
            return f"{ALLOWED} {await peer.ask(message, blobs)!r}"
        except Unauthorized:
            return DENIED
        except ProtocolMismatch:
            return DENIED  # of a node: "… is not a request of nodes"
        except FrayError:
            return ALLOWED  # it was handled: it is about something that is not there

    async def _client(self, role: AccessRole) -> Client:
        if role is AccessRole.JOB:
            return await self.cluster.client(
                role=Role.JOB, attempt_id=self.sides["ada"].attempt, credential=self.job_key, host=f"job-{role}"
            )
        if role is AccessRole.VIEWER:
            return await self.cluster.client(credential=self.viewer)
        await self.admin.ask(people.AddUser(user="ada", role=role))
        return await self.cluster.client(credential=self.own)


def _refuse_tunnels(*_: Any) -> TunnelEndpoint:
    raise Refused("no tunnels here")


async def _open_tunnel(peer: Client, message: tunnels.OpenTunnel) -> str:
    """Open a tunnel as a peer of the controller; what it is refused for comes back as its end."""

    class End:
        flow: TunnelFlow
        error: FrayError | None = None
        done = trio.Event()

        def on_credit(self, size_bytes: int, body: Bytes) -> None:
            self.done.set()

        def on_data(self, flags: int, body: Bytes) -> None:
            pass

        def on_close(self, error: FrayError | None) -> None:
            self.error = error
            self.done.set()

        def on_room(self) -> None:
            pass

    end, channel = End(), peer.channel
    end.done = trio.Event()
    assert isinstance(channel, Channel)
    multiplexer = TunnelMultiplexer(channel, dialed=True, on_open=_refuse_tunnels)
    first = peer.on_frame

    def on_frame(kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if not multiplexer.on_frame(kind, flags, target, ref, body):
            first(kind, flags, target, ref, body)

    peer.on_frame = on_frame  # type: ignore[method-assign]
    end.flow = multiplexer.open(message, b"", end, window_bytes=1000, counted=True)
    with trio.fail_after(60):
        await end.done.wait()
    return DENIED if isinstance(end.error, Unauthorized) or "nodes cannot" in str(end.error) else ALLOWED


def _shows(answer: str, side: Side) -> bool:
    return answer.startswith(ALLOWED) and side.user in answer.replace("fray", "")


ENDS_SOMETHING = {
    *(client.Terminate, client.Requeue, client.ReleaseReservation, client.EndSession),
    *(people.RemoveUser, people.RevokeKeys),
}
"""Requests that end what the next one would be about: each of them gets a cluster of its own."""


NAMELESS = (client.ListGroups, client.ListNodes, history.GetNodeHistory, maintenance.WhatIf)
"""Requests whose answers name others only in what `tests/controller/test_hidden_names.py` is about."""


@pytest.mark.parametrize("request_class", REQUESTS, ids=lambda each: each.__name__)
async def test_each_role_gets_what_the_table_says(request_class: type, autojump_clock: Any) -> None:
    cases = [(role, user) for role in AccessRole for user in ("ada", "bob")]
    shared = [
        case for case in cases if request_class not in ENDS_SOMETHING or access_of(case[0], request_class) is Access.NO
    ]
    for some in (shared, *([case] for case in cases if case not in shared)):
        async with stage() as cluster:
            world = World(cluster)
            await world.set_up()
            for role, user in some:
                answer = await world.ask(role, SAMPLES[request_class](world.sides[user]))
                _check(world, role, request_class, user, answer)


def _check(world: World, role: AccessRole, request_class: type, user: str, answer: str) -> None:
    access, bob = access_of(role, request_class), world.sides["bob"]
    text = f"{role} {request_class.__name__} of {user}: {answer}"
    if access is Access.NO:
        assert answer == DENIED, text
    elif access is Access.ALL or request_class in OF_SENDER:
        assert answer.startswith(ALLOWED), text
    elif request_class in FILTERED:
        assert not _shows(answer, bob), text
        # A job makes its sums itself, of the attempts that it gets.
        is_left_out = role is AccessRole.JOB and request_class is history.SumAttempts and "rows=()" in answer
        assert user == "bob" or request_class in NAMELESS or is_left_out or _shows(answer, world.sides[user]), text
    elif role is AccessRole.VIEWER or (user == "bob" and request_class is people.ListKeys):
        assert not _shows(answer, bob), text
    else:
        assert answer.startswith(ALLOWED if user == "ada" else DENIED), text
