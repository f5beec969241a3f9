"""A critic beside a policy: values, learning, parts of a batch, save and load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

from fray import rl  # noqa: E402
from fray.rl.core.advantages import gae, whitened  # noqa: E402
from fray.rl.tensors.policy_trainer import PolicyTrainer  # noqa: E402
from fray.rl.train.batch_advantages import gae_of  # noqa: E402
from tests.rl.tensors.trainer_cases import furthest, tiny_model, trajectories_of, weights_of  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: several wait for each other where all cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trainer_of(lm: Any = None, **options: Any) -> PolicyTrainer:
    settings = rl.GRPO(groups=2, group_size=4, lr=1e-3, advantage="gae", critic=rl.Critic(1e-3, lam=0.9), **options)
    return PolicyTrainer(lm or tiny_model(), settings)


def critic_of(trainer: PolicyTrainer) -> Any:
    assert trainer.critic is not None
    return trainer.critic


def weights_of_critic(trainer: PolicyTrainer) -> dict[str, Any]:
    critic = critic_of(trainer)
    named = [*critic.backbone.named_parameters(), *critic.head.named_parameters()]
    return {name: value.detach().clone() for name, value in named}


def test_the_values_are_those_of_the_hidden_states_before_each_token() -> None:
    trainer = trainer_of(micro_batch=3)
    rows = trajectories_of(trainer.lm)
    trainer.update(rows)
    critic = critic_of(trainer)
    values = critic.values(trainer._token_batch(rows))
    for row, trajectory in zip(values.tolist(), rows, strict=True):
        hidden = critic.backbone(input_ids=torch.tensor([trajectory["tokens"]])).last_hidden_state
        exact = [0.0, *critic.head(hidden)[0, :-1, 0].tolist()]
        counted = [each if counts else 0.0 for each, counts in zip(exact, trajectory["loss_mask"], strict=True)]
        assert row[: len(counted)] == pytest.approx(counted, abs=1e-6)


def test_the_first_update_of_policy_and_critic_is_that_of_their_advantages_and_returns() -> None:
    trainer = trainer_of(weight_decay=0.0)
    rows = trajectories_of(trainer.lm)
    before = weights_of_critic(trainer)
    metrics = trainer.update(rows)
    # The values were 0, and so all returns are discounted rewards; the policy's update is that of given advantages.
    found = []
    for row in rows:
        count = sum(row["loss_mask"])
        found.append(gae([0.0] * (count - 1) + [row["reward"]], [0.0] * count, 1.0, 0.9))
    returns = [each for _, of_row in found for each in of_row]
    assert metrics["critic_return_mean"] == pytest.approx(sum(returns) / len(returns), abs=1e-6)
    assert metrics["critic_loss"] == pytest.approx(sum(each**2 for each in returns) / len(returns) / 2, abs=1e-6)
    advantages = whitened([of_row for of_row, _ in found])
    other = PolicyTrainer(tiny_model(), rl.GRPO(groups=2, group_size=4, lr=1e-3, weight_decay=0.0))
    given = []
    for row, numbers in zip(rows, advantages, strict=True):
        rest = iter(numbers)
        given.append({**row, "advantages": [next(rest) if counts else 0.0 for counts in row["loss_mask"]]})
    other.forward_backward(given)
    other.optim_step()
    assert furthest(weights_of(trainer.lm), weights_of(other.lm)) < 1e-6
    assert furthest(before, weights_of_critic(trainer)) > 1e-4


def test_rewards_of_turns_are_given_after_their_last_token() -> None:
    settings = rl.GRPO(advantage="gae", gamma=0.5)
    row = {"tokens": [1] * 6, "loss_mask": [0, 1, 1, 0, 0, 1], "reward": 3.0, "group_id": "a"}
    _, returns = gae_of(settings, [row, {**row, "step_rewards": [1.0, 2.0]}], [[0.0] * 6] * 2)
    assert returns == [[0, 0.75, 1.5, 0, 0, 3.0], [0, 1.0, 2.0, 0, 0, 2.0]]


def test_parts_and_minibatches_change_memory_and_not_results() -> None:
    # Values are computed as float32, so that parts differ in its last bits.
    whole, parts = trainer_of(), trainer_of(micro_batch=3)
    for seed in range(3):
        rows = trajectories_of(tiny_model(), seed=seed)
        one, other = whole.update(rows), parts.update(rows)
        for name in ("loss", "critic_loss", "critic_grad_norm", "critic_value_mean"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
    minibatches = trainer_of(minibatches=2)
    rows = trajectories_of(tiny_model(), count=7)
    losses = [minibatches.update(rows)["critic_loss"] for _ in range(25)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_critic_learns_which_rewards_follow() -> None:
    # The policy stays as it is.
    settings = rl.GRPO(groups=2, group_size=4, lr=0.0, advantage="gae", critic=3e-3)
    trainer = PolicyTrainer(tiny_model(), settings)
    rows = trajectories_of(trainer.lm)
    found = [trainer.update(rows) for _ in range(60)]
    assert found[0]["critic_explained_variance"] == 0.0
    assert found[-1]["critic_explained_variance"] > 0.8
    assert found[-1]["critic_loss"] < 0.2 * found[0]["critic_loss"]


def test_a_saved_policy_and_critic_continue_as_without_a_stop(tmp_path: Path) -> None:
    trainer, batches = trainer_of(minibatches=2), [trajectories_of(tiny_model(), seed=seed) for seed in range(4)]
    for rows in batches[:2]:
        trainer.update(rows)
    trainer.save(tmp_path)
    again = trainer_of(minibatches=2)
    again.load(tmp_path)
    for rows in batches[2:]:
        assert {**trainer.update(rows), "seconds": 0, "tokens_per_s": 0} == {
            **again.update(rows),
            "seconds": 0,
            "tokens_per_s": 0,
        }
    assert furthest(weights_of_critic(trainer), weights_of_critic(again)) == 0
    (tmp_path / "critic/critic_state.pt").unlink()
    with pytest.raises(FileNotFoundError, match="no checkpoint of a critic"):
        again.load(tmp_path)


def test_a_critic_begins_with_a_model_of_its_own() -> None:
    lm, other = tiny_model(), tiny_model(rl.TinyLlama(layers=2, width=32, heads=2, mlp=32))
    settings = rl.GRPO(groups=2, group_size=4, advantage="gae")
    critic = critic_of(PolicyTrainer(lm, settings, critic=other))
    assert critic.head.in_features == 32
    with pytest.raises(ValueError, match="the critic's model has vocabulary_size 3, and the policy's 15"):
        PolicyTrainer(lm, settings, critic=tiny_model(rl.TinyLlama(layers=1, width=16, heads=2, mlp=32, chars="$ab")))
    with pytest.raises(ValueError, match="lora of GRPO with advantage='gae'"):
        rl.GRPO(advantage="gae", lora=4)
    with pytest.raises(ValueError, match="critic of GRPO with advantage='grpo'"):
        rl.GRPO(critic=1e-3)
