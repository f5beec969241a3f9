"""Runs of real processes with torch: they learn, collect, and continue when one of their processes is killed."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.checkpoint import latest_checkpoint
from fray.rl.core.versions import VersionName
from fray.rl.journal_file import read_failures
from fray.rl.records.replay import replay
from fray.rl.records.run_files import read_status
from fray.rl.records.run_requests import RunRequest, ask_run
from fray.rl.records.steps import read_step
from fray.rl.train.errors import EpisodesFailed, NonFiniteUpdatesError
from fray.rl.weight_files import read_weights

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
    pytest.mark.usefixtures("warm_cluster"),
]
ROWS = [{"prompt": f"{''.join(digits)}>"} for digits in itertools.product("0123456789", repeat=2)]
MODEL = rl.TinyLlama(layers=1, width=16, mlp=32)
NAMES = {
    "rollout": "fray:RolloutPro",
    "server": "fray:InferenceS",
    "trainer": "fray:TrainerPro",
    "pool": "fray:Coordinato",
}
"""Titles of the processes of a run, as the kernel cuts them."""
MARK = "TEST_RUN"
"""Variable by which all processes of a run are found. A name with FRAY_ is not passed on to them."""


async def first_is_1(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    reply = await llm.completion(task["prompt"], max_tokens=2)
    return rl.score(reply, reward=float(reply.text.startswith("1")))


async def with_first_weights(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    reply = await llm.completion(task["prompt"], max_tokens=2)
    is_first = [name for name, _ in reply.segments] == [VersionName(0, 0)]
    return rl.score(reply, reward=10.0 * is_first + float(reply.text.startswith("1")))


async def two_turns(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    first = await llm.completion(task["prompt"], max_tokens=2, ignore_eos=True)
    second = await llm.completion([*first.prompt_ids, *first.token_ids, 0], max_tokens=2, ignore_eos=True)
    return rl.score(second, reward=1.0)


async def always_fails(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    raise KeyError("answer")


async def hangs(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    await trio.sleep_forever()
    raise AssertionError


async def scores_nan(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    reply = await llm.completion(task["prompt"], max_tokens=1)
    return rl.score(reply, reward=float("nan"))


async def counts_up(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    reply = await llm.completion(task["prompt"], max_tokens=1)
    return rl.score(reply, reward=float(reply.token_ids[0]))


async def partly_wrong(task: dict[str, Any], llm: rl.LLM) -> rl.Trajectory:
    """Make trajectories that cannot be trained of some tasks; the prompt of one is too long."""
    reply = await llm.completion(task["prompt"], max_tokens=2)
    prompt, response = len(reply.prompt_ids), len(reply.token_ids)
    made: dict[str, Any] = {
        "tokens": [*reply.prompt_ids, *reply.token_ids],
        "loss_mask": [0] * prompt + [1] * response,
        "logprobs": [0.0] * prompt + list(reply.logprobs),
        "versions": reply.segments,
        "reward": float(reply.token_ids[0]),
    }
    key, value = task["wrong"]
    return {**made, key: made[key][:-1] + value} if key else made


def nan_loss(inputs: Any) -> Any:
    return inputs.logprobs * float("nan"), {}


def run(steps: int, **options: Any) -> rl.Run:
    settings: dict[str, Any] = {
        "model": MODEL,
        "data": ROWS,
        "rollout": first_is_1,
        "trainer": rl.GRPO(groups=8, group_size=4, lr=1e-2, steps=steps),
        "rollout_workers": 32,
        "progress": False,
    }
    return rl.Run(**settings | options)


def processes(title: str) -> list[int]:
    """Return the processes below this one that have a title."""
    found, parents = [], {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            comm, rest = (path / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        parents[int(path.name)] = int(rest.split()[1])
        if comm == title:
            found.append(int(path.name))

    def is_below(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [pid for pid in found if is_below(pid)]


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended, or is another user's
        return b""


@pytest.mark.parametrize("sync", ["sync", "batch-async", "fully-async"])
def test_a_run_learns_and_every_sample_is_accounted_for(
    sync: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fray.rl.processes.run_servers.PROBE_PERIOD_S", 0.02)
    result = trio.run(run(12, sync=sync, inference_servers=2, progress=True).main)
    shares = [step["servers_busy_share"] for step in result.steps if "servers_busy_share" in step]
    assert len(shares) >= 11, "all but the first, which may end before the servers were asked twice"
    assert all(0 <= share <= 1 for share in shares)
    assert 0 < sum(shares[1:]) < len(shares) - 1
    assert f"servers busy {shares[-1]:.0%}" in capsys.readouterr().err.splitlines()[-1]
    rewards = [step["reward_mean"] for step in result.steps]
    assert [step["step"] for step in result.steps] == list(range(1, 13))
    assert sum(rewards[-3:]) > sum(rewards[:3])
    # Each version is sent after the line of its update was written.
    pauses = [step["sync_pause_s"] for step in result.steps]
    assert pauses[0] == 0
    assert sync != "sync" or min(pauses[1:]) > 0
    status = result.status
    assert status is not None
    assert status.trained == 12 * 32
    assert status.issued == status.trained + status.open + sum(status.dropped.values())
    assert (status.version.number, status.waits_for) == (12, "the run is done")


async def needs_its_own_rows(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    """Roll out a task; a row of the other data fails."""
    assert task["is_val"] == (task.get("part") == "validation"), task
    reply = await llm.completion(task["prompt"], max_tokens=2)
    is_greedy = reply.text == (await llm.completion(task["prompt"], max_tokens=2)).text
    return rl.score(reply, reward=float(reply.text.startswith("1")), score={"greedy": is_greedy, "row": task["row"]})


VALIDATION_ROWS = [{"prompt": f"{number}>", "part": "validation", "row": number} for number in range(5)]


def test_versions_are_validated_with_rows_of_their_own(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    validating = run(
        6,
        sync="fully-async",
        rollout=needs_its_own_rows,
        data=[{**row, "row": -1} for row in ROWS],
        validation_data=VALIDATION_ROWS,
        validate_freq=3,
        validate_before=True,
        output=tmp_path,
        on_validation=seen.append,
    )
    result = trio.run(validating.main)
    assert seen == result.validations
    assert [metrics["step"] for metrics in seen] == [0, 3, 6]
    for metrics in seen:
        assert (metrics["val/greedy"], metrics["val/row"]) == (1, 2)
        assert (metrics["val/samples"], metrics["val/dropped"]) == (5, 0)
    assert all("val/greedy" not in step for step in result.steps)
    status = result.status
    assert status is not None
    assert (status.trained, status.validated, status.dropped) == (6 * 32, 15, {})
    assert status.issued == status.trained + status.validated + status.open
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if "val/reward" in line] == seen


def test_validations_survive_the_loss_of_each_process(tmp_path: Path) -> None:
    roles = {3: "server", 4: "pool", 6: "rollout", 7: "trainer"}
    """Step: what is killed after it, as the validation begins or is under way."""

    def kill(metrics: dict[str, float]) -> None:
        for pid in processes(NAMES[roles.pop(int(metrics["step"]))]) if metrics["step"] in roles else ():
            os.kill(pid, signal.SIGKILL)

    validating = run(
        9,
        output=tmp_path,
        save_every=2,
        on_step=kill,
        validation_data=[{"prompt": f"{number}>"} for number in range(40)],
        validate_freq=3,
    )
    result = trio.run(validating.main)
    assert not roles
    assert [(metrics["step"], metrics["val/samples"]) for metrics in result.validations] == [(3, 40), (6, 40), (9, 40)]
    assert [metrics["line"] for metrics in result.validations][::2] == [0, 1]
    status = result.status
    assert status is not None
    assert status.issued == status.trained + status.validated + status.open + sum(status.dropped.values())


def test_servers_load_weights_from_files_and_old_ones_are_removed(tmp_path: Path) -> None:
    result = trio.run(run(6, weight_sync="disk", output=tmp_path, inference_servers=2).main)
    assert result.status is not None
    assert result.status.version.number == 6
    found = {path.name for path in (tmp_path / "weights").iterdir()}
    assert "0.6.safetensors" in found
    assert not found & {f"0.{number}.safetensors" for number in range(4)}


def test_weights_over_http_are_those_of_shared_memory() -> None:
    trainer = rl.GRPO(groups=4, group_size=4, lr=1e-2, steps=3)
    options: dict[str, Any] = {"deterministic": True, "rollout": counts_up, "trainer": trainer}
    steps = [trio.run(run(3, weight_sync=way, **options).main).steps for way in ("network", "memory")]
    network, memory = ([(one["loss"], one["reward_mean"], one["entropy"]) for one in each] for each in steps)
    assert network == memory
    assert len(set(network)) == 3


def test_servers_get_weights_over_http_from_the_next_trainer_too(tmp_path: Path) -> None:
    def kill(metrics: dict[str, float]) -> None:
        if metrics["step"] == 4 and metrics["line"] == 0:
            for pid in processes(NAMES["trainer"]) + processes(NAMES["server"])[:1]:
                os.kill(pid, signal.SIGKILL)

    options: dict[str, Any] = {"weight_sync": "network", "inference_servers": 2, "save_every": 3, "on_step": kill}
    result = trio.run(run(6, output=tmp_path, **options).main)
    assert [(step["step"], step["line"]) for step in result.steps] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    found = [one["versions"] for number in range(1, 7) for one in read_step(tmp_path, number).trajectories]
    # As each server says of its tokens.
    assert {name for segments in found for name, _ in segments} == {
        VersionName(int(number > 2), number) for number in range(6)
    }


def test_a_run_in_bfloat16_keeps_weights_and_moments_in_float32(tmp_path: Path) -> None:
    # Adam's steps of 1e-5 are below the rounding of these weights in bfloat16.
    trainer = rl.GRPO(groups=4, group_size=4, lr=1e-5, steps=2, dtype="bfloat16")
    trio.run(run(2, trainer=trainer, rollout=counts_up, output=tmp_path).main)
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    table, _ = read_weights(checkpoint.model)
    assert {place.dtype for place in table.places.values()} == {"float32"}
    again = list(replay(tmp_path, 2))
    assert [step.metrics["loss"] for step in again] == pytest.approx(
        [step.recorded["loss"] for step in again], abs=1e-4
    )


def test_servers_may_keep_the_weights_of_the_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {"weight_sync": "none", "sync": "fully-async", "stale": "keep", "output": tmp_path}
    trio.run(run(3, rollout=with_first_weights, **options).main)
    result = trio.run(run(5, rollout=with_first_weights, **options).main)
    assert [step["step"] for step in result.steps] == [4, 5]
    assert [step["reward_min"] for step in result.steps] == [10, 10]


async def long_answers(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    reply = await llm.completion(task["prompt"], max_tokens=48, ignore_eos=True)
    return rl.score(reply, reward=float(len(set(reply.token_ids))))


@pytest.mark.parametrize(("interrupt", "way"), [("wait", "memory"), ("abort", "network")])
def test_requests_in_flight_finish_first_or_begin_again_where_a_run_says_so(
    interrupt: str, way: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"interrupt": interrupt, "weight_sync": way, "freeze_for_weight_sync": True}
    trio.run(run(5, sync="fully-async", rollout=long_answers, inference_servers=2, output=tmp_path, **options).main)
    found = [one["versions"] for number in range(1, 6) for one in read_step(tmp_path, number).trajectories]
    # With "keep", an answer that an update meets has tokens of both versions.
    assert {len(segments) for segments in found} == {1}
    assert len({segments[0][0] for segments in found}) > 1


@pytest.mark.parametrize("role", list(NAMES))
def test_a_run_continues_when_one_of_its_processes_is_killed(role: str, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(metrics: dict[str, float]) -> None:
        if metrics["step"] == 5 and not killed:
            killed.extend(processes(NAMES[role]))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    result = trio.run(run(12, output=tmp_path, save_every=3, on_step=kill, inference_servers=2).main)
    assert len(killed) == (2 if role == "server" else 1)
    assert [step["step"] for step in result.steps] == list(range(1, 13))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    incarnations = [int(line["line"]) for line in lines]
    assert incarnations == ([0] * 3 + [1] * 9 if role == "trainer" else [0] * 12)
    status = result.status
    assert status is not None
    assert status.trained == 12 * 32
    assert status.issued == status.trained + status.open + sum(status.dropped.values())
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == 12


def test_a_frozen_server_gets_no_requests_and_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    frozen: list[int] = []

    def freeze(metrics: dict[str, float]) -> None:
        if metrics["step"] == 3 and not frozen:
            frozen.append(processes(NAMES["server"])[0])
            os.kill(frozen[0], signal.SIGSTOP)

    result = trio.run(run(8, on_step=freeze, inference_servers=2, liveness_s=4.0, progress=True).main)
    assert [step["step"] for step in result.steps] == list(range(1, 9))
    assert re.search(r"server-\d does not answer: its requests go to other servers", capfd.readouterr().err)
    assert not Path(f"/proc/{frozen[0]}").exists()


def test_servers_join_and_leave_while_a_run_continues_until_it_is_stopped(tmp_path: Path) -> None:
    running = run(100_000, output=tmp_path, save_every=100_000, min_servers=1)
    answers: list[str] = []

    def states() -> list[str]:
        return [one["state"] for one in read_status(tmp_path)["servers"]]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            updated = trio.Event()
            running.on_step = lambda metrics: updated.set()
            nursery.start_soon(running.main)
            await updated.wait()
            with pytest.raises(InvalidRequest, match=re.escape("invalid servers 0: expected 1 (min_servers) or more")):
                await ask_run(tmp_path, RunRequest(0))
            for wanted in (3, 1):
                answers.append(await ask_run(tmp_path, RunRequest(wanted)))
                while states() != ["healthy"] * wanted or len(processes(NAMES["server"])) != wanted:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            before = read_status(tmp_path)["step"]
            while read_status(tmp_path)["step"] < before + 3:  # noqa: ASYNC110
                await trio.sleep(0.1)
            found = await running.status()
            assert found is not None
            assert found.version.number >= before + 3
            assert found.waits_for
            answers.append(await ask_run(tmp_path, RunRequest(None)))

    trio.run(main)
    status = read_status(tmp_path)
    last = trio.run(running.status)
    assert last is not None
    assert last.version.number == status["step"]
    assert status["state"] == "stopped"
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == status["step"]
    assert answers == [
        "servers: 1 -> 3; server-1, server-2 join",
        "servers: 3 -> 1; server-1, server-2 leave",
        "ends after the update under way, which is saved",
    ]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.own_cluster
def test_a_driver_that_is_killed_or_ends_at_a_signal_leaves_nothing_and_the_next_one_continues(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "examples" / "rl_digits.py"
    options = ["--steps", "500", "--groups", "--save-every", "2", "--output", str(tmp_path / "out")]
    mark = f"{MARK}={tmp_path}"
    environment = {**os.environ, MARK: str(tmp_path)}
    saved = last = 0
    for number, code in (
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGINT, -signal.SIGINT),
        (signal.SIGTERM, 128 + signal.SIGTERM),
    ):
        command = [sys.executable, str(program), *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stderr is not None
            shown = []
            for line in process.stderr:
                shown.append(line)
                if f"step {saved + (5 if number is signal.SIGKILL else 3)}/500" in line:
                    process.send_signal(number)
        assert process.returncode in (code, 130), "".join(shown)
        if saved:
            assert any(f"continues after step {saved}" in line for line in shown), "".join(shown)
        done = [int(step[1]) for line in shown if (step := re.search(r"step (\d+)/500", line))]
        checkpoint = latest_checkpoint(tmp_path / "out" / "checkpoints")
        assert checkpoint is not None
        if number is signal.SIGKILL:
            # Its processes end with it, and what was saved at the time counts.
            deadline = time.monotonic() + 10
            while _marked(mark) and time.monotonic() < deadline:
                time.sleep(0.05)
            checkpoint = latest_checkpoint(tmp_path / "out" / "checkpoints")
            assert checkpoint is not None
            assert checkpoint.step >= 2
        else:
            assert any("ends after the update under way" in line for line in shown)
            assert checkpoint.step == max(done) > saved
            last = max(done)
        assert _marked(mark) == []
        saved = checkpoint.step
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, last + 1))


def _has(pid: int, mark: str) -> bool:
    return mark.encode() in read_bytes(Path(f"/proc/{pid}/environ"))


def _marked(mark: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/environ") if mark.encode() in read_bytes(path)]


@pytest.mark.own_cluster
def test_ctrl_c_while_processes_of_a_run_import_torch_leaves_nothing(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "examples" / "rl_digits.py"
    mark = f"{MARK}={tmp_path}"
    command = [sys.executable, str(program), "--output", str(tmp_path / "out")]
    environment = {**os.environ, MARK: str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while process.poll() is None and not [pid for pid in processes(NAMES["trainer"]) if _has(pid, mark)]:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130), shown
    assert "step 1/" not in shown
    assert "Traceback" not in shown
    assert _marked(mark) == []


GUIDE_RECIPE = """
data: {type: mock, prompts: ["1>", "2>", "3>", "4>"], rollout_repeat_n: 4, epochs: 1000}
rollout_worker: {custom_rollout_worker_module_path: worker.py, custom_rollout_worker_class_name: Worker}
trajectory_pool: {group_size: 4, batch_size: 16}
trainer: {total_train_steps: 500, checkpoint_path: out, lr: 0.001}
service: {train_service: {model: {layers: 1, width: 16, mlp: 32}}}
"""
GUIDE_WORKER = """
from fray import rl

class Worker(rl.BaseRolloutWorker):
    def step(self, task):
        result = self._llm_client.completion(task["prompt"], max_tokens=2)
        reward = float(result["response"].startswith("1"))
        return self._put_trajectory({"prompt": task["prompt"], "response": result["response"], "reward": reward})
"""


@pytest.mark.own_cluster
def test_a_run_of_the_guide_ends_at_ctrl_c_with_the_update_under_way(tmp_path: Path) -> None:
    recipe = tmp_path / "guide.yaml"
    recipe.write_text(GUIDE_RECIPE)
    (tmp_path / "worker.py").write_text(GUIDE_WORKER)
    command = [sys.executable, "-m", "fray.cli", "rl", "run", str(recipe)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        shown = []
        for line in process.stderr:
            shown.append(line)
            if "step 3/500" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode in (-signal.SIGINT, 130), "".join(shown)
    assert any("ends after the update under way" in line for line in shown), "".join(shown)
    checkpoint = latest_checkpoint(tmp_path / "out" / "checkpoints")
    assert checkpoint is not None
    steps = [re.search(r"step (\d+)/500", line) for line in shown]
    assert checkpoint.step == max(int(step[1]) for step in steps if step)
    assert read_status(tmp_path / "out")["state"] == "stopped"


def test_a_deterministic_run_whose_trainer_was_killed_has_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    def kill(metrics: dict[str, float]) -> None:
        if metrics["step"] == 4 and metrics["line"] == 0:
            for pid in processes(NAMES["trainer"]):
                os.kill(pid, signal.SIGKILL)

    found = []
    for name, on_step, scheme in (("straight", None, ""), ("killed", kill, ""), ("stored", kill, "file://")):
        output = f"{scheme}{tmp_path / name}"
        result = trio.run(run(6, deterministic=True, output=output, save_every=3, on_step=on_step).main)
        times = ("elapsed_s", "seconds", "servers_busy_share", "sync_pause_s", "tokens_per_s", "wait_s", "line")
        metrics = [{key: value for key, value in step.items() if key not in times} for step in result.steps]
        (model,) = (tmp_path / name / "checkpoints").glob("global_step_6*/model/model.safetensors")
        found.append((metrics, model.read_bytes()))
    assert found[0] == found[1] == found[2]


DETERMINISTIC = """
import sys, trio
from pathlib import Path
from tests.rl.test_run_with_torch import run

trio.run(run(6, deterministic=True, output=Path(sys.argv[1]), save_every=2, progress=True).main)
"""


def test_a_deterministic_run_whose_driver_was_killed_has_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    trio.run(run(6, deterministic=True, output=tmp_path / "straight", save_every=2).main)
    command = [sys.executable, "-c", DETERMINISTIC, str(tmp_path / "killed")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if "step 3/6" in line:
                first.kill()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert "continues after step 2" in done.stderr, done.stderr
    one, other = (latest_checkpoint(tmp_path / name / "checkpoints") for name in ("straight", "killed"))
    assert one is not None
    assert other is not None
    assert (one.step, other.step) == (6, 6)
    for name in ("model.safetensors", "trainer_state.pt"):
        assert (one.model / name).read_bytes() == (other.model / name).read_bytes(), name
    # The same settings but for the output, which is another directory.
    assert one.state["recipe_sha256"] != other.state["recipe_sha256"]
    assert one.state["version"].endswith(".6")


def test_a_directory_of_another_architecture_is_trained_and_its_checkpoint_loads_with_from_pretrained(
    tmp_path: Path,
) -> None:
    import transformers

    from fray.rl.tokenizers import save_char_tokenizer

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen3Config(
        vocab_size=15, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, **sizes
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    save_char_tokenizer(MODEL.tokenizer, tmp_path / "model")
    found = trio.run(run(4, model=str(tmp_path / "model"), threads=1, output=tmp_path / "out").main)
    assert [step["updated"] for step in found.steps] == [1] * 4
    # The servers have the trainer's weights, after each sync.
    assert all(abs(step["mismatch_k3"]) < 1e-5 for step in found.steps if "mismatch_k3" in step)
    assert all(step["ratio_mean"] == pytest.approx(1, abs=1e-3) for step in found.steps)
    checkpoint = latest_checkpoint(tmp_path / "out" / "checkpoints")
    assert checkpoint is not None
    trained = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.model)
    assert type(trained).__name__ == "Qwen3ForCausalLM"


def test_a_run_whose_output_is_at_a_url_continues_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(metrics: dict[str, float]) -> None:
        if metrics["step"] == 3 and metrics["line"] == 0:
            for pid in processes(NAMES["trainer"]) + processes(NAMES["pool"]):
                os.kill(pid, signal.SIGKILL)

    # A machine has what is below its home, and the storage.
    stored, url = tmp_path / "bucket" / "digits", f"file://{tmp_path}/bucket/digits"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "first"))
    first = trio.run(run(4, output=url, save_every=2, on_step=kill).main)
    assert [(step["step"], step["line"]) for step in first.steps] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    (kept,) = (stored / "checkpoints").iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["complete.json", "model", "run_record.pickle", "state.json"]
    (stored / "checkpoints" / "global_step_9-00000000").mkdir()
    (stored / "checkpoints" / "global_step_9-00000000" / "state.json").write_text("{}")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "second"))
    capsys.readouterr()
    second = trio.run(run(6, output=url, save_every=4, progress=True).main)
    assert [step["step"] for step in second.steps] == [5, 6]
    shown = capsys.readouterr().err
    assert f"ignores {url}/checkpoints/global_step_9-00000000: it was not finished" in shown
    assert "continues after step 4" in shown
    status = second.status
    assert status is not None
    assert status.trained == 6 * 32
    assert status.issued == status.trained + status.open + sum(status.dropped.values())
    lines = [json.loads(line) for line in (stored / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [path.name[:13] for path in (stored / "checkpoints").iterdir()] == ["global_step_6"]
    # A copy is looked at as a directory, and each update can be done again.
    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    assert [step.number for step in replay(copy, 6)] == [1, 2, 3, 4, 5, 6]
    assert read_status(copy)["state"] == "done"


def test_a_run_of_other_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    trio.run(run(1, output=tmp_path).main)
    with pytest.raises(InvalidRequest, match=r"cannot continue from .*global_step_1: data is '.*', and was '.*'"):
        trio.run(run(2, output=tmp_path, data=ROWS[:50]).main)


def test_rollouts_are_collected_with_all_their_turns(tmp_path: Path) -> None:
    collecting = run(1, trainer=None, samples_per_row=2, rollout=two_turns, data=ROWS[:3], output=tmp_path)
    result = trio.run(collecting.main)
    assert len(result.trajectories) == 6
    for trajectory in result.trajectories:
        assert trajectory["loss_mask"] == [0, 0, 0, 1, 1, 0, 1, 1]
        assert len(trajectory["tokens"]) == len(trajectory["logprobs"]) == 8
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 6


COLLECTOR = """
import sys, trio
from pathlib import Path
from tests.rl.test_run_with_torch import ROWS, run

trio.run(run(1, trainer=None, data=ROWS[:80], output=Path(sys.argv[1]), progress=True).main)
"""


def test_a_run_that_collects_repeats_no_sample_when_its_driver_or_pool_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COLLECTOR, str(tmp_path)]
    file = tmp_path / "rollouts.jsonl"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2]) as first:
        while not (file.is_file() and file.stat().st_size):
            assert first.poll() is None
            time.sleep(0.01)
        first.kill()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    tasks = [json.loads(line)["task_id"] for line in file.read_text().splitlines()]
    assert len(tasks) == len(set(tasks)) == 80


def test_episodes_that_fail_are_dropped_with_their_reason_and_the_error_is_shown() -> None:
    result = trio.run(run(1, trainer=None, rollout=always_fails, data=ROWS[:2], max_attempts=2).main)
    assert result.status is not None
    assert (result.status.dropped, result.status.repeated) == ({"KeyError": 2}, {"KeyError": 2})
    assert "KeyError: 'answer'" in result.status.last_failure
    assert "always_fails" in result.status.last_failure


def test_a_run_whose_every_episode_fails_ends_with_their_error_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EpisodesFailed) as caught:
        trio.run(run(3, rollout=always_fails, progress=True).main)
    assert "every episode fails: 32 samples in a row failed since the start" in str(caught.value)
    assert 'raise KeyError("answer")' in str(caught.value)
    shown = capfd.readouterr().err
    assert re.search(r"fray.rl: \d+ attempts of episodes failed \(KeyError \d+\); the last: KeyError: 'answer'", shown)


def test_a_reward_that_is_not_finite_fails_its_rollout_by_name() -> None:
    with pytest.raises(EpisodesFailed, match=r"out of attempts: attempt 1 failed \(InvalidReward\)") as caught:
        trio.run(run(3, rollout=scores_nan, on_error="stop_on_error", max_attempts=1).main)
    assert "invalid reward nan: expected a finite number" in str(caught.value)


def test_trajectories_that_cannot_be_trained_fail_their_rollouts_and_not_the_run(tmp_path: Path) -> None:
    wrong: list[tuple[str, list[Any]]] = [("loss_mask", []), ("logprobs", []), ("tokens", [15]), ("", []), ("", [])]
    rows = [{"prompt": f"{number}>", "wrong": each} for number, each in enumerate(wrong)]
    rows[3]["prompt"] = "3" * 64
    trainer = rl.GRPO(groups=5, group_size=4, lr=1e-2, steps=1)
    options: dict[str, Any] = {"trainer": trainer, "data": rows, "shuffle": False, "max_attempts": 2, "max_length": 64}
    result = trio.run(run(1, rollout=partly_wrong, output=tmp_path, on_error="continue", **options).main)
    assert result.steps[0]["updated"] == 1
    assert {"dropped/InvalidTrajectory", "dropped/PromptTooLong"} < result.steps[0].keys()
    failures = read_failures(tmp_path / "rollouts")
    attempts = Counter((one["task"], one["reason"]) for one in failures if one["task"].startswith("0-"))
    expected = {(f"0-{row}-{number}", "InvalidTrajectory"): 2 for row in range(3) for number in range(4)}
    assert attempts == expected | {(f"0-3-{number}", "PromptTooLong"): 1 for number in range(4)}
    notes = " ".join(one["detail"] for one in failures)
    for text in (
        "(task_id '0-0-0', group_id '0-0', run_id 0): loss_mask has 3 numbers, but there are 4 tokens",
        "(task_id '0-1-0', group_id '0-1', run_id 0): logprobs has 3 numbers, but there are 4 tokens",
        "tokens[3] is 15: expected 0 to 14, the tokens of the vocabulary",
        "the prompt has 64 tokens; at most 63 leave room for a response in the context of 64",
    ):
        assert text in notes


def test_a_run_ends_after_three_updates_in_a_row_that_are_not_finite(tmp_path: Path) -> None:
    trainer = rl.GRPO(groups=8, group_size=4, lr=1e-2, steps=9, loss=nan_loss)
    steps: list[dict[str, float]] = []
    with pytest.raises(NonFiniteUpdatesError, match="not finite in 3 updates in a row") as caught:
        trio.run(run(9, trainer=trainer, rollout=counts_up, on_step=steps.append, output=tmp_path).main)
    assert [(step["step"], step["not_finite"]) for step in steps] == [(1, 1), (1, 1)]
    dumped = Path(str(caught.value).rpartition(" ")[2])
    assert dumped.parent.parent == tmp_path
    assert dumped.stat().st_size > 0


def test_episodes_that_do_not_end_are_cancelled_and_the_status_says_in_what_they_are(tmp_path: Path) -> None:
    seen: set[str] = set()
    options: dict[str, Any] = {"max_attempts": 1, "rollout_timeout_s": 4.0, "output": tmp_path}

    async def main() -> rl.RunResult:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            result = await run(1, trainer=None, rollout=hangs, data=ROWS[:2], **options).main()
            nursery.cancel_scope.cancel()
        return result

    async def look() -> None:
        while True:
            await trio.sleep(0.2)
            if (tmp_path / "status.json").exists():
                seen.add(read_status(tmp_path).get("waits_for", ""))

    result = trio.run(main)
    assert result.status is not None
    assert result.status.dropped == {"timeout": 2}
    assert any(
        re.search(r"slowest: task 0-\d-0, \d s, in a tool call or its own code, of Rollout", one) for one in seen
    ), seen


def test_an_adapter_is_trained_sent_to_servers_saved_and_continued(tmp_path: Path) -> None:
    trainer = rl.GRPO(groups=8, group_size=4, lr=1e-2, steps=2, lora=rl.LoRA(4))
    trio.run(run(2, trainer=trainer, output=tmp_path).main)
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert {path.name for path in checkpoint.model.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    more = trio.run(run(4, trainer=attrs.evolve(trainer, steps=4), output=tmp_path).main)
    assert [step["step"] for step in more.steps] == [3, 4]
    # Servers that answered with the model's own weights would differ from the trainer's adapter.
    assert all(abs(step["mismatch_k3"]) < 1e-4 for step in more.steps)
