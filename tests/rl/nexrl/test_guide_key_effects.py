"""Each key of the guide's configuration changes the run, is refused, or is named as without effect."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from fray.errors import InvalidRequest
from fray.rl import NexRLController
from fray.rl.inference.service_client import LLMServiceClient
from fray.rl.recipe.guide_config import TYPES, WITHOUT_EFFECT, GuideConfig, InferenceServiceConfig, Section
from fray.rl.rollout_worker import WorkerEpisode

BASE: dict[str, Any] = {
    "data": {"type": "mock", "prompts": ["1>", "2>"], "rollout_repeat_n": 4},
    "trajectory_pool": {"group_size": 4, "batch_size": 8},
    "trainer": {"total_train_steps": 2, "checkpoint_path": "out"},
    "service": {"train_service": {"model": {"layers": 1, "width": 16}}},
    "validate": {"validate_before_train": True, "data": {"type": "mock", "prompts": ["3>"]}},
}
KL = {"algorithm": {"use_kl_in_reward": True}}
ADAPTIVE = {"algorithm": {"use_kl_in_reward": True, "critic": {"kl_ctrl": {"type": "adaptive", "target_kl": 0.1}}}}
FILES = {"data": {"type": "torch", "prompts": None, "data_files": ["rows.jsonl"]}}
VALIDATED_FILES = {"validate": {"data": {"type": "torch", "prompts": None, "data_files": ["rows.jsonl"]}}}
SIZED = {"data": {"prompts": None, "size": 3}}
FILE_AND_NAME = {
    "rollout_worker": ("custom_rollout_worker", "Worker"),
    "trainer": ("custom_trainer", "Trainer"),
    "data": ("custom_data_loader", "Loader"),
    "validate.data": ("custom_data_loader", "Loader"),
}
OF_DATA: dict[str, Any] = {
    "type": ("mock", "torch", FILES),
    "prompts": ["7>"],
    "data_files": (["other.jsonl"], FILES),
    "size": (5, SIZED),
    "prompt_key": ("question", FILES),
    "rollout_repeat_n": 2,
    "max_prompt_length": 7,
}
KEYS: dict[str, Any] = {
    "launch_mode": "cluster",
    "project_name": "other",
    "experiment_name": "other",
    "deterministic": True,
    "resources": {"server": {"cpu": 2}},
    "logger.backend": ["console"],
    **{f"data.{key}": value for key, value in OF_DATA.items()},
    "data.rollout_repeat_n": (2, {"trajectory_pool": {"group_size": 1}}),
    "data.seed": 5,
    "data.shuffle": True,
    "data.epochs": (3, {"trainer": {"total_train_steps": None}}),
    "data.keep_batch_order": True,
    "data.skip_batches": 1,
    **{f"validate.data.{key}": value for key, value in OF_DATA.items()},
    "validate.data.type": ("mock", "torch", VALIDATED_FILES),
    "validate.data.data_files": (["other.jsonl"], VALIDATED_FILES),
    "validate.data.prompt_key": ("question", VALIDATED_FILES),
    "validate.data.size": (5, {"validate": {"data": {"prompts": None, "size": 3}}}),
    "validate.validate_before_train": (False, {"weight": {"validate_freq": 2}}),
    "rollout_worker.type": "mock",
    "rollout_worker.num_workers": 3,
    "rollout_worker.processes": 2,
    "rollout_worker.evaluator_module_path": "own.py:Judge",
    "rollout_worker.nexau_agent_config_path": ("own.py:agent", "own.py:other", {"rollout_worker": {"type": "nexau"}}),
    "rollout_worker.nexau_agent_workspace": ".",
    "rollout_worker.task_name": "other",
    "rollout_worker.tools": ("own.py:tool", {"rollout_worker": {"type": "agent"}}),
    "rollout_worker.system_prompt": "1",
    "rollout_worker.max_turns": 3,
    "rollout_worker.max_prompt_length": 7,
    "rollout_worker.max_response_length": 9,
    "rollout_worker.temperature": 0.5,
    "rollout_worker.top_p": 0.5,
    "rollout_worker.rollout_timeout_s": 5.0,
    "rollout_worker.max_attempts": 5,
    "trajectory_pool.batch_size": 4,
    "trajectory_pool.group_size": (2, {"data": {"rollout_repeat_n": None}}),
    "trajectory_pool.key_list": ["user", "session"],
    "trajectory_pool.check_batch_ready_function": "loaded_batch_finished",
    "trainer.type": "remote_api_grpo",
    "trainer.total_train_steps": 5,
    "trainer.checkpoint_path": "other",
    "trainer.save_freq": 7,
    "trainer.remove_previous_ckpt": True,
    "trainer.max_prompt_length": 7,
    "trainer.max_response_length": 9,
    "trainer.lr": 0.5,
    "trainer.warmup_steps": 1,
    "trainer.betas": [0.5, 0.5],
    "trainer.eps": 0.5,
    "trainer.weight_decay": 0.5,
    "trainer.grad_clip": 0.5,
    "trainer.minibatches": 2,
    "trainer.micro_batch": 2,
    "trainer.micro_batch_tokens": 9,
    "trainer.dtype": "bfloat16",
    "trainer.gradient_checkpointing": True,
    "trainer.seed": 3,
    "algorithm.batch_size": (8, {"trajectory_pool": {"batch_size": None}}),
    "algorithm.do_old_log_prob_compute": False,
    "algorithm.use_kl_in_reward": True,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_penalty": ("abs", KL),
    "algorithm.critic.kl_ctrl.type": ("fixed", ADAPTIVE),
    "algorithm.critic.kl_ctrl.kl_coef": (0.5, KL),
    "algorithm.critic.kl_ctrl.target_kl": (0.5, ADAPTIVE),
    "algorithm.critic.kl_ctrl.horizon": (99.0, ADAPTIVE),
    "algorithm.advantage": "rloo",
    "algorithm.gamma": 0.5,
    "algorithm.loss": "gspo",
    "algorithm.clip_low": 0.5,
    "algorithm.clip_high": 0.5,
    "algorithm.loss_options": ({"bound": 4.0}, {"algorithm": {"loss": "dual_clip"}}),
    "algorithm.aggregation": "seq-mean-token-sum",
    "algorithm.aggregation_length": (9, 8, {"algorithm": {"aggregation": "constant-length"}}),
    "algorithm.correction": "truncate",
    "weight.sync_mode": "batch-async",
    "weight.sync_method": "disk",
    "weight.staleness_threshold": 3,
    "weight.validate_freq": 2,
    "service.train_service.backend": "mock",
    "service.train_service.model": {"layers": 2, "width": 16},
    "service.train_service.model_tag": ("other", {"trainer": {"type": "remote_api_grpo"}}),
    "service.train_service.world_size": 2,
    "service.train_service.reference": ("server", KL),
    "service.inference_service.backend": "vllm",
    "service.inference_service.model": ("other", "one", {"service": {"train_service": {"model": None}}}),
    "service.inference_service.model_tag": "other",
    "service.inference_service.freeze_for_weight_sync": False,
    "service.inference_service.servers": 3,
    "service.inference_service.max_length": 99,
    "service.inference_service.temperature": 0.5,
    "service.inference_service.top_p": 0.5,
    "resume.mode": "auto",
    "resume.resume_path": ("elsewhere", {"resume": {"mode": "from_path", "resume_path": "."}}),
    "runtime_monitor.exception_handling.enabled": False,
    "runtime_monitor.exception_handling.policy": "stop_on_error",
}
"""A value of each key that a run follows, other than that of `BASE`; or it, one to compare with, and keys it needs."""
OF_FRAY_ALONE = {"trajectory_pool.type": "mine", "weight.type": "mine", "validate.eval.type": "mine"}
"""Types whose classes a run has itself: any other is refused."""


def leaves(kind: type[Section], prefix: str = "") -> Iterator[str]:
    default = kind()
    for one in attrs.fields(kind):
        path = f"{prefix}{one.name}"
        value = getattr(default, one.name)
        if path == "validate.data":
            value = GuideConfig().data
        if path in WITHOUT_EFFECT:
            yield path
        elif one.init and isinstance(value, Section):
            yield from leaves(type(value), f"{path}.")
        elif one.init:
            yield path


def leaves_of_the_guide() -> list[str]:
    """Return the paths of all keys; of those without effect, without what is below them."""
    return list(leaves(GuideConfig))


def merged(*settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in settings:
        for key, value in each.items():
            is_below = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = merged(found[key], value) if is_below and key != "model" else value
    return found


def at(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"rows": "1", "other": "2"}.items():
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{text}>", "question": "{text}{text}>"}}\n' * 3)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "own.py").write_text(
        "from fray import rl\n"
        "from fray.rl.rollout_worker import EvaluationRunResult, Evaluator\n"
        "from fray.rl.nexrl.data_loader import MockDataLoader as Loader\n"
        "class Judge(Evaluator):\n    def evaluate(self, data, target): return EvaluationRunResult(1.0)\n"
        "class Worker(rl.MockRolloutWorker): ...\n"
        "class Trainer(rl.SelfHostedGrpoTrainer): ...\n"
        "def tool(x: int) -> int: return x\n"
        "def agent(llm): return str\n"
        "other = agent\n"
    )
    monkeypatch.setenv("NEXRL_PATH", str(tmp_path))
    monkeypatch.setenv("FRAY_CLUSTER_SPEC", "fray://host:1")
    return tmp_path


def effect_of(settings: Mapping[str, Any]) -> Any:
    """Return all that follows from a configuration; the message, if it is refused."""
    try:
        controller = NexRLController(settings)
    except InvalidRequest as error:
        return str(error)
    parts = controller.parts
    episode = parts.episodes.rollout
    assert isinstance(episode, WorkerEpisode)
    worker = {key: value for key, value in episode._config.items() if key != "inference_service"}
    own = None if parts.own_trainer is None else (type(parts.own_trainer), dict(parts.own_trainer._config))
    made = attrs.evolve(parts, settings={}, own_trainer=None, episodes=attrs.evolve(parts.episodes, rollout=None))  # type: ignore[arg-type]
    return repr(
        (
            made,
            own,
            episode._worker_class,
            sorted(worker.items(), key=repr),
            LLMServiceClient(episode._config).model_tag,
            controller._spec(),
            sorted(controller.experiment_logger.sinks),
            controller._load_initial_checkpoint(),
            attrs.asdict(controller._config.resume)["mode"],
        )
    )


def test_every_key_is_in_one_of_the_tables() -> None:
    own = {
        f"{path}.{prefix}_{end}" for path, (prefix, _) in FILE_AND_NAME.items() for end in ("module_path", "class_name")
    }
    one_value = {f"{path}.type" for path, values in TYPES.items() if len(values) == 1} - set(OF_FRAY_ALONE)
    assert one_value == {"algorithm.type"}
    followed = set(KEYS) | set(OF_FRAY_ALONE) | own | one_value
    assert not followed & set(WITHOUT_EFFECT)
    assert set(leaves_of_the_guide()) == followed | set(WITHOUT_EFFECT)


@pytest.mark.parametrize("path", KEYS)
def test_a_key_changes_the_run(path: str, directory: Path) -> None:
    value, other, needs = KEYS[path], None, {}
    if isinstance(value, tuple):
        *values, needs = value
        value, other = values if len(values) > 1 else (*values, None)
    before = merged(BASE, needs, {} if other is None else at(path, other))
    unchanged, changed = effect_of(before), effect_of(merged(BASE, needs, at(path, value)))
    assert unchanged.startswith("(RunParts("), unchanged
    assert changed != unchanged
    assert changed.startswith("(RunParts(") or path in changed, changed


@pytest.mark.parametrize("path", FILE_AND_NAME)
def test_keys_that_name_a_class_of_the_user_change_the_run(path: str, directory: Path) -> None:
    prefix, name = FILE_AND_NAME[path]
    pair = {f"{prefix}_module_path": "own.py", f"{prefix}_class_name": name}
    missing = effect_of(merged(BASE, at(path, {**pair, f"{prefix}_class_name": "Missing"})))
    assert "Missing" in missing
    assert effect_of(merged(BASE, at(path, pair))) != missing


@pytest.mark.parametrize("path", [path for path in WITHOUT_EFFECT if path not in ("defaults", "hydra")])
def test_a_key_without_effect_changes_nothing_and_is_named(
    path: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values: dict[str, Any] = {
        "algorithm.inference_service": InferenceServiceConfig(servers=3),
        "weight.checkpoint_manager": {"type": "mine"},
    }
    kinds = {"url": "http://x", "api_key": "k", "identifier": "i", "sync_weight_path": "weights"}
    kinds |= {"base_model": "m", "key_file": ".", "ca_file": "."}
    flags = ("drop_last", "shuffle", "keep_batch_order")
    name = path.rpartition(".")[2]
    value = values.get(path, kinds.get(name, name in flags or (False if name == "enabled" else 9)))
    if path == "algorithm.inference_service":
        value = {"servers": 3}
    before = effect_of(BASE)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert effect_of(merged(BASE, at(path, value))) == before
    assert f"{path} (" in caplog.text


@pytest.mark.parametrize("path", OF_FRAY_ALONE)
def test_classes_of_the_user_that_a_run_does_not_use_are_refused(
    path: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in NexRLController.MODULE_REGISTRY.values():
        if "default" in known:
            monkeypatch.setitem(known, "mine", object)
    found = effect_of(merged(BASE, at(path, OF_FRAY_ALONE[path])))
    assert found.startswith(f"{path} is 'mine', a class of yours that a run does not use")


def test_keys_of_the_pool_group_several_rows_and_the_group_of_a_row_needs_none(directory: Path) -> None:
    pool = {"key_list": ["user"], "group_size": 2, "batch_size": 4}
    parts = NexRLController(merged(BASE, {"trajectory_pool": pool, "data": {"rollout_repeat_n": 1}})).parts
    plan = parts.plan
    assert (plan.group_size, plan.order.repeats, plan.batch_size, plan.order.batch_rows) == (2, 1, 4, 4)
    assert parts.episodes.group_keys == ("user",)
    for keys in (["group_id"], ["uid"], []):
        parts = NexRLController(merged(BASE, {"trajectory_pool": {"key_list": keys}})).parts
        assert (parts.episodes.group_keys, parts.plan.keyed_group_size) == ((), None)


def test_a_run_has_the_model_tag_of_its_services(directory: Path) -> None:
    def tag(**services: str) -> str:
        settings = {f"{name}_service": {"model_tag": value} for name, value in services.items()}
        parts = NexRLController(merged(BASE, {"service": settings})).parts
        episode = parts.episodes.rollout
        assert isinstance(episode, WorkerEpisode)
        # Workers put the tag of their client into trajectories.
        assert LLMServiceClient(episode._config).model_tag == parts.episodes.model_tag
        return parts.episodes.model_tag

    assert (tag(train="a"), tag(inference="a"), tag(train="a", inference="a"), tag()) == ("a", "a", "a", "default")
    with pytest.raises(InvalidRequest, match=r"service\.inference_service\.model_tag is 'b', but .* 'a': a run serves"):
        tag(train="a", inference="b")
