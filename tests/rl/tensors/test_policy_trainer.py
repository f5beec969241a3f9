"""The trainer: one update against a slow reference, micro batches, corrections, penalties, what is not applied."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

from trainer_cases import (  # noqa: E402
    VOCABULARY,
    furthest,
    slow_gradients,
    tiny_model,
    token_logprobs,
    trajectories_of,
    weights_of,
)

from fray.rl.core.advantages import grpo  # noqa: E402
from fray.rl.nexrl_types import Batch  # noqa: E402
from fray.rl.tensors import aggregation, corrections, flat_weights, kl, losses  # noqa: E402
from fray.rl.tensors.policy_trainer import PolicyTrainer  # noqa: E402
from fray.rl.train import settings as names  # noqa: E402
from fray.rl.train.errors import NonFiniteUpdatesError  # noqa: E402
from fray.rl.train.settings import GRPO, KlPenalty, OffPolicyCorrection  # noqa: E402

pytestmark = pytest.mark.torch

PLAIN_STEP: dict[str, Any] = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0, "grad_clip": None}
"""Settings with which a first step of AdamW is ``g / (|g| + 1)``: smooth, not the sign of a gradient."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def stepped(before: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    """Return the weights after the first step of AdamW with `PLAIN_STEP`."""
    return {name: value - gradients[name] / (gradients[name].abs() + 1) for name, value in before.items()}


def advantages_of(trajectories: list[dict[str, Any]]) -> list[float]:
    return grpo([each["reward"] for each in trajectories], [each["group_id"] for each in trajectories])


def test_settings_name_the_losses_and_options_that_there_are() -> None:
    options = {
        name: tuple(
            parameter.name for parameter in inspect.signature(function).parameters.values() if parameter.kind == 3
        )
        for name, function in losses.LOSSES.items()
    }
    assert options == names.LOSS_OPTIONS
    assert aggregation.AGGREGATIONS == names.AGGREGATIONS
    assert tuple(kl.ESTIMATORS) == names.KL_ESTIMATORS
    assert corrections.LEVELS == names.CORRECTION_LEVELS


@pytest.mark.parametrize(
    ("choices", "options"),
    [
        ({}, {}),
        ({"clip_high": 0.05}, {"high": 0.05}),
        ({"aggregation": "seq-mean-token-mean"}, {"aggregation": "seq-mean-token-mean"}),
        ({"aggregation": "seq-mean-token-sum"}, {"aggregation": "seq-mean-token-sum"}),
        ({"aggregation": "constant-length", "aggregation_length": 8}, {"aggregation": "constant-length", "length": 8}),
        ({"correction": OffPolicyCorrection("truncate", high=1.1)}, {"truncate": 1.1}),
        ({"correction": OffPolicyCorrection("reject", low=0.85, high=1.2)}, {"reject": (0.85, 1.2)}),
        (
            {
                "correction": OffPolicyCorrection("reject", low=0.85, high=1.2),
                "aggregation": "seq-mean-token-mean",
                "micro_batch": 3,
            },
            {"reject": (0.85, 1.2), "aggregation": "seq-mean-token-mean"},
        ),
        ({"kl": KlPenalty(0.5, "mse")}, {"kl": 0.5}),
        ({"kl": KlPenalty(0.5, "mse"), "micro_batch": 2}, {"kl": 0.5}),
    ],
)
def test_an_update_is_that_of_the_slow_reference(choices: dict[str, Any], options: dict[str, Any]) -> None:
    lm, slow = tiny_model(), tiny_model()
    trainer = PolicyTrainer(lm, GRPO(**PLAIN_STEP, **choices))
    trajectories = trajectories_of(lm, 12)
    if "kl" in options:
        # Away from the reference, where the gradient of the penalty is not zero.
        options = {**options, "reference": tiny_model()}
        with torch.no_grad():
            for model in (lm, slow):
                model.model.lm_head.weight.add_(
                    torch.linspace(-0.3, 0.3, model.model.lm_head.weight.numel()).view_as(model.model.lm_head.weight)
                )
    before = weights_of(lm)
    metrics = trainer.update(trajectories)
    expected = stepped(before, slow_gradients(slow, trajectories, advantages_of(trajectories), options))
    assert metrics["updated"] == 1
    assert furthest(before, expected) > 1e-3
    assert furthest(weights_of(lm), expected) < 1e-6


@settings(max_examples=40)
@given(
    count=st.integers(1, 9),
    micro_batch=st.none() | st.integers(1, 4),
    tokens=st.none() | st.integers(1, 40),
    kind=st.sampled_from(names.AGGREGATIONS),
    correction=st.sampled_from([None, "truncate", "reject"]),
    seed=st.integers(0, 9),
)
def test_gradients_of_micro_batches_add_up_to_those_of_one_batch(
    count: int, micro_batch: int | None, tokens: int | None, kind: str, correction: str | None, seed: int
) -> None:
    options: dict[str, Any] = {"aggregation": kind, "correction": correction, "kl": KlPenalty(0.1, "mse")}
    options["aggregation_length"] = 16 if kind == "constant-length" else None
    one, parts = tiny_model(), tiny_model()
    trajectories = trajectories_of(one, count, seed=seed, noise=0.8)
    whole = PolicyTrainer(one, GRPO(**PLAIN_STEP, **options))
    split = PolicyTrainer(parts, GRPO(**PLAIN_STEP, **options, micro_batch=micro_batch, micro_batch_tokens=tokens))
    of_whole, of_parts = whole.update(trajectories), split.update(trajectories)
    assert furthest(weights_of(one), weights_of(parts)) < 1e-6
    for name in set(of_whole) - {"seconds", "tokens_per_s"}:
        assert of_parts[name] == pytest.approx(of_whole[name], rel=1e-5, abs=1e-6), name
    assert set(of_whole) == set(of_parts)


def test_on_policy_the_ratio_is_one_and_the_mismatch_zero() -> None:
    lm = tiny_model(dtype="float32")
    trajectories = trajectories_of(lm, noise=0.0)
    metrics = PolicyTrainer(lm, GRPO(lr=1e-3)).update(trajectories)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["mismatch_k3"] < 1e-10
    assert metrics["clip_fraction"] == 0
    assert 0 < metrics["entropy"] <= math.log(VOCABULARY)
    assert metrics["reward_mean"] == pytest.approx(sum(each["reward"] for each in trajectories) / 8)
    assert metrics["tokens"] == sum(len(each["tokens"]) for each in trajectories)
    assert metrics["response_tokens_mean"] == pytest.approx(sum(sum(each["loss_mask"]) for each in trajectories) / 8)


def test_logprobs_are_those_of_each_sequence_alone() -> None:
    lm = tiny_model()
    trajectories = trajectories_of(lm, noise=0.0)
    scored = PolicyTrainer(lm, GRPO(micro_batch=3)).logprobs(trajectories)
    for trajectory, logprobs in zip(trajectories, scored, strict=True):
        assert logprobs == pytest.approx(trajectory["logprobs"], abs=1e-6)


def test_with_the_trainer_as_the_old_policy_the_mismatch_is_still_that_of_the_rollout() -> None:
    one, parts = tiny_model(), tiny_model()
    trajectories = trajectories_of(one)
    in_one = PolicyTrainer(one, GRPO(old_logprobs="trainer")).update(trajectories)
    in_parts = PolicyTrainer(parts, GRPO(old_logprobs="trainer", micro_batch=2)).update(trajectories)
    expected = []
    for trajectory in trajectories:
        exact = [0.0, *token_logprobs(tiny_model().model, trajectory["tokens"]).tolist()]
        gaps = [a - b for a, b, m in zip(exact, trajectory["logprobs"], trajectory["loss_mask"], strict=True) if m]
        expected += [math.expm1(gap) - gap for gap in gaps]
    for metrics in (in_one, in_parts):
        assert metrics["mismatch_k3"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
        assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)


def test_each_minibatch_is_an_optimizer_step_and_each_sample_is_in_one() -> None:
    lm = tiny_model()
    seen: list[int] = []

    def recording(inputs: losses.LossInputs) -> losses.TokenLosses:
        seen.append(len(inputs.mask))
        return losses.clip(inputs)

    trainer = PolicyTrainer(lm, GRPO(groups=2, group_size=5, minibatches=3, loss=recording, lr=1e-3))
    metrics = trainer.update(trajectories_of(lm, 10))
    assert seen == [4, 3, 3]
    steps = {state["step"].item() for state in trainer._optimizer.state.values()}
    assert steps == {3}
    assert metrics["updates"] == 1


def test_rows_of_padding_weigh_nothing() -> None:
    plain, padded = tiny_model(), tiny_model()
    trajectories = trajectories_of(plain, 5)
    batch = Batch.from_trajectories(trajectories).pad_to_world_size(4)
    assert len(batch) == 8
    one, other = PolicyTrainer(plain, GRPO()), PolicyTrainer(padded, GRPO())
    of_rows, of_batch = one.update(trajectories), other.update(batch)
    assert of_batch["reward_mean"] == of_rows["reward_mean"]
    assert of_batch["trajectories"] == 5
    assert furthest(weights_of(plain), weights_of(padded)) == 0


def test_equal_rewards_change_nothing_and_are_counted() -> None:
    lm = tiny_model()
    before = weights_of(lm)
    trainer = PolicyTrainer(lm, GRPO(weight_decay=0.5))
    trajectories = [{**each, "reward": 0.3} for each in trajectories_of(lm)]
    metrics = trainer.update(trajectories)
    assert (metrics["updated"], metrics["skipped"], metrics["zero_advantages"]) == (0, 1, 1)
    assert (trainer.updates, trainer.skipped) == (0, 1)
    assert furthest(before, weights_of(lm)) == 0
    trainer.update(trajectories_of(lm))
    assert (trainer.updates, trainer.skipped) == (1, 1)


def test_a_batch_of_which_the_correction_leaves_nothing_is_skipped() -> None:
    for micro_batch in (None, 2):
        lm = tiny_model()
        before = weights_of(lm)
        correction = OffPolicyCorrection("reject", low=50.0, high=60.0)
        metrics = PolicyTrainer(lm, GRPO(correction=correction, micro_batch=micro_batch)).update(trajectories_of(lm))
        assert (metrics["updated"], metrics["skipped"], metrics["rollout_rejected_fraction"]) == (0, 1, 1)
        assert furthest(before, weights_of(lm)) == 0


def nan_after(calls: int) -> Any:
    """Return a loss that is not a number after so many calls."""
    count = 0

    def loss(inputs: losses.LossInputs) -> losses.TokenLosses:
        nonlocal count
        count += 1
        token_losses, metrics = losses.clip(inputs)
        return (token_losses * math.nan if count > calls else token_losses), metrics

    return loss


@pytest.mark.parametrize("minibatches", [1, 4])
def test_an_update_that_is_not_finite_changes_neither_weights_nor_optimizer(minibatches: int, tmp_path: Path) -> None:
    lm = tiny_model()
    # The first update succeeds; the second fails in its last minibatch, after steps that must be undone.
    loss = nan_after(2 * minibatches - 1)
    trainer = PolicyTrainer(lm, GRPO(lr=1e-2, loss=loss, minibatches=minibatches), dump_directory=tmp_path)
    trajectories = trajectories_of(lm)
    assert trainer.update(trajectories)["updated"] == 1
    before, moments = weights_of(lm), trainer._optimizer.state_dict()["state"]
    moments = {index: {name: value.clone() for name, value in state.items()} for index, state in moments.items()}
    metrics = trainer.update(trajectories)
    assert (metrics["updated"], metrics["not_finite"]) == (0, 1)
    assert furthest(before, weights_of(lm)) == 0
    for index, state in trainer._optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments[index][name]) for name, value in state.items())
    trainer.update(trajectories)
    with pytest.raises(
        NonFiniteUpdatesError, match=r"not finite in 3 updates in a row.*those after 1 updates"
    ) as raised:
        trainer.update(trajectories)
    path = tmp_path / "not_finite_batch.jsonl"
    assert str(path) in str(raised.value)
    assert [json.loads(line) for line in path.read_text().splitlines()] == trajectories
    assert furthest(before, weights_of(lm)) == 0


def test_a_gradient_that_is_not_finite_is_found_although_the_loss_is_finite() -> None:
    lm = tiny_model()
    before = weights_of(lm)

    def steep(inputs: losses.LossInputs) -> losses.TokenLosses:
        return torch.sqrt((inputs.logprobs - inputs.logprobs.detach()).abs()), {}

    metrics = PolicyTrainer(lm, GRPO(loss=steep)).update(trajectories_of(lm))
    assert metrics["loss"] == 0
    assert metrics["not_finite"] == 1
    assert furthest(before, weights_of(lm)) == 0


def test_a_success_between_failures_starts_the_count_again(tmp_path: Path) -> None:
    lm = tiny_model()
    trainer = PolicyTrainer(lm, GRPO(loss=nan_after(0)), dump_directory=tmp_path)
    good = PolicyTrainer(lm, GRPO()).settings
    trajectories = trajectories_of(lm)
    for _ in range(2):
        for _ in range(2):
            trainer.settings = GRPO(loss=nan_after(0))
            assert trainer.update(trajectories)["not_finite"] == 1
        trainer.settings = good
        assert trainer.update(trajectories)["updated"] == 1
    assert (trainer.updates, trainer.not_finite) == (2, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [0]}, r"trajectory 1 \(task_id 't0', group_id 'g0', run_id 1\): loss_mask has 1 numbers"),
        ({"reward": math.nan}, "trajectory 1 .*: reward is nan: expected a finite number"),
        (
            {"tokens": [0, VOCABULARY], "loss_mask": [0, 1], "logprobs": [0, -1]},
            r"trajectory 1 .*: tokens\[1\] is 15: expected 0 to 14",
        ),
        (
            {"tokens": [0] * 257, "loss_mask": [0] + [1] * 256, "logprobs": [-1.0] * 257},
            "257 tokens, but the model takes at most 256",
        ),
    ],
)
def test_an_invalid_trajectory_is_named_and_nothing_is_trained(change: dict[str, Any], message: str) -> None:
    lm = tiny_model()
    before = weights_of(lm)
    trajectories = trajectories_of(lm)
    trajectories[1] |= change
    with pytest.raises(ValueError, match=message):
        PolicyTrainer(lm, GRPO()).update(trajectories)
    assert furthest(before, weights_of(lm)) == 0
    with pytest.raises(ValueError, match="no trajectories to train on"):
        PolicyTrainer(lm, GRPO()).update([])


def test_the_penalty_in_the_reward_lowers_the_reward_by_the_divergence_of_all_tokens() -> None:
    lm, slow = tiny_model(), tiny_model()
    trainer = PolicyTrainer(lm, GRPO(**PLAIN_STEP, kl=KlPenalty(0.3, "kl", "reward")))
    reference = tiny_model()
    with torch.no_grad():
        for model in (lm, slow):
            model.model.lm_head.weight[3] += 0.4
    trajectories = trajectories_of(lm, 12)
    before = weights_of(lm)
    metrics = trainer.update(trajectories)
    penalized, divergences = [], []
    for trajectory in trajectories:
        exact = [0.0, *token_logprobs(reference.model, trajectory["tokens"]).tolist()]
        gaps = [a - b for a, b, m in zip(trajectory["logprobs"], exact, trajectory["loss_mask"], strict=True) if m]
        penalized.append(trajectory["reward"] - 0.3 * sum(gaps))
        divergences += gaps
    expected = slow_gradients(slow, trajectories, grpo(penalized, [each["group_id"] for each in trajectories]), {})
    assert furthest(weights_of(lm), stepped(before, expected)) < 1e-6
    assert metrics["kl"] == pytest.approx(sum(divergences) / len(divergences), abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_an_update_with_the_reference_in_another_process_is_that_with_it_beside(
    dtype: str, place: str, micro_batch: int | None
) -> None:
    settings = GRPO(2, 4, lr=1e-2, dtype=dtype, micro_batch=micro_batch, kl=KlPenalty(0.5, "kl", place))
    asked: list[int] = []

    def ask(ids: Any, mask: Any) -> Any:
        asked.append(len(ids))
        return elsewhere.logprobs(ids, mask)

    elsewhere = kl.FrozenModel(tiny_model(dtype="float32").model, dtype)
    found = []
    for reference in (None, kl.remote_reference(ask)):
        lm = tiny_model(dtype="float32")
        trainer = PolicyTrainer(lm, settings, clock=lambda: 0.0, reference=reference)
        metrics = [trainer.update(trajectories_of(lm, seed=seed)) for seed in range(3)]
        found.append((metrics, trainer.reference_logprobs(trajectories_of(lm)), weights_of(lm)))
    (beside, logprobs, weights), (remote, its_logprobs, its_weights) = found
    assert remote == beside
    assert remote[-1]["kl"] != 0
    assert its_logprobs == logprobs
    assert furthest(its_weights, weights) == 0
    assert asked == ([8] * 4 if micro_batch is None else [3, 3, 2] * 4)


def test_an_adaptive_penalty_grows_while_the_policy_is_far_from_the_reference() -> None:
    lm = tiny_model()
    trainer = PolicyTrainer(lm, GRPO(2, 4, lr=1e-2, kl=KlPenalty(0.1, "low_var_kl", target=1e-4, horizon=100)))
    with torch.no_grad():
        lm.model.lm_head.weight[3] += 0.4
    used = [trainer.update(trajectories_of(lm, seed=seed))["kl_coefficient"] for seed in range(3)]
    assert used == pytest.approx([0.1, 0.1 * 1.016, 0.1 * 1.016**2])


def test_the_learning_rate_rises_during_the_warm_up() -> None:
    lm = tiny_model()
    trainer = PolicyTrainer(lm, GRPO(lr=0.4, warmup_steps=4))
    rates = [trainer.update(trajectories_of(lm, seed=seed))["lr"] for seed in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_the_gradient_is_clipped_to_its_limit() -> None:
    trajectories = trajectories_of(tiny_model())
    free, clipped = tiny_model(), tiny_model()
    norm = PolicyTrainer(free, GRPO(grad_clip=None)).update(trajectories)["grad_norm"]
    clipping = GRPO(**{**PLAIN_STEP, "grad_clip": norm / 10})
    before = weights_of(clipped)
    assert PolicyTrainer(clipped, clipping).update(trajectories)["grad_norm"] == pytest.approx(norm)
    slow = slow_gradients(tiny_model(), trajectories, advantages_of(trajectories), {})
    tenth = {name: value / 10 for name, value in slow.items()}
    assert furthest(weights_of(clipped), stepped(before, tenth)) < 1e-6


def test_gradient_checkpointing_computes_layers_again_and_changes_nothing_else() -> None:
    plain, saving = tiny_model(), tiny_model()
    trajectories = trajectories_of(plain)
    passes = {"plain": 0, "saving": 0}

    def count(name: str) -> Any:
        return lambda *_: passes.__setitem__(name, passes[name] + 1)

    trainer = PolicyTrainer(saving, GRPO(**PLAIN_STEP, gradient_checkpointing=True))
    plain.model.model.layers[0].mlp.register_forward_pre_hook(count("plain"))
    saving.model.model.layers[0].mlp.register_forward_pre_hook(count("saving"))
    PolicyTrainer(plain, GRPO(**PLAIN_STEP)).update(trajectories)
    trainer.update(trajectories)
    assert passes == {"plain": 1, "saving": 2}
    assert furthest(weights_of(plain), weights_of(saving)) < 1e-9


def test_a_forward_pass_in_bfloat16_keeps_weights_in_float32() -> None:
    exact, rough = tiny_model(dtype="float32"), tiny_model(dtype="float32")
    trajectories = trajectories_of(exact, noise=0.0)
    PolicyTrainer(exact, GRPO(**PLAIN_STEP)).update(trajectories)
    metrics = PolicyTrainer(rough, GRPO(**PLAIN_STEP, dtype="bfloat16")).update(trajectories)
    assert metrics["updated"] == 1
    assert 1e-12 < metrics["mismatch_k3"] < 1e-3
    assert {parameter.dtype for parameter in rough.model.parameters()} == {torch.float32}
    assert 0 < furthest(weights_of(exact), weights_of(rough)) < 0.02


def test_cross_entropy_needs_neither_rewards_nor_logprobs() -> None:
    lm = tiny_model()
    examples = [{"tokens": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}, {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1]}]
    trainer = PolicyTrainer(lm, GRPO(loss="cross_entropy", lr=0.03))
    first = trainer.update(examples)
    for _ in range(20):
        last = trainer.update(examples)
    assert first["loss"] == pytest.approx(math.log(VOCABULARY), abs=0.2)
    assert last["loss"] < 0.5
    assert "reward_mean" not in last


def test_reinforce_subtracts_a_moving_baseline() -> None:
    lm = tiny_model()
    trainer = PolicyTrainer(lm, GRPO(advantage="reinforce", baseline_decay=0.5, lr=0.0))
    trajectories = [{key: value for key, value in each.items() if key != "group_id"} for each in trajectories_of(lm)]
    for reward in (1.0, 3.0):
        trainer.update([{**each, "reward": reward + index % 2} for index, each in enumerate(trajectories)])
    assert trainer._baseline == pytest.approx(0.5 * 1.5 + 0.5 * 3.5)


def test_step_grpo_gives_each_turn_its_advantage() -> None:
    lm, slow = tiny_model(), tiny_model()
    row = {"tokens": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 1, 0, 1, 1], "logprobs": [0.0] * 6, "group_id": "g"}
    with torch.no_grad():
        exact = [0.0, *token_logprobs(lm.model, row["tokens"]).tolist()]
    row["logprobs"] = [a * m for a, m in zip(exact, row["loss_mask"], strict=True)]
    rows = [{**row, "reward": 0.0, "step_rewards": [1.0, 0.0]}, {**row, "reward": 0.0, "step_rewards": [0.0, 1.0]}]
    before = weights_of(lm)
    PolicyTrainer(lm, GRPO(**PLAIN_STEP, advantage="step_grpo")).update(rows)
    half = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    one_turn = [{**row, "loss_mask": [0, 1, 1, 0, 0, 0]}, {**row, "loss_mask": [0, 0, 0, 0, 1, 1]}]
    # Of the first turns both advantages are sums of opposite numbers; of the second they are the last ones.
    gradients = [slow_gradients(slow, [part], [1.0], {}) for part in one_turn]
    sums = [(half - half) + (half - half), -half + half]
    expected = {name: sum(gradients[turn][name] * sums[turn] * 2 / 8 for turn in range(2)) for name in before}
    assert furthest(weights_of(lm), stepped(before, expected)) < 1e-6


def test_weights_reach_another_model_through_a_buffer() -> None:
    lm, server = tiny_model(), tiny_model()
    trainer = PolicyTrainer(lm, GRPO(lr=1e-2))
    trainer.update(trajectories_of(lm))
    buffer = bytearray(trainer.table.total_bytes)
    trainer.write_weights(buffer)
    flat_weights.load(server.model, trainer.table, buffer)
    assert furthest(weights_of(lm), weights_of(server)) == 0


def test_the_rate_of_tokens_is_measured_by_the_clock() -> None:
    lm = tiny_model()
    times = iter([10.0, 12.0])
    metrics = PolicyTrainer(lm, GRPO(), clock=lambda: next(times)).update(trajectories_of(lm))
    assert metrics["seconds"] == 2
    assert metrics["tokens_per_s"] == metrics["tokens"] / 2


def test_a_policy_learns_to_say_what_is_rewarded() -> None:
    lm = tiny_model(dtype="float32")
    trainer = PolicyTrainer(lm, GRPO(groups=4, group_size=16, lr=2e-2))
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(150):
        prompts = torch.randint(VOCABULARY, (4, 1), generator=generator).repeat_interleave(16, 0)
        with torch.no_grad():
            logprobs = lm.model(prompts).logits[:, -1].log_softmax(-1)
        answers = torch.multinomial(logprobs.exp(), 1, generator=generator)
        # Right is the token after that of the prompt.
        rewards = (answers == (prompts + 1) % VOCABULARY).float()[:, 0].tolist()
        rows = zip(
            prompts[:, 0].tolist(),
            answers[:, 0].tolist(),
            logprobs.gather(1, answers)[:, 0].tolist(),
            rewards,
            strict=True,
        )
        trainer.update(
            [
                {
                    "tokens": [prompt, answer],
                    "loss_mask": [0, 1],
                    "logprobs": [0.0, logprob],
                    "reward": reward,
                    "group_id": index // 16,
                }
                for index, (prompt, answer, logprob, reward) in enumerate(rows)
            ]
        )
        means.append(sum(rewards) / len(rewards))
    assert sum(means[:5]) / 5 < 0.15
    assert sum(means[-5:]) / 5 > 0.5
