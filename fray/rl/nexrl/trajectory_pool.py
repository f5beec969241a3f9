"""Pools of trajectories: a store for each model, from which batches of whole groups are taken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

import trio

from fray.errors import InvalidRequest
from fray.model.text import near_text
from fray.rl.core.run_record import ADDED
from fray.rl.core.tasks import RolloutTask
from fray.rl.core.trajectory_store import ReadyRule, Sample, TrajectoryStore
from fray.rl.nexrl.activity_tracker import ActivityTrackerProxy
from fray.rl.nexrl.data_loader import BaseDataLoader
from fray.rl.nexrl.nexrl_module import NexRLModule
from fray.rl.nexrl_types import DEFAULT_MODEL_TAG, Batch, ModelTag, Trajectory

T = TypeVar("T")
READY_RULES = [*(rule.value for rule in ReadyRule), "batch_size_reached"]


class SimpleTrajectoryStore(TrajectoryStore):
    """Store of trajectories that are not compared: each is a group of its own."""

    def __init__(self, keys: Sequence[str], group_size: int, batch_size: int, rule: ReadyRule) -> None:
        super().__init__(group_size, batch_size, rule)
        self._keys = tuple(keys)
        self._numbers = count()

    def put_trajectory(self, trajectory: Trajectory) -> None:
        """Add a trajectory. Raises ValueError if it lacks a key by which the store groups."""
        number = next(self._numbers)
        if missing := [key for key in self._keys if key not in trajectory]:
            have = ", ".join(sorted(trajectory))
            raise ValueError(f"a trajectory lacks {missing[0]!r}, a key of trajectory_pool.key_list; it has {have}")
        sample = Sample(
            RolloutTask(ADDED, number, 0, number),
            0,
            tuple(map(tuple, trajectory.get("versions", ()))),
            (float(trajectory.get("reward") or 0.0),),
            trajectory,
        )
        self.put(sample, self._key_of(trajectory, number))

    def take_batch(self, batch_size: int | None, *, batch_finished: bool, is_last: bool) -> list[Trajectory] | None:
        """Return the trajectories of a batch and remove them; None if none is ready.

        Args:
            batch_size: None for that of the store.
            batch_finished, is_last: as for `TrajectoryStore.is_ready`.

        Raises:
            ValueError: no whole number of groups fills a batch of this size.
        """
        usual = self.batch_size
        self.batch_size = batch_size or usual
        try:
            self.check_sizes()
            if not self.is_ready(batch_finished=batch_finished, is_last=is_last):
                return None
            groups, lost = self.choose()
            self.take([sample_id for group in groups for sample_id in group.sample_ids], lost)
        finally:
            self.batch_size = usual
        return [sample.content for group in groups for sample in group.samples]

    def _key_of(self, trajectory: Trajectory, number: int) -> tuple[Hashable, ...]:
        return (number,)


class GroupedTrajectoryStore(SimpleTrajectoryStore):
    """Store of trajectories in groups of equal values of one key."""

    def _key_of(self, trajectory: Trajectory, number: int) -> tuple[Hashable, ...]:
        return tuple(trajectory[key] for key in self._keys)


class HierarchicalTrajectoryStore(GroupedTrajectoryStore):
    """Store of trajectories in groups of equal values of several keys: the leaves of a tree are groups."""


def trajectory_store(config: Mapping[str, Any]) -> SimpleTrajectoryStore:
    """Return the store of a pool's configuration: simple, grouped or hierarchical by the length of ``key_list``.

    Raises:
        InvalidRequest: an unknown ready rule, groups without a key, or a ``batch_size`` that no whole number of groups
            fills.
    """
    keys = list(config.get("key_list") or ())
    group_size, batch_size = int(config.get("group_size") or 1), int(config.get("batch_size") or 1)
    name = str(config.get("check_batch_ready_function") or ReadyRule.BATCH_SIZE.value)
    if name not in READY_RULES:
        expected = f"expected one of {', '.join(map(repr, READY_RULES))}{near_text(name, READY_RULES)}"
        raise InvalidRequest(f"invalid trajectory_pool.check_batch_ready_function {name!r}; {expected}")
    if not keys and group_size != 1:
        raise InvalidRequest(f"trajectory_pool.group_size is {group_size}, but key_list is empty: name the group's key")
    kinds = (SimpleTrajectoryStore, GroupedTrajectoryStore, HierarchicalTrajectoryStore)
    try:
        return kinds[min(len(keys), 2)](keys, group_size, batch_size, ReadyRule(name))
    except ValueError as error:
        raise InvalidRequest(f"trajectory_pool: {error}") from None


class _Waiters:
    """Tasks that wait for a change, in any Trio run; `notify` may be called in any thread."""

    def __init__(self) -> None:
        self._waiting: dict[trio.Event, trio.lowlevel.TrioToken] = {}

    def notify(self) -> None:
        for event, token in list(self._waiting.items()):
            # The run of a task that is cancelled right now may have ended.
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(event.set)

    async def first(self, find: Callable[[], tuple[T] | None]) -> T:
        """Return what ``find`` finds; it is called again after each `notify` until it does."""
        # Before, and not after: what was found has been taken from its store.
        await trio.lowlevel.checkpoint()
        while True:
            event = trio.Event()
            self._waiting[event] = trio.lowlevel.current_trio_token()
            try:
                if (found := find()) is not None:
                    return found[0]
                await event.wait()
            finally:
                del self._waiting[event]


class TrajectoryPoolInstance(NexRLModule):
    """Trajectories of one model. May be used by several threads.

    Args:
        config: ``key_list``, ``group_size``, ``batch_size``, ``check_batch_ready_function``.
        model_tag: of the model.
    """

    def __init__(
        self, config: Mapping[str, Any], model_tag: ModelTag = DEFAULT_MODEL_TAG, waiters: _Waiters | None = None
    ) -> None:
        super().__init__()
        self._waiters = waiters or _Waiters()
        self._model_tag = model_tag
        self.store = trajectory_store(config)
        self._dataloader: BaseDataLoader | None = None
        self._weight_sync_controller: Any = None
        self._is_locked = False
        self._lock = threading.Lock()

    def set_module_references(
        self,
        dataloader: BaseDataLoader | None,
        weight_sync_controller: Any,
        activity_tracker: ActivityTrackerProxy,
    ) -> None:
        """Set the data loader, which says whether the loaded batch is finished, and who is notified of batches."""
        self._dataloader, self._weight_sync_controller = dataloader, weight_sync_controller
        self.set_activity_tracker(activity_tracker)
        activity_tracker.add_listener(self._waiters.notify)

    def put_trajectory(self, trajectory: Trajectory) -> str:
        """Add a trajectory.

        Returns:
            ``"success"``, or ``"re-rollout"`` while weights are synchronised: roll it out again with the new ones.

        Raises:
            ValueError: it lacks a key of ``key_list``.
        """
        with self._lock:
            if self._is_locked:
                return "re-rollout"
            self.store.put_trajectory(trajectory)
            is_ready = self.store.is_ready(batch_finished=self._is_batch_finished, is_last=False)
        self._waiters.notify()
        if is_ready and self._weight_sync_controller is not None:
            self._weight_sync_controller.trajectory_pool_notify_batch_ready(self._model_tag)
        return "success"

    def get_batch(self, batch_size: int | None = None) -> Batch | None:
        """Return a batch of whole groups and remove it; None if none is ready.

        Raises:
            ValueError: no whole number of groups fills a batch of this size.
        """
        with self._lock:
            is_last = self._is_batch_finished and self._dataloader is not None and self._dataloader.is_finished()
            taken = self.store.take_batch(batch_size, batch_finished=self._is_batch_finished, is_last=is_last)
        return Batch.from_trajectories(taken, self._model_tag) if taken else None

    async def next_batch(self, batch_size: int | None = None) -> Batch | None:
        """Return a batch of whole groups as soon as one is ready, and remove it; None if there will be none.

        There will be none if the data loader is finished, no module that is registered as a rollout worker works, and
        no group is complete; of a tracker in another process, the end of work is not noticed here.

        Raises:
            ValueError: no whole number of groups fills a batch of this size.
        """
        return await self._waiters.first(lambda: _found(self.is_exhausted, self.get_batch(batch_size)))

    @property
    def is_exhausted(self) -> bool:
        """True if no further trajectory will come, as far as the data loader and the activity tracker say."""
        return self._dataloader is not None and self._dataloader.is_finished() and self._is_batch_finished

    def is_empty(self) -> bool:
        """Return whether it has no trajectory."""
        with self._lock:
            return not self.store.samples

    def notify_weight_sync_starting(self) -> None:
        """Refuse trajectories until `unlock_for_weight_sync`."""
        with self._lock:
            self._is_locked = True

    def unlock_for_weight_sync(self) -> None:
        """Accept trajectories again."""
        with self._lock:
            self._is_locked = False

    @property
    def _is_batch_finished(self) -> bool:
        # As the guide's modules know it. A run on Fray knows more: no lease is open.
        loader = self._dataloader
        is_drained = loader is None or not loader.can_return_item()
        return is_drained and bool(self._activity_tracker.is_rollout_worker_quiescent())


class TrajectoryPool(NexRLModule):
    """Trajectories of all models, in a `TrajectoryPoolInstance` for each ``model_tag``.

    Args:
        config: as for `TrajectoryPoolInstance`.

    Raises:
        InvalidRequest: as `trajectory_store`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        trajectory_store(config)  # refused now, and not with the first trajectory
        self._config = config
        self._instances: dict[ModelTag, TrajectoryPoolInstance] = {}
        self._waiters = _Waiters()
        self._references: tuple[BaseDataLoader | None, Any, ActivityTrackerProxy] | None = None
        self._lock = threading.Lock()

    def set_module_references(
        self,
        dataloader: BaseDataLoader | None,
        weight_sync_controller: Any,
        activity_tracker: ActivityTrackerProxy,
    ) -> None:
        """Set the references of all instances, those to come included."""
        with self._lock:
            self._references = (dataloader, weight_sync_controller, activity_tracker)
            if not self._instances:
                # Before the first trajectory, too: the data may end without any.
                activity_tracker.add_listener(self._waiters.notify)
            for instance in self._instances.values():
                instance.set_module_references(*self._references)

    def put_trajectory(self, trajectory: Trajectory) -> str:
        """Add a trajectory to the store of its ``model_tag`` (default ``"default"``).

        Result and errors are those of `TrajectoryPoolInstance.put_trajectory`.
        """
        return self.instance(str(trajectory.get("model_tag") or DEFAULT_MODEL_TAG)).put_trajectory(trajectory)

    def get_batch(self, batch_size: int | None = None, model_tag: ModelTag | None = None) -> Batch | None:
        """Return a batch of one model, or of any if ``model_tag`` is None; None if none is ready."""
        if model_tag is None:
            return self.get_batch_any(batch_size)
        instance = self._instances.get(model_tag)
        return None if instance is None else instance.get_batch(batch_size)

    def get_batch_any(self, batch_size: int | None = None) -> Batch | None:
        """Return a batch of the first model that has one; None if none has."""
        batches = (self._instances[tag].get_batch(batch_size) for tag in self.get_model_tags())
        return next((batch for batch in batches if batch is not None), None)

    async def next_batch(self, batch_size: int | None = None, model_tag: ModelTag | None = None) -> Batch | None:
        """Return a batch of one model, or of any if ``model_tag`` is None, as soon as one is ready, and remove it.

        None if there will be none; see `TrajectoryPoolInstance.next_batch`. Waiting costs nothing: it ends with the
        trajectory, or the end of work, that makes the batch ready.

        Raises:
            ValueError: no whole number of groups fills a batch of this size.
        """
        return await self._waiters.first(lambda: _found(self._is_exhausted, self.get_batch(batch_size, model_tag)))

    @property
    def _is_exhausted(self) -> bool:
        loader, _, tracker = self._references or (None, None, None)
        if loader is None or tracker is None:
            return False
        return loader.is_finished() and bool(tracker.is_rollout_worker_quiescent())

    def is_empty(self, model_tag: ModelTag | None = None) -> bool:
        """Return whether the store of a model, or all stores, are empty."""
        tags = self.get_model_tags() if model_tag is None else [model_tag]
        return all(tag not in self._instances or self._instances[tag].is_empty() for tag in tags)

    def get_model_tags(self) -> list[ModelTag]:
        """Return the tags of all models that have a store."""
        with self._lock:
            return list(self._instances)

    def instance(self, model_tag: ModelTag = DEFAULT_MODEL_TAG) -> TrajectoryPoolInstance:
        """Return the pool of one model, which is made if there is none."""
        with self._lock:
            if model_tag not in self._instances:
                instance = TrajectoryPoolInstance(self._config, model_tag, self._waiters)
                self._instances[model_tag] = instance
                if self._references is not None:
                    instance.set_module_references(*self._references)
            return self._instances[model_tag]

    def notify_weight_sync_starting(self, model_tag: ModelTag) -> None:
        """Refuse trajectories of a model until `unlock_for_weight_sync`."""
        self.instance(model_tag).notify_weight_sync_starting()

    def unlock_for_weight_sync(self, model_tag: ModelTag) -> None:
        """Accept trajectories of a model again."""
        self.instance(model_tag).unlock_for_weight_sync()


def _found(is_exhausted: bool, batch: Batch | None) -> tuple[Batch | None] | None:
    """Return a batch, or that there will be none; None while there may be one.

    The arguments are evaluated in this order: what is put before the end is in the batch.
    """
    return None if batch is None and not is_exhausted else (batch,)
