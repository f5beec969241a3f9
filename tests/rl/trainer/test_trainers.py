"""Trainers of the guide: their examples, and what they compute beside the trainer of Fray."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fray import rl  # noqa: E402
from fray.rl.algorithm import core_algos  # noqa: E402
from fray.rl.nexrl_types import Batch, Trajectory  # noqa: E402
from fray.rl.tensors import padded_rows  # noqa: E402
from fray.rl.tensors.policy_trainer import PolicyTrainer  # noqa: E402
from fray.rl.train.errors import NonFiniteUpdatesError  # noqa: E402
from fray.rl.trainer import (  # noqa: E402
    BaseTrainer,
    MockTrainService,
    RemoteApiCrossEntropyTrainer,
    RemoteApiGrpoTrainer,
    RemoteApiTrainer,
    SelfHostedGrpoTrainer,
    SelfHostedTrainer,
    TorchTrainService,
)
from fray.rl.utils.logging_utils import log_grpo_metrics  # noqa: E402
from tests.rl.tensors.trainer_cases import tiny_model, trajectories_of  # noqa: E402

pytestmark = pytest.mark.torch
SETTINGS: dict[str, Any] = {"groups": 2, "group_size": 4, "lr": 1e-2}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def policy(**settings: Any) -> PolicyTrainer:
    return PolicyTrainer(tiny_model(), rl.GRPO(**SETTINGS | settings))


def with_policy(trainer: Any) -> Any:
    """Return a trainer that trains the tiny model."""
    trainer.set_policy(lambda settings: PolicyTrainer(tiny_model(), settings))
    return trainer


def weights_of(policy: PolicyTrainer) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


def batch_of(policy: PolicyTrainer, seed: int = 0) -> list[Trajectory]:
    return trajectories_of(policy.lm, seed=seed)


# An update in two parts


@pytest.mark.parametrize("options", [{}, {"loss": "importance_sampling"}, {"micro_batch": 3}, {"kl": 0.1}])
def test_an_update_in_two_parts_is_an_update(options: dict[str, Any]) -> None:
    whole, parts = policy(**options), policy(**options)
    rows = batch_of(whole)
    metrics = whole.update(rows)
    core_algos.compute_grpo_advantage_for_trajectories(rows)
    found = parts.forward_backward([{**row, "advantages": row["advantage"]} for row in rows]) | parts.optim_step()
    torch.testing.assert_close(weights_of(parts), weights_of(whole))
    for name in ("loss", "grad_norm", "updates", "updated", "reward_mean", "entropy"):
        assert found[name] == pytest.approx(metrics[name], abs=1e-6), name


def test_gradients_add_up_until_the_step() -> None:
    once, twice = policy(aggregation="seq-mean-token-sum"), policy(aggregation="seq-mean-token-sum")
    rows = [{**row, "advantages": 1.0} for row in batch_of(once)]
    once.forward_backward(rows)
    for half in (rows[:4], rows[4:]):
        twice.forward_backward([{**row, "advantages": 0.5} for row in half])
    assert once.optim_step()["grad_norm"] == pytest.approx(twice.optim_step()["grad_norm"], abs=1e-9)


def test_without_a_gradient_nothing_changes() -> None:
    trainer = policy()
    before = weights_of(trainer)
    metrics = trainer.forward_backward([{**row, "advantages": 0.0} for row in batch_of(trainer)])
    assert metrics["zero_advantages"] == 1
    assert trainer.optim_step()["skipped"] == 1
    assert torch.equal(weights_of(trainer), before)


def test_a_gradient_that_is_not_finite_is_not_applied_and_the_third_one_ends_training(tmp_path: Path) -> None:
    trainer = PolicyTrainer(tiny_model(), rl.GRPO(**SETTINGS), dump_directory=tmp_path)
    rows = [{**row, "advantages": 1.0} for row in batch_of(trainer)]
    first, *others = trainer.model.parameters()
    before = others[-1].detach().clone()
    with torch.no_grad():
        first.fill_(float("nan"))
    for _ in range(2):
        trainer.forward_backward(rows)
        assert trainer.optim_step()["not_finite"] == 1
    assert torch.equal(others[-1], before)
    trainer.forward_backward(rows)
    with pytest.raises(NonFiniteUpdatesError, match="not finite in 3 updates in a row"):
        trainer.optim_step()
    assert trainer.updates == 0


def test_advantages_of_another_length_are_refused_by_name() -> None:
    trainer = policy()
    (row, *_) = batch_of(trainer)
    with pytest.raises(ValueError, match=r"trajectory \(task_id 't0'.*advantages has 1 numbers for \d+ tokens"):
        trainer.forward_backward([{**row, "advantages": [1.0]}])
    with pytest.raises(ValueError, match="advantages has a number that is not finite"):
        trainer.forward_backward([{**row, "advantages": float("nan")}])


# Advantages


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        ([3, 1, 2, 2, 0], [1.22788, -0.526234, 0.350823, 0.350823, -1.403292]),
        ([1, 1, 1], [0, 0, 0]),
    ],
)
def test_golden_advantages(rewards: list[float], expected: list[float]) -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0]] * len(rewards))
    tokens = torch.zeros(len(rewards), 3)
    tokens[:, 1] = torch.tensor(rewards, dtype=torch.float32)
    tokens[:, 2] = 9.0
    advantages, returns = core_algos.compute_grpo_outcome_advantage(tokens, mask, ["g"] * len(rewards))
    torch.testing.assert_close(advantages, torch.tensor(expected)[:, None] * mask, atol=1e-5, rtol=0)
    assert torch.equal(returns, advantages)
    found = core_algos.compute_grpo_advantage_for_trajectories([{"reward": one, "uid": "g"} for one in rewards])
    assert [one["advantage"] for one in found] == pytest.approx(expected, abs=1e-5)


def test_parts_of_a_run_count_once() -> None:
    rows = [{"reward": reward, "group_id": "g", "run_id": run} for reward, run in [(1, 0), (1, 0), (0, 1)]]
    by_run = [one["advantage"] for one in core_algos.compute_grpo_advantage_for_trajectories(rows)]
    assert by_run == pytest.approx([0.707106, 0.707106, -0.707106], abs=1e-5)
    alone = core_algos.compute_grpo_advantage_for_trajectories(rows, use_run_ids=False)
    assert alone[0]["advantage"] == pytest.approx(0.57735, abs=1e-5)
    tokens, mask = torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3, 1)
    found, _ = core_algos.compute_grpo_outcome_advantage(tokens, mask, torch.tensor([7, 7, 7]), torch.tensor([0, 0, 1]))
    assert found[:, 0].tolist() == pytest.approx(by_run, abs=1e-5)


def test_a_missing_key_is_named_with_its_trajectory() -> None:
    with pytest.raises(ValueError, match=r"trajectory 1 \(task_id 'a'\): key group_id or uid is missing; it has"):
        core_algos.compute_grpo_advantage_for_trajectories(
            [{"reward": 1, "uid": 0}, {"reward": 1, "task_id": "a"}],
        )
    with pytest.raises(ValueError, match=r"trajectory 0.*: key reward is missing"):
        core_algos.compute_grpo_advantage_for_trajectories([{"uid": 0}])


def test_metrics_of_grpo() -> None:
    metrics: dict[str, Any] = {"kept": 1}
    log_grpo_metrics([], metrics)
    assert metrics == {"kept": 1}
    rows = core_algos.compute_grpo_advantage_for_trajectories(
        [{"reward": reward, "group_id": group} for reward, group in [(1, "a"), (0, "a"), (1, "b"), (1, "b")]]
    )
    log_grpo_metrics(rows, metrics)
    assert (metrics["grpo/reward_mean"], metrics["grpo/groups"], metrics["grpo/zero_advantages"]) == (0.75, 2, 0.5)
    assert metrics["grpo/advantage_mean"] == 0


# Self-hosted trainers


def test_self_hosted_grpo_is_the_update_of_fray() -> None:
    whole = policy(old_logprobs="trainer")
    trainer = with_policy(SelfHostedGrpoTrainer(SETTINGS))
    for seed in range(3):
        rows = batch_of(whole, seed)
        expected, found = whole.update(rows), trainer.train(rows)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert found["critic/rewards/mean"] == pytest.approx(expected["reward_mean"], abs=1e-6)
    # AdamW turns differences of rounding into some of the size of a step where gradients are near 0.
    assert (weights_of(trainer.policy) - weights_of(whole)).abs().mean() < 1e-5


def test_padding_of_ranks_weighs_nothing() -> None:
    class OfThreeRanks(SelfHostedGrpoTrainer):
        world_size = 3

    alone, padded = with_policy(SelfHostedGrpoTrainer(SETTINGS)), with_policy(OfThreeRanks(SETTINGS))
    rows = batch_of(alone.policy)
    expected, found = alone.train(rows), padded.train(rows)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-9)
    assert torch.equal(weights_of(alone.policy), weights_of(padded.policy))


def test_a_penalty_in_the_rewards_is_that_of_fray() -> None:
    kl = rl.KlPenalty(0.5, "kl", place="reward")
    whole = policy(kl=kl, old_logprobs="trainer")
    trainer = with_policy(SelfHostedGrpoTrainer({**SETTINGS, "kl": kl}))
    for seed in range(2):
        rows = batch_of(whole, seed)
        expected, found = whole.update(rows), trainer.train(rows)
        assert found["kl"] == pytest.approx(expected["kl"], abs=1e-4)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    assert found["kl"] != 0


def test_an_update_is_made_of_the_methods_of_the_guide() -> None:
    called: list[str] = []

    def noting(name: str) -> Any:
        def method(self: Any, *arguments: Any) -> Any:
            called.append(name)
            return getattr(super(Noting, self), name)(*arguments)

        return method

    names = (
        "_process_trajectories", "_prepare_batch", "_log_rollout_metrics", "_compute_old_log_probs", "_reward_fn",
        "_apply_kl_penalty", "_compute_advantage", "_compute_data_metrics",
    )  # fmt: skip
    Noting = type("Noting", (SelfHostedGrpoTrainer,), {name: noting(name) for name in names})
    trainer = with_policy(Noting(SETTINGS | {"kl": rl.KlPenalty(0.1, place="reward")}))
    posts: list[Any] = []
    tracker = rl.ActivityTracker()
    tracker.experiment_logger.sinks["wandb"] = lambda **values: posts.append(values)
    trainer.set_activity_tracker(rl.ActivityTrackerProxy(tracker))
    rows = batch_of(trainer.policy)
    metrics = trainer.train(rows)
    assert called == list(names)
    mean = sum(row["reward"] for row in rows) / len(rows)
    assert posts == [{"data": {"rollout/reward_mean": pytest.approx(mean), "rollout/samples": 8.0}, "step": 0}]
    assert metrics["critic/score/mean"] == pytest.approx(mean)
    assert metrics["response_length/max"] == max(sum(row["loss_mask"]) for row in rows)
    remote = with_policy(RemoteApiGrpoTrainer(SETTINGS))
    (datum,) = remote._convert_trajectories_to_datums(
        [{"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0], "advantage": 0.5}]
    )
    assert datum["model_input"] == [1]
    assert datum["loss_fn_inputs"]["advantages"] == [0.5]


def test_old_logprobs_may_be_those_of_the_rollout() -> None:
    trainer = with_policy(SelfHostedGrpoTrainer({**SETTINGS, "do_old_log_prob_compute": False}))
    whole, rows = policy(), batch_of(trainer.policy)
    assert trainer.train(rows)["loss"] == pytest.approx(whole.update(rows)["loss"], abs=1e-5)


def test_the_custom_trainer_of_the_guide() -> None:
    class MyCustomTrainer(SelfHostedTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
            metrics = {}
            batch.values["advantages"] = self._compute_advantages(batch)
            metrics["custom/mean_advantage"] = batch.values["advantages"].mean().item()
            return batch, metrics

        def _compute_advantages(self, batch: Batch) -> Any:
            return torch.tensor(batch.values["reward"]) - 0.25

    trainer = with_policy(MyCustomTrainer(SETTINGS))
    rows = batch_of(trainer.policy)
    before = weights_of(trainer.policy)
    metrics = trainer.train(rows)
    assert metrics["custom/mean_advantage"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows) - 0.25)
    assert metrics["updated"] == 1
    assert not torch.equal(weights_of(trainer.policy), before)


def test_prompts_are_padded_on_the_left_and_responses_on_the_right() -> None:
    rows = padded_rows.padded(
        [
            {"tokens": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [0, 0, -1.0], "reward": 1.0, "only": 1},
            {"tokens": [4, 5, 6, 7], "loss_mask": [0, 1, 0, 1], "logprobs": [0, -2.0, 0, -3.0], "reward": 0.0},
        ],
        pad_token_id=0,
    )
    assert rows[0]["input_ids"].tolist() == [1, 2, 3, 0, 0]
    assert rows[1]["input_ids"].tolist() == [0, 4, 5, 6, 7]
    assert rows[1]["attention_mask"].tolist() == [0, 1, 1, 1, 1]
    assert rows[1]["position_ids"].tolist() == [0, 0, 1, 2, 3]
    assert rows[1]["loss_mask"].tolist() == [0, 0, 1, 0, 1]
    assert (rows[1]["prompts"].tolist(), rows[1]["responses"].tolist()) == ([0, 4], [5, 6, 7])
    assert rows[0].keys() == rows[1].keys()
    batch = Batch.from_trajectories(rows)
    assert padded_rows.token_rewards(batch).tolist() == [[1, 0, 0], [0, 0, 0]]
    assert [row["tokens"] for _, row in padded_rows.rows_of(batch)] == [[1, 2, 3], [4, 5, 6, 7]]
    assert padded_rows.rows_of(batch)[1][1]["logprobs"] == [0, -2, 0, -3]


def test_an_invalid_trajectory_is_named() -> None:
    trainer = with_policy(SelfHostedGrpoTrainer(SETTINGS))
    rows = batch_of(trainer.policy)
    for broken, message in [
        ({"loss_mask": [0, 1]}, r"trajectory 1 .*loss_mask has 2 numbers, but there are \d+ tokens"),
        ({"logprobs": [0.0]}, r"trajectory 1 .*logprobs has 1 numbers, but there are \d+ tokens"),
        ({"tokens": [99] * len(rows[1]["tokens"])}, r"trajectory 1 .*tokens\[0\] is 99: expected 0 to"),
        ({"reward": float("nan")}, "trajectory 1 .*reward is nan: expected a finite number"),
    ]:
        with pytest.raises(ValueError, match=message):
            trainer.train([rows[0], {**rows[1], **broken}, *rows[2:]])


# Services


def test_a_service_scores_saves_and_continues(tmp_path: Path) -> None:
    trained, service = policy(), TorchTrainService(policy())
    rows = batch_of(trained)
    batch = Batch.from_trajectories(padded_rows.padded(rows, 0)).pad_to_world_size(3)
    batch.values["advantages"] = torch.tensor([1.0, -1.0, 0.5, 0, 1, -1, 0, 0.5, 9.0])
    found = service.forward(batch)
    for place, logprobs in enumerate(trained.logprobs(rows)):
        there = batch.values["attention_mask"][place].bool()
        assert found[place][there].tolist() == pytest.approx(logprobs, abs=1e-6)
    assert not found[8].any()
    service.forward_backward(batch)
    assert service.optim_step()["updates"] == 1
    service.save_checkpoint(tmp_path / "saved")
    TorchTrainService(trained).load_checkpoint(tmp_path / "saved")
    assert torch.equal(weights_of(trained), weights_of(service._policy))


def test_a_mock_service_trains_without_a_model(tmp_path: Path) -> None:
    service = MockTrainService()
    trainer = SelfHostedGrpoTrainer({**SETTINGS, "model_tag": "m"}, service)
    metrics = trainer.train(trajectories_of(tiny_model()))
    assert (service.steps, service.batches, metrics["updates"]) == (1, [8], 1)
    assert trainer.weight_table is None
    service.save_checkpoint(tmp_path)
    other = MockTrainService()
    other.load_checkpoint(tmp_path)
    assert other.steps == 1


def test_remote_grpo_is_the_update_of_fray_with_importance_sampling() -> None:
    whole = policy(loss="importance_sampling")
    trainer = with_policy(RemoteApiGrpoTrainer(SETTINGS))
    for seed in range(2):
        rows = batch_of(whole, seed)
        expected, found = whole.update(rows), trainer.train([dict(row) for row in rows])
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert found["grpo/reward_mean"] == pytest.approx(expected["reward_mean"])
    assert (weights_of(trainer.policy) - weights_of(whole)).abs().mean() < 1e-5


def test_the_remote_trainer_of_the_guide_and_a_service_of_its_own() -> None:
    class MyRemoteTrainer(RemoteApiTrainer):
        def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
            for traj in trajectories:
                traj["advantage"] = self._compute_custom_field(traj)
            metrics["custom_metric"] = self._compute_metric(trajectories)
            return trajectories

        def _compute_custom_field(self, traj: Trajectory) -> float:
            return float(traj["reward"]) * 2

        def _compute_metric(self, trajectories: list[Trajectory]) -> float:
            return float(len(trajectories))

    class Holder:
        def train(self, datums: list[Any], config: dict[str, Any]) -> dict[str, float]:
            self.datums, self.config = datums, config
            return {"service/loss": 0.5}

    trainer, holder = MyRemoteTrainer({**SETTINGS, "lr": 0.1}), Holder()
    trainer.set_service_holder(holder)
    row = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -2.0], "reward": 0.5}
    metrics = trainer.train([row])
    assert (metrics["service/loss"], metrics["custom_metric"], metrics["reward_mean"]) == (0.5, 1, 0.5)
    assert holder.config == {"loss_fn": "importance_sampling", "learning_rate": 0.1}
    inputs = {"target_tokens": [2, 3], "weights": [1, 1], "logprobs": [-1.0, -2.0], "advantages": [1.0, 1.0]}
    assert holder.datums == [{"model_input": [1, 2], "loss_fn_inputs": inputs}]
    with pytest.raises(ValueError, match="trajectory 0: key 'logprobs' is missing"):
        trainer.train([{"tokens": [1, 2], "loss_mask": [0, 1], "reward": 1.0}])


def test_cross_entropy_needs_neither_logprobs_nor_rewards() -> None:
    trainer = with_policy(RemoteApiCrossEntropyTrainer(SETTINGS))
    rows = [{"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}] * 4
    losses = [trainer.train(rows)["loss"] for _ in range(40)]
    assert losses[0] > 2
    assert losses[-1] < 0.1


# The base class


class Counting(BaseTrainer):
    """Trainer without weights that notes what it gets."""

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        self.seen = [*getattr(self, "seen", []), [one["reward"] for one in trajectories]]
        return {"seen": len(self.seen)}


def test_a_trainer_beside_a_pool_trains_its_batches_and_notifies_the_controller() -> None:
    trainer = Counting({"batch_size": 2, "total_train_steps": 2})
    trainer.initialize_workers()  # has no effect unless overridden
    pool = rl.TrajectoryPool({"batch_size": 2, "group_size": 1, "key_list": []})
    controller = rl.WeightSyncController({"sync_mode": "fully-async"})
    pool.set_module_references(None, controller, rl.ActivityTrackerProxy(rl.ActivityTracker()))
    trainer.set_module_name("trainer")
    with pytest.raises(RuntimeError, match="call set_module_references first"):
        trainer.run()
    trainer.set_module_references(pool, controller)
    for reward in range(4):
        pool.put_trajectory({"reward": float(reward)})
    trainer.run()
    assert trainer._thread is not None
    trainer._thread.join(30)
    trainer.stop()
    assert trainer.seen == [[0.0, 1.0], [2.0, 3.0]]
    assert controller.get_rollout_model_version("default") == 2


def test_settings_of_a_trainer() -> None:
    settings = Counting({"batch_size": 8, "group_size": 4, "total_train_steps": 3, "lr": 0.5}).settings
    assert (settings.groups, settings.group_size, settings.steps, settings.lr) == (2, 4, 3, 0.5)
    assert Counting(rl.GRPO(groups=3)).settings.groups == 3
    with pytest.raises(ValueError, match="invalid batch_size 7: expected a multiple of the group_size 4"):
        Counting({"batch_size": 7, "group_size": 4})


def test_a_trainer_is_sent_without_what_belongs_to_its_process() -> None:
    trainer = with_policy(Counting(SETTINGS))
    assert trainer.policy.updates == 0
    copy = pickle.loads(pickle.dumps(trainer))
    assert copy.settings == trainer.settings
    assert copy.weight_table is None
    with pytest.raises(RuntimeError, match="Counting has no policy"):
        _ = copy.policy
