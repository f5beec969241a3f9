"""Inference jobs on real processes: a served model and a saved checkpoint behind OpenAI's API, kills, refusals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from fray import rl, tinker
from fray.tinker.http_client import JsonConnection
from fray.tinker.opentinker.client import TrainingServiceError
from tests.tinker.services import MODEL, REWARD, running

openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def client_of(job: dict[str, Any], max_retries: int = 0) -> Any:
    return openai.OpenAI(base_url=f"{job['server_url']}/v1", api_key="-", max_retries=max_retries)


def saved_checkpoint(scheduler: tinker.SchedulerClient) -> str:
    """Train for a step; return the path of the checkpoint's model."""
    job_id = scheduler.submit_job({})["job_id"]
    client = tinker.ServiceClient(scheduler.wait_until_running(job_id)["server_url"])
    config = {"data.max_response_length": 4, "actor_rollout_ref.actor.optim.lr": 0.1, "actor_rollout_ref.rollout.n": 4}
    client.set_config(config, reward=("share", REWARD))
    client.fit([{"non_tensor_batch": {"raw_prompt": ["407>"] * 4, "ground_truth": ["407$"] * 4}}])
    path: str = client.client.save_checkpoint()["actor_path"]
    scheduler.complete_job(job_id)
    return path


def logprobs_of(model: rl.ModelSpec) -> list[float]:
    """Return the logprobs of a greedy completion of ``407>``, computed in this process."""
    from fray.rl.inference.model_engine import ModelEngine
    from fray.rl.inference.requests import Completion, GenerateRequest, Sampling

    engine: Any = ModelEngine(model)()
    engine.add(GenerateRequest("a", tuple(MODEL.tokenizer.encode("407>")), Sampling(max_tokens=3, temperature=0)))
    while engine.has_work:
        for _, completion in engine.step():
            assert isinstance(completion, Completion)
            return completion.logprobs
    raise AssertionError


async def test_inference_jobs_answer_at_one_address_until_they_end(tmp_path: Path) -> None:
    async with running(tmp_path, auth=True, virtual_gpus=1) as (cluster, service):
        url = service.url.replace("127.0.0.1", "localhost")
        keys = [await service.create_key(name) for name in ("ada", "bob")]
        ada, bob = (tinker.InferenceSchedulerClient(url, key) for key in keys)

        def begin() -> tuple[str, dict[str, Any]]:
            path = saved_checkpoint(ada)
            for scheduler, wanted, text in (
                (bob, {"model_path": path}, r"is neither served here \(tiny\) nor the actor_path"),
                (ada, {"model_path": "Qwen/Qwen3-0.6B"}, "model_path: 'Qwen/Qwen3-0.6B' is neither served here"),
                (ada, {"model_path": "tiny", "num_gpus": 2}, "num_gpus: 2 GPUs, and this service has 1"),
                (ada, {"model_path": "tiny", "max_model_len": 1}, "max_model_len: 1; expected"),
            ):
                with pytest.raises(TrainingServiceError, match=text) as refused:
                    scheduler.submit_inference_job(**wanted)
                assert refused.value.status == 400
            first = ada.submit_inference_job(path, max_model_len=252, tensor_parallel_size=2)
            assert first["message"] == f"job {first['job_id']} is starting; not used: tensor_parallel_size"
            assert first["vllm_server_url"].startswith("http://localhost:")
            assert f"/jobs/{first['job_id']}-" in first["vllm_server_url"]
            second = ada.submit_inference_job("tiny")
            assert (second["status"], second["vllm_server_url"]) == ("QUEUED", None)
            assert second["message"].startswith(
                "number 1 in the queue: needs 1 GPUs, 0 of 1 are free; when it starts is not known"
            )
            assert ada.cancel_job(second["job_id"])["status"] == "CANCELLED"
            status = ada.wait_until_running(first["job_id"])
            assert status["server_url"] == first["vllm_server_url"]
            return path, status

        path, first = await trio.to_thread.run_sync(begin)

        def ask() -> None:
            client = client_of(first)
            assert [model.id for model in client.models.list()] == [path]
            options: Any = {"prompt": "407>", "max_tokens": 3, "temperature": 0, "logprobs": 0}
            answer = client.completions.create(model=path, **options).choices[0].logprobs.token_logprobs
            assert answer == pytest.approx(logprobs_of(path), abs=1e-5)
            assert answer != pytest.approx(logprobs_of(MODEL), abs=1e-3)
            messages: Any = [{"role": "user", "content": "407>"}]
            assert client.chat.completions.create(model=path, messages=messages).usage.total_tokens <= 252
            with pytest.raises(openai.BadRequestError, match="max_tokens may be 248 here"):
                client.completions.create(model=path, prompt="407>", max_tokens=249)
            with pytest.raises(openai.NotFoundError, match="there is no model 'tiny' here"):
                client.completions.create(model="tiny", prompt="407>")
            wrong = {"server_url": first["server_url"][:-1] + "x"}
            with pytest.raises(openai.NotFoundError, match="no inference job has this address"):
                client_of(wrong).models.list()
            training = JsonConnection(first["server_url"]).request("POST", "/api/v1/train_step", {})
            assert (training.status, training.body) == (404, {"detail": "no training job has this address"})
            assert JsonConnection(first["server_url"]).request("GET", "/v1/health").status == 200

        await trio.to_thread.run_sync(ask)

        # Its engine is killed in the midst of a stream.
        parts, begun = list[str](), trio.Event()
        options: Any = {"model": path, "prompt": "1", "max_tokens": 250, "seed": 9, "extra_body": {"ignore_eos": True}}

        def read() -> None:
            for part in client_of(first).completions.create(**options, stream=True):
                parts.append(part.choices[0].text)
                trio.from_thread.run_sync(begun.set)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, read)
            await begun.wait()
            (job,) = [each for each in await cluster.list_jobs() if each.name == f"tinker-{first['job_id']}"]
            os.kill(job.attempts[-1].pid, signal.SIGKILL)
        whole = await trio.to_thread.run_sync(lambda: client_of(first).completions.create(**options))
        assert "".join(parts) == whole.choices[0].text

        def end() -> None:
            operator = JsonConnection(service.url, headers={"Authorization": f"Bearer {keys[0]}"})
            shown = operator.request("GET", f"/fray/jobs/{first['job_id']}").body
            assert (shown["kind"], shown["status"], shown["requests"]) == ("inference", "RUNNING", 5)
            assert shown["explanation"].endswith("5 answered; its engine was restarted 1 times")
            (used,) = operator.request("GET", "/fray/status").body["users"]
            assert used["tokens_per_s"] > 500 / 60
            ada.complete_job(first["job_id"])
            with pytest.raises(openai.ConflictError, match="has ended: COMPLETED"):
                client_of(first).completions.create(model=path, prompt="1")
            broken = ada.submit_inference_job("tiny", num_gpus=0, max_model_len=10_000)
            with pytest.raises(TrainingServiceError, match=r"is FAILED: .*max_length=10000: expected 2 to 256"):
                ada.wait_until_running(broken["job_id"])

        await trio.to_thread.run_sync(end)


async def test_an_inference_job_keeps_its_address_and_answers_when_its_service_is_lost(tmp_path: Path) -> None:
    async with running(tmp_path, virtual_gpus=1) as (_, service):
        scheduler = tinker.InferenceSchedulerClient(service.url, retry_delay_s=0.2)
        wanted = {"model": "tiny", "prompt": "1", "max_tokens": 250, "seed": 9}
        options: Any = {**wanted, "extra_body": {"ignore_eos": True}}

        def begin() -> tuple[dict[str, Any], str]:
            job = scheduler.wait_until_running(scheduler.submit_inference_job("tiny")["job_id"])
            return job, client_of(job).completions.create(**options).choices[0].text

        job, text = await trio.to_thread.run_sync(begin)

        # Killed while requests are under way: one waits for its answer, one reads a stream.
        answers, begun = list[str](), trio.Event()

        def ask() -> None:
            answers.append(client_of(job, max_retries=8).completions.create(**options).choices[0].text)

        def read() -> None:
            with pytest.raises(openai.APIConnectionError):
                for _ in client_of(job).completions.create(**options, stream=True):
                    trio.from_thread.run_sync(begun.set)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, ask)
            nursery.start_soon(trio.to_thread.run_sync, read)
            await begun.wait()
            os.kill((await service.status())["pid"], signal.SIGKILL)
        assert answers == [text]

        def after() -> None:
            assert scheduler.job_status(job["job_id"]) == job
            assert client_of(job).completions.create(**options).choices[0].text == text
            assert JsonConnection(job["server_url"]).request("GET", "/v1/health").status == 200

        await trio.to_thread.run_sync(after)

    # Ended in order, with the cluster, and started again.
    async with running(tmp_path, virtual_gpus=1) as (_, service):

        def again() -> None:
            assert client_of(job).completions.create(**options).choices[0].text == text
            assert scheduler.job_status(job["job_id"]) == job
            assert scheduler.submit_inference_job("tiny")["status"] == "QUEUED", "it has the GPU that it had"
            assert scheduler.complete_job(job["job_id"])["status"] == "COMPLETED"
            with pytest.raises(openai.ConflictError, match="has ended: COMPLETED"):
                client_of(job).completions.create(**options)

        await trio.to_thread.run_sync(again)
