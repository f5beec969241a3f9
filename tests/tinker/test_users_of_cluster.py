"""A service on a cluster with users: they are its users, and its jobs theirs in quotas, bands and preemption."""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest, ResourceConfig, tinker
from fray.model.specs import JobInfo, JobState
from fray.tinker.cluster_users import CHECK_S
from fray.tinker.http_client import JsonConnection
from fray.tinker.opentinker.client import TrainingServiceError
from tests.processes.lab import TOKEN, Lab
from tests.tinker.services import MODEL
from tests.tinker.test_opentinker_service import CONFIG, NUMBERS, batch_of, configure

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

POLICY = """
[users."*"]
bands = ["interactive", "batch"]

[users.ada]
weight = 2
quota = { cpu = 1 }
borrow = false

[users.service]
bands = ["production", "interactive", "batch"]
launches_for = ["*"]

[preemption]
shield_s = 0
"""
ENGINE = ResourceConfig(cpu=1, memory="256MB")


@asynccontextmanager
async def service_on_cluster(
    directory: Path, monkeypatch: pytest.MonkeyPatch, policy: str = POLICY, *people: str
) -> AsyncIterator[tuple[Lab, fray.Cluster, Any]]:
    """A cluster of two CPUs whose users are `people`, and a service there that ``service`` has started."""
    (directory / "policy.toml").write_text(policy)
    (directory / "node.toml").write_text(f"cpu = 2\nparent_pid = {os.getpid()}\n")
    monkeypatch.setenv("FRAY_USER", "service")
    lab = Lab(directory)
    try:
        lab.start_controller("--policy", str(directory / "policy.toml"))
        lab.start_node("warm", "--config", str(directory / "node.toml"), module="tests.support.warm_node")
        lab.wait_serving()
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            for person in people:
                await cluster.add_user(person, "user")
            async with tinker.serve(
                models=[MODEL], directory=directory / "service", threads=1, resources=ENGINE, auth=True, cluster=cluster
            ) as service:
                yield lab, cluster, service
    finally:
        lab.close()


async def engine_of(cluster: fray.Cluster, job_id: str) -> JobInfo:
    """The job of an engine on the cluster."""
    while True:
        found = [each for each in await cluster.list_jobs() if each.name == f"tinker-{job_id}"]
        if found:
            return found[-1]
        await trio.sleep(0.05)


async def message_with(scheduler: tinker.SchedulerClient, job_id: str, *texts: str) -> str:
    """Wait until the message of a job has these texts."""
    message = ""
    with trio.move_on_after(60):
        while not all(text in message for text in texts):
            message = (await trio.to_thread.run_sync(scheduler.job_status, job_id))["message"]
        return message
    raise AssertionError(message)


@pytest.mark.within(150)
async def test_keys_are_of_users_of_the_cluster_and_their_jobs_count_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service_on_cluster(tmp_path, monkeypatch, POLICY, "ada", "bob") as (_, cluster, service):
        with pytest.raises(fray.InvalidRequest, match=r"may launch jobs for none of this name; did you mean ada\?"):
            await service.create_key("adda")
        key = await service.create_key("ada")
        scheduler = tinker.SchedulerClient(service.url, key, retry_delay_s=0.2)
        connection = JsonConnection(service.url, headers={"Authorization": f"Bearer {key}"})
        assert (await trio.to_thread.run_sync(connection.request, "POST", "/register?username=bob")).status == 403

        first, second = [(await trio.to_thread.run_sync(scheduler.submit_job, {}))["job_id"] for _ in range(2)]
        await trio.to_thread.run_sync(scheduler.wait_until_running, first)
        for job_id in (first, second):
            assert (await engine_of(cluster, job_id)).user == "ada"
        assert {each.user for each in await cluster.list_jobs() if each.name == "tinker-service"} == {"service"}
        # The machine has room: it is the quota of the user that the second one waits for.
        await message_with(scheduler, second, "over the quota of user ada", "in the queue")
        shares = {each.user: each.share for each in (await cluster.usage()).users}
        assert shares["ada"] == 0.5, shares
        await trio.to_thread.run_sync(scheduler.cancel_job, first)
        url = (await trio.to_thread.run_sync(scheduler.wait_until_running, second))["server_url"]
        with pytest.raises(TrainingServiceError, match=r"fray\.priority: expected one of"):
            await trio.to_thread.run_sync(scheduler.submit_job, {"fray": {"priority": "first"}})

        # One who is removed from the cluster has no key here within `CHECK_S`, nor the addresses of jobs.
        await cluster.remove_user("ada")
        with trio.fail_after(2 * CHECK_S):
            status = 0
            while status != 401:
                status = (await trio.to_thread.run_sync(connection.request, "GET", "/list_jobs")).status
        with pytest.raises(TrainingServiceError) as refused:
            await trio.to_thread.run_sync(tinker.HTTPTrainingClient(url).status)
        assert refused.value.status == 404


def hold(file: str) -> None:
    """Hold a place on the cluster until a file is there."""
    Path(f"{file}.begun").touch()
    while not Path(file).exists():
        time.sleep(0.05)


@pytest.mark.within(170)
async def test_a_preempted_job_comes_back_and_trains_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIG, "fray.priority": "batch"}
    rng = random.Random(5)
    batches = [batch_of(rng.sample(NUMBERS, 8)) for _ in range(8)]
    file = tmp_path / "enough"
    urgent = JobRequest(
        "urgent",
        ResourceConfig(cpu=2, memory="1GB"),
        Entrypoint.from_callable(hold, (str(file),)),
        priority="production",
    )
    async with service_on_cluster(tmp_path, monkeypatch, POLICY, "bob") as (_, cluster, service):
        scheduler = tinker.SchedulerClient(service.url, await service.create_key("bob"), retry_delay_s=0.2)

        def begin() -> tuple[str, tinker.HTTPTrainingClient]:
            job_id = scheduler.submit_job(config)["job_id"]
            url = scheduler.wait_until_running(job_id)["server_url"]
            client = tinker.HTTPTrainingClient(url, retry_delay_s=0.2)
            configure(client, config)
            return job_id, client

        def train(client: tinker.HTTPTrainingClient, batches: list[tinker.DataProto]) -> list[tuple[int, float]]:
            answers = [client.train_step(batch) for batch in batches]
            return [(each["global_steps"], each["metrics"]["training_step_reward"]) for each in answers]

        job_id, client = await trio.to_thread.run_sync(begin)
        undisturbed = await trio.to_thread.run_sync(train, client, batches)
        await trio.to_thread.run_sync(scheduler.complete_job, job_id)

        job_id, client = await trio.to_thread.run_sync(begin)
        trained = await trio.to_thread.run_sync(train, client, batches[:3])
        holder = await cluster.launch(urgent)
        while not await trio.Path(f"{file}.begun").exists():  # noqa: ASYNC110 - another process makes it
            await trio.sleep(0.05)

        async def release() -> None:
            message = await message_with(scheduler, job_id, "requests wait for its engine", "needs 1 CPU")
            assert "in the queue" in message, message
            file.touch()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(release)
            trained += await trio.to_thread.run_sync(train, client, batches[3:])
        await holder.wait()
        assert [number for number, _ in trained] == [*range(1, 9)]
        assert [reward for _, reward in trained] == pytest.approx([reward for _, reward in undisturbed], abs=1e-6)
        engine = await engine_of(cluster, job_id)
        assert (engine.user, engine.state, engine.retries) == ("bob", JobState.RUNNING, {"preempted": 1})
