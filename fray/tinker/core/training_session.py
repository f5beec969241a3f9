"""Order of the calls of a training job: what it has been given so far, and what is missing for a call."""

from __future__ import annotations

from typing import Any

from attrs import define, field

GENERATION_KEYS = ("temperature", "top_p", "top_k", "max_new_tokens", "repetition_penalty")
ACTOR_FOLDER = "actor"
"""Folder of a checkpoint with model and tokenizer: the ``actor_path`` of `save_checkpoint`."""
EFFECTS = {
    "set_generation_config": True,
    "upload_reward_function": True,
    "set_config": True,
    "override_config": True,
    "init_workers": True,
    "resume": True,
    "train_step": True,
    "validate": False,
    "save_checkpoint": False,
}
"""Operations of a training job, and whether what follows depends on them."""


class OutOfOrder(Exception):
    """Call before what it needs, or after what it had to precede; the message says what is missing."""


def merged(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with values replaced; keys may be paths (``data.max_prompt_length``)."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for key, value in overrides.items():
        head, _, rest = key.partition(".")
        if rest:
            value = {rest: value}
        before = result.get(head)
        result[head] = merged(before if isinstance(before, dict) else {}, value) if isinstance(value, dict) else value
    return result


@define
class TrainingSession:
    """State of a training job beside weights and optimizer; it is saved with each snapshot.

    Attributes:
        config: configuration of the job and what was set since.
        generation: generation settings that were set.
        reward_name: name of the uploaded reward function; empty: none.
        reward_source: its source.
        is_configured: `set_config` was called.
        total_steps: of `init_workers`; None before it.
        global_steps: training steps done.
        seed: of sampling, from the checkpoint that it resumed; None: that of the configuration.
    """

    config: dict[str, Any] = field(factory=dict)
    generation: dict[str, Any] = field(factory=dict)
    reward_name: str = ""
    reward_source: str = ""
    is_configured: bool = False
    total_steps: int | None = None
    global_steps: int = 0
    seed: int | None = None

    @property
    def is_initialized(self) -> bool:
        return self.total_steps is not None

    def check(self, operation: str) -> None:
        """Check that an operation may come now.

        Raises:
            OutOfOrder: the message has what is missing.
        """
        if operation in ("set_config", "override_config") and self.is_initialized:
            raise OutOfOrder(f"{operation} comes before init_workers, and the workers are already initialized")
        if operation == "init_workers":
            if self.is_initialized:
                raise OutOfOrder("the workers are already initialized: init_workers is called once")
            if not self.is_configured:
                raise OutOfOrder("init_workers needs the configuration first: POST set_config {config_overrides}")
        if operation in ("resume", "train_step", "validate", "save_checkpoint") and not self.is_initialized:
            missing = [] if self.is_configured else ["POST set_config {config_overrides}"]
            missing.append("POST init_workers {total_steps}")
            raise OutOfOrder(f"{operation} needs the workers first: {', then '.join(missing)}")
