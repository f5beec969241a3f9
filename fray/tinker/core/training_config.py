"""Configuration of OpenTinker's clients: the keys that are used, checked, and those that are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import frozen

ESTIMATORS = {"grpo": "grpo", "grpo_per_step": "step_grpo", "gae": "gae"}
"""Values of ``algorithm.adv_estimator``, and the advantages of `fray.rl` that they are."""

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
        kl: coefficient of the penalty in the loss; None: none.
        reward_endpoint: URL of a reward server; empty: none.
        reward_timeout_s: for the rewards of one batch.
        seed: of sampling.
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
    reward_endpoint: str = ""
    reward_timeout_s: float = 60.0
    seed: int = 0
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
    if not values.pop("use_kl", False):
        values.pop("kl", None)
    else:
        values.setdefault("kl", 0.001)
    return TrainingSettings(**values), sorted(unused)


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


_KEYS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "actor_rollout_ref.model.path": ("model", _text),
    "actor_rollout_ref.rollout.n": ("rollouts", _whole(1)),
    "actor_rollout_ref.actor.optim.lr": ("lr", _number(0)),
    "actor_rollout_ref.actor.optim.weight_decay": ("weight_decay", _number(0)),
    "actor_rollout_ref.actor.clip_ratio": ("clip_ratio", _number(0)),
    "actor_rollout_ref.actor.use_kl_loss": ("use_kl", _truth),
    "actor_rollout_ref.actor.kl_loss_coef": ("kl", _number(0)),
    "algorithm.adv_estimator": ("estimator", _estimator),
    "algorithm.gamma": ("gamma", _number(0)),
    "algorithm.lam": ("lam", _number(0, 1)),
    "critic.cliprange_value": ("critic_clip", _number(0)),
    "critic.model.path": ("critic_model", _text),
    "critic.optim.lr": ("critic_lr", _number(0)),
    "custom_reward_function.endpoint": ("reward_endpoint", _endpoint),
    "custom_reward_function.timeout_s": ("reward_timeout_s", _number(0)),
    "data.max_prompt_length": ("max_prompt_length", _whole(1)),
    "data.max_response_length": ("max_response_length", _whole(1)),
    "trainer.seed": ("seed", _whole(0)),
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
