"""Settings of an inference job: what of a request is used, and what is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from fray.tinker.core.training_config import ConfigError, read_band

_WITHOUT_EFFECT: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.9,
    "trust_remote_code": False,
}
"""Fields that change nothing here, with the values that clients send by default."""


@frozen
class InferenceSettings:
    """Settings of an inference job.

    Attributes:
        model_path: as the client named it: a served model, or the directory of a checkpoint.
        max_model_len: tokens of a prompt and a completion together; None: those of the model.
        priority: band of its engine; empty: the default of its user.
        not_used: names of the fields that have no effect.
    """

    model_path: str
    max_model_len: int | None = None
    priority: str = ""
    not_used: tuple[str, ...] = ()


def inference_settings_of(config: Mapping[str, Any]) -> InferenceSettings:
    """Return the settings of a job.

    Args:
        config: the fields of the request, without those that are null.

    Raises:
        ConfigError: a value is out of its range.
    """
    for name in ("tensor_parallel_size", "max_model_len"):
        least = 2 if name == "max_model_len" else 1
        if name in config and config[name] < least:
            raise ConfigError(f"{name}: {config[name]}; expected an integer of at least {least}")
    if not 0 < config.get("gpu_memory_utilization", 0.9) <= 1:
        raise ConfigError(f"gpu_memory_utilization: {config['gpu_memory_utilization']}; expected above 0, at most 1")
    priority = config.get("priority")
    if priority:
        read_band("priority", priority)
    used = {"model_path", "max_model_len", "num_gpus", "priority"}
    defaults = {**_WITHOUT_EFFECT, "tokenizer_path": config["model_path"]}
    changed = {name for name, value in config.items() if name not in defaults or value != defaults[name]}
    not_used = tuple(sorted(changed - used))
    return InferenceSettings(config["model_path"], config.get("max_model_len"), priority or "", not_used)
