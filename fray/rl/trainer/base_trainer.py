"""Base class of trainers: a method from trajectories to metrics, and the policy of the run to train."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import fields

from fray.rl.nexrl.activity_tracker import ActivityTracker, ActivityTrackerProxy
from fray.rl.nexrl.nexrl_module import NexRLModule
from fray.rl.nexrl_types import Batch, ModelTag, Trajectory
from fray.rl.train.settings import GRPO
from fray.rl.weights_table import WeightTable

if TYPE_CHECKING:
    from fray.rl.tensors.policy_trainer import PolicyTrainer

IDLE_S = 0.05
"""Seconds between two looks at a pool that has no batch, in a thread of `BaseTrainer.run`."""
_NOT_PICKLED = ("_activity_tracker", "_thread", "_stopped", "_policy", "_make_policy")


class BaseTrainer(NexRLModule):
    """Trainer: `train` is all that a subclass must have.

    In a run (``rl.Run(trainer=MyTrainer(...))``) it is sent to the trainer's process, where `initialize_workers` is
    called, then `train` for each batch, in a thread. What it trains is `policy`, whose weights servers receive after
    each update. A trainer that never asks for its policy has no weights: the servers keep those of the model. One with
    weights of its own overrides `weight_table`, `write_weights`, `save` and `load`.

    Args:
        config: settings: a `GRPO`, or a mapping with keys of it; ``batch_size`` (samples of an update) stands for
            ``groups``, ``total_train_steps`` for ``steps``.
    """

    def __init__(self, config: GRPO | Mapping[str, Any]) -> None:
        super().__init__()
        self._config = config
        self.settings = settings_of(config)
        """Size of batches, number of steps, optimizer and algorithm."""
        self._model_tag: ModelTag = "default" if isinstance(config, GRPO) else str(config.get("model_tag", "default"))
        self._train_step = 0
        self._reset()

    def _reset(self) -> None:
        self._policy: PolicyTrainer | None = None
        self._make_policy: Callable[[GRPO], PolicyTrainer] | None = None
        self._pool: Any = None
        self._weight_sync_controller: Any = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self._activity_tracker = ActivityTrackerProxy(ActivityTracker())
        self.__dict__.update(state)

    @abstractmethod
    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """Train on the trajectories of a batch, whole groups of them; return metrics, numbers by name."""

    def initialize_workers(self) -> None:
        """Prepare to train, in the process of the trainer. Does nothing unless overridden."""

    # The policy

    def set_policy(self, make: Callable[[GRPO], PolicyTrainer]) -> None:
        """Set how `policy` is made; called by the process of the trainer."""
        self._make_policy = make

    @property
    def policy(self) -> PolicyTrainer:
        """Model and optimizer of the run, made when it is first used: `update`, or `forward_backward` and `optim_step`.

        Raises:
            RuntimeError: the trainer is not part of a run, and `set_policy` was not called.
        """
        if self._policy is None:
            if self._make_policy is None:
                raise RuntimeError(
                    f"{type(self).__name__} has no policy: expected rl.Run(trainer=...), or set_policy(lambda settings:"
                    " PolicyTrainer(load_model(model), settings))"
                )
            self._policy = self._make_policy(self.settings)
        return self._policy

    @property
    def weight_table(self) -> WeightTable | None:
        """Table of the flat buffer of weights that servers receive; None: they keep those of the model."""
        return None if self._policy is None else self._policy.table

    def write_weights(self, buffer: Any) -> None:
        """Copy the weights into a buffer of the table's size."""
        self.policy.write_weights(buffer)

    def write_weight_file(self, path: Path) -> WeightTable:
        """Write the weights into a file of safetensors; return its table."""
        return self.policy.write_weight_file(path)

    def save(self, directory: Path) -> None:
        """Write what is needed to continue into a directory, which is made: the policy, if there is one."""
        directory.mkdir(parents=True, exist_ok=True)
        if self._policy is not None:
            self._policy.save(directory)

    def load(self, directory: Path) -> None:
        """Continue from a directory that `save` wrote."""
        if any(directory.iterdir()):
            self.policy.load(directory)

    def check_ranks(self) -> None:
        """Check that all ranks of the trainer have the same weights. Raises ValueError if they have not."""
        if self._policy is not None:
            self._policy.check_ranks()

    # The guide's own loop, for a trainer beside a pool and no run

    def set_module_references(self, trajectory_pool: Any, weight_sync_controller: Any = None) -> None:
        """Set the pool that `run` takes batches from, and the controller that is notified of updates."""
        self._pool, self._weight_sync_controller = trajectory_pool, weight_sync_controller

    def run(self) -> None:
        """Train on the batches of the pool, in a thread, until `stop` or ``total_train_steps`` updates.

        Errors are reported to the activity tracker and end the loop.

        Raises:
            RuntimeError: `set_module_references` was not called.
        """
        if self._pool is None:
            raise RuntimeError(f"{type(self).__name__}.run() without a pool: call set_module_references first")
        self._stopped.clear()
        self._thread = threading.Thread(target=self._train_batches, name=self.get_module_name(), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the loop of `run`, and wait for the update that is under way."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _train_batches(self) -> None:
        while not self._stopped.is_set() and (not self.settings.steps or self._train_step < self.settings.steps):
            batch = self._pool.get_batch()
            if batch is None:
                self._stopped.wait(IDLE_S)
                continue
            try:
                with self._activity_tracker.track(self.get_module_name(), "train"):
                    self.train(trajectories_of(batch))
            except Exception:  # noqa: BLE001 (reported by the tracker; the thread has no caller)
                return
            self._train_step += 1
            self._activity_tracker.set_training_step(self._train_step)
            if self._weight_sync_controller is not None:
                tag = str(batch.metadata.get("model_tag", self._model_tag))
                self._weight_sync_controller.train_worker_notify_weight_update(self.get_module_name(), tag)


def trajectories_of(batch: Batch) -> list[Trajectory]:
    """Return the rows of a batch."""
    return [{name: column[row] for name, column in batch.values.items()} for row in range(len(batch))]


def settings_of(config: GRPO | Mapping[str, Any]) -> GRPO:
    """Return the settings of a trainer's configuration.

    Raises:
        ValueError: a value is out of its range, or no whole number of groups fills ``batch_size``.
    """
    if isinstance(config, GRPO):
        return config
    names = [attribute.name for attribute in fields(GRPO)]
    found = {name: config[name] for name in names if name in config}
    if config.get("total_train_steps") is not None:
        found.setdefault("steps", config["total_train_steps"])
    size = config.get("batch_size")
    if size is not None and "groups" not in found:
        group_size = found.setdefault("group_size", 1)
        if size % group_size:
            raise ValueError(f"invalid batch_size {size}: expected a multiple of the group_size {group_size}")
        found["groups"] = size // group_size
    return GRPO(**found)


def mean_reward(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metric ``reward_mean`` of trajectories that have rewards, and their number."""
    rewards = [float(one["reward"]) for one in trajectories if one.get("reward") is not None]
    counts = {"trajectories": float(len(trajectories))}
    return counts | ({"reward_mean": sum(rewards) / len(rewards)} if rewards else {})
