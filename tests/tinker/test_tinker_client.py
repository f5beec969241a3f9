"""Remote trainers over HTTP with a real service: Fray's own client, runs, kills, checkpoints."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from fray import rl
from fray.rl.records.steps import read_step
from fray.rl.train.datums import AdamParams, Datum, ServiceLoss
from fray.rl.trainer.tinker_service import token_shares
from fray.tinker.tinker_client import RequestRefused, TinkerClient
from tests.tinker.services import running

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from fray.rl.tensors.aggregation import AGGREGATIONS, aggregate  # noqa: E402
from fray.rl.tensors.language_model import load_model  # noqa: E402
from fray.rl.tensors.policy_trainer import PolicyTrainer  # noqa: E402

MODEL = rl.TinyLlama(layers=1, width=16, mlp=32)
ROWS = [{"prompt": f"{number:02}>"} for number in range(30)]
STEPS = 4
LORA = rl.LoRA(4, seed=1)
CROSS_ENTROPY = ServiceLoss("cross_entropy")


def datum(tokens: list[int], targets: list[int]) -> Datum:
    return Datum(tokens, targets, {"weights": [1.0] * len(tokens)})


async def counts_up(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    reply = await llm.completion(task["prompt"], max_tokens=2)
    return rl.score(reply, reward=float(reply.token_ids[0]))


async def test_a_run_has_over_http_the_losses_of_a_trainer_in_its_process_and_waits_for_a_killed_service(
    tmp_path: Path,
) -> None:
    trainer = rl.RemoteApiGrpoTrainer(rl.GRPO(groups=4, group_size=4, lr=1e-2, steps=STEPS))
    async with running(tmp_path / "service", models=[MODEL], auth=True) as (cluster, service):
        (tmp_path / "key").write_text((await service.create_key("ada")).replace("otk_", "tml-"))
        options = {"rank": LORA.rank, "seed": LORA.seed, "key_file": tmp_path / "key"}
        trainer.set_service_holder(rl.TinkerServiceHolder(base_url=service.url, base_model="tiny", **options))
        pids = [(await service.status())["pid"]]

        def kill(metrics: dict[str, float]) -> None:
            if metrics["step"] == 2:
                os.kill(pids[0], signal.SIGKILL)

        run = rl.Run(
            model=MODEL,
            data=ROWS,
            rollout=counts_up,
            trainer=trainer,
            threads=1,
            output=tmp_path / "run",
            progress=False,
            on_step=kill,
        )
        found = await run.run_on(cluster)
        pids.append((await service.status())["pid"])
    assert pids[0] != pids[1]
    assert [(step["step"], step["line"]) for step in found.steps] == [(step, 0) for step in range(1, STEPS + 1)]
    assert found.status is not None
    assert found.status.rollout_version.number == STEPS
    inside = rl.RemoteApiGrpoTrainer(trainer.settings)
    inside.set_policy(lambda settings: PolicyTrainer(load_model(MODEL), settings))
    for step in found.steps:
        expected = inside.train(read_step(tmp_path / "run", int(step["step"])).trajectories)
        assert (step["loss"], step["grad_norm"]) == pytest.approx((expected["loss"], expected["grad_norm"]), abs=1e-5)
        assert expected["grad_norm"] > 0.01
        # The servers had the adapter that the service trained.
        assert step["mismatch_k3"] < 1e-6


def converse(url: str) -> None:
    client = TinkerClient(url)
    with pytest.raises(RequestRefused, match="base_model: 'other' is not served here; expected one of tiny"):
        client.create_model("other", LORA)
    model = client.create_model("tiny", LORA)
    with pytest.raises(RequestRefused, match=r"forward_backward: data\[0\]: token 99 at position 0"):
        model.forward_backward([datum([99], [1])], CROSS_ENTROPY)
    before = model.forward_backward([datum([1, 2], [2, 3])], CROSS_ENTROPY)
    assert before.loss == pytest.approx(-sum(before.logprobs[0]), abs=1e-5)
    model.optim_step(AdamParams(learning_rate=0.01))
    again = client.load_model(model.save_state("here"))
    losses = [one.forward_backward([datum([1, 2], [2, 3])], CROSS_ENTROPY).loss for one in (model, again)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] < before.loss
    with pytest.raises(RequestRefused, match="/external_weights_urls: 404: you have no checkpoint"):
        client.download("tinker://a/weights/b", "adapter_config.json")
    client.close()
    with pytest.raises(ConnectionError, match=r"the service did not answer for 0.1 s"):
        TinkerClient("http://127.0.0.1:9", patience_s=0.1).create_model("tiny", LORA)


async def test_a_recipe_trains_with_a_service_and_continues_from_what_it_saved_there(tmp_path: Path) -> None:
    async with running(tmp_path / "service", models=[MODEL]) as (cluster, service):
        await trio.to_thread.run_sync(converse, service.url)
        config: dict[str, Any] = {
            "data": {"type": "mock", "prompts": ["1>", "2>", "3>"], "rollout_repeat_n": 2},
            "rollout_worker": {"type": "mock", "num_workers": 2},
            "trajectory_pool": {"batch_size": 4},
            "trainer": {"type": "remote_api_cross_entropy", "lr": 0.01, "checkpoint_path": str(tmp_path / "run")},
            "service": {
                "train_service": {
                    "backend": "tinker",
                    "url": service.url,
                    "base_model": "tiny",
                    "rank": 4,
                    "model": {"layers": 1, "width": 16, "mlp": 32},
                }
            },
            "resume": {"mode": "auto"},
        }
        found = []
        for steps in (1, 2):
            config["trainer"]["total_train_steps"] = steps
            result = await rl.NexRLController(config)._run.run_on(cluster)
            found += [(step["step"], step["updated"], step["updates"]) for step in result.steps]
    assert found == [(1, 1, 1), (2, 1, 2)]
    saved = tmp_path / "run" / "checkpoints" / "global_step_2"
    assert {path.name for path in saved.rglob("adapter*")} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sums_over_tokens_are_made_the_loss_that_was_asked_for(aggregation: str) -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [5.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    length = 7 if aggregation == "constant-length" else None
    shares = token_shares(mask.sum(-1).tolist(), aggregation, length)
    found = (losses * mask * torch.tensor(shares)[:, None]).sum()
    assert found.item() == pytest.approx(aggregate(losses, mask, aggregation, length=length).item())


def test_what_a_service_cannot_do_is_refused_before_anything_is_sent() -> None:
    def holder(**options: Any) -> rl.TinkerServiceHolder:
        return rl.TinkerServiceHolder(**{"base_url": "https://far", "base_model": "m", "api_key": "tml-1", **options})

    assert "tml-1" not in repr(vars(holder()))
    trainer = rl.RemoteApiGrpoTrainer(rl.GRPO())
    trainer.set_service_holder(holder())
    assert pickle.loads(pickle.dumps(trainer)).settings.lora == trainer.settings.lora == rl.LoRA(32)
    for wrong, message in (
        ({"kl": 0.1}, "kl of GRPO with a Tinker service, which does not have it"),
        ({"lora": 8}, "lora of GRPO is .*rank=8.*, and that of the Tinker service .*rank=32"),
    ):
        with pytest.raises(ValueError, match=message):
            rl.RemoteApiGrpoTrainer(rl.GRPO(**wrong)).set_service_holder(holder())
    with pytest.raises(ValueError, match="http, and far is another machine"):
        holder(base_url="http://far")
    with pytest.raises(ValueError, match="loss_fn 'gspo' with a Tinker service; expected one of cross_entropy"):
        holder().train([], {"loss_fn": "gspo"})
    with pytest.raises(TypeError, match="needs a policy, or base_url"):
        rl.TinkerServiceHolder()
