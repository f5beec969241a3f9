"""Configuration of OpenTinker's clients: the keys that are used, checked, and those that are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import frozen

from fray.model.policy.priority import Band

ESTIMATORS = {"grpo": "grpo", "grpo_per_step": "step_grpo", "gae": "gae"}
"""Values of ``algorithm.adv_estimator``, and the advantages of `fray.rl` that they are."""

KL_PENALTIES = {
    "kl": "kl",
    "abs": "abs",
    "mse": "mse",
    "low_var_kl": "low_var_kl",
    "k1": "kl",
    "k2": "mse",
    "k3": "low_var_kl",
}
"""Values of ``kl_penalty`` and ``kl_loss_type``, and the estimators of `fray.rl` that they are."""
LORA_LAYERS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "unembed": ("lm_head",),
}
"""Parts of a model that `fray.rl.LoRA` adapts, and the names of their layers."""

MAX_TURNS = 10
"""Replies of the model in an episode, where the configuration has no limit."""
INTERACTION_LIMIT = 1 << 16
"""Characters of an interaction configuration."""
MULTI_TURN = ("actor_rollout_ref.rollout.multi_turn", "multi_turn")
"""Places of the keys of the agent loop."""


class ConfigError(ValueError):
    """Configuration with a value that cannot be used; the message has its key."""


@frozen
class TrainingSettings:
    """Settings that a training job takes from its configuration.

    Attributes:
        model: name of a model that the service has; empty: the only one.
        max_prompt_length: tokens; longer prompts are refused.
        max_response_length: tokens.
        rollouts: samples of each prompt.
        estimator: advantage of `fray.rl.train.settings.ADVANTAGES`.
        gamma: discount of steps; of ``gae``, of tokens.
        lam: of ``gae``, from 0 to 1.
        critic_model: name of the model with which its critic begins; empty: that of the policy.
        critic_lr: learning rate of the critic.
        critic_clip: farthest that an update moves a value of the critic.
        lr: learning rate.
        weight_decay: of AdamW.
        clip_ratio: of the loss.
        kl: coefficient of the penalty for distance from the first weights; None: none.
        kl_estimator: of the distance.
        kl_place: ``loss`` or ``reward``.
        kl_target: distance that the coefficient is adapted to, nats per token; None: it is fixed.
        kl_horizon: samples in which it is adapted.
        lora: settings of `fray.rl.LoRA` for the adapter that is trained; None: all weights are.
        reward_path: file with a reward function, on the machine of the engine; empty: none.
        reward_name: the function in it.
        reward_endpoint: URL of a reward server; empty: none.
        reward_timeout_s: for the rewards of one batch.
        priority: band of its engine; empty: the default of its user.
        seed: of sampling.
        total_steps: planned steps; None: not said.
        has_agent_loop: samples are episodes with an environment server.
        interaction_config: YAML text with the servers; empty: none.
        max_turns: replies of the model in an episode; None: `MAX_TURNS`.
        max_observations: observations in an episode; None: no limit.
        max_turn_length: tokens of a reply in an episode; None: as many as fit.
    """

    model: str = ""
    max_prompt_length: int = 512
    max_response_length: int = 512
    rollouts: int = 1
    estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    critic_model: str = ""
    critic_lr: float = 1e-5
    critic_clip: float = 0.5
    lr: float = 1e-6
    weight_decay: float = 0.01
    clip_ratio: float = 0.2
    kl: float | None = None
    kl_estimator: str = "low_var_kl"
    kl_place: str = "loss"
    kl_target: float | None = None
    kl_horizon: float = 10_000.0
    lora: Mapping[str, Any] | None = None
    reward_path: str = ""
    reward_name: str = "compute_score"
    reward_endpoint: str = ""
    reward_timeout_s: float = 60.0
    priority: str = ""
    seed: int = 0
    total_steps: int | None = None
    has_agent_loop: bool = False
    interaction_config: str = ""
    max_turns: int | None = None
    max_observations: int | None = None
    max_turn_length: int | None = None

    @property
    def turns(self) -> int:
        """Replies of the model in an episode."""
        given = [limit for limit in (self.max_turns, self.max_observations) if limit]
        return min(given, default=MAX_TURNS)


def settings_of(config: Mapping[str, Any]) -> tuple[TrainingSettings, list[str]]:
    """Return settings, and the paths of the keys that are not used.

    Raises:
        ConfigError: a value is of another kind or out of its range, or asks for what is not there.
    """
    values: dict[str, Any] = {}
    unused = []
    for path, value in _leaves(config):
        if path not in _KEYS:
            unused.append(path)
            continue
        name, read = _KEYS[path]
        if value is not None:
            read_value = read(path, value)
            # Any of its keys switches it on.
            values[name] = read_value or values.get(name, False) if name == "has_agent_loop" else read_value
    settings = TrainingSettings(**_kl(values), **_lora(values), **values)
    if settings.estimator in ("step_grpo", "gae") and settings.kl_place == "reward":
        raise ConfigError("use_kl_in_reward: the rewards of steps have none; use actor_rollout_ref.actor.use_kl_loss")
    if settings.estimator == "gae" and settings.lora is not None:
        raise ConfigError("lora: not with algorithm.adv_estimator=gae, whose critic is trained beside all weights")
    return settings, sorted(unused)


def _kl(values: dict[str, Any]) -> dict[str, Any]:
    """Take what ``values`` have about the distance from the first weights; return settings."""
    taken = {name: values.pop(name) for name in list(values) if name.startswith(("kl_", "use_kl_"))}
    in_loss, in_reward = taken.get("use_kl_loss", False), taken.get("use_kl_reward", False)
    if in_loss and in_reward:
        raise ConfigError("use_kl_loss and use_kl_in_reward: expected one of them, as there is one penalty")
    if not in_loss and not in_reward:
        return {}
    place = "loss" if in_loss else "reward"
    found = {"kl": taken.get(f"kl_{place}_coefficient", 0.001), "kl_place": place}
    if f"kl_{place}_estimator" in taken:
        found["kl_estimator"] = taken[f"kl_{place}_estimator"]
    if in_reward and taken.get("kl_type") == "adaptive":
        found |= {"kl_target": taken.get("kl_target", 0.1), "kl_horizon": taken.get("kl_horizon", 10_000.0)}
    return found


def _lora(values: dict[str, Any]) -> dict[str, Any]:
    """Take what ``values`` have about an adapter; return settings. With a rank of 0 there is none."""
    rank, alpha, layers = (values.pop(f"lora_{name}", None) for name in ("rank", "alpha", "layers"))
    if not rank:
        return {}
    return {"lora": {"rank": rank, **({} if alpha is None else {"alpha": alpha}), **(layers or {})}}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _whole(least: int) -> Callable[[str, Any], int]:
    def read(path: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{path}: expected an integer of at least {least}, not {value!r:.100}")
        return value

    return read


def _number(least: float, most: float = math.inf) -> Callable[[str, Any], float]:
    def read(path: str, value: Any) -> float:
        # YAML reads 1e-3 as a text.
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and least <= number <= most):
            limits = f"of at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
            raise ConfigError(f"{path}: expected a number {limits}, not {value!r:.100}")
        return number

    return read


def _text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{path}: expected a text, not {value!r:.100}")
    return value


def _truth(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: expected true or false, not {value!r:.100}")
    return value


def _estimator(path: str, value: Any) -> str:
    if not isinstance(value, str) or value not in ESTIMATORS:
        raise ConfigError(f"{path}: {value!r:.100} is not there; expected one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[value]


def _endpoint(path: str, value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise ConfigError(f"{path}: expected http://host:port, not {value!r:.100}")
    return value.rstrip("/")


def _interaction(path: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > INTERACTION_LIMIT:
        raise ConfigError(f"{path}: expected the text of a YAML file, of at most {INTERACTION_LIMIT} characters")
    return value


def _one_of(known: Mapping[str, str]) -> Callable[[str, Any], str]:
    def read(path: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ConfigError(f"{path}: expected one of {', '.join(known)}, not {value!r:.100}")
        return known[value]

    return read


read_band = _one_of({band.value: band.value for band in Band})
"""Reads the band of an engine. Raises ConfigError."""


def _layers(path: str, value: Any) -> dict[str, bool]:
    """Return which parts of the model are adapted: all linear layers of each or none."""
    names = [value] if isinstance(value, str) else value
    if names == ["all-linear"]:
        return {"attention": True, "mlp": True, "unembed": False}
    known = {name for group in LORA_LAYERS.values() for name in group}
    if not isinstance(names, list) or not names or not all(isinstance(each, str) and each in known for each in names):
        raise ConfigError(f"{path}: expected all-linear, or a list of {', '.join(sorted(known))}, not {value!r:.100}")
    found = {}
    for part, group in LORA_LAYERS.items():
        missing = [each for each in group if each not in names]
        found[part] = not missing
        if missing and len(missing) < len(group):
            raise ConfigError(f"{path}: {part} is adapted as a whole here: add {', '.join(missing)}, or leave it out")
    return found


_KEYS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "actor_rollout_ref.model.path": ("model", _text),
    "actor_rollout_ref.rollout.n": ("rollouts", _whole(1)),
    "actor_rollout_ref.actor.optim.lr": ("lr", _number(0)),
    "actor_rollout_ref.actor.optim.weight_decay": ("weight_decay", _number(0)),
    "actor_rollout_ref.actor.clip_ratio": ("clip_ratio", _number(0)),
    **{
        f"{place}.{key}": found
        for place, keys in {
            "actor_rollout_ref.actor": ("use_kl_loss", "kl_loss_coef", "kl_loss_type"),
            "algorithm": ("use_kl_in_reward", "kl_penalty", "kl_ctrl"),
            "kl": ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "use_kl_in_reward", "kl_penalty", "kl_ctrl"),
        }.items()
        for key, found in {
            "use_kl_loss": ("use_kl_loss", _truth),
            "kl_loss_coef": ("kl_loss_coefficient", _number(0)),
            "kl_loss_type": ("kl_loss_estimator", _one_of(KL_PENALTIES)),
            "use_kl_in_reward": ("use_kl_reward", _truth),
            "kl_penalty": ("kl_reward_estimator", _one_of(KL_PENALTIES)),
            "kl_ctrl.type": ("kl_type", _one_of({"fixed": "fixed", "adaptive": "adaptive"})),
            "kl_ctrl.kl_coef": ("kl_reward_coefficient", _number(0)),
            "kl_ctrl.target_kl": ("kl_target", _number(0)),
            "kl_ctrl.horizon": ("kl_horizon", _number(0)),
        }.items()
        if key.partition(".")[0] in keys
    },
    **{
        f"{place}.{prefix}{key}": found
        for place, prefix in (("lora", ""), ("lora", "lora_"), ("actor_rollout_ref.model", "lora_"))
        for key, found in {"rank": ("lora_rank", _whole(0)), "alpha": ("lora_alpha", _number(0))}.items()
    },
    "lora.target_modules": ("lora_layers", _layers),
    "actor_rollout_ref.model.target_modules": ("lora_layers", _layers),
    "algorithm.adv_estimator": ("estimator", _estimator),
    "algorithm.gamma": ("gamma", _number(0)),
    "algorithm.lam": ("lam", _number(0, 1)),
    "critic.cliprange_value": ("critic_clip", _number(0)),
    "critic.model.path": ("critic_model", _text),
    "critic.optim.lr": ("critic_lr", _number(0)),
    "custom_reward_function.path": ("reward_path", _text),
    "custom_reward_function.name": ("reward_name", _text),
    "custom_reward_function.endpoint": ("reward_endpoint", _endpoint),
    "custom_reward_function.timeout_s": ("reward_timeout_s", _number(0)),
    "data.max_prompt_length": ("max_prompt_length", _whole(1)),
    "data.max_response_length": ("max_response_length", _whole(1)),
    "fray.priority": ("priority", read_band),
    "trainer.seed": ("seed", _whole(0)),
    "trainer.total_training_steps": ("total_steps", _whole(1)),
    "enable_agent_loop": ("has_agent_loop", _truth),
    **{
        f"{place}.{key}": found
        for place in MULTI_TURN
        for key, found in {
            "enable": ("has_agent_loop", _truth),
            "interaction_config": ("interaction_config", _interaction),
            "interaction_config_content": ("interaction_config", _interaction),
            # 0 stands for no limit, as in OpenTinker.
            "max_assistant_turns": ("max_turns", _whole(0)),
            "max_user_turns": ("max_observations", _whole(0)),
            "max_tokens_per_turn": ("max_turn_length", _whole(1)),
        }.items()
    },
}
"""Paths that are read, and how."""
