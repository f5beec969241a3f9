"""Settings of a trainer: defaults, and errors that name the setting and what was expected."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from fray.rl.train.lora import LoRA
from fray.rl.train.settings import GRPO, KlPenalty, OffPolicyCorrection


def test_the_defaults_are_those_of_grpo_with_token_means() -> None:
    settings = GRPO(groups=32, group_size=16, lr=1e-3, steps=200)
    assert settings.batch_size == 512
    assert (settings.advantage, settings.loss, settings.aggregation) == ("grpo", "clip", "token-mean")
    assert settings.options_of_loss == {}
    assert settings.ratio_refers_to == "rollout"
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert json.loads(json.dumps(settings.as_dict()))["betas"] == [0.9, 0.95]


def test_short_forms_become_the_settings_that_they_mean() -> None:
    settings = GRPO(kl=0.02, correction="reject", clip_high=0.28)
    assert settings.kl == KlPenalty(0.02)
    assert settings.correction == OffPolicyCorrection("reject")
    assert settings.options_of_loss == {"high": 0.28}
    assert settings.ratio_refers_to == "trainer"


def test_a_loss_of_the_user_takes_any_option() -> None:
    def focal(inputs: Any, *, gamma: float) -> Any: ...

    settings = GRPO(loss=focal, loss_options={"gamma": 2.0})
    assert settings.options_of_loss == {"gamma": 2.0}
    assert settings.as_dict()["loss"].endswith("focal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 0}, "invalid groups=0 of GRPO: expected a whole number of 1 or more"),
        ({"group_size": 1.5}, "invalid group_size=1.5 of GRPO: expected a whole number"),
        ({"lr": float("nan")}, "invalid lr=nan of GRPO: expected a number of 0 or more"),
        ({"lr": "1e-5"}, "invalid lr='1e-5' of GRPO: expected a number"),
        ({"steps": True}, "invalid steps=True of GRPO: expected a whole number"),
        ({"betas": (0.9, 1)}, r"invalid betas=\(0.9, 1\) of GRPO: expected two numbers"),
        ({"advantage": "rlo"}, "invalid advantage='rlo' of GRPO: expected one of .*; did you mean rloo"),
        ({"loss": "clipp"}, "invalid loss='clipp' of GRPO: expected one of .*; did you mean clip"),
        ({"aggregation": "token_mean"}, "did you mean token-mean"),
        ({"dtype": "float16"}, "invalid dtype='float16' of GRPO: expected one of float32, bfloat16"),
        ({"grad_clip": 0}, "invalid grad_clip=0 of GRPO: expected a number above 0, or None"),
        ({"grad_clip": "1"}, "invalid grad_clip='1' of GRPO: expected a number above 0, or None"),
        ({"betas": ("a", "b")}, r"invalid betas=\('a', 'b'\) of GRPO: expected two numbers"),
        ({"gradient_checkpointing": "no"}, "invalid gradient_checkpointing='no' of GRPO: expected True or False"),
        ({"gamma": 0}, "invalid gamma=0 of GRPO"),
        ({"clip_low": 0.1, "loss": "dro"}, "clip_low of GRPO does not belong to loss 'dro'; its options are beta"),
        ({"loss_options": {"bond": 3}, "loss": "dual_clip"}, r"loss_options\['bond'\] of GRPO .* did you mean bound"),
        ({"aggregation": "constant-length"}, "'constant-length' needs a length, such as 1024"),
        ({"aggregation_length": 8}, "the others take none"),
        ({"old_logprobs": "server"}, "expected rollout, trainer or None"),
        ({"old_logprobs": "rollout", "correction": "truncate"}, "leaves nothing to correct"),
        ({"correction": "tis"}, "invalid kind='tis' of OffPolicyCorrection: expected one of truncate, reject"),
        ({"kl": 0}, "invalid coefficient=0 of KlPenalty: expected a number above 0"),
        ({"minibatches": 5, "groups": 1, "group_size": 4}, "expected at most 4, the samples of a batch"),
        ({"steps": 3, "warmup_steps": 4}, "invalid warmup_steps=4 of GRPO: expected at most steps, 3"),
        (
            {"kl": KlPenalty(target=1.0, horizon=100)},
            "invalid horizon=100 of KlPenalty: expected more than a fifth of 512",
        ),
        ({"kl": KlPenalty(place="reward"), "advantage": "step_grpo"}, "expected place='loss'"),
        ({"micro_batch": 0}, "invalid micro_batch=0 of GRPO"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPO(**arguments)


def test_bounds_of_a_correction_are_in_order() -> None:
    with pytest.raises(ValueError, match="invalid low=3 of OffPolicyCorrection: expected at most high, which is 2"):
        OffPolicyCorrection("reject", low=3)


def test_an_argument_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"GRPO has no argument 'group'; did you mean groups\?"):
        GRPO(group=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"KlPenalty has no argument 'coef'$"):
        KlPenalty(coef=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="invalid mlp=1 of LoRA: expected True or False"):
        LoRA(mlp=1)  # type: ignore[arg-type]
