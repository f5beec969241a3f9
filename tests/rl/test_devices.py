"""Servers and trainers compute where their resources are: on a reserved GPU, or where the user says."""

from __future__ import annotations

import importlib.util
import re
import traceback
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from fray import rl
from fray.cli.rl.start import processes_of
from fray.errors import InvalidRequest
from fray.model.resources import ResourceConfig
from fray.rl.core.versions import VersionName
from fray.rl.run_parts import RunParts, device_of
from tests.rl.test_run_with_torch import MODEL, ROWS, first_is_1, run

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch: make test-rl")
GPU, CPU = ResourceConfig.with_gpu("h100"), ResourceConfig.with_cpu(2)


def gpus() -> int:
    if not HAS_TORCH:
        return 0
    import torch

    return torch.cuda.device_count()


needs_gpu = pytest.mark.skipif(gpus() < 1, reason="needs an NVIDIA GPU and a build of torch with CUDA")
needs_two_gpus = pytest.mark.skipif(gpus() < 2, reason="needs two NVIDIA GPUs and a build of torch with CUDA")


@pytest.mark.parametrize(
    ("reserved", "chosen", "device"),
    [
        (None, None, "cpu"),
        (CPU, None, "cpu"),
        (GPU, None, "cuda"),
        (ResourceConfig.with_tpu("v4-8"), None, "cpu"),
        (GPU, "cpu", "cpu"),
        (None, "cuda", "cuda"),
    ],
)
def test_a_reserved_gpu_is_used_unless_the_user_says_otherwise(
    reserved: ResourceConfig | None, chosen: str | None, device: str
) -> None:
    assert device_of(reserved, chosen) == device


def test_each_part_of_a_run_has_the_device_of_its_own_resources() -> None:
    of_trainer = run(1, resources={"trainer": GPU, "rollout": CPU}).parts
    assert (of_trainer.trainer_device, of_trainer.server_device) == ("cuda", "cpu")
    does = {one["part"]: one["does"] for one in processes_of(of_trainer)}
    assert (does["trainer"], does["server"]) == ("updates TinyLlama on cuda", "generates with TinyLlama")
    everywhere = run(1, device="cuda").parts
    assert (everywhere.trainer_device, everywhere.server_device) == ("cuda", "cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "invalid device 'gpu'; expected one of 'cpu', 'cuda'"),
        ({"device": "cuda", "deterministic": True}, "on GPUs sums have no fixed order; expected device='cpu'"),
        ({"resources": {"server": GPU}, "deterministic": True}, "on GPUs sums have no fixed order"),
    ],
)
def test_devices_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        run(1, **options)
    assert message in str(error.value)


@pytest.mark.torch
@needs_torch
def test_ranks_on_gpus_exchange_gradients_by_nccl_and_objects_by_gloo() -> None:
    from fray.rl.tensors.ranks import backend_of

    assert [backend_of(device) for device in ("cpu", "cuda", "cuda:0")] == [
        *("gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl")
    ]


@pytest.mark.torch
@needs_torch
@pytest.mark.skipif(gpus() > 0, reason="this machine has a GPU")
@pytest.mark.usefixtures("warm_cluster")
@pytest.mark.parametrize("part", ["trainer", "server"])
def test_a_process_that_shall_use_a_gpu_and_sees_none_ends_the_run_and_says_why(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A reservation would wait for a machine with a GPU: only the device is that of one.
    monkeypatch.setattr(RunParts, f"{part}_device", "cuda")
    with pytest.raises(Exception) as caught:  # noqa: PT011 (an error, or a group of them)
        trio.run(run(1).main)
    # Of a server it is the error of its engine.
    shown = "".join(traceback.format_exception(caught.value))
    assert re.search(r"device='cuda': torch .* finds no GPU in this process", shown)


@pytest.mark.torch
@needs_gpu
def test_a_run_on_one_gpu_that_trainer_and_servers_share_learns(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "env_vars": {"CUDA_VISIBLE_DEVICES": "0"}, "inference_servers": 2}
    result = trio.run(run(12, output=tmp_path, **options).main)
    rewards = [step["reward_mean"] for step in result.steps]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    # The servers have the weights of the trainer, and compute as it does.
    assert all(abs(step["mismatch_k3"]) < 1e-4 for step in result.steps if "mismatch_k3" in step)


@pytest.mark.torch
@needs_two_gpus
def test_two_ranks_on_two_gpus_have_the_losses_of_one() -> None:
    trainer = rl.GRPO(groups=8, group_size=4, lr=1e-3, steps=4)
    losses = []
    for ranks in (1, 2):
        resources = {"trainer": ResourceConfig.with_gpu(cpu=1, memory="1GB")}
        options: dict[str, Any] = {"trainer": trainer, "trainer_ranks": ranks, "resources": resources}
        found = trio.run(rl.Run(model=MODEL, data=ROWS, rollout=first_is_1, progress=False, **options).main)
        losses.append([step["loss"] for step in found.steps])
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.torch
@needs_gpu
def test_weights_go_from_one_gpu_model_to_another_through_the_buffer() -> None:
    import torch

    from fray.rl.tensors import flat_weights
    from fray.rl.tensors.engine import Engine
    from fray.rl.tensors.language_model import load_model

    trained, served = (load_model(attrs.evolve(MODEL, seed=seed), device="cuda") for seed in (1, 2))
    table = flat_weights.table_of(trained.model)
    buffer = bytearray(table.total_bytes)
    flat_weights.write(trained.model, buffer)
    Engine(served, VersionName(0, 0)).load(VersionName(0, 1), table, buffer)
    for one, other in zip(trained.model.parameters(), served.model.parameters(), strict=True):
        assert one.device.type == "cuda"
        assert torch.equal(one, other)
