"""Two ranks of a data-parallel trainer against one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.rl.tensors import rank_program  # noqa: E402

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[3]


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.rl.tensors.rank_program"]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], cwd=ROOT, env=environment) for rank in range(2)
    ]
    expected = {name: rank_program.train(options, None) for name, options in rank_program.CASES.items()}
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    found = [pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(2)]
    for name, (metrics, first, last) in expected.items():
        for of_rank in found:
            for one, other in zip(metrics, of_rank[name][0], strict=True):
                assert other["loss"] == pytest.approx(one["loss"], abs=1e-3), name
                assert other["updated"] == one["updated"] == 1
            assert of_rank[name][0][0]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], abs=1e-5), name
            assert (of_rank[name][1] - first).abs().max() < 1e-5, name
            assert (of_rank[name][2] - last).abs().mean() < 1e-5, name
        assert torch.equal(found[0][name][2], found[1][name][2])
