"""`NexRLController`: a configuration of the guide as a run, and what it refuses before anything is started."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.checkpoint import RECORD_FILE, STATE_FILE
from fray.rl.core.trajectory_store import ReadyRule
from fray.rl.core.versions import SyncMode
from fray.rl.nexrl.data_loader import MockDataLoader
from fray.rl.nexrl.guide_run import copy_checkpoint
from fray.rl.rollout_worker import SimpleRolloutWorker
from fray.rl.weights.published import WeightSync

CONFIG: dict[str, Any] = {
    "project_name": "digits",
    "experiment_name": "test",
    "data": {"type": "mock", "prompts": ["1>", "2>", "3>", "4>"], "rollout_repeat_n": 2, "keep_batch_order": True},
    "rollout_worker": {"type": "simple", "num_workers": 3, "max_response_length": 4, "max_attempts": 5},
    "trajectory_pool": {
        "batch_size": 4,
        "group_size": 2,
        "key_list": ["group_id"],
        "check_batch_ready_function": "loaded_batch_finished",
    },
    "trainer": {"type": "self_hosted_grpo", "total_train_steps": 3, "lr": 0.01},
    "weight": {"sync_mode": "batch-async", "staleness_threshold": 2},
    "service": {
        "train_service": {"model": {"layers": 1, "width": 16}},
        "inference_service": {"servers": 2, "max_length": 64},
    },
    "logger": {"backend": ["recorded"]},
}
WORKER = """
from fray.rl import BaseDataLoader, BaseRolloutWorker
from fray.rl.nexrl.data_loader import RowDataLoader


class Mine(BaseRolloutWorker):
    def step(self, task):
        return None


class Loader(RowDataLoader):
    def _load_rows(self):
        return [{"prompt": str(number)} for number in range(self._config.get("rows_wanted"))]


class Empty(BaseDataLoader):
    def __len__(self): return 0
    def __getitem__(self, index): raise IndexError(index)
    def get_next_item(self): return None
    def is_finished(self): return True
    def can_return_item(self): return False
    def reset(self): pass
    def add_item_front(self, item): pass
    def add_item_back(self, item): pass
"""


def config(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the configuration with values at paths such as ``trainer.lr`` replaced."""
    made = copy.deepcopy(CONFIG)
    for path, value in (changes or {}).items():
        *sections, key = path.split(".")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return made


def test_keys_of_the_guide_are_the_settings_of_a_run() -> None:
    controller = rl.NexRLController(config())
    run, parts = controller._run, controller._run.parts
    plan = parts.plan
    assert (plan.order.rows, plan.order.batch_rows, plan.group_size, plan.batch_size, plan.steps) == (4, 2, 2, 4, 3)
    assert (plan.mode, plan.threshold, plan.rule) == (SyncMode.BATCH_ASYNC, 2, ReadyRule.LOADED_BATCH_FINISHED)
    assert (plan.keep_batch_order, plan.max_attempts, plan.order.seed) == (True, 5, None)
    assert parts.max_length == 64
    assert (parts.servers, run.rollout_workers, run.model) == (2, 3, rl.TinyLlama(layers=1, width=16))
    assert isinstance(run.trainer, rl.GRPO)
    assert run.trainer.lr == 0.01
    worker = controller._get_module_class_for_role(rl.NexRLRole.ROLLOUT_WORKER, controller._config)
    assert worker is SimpleRolloutWorker
    assert not controller._check_finish()
    assert controller._check_module_liveness()
    assert controller._check_module_exceptions()


def test_steps_follow_from_the_epochs_and_batches_may_be_skipped() -> None:
    changes = {"trainer": {}, "data.epochs": 3, "data.skip_batches": 1, "data.shuffle": True, "data.seed": 7}
    plan = rl.NexRLController(config(changes))._run.parts.plan
    assert (plan.steps, plan.order.skip_batches, plan.order.seed) == (6, 1, 7)


def test_the_type_of_the_trainer_is_its_class() -> None:
    trainer = rl.NexRLController(config({"trainer.type": "remote_api_cross_entropy"}))._run.trainer
    assert isinstance(trainer, rl.RemoteApiCrossEntropyTrainer)
    assert (trainer.settings.groups, trainer.settings.group_size, trainer.settings.steps) == (2, 2, 3)
    mock = config({"service": {"train_service": {"backend": "mock"}}})
    trainer = rl.NexRLController(mock)._run.trainer
    assert isinstance(trainer, rl.SelfHostedGrpoTrainer)
    with pytest.raises(InvalidRequest, match="'self_hosted' is the base class SelfHostedTrainer"):
        rl.NexRLController(config({"trainer.type": "self_hosted"}))


def test_classes_of_the_user_are_loaded_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(WORKER)
    monkeypatch.setenv("NEXRL_PATH", str(tmp_path))
    names = {
        "rollout_worker.custom_rollout_worker_module_path": "mine.py",
        "rollout_worker.custom_rollout_worker_class_name": "Mine",
        "data.custom_data_loader_module_path": "mine.py",
        "data.custom_data_loader_class_name": "Loader",
        "data.rows_wanted": 7,
    }
    controller = rl.NexRLController(config(names))
    assert controller._run.parts.plan.order.rows == 7
    worker = controller._get_module_class_for_role(rl.NexRLRole.ROLLOUT_WORKER, controller._config)
    assert issubclass(worker, rl.BaseRolloutWorker)
    assert worker.__name__ == "Mine"
    with pytest.raises(InvalidRequest, match="custom_rollout_worker_class_name 'Loader': expected a class of BaseRo"):
        rl.NexRLController(config({**names, "rollout_worker.custom_rollout_worker_class_name": "Loader"}))
    with pytest.raises(InvalidRequest, match="data: Empty cannot give its rows: it has no items"):
        rl.NexRLController(config({**names, "data.custom_data_loader_class_name": "Empty"}))


def test_a_class_in_the_registry_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(MockDataLoader):
        def _load_rows(self) -> list[dict[str, Any]]:
            return [{"prompt": "mine"}] * 3

    loaders = {**rl.NexRLController.MODULE_REGISTRY[rl.NexRLRole.DATA_LOADER], "mine": Mine}
    monkeypatch.setitem(rl.NexRLController.MODULE_REGISTRY, rl.NexRLRole.DATA_LOADER, loaders)
    assert rl.NexRLController(config({"data.type": "mine"}))._run.parts.plan.order.rows == 3
    with pytest.raises(InvalidRequest, match=r"data.type: found 'mind'; expected one of .*did you mean mine"):
        rl.NexRLController(config({"data.type": "mind"}))


def test_metrics_and_validations_go_to_the_loggers() -> None:
    validate = {"validate.data": {"type": "mock", "prompts": ["1>"]}, "weight.validate_freq": 2}
    controller = rl.NexRLController(config(validate))
    assert controller._run.validate_freq == 2
    got: list[Any] = []
    controller.activity_tracker.experiment_logger.sinks["recorded"] = lambda **values: got.append(values)
    controller._on_step({"step": 1.0, "reward_mean": 0.5})
    assert controller._run_validate("default") is None
    controller._start_validate("default")
    controller._on_validation({"step": 2.0, "val/reward": 0.25})
    assert got == [
        {"data": {"step": 1.0, "reward_mean": 0.5}, "step": 1},
        {"data": {"step": 2.0, "val/reward": 0.25}, "step": 2},
    ]
    controller._end_validate("default")
    assert got[2] == got[1]
    assert controller._run_validate("default") == {"step": 2.0, "val/reward": 0.25}
    assert controller.activity_tracker.get_training_step() == 1
    controller._on_step({"step": 3.0})
    assert controller._check_finish()


def test_loggers_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fray.rl.records.trackers.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"\['mlflow'\] needs the package mlflow: pip install 'fray\[mlflow\]'"):
        rl.NexRLController(config({"logger.backend": "mlflow"}))
    controller = rl.NexRLController(config({"logger.backend": ["console", "jsonl", "wandbb"]}))
    with pytest.raises(InvalidRequest) as caught:
        controller.run()
    assert str(caught.value) == (
        "invalid config: logger.backend: found 'wandbb'; expected one of 'console', 'jsonl', 'tensorboard', 'wandb', "
        "'trackio', 'mlflow'; did you mean wandb?"
    )


@pytest.mark.torch  # the environment of make test-rl has it
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard: pip install")
def test_a_logger_has_what_the_run_and_what_the_program_reports(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"logger.backend": ["tensorboard", "console"], "trainer.checkpoint_path": str(tmp_path)}
    controller = rl.NexRLController(config(changes))
    controller._on_step({"step": 2.0, "reward_mean": 0.5})
    tracker = rl.ActivityTrackerProxy(controller.activity_tracker)
    tracker.experiment_logger_post("tensorboard", data={"mine": 1.5})
    tracker.experiment_logger_post("tensorboard", data={"mine": 2.5}, step=7)
    for each in controller._trackers:
        each.finish()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    values = {
        name: [(one.step, float(one.tensor_proto.float_val[0])) for one in found.Tensors(name)]
        for name in found.Tags()["tensors"]
    }
    assert values == {"reward_mean": [(2, 0.5)], "mine": [(2, 1.5), (7, 2.5)]}


def test_errors_stop_by_the_policy() -> None:
    for policy, is_healthy in (("stop_on_error", False), ("stop_on_critical", True), ("continue", True)):
        controller = rl.NexRLController(config({"runtime_monitor.exception_handling.policy": policy}))
        controller.activity_tracker.report_exception("worker", "step", KeyError("x"))
        assert controller._check_module_exceptions() is is_healthy
        assert controller._run.on_error == policy
    ignoring = rl.NexRLController(config({"runtime_monitor.exception_handling": {"enabled": False}}))
    ignoring.activity_tracker.report_exception("worker", "step", KeyError("x"), rl.ErrorSeverity.CRITICAL)
    assert ignoring._check_module_exceptions()
    assert ignoring._run.on_error == "continue"
    controller.activity_tracker.report_exception("worker", "step", KeyError("x"), rl.ErrorSeverity.CRITICAL)
    assert controller._check_module_exceptions()
    controller._stop()


def test_samples_that_are_dropped_are_errors_once() -> None:
    controller = rl.NexRLController(config({"runtime_monitor.exception_handling.policy": "stop_on_error"}))
    controller._on_step({"step": 1.0, "dropped/stale": 4.0, "dropped/KeyError": 0.0})
    assert controller._check_module_exceptions()
    for step in (2.0, 3.0):
        controller._on_step({"step": step, "dropped/KeyError": 2.0})
    health = controller.activity_tracker.get_error_health_status()
    assert health["error_level_count"] == 1
    assert health["message"].endswith("rollout_worker, step 2: 2 samples were dropped: KeyError")
    assert not controller._check_module_exceptions()


def checkpoint(output: Path, step: int) -> Path:
    path = output / "checkpoints" / f"global_step_{step}"
    path.mkdir(parents=True)
    (path / STATE_FILE).write_text(json.dumps({}))
    (path / RECORD_FILE).write_bytes(b"")
    return path


def test_the_latest_checkpoint_is_that_of_most_updates(tmp_path: Path) -> None:
    output = tmp_path / "out"
    for step in (9, 10, 2):
        latest = checkpoint(output, step)
    (output / "checkpoints" / "global_step_11.unfinished").mkdir()
    changes = {"trainer.checkpoint_path": str(output / "checkpoints"), "resume.mode": "auto"}
    controller = rl.NexRLController(config(changes))
    folder = str(output / "checkpoints")
    assert controller._find_latest_checkpoint(folder) == str(latest.with_name("global_step_10"))
    assert controller._load_initial_checkpoint() == str(latest.with_name("global_step_10"))
    assert controller._find_latest_checkpoint(str(tmp_path / "none")) is None
    assert rl.NexRLController(config())._load_initial_checkpoint() is None


def test_a_checkpoint_of_another_run_is_copied_once(tmp_path: Path) -> None:
    from_ = checkpoint(tmp_path / "old", 4)
    changes = {
        "trainer.checkpoint_path": str(tmp_path / "new"),
        "resume": {"mode": "from_path", "resume_path": str(from_)},
    }
    controller = rl.NexRLController(config(changes))
    assert controller._load_initial_checkpoint() == controller._load_resume_checkpoint() == str(from_)
    copy_checkpoint(controller._config)
    copy_checkpoint(controller._config)
    assert (tmp_path / "new" / "checkpoints" / "global_step_4" / STATE_FILE).is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.rollout_repeat_n": 4}, "trajectory_pool.group_size is 2, but data.rollout_repeat_n 4"),
        ({"trajectory_pool.group_size": 1, "trajectory_pool.batch_size": 3}, "no whole number of groups of 2 fills"),
        ({"service": {}}, "service.train_service.model is missing"),
        ({"service.inference_service.model": "other"}, "a run serves what it trains"),
        ({"service.train_service.model": {"layer": 1}}, "service.train_service.model: .*'layer'"),
        (
            {"service.inference_service.backend": "vllm"},
            "backend is 'vllm', which a run does not train with",
        ),
        (
            {"service.train_service": {"backend": "tinker", "model": "m", "url": "http://localhost:1"}},
            "backend is 'tinker', and the trainer SelfHostedGrpoTrainer: expected trainer.type remote_api_grpo",
        ),
        (
            {
                "service.train_service": {"backend": "tinker", "model": "m", "url": "http://far:1"},
                "trainer.type": "remote_api_grpo",
            },
            "service.train_service: base_url is http, and far is another machine: .* expected https",
        ),
        ({"service.train_service": {"backend": "tinker"}}, "service.train_service.url: missing; backend 'tinker'"),
        (
            {"service.train_service": {"backend": "tinker", "api_key": "tml-1"}},
            "service.train_service.api_key: a configuration is logged; expected key_file",
        ),
        (
            {"weight.sync_method": "vllm"},
            "weight.sync_method is 'vllm', for servers that a run does not have",
        ),
        ({"weight.sync_method": "disk"}, "weight_sync='disk' needs a directory"),
        ({"data.prompt_key": "question"}, "data.prompt_key is 'question'; row 0 lacks 'question'; it has prompt"),
        ({"resume.mode": "auto"}, "trainer.checkpoint_path is missing; resume.mode 'auto' needs it"),
        (
            {"rollout_worker.max_response_length": 300, "service.inference_service": {}},
            "rollout_worker.max_response_length: found 300; the context of the model allows 256",
        ),
        (
            {
                "trainer.max_response_length": 200,
                "trainer.max_prompt_length": 100,
                "service.inference_service": {},
            },
            "trainer.max_response_length: found 200; with trainer.max_prompt_length, 100, it is above 256, which the",
        ),
        (
            {"data.max_prompt_length": 200, "rollout_worker.max_response_length": 100, "service.inference_service": {}},
            "rollout_worker.max_response_length: found 100; with data.max_prompt_length, 200, it is above 256",
        ),
        (
            {"rollout_worker.type": "nexau"},
            "nexau_agent_config_path: missing; workers of type 'nexau' need it",
        ),
        (
            {"service.inference_service.max_length": 512},
            "service.inference_service.max_length: found 512; the context of the model is 256",
        ),
        ({"validate.eval.type": "defalt"}, r"validate.eval.type: found 'defalt'; expected one of 'default'"),
        ({"rollout_worker.typ": "mock"}, r"rollout_worker.typ: unknown key; did you mean type\?"),
        ({"rollout_worker.type": "simpel"}, "rollout_worker.type: found 'simpel'"),
    ],
)
def test_a_contradiction_is_refused_before_anything_is_started(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        rl.NexRLController(config(changes))


def test_servers_get_weights_as_the_configuration_says(tmp_path: Path) -> None:
    changes = {"weight.sync_method": "disk", "trainer.checkpoint_path": str(tmp_path)}
    assert rl.NexRLController(config(changes))._run.parts.weight_sync is WeightSync.DISK
    changes = {"weight.sync_method": "network"}
    assert rl.NexRLController(config(changes))._run.parts.weight_sync is WeightSync.NETWORK


def test_the_least_limit_of_a_prompt_is_that_of_the_run() -> None:
    changes = {"data.max_prompt_length": 30, "rollout_worker.max_prompt_length": 20, "trainer.max_prompt_length": 40}
    assert rl.NexRLController(config(changes)).parts.episodes.max_prompt_length == 20
    assert rl.NexRLController(config({})).parts.episodes.max_prompt_length is None


def test_a_checkpoint_that_shall_not_be_resumed_is_not_overwritten(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    with pytest.raises(InvalidRequest, match=r"has global_step_4, and resume.mode is 'disable': expected resume.mode"):
        rl.NexRLController(config({"trainer.checkpoint_path": str(tmp_path)}))


def test_a_cluster_has_to_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FRAY_CLUSTER_SPEC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    controller = rl.NexRLController(config({"launch_mode": "ray", "logger.backend": "console"}))
    with pytest.raises(InvalidRequest, match="launch_mode 'ray' needs a cluster: FRAY_CLUSTER_SPEC=fray://host:port"):
        controller.run()
    assert controller.activity_tracker.get_error_health_status()["status"] == "error"


def test_what_a_worker_loads_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXRL_PATH", str(tmp_path))
    (tmp_path / "agent.py").write_text("def make(llm): ...\ndef many(*values): ...\nNUMBER = 3\n")
    (tmp_path / "agent.yaml").write_text("type: agent")
    for changes, message in (
        ({"type": "agent", "tools": ["agent.py:mke"]}, "tools: .*agent.py has no 'mke'; did you mean make"),
        ({"type": "agent", "tools": ["agent.py:many"]}, "rollout_worker.tools: .*cannot be given by name"),
        ({"type": "nexau", "nexau_agent_config_path": "agent.py:mke"}, "agent.py has no 'mke'; did you mean make"),
        ({"type": "nexau", "nexau_agent_config_path": "agent.py:NUMBER"}, "is int; expected a function that makes"),
        ({"type": "nexau", "nexau_agent_config_path": "agent.yaml"}, "agent.yaml', a file of NexAU, but the package"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            rl.NexRLController(config({f"rollout_worker.{key}": value for key, value in changes.items()}))


def test_an_agent_is_a_file_or_a_factory_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXRL_PATH", str(tmp_path))
    (tmp_path / "agent.py").write_text("def make(llm): ...")
    changes = {"rollout_worker.type": "nexau", "rollout_worker.nexau_agent_config_path": "agent.py:make"}
    controller = rl.NexRLController(config(changes))
    assert controller._config.rollout_worker.nexau_agent_config_path == f"{tmp_path / 'agent.py'}:make"
    with pytest.raises(InvalidRequest, match="nexau_agent_config_path: there is no such file"):
        rl.NexRLController(config({**changes, "rollout_worker.nexau_agent_config_path": "other.py:make"}))


@pytest.mark.parametrize(
    ("kind", "worker", "lacks"),
    [
        ("simple", "SimpleRolloutWorker", "'prompt'"),
        ("single_turn_math", "SingleTurnMathRolloutWorker", "'prompt'"),
        ("agent", "AgentRolloutWorker", "'prompt' or 'messages'"),
        ("pig_latin", "PigLatinRolloutWorker", "'input' or 'prompt'"),
    ],
)
def test_rows_that_lack_what_the_worker_needs_are_refused(kind: str, worker: str, lacks: str, tmp_path: Path) -> None:
    good, bad = '{"prompt": "1", "answer": "1", "response": "1"}\n', '{"text": "2", "answer": "3"}\n'
    (tmp_path / "rows.jsonl").write_text(good + bad)
    (tmp_path / "good.jsonl").write_text(good)
    data = {"type": "torch", "data_files": [str(tmp_path / "rows.jsonl")]}
    text = f"{worker} cannot use row 1, which lacks {lacks}; it has answer, text"
    with pytest.raises(InvalidRequest) as caught:
        rl.NexRLController(config({"rollout_worker.type": kind}) | {"data": data})
    assert str(caught.value) == f"invalid config: data: {text}"
    with pytest.raises(InvalidRequest) as caught:
        trained = {"type": "torch", "data_files": [str(tmp_path / "good.jsonl")]}
        validate = {"validate": {"data": data, "validate_before_train": True}}
        rl.NexRLController(config({"rollout_worker.type": kind}) | {"data": trained} | validate)
    assert str(caught.value) == f"invalid config: validate.data: {text}"


def test_a_file_that_raises_is_refused_with_its_key_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXRL_PATH", str(tmp_path))
    (tmp_path / "broken.py").write_text("import os\n\nLIMIT = os.environ['NO_SUCH_VARIABLE_HERE']\n")
    (tmp_path / "empty.py").write_text("class Other: ...\n")
    line = f"{tmp_path}/broken.py raised KeyError: 'NO_SUCH_VARIABLE_HERE' (line 3 of {tmp_path}/broken.py: LIMIT = os"
    for changes, message in (
        ({"evaluator_module_path": "broken.py:E"}, f"evaluator_module_path '{tmp_path}/broken.py:E': {line}"),
        ({"evaluator_module_path": "empty.py:Othr"}, "empty.py has no 'Othr'; did you mean Other?"),
        ({"evaluator_module_path": "empty.py:Other"}, "expected an Evaluator class"),
        (
            {"custom_rollout_worker_module_path": "broken.py", "custom_rollout_worker_class_name": "Mine"},
            f"rollout_worker.custom_rollout_worker_class_name: {line}",
        ),
    ):
        with pytest.raises(InvalidRequest) as caught:
            rl.NexRLController(config({f"rollout_worker.{key}": value for key, value in changes.items()}))
        assert str(caught.value).startswith("invalid ")
        assert message in str(caught.value)
