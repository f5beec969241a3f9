"""Modules that processes load: a rollout process without torch is small and starts quickly; others need still less."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

# Where they are not installed, nothing could load them.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
]
TENSORS = {"torch", "transformers", "safetensors", "peft", "ray"}
EXTRA = TENSORS | {"tokenizers", "numpy", "httpx", "starlette", "hypercorn", "omegaconf", "rich", "huggingface_hub"}
TRACKERS = {"wandb", "tensorboard", "trackio", "mlflow", "hydra"}
EPISODE = """
import trio
from fray import rl
from fray.rl.core.versions import VersionName
from fray.rl.inference.requests import Completion
from fray.rl.rollout_worker import WorkerEpisode
from fray.rl.tokenizers import load_limits, load_tokenizer

async def answer(request):
    return [Completion([1], [-1.0], [(VersionName(0, 0), 1)], "stop")]

model = rl.TinyLlama()
load_limits(model)
episode = WorkerEpisode(rl.SimpleRolloutWorker, {"max_tokens": 2})
made = trio.run(episode, {"prompt": "12"}, rl.LLM(answer, load_tokenizer(model)))
assert made.trajectories[0]["tokens"] == [1, 2, 1]
"""


@pytest.mark.parametrize(
    ("program", "forbidden"),
    [
        ("import fray; fray.Cluster, fray.Job, fray.actor, fray.open_cluster", EXTRA | TRACKERS),
        ("import fray.rl; fray.rl.GRPO, fray.rl.TinyLlama, fray.rl.Batch", EXTRA | TRACKERS),
        ("import fray.rl.coordinator, fray.controller.main, fray.node.main", EXTRA | TRACKERS),
        ("import fray.rl.rollout.process, fray.rl.rollout_worker", TENSORS | TRACKERS),
        ("import fray.rl.nexrl.controller, fray.rl.trainer", TENSORS | TRACKERS),
        (EPISODE, TENSORS | TRACKERS),
    ],
    ids=["fray", "rl", "coordinator", "workers", "controller", "episode"],
)
def test_a_process_loads_no_more_than_it_needs(program: str, forbidden: set[str]) -> None:
    code = f"{program}\nimport sys\nprint(sorted({forbidden!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
