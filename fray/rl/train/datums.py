"""Training data of a service: tokens, targets, and numbers for each of them; losses by name with their settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from fray.model.text import near_text
from fray.rl.train.checks import FROM_0, number

SERVICE_LOSSES: dict[str, tuple[str, dict[str, float]]] = {
    "cross_entropy": ("cross_entropy", {}),
    "importance_sampling": ("importance_sampling", {}),
    "ppo": ("clip", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "gspo": ("gspo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "dro": ("dro", {"beta": 0.05}),
}
"""Name in requests: loss of `fray.rl.tensors.losses`, and its settings with their defaults."""

_BELOW_1 = number("a number of 0 or more and below 1", lambda value: 0 <= value < 1)


@frozen
class AdamParams:
    """Settings of one step of AdamW.

    Attributes:
        learning_rate: of the step.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the squares.
        weight_decay: share of the weights, times the learning rate, that is subtracted.
        grad_clip_norm: highest norm of the gradient; 0: no limit.

    Raises:
        ValueError: a value is out of its range.
    """

    learning_rate: float = field(default=1e-4, validator=FROM_0)
    beta1: float = field(default=0.9, validator=_BELOW_1)
    beta2: float = field(default=0.95, validator=_BELOW_1)
    eps: float = field(default=1e-12, validator=FROM_0)
    weight_decay: float = field(default=0.0, validator=FROM_0)
    grad_clip_norm: float = field(default=0.0, validator=FROM_0)


@frozen
class ServiceLoss:
    """A loss by its name in requests.

    Attributes:
        name: one of `SERVICE_LOSSES`.
        config: its settings; the others have their defaults.

    Raises:
        ValueError: the name or a setting is unknown, or the value of a setting is not finite.
    """

    name: str
    config: Mapping[str, float] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.name not in SERVICE_LOSSES:
            expected = ", ".join(SERVICE_LOSSES)
            raise ValueError(
                f"unknown loss {self.name!r}{near_text(self.name, SERVICE_LOSSES)}; expected one of {expected}"
            )
        known = SERVICE_LOSSES[self.name][1]
        for key, value in self.config.items():
            if key not in known:
                expected = ", ".join(known) or "none"
                raise ValueError(
                    f"unknown setting {key!r} of loss {self.name!r}{near_text(key, known)}; it has {expected}"
                )
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"setting {key!r} of loss {self.name!r} is {value!r}; expected a finite number")

    @property
    def options(self) -> dict[str, float]:
        """Return the options of the loss in `fray.rl.tensors.losses`: bounds are distances from 1 there."""
        values = {**SERVICE_LOSSES[self.name][1], **self.config}
        if "clip_low_threshold" in values:
            return {"low": 1.0 - values["clip_low_threshold"], "high": values["clip_high_threshold"] - 1.0}
        return values

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the columns that data must have."""
        return ("weights",) if self.name == "cross_entropy" else ("logprobs", "advantages")


@frozen
class Datum:
    """One sequence to train on.

    Attributes:
        tokens: of the input.
        targets: token that is to follow each of them; as many.
        columns: numbers for each target: ``weights``, or ``logprobs`` of the sampler and ``advantages``.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    columns: Mapping[str, Sequence[float]] = field(factory=dict)


def check_data(data: Sequence[Datum], loss: ServiceLoss, *, vocabulary_size: int, max_length: int) -> None:
    """Check a request's data.

    Raises:
        ValueError: there is none, a length differs, a token is outside the vocabulary, or a number is not finite; the
            message has the datum and the position.
    """
    if not data:
        raise ValueError("data is empty: expected at least one datum")
    for index, datum in enumerate(data):
        length = len(datum.tokens)
        if not 1 <= length <= max_length:
            raise ValueError(f"data[{index}]: {length} input tokens; the model takes 1 to {max_length}")
        if len(datum.targets) != length:
            raise ValueError(
                f"data[{index}]: target_tokens has {len(datum.targets)} tokens, but the input has {length}"
            )
        for name, tokens in (("model_input", datum.tokens), ("target_tokens", datum.targets)):
            for position, token in enumerate(tokens):
                if not 0 <= token < vocabulary_size:
                    raise ValueError(
                        f"data[{index}]: token {token} at position {position} of {name} is outside the vocabulary of "
                        f"{vocabulary_size} tokens"
                    )
        for name in loss.needs:
            if name not in datum.columns:
                raise ValueError(f"data[{index}]: loss {loss.name!r} needs {name}; it has {_listed(datum.columns)}")
            values = datum.columns[name]
            if len(values) != length:
                raise ValueError(f"data[{index}]: {name} has {len(values)} numbers, but target_tokens has {length}")
            for position, value in enumerate(values):
                if not math.isfinite(value):
                    raise ValueError(
                        f"data[{index}]: {name} at position {position} is {value}; expected a finite number"
                    )


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none of these"
