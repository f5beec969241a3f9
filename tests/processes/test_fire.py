"""P3, P4 and P7 under fire: `kill -9` in the midst of 10,000 calls, and a controller that dies under load."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import trio

import fray
from fray import ActorConfig, ActorDied, OutcomeUnknown

sys.path.insert(0, str(Path(__file__).parent))
from fire_functions import NUMBER, Recorder, effects

from tests.processes.lab import TOKEN, Lab, connected

pytestmark = pytest.mark.timed

IN_FLIGHT = 10_000
ALL_ENDED_WITHIN_S = 20.0


async def kill_in_the_midst(actor: fray.ActorHandle, call: fray.ActorMethod, path: str) -> dict[int, str]:
    """Outcomes of 10,000 calls whose process died while it answered them."""
    pid = await actor.pid()
    killer = threading.Thread(target=kill_when_it_has_run, args=(pid, path, IN_FLIGHT // 10))
    killer.start()
    made = [call.start(number) for number in range(IN_FLIGHT)]
    ends: dict[int, str] = {}
    with trio.fail_after(ALL_ENDED_WITHIN_S):
        for number, future in enumerate(made):
            try:
                assert await future == number
                ends[number] = "answered"
            except OutcomeUnknown:
                ends[number] = "unknown"
            except ActorDied:
                ends[number] = "undelivered"
    killer.join()
    return ends


def kill_when_it_has_run(pid: int, path: str, calls: int) -> None:
    """Kill the process from a thread, which does not wait for this process to be idle."""
    while not os.path.exists(path) or os.path.getsize(path) < calls * NUMBER.size:
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.promise("P4")
async def test_every_call_in_flight_at_a_kill_ends_and_none_has_run_twice(tmp_path: Path) -> None:
    path = str(tmp_path / "effects")
    async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster, cluster.open_scope("run") as scope:
        actor = await scope.create_actor(Recorder, path, on_failure="absorb")
        ends = await kill_in_the_midst(actor, actor.take, path)
        ran = effects(path)
        assert set(ran.values()) == {1}
        assert all(ran[number] == 1 for number, end in ends.items() if end == "answered")
        assert all(ran[number] == 0 for number, end in ends.items() if end == "undelivered")
        assert "unknown" in ends.values()


async def test_with_restarts_undelivered_calls_run_once_and_unknown_outcomes_are_reported(tmp_path: Path) -> None:
    path = str(tmp_path / "effects")
    async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster, cluster.open_scope("run") as scope:
        actor = await scope.create_actor(Recorder, path, max_restarts=3)
        ends = await kill_in_the_midst(actor, actor.take, path)
        ran = effects(path)
        assert set(ran.values()) == {1}, "none ran twice"
        assert {end for end in ends.values() if end != "unknown"} == {"answered"}
        assert all(ran[number] == 1 for number, end in ends.items() if end == "answered")
        assert await actor.take(IN_FLIGHT) == IN_FLIGHT, "the new process was found without any action"


async def test_calls_that_may_be_repeated_are_all_answered_by_the_next_process(tmp_path: Path) -> None:
    path = str(tmp_path / "effects")
    async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster, cluster.open_scope("run") as scope:
        actor = await scope.create_actor(Recorder, path, max_restarts=3)
        ends = await kill_in_the_midst(actor, actor.take.options(idempotent=True), path)
        ran = effects(path)
        assert set(ends.values()) == {"answered"}
        assert set(ran) == set(range(IN_FLIGHT))
        assert max(ran.values()) <= 2, "twice at most: once in each life"


async def test_a_controller_that_dies_under_load_is_not_noticed_by_calls(lab: Lab, tmp_path: Path) -> None:
    """P7: calls never pass through it. Two deaths, thousands of calls, no pause."""
    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    path = str(tmp_path / "effects")
    with trio.fail_after(90):
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster, cluster.open_scope("run") as scope:
            actor = await scope.create_actor(Recorder, path, actor_config=ActorConfig())
            await actor.pid()
            longest_s, count, done = 0.0, 0, False

            async def load() -> None:
                nonlocal longest_s, count
                while not done:
                    began = trio.current_time()
                    made = [actor.take.start(count + index) for index in range(50)]
                    assert [await call for call in made] == list(range(count, count + 50))
                    longest_s = max(longest_s, trio.current_time() - began)
                    count += 50

            async with trio.open_nursery() as nursery:
                nursery.start_soon(load)
                for _ in range(2):
                    at = count
                    assert lab.kill("controller") == -signal.SIGKILL
                    while count < at + 2000:  # noqa: ASYNC110 - a count, not an event
                        await trio.sleep(0.02)
                    lab.start_controller()
                    await connected(lab)
                    await cluster.list_jobs()
                done = True
            assert longest_s < 2.0
            assert set(effects(path).values()) == {1}
            assert len(effects(path)) == count
