"""Trainer process: an actor that updates a policy with the batches of the coordinator, and publishes its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from fray.api.actors.handle import ActorHandle
from fray.api.objects import allocate, put
from fray.rl.checkpoint_store import Location, directory_to_read, directory_to_write
from fray.rl.core.versions import VersionName
from fray.rl.inference.http_settings import WeightAddress
from fray.rl.messages import TrainingBatch, repeatable
from fray.rl.model_spec import ModelSpec
from fray.rl.nexrl.activity_tracker import ActivityTracker, ActivityTrackerProxy
from fray.rl.nexrl.experiment_posts import NO_POSTS, FetchedPosts, PostQueue
from fray.rl.nexrl_types import Trajectory
from fray.rl.process_start import loading
from fray.rl.train.settings import GRPO
from fray.rl.trainer.base_trainer import BaseTrainer, mean_reward
from fray.rl.weights.published import PublishedWeights, WeightFile
from fray.rl.weights_table import WeightTable
from fray.runtime.serialization.pickling import loads


@frozen
class TrainedStep:
    """Result of an update."""

    number: int
    """Number of the update, from 1."""
    line: int
    """Incarnation of the trainer."""
    metrics: dict[str, float]
    skipped: str = ""
    """Reason why the weights are as before; empty: they are new."""
    posts: FetchedPosts = NO_POSTS
    """Posts of the user's trainer to the trackers of the run."""


class TrainerProcess:
    """Actor that trains a policy.

    Args:
        model: whose weights it begins with.
        settings: of the trainer.
        coordinator: of the run.
        threads: of the computation; None: as many as torch takes.
        dump_directory: for a batch with which updates fail; None: a new directory for temporary files.
        own: the user's trainer, which takes the place of the one of the settings; None: there is none.
    """

    def __init__(
        self,
        model: ModelSpec,
        settings: GRPO,
        coordinator: ActorHandle,
        threads: int | None = None,
        dump_directory: Path | None = None,
        own: BaseTrainer | None = None,
    ) -> None:
        self._coordinator, self._line = coordinator, 0
        self._tracker, self._posts = ActivityTracker(), PostQueue()
        # The thresholds stay: garbage of an update may have tensors of the size of the model.
        with loading(thresholds=None):
            self._trainer = self._load(model, settings, threads, dump_directory, own)

    def _load(
        self,
        model: ModelSpec,
        settings: GRPO,
        threads: int | None,
        dump_directory: Path | None,
        own: BaseTrainer | None,
    ) -> Any:
        # Torch is loaded here, in the trainer's process, and not where this actor is created.
        from fray.rl.tensors.language_model import hide_progress, load_model, set_threads
        from fray.rl.tensors.policy_trainer import PolicyTrainer

        hide_progress()
        if threads is not None:
            set_threads(threads)

        def policy(settings: GRPO) -> PolicyTrainer:
            return PolicyTrainer(load_model(model, settings.dtype), settings, dump_directory=dump_directory)

        if own is None:
            return policy(settings)
        own.set_policy(policy)
        self._tracker.experiment_logger.elsewhere = self._posts.post
        own.set_activity_tracker(ActivityTrackerProxy(self._tracker))
        own.initialize_workers()
        return _OwnTrainer(own)

    async def ping(self) -> None:
        """Return: the process answers, whatever its training thread does. For health checks."""

    async def start(self, line: int, directory: Location | None) -> None:
        """Begin with the weights of the model, or continue from a checkpoint.

        Args:
            line: incarnation of the trainer, as in the names of the versions that it makes.
            directory: that `save` wrote.
        """
        self._line = line
        if directory is not None:
            await trio.to_thread.run_sync(self._continue_from, directory)

    async def train_next(self) -> TrainedStep | None:
        """Do the next update; wait for its batch. None if there will be none."""
        began = trio.current_time()
        batch: TrainingBatch | None = await repeatable(self._coordinator, "next_batch")(self._line)
        wait_s = trio.current_time() - began
        if batch is None:
            return None
        trajectories = [one for group in batch.groups for content in group for one in loads(content)]
        self._tracker.set_training_step(batch.number)
        metrics = await trio.to_thread.run_sync(self._trainer.update, trajectories)
        metrics |= {"wait_s": wait_s, **ages_of(trajectories, batch.number - 1)}
        # A batch without anything to learn from is an update all the same: a run that has learned all comes to its end.
        skipped = "not_finite" if metrics["not_finite"] else ""
        return TrainedStep(batch.number, self._line, metrics, skipped, self._posts.fetch())

    async def save(self, directory: Location) -> None:
        """Write the model, and what is needed to continue, into a directory."""
        await trio.to_thread.run_sync(self._save, directory)

    def _save(self, location: Location) -> None:
        with directory_to_write(location) as directory:
            self._trainer.save(directory)

    def _continue_from(self, location: Location) -> None:
        with directory_to_read(location) as directory:
            self._trainer.load(directory)

    async def publish(self, path: Path | None = None) -> PublishedWeights | None:
        """Return the weights as they are now: a reference to shared memory of this process, or to a file.

        None if the trainer has no weights: servers keep those that they have.

        Args:
            path: file of safetensors to write. Default: shared memory, and where there is no room for it, memory of
                this process that readers copy.
        """
        if self._trainer.table is None:
            return None
        if path is not None:
            table = await trio.to_thread.run_sync(self._trainer.write_weight_file, path)
            return PublishedWeights(table, WeightFile(path))
        table = self._trainer.table
        try:
            buffer = await allocate(table.total_bytes)
        except MemoryError:
            buffer = memoryview(bytearray(table.total_bytes))
        await trio.to_thread.run_sync(self._trainer.write_weights, buffer)
        return PublishedWeights(table, await put(buffer))

    async def send_weights(self, address: WeightAddress, version: VersionName, weights: PublishedWeights) -> None:
        """Post weights that `publish` returned to a server.

        Raises:
            ObjectLost: they are gone: newer ones have replaced them.
            ConnectionError, ValueError: as `post_weights`.
        """
        # Here: the trainer of a run that needs it is the only one to load an HTTP client.
        from fray.rl.inference.weight_transfer import post_weights

        await post_weights(address, version, weights.table, await weights.content)


class _OwnTrainer:
    """The user's trainer, with the methods of `PolicyTrainer`."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer
        self.write_weights, self.write_weight_file = trainer.write_weights, trainer.write_weight_file
        self.save, self.load = trainer.save, trainer.load

    @property
    def table(self) -> WeightTable | None:
        return self._trainer.weight_table

    def update(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """Train; return metrics as numbers. Raises TypeError for metrics of another kind."""
        name = f"{type(self._trainer).__name__}.train"
        found = self._trainer.train(trajectories)
        if not isinstance(found, Mapping):
            raise TypeError(f"{name} returned {type(found).__name__}; expected a dict of metrics, numbers by name")
        metrics = {**mean_reward(trajectories), "not_finite": 0.0}
        for key, value in found.items():
            try:
                metrics[str(key)] = float(value)
            except (TypeError, ValueError):
                raise TypeError(f"{name} returned {key!r}: {value!r}; expected numbers") from None
        return metrics


def ages_of(trajectories: Iterable[Mapping[str, Any]], current: int) -> dict[str, float]:
    """Return the share of tokens by age: ``age/0`` are those of the current version, ``age/1`` of the one before it.

    Args:
        current: number of updates that the trainer's weights have.
    """
    counts: Counter[int] = Counter()
    for one in trajectories:
        for version, tokens in one.get("versions") or ():
            counts[current - version.number] += tokens
    total = counts.total()
    return {f"age/{age}": count / total for age, count in sorted(counts.items())}
