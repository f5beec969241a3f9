"""Servers of games over real sockets: episodes, repeated and wrong requests, errors of the game, limits."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("hypercorn")
pytestmark = pytest.mark.torch

from fray.errors import InvalidRequest  # noqa: E402
from fray.tinker import game  # noqa: E402
from fray.tinker.core.environments import shard_of  # noqa: E402
from fray.tinker.http_client import JsonConnection, JsonReply, ServerUnreachable  # noqa: E402
from tests.support.ports import free_port  # noqa: E402


class Count:
    """Game that sums the lengths of actions until ``goal``."""

    def reset(self, goal: int = 2, pause: float = 0.0) -> str | None:
        if goal < 1:
            raise ValueError("goal below 1")
        self.goal, self.sum = goal, 0
        time.sleep(pause)
        return f"goal {goal}" if goal != 7 else None

    def step(self, action: str) -> Any:
        if action == "raise":
            raise RuntimeError("as it was asked")
        if action == "sleep":
            time.sleep(1.0)
        if action == "nonsense":
            return {"reward": "much"}
        if action == "nan":
            return game.StepResult("", float("nan"))
        self.sum += len(action)
        return game.StepResult(f"sum {self.sum}", 0.5, self.sum >= self.goal, {"action": action})

    def get_system_prompt(self) -> str:
        return "count"

    def get_initial_user_message(self) -> str:
        return ""


Ask = Callable[..., JsonReply]


async def conversing(url: str, converse: Callable[[Ask], None]) -> None:
    connection = JsonConnection(url)

    def ask(path: str, method: str = "POST", **body: Any) -> JsonReply:
        return connection.request(method, path, body if method == "POST" else None)

    await trio.to_thread.run_sync(converse, ask)
    connection.close()


async def test_an_episode_begins_takes_actions_and_ends_and_is_counted() -> None:
    def converse(ask: Ask) -> None:
        begun = ask("/reset", instance_id="a", job_id="j", goal=3)
        assert begun == JsonReply(200, {"instance_id": "a", "observation": "goal 3", "repeats_turns": True})
        first = ask("/step", instance_id="a", job_id="j", action="x", turn=0)
        assert first.body == {"observation": "sum 1", "reward": 0.5, "done": False, "info": {"action": "x"}}
        assert ask("/step", instance_id="a", job_id="j", action="x", turn=0) == first, "sent again: executed once"
        wrong = ask("/step", instance_id="a", job_id="j", action="x", turn=5)
        assert (wrong.status, wrong.body) == (409, {"detail": "instance 'a': turn 5; expected 1"})
        last = ask("/step", instance_id="a", job_id="j", action="xx")
        assert last.body["done"] is True
        assert ask("/step", instance_id="a", job_id="j", action="xx", turn=1) == last
        assert ask("/step", instance_id="a", job_id="j", action="x", turn=2).status == 409
        assert ask("/finalize", instance_id="a", job_id="j").body == {"instance_id": "a", "status": "finalized"}
        assert ask("/finalize", instance_id="a", job_id="j").body["status"] == "unknown"
        assert "no instance 'a': reset it first" in ask("/step", instance_id="a", action="x").body["detail"]
        ask("/reset", instance_id="b", job_id="j")
        ask("/finalize", instance_id="b", job_id="j")

        numbers = {"games": 2, "finished": 2, "turns": 2, "errors": 0}
        numbers |= {"mean_reward": 0.5, "min_reward": 0.0, "max_reward": 1.0}
        assert ask("/stats", "GET").body == {"instances": 0, "jobs": {"j": {"step": numbers, "cumulative": numbers}}}
        assert ask("/stats/jobs", "GET").body == {"jobs": ["j"]}
        assert ask("/stats/reset?job_id=j").status == 200
        assert ask("/stats/step?job_id=j", "GET").body["step"]["games"] == 0
        assert ask("/stats/cumulative?job_id=j", "GET").body == {"job_id": "j", "cumulative": numbers}
        assert ask("/stats/reset_all").status == 200
        assert ask("/stats/cumulative?job_id=j", "GET").body["cumulative"]["mean_reward"] is None
        assert ask("/stats/job/j", "DELETE").status == 200
        assert ask("/stats/job/j", "DELETE").status == 404
        assert ask("/health", "GET").body == {"status": "healthy", "game": "Count", "instances": 0}

    async with game.serve(Count) as server:
        await conversing(server.url, converse)


async def test_an_error_of_the_game_ends_its_instance_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def converse(ask: Ask) -> None:
        ask("/reset", instance_id="good")
        for action, status, text in (
            ("raise", 500, "step raised RuntimeError: as it was asked"),
            ("sleep", 504, "step did not return within 0.2 s"),
            ("nonsense", 500, "step returned {'reward': 'much'}; expected StepResult(observation, reward, done)"),
            ("nan", 500, "step returned StepResult(observation='', reward=nan"),
        ):
            ask("/reset", instance_id="a")
            found = ask("/step", instance_id="a", action=action)
            assert found.status == status
            assert text in found.body["detail"]
        assert "reset raised ValueError: goal below 1" in ask("/reset", instance_id="a", goal=0).body["detail"]
        assert "unexpected keyword argument 'color'" in ask("/reset", instance_id="a", color=1).body["detail"]
        assert ask("/reset", instance_id="a", goal=7).body["observation"] == ""
        assert ask("/reset", job_id="a").body["detail"][0]["loc"] == ["body", "instance_id"]
        assert ask("/step", instance_id="a", action=3).status == 422
        assert ask("/reset", instance_id="x" * 257).status == 400
        assert ask("/reset", instance_id="a", text="x" * (1 << 20)).status == 413
        assert ask("/step", instance_id="good", action="x").body["observation"] == "sum 1"
        assert ask("/stats/cumulative?job_id=default", "GET").body["cumulative"]["errors"] == 6

    async with game.serve(Count, call_s=0.2) as server:
        await conversing(server.url, converse)


async def test_instances_play_at_once_within_limits_and_abandoned_ones_are_removed() -> None:
    began = threading.Barrier(8, timeout=5.0)

    class Meet(Count):
        """Game whose instances wait for each other."""

        def step(self, action: str) -> Any:
            began.wait()
            return super().step(action)

    async with game.serve(Meet, instances=8, idle_s=3.0) as server:

        def converse(ask: Ask) -> None:
            for number in range(8):
                assert ask("/reset", instance_id=str(number)).status == 200
            full = ask("/reset", instance_id="8")
            assert (full.status, full.body) == (
                503,
                {"detail": "8 instances are under way, the limit of this server"},
            )

        def step(number: int) -> None:
            connection = JsonConnection(server.url)
            body = {"instance_id": str(number), "action": "x"}
            assert connection.request("POST", "/step", body).status == 200
            connection.close()

        await conversing(server.url, converse)
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(partial(trio.to_thread.run_sync, step, number))
        with trio.fail_after(10.0):
            instances = 8
            while instances:
                await trio.sleep(0.05)
                reply = await trio.to_thread.run_sync(JsonConnection(server.url).request, "GET", "/health")
                instances = reply.body["instances"]


async def test_servers_have_consecutive_ports_and_a_batch_has_the_prompt_and_the_tasks() -> None:
    with pytest.raises(InvalidRequest, match="consecutive ports: give port"):
        async with game.serve(Count, count=2):
            pass
    assert [shard_of(name, 3) for name in ("a", "b", "c", "instance-1")] == [0, 2, 0, 2], "crc32 of a is 3904355907"
    batch = game.batch_of(Count, [{"goal": 1}, {"goal": 2}])
    assert list(batch.non_tensor_batch["raw_prompt"]) == [[{"role": "system", "content": "count"}]] * 2
    assert list(batch.non_tensor_batch["interaction_kwargs"]) == [{"goal": 1}, {"goal": 2}]


@pytest.mark.parametrize(("end", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)])
async def test_servers_of_the_command_are_processes_that_are_started_again_and_end_with_it(
    end: signal.Signals, code: int, tmp_path: Path
) -> None:
    file = tmp_path / "games.py"
    file.write_text(
        "import os\nclass Pid:\n    def reset(self): return str(os.getpid())\n    def step(self, action): os._exit(3)\n"
    )
    port = free_port(consecutive=2)
    command = [sys.executable, "-m", "fray.cli", "tinker", "game", f"{file}:Pid", "--port", str(port), "--count", "2"]

    async def pid_at(number: int) -> int:
        while True:
            connection = JsonConnection(f"http://127.0.0.1:{number}")
            try:
                body = {"instance_id": "a"}
                reply = await trio.to_thread.run_sync(connection.request, "POST", "/reset", body)
                return int(reply.body["observation"])
            except (ConnectionError, TimeoutError):
                await trio.sleep(0.1)
            finally:
                connection.close()

    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = await trio.lowlevel.open_process(command, stderr=stderr)
    try:
        with trio.fail_after(60.0):
            first, second = await pid_at(port), await pid_at(port + 1)
            assert len({first, second, process.pid}) == 3
            os.kill(second, signal.SIGKILL)
            assert await pid_at(port + 1) != second
            assert await pid_at(port) == first
    finally:
        process.send_signal(end)
        with trio.fail_after(20.0):
            assert await process.wait() == code, log.read_text()
            while True:
                try:
                    await trio.to_thread.run_sync(JsonConnection(f"http://127.0.0.1:{port}").request, "GET", "/health")
                    await trio.sleep(0.05)
                except ServerUnreachable:
                    break
                except ConnectionError:
                    continue  # it ended during this request
