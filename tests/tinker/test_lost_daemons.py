"""The controller and a node of a service's cluster are killed while a user trains and samples: no result changes."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("torch")
pytest.importorskip("google.protobuf")

import fray
from fray import tinker
from fray.rl.train.datums import AdamParams, Datum, ServiceLoss
from fray.rl.train.lora import LoRA
from fray.tinker.tinker_client import TinkerClient
from tests.processes.lab import TOKEN, Lab
from tests.tinker.runs_api import MODEL

pytestmark = pytest.mark.torch

STEPS, SAMPLED = 60, 6
"""Steps of training, and after how many of them there are samples each time."""


@contextmanager
def two_nodes(directory: Path) -> Iterator[Lab]:
    """Start a controller and two nodes, whose jobs need not import torch."""
    lab = Lab(directory)
    (directory / "node.toml").write_text("cpu = 4\n")
    try:
        lab.start_controller("--suspect-s", "3")
        for name in ("north", "south"):
            lab.start_node(name, "--config", str(directory / "node.toml"), module="tests.support.warm_node")
        lab.wait_serving()
        yield lab
    finally:
        lab.close()


def batch_of(seed: int) -> list[Datum]:
    rng = random.Random(seed)
    texts = [[rng.randrange(10) for _ in range(50)] for _ in range(60)]
    return [Datum(tokens[:-1], tokens[1:], {"weights": [1.0] * 49}) for tokens in texts]


def work(url: str, losses: list[float]) -> list[bytes]:
    """Train a model, and sample from it now and then; return the answers with samples, logprobs included."""
    client = TinkerClient(url)
    model = client.create_model("tiny", LoRA(4, seed=1))
    session, found = model.model_id.split(":")[0], list[bytes]()
    for step in range(STEPS):
        losses.append(model.forward_backward(batch_of(step), ServiceLoss("cross_entropy", {})).loss)
        model.optim_step(AdamParams(learning_rate=1e-2))
        if step % SAMPLED == 0:
            named = {"session_id": session, "sampling_session_seq_id": step}
            named["model_path"] = model.save_weights(f"step-{step}")
            sampler = client.post("create_sampling_session", named).get("sampling_session_id", "str")
            wanted: dict[str, Any] = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2}
            wanted |= {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 20, "seed": step}}
            found.append(client.queued("asample", json.dumps(wanted).encode(), "application/json").content)
    client.close()
    return found


@pytest.mark.within(200)
async def test_a_killed_controller_and_a_killed_node_change_no_loss_and_no_sample(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    results: list[tuple[list[float], list[bytes]]] = []

    def run(losses: list[float]) -> None:
        results.append((losses, work(url, losses)))
        has_ended.set()

    with two_nodes(tmp_path / "lab") as lab:
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False, grace_s=600) as cluster:
            await cluster.wait_for_nodes(2)
            serving = tinker.serve(models=[MODEL], threads=1, directory=tmp_path / "service", cluster=cluster)
            async with serving as service, trio.open_nursery() as nursery:
                url, has_ended = service.url, threading.Event()
                await trio.to_thread.run_sync(run, [])
                has_ended.clear()
                losses: list[float] = []
                nursery.start_soon(trio.to_thread.run_sync, run, losses)

                async def trained(steps: int) -> None:
                    while len(losses) < steps:  # noqa: ASYNC110 (it is trained in a thread)
                        await trio.sleep(0.01)

                await trained(10)
                lab.kill("controller")
                await trained(15)
                lab.start_controller("--suspect-s", "3")
                await trained(20)
                engines = [each for each in await cluster.list_jobs() if each.name.startswith("tinker-engine")]
                place = engines[-1].attempts[-1].node
                assert place in ("north", "south")
                lab.kill(place)
                assert not has_ended.is_set(), "the user has not ended yet"
    (undisturbed, samples), (disturbed, same_samples) = results
    assert len(undisturbed) == STEPS
    assert disturbed == undisturbed
    assert same_samples == samples
