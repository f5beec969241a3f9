"""The service over OpenTinker's protocol, with real processes: learning, kills, repeated requests, refusals."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import trio

from fray import tinker
from fray.tinker.http_client import JsonConnection, JsonReply
from fray.tinker.opentinker.client import TrainingServiceError
from fray.tinker.wire.dataproto import TensorRecord, encode_data_proto
from tests.tinker.services import MODEL, REWARD, running
from tests.tinker.test_tinker_api import Api

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CONFIG = {
    "data.max_prompt_length": 4,
    "data.max_response_length": 4,
    "actor_rollout_ref.rollout.n": 16,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "algorithm.adv_estimator": "grpo",
    "trainer.project_name": "digits",
}
NUMBERS = ["".join(digits) for digits in itertools.product("0123456789", repeat=3)]


def batch_of(numbers: list[str]) -> tinker.DataProto:
    """A batch as verl makes it: tokens padded on the left."""
    tokens = [[0, *MODEL.tokenizer.encode(f"{number}>")] for number in numbers]
    truths = np.empty(len(numbers), object)
    truths[:] = [{"style": "rule", "ground_truth": f"{number}$"} for number in numbers]
    ids = TensorRecord(np.array(tokens, np.int64))
    mask = TensorRecord(np.array([[0, 1, 1, 1, 1]] * len(numbers), np.int64))
    return tinker.DataProto({"input_ids": ids, "attention_mask": mask}, {"reward_model": truths})


def started_job(url: str, seed: int = 0) -> tuple[tinker.SchedulerClient, str, tinker.HTTPTrainingClient]:
    scheduler = tinker.SchedulerClient(url, retry_delay_s=0.2)
    job = scheduler.submit_job({"trainer": {"seed": seed}})
    client = tinker.HTTPTrainingClient(scheduler.wait_until_running(job["job_id"])["server_url"], retry_delay_s=0.2)
    return scheduler, job["job_id"], client


def configure(client: tinker.HTTPTrainingClient, config: Mapping[str, Any] = CONFIG) -> None:
    client.upload_reward_function("share", REWARD)
    assert "these keys are not used: trainer.project_name" in client.set_config(config)["message"]
    client.init_workers(total_steps=200)


def pids(cluster: Any, jobs: list[Any], prefix: str) -> list[int]:
    return [job.attempts[-1].pid for job in jobs if job.name.startswith(prefix) and job.attempts]


async def kill(cluster: Any, prefix: str) -> None:
    (pid,) = pids(cluster, await cluster.list_jobs(), prefix)
    os.kill(pid, signal.SIGKILL)


async def replaced(cluster: Any, prefix: str, old: list[int]) -> None:
    """Wait until there is another process."""
    while True:
        if pids(cluster, await cluster.list_jobs(), prefix) not in (old, [], [None]):
            return
        await trio.sleep(0.1)


def train(client: tinker.HTTPTrainingClient, steps: int, prompts: int) -> list[float]:
    rng = random.Random(5)
    return [
        client.train_step(batch_of(rng.sample(NUMBERS, prompts)))["metrics"]["training_step_reward"]
        for _ in range(steps)
    ]


@pytest.mark.within(170)
async def test_a_model_learns_to_copy_digits_through_the_protocol(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, service):

        def learn() -> tuple[list[float], dict[str, Any], dict[str, Any], dict[str, Any]]:
            scheduler, job_id, client = started_job(service.url)
            configure(client)
            rewards = train(client, 60, 32)
            found = client.validate(batch_of(NUMBERS[:12]))
            saved = client.save_checkpoint()
            status = client.status()
            assert scheduler.complete_job(job_id)["status"] == "COMPLETED"
            with pytest.raises(TrainingServiceError, match="has ended: COMPLETED"):
                client.status()
            return rewards, found, saved, status

        rewards, found, saved, status = await trio.to_thread.run_sync(learn)
        assert fmean(rewards[:5]) < 0.15
        assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.1
        assert set(found["metrics"]) == {"val/mean_score", "val/std", "val/max", "val/min"}
        assert len(found["samples"]) == 10
        assert found["samples"][3]["input"] == "003>"
        assert status == {"status": "running", "is_initialized": True, "global_steps": 60, "generation_config": {}}
        assert (Path(saved["actor_path"]) / "model.safetensors").is_file()
        assert saved["global_steps"] == 60


@pytest.mark.within(170)
async def test_kills_of_engine_and_service_during_steps_train_every_step_once(tmp_path: Path) -> None:
    steps = 12
    # With a critic: it and its optimizer are in snapshots, beside the policy's.
    config = {**CONFIG, "algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-3}
    async with running(tmp_path) as (cluster, service):

        def begin() -> tinker.HTTPTrainingClient:
            client = started_job(service.url)[2]
            configure(client, config)
            return client

        undisturbed = await trio.to_thread.run_sync(lambda: train(begin(), steps, 8))
        client = await trio.to_thread.run_sync(begin)
        status = await service.status()
        (job_id,) = [job["job_id"] for job in status["jobs"] if not job["global_steps"]]
        rewards: list[float] = []

        async def executed(count: int) -> None:
            """Wait until so many steps are executed, and the next one is on its way."""
            while True:
                (job,) = [job for job in (await service.status())["jobs"] if job["job_id"] == job_id]
                if (job["global_steps"] or 0) >= count and job["requests"] > job["executed"]:
                    return
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:

            async def run() -> None:
                rewards.extend(await trio.to_thread.run_sync(lambda: train(client, steps, 8)))

            nursery.start_soon(run)
            await executed(3)
            await kill(cluster, f"tinker-{job_id}")
            await executed(6)
            await kill(cluster, "tinker-service")
        assert rewards == undisturbed
        status = await trio.to_thread.run_sync(client.status)
        assert status["global_steps"] == steps


async def test_engines_that_are_killed_while_they_wait_for_requests_continue(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, service):

        def begin() -> tuple[str, tinker.HTTPTrainingClient, Api, str]:
            _, job_id, client = started_job(service.url)
            configure(client)
            train(client, 2, 8)
            api = Api(service.url)
            model = api.model()
            api.result(api.forward(model, 1).body)
            return job_id, client, api, model

        job_id, client, api, model = await trio.to_thread.run_sync(begin)
        engines = (f"tinker-{job_id}", "tinker-engine")
        before = [pids(cluster, await cluster.list_jobs(), engine) for engine in engines]
        for engine in engines:
            await kill(cluster, engine)
        for engine, old in zip(engines, before, strict=True):
            await replaced(cluster, engine, old)

        def go_on() -> None:
            train(client, 1, 8)
            assert client.status()["global_steps"] == 3
            assert "metrics" in api.result(api.forward(model, 2).body)

        await trio.to_thread.run_sync(go_on)


async def test_a_step_that_is_sent_again_is_trained_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, service):

        def converse() -> None:
            client = started_job(service.url)[2]
            configure(client)
            connection = JsonConnection(f"{client.server_url}/api/v1")
            body = json.dumps({"batch_data": encode_data_proto(batch_of(["407"]))}).encode()

            def step(**headers: str) -> JsonReply:
                return connection.request("POST", "/train_step", body, headers=headers)

            first = step(**{"X-Request-ID": "a"})
            assert step(**{"X-Request-ID": "a"}) == first, "by its request id"
            assert first.body["global_steps"] == 1
            conflict = connection.request("POST", "/train_step", b"{}", headers={"X-Request-ID": "a"})
            assert conflict.status == 409
            assert "request id 'a' was sent before with another body" in conflict.body["detail"]
            assert [step().body["global_steps"] for _ in range(2)] == [2, 3], "a batch repeated on purpose"

            # A step that takes longer than its client waits.
            body = json.dumps({"batch_data": encode_data_proto(batch_of(NUMBERS[:100]))}).encode()
            impatient = JsonConnection(f"{client.server_url}/api/v1", timeout_s=0.05)
            with pytest.raises(TimeoutError):
                impatient.request("POST", "/train_step", body)
            impatient.close()
            assert step().body["global_steps"] == 4, "the answer to the first was lost"
            assert step().body["global_steps"] == 5

        await trio.to_thread.run_sync(converse)


async def test_what_a_training_server_refuses_is_said_where_it_is(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, service):

        def converse() -> None:
            _, _, client = started_job(service.url)
            ask = partial(JsonConnection(f"{client.server_url}/api/v1").request, "POST")
            early = ask("/train_step", {"batch_data": {}})
            assert (early.status, early.body) == (
                400,
                {
                    "detail": "train_step needs the workers first: POST set_config {config_overrides}, then POST "
                    "init_workers {total_steps}"
                },
            )
            assert ask("/set_config", {}).status == 422
            assert ask("/set_config", {}).body["detail"][0]["loc"] == ["body", "config_overrides"]
            assert ask("/set_config", b"{").body["detail"][0]["type"] == "json_invalid"
            unknown = ask("/set_config", {"config_overrides": {"actor_rollout_ref.model.path": "big"}})
            assert unknown.body == {
                "detail": "actor_rollout_ref.model.path: 'big' is not served here; expected one of tiny"
            }
            client.set_config(CONFIG)
            assert "init_workers needs a reward first" in ask("/init_workers", {"total_steps": 3}).body["detail"]
            wrong = ask("/upload_reward_function", {"function_name": "f", "source_code": "def g(): pass"})
            assert (wrong.status, wrong.body) == (
                400,
                {"detail": "reward function 'f': NameError: the source defines no function 'f'"},
            )
            source = "def f(d, s, g, e): return 1 / 0"
            client.upload_reward_function("f", source)
            client.init_workers(3)
            with pytest.raises(TrainingServiceError, match="400: set_config comes before init_workers"):
                client.set_config({})
            with pytest.raises(TrainingServiceError, match="ZeroDivisionError") as caught:
                client.train_step(batch_of(["407"]))
            assert "line 1, in f" in caught.value.traceback
            with pytest.raises(TrainingServiceError, match=r"batch_data: prompt 0 has 5 tokens, and data.max_prompt"):
                client.train_step({"non_tensor_batch": {"raw_prompt": np.array(["4077>"])}})
            broken = {"batch": {"x": {"__type__": "torch.Tensor", "__dtype__": "torch.int64", "__shape__": [-1]}}}
            reply = ask("/train_step", {"batch_data": broken})
            assert reply.status == 200
            assert reply.body["status"] == "error"
            assert reply.body["error"].startswith("batch_data.batch['x'].__shape__: [-1] has a negative number")
            client.upload_reward_function("share", REWARD)
            assert client.train_step(batch_of(["407"]))["global_steps"] == 1, "what failed had no effect"

        await trio.to_thread.run_sync(converse)


async def test_users_see_their_own_jobs_and_nothing_without_a_key(tmp_path: Path) -> None:
    async with running(tmp_path, auth=True, virtual_gpus=2) as (_, service):
        root = await service.create_key("root", is_admin=True)

        def converse() -> None:
            ada, bob = (tinker.SchedulerClient(service.url).register(name) for name in ("ada", "bob"))
            assert len(ada["api_key"]) == len("otk_") + 32
            with pytest.raises(TrainingServiceError, match="400: Username 'ada' already exists"):
                tinker.SchedulerClient(service.url).register("ada")
            plain = JsonConnection(service.url)
            for header, detail in (
                ({}, "Authorization header required"),
                ({"Authorization": "Token x"}, "Invalid authorization header format"),
                ({"Authorization": "Bearer otk_0"}, "Invalid API key"),
            ):
                reply = plain.request("POST", "/submit_job", b"{not JSON", headers=header)
                assert (reply.status, reply.body) == (401, {"detail": detail})
            key = {"Authorization": f"bEaReR {ada['api_key']}"}
            assert plain.request("GET", "/list_jobs", headers=key).body == {"jobs": []}
            missing = plain.request("POST", "/submit_job", {"num_gpus": "many"}, headers=key)
            assert missing.status == 422
            assert [problem["loc"] for problem in missing.body["detail"]] == [["body", "config"], ["body", "num_gpus"]]
            assert plain.request("GET", "/admin/users", headers=key).status == 403
            admin = {"Authorization": f"Bearer {root}"}
            names = [user["username"] for user in plain.request("GET", "/admin/users", headers=admin).body["users"]]
            assert names == ["root", "ada", "bob"]

            of_ada = tinker.SchedulerClient(service.url, ada["api_key"])
            of_bob = tinker.SchedulerClient(service.url, bob["api_key"])
            with pytest.raises(TrainingServiceError, match="400: num_gpus: 3 GPUs, and this service has 2"):
                of_ada.submit_job({}, num_gpus=3)
            first = of_ada.submit_job({}, num_gpus=2)
            assert of_ada.wait_until_running(first["job_id"])["gpu_ids"] == [0, 1]
            second = of_bob.submit_job({})
            assert (second["status"], second["server_url"]) == ("QUEUED", None)
            assert second["message"].startswith(
                "number 1 in the queue: needs 1 GPUs, 0 of 2 are free; when it starts is not known"
            )
            with pytest.raises(TrainingServiceError, match="403: Not authorized"):
                of_bob.cancel_job(first["job_id"])
            with pytest.raises(TrainingServiceError, match="404: Job not found"):
                of_bob.job_status(first["job_id"])
            assert of_bob.cancel_job("none") == {"job_id": "none", "status": "NOT_FOUND", "message": "Job not found"}
            assert of_ada.cancel_job(first["job_id"])["status"] == "CANCELLED"
            assert of_ada.complete_job(first["job_id"])["status"] == "CANCELLED", "final states are final"
            assert of_bob.wait_until_running(second["job_id"])["gpu_ids"] == [0]
            wrong = first["job_id"] + "-" + "0" * 32
            assert plain.request("GET", f"/jobs/{wrong}/api/v1/status").status == 404

        await trio.to_thread.run_sync(converse)


async def test_a_job_goes_back_to_its_own_checkpoint_and_to_no_other(tmp_path: Path) -> None:
    async with running(tmp_path, auth=True) as (_, service):
        keys = [await service.create_key(name) for name in ("ada", "bob")]

        def converse() -> None:
            ada, bob = (tinker.SchedulerClient(service.url, key) for key in keys)
            first, second = ada.submit_job({}), bob.submit_job({})
            client = tinker.HTTPTrainingClient(first["server_url"])
            client.set_config({})
            changed = client.override_config({**CONFIG, "actor_rollout_ref": {"rollout": {"n": 2}}})
            assert "trainer.project_name" in changed["message"]
            with pytest.raises(TrainingServiceError, match="init_workers needs a reward first"):
                client.init_workers()
            client.upload_reward_function("share", REWARD)
            client.init_workers()
            with pytest.raises(TrainingServiceError, match="400: override_config comes before init_workers"):
                client.override_config({})
            train(client, 1, 4)
            path = client.save_checkpoint()["checkpoint_dir"]
            expected = train(client, 2, 4)
            assert client.resume(path)["global_steps"] == client.status()["global_steps"] == 1
            assert train(client, 2, 4) == expected

            own = ["/etc", f"{path}/actor", f"{path}/../global_step_1", str(tmp_path)]
            for server, paths in ((first, own), (second, [path, *own])):
                for wanted in paths:
                    with pytest.raises(
                        TrainingServiceError, match="is not the checkpoint_dir of a checkpoint that a job of yours"
                    ) as refused:
                        tinker.HTTPTrainingClient(server["server_url"]).resume(wanted)
                    assert f"400: path: {wanted!r} is not" in str(refused.value)
            reply = JsonConnection(f"{first['server_url']}/api/v1").request("POST", "/resume", {})
            assert reply.status == 422

        await trio.to_thread.run_sync(converse)
