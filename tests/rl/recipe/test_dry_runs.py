"""`fray rl run --dry` prints all settings of a run with the values that they come to, and no secret."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fray import rl
from fray.cli.main import main

pytest.importorskip("omegaconf", reason="make test-rl has it")
yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.torch

RECIPE = """
model: {layers: 1}
data: rows.jsonl
rollout: worker.py:solve
trainer: {groups: 1, group_size: 2, correction: {kind: reject}, loss: "worker.py:loss"}
validation_data: rows.jsonl
validate_freq: 3
validation_sampling: {max_tokens: 7, temperature: "${trainer.groups}"}
inference_port: 9000
resources: {trainer: {cpu: 4}}
"""
SECRETS = """
inference_key: typed-5af1
env_vars: {WANDB_API_KEY: given-5af1, HF_TOKEN: "${oc.env:RECIPE_SECRET}", OTHER: "${oc.env:NO_SUCH,default-5af1}"}
name: run?signature=signed-5af1
"""
GUIDE = """
project_name: digits
data: {type: torch, data_files: rows.jsonl, max_prompt_length: 20}
rollout_worker:
  num_workers: 2
  custom_rollout_worker_module_path: worker.py
  custom_rollout_worker_class_name: Worker
  judge_token: own-5af1
  judge: {password: below-5af1, key: "${oc.env:RECIPE_SECRET}", url: "http://${oc.env:RECIPE_SECRET}", max_tokens: 9}
  judges: ["${oc.env:RECIPE_SECRET}", plain]
  flavour: sweet
trajectory_pool: {group_size: 2, batch_size: 4, key_list: [group_id]}
trainer: {total_train_steps: 2, max_response_length: 30}
service:
  inference_service: {model: {layers: 1}, api_key: typed-5af1}
  train_service: {url: "https://user:passed-5af1@train.test/v1?signature=signed-5af1"}
"""
WORKER = """
from fray import rl

async def solve(task, llm): ...
def loss(*values): ...

class Worker(rl.BaseRolloutWorker):
    def step(self, task): ...
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECIPE_SECRET", "environment-5af1")
    # Set by the file of the environment: removed afterwards.
    monkeypatch.setenv("FROM_FILE", "")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n{"prompt": "3"}\n')
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


def dry(directory: Path, text: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    (directory / "recipe.yaml").write_text(text)
    os.environ["FROM_FILE"] = ""
    assert main(["rl", "run", str(directory / "recipe.yaml"), "--dry", *words]) == 0
    return capsys.readouterr().out


def test_what_is_not_given_has_the_value_that_the_run_takes(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: dict[str, Any] = json.loads(dry(directory, RECIPE, capsys, "--json"))["recipe"]
    assert shown["trainer"]["steps"] == 3
    assert (shown["trainer"]["lr"], shown["trainer"]["old_logprobs"]) == (1e-5, "trainer")
    assert shown["trainer"]["correction"] == {"kind": "reject", "level": "token", "low": 0.5, "high": 2.0}
    assert (shown["trainer"]["loss"], shown["rollout"]) == ("worker.py:loss", "worker.py:solve")
    assert (shown["model"]["layers"], shown["model"]["width"], shown["max_length"]) == (1, 64, 256)
    assert (shown["samples_per_row"], shown["rollout_processes"], shown["threads"]) == (2, 1, 1)
    assert (shown["validation_samples_per_row"], shown["device"]) == (1, "cpu")
    assert shown["validation_sampling"] == {"max_tokens": 7, "temperature": 1}
    assert (shown["data"], shown["env_vars"]) == (str(directory / "rows.jsonl"), {})
    assert shown["resources"] == {"trainer": {"cpu": 4}}
    assert "on_step" not in shown


def test_the_printed_settings_are_a_recipe_of_the_same_run(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (RECIPE, GUIDE.replace("-5af1", "")):
        printed = json.loads(dry(directory, text, capsys, "--json"))
        again = yaml.safe_dump(printed["recipe"])
        assert json.loads(dry(directory, again, capsys, "--json")) == printed


def test_settings_of_the_guide_have_the_values_that_the_run_takes(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: dict[str, Any] = json.loads(dry(directory, GUIDE, capsys, "--json"))["recipe"]
    assert (shown["data"]["rollout_repeat_n"], shown["data"]["data_files"]) == (2, [str(directory / "rows.jsonl")])
    assert shown["rollout_worker"]["processes"] == 1
    assert shown["rollout_worker"]["max_response_length"] == 30
    assert (shown["trainer"]["lr"], shown["trainer"]["betas"]) == (1e-5, [0.9, 0.95])
    assert (shown["algorithm"]["loss"], shown["algorithm"]["gamma"]) == ("clip", 1.0)
    assert shown["service"]["inference_service"]["max_length"] == 256
    assert shown["service"]["train_service"]["model"] == shown["service"]["inference_service"]["model"]
    assert shown["rollout_worker"]["flavour"] == "sweet"
    assert "hydra" not in shown


def test_secrets_are_names_or_as_they_were_given_by_reference(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "recipe.env.sh").write_text("FROM_FILE=sourced-5af1\n")
    recipe = RECIPE + SECRETS
    for words in ((), ("--json",)):
        for text in (recipe, GUIDE):
            assert "5af1" not in dry(directory, text, capsys, *words)
    shown = json.loads(dry(directory, recipe, capsys, "--json"))["recipe"]
    assert shown["env_vars"] == {
        "WANDB_API_KEY": "***",
        "HF_TOKEN": "${oc.env:RECIPE_SECRET}",
        "OTHER": "***",
        "FROM_FILE": "***",
    }
    assert shown["name"] == "run?signature=***"
    guide = json.loads(dry(directory, GUIDE, capsys, "--json"))["recipe"]
    assert guide["env_vars"] == {"FROM_FILE": "***"}
    assert guide["service"]["train_service"]["url"] == "https://***@train.test/v1?signature=***"
    worker = guide["rollout_worker"]
    assert worker["judge_token"] == guide["service"]["inference_service"]["api_key"] == "***"
    reference = "${oc.env:RECIPE_SECRET}"
    assert worker["judge"] == {"password": "***", "key": reference, "url": f"http://{reference}", "max_tokens": 9}
    assert worker["judges"] == [reference, "plain"]


def test_the_text_of_a_run_has_no_values_of_its_environment() -> None:
    trainer = rl.GRPO(groups=1, group_size=2, steps=1)
    settings = {"model": rl.TinyLlama(), "data": [{"prompt": "1"}], "rollout": rl.SimpleRolloutWorker}
    assert "5af1" not in repr(rl.Run(**settings, trainer=trainer, env_vars={"NAME": "given-5af1"}))


def test_what_was_not_given_is_marked(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [" ".join(line.split()) for line in dry(directory, RECIPE, capsys).splitlines()]
    assert {"trainer.groups 1", "trainer.steps 3 (default)", "model.width 64 (default)", "name rl (default)"} < set(
        lines
    )
