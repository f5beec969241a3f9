"""Calls between two operating-system processes, over Unix sockets and over TCP."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve, frozen

from fray.errors import ActorDied, NotPicklable, OutcomeUnknown, RemoteTraceback, Unauthorized
from fray.model.messages.client import ActorEndpoint
from fray.net.codec import from_json
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.calls.caller import Caller
from fray.runtime.calls.futures import CallFuture

HOST = Path(__file__).with_name("calls_host.py")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.parametrize("wire", ["unix", "tcp"])


@frozen
class Other:
    """The other process, seen from here over one kind of wire."""

    caller: Caller
    process: subprocess.Popen[bytes]
    endpoints: tuple[ActorEndpoint, ...]

    async def call(self, method: str, *args: Any, actor: int = 0) -> Any:
        return await self.caller.route_to(self.endpoints[actor]).call(method, args)

    def start(self, method: str, *args: Any, actor: int = 0) -> CallFuture:
        return self.caller.route_to(self.endpoints[actor]).start(method, args)


def start_process(directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(HOST), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@asynccontextmanager
async def other_process(wire: str, directory: Path) -> AsyncIterator[Other]:
    process = start_process(directory)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        lines = [await trio.to_thread.run_sync(process.stdout.readline) for _ in range(2)]
        found = [from_json(ActorEndpoint, line) for line in lines]
        endpoints = tuple(
            evolve(each, addresses=tuple(address for address in each.addresses if address.startswith(wire)))
            for each in found
        )
        caller = Caller(WebSocketNetwork(), None, session="tests", rng=random.SystemRandom())
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(caller.run)
                yield Other(caller, process, endpoints)
                nursery.cancel_scope.cancel()
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


async def test_calls_reach_the_other_process_and_come_back(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        assert await other.call("pid") == other.process.pid
        assert await other.call("add", 2) == 2
        assert await other.call("add", 3, actor=1) == 3


async def test_an_actor_with_only_sync_methods_may_have_the_main_thread(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        assert await other.call("threads", actor=1) == ("MainThread", "MainThread")


async def test_ten_thousand_calls_in_the_air_arrive_in_order(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        for actor in (0, 1):
            made = [other.start("add", 1, actor=actor) for _ in range(10_000)]
            assert [await call for call in made] == list(range(1, 10_001))


@pytest.mark.promise("P2")
async def test_errors_show_where_they_were_raised(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        with pytest.raises(LookupError, match="over there") as caught:
            await other.call("fail")
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "calls_host.py" in caught.value.__cause__.text
        with pytest.raises(NotPicklable):
            await other.call("echo", threading.Lock())


async def test_large_messages_pass_and_small_ones_pass_beside_them(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        data = os.urandom(20_000_000)
        large = other.start("echo", data)
        assert await other.call("add", 1, actor=1) == 1
        assert await large == data


async def test_a_cancelled_call_is_cancelled_there(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        assert await other.call("add", 1) == 1, "connected, so that the next call is sent at once"
        with trio.move_on_after(0.2):
            await other.call("sleep_forever")
        assert await other.call("wait_cancelled")


async def test_a_busy_thread_lets_calls_to_other_actors_through(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        spinning = other.start("spin", 20.0, actor=1)
        assert [await other.call("add", 1) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert not spinning.done()
        spinning.cancel()
        assert await other.call("add", 1, actor=1) == 1, "the method saw that it was cancelled"


@pytest.mark.promise("P3")
@pytest.mark.timed
async def test_killing_the_host_ends_calls_in_flight_as_unknown(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        call = other.start("sleep_forever")
        await other.call("add", 1)
        other.process.kill()
        began = trio.current_time()
        with pytest.raises(OutcomeUnknown):
            await call
        with pytest.raises(ActorDied):
            await other.call("add", 1)
        assert trio.current_time() - began < 5


async def test_a_host_that_is_stopped_and_continued_answers_late(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        assert await other.call("add", 1) == 1
        other.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.process.pid, os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222 - takes no time
        call = other.start("add", 1)
        with trio.move_on_after(0.5):
            await trio.sleep_forever()
        assert not call.done()
        other.process.send_signal(signal.SIGCONT)
        assert await call == 2


async def test_a_host_that_ends_in_order_says_goodbye(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        call = other.start("sleep_forever")
        await other.call("add", 1)
        assert other.process.stdin is not None
        other.process.stdin.close()
        with pytest.raises(ActorDied):
            await call
        assert await trio.to_thread.run_sync(other.process.wait, 5) == 0


@pytest.mark.promise("P9")
async def test_a_wrong_key_gets_nothing(wire: str, tmp_path: Path) -> None:
    async with other_process(wire, tmp_path) as other:
        wrong = evolve(other.endpoints[0], key="wrong")
        with pytest.raises(Unauthorized):
            await other.caller.route_to(wrong).call("add", (1,))
