"""Weight sync controller: versions of trainer and servers of each model, by the schedule that a run uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from fray.errors import InvalidRequest
from fray.rl.core.versions import Gate, SyncMode, VersionName, WeightSchedule
from fray.rl.nexrl.data_loader import BaseDataLoader
from fray.rl.nexrl.nexrl_module import NexRLModule
from fray.rl.nexrl.trajectory_pool import TrajectoryPool
from fray.rl.nexrl_types import ModelTag

Transfer = Callable[[ModelTag, VersionName], object]
"""Sends the trainer's weights of a model, by the name of their version, to the inference service; waits until done."""


class WeightSyncController(NexRLModule):
    """Order of rollouts, updates and transfers of weights. May be used by several threads.

    In a run, this is part of the coordinator; the rules (`fray.rl.core.versions.WeightSchedule`) are the same.

    Args:
        config: ``sync_mode`` (default ``"sync"``), ``staleness_threshold`` (default 1), ``validate_freq`` (versions
            between two validations; default none).

    Raises:
        InvalidRequest: a value is of another kind.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        mode = config.get("sync_mode", SyncMode.SYNC.value)
        if mode not in [one.value for one in SyncMode]:
            names = ", ".join(repr(one.value) for one in SyncMode)
            raise InvalidRequest(f"invalid sync_mode {mode!r}; expected one of {names}")
        self._mode = SyncMode(mode)
        self._threshold = _whole("staleness_threshold", config.get("staleness_threshold", 1), least=0)
        every = config.get("validate_freq") or None
        self._validate_every = None if every is None else _whole("validate_freq", every, least=1)
        self._dataloader: BaseDataLoader | None = None
        self._pool: TrajectoryPool | None = None
        self._transfer: Transfer | None = None
        self._schedules: dict[ModelTag, WeightSchedule] = {}
        self._announced: set[ModelTag] = set()
        """Models with a batch that was not trained yet."""
        self._lock = threading.RLock()

    def set_module_references(self, dataloader: BaseDataLoader, trajectory_pool: TrajectoryPool) -> None:
        """Set the loader and the pool, which are locked and unlocked around transfers."""
        self._dataloader, self._pool = dataloader, trajectory_pool

    def set_transfer(self, transfer: Transfer) -> None:
        """Set the function that sends weights; without one, versions are counted alone."""
        self._transfer = transfer

    def check_rollout_service_status(self, model_tag: ModelTag) -> Literal["continue", "block"]:
        """Return ``"block"`` while rollouts of a model have to wait for its next weights, else ``"continue"``."""
        with self._lock:
            return "continue" if self._schedule(model_tag).gate is Gate.OPEN else "block"

    def trajectory_pool_notify_batch_ready(self, model_tag: ModelTag) -> None:
        """Note that a batch will be trained; if weights must be synced after it, the pool is locked until then.

        Further notifications before the update count as one.
        """
        with self._lock:
            if model_tag in self._announced:
                return
            self._announced.add(model_tag)
            schedule = self._schedule(model_tag)
            schedule.begin_update()
            if schedule.gate is not Gate.OPEN and self._pool is not None:
                self._pool.notify_weight_sync_starting(model_tag)

    def train_worker_notify_weight_update(self, worker_name: str, model_tag: ModelTag) -> None:
        """Note that a trainer has done an update, and send the weights if they are due.

        Args:
            worker_name: of the trainer, for its reader.
            model_tag: that was trained.
        """
        with self._lock:
            self.trajectory_pool_notify_batch_ready(model_tag)
            self._announced.discard(model_tag)
            self._schedule(model_tag).finish_update()
            self.sync_weight_to_rollout_service(model_tag)

    def sync_weight_to_rollout_service(self, model_tag: ModelTag) -> None:
        """Send the weights that servers shall have, and let rollouts continue; nothing if they have them."""
        with self._lock:
            schedule = self._schedule(model_tag)
            if (version := schedule.to_send) is not None:
                if self._transfer is not None:
                    self._transfer(model_tag, version)
                schedule.synced(version)
            if schedule.gate is Gate.OPEN:
                if self._pool is not None:
                    self._pool.unlock_for_weight_sync(model_tag)
                if self._dataloader is not None:
                    self._dataloader.unlock_for_weight_sync()

    def get_rollout_model_version(self, model_tag: ModelTag) -> int:
        """Return the number of the version that servers have: of updates before it."""
        with self._lock:
            return self._schedule(model_tag).rollout.number

    def is_waiting_for_validation(self) -> bool:
        """Return whether a version is to be validated; servers keep it until `end_validate`."""
        with self._lock:
            return any(schedule.pinned == schedule.rollout for schedule in self._schedules.values())

    def end_validate(self, model_tag: ModelTag) -> None:
        """Note that the validation of a model has ended, and send newer weights if they are due."""
        with self._lock:
            self._schedule(model_tag).end_validation()
            self.sync_weight_to_rollout_service(model_tag)

    def _schedule(self, model_tag: ModelTag) -> WeightSchedule:
        if model_tag not in self._schedules:
            self._schedules[model_tag] = WeightSchedule(self._mode, self._threshold, self._validate_every)
        return self._schedules[model_tag]


def _whole(name: str, value: object, *, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidRequest(f"invalid {name} {value!r}: expected a whole number of {least} or more")
    return value
