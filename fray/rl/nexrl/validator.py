"""Validator: trajectories of a validation, and the means of their scores."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from fray.rl.core.validation import means_of
from fray.rl.nexrl.data_loader import BaseDataLoader
from fray.rl.nexrl.nexrl_module import NexRLModule
from fray.rl.nexrl_types import Trajectory


class Validator(NexRLModule):
    """Collection of validation trajectories. May be used by several threads.

    In a run, validation is part of the coordinator (`fray.rl.core.validation`), which averages by the same function.

    Args:
        config: ``backend``: where the means are posted (default ``"wandb"``).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._config = config
        self._dataloader: BaseDataLoader | None = None
        self._trajectories: list[Trajectory] = []
        self._lock = threading.Lock()

    def set_module_references(self, validate_dataloader: BaseDataLoader) -> None:
        """Set the loader of the validation data."""
        self._dataloader = validate_dataloader

    def put_trajectory(self, trajectory: Trajectory) -> str:
        """Add a trajectory.

        Returns:
            ``"success"``; ``"fail"`` for one whose ``is_val`` is False: it is of a training task.
        """
        if trajectory.get("is_val") is False:
            return "fail"
        with self._lock:
            self._trajectories.append(trajectory)
        return "success"

    def is_complete(self) -> bool:
        """Return whether the validation data is rolled out: its loader has no item, and no rollout worker works."""
        is_drained = self._dataloader is None or self._dataloader.is_finished()
        return is_drained and self._activity_tracker.is_rollout_worker_quiescent()

    def compute_and_log_metrics(self) -> dict[str, float]:
        """Return the mean of each name in ``score`` over the trajectories that have it, and post them.

        Names have the prefix ``val/``. Trajectories without ``score`` count with their ``reward``.
        """
        with self._lock:
            scores = [_score_of(trajectory) for trajectory in self._trajectories]
        metrics = means_of(scores)
        step = self._activity_tracker.get_training_step()
        self._activity_tracker.experiment_logger_post(self._config.get("backend", "wandb"), data=metrics, step=step)
        return metrics

    def clear(self) -> None:
        """Forget all trajectories."""
        with self._lock:
            self._trajectories.clear()


def _score_of(trajectory: Trajectory) -> dict[str, float]:
    score = trajectory.get("score")
    if isinstance(score, Mapping):
        return {str(name): float(value) for name, value in score.items()}
    values = {"score": score, "reward": trajectory.get("reward")}
    return {name: float(value) for name, value in values.items() if value is not None}
