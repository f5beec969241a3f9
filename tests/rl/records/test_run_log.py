"""The log of a run: what it collects is in the file once, whenever its process is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trio

from fray import rl
from fray.rl.records.run_log import RunResult, StepLog
from fray.runtime.serialization.pickling import dumps_plain


async def solve(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    raise NotImplementedError


def collecting(output: Path) -> rl.Run:
    rows = [{"prompt": f"{number}>"} for number in range(4)]
    return rl.Run(model=rl.TinyLlama(), data=rows, rollout=solve, trainer=None, output=output, progress=False)


def batch(*tasks: str) -> list[list[bytes]]:
    """Return groups of one sample each, with two trajectories."""
    return [[dumps_plain([{"task_id": task, "run_id": 0, "turn": turn} for turn in range(2)])] for task in tasks]


def test_a_batch_that_is_given_again_is_in_the_file_once_and_one_written_in_part_is_whole(tmp_path: Path) -> None:
    run = collecting(tmp_path)
    StepLog(RunResult(), run).add_samples(batch("0-0-0", "0-1-0"))
    written = (tmp_path / "rollouts.jsonl").read_text()
    # Killed within the next batch: after one trajectory, and within a line.
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"task_id": "0-2-0", "run_id": 0, "turn": 0}\n{"task_id": "0-')
    again, result = StepLog(found := RunResult(), run), found
    assert (tmp_path / "rollouts.jsonl").read_text() == written
    again.add_samples(batch("0-0-0", "0-1-0"))
    again.add_samples(batch("0-2-0", "0-3-0"))
    again.add_samples(batch("0-2-0", "0-3-0"))
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["task_id"], line["turn"]) for line in lines] == [
        (f"0-{row}-0", turn) for row in range(4) for turn in range(2)
    ]
    assert [one["task_id"] for one in result.trajectories] == ["0-2-0"] * 2 + ["0-3-0"] * 2


def test_the_status_of_a_run_that_has_not_begun_is_none(tmp_path: Path) -> None:
    assert trio.run(collecting(tmp_path).status) is None
