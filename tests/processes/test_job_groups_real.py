"""A job group of real processes: a coordinator, a trainer gang and rollouts, as reinforcement learning has them."""

from __future__ import annotations

import os
import signal

import trio

import fray
from fray import EndReason, Entrypoint, JobGroupConfig, JobRequest, JobRole, JobState, ResourceConfig

SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="64MB")


class Curriculum:
    def __init__(self) -> None:
        self.results: list[int] = []

    async def report(self, result: int) -> int:
        self.results.append(result)
        return len(self.results)


async def coordinate() -> None:
    async with fray.ActorServer(fray.current_cluster()) as server:
        await server.register("curriculum", Curriculum())
        await trio.sleep_forever()


async def train() -> dict[str, str]:
    """Wait for the results of both rollouts; rank 0 returns its environment."""
    curriculum = fray.ClusterResolver(fray.current_cluster()).lookup("curriculum")
    while await curriculum.call().report(0) < 20:  # noqa: ASYNC110
        await trio.sleep(0.01)
    return {name: value for name, value in os.environ.items() if name.startswith(("FRAY_GROUP", "FRAY_ROLE"))}


async def roll_out() -> None:
    curriculum = fray.ClusterResolver(fray.current_cluster()).lookup("curriculum")
    while True:
        await curriculum.call().report(1)
        await trio.sleep(0.02)


def member(name: str, fn: object, role: JobRole, **more: object) -> JobRequest:
    return JobRequest(name=name, resources=SMALL, entrypoint=Entrypoint.from_callable(fn), role=role, **more)  # type: ignore[arg-type]


async def test_an_rl_group_runs_in_order_survives_a_killed_rollout_and_ends_with_its_trainer() -> None:
    rollout = JobRole("rollout", stage=2, auxiliary=True)
    requests = [
        member("coordinator", coordinate, JobRole("coordinator", auxiliary=True), ports=["http"]),
        member("trainer", train, JobRole("trainer", stage=1), replicas=2),
        member("rollout-0", roll_out, rollout, max_retries_failure=2),
        member("rollout-1", roll_out, rollout, max_retries_failure=2),
    ]
    with trio.fail_after(60):
        async with fray.open_cluster("machine?nodes=2&cpu=4") as cluster, cluster.open_scope("rl") as scope:
            group = await scope.launch_group(requests, JobGroupConfig("rl"))
            coordinator, trainer, victim, other = group
            await victim.wait_running()
            pid = victim.info.members[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            values = await group.wait()
            assert values[0] is values[2] is values[3] is None
            environment = values[1]
            assert environment["FRAY_GROUP"] == "rl"
            assert environment["FRAY_ROLE"] == "trainer"
            assert environment["FRAY_GROUP_COORDINATOR_HTTP"] == coordinator.info.attempts[0].addresses["http"]
            assert len(environment["FRAY_GROUP_TRAINER_COORDINATOR"].split(",")) == 2
            assert coordinator.info.cause is other.info.cause is EndReason.GROUP
            assert trainer.info.state is JobState.SUCCEEDED
            started = [job.info.attempts[0].start_time or 0.0 for job in group]
            assert started[0] < started[1] < min(started[2:])
            assert any(attempt.cause is EndReason.KILLED for attempt in victim.info.attempts)
