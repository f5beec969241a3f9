"""Code examples of NexRL's guide, with only their imports changed and placeholders filled in; and a recipe of files."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fray import rl

logger = logging.getLogger(__name__)
has_torch = importlib.util.find_spec("torch") is not None
HYDRA = Path(sys.prefix) / "hydra"
"""Directory with Hydra and the OmegaConf that it wants, in the environment of `make test-rl`."""
needs_torch = [pytest.mark.torch, pytest.mark.skipif(not has_torch, reason="needs torch: make test-rl")]
WORKER = """
from fray.rl import BaseRolloutWorker
from typing import Any

class MyRolloutWorker(BaseRolloutWorker):
    def step(self, task: dict[str, Any]) -> str | None:
        # Extract task data
        if "prompt" not in task:
            return None

        prompt = task["prompt"]

        # Custom processing logic using LLMServiceClient
        result = self._llm_client.completion(prompt, temperature=0.7)

        # Create trajectory
        trajectory = {
            "prompt": prompt,
            "response": result["response"],
            "finish_reason": result["finish_reason"],
            "custom_metadata": task.get("metadata", {}),
            "model_tag": self._llm_client._model_tag
        }

        # Submit to trajectory pool and return result
        return self._put_trajectory(trajectory)
"""
EVALUATOR = '''
from fray.rl.rollout_worker import (
    Evaluator,
    BaseEvaluationTarget,
    EvaluationRunResult
)
from typing import Any

class MyTaskEvaluator(Evaluator):
    """Custom evaluator for specific task metrics."""

    def evaluate(
        self,
        data: dict[str, Any],
        evaluation_target: BaseEvaluationTarget
    ) -> EvaluationRunResult:
        # Extract agent's answer
        agent_answer = evaluation_target.final_answer

        # Get ground truth from data
        ground_truth = data.get("ground_truth", "")

        # Compute reward (primary signal for RL)
        reward = 1.0 if agent_answer.strip() == ground_truth.strip() else 0.0

        # Compute additional metrics (must be scalar floats)
        metrics = {
            "answer_length": float(len(agent_answer)),
            "exact_match": reward,
        }

        # Store extra info (can be any type)
        extra_info = {
            "agent_answer": agent_answer,
            "parsed_output": self._parse_answer(agent_answer),
        }

        return EvaluationRunResult(
            reward=reward,
            ground_truth=ground_truth,
            metrics=metrics,
            extra_info=extra_info
        )

    def _parse_answer(self, answer: str) -> dict:
        """Helper method for answer parsing."""
        # Your parsing logic here
        return {"parsed": answer}
'''
RECIPE = """
launch_mode: local
project_name: digits
experiment_name: guide
data: {type: torch, data_files: rows.jsonl, rollout_repeat_n: 4}
rollout_worker:
  type: simple
  num_workers: 8
  custom_rollout_worker_module_path: worker.py
  custom_rollout_worker_class_name: MyRolloutWorker
  evaluator_module_path: evaluator.py:MyTaskEvaluator
trajectory_pool: {batch_size: 8, group_size: 4, key_list: [group_id]}
trainer: {type: self_hosted_grpo, total_train_steps: 2, checkpoint_path: out, lr: 0.01}
weight: {sync_mode: sync, validate_freq: 2}
service: {train_service: {model: {layers: 1, width: 16, mlp: 32}}}
validate: {validate_before_train: true, data: {type: torch, data_files: rows.jsonl}}
resume: {mode: auto}
logger: {backend: [console]}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a recipe with its files."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "evaluator.py").write_text(EVALUATOR)
    rows = [{"prompt": f"{number}>", "ground_truth": str(number)} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rl_train.yaml").write_text(RECIPE)
    return tmp_path / "rl_train.yaml"


@pytest.mark.parametrize("kind", [pytest.param("yaml", marks=needs_torch)])
def test_the_local_example_trains_and_continues(kind: str, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import DictConfig, OmegaConf

    from fray.rl import NexRLController

    monkeypatch.setenv("NEXRL_PATH", str(recipe.parent))

    def main(config: DictConfig) -> NexRLController:
        config.launch_mode = "local"
        controller = NexRLController(config)
        controller.run()
        return controller

    config = OmegaConf.load(recipe)
    assert isinstance(config, DictConfig)
    controller = main(config)
    assert controller.result is not None
    assert [step["step"] for step in controller.result.steps] == [1, 2]
    assert [one["step"] for one in controller.result.validations] == [0, 2]
    assert {"val/reward", "val/exact_match", "val/answer_length"} <= set(controller.result.validations[0])
    assert controller._check_finish()
    # Debugging, as in the guide
    status = controller.activity_tracker.get_running_status_summary()
    assert status == "digits/guide, step 2: no work in progress"
    assert controller.activity_tracker.get_error_health_status()["status"] == "healthy"
    for module_name in controller.activity_tracker._module_refs:
        is_alive = controller.activity_tracker.check_module_liveness()
        assert f"{module_name}: {'alive' if is_alive else 'dead'}" == "controller: alive"
    # A mapping and a file are the same run, which continues from its checkpoint.
    plain = OmegaConf.to_container(config)
    assert isinstance(plain, dict)
    plain["trainer"]["total_train_steps"] = 3
    continued = NexRLController(plain)
    assert continued._load_initial_checkpoint() == str(recipe.parent / "out" / "checkpoints" / "global_step_2")
    continued.run()
    assert continued.result is not None
    assert [step["step"] for step in continued.result.steps] == [3]


@pytest.mark.parametrize("trainer", [pytest.param("self_hosted_grpo", marks=needs_torch)])
def test_mock_pieces_run_together_on_a_cluster(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As the guide's example with Ray, without its lines with ray.
    monkeypatch.setenv("FRAY_CLUSTER_SPEC", "machine")
    controller = rl.NexRLController(
        {
            "launch_mode": "cluster",
            "data": {"type": "mock", "size": 4, "rollout_repeat_n": 2},
            "rollout_worker": {"type": "mock", "num_workers": 2},
            "trajectory_pool": {"batch_size": 4, "group_size": 2, "key_list": ["group_id"]},
            "trainer": {"type": trainer, "total_train_steps": 2},
            "service": {"train_service": {"backend": "mock"}},
        }
    )
    controller.run()
    assert controller.result is not None
    assert [step["step"] for step in controller.result.steps] == [1, 2]


HYDRA_PROGRAM = """
import hydra
from omegaconf import DictConfig
from fray.rl import NexRLController

@hydra.main(config_path="config", config_name="rl_train")
def main(config: DictConfig):
    config.launch_mode = "local"
    controller = NexRLController(config)
    controller.run()
    print([step["step"] for step in controller.result.steps], controller.parts.name)

main()
"""
HYDRA_CONFIG = """
defaults: [_self_, data: mock]
launch_mode: ray
experiment_name: ${now:%Y}
rollout_worker: {type: mock, num_workers: 2}
trajectory_pool: {batch_size: 4, group_size: 2, key_list: [group_id]}
trainer: {type: self_hosted_grpo, total_train_steps: 1}
service: {train_service: {backend: mock}}
"""


@pytest.mark.torch
@pytest.mark.skipif(
    not has_torch or not (HYDRA.is_dir() or importlib.util.find_spec("hydra")),
    reason="needs torch and Hydra: tools/venv rl",
)
def test_the_example_with_hydra(tmp_path: Path) -> None:
    (tmp_path / "config" / "data").mkdir(parents=True)
    (tmp_path / "config" / "rl_train.yaml").write_text(HYDRA_CONFIG)
    (tmp_path / "config" / "data" / "mock.yaml").write_text("{type: mock, size: 4, rollout_repeat_n: 2}")
    (tmp_path / "main.py").write_text(HYDRA_PROGRAM)
    command = [sys.executable, "main.py", "trainer.total_train_steps=2", "+data.seed=3"]
    path = f"{HYDRA}{os.pathsep}{Path(rl.__file__).parents[2]}"
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert re.search(r"^\[1\.0, 2\.0\] fray-\d{4}$", done.stdout, re.MULTILINE), done.stderr
    wrong = [*command, "+trainer.total_train_step=3"]
    done = subprocess.run(wrong, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "trainer.total_train_step: unknown key; did you mean total_train_steps?" in done.stderr


def test_file_mapping_and_dict_config_are_one_run(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    monkeypatch.setenv("NEXRL_PATH", str(recipe.parent))
    config = omegaconf.OmegaConf.load(recipe)
    runs = [rl.NexRLController(one)._run for one in (str(recipe), config, omegaconf.OmegaConf.to_container(config))]
    assert runs[0].parts.facts == runs[1].parts.facts == runs[2].parts.facts
    assert runs[0].parts.plan == runs[1].parts.plan == runs[2].parts.plan


def test_the_nexau_example_formats_queries() -> None:
    from fray.rl.rollout_worker import BaseNexAURolloutWorker

    class MyNexAUWorker(BaseNexAURolloutWorker):
        """Custom NexAU worker with specialized query formatting."""

        def format_task_query(self, data_item: dict[str, Any]) -> str:
            # Extract fields from your data
            context = data_item.get("context", "")
            question = data_item.get("question", "")

            # Format into task-specific template
            query = f"Context: {context}\n\nQuestion: {question}\n\nAnswer:"

            return query

        def get_train_loss_mask(self, trajectory_infos: list[dict[str, Any]]) -> list[bool]:
            # Example: Use all response tokens (default behavior)
            return [True] * len(trajectory_infos)

    def factory(llm: Any) -> Any:
        return lambda query: query

    worker = object.__new__(MyNexAUWorker)
    assert worker.format_task_query({"context": "c", "question": "q"}) == "Context: c\n\nQuestion: q\n\nAnswer:"
    assert worker.get_train_loss_mask([{}, {}]) == [True, True]


def test_the_evaluator_example(recipe: Path) -> None:
    worker = rl.SimpleRolloutWorker({"evaluator_module_path": f"{recipe.parent / 'evaluator.py'}:MyTaskEvaluator"})
    assert worker._evaluator is not None
    found = worker._evaluator.evaluate({"ground_truth": "7 "}, rl.BaseEvaluationTarget(" 7"))
    assert isinstance(found, rl.EvaluationRunResult)
    assert (found.reward, found.metrics["answer_length"]) == (1.0, 2.0)
    assert found.extra_info["parsed_output"] == {"parsed": " 7"}


def test_the_activity_example(caplog: pytest.LogCaptureFixture) -> None:
    class Module(rl.NexRLModule):
        def work(self, process_data: Any, data: Any, metric_name: str, value: float, training_step: int) -> Any:
            # In any module with activity tracker
            with self._activity_tracker.track("MyModule", "processing_data"):
                # Perform work that should be tracked
                result = process_data(data)
                # Automatic activity tracking and error reporting

            # Check rollout worker specific status
            if self._activity_tracker.is_rollout_worker_quiescent():
                logger.info("All rollout workers are idle")

            # Log metrics to experiment tracking
            self._activity_tracker.experiment_logger_post(
                backend="wandb", data={metric_name: value}, step=training_step
            )
            return result

    with caplog.at_level(logging.INFO):
        assert Module().work(sum, [1, 2], "reward", 0.5, 3) == 3
    assert caplog.messages[0] == "All rollout workers are idle"


def test_the_monitoring_examples() -> None:
    from fray.rl import ErrorReporter, NexRLRole, ResourceManager

    error_reporter, resource_manager = ErrorReporter(), ResourceManager()
    error_reporter.report_error("module", "work", "lost")
    # Get recent errors
    health_status = error_reporter.get_health_status()
    if health_status["status"] != "healthy":
        assert "lost" in f"System unhealthy: {health_status['message']}"
    # Check actor wrappers for each role
    for role in NexRLRole:
        wrappers = resource_manager.get_actor_wrapper(role)
        assert f"{role}: {len(wrappers)} actors".endswith(": 0 actors")
