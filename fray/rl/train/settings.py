"""Settings of a policy trainer: algorithm, optimizer and numbers, checked when they are written. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import Attribute, asdict, field, frozen
from attrs.converters import optional

from fray.model.text import near_text
from fray.rl.train.checks import ABOVE_0, BELOW_1, FROM_0, count, fail, flag, names_similar_arguments, number, one_of
from fray.rl.train.lora import LoRA

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce", "step_grpo", "gae")
"""Ways from rewards to advantages: functions of `fray.rl.core.advantages`."""
CRITIC_FOLDER = "critic"
"""Folder with the critic in that of a saved policy."""
LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "clip": ("low", "high"),
    "dual_clip": ("low", "high", "bound"),
    "gspo": ("low", "high"),
    "cispo": ("low", "high"),
    "importance_sampling": (),
    "dro": ("beta",),
    "cross_entropy": (),
}
"""Losses of `fray.rl.tensors.losses` and the names of their options."""
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length")
"""Ways in which tokens make one loss: `fray.rl.tensors.aggregation`."""
KL_ESTIMATORS = ("kl", "abs", "mse", "low_var_kl")
CORRECTION_LEVELS = ("token", "sequence", "geometric")
DTYPES = ("float32", "bfloat16")


@names_similar_arguments
@frozen
class KlPenalty:
    """Penalty for distance from a reference, the frozen model that training began with.

    Attributes:
        coefficient: weight of the divergence, above 0.
        estimator: one of `KL_ESTIMATORS`; see docs/rl-losses.md.
        place: ``loss`` adds the divergence to the loss, ``reward`` subtracts it from the rewards.
        target: divergence to keep to, nats per token, by adapting the coefficient; None: the coefficient is fixed.
        horizon: samples after which a divergence far from the target changes the coefficient by 20 %.
    """

    coefficient: float = field(default=0.001, validator=ABOVE_0)
    estimator: str = field(default="low_var_kl", validator=one_of(KL_ESTIMATORS))
    place: str = field(default="loss", validator=one_of(("loss", "reward")))
    target: float | None = field(default=None, validator=ABOVE_0)
    horizon: float = field(default=10_000, validator=ABOVE_0)


@names_similar_arguments
@frozen
class OffPolicyCorrection:
    """Weights of tokens that another engine or older weights have generated; see docs/rl-losses.md.

    Attributes:
        kind: ``truncate`` (TIS) bounds the weights, ``reject`` (MIS) leaves out the tokens beyond the bounds.
        level: one of `CORRECTION_LEVELS`.
        low: lowest ratio that ``reject`` keeps; `truncate` ignores it.
        high: highest weight, or highest ratio that ``reject`` keeps.
    """

    kind: str = field(default="truncate", validator=one_of(("truncate", "reject")))
    level: str = field(default="token", validator=one_of(CORRECTION_LEVELS))
    low: float = field(default=0.5, validator=FROM_0)
    high: float = field(default=2.0, validator=ABOVE_0)

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(
                f"invalid low={self.low} of OffPolicyCorrection: expected at most high, which is {self.high}"
            )


@names_similar_arguments
@frozen
class Critic:
    """Settings of a critic: a copy of the policy's model with a value head, trained beside it.

    Attributes:
        lr: learning rate of AdamW; its other numbers are those of the policy.
        clip: farthest that an update may move a value from where it was, in the loss.
        lam: weight of later steps in the advantages, from 0 to 1; see `fray.rl.core.advantages.gae`.

    Raises:
        ValueError: a value is out of its range.
    """

    lr: float = field(default=1e-5, validator=FROM_0)
    clip: float = field(default=0.5, validator=ABOVE_0, kw_only=True)
    lam: float = field(
        default=1.0, validator=number("a number from 0 to 1", lambda value: 0 <= value <= 1), kw_only=True
    )


def _as_kl(value: KlPenalty | float) -> KlPenalty:
    return value if isinstance(value, KlPenalty) else KlPenalty(value)


def _as_correction(value: OffPolicyCorrection | str) -> OffPolicyCorrection:
    return value if isinstance(value, OffPolicyCorrection) else OffPolicyCorrection(value)


def _as_critic(value: Critic | float) -> Critic:
    return value if isinstance(value, Critic) else Critic(value)


def _as_lora(value: LoRA | int) -> LoRA:
    return value if isinstance(value, LoRA) else LoRA(value)


def _check_loss(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not callable(value):
        one_of(LOSS_OPTIONS)(instance, attribute, value)


def _is_beta(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1


def _check_grad_clip(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None:
        number("a number above 0, or None", lambda norm: norm > 0)(instance, attribute, value)


def _check_betas(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not (isinstance(value, tuple) and len(value) == 2 and all(map(_is_beta, value))):
        raise fail(instance, attribute, value, "two numbers of 0 or more and below 1, such as (0.9, 0.95)")


@names_similar_arguments
@frozen
class GRPO:
    """Settings of policy gradient training with groups; by default those of GRPO with the means of DAPO.

    Attributes:
        groups: groups in a batch; a group is the samples of one task.
        group_size: samples of each task.
        steps: updates after which the run ends; None: as many as roll out each row of the data.
        lr: learning rate of AdamW, after the warm-up.
        warmup_steps: updates in which the learning rate rises linearly to ``lr``.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW, for all weights.
        grad_clip: highest norm of the gradient; None: no limit.
        advantage: one of `ADVANTAGES`. ``step_grpo`` takes rewards of turns from the key ``step_rewards``, and ``gae``
            too, where it is there; ``gae`` trains a critic.
        gamma: discount for each step of ``step_grpo``, and each token of ``gae``.
        critic: that of ``gae``, or its learning rate; None: its defaults.
        baseline_decay: of the moving average of rewards of ``reinforce``.
        loss: one of `LOSS_OPTIONS`, or a function (`fray.rl.tensors.losses.LossFunction`).
        clip_low: option ``low`` of the loss; None: its own default, 0.2 for ``clip``.
        clip_high: option ``high`` of the loss; None likewise.
        loss_options: the other options of the loss, such as ``{"bound": 3.0}``.
        aggregation: one of `AGGREGATIONS`.
        aggregation_length: tokens by which ``constant-length`` divides; required there.
        correction: off-policy correction, or its kind; None: none.
        old_logprobs: the policy that ratios refer to: ``rollout``, as the servers returned it, or ``trainer``, as it
            is before the update. None: ``trainer`` with a correction, which bridges the two, otherwise ``rollout``.
        kl: penalty, or its coefficient; None: no penalty and no reference model.
        minibatches: optimizer steps in an update, each with a part of the samples, drawn at random.
        micro_batch: sequences in one forward pass; None: all of a minibatch. It changes memory, not results.
        micro_batch_tokens: padded tokens in one forward pass, an upper limit beside ``micro_batch``; None: no limit.
        dtype: of the forward pass, one of `DTYPES`; weights, gradients and optimizer keep the type of the model,
            which is ``float32`` in a run.
        gradient_checkpointing: compute activations again in the backward pass, for less memory.
        lora: adapter that is trained instead of the model's weights, or its rank; None: all weights are trained.
        seed: of the order of minibatches.

    Raises:
        ValueError: a value is out of its range or an option does not belong to the loss; the message has its name,
            what was expected, and the nearest of the names.
    """

    groups: int = field(default=32, validator=count(1))
    group_size: int = field(default=16, validator=count(1))
    lr: float = field(default=1e-5, validator=FROM_0)
    steps: int | None = field(default=None, validator=count(1), kw_only=True)
    warmup_steps: int = field(default=0, validator=count(0), kw_only=True)
    betas: tuple[float, float] = field(default=(0.9, 0.95), converter=tuple, validator=_check_betas, kw_only=True)
    eps: float = field(default=1e-8, validator=ABOVE_0, kw_only=True)
    weight_decay: float = field(default=0.01, validator=FROM_0, kw_only=True)
    grad_clip: float | None = field(default=1.0, validator=_check_grad_clip, kw_only=True)
    advantage: str = field(default="grpo", validator=one_of(ADVANTAGES), kw_only=True)
    gamma: float = field(
        default=1.0, validator=number("a number above 0 and at most 1", lambda value: 0 < value <= 1), kw_only=True
    )
    critic: Critic | None = field(default=None, converter=optional(_as_critic), kw_only=True)
    baseline_decay: float = field(default=0.9, validator=BELOW_1, kw_only=True)
    loss: str | Callable[..., Any] = field(default="clip", validator=_check_loss, kw_only=True)
    clip_low: float | None = field(default=None, validator=FROM_0, kw_only=True)
    clip_high: float | None = field(default=None, validator=FROM_0, kw_only=True)
    loss_options: Mapping[str, Any] = field(factory=dict, kw_only=True)
    aggregation: str = field(default="token-mean", validator=one_of(AGGREGATIONS), kw_only=True)
    aggregation_length: int | None = field(default=None, validator=count(1), kw_only=True)
    correction: OffPolicyCorrection | None = field(default=None, converter=optional(_as_correction), kw_only=True)
    old_logprobs: str | None = field(default=None, kw_only=True)
    kl: KlPenalty | None = field(default=None, converter=optional(_as_kl), kw_only=True)
    minibatches: int = field(default=1, validator=count(1), kw_only=True)
    micro_batch: int | None = field(default=None, validator=count(1), kw_only=True)
    micro_batch_tokens: int | None = field(default=None, validator=count(1), kw_only=True)
    dtype: str = field(default="float32", validator=one_of(DTYPES), kw_only=True)
    gradient_checkpointing: bool = field(default=False, validator=flag, kw_only=True)
    lora: LoRA | None = field(default=None, converter=optional(_as_lora), kw_only=True)
    seed: int = field(default=0, validator=count(0), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.old_logprobs not in (None, "rollout", "trainer"):
            raise ValueError(f"invalid old_logprobs={self.old_logprobs!r} of GRPO: expected rollout, trainer or None")
        if self.correction is not None and self.old_logprobs == "rollout":
            raise ValueError(
                "old_logprobs='rollout' of GRPO leaves nothing to correct: with a correction, ratios refer to the "
                "trainer; expected old_logprobs='trainer', or None"
            )
        if (self.aggregation == "constant-length") != (self.aggregation_length is not None):
            raise ValueError(
                f"aggregation={self.aggregation!r} of GRPO with aggregation_length={self.aggregation_length}: "
                "'constant-length' needs a length, such as 1024, and the others take none"
            )
        if self.minibatches > self.batch_size:
            raise ValueError(
                f"invalid minibatches={self.minibatches} of GRPO: expected at most {self.batch_size}, "
                "the samples of a batch"
            )
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"invalid warmup_steps={self.warmup_steps} of GRPO: expected at most steps, {self.steps}")
        if self.kl is not None and self.kl.target is not None and self.batch_size >= 5 * self.kl.horizon:
            raise ValueError(
                f"invalid horizon={self.kl.horizon} of KlPenalty: expected more than a fifth of {self.batch_size}, the "
                "samples of a batch"
            )
        if self.kl is not None and self.kl.place == "reward" and self.advantage in ("step_grpo", "gae"):
            raise ValueError(f"place='reward' of KlPenalty with advantage={self.advantage!r}: expected place='loss'")
        if self.advantage != "gae" and self.critic is not None:
            raise ValueError(f"critic of GRPO with advantage={self.advantage!r}: it belongs to advantage='gae'")
        if self.advantage == "gae" and (self.lora is not None or self.loss == "cross_entropy"):
            name = "lora" if self.lora is not None else "loss='cross_entropy'"
            raise ValueError(f"{name} of GRPO with advantage='gae': a critic is trained beside all weights of a policy")
        self._check_loss_options()

    def _check_loss_options(self) -> None:
        if callable(self.loss):
            return
        known = LOSS_OPTIONS[self.loss]
        for name in self.options_of_loss:
            if name not in known:
                setting = f"clip_{name}" if name in ("low", "high") else f"loss_options[{name!r}]"
                raise ValueError(
                    f"{setting} of GRPO does not belong to loss {self.loss!r}; "
                    f"its options are {', '.join(known) or 'none'}{near_text(name, known)}"
                )

    @property
    def batch_size(self) -> int:
        """Return the samples in a batch."""
        return self.groups * self.group_size

    @property
    def critic_settings(self) -> Critic | None:
        """Return the settings of the critic; None: there is none."""
        return (self.critic or Critic()) if self.advantage == "gae" else None

    @property
    def options_of_loss(self) -> dict[str, Any]:
        """Return the options of the loss that are set, by their names there."""
        bounds = {"low": self.clip_low, "high": self.clip_high}
        return {name: value for name, value in bounds.items() if value is not None} | dict(self.loss_options)

    @property
    def ratio_refers_to(self) -> str:
        """Return ``rollout`` or ``trainer``: `old_logprobs`, or what follows from the correction."""
        return self.old_logprobs or ("trainer" if self.correction is not None else "rollout")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as lists, dicts, numbers and names, to be shown and saved; a function as its name."""
        values = asdict(self)
        if callable(self.loss):
            values["loss"] = getattr(self.loss, "__qualname__", repr(self.loss))
        return values
