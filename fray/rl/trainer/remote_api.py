"""Trainers that send datums to a service with Tinker's verbs, by default one in this process."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fray.rl.algorithm.core_algos import compute_grpo_advantage_for_trajectories
from fray.rl.nexrl_types import Trajectory
from fray.rl.train.trajectory_checks import check_trajectory
from fray.rl.trainer.base_trainer import BaseTrainer, mean_reward
from fray.rl.utils.logging_utils import log_grpo_metrics

if TYPE_CHECKING:
    from fray.rl.tensors.policy_trainer import PolicyTrainer

logger = logging.getLogger("fray.rl")
Datum = dict[str, Any]
"""``model_input``: tokens but the last; ``loss_fn_inputs``: of the tokens after the first, lists of equal length:
``target_tokens``, ``weights`` (1 where a token counts), and for a policy loss ``logprobs`` and ``advantages``."""


class TinkerServiceHolder:
    """Service in this process: `train` does an update of a `PolicyTrainer`. Any object with this method will do."""

    def __init__(self, policy: PolicyTrainer) -> None:
        self._policy = policy

    def train(self, datums: Sequence[Datum], config: Mapping[str, Any]) -> dict[str, float]:
        """Add the gradient of datums and do an optimizer step; return metrics.

        Args:
            datums: as `Datum`.
            config: ``loss_fn`` (one of `LOSS_OPTIONS`), ``learning_rate`` (default: that of the settings).

        Raises:
            ValueError: a datum is invalid; the message has its place.
        """
        rows = [trajectory_of(datum) for datum in datums]
        metrics = self._policy.forward_backward(rows, loss=config.get("loss_fn"))
        return metrics | self._policy.optim_step(config.get("learning_rate"))


class RemoteApiTrainer(BaseTrainer):
    """Trainer whose subclasses prepare trajectories, which a service trains."""

    loss_fn = "importance_sampling"
    """Loss that the service is asked for."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._given_holder: Any = None

    def set_service_holder(self, service_holder: Any) -> None:
        """Set the service: an object with ``train(datums, config)``, which returns metrics."""
        self._given_holder = service_holder

    @property
    def _service_holder(self) -> Any:
        return self._given_holder or TinkerServiceHolder(self.policy)

    @abstractmethod
    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        """Return the trajectories with what the algorithm adds, such as ``advantage``; add to ``metrics``."""

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """Prepare the trajectories, send them to the service, and return metrics of both.

        Raises:
            ValueError: a trajectory is invalid; the message names it.
        """
        metrics: dict[str, Any] = {}
        trajectories = self._prepare_trajectories(trajectories, metrics)
        datums = self._convert_trajectories_to_datums(trajectories)
        config = {"loss_fn": self.loss_fn, "learning_rate": self.settings.lr}
        response = self._service_holder.train(datums, config=config)
        return mean_reward(trajectories) | dict(response or {}) | metrics

    def _convert_trajectories_to_datums(self, trajectories: list[Trajectory]) -> list[Datum]:
        """Return the datum of each trajectory. Raises ValueError for one that lacks a key of the loss; it is named."""
        is_supervised = self.loss_fn == "cross_entropy"
        needs = () if is_supervised else ("logprobs", "advantage")
        datums = []
        for index, one in enumerate(trajectories):
            check_trajectory(one, vocabulary_size=2**31, needs=needs, index=index)
            tokens, mask = list(one["tokens"]), [int(each) for each in one["loss_mask"]]
            inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": mask[1:]}
            if not is_supervised:
                inputs["logprobs"] = [float(each) for each in one["logprobs"][1:]]
                inputs["advantages"] = [float(one["advantage"]) * counts for counts in mask[1:]]
            datums.append({"model_input": tokens[:-1], "loss_fn_inputs": inputs})
        return datums


class RemoteApiGrpoTrainer(RemoteApiTrainer):
    """GRPO: advantages relative to the group, trained with importance sampling."""

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        trajectories = compute_grpo_advantage_for_trajectories(trajectories, logger=logger, use_run_ids=True)
        log_grpo_metrics(trajectories, metrics)
        return trajectories


class RemoteApiCrossEntropyTrainer(RemoteApiTrainer):
    """Supervised training: the tokens that count are what the model shall say; rewards are not used."""

    loss_fn = "cross_entropy"

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        metrics["supervised_tokens"] = float(sum(sum(map(bool, one["loss_mask"])) for one in trajectories))
        return trajectories


def trajectory_of(datum: Datum) -> Trajectory:
    """Return the trajectory of a datum, as `PolicyTrainer.forward_backward` takes it."""
    inputs = datum["loss_fn_inputs"]
    found = {
        "tokens": [*datum["model_input"], inputs["target_tokens"][-1]],
        "loss_mask": [0, *inputs["weights"]],
    }
    if "logprobs" in inputs:
        found["logprobs"] = [0.0, *inputs["logprobs"]]
    if "advantages" in inputs:
        found["advantages"] = [0.0, *inputs["advantages"]]
    return found
