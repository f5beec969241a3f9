"""The configuration of NexRL's guide becomes typed classes; what is wrong in it is refused with its path."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from fray.errors import InvalidRequest
from fray.rl.recipe.guide_config import GuideConfig, Section, is_guide_config, load_guide_config

GUIDE_KEYS = [
    "launch_mode",
    "project_name",
    "experiment_name",
    "data.type",
    "data.seed",
    "rollout_worker.type",
    "rollout_worker.num_workers",
    "rollout_worker.custom_rollout_worker_module_path",
    "rollout_worker.custom_rollout_worker_class_name",
    "rollout_worker.nexau_agent_config_path",
    "rollout_worker.evaluator_module_path",
    "rollout_worker.nexau_agent_workspace",
    "rollout_worker.task_name",
    "trajectory_pool.type",
    "trajectory_pool.batch_size",
    "trajectory_pool.group_size",
    "trajectory_pool.key_list",
    "trajectory_pool.check_batch_ready_function",
    "trainer.type",
    "trainer.total_train_steps",
    "trainer.checkpoint_path",
    "trainer.sync_weight_path",
    "trainer.save_freq",
    "trainer.remove_previous_ckpt",
    "algorithm.type",
    "algorithm.batch_size",
    "algorithm.do_old_log_prob_compute",
    "algorithm.use_kl_in_reward",
    "algorithm.critic.kl_ctrl",
    "algorithm.inference_service",
    "weight.type",
    "weight.sync_mode",
    "weight.staleness_threshold",
    "weight.checkpoint_manager",
    "service.train_service.backend",
    "service.train_service.url",
    "service.train_service.model_tag",
    "service.train_service.identifier",
    "service.inference_service.backend",
    "service.inference_service.url",
    "service.inference_service.model_tag",
    "service.inference_service.api_key",
    "service.inference_service.max_retries",
    "service.inference_service.freeze_for_weight_sync",
    "validate.validate_before_train",
    "validate.data",
    "validate.eval.type",
    "resume.mode",
    "resume.resume_path",
    "logger.backend",
    "runtime_monitor.exception_handling.enabled",
    "runtime_monitor.exception_handling.check_interval",
    "runtime_monitor.exception_handling.policy",
    "runtime_monitor.health_check.enabled",
    "runtime_monitor.health_check.check_interval",
    "runtime_monitor.health_check.timeout",
]
"""Keys that the guide's section on configuration names."""


def keys_of(section: Section, prefix: str = "") -> Iterator[str]:
    for attribute in attrs.fields(type(section)):
        yield f"{prefix}{attribute.name}"
        value = getattr(section, attribute.name)
        if isinstance(value, Section):
            yield from keys_of(value, f"{prefix}{attribute.name}.")


def test_all_keys_of_the_guide_are_there() -> None:
    assert not set(GUIDE_KEYS) - set(keys_of(load_guide_config({})))


def test_sections_are_read_by_attribute_and_as_mappings() -> None:
    config = load_guide_config({"data": {"batch_size": 4}, "trajectory_pool": {"key_list": "uid"}})
    assert config.data.batch_size == config.data["batch_size"] == config.get("data", {}).get("batch_size") == 4
    assert config.trajectory_pool.key_list == ("uid",)
    # A key that is not set has the caller's default, as in a DictConfig.
    assert config.data.get("rollout_repeat_n", 7) == 7
    assert "rollout_repeat_n" not in config.data
    assert "seed" in dict(config.data)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_class_of_the_user_has_keys_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("class Mine: ...")
    worker: dict[str, Any] = {
        "custom_rollout_worker_module_path": str(tmp_path / "worker.py"),
        "custom_rollout_worker_class_name": "Mine",
        "sandbox": {"cpus": 2},
    }
    config = load_guide_config({"rollout_worker": worker})
    assert config.rollout_worker.sandbox == config.rollout_worker.get("sandbox") == {"cpus": 2}
    assert "sandbox" in pickle.loads(pickle.dumps(config)).rollout_worker
    with pytest.raises(InvalidRequest, match="num_worker: unknown key; did you mean num_workers"):
        load_guide_config({"rollout_worker": {**worker, "num_worker": 3}})
    with pytest.raises(AttributeError, match="RolloutWorkerConfig has no key 'num_worker'; did you mean num_workers"):
        config.rollout_worker.num_worker  # noqa: B018


def test_relative_paths_refer_to_nexrl_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evaluator.py").write_text("class Mine: ...")
    monkeypatch.setenv("NEXRL_PATH", str(tmp_path))
    config = load_guide_config(
        {"rollout_worker": {"evaluator_module_path": "evaluator.py:Mine"}, "trainer": {"checkpoint_path": "ckpt"}}
    )
    assert config.rollout_worker.evaluator_module_path == f"{tmp_path}/evaluator.py:Mine"
    assert config.trainer.checkpoint_path == f"{tmp_path}/ckpt"


def test_keys_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    handling = {"exception_handling": {"check_interval": 2}, "health_check": {"check_interval": 3, "timeout": 4}}
    with caplog.at_level(logging.WARNING):
        config = load_guide_config({"defaults": ["_self_"], "weight": {"checkpoint_manager": {"type": "x"}}})
        watched = load_guide_config({"runtime_monitor": handling})
    assert config.unused == ("defaults", "weight.checkpoint_manager")
    below = ("exception_handling.check_interval", "health_check.check_interval", "health_check.timeout")
    assert watched.unused == tuple(f"runtime_monitor.{key}" for key in below)
    assert "config: keys without effect: weight.checkpoint_manager (trainer.checkpoint_path and its" in caplog.text
    assert "runtime_monitor.health_check.timeout (events act at once, and processes are always watched" in caplog.text
    assert "defaults (" not in caplog.text


def test_keys_that_a_run_cannot_follow_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    load_guide_config({"trajectory_pool": {"key_list": ["group_id"]}})
    assert caplog.text == ""
    config = load_guide_config(
        {
            "algorithm": {"inference_service": {"servers": 3}},
            "service": {
                "inference_service": {"url": "http://elsewhere/v1", "api_key": "k", "max_retries": 9},
                "train_service": {"url": "http://elsewhere", "rank": 8},
            },
        }
    )
    assert config.unused == (
        *("algorithm.inference_service", "service.inference_service.url", "service.inference_service.api_key"),
        *("service.inference_service.max_retries", "service.train_service.url", "service.train_service.rank"),
    )
    for path in config.unused:
        assert f"{path} (" in caplog.text


def test_a_service_that_trains_needs_its_keys_and_no_secret_in_the_configuration() -> None:
    service = {"backend": "tinker", "url": "https://elsewhere", "base_model": "m", "rank": 8, "identifier": "i"}
    assert load_guide_config({"service": {"train_service": service}}).unused == ("service.train_service.identifier",)
    wrong = {"backend": "tinker", "api_key": "tml-secret", "world_size": 2}
    with pytest.raises(InvalidRequest) as raised:
        load_guide_config({"service": {"train_service": wrong}})
    for key in ("url: missing", "base_model: missing", "api_key: a configuration is logged", "world_size: found 2"):
        assert f"service.train_service.{key}" in str(raised.value)
    assert "tml-secret" not in str(raised.value)


def test_settings_of_training_follow_from_trainer_algorithm_and_pool() -> None:
    config = load_guide_config(
        {
            "trajectory_pool": {"batch_size": 12, "group_size": 4},
            "trainer": {"total_train_steps": 5, "lr": 1e-3, "betas": [0.9, 0.99]},
            "algorithm": {"use_kl_in_reward": True, "critic": {"kl_ctrl": {"type": "adaptive", "target_kl": 0.1}}},
        }
    )
    grpo = config.grpo()
    assert (grpo.groups, grpo.group_size, grpo.steps, grpo.lr, grpo.betas) == (3, 4, 5, 1e-3, (0.9, 0.99))
    assert grpo.ratio_refers_to == "trainer"
    assert grpo.kl is not None
    assert (grpo.kl.place, grpo.kl.estimator, grpo.kl.target) == ("reward", "kl", 0.1)
    assert load_guide_config({"algorithm": {"do_old_log_prob_compute": False}}).grpo().ratio_refers_to == "rollout"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"traner": {}}, "invalid config: traner: unknown key; did you mean trainer?"),
        ({"data": {"sede": 1}}, "data.sede: unknown key; did you mean seed?"),
        ({"data": 3}, "data: found 3 (int); expected a mapping"),
        ({"data": {"seed": "one"}}, "data.seed: found 'one' (str); expected a whole number"),
        ({"rollout_worker": {"num_workers": 0}}, "rollout_worker.num_workers: found 0; expected 1 or more"),
        (
            {"weight": {"sync_mode": "fuly-async"}},
            "weight.sync_mode: found 'fuly-async'; expected one of 'sync', 'fully-async', 'batch-async'; did you mean "
            "fully-async?",
        ),
        (
            {"trajectory_pool": {"check_batch_ready_function": "batch"}},
            "trajectory_pool.check_batch_ready_function: found 'batch'; expected one of 'batch_size',",
        ),
        ({"trainer": {"type": "self_hosted_gppo"}}, "'remote_api_cross_entropy'; did you mean self_hosted_grpo"),
        ({"algorithm": {"loss": "clp"}}, "trainer or algorithm: invalid loss='clp' of GRPO"),
        (
            {"trajectory_pool": {"batch_size": 10, "group_size": 4}},
            "trajectory_pool.batch_size: found 10, which no whole number of groups of 4 fills; expected a multiple of "
            "4, such as 8",
        ),
        (
            {"service": {"train_service": {"backend": "nextrainer"}}},
            "service.train_service.backend: 'nextrainer' is not part of Fray; expected 'torch'",
        ),
        (
            {"rollout_worker": {"evaluator_module_path": "missing.py:E"}},
            "rollout_worker.evaluator_module_path: there is no such file: ",
        ),
        (
            {"rollout_worker": {"custom_rollout_worker_class_name": "Mine"}},
            "rollout_worker.custom_rollout_worker_module_path: missing; custom_rollout_worker_class_name is set",
        ),
        ({"resume": {"mode": "from_path"}}, "resume.resume_path: missing; mode 'from_path' needs it"),
        (
            {
                "rollout_worker": {"max_response_length": 600},
                "service": {"inference_service": {"max_length": 512}},
            },
            "rollout_worker.max_response_length: found 600; service.inference_service.max_length allows 512",
        ),
        (
            {
                "trainer": {"max_response_length": 300, "max_prompt_length": 300},
                "service": {"inference_service": {"max_length": 512}},
            },
            "trainer.max_response_length: found 300; with trainer.max_prompt_length, 300, it is above 512",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_guide_config(config)
    assert message in str(caught.value)


def test_all_errors_are_in_one_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_guide_config(
            {"data": {"seed": "x"}, "weight": {"type": "default", "stalenes": 1}, "logger": {"backend": 1}}
        )
    assert str(caught.value).splitlines()[0] == "invalid config: 3 errors"
    assert "  logger.backend[0]: found 1 (int); expected text" in str(caught.value).splitlines()


def test_types_of_a_registry_replace_those_of_fray() -> None:
    types = {"rollout_worker": ["mine"]}
    assert load_guide_config({"rollout_worker": {"type": "mine"}}, types=types).rollout_worker.type == "mine"
    with pytest.raises(InvalidRequest, match=r"rollout_worker\.type: found 'simple'; expected one of 'mine'"):
        load_guide_config({}, types=types)


def test_a_recipe_is_of_the_guide_or_of_fray_by_its_keys() -> None:
    assert is_guide_config({"trajectory_pool": {}, "data": {}})
    assert not is_guide_config({"model": "m", "data": "d.jsonl", "rollout": "r.py:f", "trainer": {"lr": 1}})
    assert isinstance(load_guide_config({}), GuideConfig)
