"""Real sockets cut in the middle of anything, hosts that are stopped: each call is answered, once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import trio
from attrs import evolve

from fray.net.channel import channel
from fray.net.channel.session import SILENT_PERIODS

sys.path.insert(0, str(Path(__file__).parent))
from cut_network import as_wire, open_saboteur

from tests.processes.test_calls_real import other_process

IN_THE_AIR = 200


@pytest.mark.parametrize(("wire", "calls"), [("tcp", 5_000), ("unix", 5_000)])
async def test_thousands_of_calls_over_connections_that_are_cut_are_answered_once(
    wire: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with other_process(wire, tmp_path) as other:
        (target,) = other.endpoints[0].addresses
        as_wire(monkeypatch, target)
        async with open_saboteur(target, seed=1) as saboteur:
            endpoint = evolve(other.endpoints[0], addresses=(saboteur.address,))
            route = other.caller.route_to(endpoint)
            long = route.start("sleep_forever")
            answers: list[int] = []
            while len(answers) < calls or saboteur.cuts < 10:
                made = [route.start("add", (1,)) for _ in range(IN_THE_AIR)]
                answers += [await call for call in made]
            assert answers == list(range(1, len(answers) + 1)), "in order, and none was run twice"
            assert not long.done(), "it continued under all the cuts"
            data = os.urandom(3_000_000)
            saboteur.bytes_high = 2_000_000
            assert await route.call("echo", (data,)) == data
            saboteur.calm = True
            long.cancel()


async def test_a_host_stopped_for_longer_than_any_heartbeat_answers_once_when_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drop the connection and redial in vain, again and again; the host is alive, so nothing ends."""
    period_s = 0.5  # lateness of half of it counts as our own standstill, and a busy machine is late by 50 ms
    monkeypatch.setattr(channel, "HEARTBEAT_S", period_s)
    async with other_process("unix", tmp_path) as other:
        assert await other.call("add", 1) == 1
        made = [other.start("add", 1) for _ in range(500)]
        other.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.process.pid, os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222 - takes no time
        more = [other.start("add", 1) for _ in range(500)]
        (peer,) = set(other.caller._connections.values())
        with trio.fail_after(20 * SILENT_PERIODS * period_s):
            await peer.disconnected.wait()
        with trio.move_on_after(1.0):
            await trio.sleep_forever()
        assert not any(call.done() for call in more)
        other.process.send_signal(signal.SIGCONT)
        assert [await call for call in (*made, *more)] == list(range(2, 1002))
