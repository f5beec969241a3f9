"""The learning gate of OpenTinker's protocol, and ten random kills while three users train."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.tinker.services import running

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-tinker"),
    pytest.mark.within(400),
]


async def test_a_model_that_knows_nothing_learns_to_copy_three_digits_in_200_steps(tmp_path: Path) -> None:
    from examples.opentinker_client import MODEL, train

    async with running(tmp_path, models=[MODEL]) as (_, service):
        found = await trio.to_thread.run_sync(train, service.url, 200)
    rewards = found["rewards"]
    assert len(rewards) == 200
    assert sum(rewards[:10]) / 10 < 0.15
    assert sum(rewards[-10:]) / 10 >= 0.9
    assert found["validation"] >= 0.9, "greedy"


@pytest.mark.usefixtures("warm_cluster")
async def test_ten_random_kills_change_no_result_of_three_users() -> None:
    if not (ROOT / ".venv-tinker-0.38/bin/python").is_file():
        pytest.skip("no environment with the SDK: tools/venv tinker-0.38 makes it")
    options = ("--kills", "10", "--seed", "18", "--cluster")
    command = [sys.executable, "-m", "bench.faults.tinker_kills", *options, os.environ["FRAY_CLUSTER_SPEC"]]
    run = partial(trio.run_process, capture_stdout=True, capture_stderr=True, check=False)
    done = await run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()[-4_000:]
    report = json.loads(done.stdout)
    assert (report["kills"], report["broken"]) == (10, [])
