"""Work of the processes of a run continues when the call that began it has ended, and the next caller attaches."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import pytest
import trio
import trio.testing

import fray
from fray import rl
from fray.errors import ActorDied
from fray.rl.coordinator import Coordinator
from fray.rl.core.run_record import RunPlan
from fray.rl.core.server_states import ServerEvent
from fray.rl.core.tasks import TaskOrder
from fray.rl.core.versions import VersionName
from fray.rl.messages import SampleResult, TaskResult
from fray.rl.processes.actor_tasks import ActorTasks
from fray.rl.processes.run_servers import RunServers
from fray.rl.trainer_process import TrainerProcess
from fray.runtime.serialization.pickling import dumps_plain

FIRST = VersionName(0, 0)


async def test_a_task_continues_without_its_callers_and_each_gets_its_result_or_its_error(autojump_clock: Any) -> None:
    tasks, done = ActorTasks(), list[str]()

    async def work() -> str:
        await trio.sleep(5)
        done.append("work")
        return "result"

    async def fails() -> None:
        await trio.sleep(1)
        raise KeyError("answer")

    task = tasks.start(work)
    with trio.move_on_after(1):
        await task.wait()
    assert not done
    assert [await task.wait(), await task.wait()] == ["result"] * 2
    assert done == ["work"]
    failing = tasks.start(fails)
    for _ in range(2):
        with pytest.raises(KeyError, match="answer"):
            await failing.wait()
    ended = tasks.start(work)
    await trio.testing.wait_all_tasks_blocked()
    await tasks.aclose()
    with pytest.raises(ActorDied):
        await ended.wait()
    assert done == ["work"]


class Counting(rl.BaseTrainer):
    """Trainer without weights, whose updates end when the test lets them."""

    may_end = threading.Semaphore(0)

    def initialize_workers(self) -> None:
        self.updates = 0

    def train(self, trajectories: list[rl.Trajectory]) -> dict[str, Any]:
        Counting.may_end.acquire()
        self.updates += 1
        return {"updates": self.updates}


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl")
async def test_an_update_is_done_once_and_its_result_is_there_until_it_is_handled() -> None:
    plan = RunPlan(TaskOrder(rows=4, batch_rows=2, repeats=1, epochs=None), batch_size=2, lease_s=60.0)
    settings = rl.GRPO(groups=2, group_size=1, advantage="reinforce", steps=9)
    async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("test") as scope:
        coordinator: Any = await scope.create_actor(Coordinator, plan, [{}] * 4)
        model = rl.TinyLlama(layers=1, width=16, mlp=32)
        trainer: Any = await scope.create_actor(
            TrainerProcess, coordinator, model, settings, 1, None, Counting(settings)
        )

        async def fill() -> None:
            for grant in await coordinator.take_tasks("w", 2):
                content = dumps_plain([{"tokens": [1], "loss_mask": [1], "reward": 1.0, "versions": []}])
                sample = SampleResult((), (1.0,), (grant.group_id,), content)
                assert await coordinator.put_results([TaskResult(grant.lease, (sample,))]) == ["success"]

        assert (await trainer.standing()).line is None
        await trainer.start(0, None)
        assert (await trainer.standing()).line == 0
        await fill()
        # The caller is lost while the update is under way, and the next one with the result of it.
        with trio.move_on_after(0.2):
            await trainer.train_next(0)
        Counting.may_end.release(9)
        first = await trainer.train_next(None)
        assert (first.number, first.serial, first.metrics["updates"]) == (1, 1, 1)
        assert await trainer.train_next(None) == first
        assert await trainer.train_next(0) == first
        version, _, _ = await coordinator.finish_update(0, 1)
        await coordinator.finish_sync(version)
        await fill()
        second = await trainer.train_next(first.serial)
        assert (second.number, second.serial, second.metrics["updates"]) == (2, 2, 2)
        # Weights of a version are published once, and what is not kept is released.
        assert await trainer.publish(version) is None
        assert (await trainer.standing()).published == {version: None}
        await trainer.publish(VersionName(0, 2))
        assert (await trainer.standing()).published == {VersionName(0, 2): None}
        # Another incarnation begins without them.
        await trainer.start(1, None)
        standing = await trainer.standing()
        assert (standing.line, standing.published) == (1, {})


async def test_a_server_that_leaves_and_whose_process_is_being_ended_is_no_route() -> None:
    announced: list[Any] = []

    async def set_routes(routes: Any) -> None:
        announced.append(routes)

    unused: Any = None
    trainer = rl.GRPO(groups=1, group_size=2, steps=1)
    parts = rl.Run(model=rl.TinyLlama(), data=[{"prompt": "1"}], rollout=_solve, trainer=trainer).parts
    servers = RunServers(unused, unused, parts, unused, set_routes)
    server = servers.fleet.servers[servers.fleet.add(1)[0]]
    servers.fleet.aim(FIRST)
    server.observe(ServerEvent.READY, 0)
    server.observe(ServerEvent.LOADED, 0, FIRST)
    server.observe(ServerEvent.LEAVE, 0)
    assert [one.leaves for one in servers.fleet.routes(is_published=True)] == [True]
    await servers.announce()
    assert announced == [[]]


async def _solve(task: dict[str, Any], llm: rl.LLM) -> Any:
    raise NotImplementedError
