"""Program of one rank: updates of a data-parallel trainer, whose losses, metrics and weights it writes.

python rank_program.py RANK SIZE DIRECTORY
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fray import rl
from fray.rl.tensors.policy_trainer import PolicyTrainer
from fray.rl.tensors.ranks import Ranks
from tests.rl.tensors.trainer_cases import tiny_model, trajectories_of

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "minibatches": {"minibatches": 2, "old_logprobs": "trainer"},
    "corrected": {"correction": "reject", "kl": 0.1},
    "critic": {"advantage": "gae", "critic": 1e-3, "micro_batch": 2},
}


def train(options: dict[str, Any], ranks: Ranks | None) -> tuple[list[dict[str, float]], torch.Tensor, torch.Tensor]:
    """Do ten updates; return their metrics, and the weights after the first and the last."""
    lm = tiny_model()
    trainer = PolicyTrainer(lm, rl.GRPO(groups=2, group_size=4, lr=1e-3, **options), ranks=ranks)
    batches = [trajectories_of(lm, count=7, seed=seed) for seed in range(10)]
    metrics, weights = [], []
    for rows in batches:
        metrics.append(trainer.update(rows))
        weights.append(torch.cat([one.detach().flatten().clone() for one in lm.model.parameters()]))
    return metrics, weights[0], weights[-1]


if __name__ == "__main__":
    rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    found = {name: train(options, Ranks()) for name, options in CASES.items()}
    (directory / f"rank{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
