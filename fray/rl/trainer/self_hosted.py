"""Trainers that prepare a padded batch for a training service: the base class, and GRPO."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from statistics import fmean
from typing import Any

from fray.rl.algorithm import core_algos
from fray.rl.nexrl_types import Batch, Trajectory
from fray.rl.train.trajectory_checks import GROUP_KEYS, check_trajectory
from fray.rl.trainer.base_trainer import BaseTrainer, mean_reward
from fray.rl.trainer.train_service import TorchTrainService, TrainServiceClient


def _tensors(module: str) -> Any:
    """Return a module with tensors: loaded when a trainer trains, and not where its class is imported."""
    return importlib.import_module(f"fray.rl.tensors.{module}")


class SelfHostedTrainer(BaseTrainer):
    """Trainer whose subclasses prepare a batch: tensors, padded, with what the algorithm adds.

    Args:
        config: as of `BaseTrainer`.
        train_service: that trains; default: `policy`, in this process.
    """

    world_size = 1
    """Ranks by which the rows of a batch are divisible; rows of padding weigh nothing."""

    def __init__(self, config: Any, train_service: TrainServiceClient | None = None) -> None:
        super().__init__(config)
        self._given_service = train_service

    @property
    def train_service(self) -> TrainServiceClient:
        """The service that trains."""
        return self._given_service or TorchTrainService(self.policy)

    @property
    def has_service(self) -> bool:
        """True if a service that was given trains, and not `policy`."""
        return self._given_service is not None

    @abstractmethod
    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return the batch with ``advantages`` and what else the algorithm computes, and metrics.

        ``advantages`` has the shape `[batch]`, `[batch, tokens]` or `[batch, tokens of the responses]`.
        """

    def _process_trajectories(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return trajectories as tensors of equal length; see `fray.rl.tensors.padded_rows.padded`."""
        rows: list[Trajectory] = _tensors("padded_rows").padded(trajectories, self._pad_token_id)
        return rows

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """Prepare the trajectories and do an update; return metrics.

        Raises:
            ValueError: a trajectory is invalid; the message names it.
        """
        for index, trajectory in enumerate(trajectories):
            check_trajectory(trajectory, vocabulary_size=self._vocabulary_size, needs=("reward",), index=index)
        batch = Batch.from_trajectories(self._process_trajectories(trajectories), model_tag=self._model_tag)
        batch, metrics = self._prepare_batch(batch.pad_to_world_size(self.world_size))
        done = self.train_service.forward_backward(batch)
        return mean_reward(trajectories) | done | self.train_service.optim_step() | metrics

    @property
    def _pad_token_id(self) -> int:
        return 0 if self._given_service is not None else self.policy.lm.tokenizer.pad_id

    @property
    def _vocabulary_size(self) -> int:
        return 2**31 if self._given_service is not None else self.policy.lm.vocabulary_size


class SelfHostedGrpoTrainer(SelfHostedTrainer):
    """GRPO: advantages relative to the group, old logprobs of the trainer, an optional KL penalty in the rewards.

    ``do_old_log_prob_compute`` in the configuration (default True): compute the old logprobs before the update; False
    takes those of the rollout. ``settings.kl`` with ``place="reward"`` is the penalty.
    """

    def __init__(self, config: Any, train_service: TrainServiceClient | None = None) -> None:
        super().__init__(config, train_service)
        options = {} if not hasattr(config, "get") else config
        self._do_old_log_prob_compute = bool(options.get("do_old_log_prob_compute", True))
        kl = self.settings.kl
        self._use_kl_in_reward = kl is not None and kl.place == "reward"
        self._kl_ctrl: Any = None

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        metrics: dict[str, Any] = {}
        self._log_rollout_metrics(batch)
        batch.values["old_log_probs"] = self._compute_old_log_probs(batch)
        batch.values["token_level_scores"] = batch.values["token_level_rewards"] = self._reward_fn(batch)
        kl = self.settings.kl
        if self._use_kl_in_reward and kl is not None:
            if self._kl_ctrl is None:
                self._kl_ctrl = _tensors("policy_trainer").kl_controller(self.settings)
            batch, of_kl = self._apply_kl_penalty(batch, self._kl_ctrl, kl.estimator)
            metrics |= of_kl
        batch = self._compute_advantage(batch)
        return batch, metrics | self._compute_data_metrics(batch)

    def _compute_old_log_probs(self, batch: Batch) -> Any:
        """Return the logprobs of the policy before the update, or those of the rollout: `[batch, response tokens]`."""
        width = batch.values["responses"].shape[1]
        if not self._do_old_log_prob_compute:
            return batch.values["rollout_log_probs"][:, -width:]
        return self.train_service.forward(batch)[:, -width:]

    def _compute_advantage(self, batch: Batch) -> Batch:
        """Set ``advantages`` and ``returns``, `[batch, response tokens]`, and ``group_std`` in the metadata."""
        rows = _tensors("padded_rows")
        mask, rewards = rows.response_part(batch, "loss_mask"), batch.values["token_level_rewards"]
        key = next((name for name in GROUP_KEYS if name in batch.values), None)
        if key is None:
            raise ValueError(f"a batch without {' or '.join(GROUP_KEYS)}; it has {sorted(batch.values)}")
        groups, runs = batch.values[key], batch.values.get("run_id")
        advantages, returns = core_algos.compute_grpo_outcome_advantage(rewards, mask, groups, runs)
        batch.values["advantages"], batch.values["returns"] = advantages, returns
        sums = (rewards * mask).sum(-1)
        members: dict[Any, list[int]] = {}
        for place, group in enumerate(groups):
            members.setdefault(group, []).append(place)
        batch.metadata["group_std"] = {
            group: float(sums[places].std()) if len(places) > 1 else 0.0 for group, places in members.items()
        }
        return batch

    def _reward_fn(self, batch: Batch) -> Any:
        """Return the reward of each row at its last token that counts: `[batch, response tokens]`."""
        return _tensors("padded_rows").token_rewards(batch)

    def _apply_kl_penalty(self, batch: Batch, kl_ctrl: Any, kl_penalty: str) -> tuple[Batch, dict[str, float]]:
        """Subtract the divergence from the reference from the scores: ``token_level_rewards = scores - beta * kl``.

        Args:
            batch: with ``old_log_probs`` and ``token_level_scores``.
            kl_ctrl: has ``value``, the coefficient, and is updated.
            kl_penalty: estimator, one of `KL_ESTIMATORS`.
        """
        rows = _tensors("padded_rows")
        mask, width = rows.response_part(batch, "loss_mask"), batch.values["responses"].shape[1]
        reference = self.train_service.forward(batch, is_reference=True)[:, -width:]
        divergence = _tensors("kl").kl_divergence(batch.values["old_log_probs"], reference, kl_penalty) * mask
        beta, kl = kl_ctrl.value, float(divergence.sum() / mask.sum().clamp(min=1))
        batch.values["token_level_rewards"] = batch.values["token_level_scores"] - beta * divergence
        kl_ctrl.update(current_kl=kl, n_steps=len(batch) - batch.metadata.get("padding_rows", 0))
        return batch, {"kl": kl, "kl_coefficient": beta}

    def _log_rollout_metrics(self, batch: Batch) -> None:
        """Post rewards and lengths of the rollouts to the activity tracker, under its backend ``wandb``."""
        rewards = [float(each) for each in batch.values["reward"]]
        data = {"rollout/reward_mean": fmean(rewards), "rollout/samples": float(len(rewards))}
        self._activity_tracker.experiment_logger_post("wandb", data=data, step=self._train_step)

    def _compute_data_metrics(self, batch: Batch) -> dict[str, float]:
        """Return statistics of scores, rewards, advantages and lengths."""
        mask = _tensors("padded_rows").response_part(batch, "loss_mask").bool()
        advantages, lengths = batch.values["advantages"][mask], mask.sum(-1).float()
        metrics = {
            "critic/score/mean": float(batch.values["token_level_scores"].sum(-1).mean()),
            "critic/rewards/mean": float(batch.values["token_level_rewards"].sum(-1).mean()),
            "response_length/mean": float(lengths.mean()),
            "response_length/max": float(lengths.max()),
            "response_length/min": float(lengths.min()),
        }
        for name in ("mean", "max", "min"):
            metrics[f"critic/advantages/{name}"] = float(getattr(advantages, name)()) if len(advantages) else 0.0
        return metrics
