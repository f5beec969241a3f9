"""A run as a job of its own: its controller is killed, it is started twice, followed and stopped by its name."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.faults.processes import all_processes, below
from fray.cli.main import main
from fray.rl import run_job
from fray.rl.records.run_files import read_state, read_status
from fray.rl.run_job import FAILED_CODE
from tests.processes.lab import TOKEN, Lab, open_lab

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
]
RECIPE = """
name: digits
model: {layers: 1, width: 16, mlp: 32}
data: tasks.jsonl
rollout: worker.py:solve
trainer: {groups: 4, group_size: 4, lr: 1e-2, steps: 100000}
rollout_workers: 16
save_every: 2
output: out
"""
GUIDE_RECIPE = """
project_name: guide
experiment_name: digits
data: {type: torch, data_files: [tasks.jsonl], shuffle: false}
rollout_worker: {type: simple, num_workers: 8, max_response_length: 2, evaluator_module_path: "worker.py:Evaluator"}
trajectory_pool: {batch_size: 8, group_size: 4, key_list: [group_id]}
trainer: {type: self_hosted_grpo, total_train_steps: 4, save_freq: 2, checkpoint_path: out}
service: {train_service: {model: {layers: 1, width: 16, mlp: 32}}}
resume: {mode: auto}
logger: {backend: [tensorboard]}
"""
WORKER = """
from fray import rl


async def solve(task, llm):
    reply = await llm.completion(task["prompt"], max_tokens=2)
    return rl.score(reply, reward=float(reply.text.startswith("1")))


class Evaluator(rl.Evaluator):
    def evaluate(self, data, evaluation_target):
        return rl.EvaluationRunResult(reward=float(evaluation_target.final_answer.startswith("1")))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    rows = [json.dumps({"prompt": f"{number}>"}) for number in range(100)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab")) as found:
        found.start_node("alpha", module="tests.support.warm_node")
        yield found


PARTS = ("Coordinato", "InferenceS", "RolloutPro", "TrainerPro")
"""Titles of the processes of a run, as the kernel cuts them, behind ``fray:``."""


def parts_of_runs(lab: Lab) -> dict[str, list[int]]:
    """Return the processes of runs on the node, by their titles."""
    found: dict[str, list[int]] = {}
    for one in below(lab.running["alpha"].pid, all_processes()):
        if (title := one.comm.removeprefix("fray:")) in PARTS:
            found.setdefault(title, []).append(one.pid)
    return {title: sorted(pids) for title, pids in found.items()}


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fray(lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """``fray`` in this process: its exit code, and what it printed; once no process of an earlier run is left."""
    give_up_at = time.monotonic() + 60
    while left := parts_of_runs(lab):
        assert time.monotonic() < give_up_at, left
        time.sleep(0.1)
    monkeypatch.setenv("FRAY_TOKEN", TOKEN)
    # The command sets it, too: here it is restored after the test.
    monkeypatch.setenv("FRAY_CLUSTER_SPEC", lab.spec)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return main([*arguments, "--cluster", lab.spec]), *capfd.readouterr()

    return run


def wait_for(output: Path, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the status of a run when it is what is waited for."""
    give_up_at = time.monotonic() + 150
    # There is none before its process has begun.
    while not what(status := read_status(output) if read_state(output) else {}):
        assert time.monotonic() < give_up_at, status
        time.sleep(0.1)
    return status


def wait_for_next(output: Path, before: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the status of a run when another process has done some updates more."""
    return wait_for(output, lambda now: now["pid"] != before["pid"] and now.get("step", 0) >= before["step"] + steps)


def test_a_run_is_a_job_that_is_started_again_followed_and_stopped_by_its_name(
    recipe: Path, lab: Lab, fray: Command
) -> None:
    output = recipe.parent / "out"
    code, printed, errors = fray("rl", "run", str(recipe), "--detach")
    assert code == 0, errors
    job = printed.strip()
    status = wait_for(output, lambda found: found.get("step", 0) >= 3)
    assert (status["state"], status["job"]) == ("running", job)

    # Its process is killed: the cluster starts it again, and it takes over what has worked on.
    before = parts_of_runs(lab)
    assert before.keys() == {*PARTS}
    os.kill(status["pid"], signal.SIGKILL)
    status = wait_for_next(output, status, 4)
    assert status["job"] == job
    assert parts_of_runs(lab) == before
    assert steps_of(output) == list(range(1, len(steps_of(output)) + 1))
    said = (output / "progress.log").read_text()
    assert "takes over the run, which has worked on and has done" in said
    assert "continues after step" not in said

    # A second start finds it: as a job, not with other settings, and in a terminal.
    assert fray("rl", "run", str(recipe), "--detach")[:2] == (0, f"{job}\n")
    code, _, errors = fray("rl", "run", str(recipe), "trainer.lr=0.5")
    assert code == 2
    assert (
        f"run digits is running already in job {job}, with other settings: trainer.lr: 0.01 there, 0.5 here" in errors
    )
    command = [sys.executable, "-m", "fray.cli", "rl", "run", str(recipe)]
    with subprocess.Popen(command, env=lab.environ(), stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stderr is not None
        shown = [next(follower.stderr)]
        while f"step {read_status(output)['step'] + 1}/" not in shown[-1]:
            shown.append(next(follower.stderr))
        assert f"run digits is running already in job {job}: follows it" in shown[0]
        assert fray("rl", "stop", "digits")[:2] == (0, "ends after the update under way, which is saved\n")
        rest = follower.stderr.read()
    assert follower.returncode == 0, rest
    assert "output in" in rest
    assert read_status(output)["state"] == "stopped"

    # And one that has ended has another job.
    again = fray("rl", "run", str(recipe), "--detach")[1].strip()
    assert again != job
    assert wait_for(output, lambda found: found["state"] == "running")["job"] == again
    assert fray("stop", again)[0] == 0
    assert wait_for(output, lambda found: found["state"] != "running")["state"] == "stopped"


@pytest.mark.parametrize("mode", ["sync", "fully-async"])
def test_a_run_whose_job_is_killed_again_and_again_loses_nothing_and_leaves_nothing(
    mode: str, recipe: Path, lab: Lab, fray: Command
) -> None:
    # Enough for three kills: each costs a second and more in which no update ends.
    output, steps = recipe.parent / "out", 200
    settings = (f"name={mode}", f"sync={mode}", f"trainer.steps={steps}", "inference_servers=2", "save_every=7")
    job = fray("rl", "run", str(recipe), *settings, "--detach")[1].strip()
    status = wait_for(output, lambda found: found.get("step", 0) >= 2)
    before = parts_of_runs(lab)
    assert {title: len(pids) for title, pids in before.items()} == {
        title: 1 + (title == "InferenceS") for title in PARTS
    }
    for _ in range(3):
        os.kill(status["pid"], signal.SIGKILL)
        status = wait_for_next(output, status, 3)
        assert parts_of_runs(lab) == before
    assert fray("wait", job)[0] == 0, fray("logs", job)[2]
    status = read_status(output)
    assert status["state"] == "done"
    assert steps_of(output) == list(range(1, steps + 1))
    assert {one["line"] for one in metrics_of(output)} == {0}
    assert status["issued"] == status["trained"] + status["open"] + sum(status["dropped"].values())
    assert not status["repeated"].keys() & {"worker_lost", "timeout"}
    assert json.loads((output / "checkpoints" / f"global_step_{steps}" / "state.json").read_text())
    assert parts_of_runs(lab) == {}


def test_a_trainer_that_is_lost_while_the_jobs_process_is_away_is_rewound_and_the_others_stay(
    recipe: Path, lab: Lab, fray: Command
) -> None:
    output = recipe.parent / "out"
    job = fray("rl", "run", str(recipe), "name=lost-trainer", "--detach")[1].strip()
    status = wait_for(output, lambda found: found.get("step", 0) >= 3)
    before = parts_of_runs(lab)
    # Stopped first: it must not see what is lost.
    os.kill(status["pid"], signal.SIGSTOP)
    (trainer,), (rollout,) = before.pop("TrainerPro"), before.pop("RolloutPro")
    for pid in (trainer, rollout, status["pid"]):
        os.kill(pid, signal.SIGKILL)
    status = wait_for(output, lambda found: found["pid"] != status["pid"] and found["metrics"].get("line") == 1)
    after = parts_of_runs(lab)
    assert after.pop("TrainerPro") != [trainer]
    assert after.pop("RolloutPro") != [rollout]
    assert after == before
    assert steps_of(output) == list(range(1, len(steps_of(output)) + 1))
    assert "continues after step" in (output / "progress.log").read_text()
    assert fray("stop", job)[0] == 0
    give_up_at = time.monotonic() + 30
    while left := parts_of_runs(lab):
        assert time.monotonic() < give_up_at, left
        time.sleep(0.1)


def test_a_run_works_on_without_the_clusters_controller_and_is_found_by_its_name_also_on_a_drained_machine(
    recipe: Path, lab: Lab, fray: Command
) -> None:
    output = recipe.parent / "out"
    job = fray("rl", "run", str(recipe), "--detach")[1].strip()
    process = wait_for(output, lambda found: found.get("step", 0) >= 1)["pid"]
    lab.kill("controller")
    before = read_status(output)["step"]
    wait_for(output, lambda found: found["step"] >= before + 3)
    lab.start_controller()
    lab.wait_serving()
    assert fray("rl", "run", str(recipe), "--detach")[:2] == (0, f"{job}\n")
    # No process of it was started again, and no update done twice.
    assert read_status(output)["pid"] == process
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert {line["line"] for line in lines} == {0}

    # Its machine is drained: the job waits for one, and the run has not ended.
    assert fray("drain", "alpha")[0] == 0
    status = wait_for(output, lambda found: found["state"] != "running")
    assert (status["state"], status["error"], status["job"]) == ("pending", "", job)
    assert fray("rl", "run", str(recipe), "--detach")[:2] == (0, f"{job}\n")
    assert fray("uncordon", "alpha")[0] == 0
    status = wait_for(output, lambda found: found["state"] == "running" and found["metrics"]["line"] == 1)
    assert (status["pid"] == process, status["job"]) == (False, job)
    assert fray("rl", "stop", "digits")[0] == 0
    assert wait_for(output, lambda found: found["state"] != "running")["state"] == "stopped"
    # Its name is free then.
    assert fray("wait", job)[0] == 0


def test_a_run_that_fails_is_not_started_again(recipe: Path, fray: Command) -> None:
    failing = WORKER.replace("reply = await", "raise KeyError('answer')\n    reply = await")
    (recipe.parent / "worker.py").write_text(failing)
    code, out, errors = fray("rl", "run", str(recipe), "--detach")
    assert code == 0, errors
    job = out.strip()
    code, _, errors = fray("wait", job)
    assert code == FAILED_CODE, errors
    status = read_status(recipe.parent / "out")
    assert status["state"] == "failed"
    assert "KeyError: 'answer'" in status["error"]
    assert "KeyError: 'answer'" in fray("logs", job)[2]
    assert len(json.loads(fray("show", job, "--json")[1])["attempts"]) == 1


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard: pip install")
def test_a_recipe_of_the_guide_is_a_job_that_reports_to_its_loggers(recipe: Path, fray: Command) -> None:
    recipe.write_text(GUIDE_RECIPE)
    code, printed, errors = fray("rl", "run", str(recipe), "--detach")
    assert code == 0, errors
    job = printed.strip()
    assert "run guide-digits is a job of the cluster" in errors
    assert fray("wait", job)[0] == 0, fray("logs", job)[2]
    output = recipe.parent / "out"
    assert (read_status(output)["state"], steps_of(output)) == ("done", [1, 2, 3, 4])

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(output / "tensorboard"))
    found.Reload()
    assert [one.step for one in found.Tensors("reward_mean")] == [1, 2, 3, 4]
    without = ("trainer.checkpoint_path=null", "resume.mode=disable", "logger.backend=console")
    code, _, errors = fray("rl", "run", str(recipe), *without, "--detach")
    assert code == 2
    assert "trainer.checkpoint_path: it is missing; a run as a job needs a directory" in errors


def metrics_of(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps_of(output: Path) -> list[float]:
    return [one["step"] for one in metrics_of(output)]


def test_a_run_whose_controller_is_frozen_works_on_as_a_look_says_and_is_started_again(
    recipe: Path, lab: Lab, fray: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A frozen process is found within seconds here; of users, after a minute or more.
    monkeypatch.setattr(run_job, "LEAST_STALL_S", 10.0)
    output = recipe.parent / "out"
    job = fray("rl", "run", str(recipe), "name=frozen", "liveness_s=10", "--detach")[1].strip()
    frozen = wait_for(output, lambda found: found.get("step", 0) >= 3)
    before = parts_of_runs(lab)
    os.kill(frozen["pid"], signal.SIGSTOP)
    give_up_at = time.monotonic() + 60
    while "silent since" not in (shown := fray("rl", "top", str(output), "--once")[1]):
        assert time.monotonic() < give_up_at, shown
        time.sleep(0.1)
    assert f"its process {frozen['pid']} on " in shown
    assert "the cluster starts its job again\n" in shown
    status = wait_for_next(output, frozen, 3)
    assert parts_of_runs(lab) == before
    assert (status["job"], status["state"]) == (job, "running")
    assert status["pid"] != frozen["pid"]
    assert not Path(f"/proc/{frozen['pid']}").exists(), "it must not wake up beside its successor"
    steps = steps_of(output)
    assert steps == list(range(1, len(steps) + 1))
    assert fray("stop", job)[0] == 0


def test_a_living_driver_is_followed_and_continued_when_it_is_lost(recipe: Path, lab: Lab, fray: Command) -> None:
    output = recipe.parent / "out"
    command = [sys.executable, "-m", "fray.cli", "rl", "run", str(recipe), "name=followed"]
    with ExitStack() as stack:

        def start(**options: Any) -> subprocess.Popen[str]:
            process = stack.enter_context(subprocess.Popen(command, env=lab.environ(), text=True, **options))
            stack.callback(process.kill)
            return process

        driver = start(stderr=subprocess.DEVNULL)
        status = wait_for(output, lambda found: found.get("step", 0) >= 3)
        assert (status["pid"], status["job"]) == (driver.pid, "")
        follower = start(stderr=subprocess.PIPE)
        lines = follower.stderr
        assert lines is not None
        assert f"run followed is running already in process {driver.pid} on " in next(lines)
        # Lines of the driver.
        assert any(f"step {read_status(output)['step'] + 1}/" in line for line in lines)
        driver.kill()
        assert any("its process was lost: continues here" in line for line in lines)
        assert any("continues after step" in line for line in lines)
        assert any(": reward" in line for line in lines)
        assert read_status(output)["pid"] == follower.pid
        assert fray("rl", "stop", "followed")[:2] == (0, "ends after the update under way, which is saved\n")
        rest = lines.read()
        assert follower.wait() == 0, rest
    steps = steps_of(output)
    assert steps == list(range(1, len(steps) + 1))
