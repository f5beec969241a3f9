"""States of jobs, the queue for accelerators, keys, configuration and the order of calls: all of it values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.tinker.core.job_queue import QueuedJob, decide_starts, expected_start
from fray.tinker.core.job_states import ServiceJobState, may_become
from fray.tinker.core.keys import ServiceUser, hash_of, new_key, new_user_id, user_of_key
from fray.tinker.core.training_config import ConfigError, TrainingSettings, settings_of
from fray.tinker.core.training_session import OutOfOrder, TrainingSession, merged

S = ServiceJobState


def test_final_states_are_final() -> None:
    assert {state for state in S if state.is_final} == {S.COMPLETED, S.FAILED, S.CANCELLED}
    assert not any(may_become(one, other) for one in S if one.is_final for other in S)
    assert may_become(S.QUEUED, S.STARTING)
    assert may_become(S.STARTING, S.RUNNING)
    assert not may_become(S.RUNNING, S.QUEUED)
    assert not may_become(S.STARTING, S.QUEUED)


@given(st.lists(st.integers(0, 4), max_size=8), st.integers(0, 4))
def test_none_overtakes_one_that_waits_longer(needs: list[int], total: int) -> None:
    waiting = [QueuedJob(str(index), need) for index, need in enumerate(needs)]
    decision = decide_starts(waiting, {}, total)
    started = dict(decision.starts)
    given_out = [gpu for gpus in started.values() for gpu in gpus]
    assert len(given_out) == len(set(given_out))
    assert all(len(started[job.job_id]) == job.gpus for job in waiting if job.job_id in started)
    assert all(gpu < total for gpu in given_out)
    assert started.keys() | decision.reasons.keys() == {job.job_id for job in waiting}
    first = next((index for index, job in enumerate(waiting) if job.job_id in decision.reasons), len(waiting))
    assert all(job.gpus == 0 for job in waiting[first:] if job.job_id in started)


def test_a_job_that_waits_is_given_its_place_and_reason() -> None:
    decision = decide_starts([QueuedJob("b", 2), QueuedJob("c", 1)], {"a": (0, 1, 2)}, 4)
    assert decision.starts == ()
    assert decision.reasons == {
        "b": "number 1 in the queue: needs 2 GPUs, 1 of 4 are free",
        "c": "number 2 in the queue: needs 1 GPUs, 1 of 4 are free; 1 before it",
    }


def test_keys_have_their_form_and_only_their_hash_is_kept() -> None:
    key, user_id = new_key(lambda count: "ab" * count), new_user_id(lambda count: "0f" * count)
    assert (key, user_id) == ("otk_" + "ab" * 16, "user_" + "0f" * 4)
    user = ServiceUser(user_id, "ada", hash_of(key), 0.0)
    assert key[4:] not in repr(user)
    assert user_of_key({user_id: user}, key) is user
    assert user_of_key({user_id: user}, key + "0") is None
    assert user_of_key({user_id: user}, "\udcff") is None


def test_the_keys_of_a_configuration_are_read_and_the_others_named() -> None:
    config = {
        "data": {"max_prompt_length": 4, "max_response_length": 5, "shuffle": True},
        "actor_rollout_ref": {
            "model": {"path": "tiny"},
            "rollout": {"n": 16, "name": "vllm"},
            "actor": {"optim": {"lr": "1e-3"}, "kl_loss_coef": 0.01},
        },
        "algorithm": {"adv_estimator": "grpo"},
    }
    settings, unused = settings_of(config)
    assert settings == TrainingSettings("tiny", 4, 5, 16, lr=1e-3)
    assert unused == ["actor_rollout_ref.rollout.name", "data.shuffle"]
    with_kl, _ = settings_of(merged(config, {"actor_rollout_ref.actor.use_kl_loss": True}))
    assert with_kl.kl == 0.01


@pytest.mark.parametrize(
    ("path", "value", "refusal"),
    [
        ("data.max_prompt_length", 0, "data.max_prompt_length: expected an integer of at least 1, not 0"),
        ("data.max_prompt_length", True, "expected an integer of at least 1, not True"),
        ("actor_rollout_ref.actor.optim.lr", "fast", "expected a number of at least 0, not 'fast'"),
        ("actor_rollout_ref.actor.optim.lr", float("nan"), "expected a number of at least 0, not nan"),
        ("actor_rollout_ref.model.path", 7, "actor_rollout_ref.model.path: expected a text, not 7"),
        ("algorithm.adv_estimator", "rloo", "'rloo' is not there; expected one of grpo, grpo_per_step, gae"),
        ("custom_reward_function.endpoint", "ftp://x", "expected http://host:port, not 'ftp://x'"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_its_key(path: str, value: object, refusal: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(merged({}, {path: value}))
    assert refusal in str(caught.value)
    assert str(caught.value).startswith(path)


def test_a_call_out_of_order_is_refused_with_what_is_missing() -> None:
    session = TrainingSession()
    with pytest.raises(OutOfOrder, match=r"POST set_config \{config_overrides\}, then POST init_workers"):
        session.check("train_step")
    with pytest.raises(OutOfOrder, match="init_workers needs the configuration first"):
        session.check("init_workers")
    session.check("set_config")
    session.is_configured = True
    session.check("init_workers")
    session.total_steps = 7
    for operation in ("train_step", "validate", "save_checkpoint", "set_generation_config"):
        session.check(operation)
    with pytest.raises(OutOfOrder, match="already initialized"):
        session.check("set_config")
    with pytest.raises(OutOfOrder, match="called once"):
        session.check("init_workers")


def test_overrides_replace_values_inside_and_leave_the_rest() -> None:
    config = {"data": {"a": 1, "b": 2}, "x": 3}
    assert merged(config, {"data": {"a": 5}, "y.z": 1}) == {"data": {"a": 5, "b": 2}, "x": 3, "y": {"z": 1}}
    assert config == {"data": {"a": 1, "b": 2}, "x": 3}


def test_a_penalty_is_in_the_loss_or_in_the_reward_by_either_spelling_of_its_keys() -> None:
    for place in ("kl", "actor_rollout_ref.actor"):
        config = {f"{place}.use_kl_loss": True, f"{place}.kl_loss_coef": 0.2, f"{place}.kl_loss_type": "k3"}
        settings, unused = settings_of(merged({}, config))
        assert (settings.kl, settings.kl_place, settings.kl_estimator, unused) == (0.2, "loss", "low_var_kl", [])
    for place in ("kl", "algorithm"):
        control = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.3, "horizon": 50}
        config = {f"{place}.use_kl_in_reward": True, f"{place}.kl_penalty": "mse", f"{place}.kl_ctrl": control}
        settings, unused = settings_of(merged({}, config))
        assert (settings.kl, settings.kl_place, settings.kl_estimator, unused) == (0.1, "reward", "mse", [])
        assert (settings.kl_target, settings.kl_horizon) == (0.3, 50)
    assert settings_of(merged({}, {"kl.kl_loss_coef": 0.2}))[0] == TrainingSettings(), "nothing has switched it on"


def test_an_adapter_has_whole_parts_of_the_model() -> None:
    for place in ("lora.", "lora.lora_", "actor_rollout_ref.model.lora_"):
        assert settings_of(merged({}, {f"{place}rank": 8, f"{place}alpha": 16}))[0].lora == {"rank": 8, "alpha": 16}
    assert settings_of(merged({}, {"lora.rank": 0, "lora.target_modules": "all-linear"}))[0].lora is None
    mlp = ["gate_proj", "up_proj", "down_proj"]
    settings, _ = settings_of({"lora": {"rank": 8, "target_modules": mlp}, "trainer": {"total_training_steps": 9}})
    assert settings.lora == {"rank": 8, "attention": False, "mlp": True, "unembed": False}
    assert settings.total_steps == 9


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kl.use_kl_loss": True, "kl.use_kl_in_reward": True}, "use_kl_loss and use_kl_in_reward: expected one of"),
        ({"kl.use_kl_in_reward": True, "algorithm.adv_estimator": "gae"}, "use_kl_in_reward: the rewards of steps"),
        ({"algorithm.kl_ctrl.type": "odd"}, "algorithm.kl_ctrl.type: expected one of fixed, adaptive, not 'odd'"),
        ({"lora.rank": 8, "algorithm.adv_estimator": "gae"}, "lora: not with algorithm.adv_estimator=gae"),
        ({"lora.target_modules": ["q_proj", "v_proj"]}, "lora.target_modules: attention is adapted as a whole here"),
        ({"lora.target_modules": ["conv"]}, "lora.target_modules: expected all-linear, or a list of"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_keys(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(merged({}, config))
    assert str(caught.value).startswith(message)


def test_a_job_is_expected_to_start_when_there_is_room_for_it_and_all_before_it() -> None:
    waiting, taken = [QueuedJob("a", 2), QueuedJob("b", 1)], {"x": (0, 1), "y": (2,), "z": ()}

    def start(name: str, **ends: float | None) -> float | None:
        return expected_start(name, waiting, taken, 4, ends)

    assert start("a", x=50.0, y=9.0) == 9.0, "one GPU is free"
    assert start("b", x=50.0, y=9.0) == 50.0
    assert start("a", x=50.0) == 50.0
    assert start("a", z=3.0, y=None) is None
    assert expected_start("a", waiting, {}, 4, {}) is None
