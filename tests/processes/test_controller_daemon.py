"""The real daemon: one clear line for each thing that is wrong, and every way to die."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from fray.errors import Unauthorized
from fray.model.messages.client import ActorEndpoint, ClientHello, Launch, ListJobs, ListNodes, Register, Role, Watch
from fray.model.messages.node import DesiredState, NodeHello, ObservedState
from fray.model.resources import Capacity, Demand
from fray.model.specs import EntryKind, JobSpec, JobState, ObservedAttempt, Phase
from fray.net.channel.public import Channel, RedialPolicy, run_dialed
from fray.net.channel.requests import Requests
from fray.net.codec import Bytes, blob_id, decode_message, encode_message
from fray.net.transport import Credential
from fray.net.transports.pending import PENDING_LIMIT
from fray.net.transports.websocket import WebSocketNetwork
from tests.support.forwarded_port import forward_port
from tests.support.ports import free_port
from tests.support.silent_connections import silent

TOKEN = "a-token-hard-to-guess"


class Daemon:
    """One ``fray-controller`` as a process; reads its log."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.arguments = arguments
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fray.controller.main", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**{k: v for k, v in os.environ.items() if k != "FRAY_TOKEN"}, **(env or {})},
        )

    def line(self, text: str) -> dict[str, Any]:
        """Read the log until a line that says ``text``."""
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            entry = json.loads(line) if line.startswith("{") else {"text": line}
            if text in entry["text"]:
                return entry
        raise AssertionError(f"the daemon ended ({self.process.wait()}) and never said {text!r}: {seen}")

    def started(self) -> str:
        """Return its first address, once it serves."""
        address = self.line("controller started")["addresses"][0]
        assert isinstance(address, str)
        return address

    def ended(self) -> tuple[int, str]:
        """Exit status, and the last line it said."""
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said.strip().splitlines()[-1] if said.strip() else ""

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.fixture
def daemons() -> Iterator[Any]:
    running: list[Daemon] = []

    def start(*arguments: str, **options: Any) -> Daemon:
        running.append(Daemon(*arguments, **options))
        return running[-1]

    yield start
    for daemon in running:
        daemon.kill()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


# Starting, and refusing to


def test_without_a_token_it_makes_one_that_only_the_owner_can_read_and_says_where(daemons: Any, store: str) -> None:
    daemon = daemons("--listen", "127.0.0.1:0", "--store", store)
    entry = daemon.line("using the token in a file")
    file = Path(store) / "token"
    assert entry["file"] == str(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    assert len(token) == 40
    daemon.started()
    daemon.kill()
    daemons("--listen", "127.0.0.1:0", "--store", store).started()
    assert file.read_text().strip() == token


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_with_status_zero(daemons: Any, store: str, number: signal.Signals) -> None:
    daemon = daemons("--listen", "127.0.0.1:0", "--store", store)
    daemon.started()
    daemon.process.send_signal(number)
    status, said = daemon.ended()
    assert (status, json.loads(said)["text"]) == (0, f"shutting down on {number.name}; running jobs continue")
    assert not Path(store, "fray.db-wal").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "nonsense"], "invalid --listen 'nonsense'; expected HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "expected HOST:PORT"),
        (["--listen", "unix:relative.sock"], "write an absolute path"),
        (["--advertise", "lab.example:0"], "invalid --advertise 'lab.example:0'; expected HOST or HOST:PORT"),
        (["--advertise", "fray://lab.example"], "expected HOST or HOST:PORT, as drivers dial it"),
        (["--listen", "8.8.8.8:0", "--insecure"], "is a public address (8.8.8.8), where --insecure is refused"),
        (["--ca-cert", "/nonexistent"], "--ca-cert and --ca-key belong together"),
        (["--token-file", "/nonexistent/token"], "the token file /nonexistent/token cannot be read"),
    ],
)
def test_mistakes_are_reported_in_one_line(daemons: Any, store: str, arguments: list[str], said: str) -> None:
    daemon = daemons("--store", store, *arguments)
    status, line = daemon.ended()
    assert status in (1, 2)
    assert line.startswith("fray-controller: ")
    assert said in line


def test_an_empty_token_is_no_token(daemons: Any, store: str, tmp_path: Path) -> None:
    status, line = daemons("--store", store, env={"FRAY_TOKEN": " "}).ended()
    assert (status, line) == (
        1,
        "fray-controller: FRAY_TOKEN is set but empty: give a token, or unset it to have one created",
    )
    (tmp_path / "token").write_text("\n")
    status, line = daemons("--store", store, "--token-file", str(tmp_path / "token")).ended()
    assert "is empty" in line


def test_a_port_in_use_is_reported_in_one_line(daemons: Any, store: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, line = daemons("--listen", f"127.0.0.1:{port}", "--store", store).ended()
    assert status == 1
    assert line.startswith("fray-controller: ")
    assert str(port) in line
    assert "in use" in line


def test_a_locked_store_is_reported_in_one_line(daemons: Any, store: str) -> None:
    first = daemons("--listen", "127.0.0.1:0", "--store", store)
    first.started()
    status, line = daemons("--listen", "127.0.0.1:0", "--store", store).ended()
    assert status == 1
    assert f"is in use by another controller (process {first.process.pid} on " in line


def test_a_damaged_store_is_reported_in_one_line_and_left_alone(daemons: Any, store: str) -> None:
    Path(store).mkdir()
    Path(store, "fray.db").write_bytes(b"garbage" * 1000)
    status, line = daemons("--listen", "127.0.0.1:0", "--store", store).ended()
    assert status == 1
    assert "is damaged: file is not a database. Nothing was changed." in line
    assert Path(store, "fray.db").read_bytes() == b"garbage" * 1000


# A life after the first


class Peer:
    """A client or node over the real network; the smallest that will do."""

    def __init__(self, greeting: Any) -> None:
        self.greeting = greeting
        self.notices: list[Any] = []
        self.resets = 0
        self.changed = trio.Event()

    def make(self, channel: Channel) -> Peer:
        self.channel = channel
        self.requests = Requests(channel)
        return self

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if not self.requests.on_frame(kind, flags, target, ref, body):
            self.notices.append(decode_message(body)[0])
            self.poke()

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        self.resets += 1
        self.requests.on_reset()
        self.poke()

    def on_suspended(self, why: str) -> None:
        self.poke()

    on_resumed = on_batch

    def on_end(self, error: Exception) -> None:
        self.poke()

    def poke(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, condition: Any) -> Any:
        while not (found := condition()):
            await self.changed.wait()
        return found

    async def ask(self, message: object, *blobs: bytes) -> Any:
        return (await self.requests.request(message, blobs))[0]


async def dialed(nursery: trio.Nursery, address: str, greeting: object, token: str = TOKEN) -> Peer:
    peer = Peer(greeting)

    async def run(task_status: Any) -> None:
        await run_dialed(
            WebSocketNetwork(),
            [address],
            Credential("cluster", token),
            greeting=lambda: encode_message(peer.greeting),
            handler=peer.make,
            incarnation="i",
            policy=RedialPolicy(refused_is_final=False, give_up_s=30),
            rng=random.Random(),
            task_status=task_status,
        )

    await nursery.start(run)
    return peer


def job(name: str) -> JobSpec:
    return JobSpec(
        job_id=f"{name}-1", name=name, namespace="", entry=EntryKind.CALLABLE, payload=blob_id(b"x"),
        demand=Demand(cpu_milli=1000),
    )  # fmt: skip


@pytest.mark.promise("P7")
async def test_kill_minus_nine_loses_nothing_that_was_accepted(daemons: Any, store: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    arguments = ("--listen", address, "--store", store)
    first = daemons(*arguments, env={"FRAY_TOKEN": TOKEN})
    listening = first.started()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            driver = await dialed(nursery, listening, ClientHello(session="s", role=Role.DRIVER, namespace="ns"))
            capacity = Capacity(cpu_milli=1000, memory_bytes=2**30, disk_bytes=0)
            node = await dialed(
                nursery, listening, NodeHello(node="n1", incarnation="n1a", boot_id="b", capacity=capacity)
            )
            node.channel.notice(ObservedState(full=True))
            await driver.ask(Launch(jobs=(job("one"), job("two"))), b"x")
            endpoint = ActorEndpoint(actor_id="a", name="counter", job_id="", namespace="ns", addresses=("tcp:x:1",))
            await driver.ask(Register(endpoint=endpoint))
            wanted = await node.until(lambda: [n for n in node.notices if isinstance(n, DesiredState) and n.desired])
            attempt = wanted[-1].desired[0].attempt_id
            running = ObservedAttempt(attempt_id=attempt, phase=Phase.RUNNING, pid=1)
            node.channel.notice(ObservedState(full=False, observed=(running,)))
            node.greeting = evolve(node.greeting, known_payloads=(attempt,))
            while (await driver.ask(ListJobs())).jobs[0].state is not JobState.RUNNING:
                await driver.until(lambda: True)

            first.process.kill()
            first.process.wait()
            second = daemons(*arguments, env={"FRAY_TOKEN": TOKEN})
            entry = second.line("controller started")
            assert (entry["epoch"], entry["jobs"]) == (2, 2)

            await driver.until(lambda: driver.resets == 2)
            await node.until(lambda: node.resets == 2)
            node.channel.notice(ObservedState(full=True, observed=(running,)))
            again = await node.until(
                lambda: [n for n in node.notices if isinstance(n, DesiredState) and n.epoch == 2 and n.full]
            )
            assert [each.attempt_id for each in again[0].desired] == [attempt]
            states = {one.name: one.state for one in (await driver.ask(ListJobs())).jobs}
            assert states == {"one": JobState.RUNNING, "two": JobState.PENDING}
            names = await driver.ask(Watch(key="name:ns/counter"))
            assert [found.incarnation for found in names.endpoints] == ["s"]
            nursery.cancel_scope.cancel()


async def test_it_serves_a_unix_socket_and_a_port_and_turns_a_wrong_token_away(
    daemons: Any, store: str, tmp_path: Path
) -> None:
    path = tmp_path / "fray.sock"
    daemon = daemons("--listen", "127.0.0.1:0", "--listen", f"unix:{path}", "--store", store, env={"FRAY_TOKEN": TOKEN})
    addresses = daemon.line("controller started")["addresses"]
    hello = ClientHello(session="s", role=Role.TOOL)
    with trio.fail_after(30):
        for address in addresses:
            async with trio.open_nursery() as nursery:
                tool = await dialed(nursery, address, hello)
                assert (await tool.ask(ListJobs(namespace="*"))).jobs == ()
                nursery.cancel_scope.cancel()
            with pytest.raises(ExceptionGroup) as caught:
                async with trio.open_nursery() as nursery:
                    await dialed(nursery, address, hello, token="wrong")
            assert caught.group_contains(Unauthorized)


async def test_silent_connections_lock_no_newcomer_out(daemons: Any, store: str) -> None:
    daemon = daemons("--listen", "127.0.0.1:0", "--store", store, env={"FRAY_TOKEN": TOKEN})
    address = daemon.started()
    capacity = Capacity(cpu_milli=4000, memory_bytes=8 * 10**9, disk_bytes=10**10)
    node = NodeHello(node="n1", incarnation="n1a", boot_id="b", capacity=capacity)
    async with silent(address, PENDING_LIMIT + 1), trio.open_nursery() as nursery:
        with trio.fail_after(30):
            tool = await dialed(nursery, address, ClientHello(session="s", role=Role.TOOL))
            joined = await dialed(nursery, address, node)
            # The welcome comes before the controller has taken the node, and the question goes by another connection.
            await joined.until(lambda: any(isinstance(each, DesiredState) for each in joined.notices))
            assert [each.name for each in (await tool.ask(ListNodes())).nodes] == ["n1"]
        nursery.cancel_scope.cancel()


async def test_a_forwarded_port_is_dialed_where_the_daemon_advertises_it(daemons: Any, store: str) -> None:
    bound: list[str] = []
    hello = ClientHello(session="s", role=Role.TOOL)
    with trio.fail_after(60):
        async with trio.open_nursery() as forwards:
            ports = [await forwards.start(forward_port, lambda: bound[0], []) for _ in range(2)]
            daemon = daemons(
                *("--listen", "127.0.0.1:0", "--store", store, "--advertise", f"localhost:{ports[0]}"),
                env={"FRAY_TOKEN": TOKEN},
            )
            bound.append(daemon.started())
            for address in (f"tcp:localhost:{ports[0]}", bound[0]):
                async with trio.open_nursery() as nursery:
                    tool = await dialed(nursery, address, hello)
                    assert (await tool.ask(ListJobs(namespace="*"))).jobs == ()
                    nursery.cancel_scope.cancel()
            with pytest.raises(ExceptionGroup) as caught:
                async with trio.open_nursery() as nursery:
                    await dialed(nursery, f"tcp:localhost:{ports[1]}", hello)
            assert caught.group_contains(Unauthorized, match="start that server with --advertise HOST:PORT")
            forwards.cancel_scope.cancel()
