"""Trainers that send datums to a service with Tinker's verbs: in this process, or over HTTP."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fray.rl.algorithm.core_algos import compute_grpo_advantage_for_trajectories
from fray.rl.nexrl_types import Trajectory
from fray.rl.train.lora import LoRA
from fray.rl.train.settings import GRPO
from fray.rl.train.trajectory_checks import check_trajectory
from fray.rl.trainer.base_trainer import BaseTrainer, mean_reward
from fray.rl.trainer.tinker_service import TinkerService
from fray.rl.utils.logging_utils import log_grpo_metrics
from fray.rl.weights_table import WeightTable

if TYPE_CHECKING:
    from fray.rl.tensors.policy_trainer import PolicyTrainer

logger = logging.getLogger("fray.rl")
Datum = dict[str, Any]
"""``model_input``: tokens but the last; ``loss_fn_inputs``: of the tokens after the first, lists of equal length:
``target_tokens``, ``weights`` (1 where a token counts), and for a policy loss ``logprobs`` and ``advantages``."""


class TinkerServiceHolder:
    """Service that trains: a `PolicyTrainer` in this process, or with ``base_url`` a Tinker API over HTTP.

    Any object with `train` will do for a trainer. In a run, servers get its weights if it has the other methods, too.

    Args:
        policy: that is trained in this process.
        base_url: of the service, without ``/api/v1``: https, or http on loopback.
        base_model: name of a model that the service has; the run's model has the same weights.
        rank: of the adapter that is trained.
        seed: of its first weights.
        train_attn, train_mlp, train_unembed: layers that it adapts.
        api_key: ``tml-…``. Default: that of ``key_file``, or of the variable ``FRAY_TINKER_KEY`` or ``TINKER_API_KEY``,
            in the process of the trainer; unlike them it is sent there with the trainer.
        key_file: file with the key, on the trainer's machine.
        ca_file: certificates that the service's is signed by. Default: those of the system.
        timeout_s: seconds for which the service may not answer, such as while it is started again.

    Raises:
        TypeError: both or neither of ``policy`` and ``base_url`` are given, or ``base_model`` is missing.
        ValueError: the address or a setting is invalid.
    """

    def __init__(
        self,
        policy: PolicyTrainer | None = None,
        *,
        base_url: str | None = None,
        base_model: str | None = None,
        rank: int = 32,
        seed: int = 0,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
        api_key: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if (policy is None) == (base_url is None):
            raise TypeError("TinkerServiceHolder needs a policy, or base_url and base_model, and not both")
        self._policy, self._service = policy, None
        if base_url is not None:
            if base_model is None:
                raise TypeError(
                    "TinkerServiceHolder(base_url=...) needs base_model, the name of a model of the service"
                )
            lora = LoRA(rank, attention=train_attn, mlp=train_mlp, unembed=train_unembed, seed=seed)
            self._service = TinkerService(base_url, base_model, lora, api_key, key_file, ca_file, timeout_s)

    @property
    def _target(self) -> Any:
        return self._service or self._policy

    def use(self, settings: GRPO) -> GRPO:
        """Take the settings of a trainer; return those with which the servers of its run can load the weights.

        Raises:
            ValueError: they ask for what the service does not do.
        """
        return settings if self._service is None else self._service.use(settings)

    def train(self, datums: Sequence[Datum], config: Mapping[str, Any]) -> dict[str, float]:
        """Add the gradient of datums and do an optimizer step; return metrics.

        Args:
            datums: as `Datum`.
            config: ``loss_fn`` (one of `LOSS_OPTIONS`), ``learning_rate`` (default: that of the settings); over HTTP
                also ``loss_fn_config``, settings of the loss.

        Raises:
            ValueError: a datum is invalid, the message has its place; or the service refuses the request.
            ConnectionError: the service did not answer for ``timeout_s``.
            NonFiniteUpdatesError: over HTTP, the loss is not finite.
        """
        if self._service is not None:
            return self._service.train(datums, config)
        assert self._policy is not None
        rows = [trajectory_of(datum) for datum in datums]
        metrics = self._policy.forward_backward(rows, loss=config.get("loss_fn"))
        return metrics | self._policy.optim_step(config.get("learning_rate"))

    @property
    def weight_table(self) -> WeightTable:
        """Table of the flat buffer of weights that servers receive."""
        table: WeightTable = self._target.table
        return table

    def write_weights(self, buffer: Any) -> None:
        """Copy the weights into a buffer of the table's size."""
        self._target.write_weights(buffer)

    def write_weight_file(self, path: Path) -> WeightTable:
        """Write the weights into a file of safetensors; return its table."""
        table: WeightTable = self._target.write_weight_file(path)
        return table

    def save(self, directory: Path) -> None:
        """Write what is needed to continue into a directory; over HTTP, the service keeps weights and optimizer."""
        self._target.save(directory)

    def load(self, directory: Path) -> None:
        """Continue from a directory that `save` wrote."""
        self._target.load(directory)

    def close(self) -> None:
        """End the session with the service, if there is one; what was saved stays."""
        if self._service is not None:
            self._service.close()


class RemoteApiTrainer(BaseTrainer):
    """Trainer whose subclasses prepare trajectories, which a service trains."""

    loss_fn = "importance_sampling"
    """Loss that the service is asked for."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._given_holder: Any = None

    def set_service_holder(self, service_holder: Any) -> None:
        """Set the service, before the trainer is given to a run.

        Args:
            service_holder: an object with ``train(datums, config)``, which returns metrics; for weights that servers
                receive and checkpoints, with the other methods of `TinkerServiceHolder`.

        Raises:
            ValueError: the settings ask for what the service does not do.
        """
        if hasattr(service_holder, "use"):
            self.settings = service_holder.use(self.settings)
        self._given_holder = service_holder

    @property
    def _service_holder(self) -> Any:
        return self._given_holder or TinkerServiceHolder(self.policy)

    @property
    def _weight_source(self) -> Any:
        """The service, if it gives out weights, or the methods of `BaseTrainer` for the policy."""
        return self._given_holder if hasattr(self._given_holder, "write_weights") else super()

    @property
    def weight_table(self) -> WeightTable | None:
        """Table of the weights that servers receive: those of the service, if it gives them out."""
        table: WeightTable | None = self._weight_source.weight_table
        return table

    def write_weights(self, buffer: Any) -> None:
        """Copy the weights into a buffer of the table's size."""
        self._weight_source.write_weights(buffer)

    def write_weight_file(self, path: Path) -> WeightTable:
        """Write the weights into a file of safetensors; return its table."""
        table: WeightTable = self._weight_source.write_weight_file(path)
        return table

    def save(self, directory: Path) -> None:
        """Write what is needed to continue into a directory, which is made."""
        self._weight_source.save(directory)

    def load(self, directory: Path) -> None:
        """Continue from a directory that `save` wrote."""
        self._weight_source.load(directory)

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
