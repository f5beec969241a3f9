"""The log of a run: what it collects is in the file once, whenever its process is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trio

from fray import rl
from fray.rl.core.validation import PREFIX
from fray.rl.core.versions import VersionName
from fray.rl.messages import RunStatus, ValidationResult
from fray.rl.records.console_lines import is_validation
from fray.rl.records.run_files import read_rows
from fray.rl.records.run_log import RunResult, StepLog
from fray.rl.trainer_process import TrainedStep
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


def test_what_an_earlier_process_has_reported_is_there_once(tmp_path: Path) -> None:
    run = rl.Run(
        model=rl.TinyLlama(),
        data=[{"prompt": "1>"}],
        rollout=solve,
        output=tmp_path,
        progress=False,
        trainer=rl.GRPO(groups=1, group_size=2),
    )
    status = RunStatus("", VersionName(0, 2), VersionName(0, 2), 0, 0, 0, 0, {}, {}, "")
    # Of one number: the first was not finite, and skipped.
    steps = [TrainedStep(1, 0, serial, {"reward_mean": 0.5, "wait_s": serial / 8}) for serial in (1, 2)]
    validation = ValidationResult(VersionName(0, 1), {f"{PREFIX}samples": 2.0, f"{PREFIX}dropped": 0.0})
    before = StepLog(RunResult(), run)
    before.add_step(steps[0], status)
    before.add_validation(validation)
    after, result = StepLog(found := RunResult(), run), found
    after.take_over(1)
    for step in steps:
        after.add_step(step, status)
    after.add_validation(validation)
    rows = list(read_rows(tmp_path))
    assert [row["wait_s"] for row in rows if "wait_s" in row] == [1 / 8, 2 / 8]
    assert [row["step"] for row in rows if is_validation(row)] == [1]
    assert [row["wait_s"] for row in result.steps] == [2 / 8]


def test_the_status_of_a_run_that_has_not_begun_is_none(tmp_path: Path) -> None:
    assert trio.run(collecting(tmp_path).status) is None
