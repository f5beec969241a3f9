"""Trainer process: an actor that updates a policy with the batches of the coordinator, and publishes its weights."""

from __future__ import annotations

from pathlib import Path

import trio
from attrs import frozen

from fray.api.actors.handle import ActorHandle
from fray.api.objects import allocate, put
from fray.rl.messages import TrainingBatch, repeatable
from fray.rl.model_spec import ModelSpec
from fray.rl.train.settings import GRPO
from fray.rl.weights.published import PublishedWeights, WeightFile
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


class TrainerProcess:
    """Actor that trains a policy.

    Args:
        model: whose weights it begins with.
        settings: of the trainer.
        coordinator: of the run.
        threads: of the computation; None: as many as torch takes.
        dump_directory: for a batch with which updates fail; None: a new directory for temporary files.
    """

    def __init__(
        self,
        model: ModelSpec,
        settings: GRPO,
        coordinator: ActorHandle,
        threads: int | None = None,
        dump_directory: Path | None = None,
    ) -> None:
        # Torch is loaded here, in the trainer's process, and not where this actor is created.
        from fray.rl.tensors.language_model import hide_progress, load_model, set_threads
        from fray.rl.tensors.policy_trainer import PolicyTrainer

        hide_progress()
        if threads is not None:
            set_threads(threads)
        self._coordinator, self._line = coordinator, 0
        self._trainer = PolicyTrainer(load_model(model, settings.dtype), settings, dump_directory=dump_directory)

    async def ping(self) -> None:
        """Return: the process answers, whatever its training thread does. For health checks."""

    async def start(self, line: int, directory: Path | None) -> None:
        """Begin with the weights of the model, or continue from a checkpoint.

        Args:
            line: incarnation of the trainer, as in the names of the versions that it makes.
            directory: that `save` wrote.
        """
        self._line = line
        if directory is not None:
            await trio.to_thread.run_sync(self._trainer.load, directory)

    async def train_next(self) -> TrainedStep | None:
        """Do the next update; wait for its batch. None if there will be none."""
        batch: TrainingBatch | None = await repeatable(self._coordinator, "next_batch")(self._line)
        if batch is None:
            return None
        trajectories = [one for group in batch.groups for content in group for one in loads(content)]
        metrics = await trio.to_thread.run_sync(self._trainer.update, trajectories)
        # A batch without anything to learn from is an update all the same: a run that has learned all comes to its end.
        return TrainedStep(batch.number, self._line, metrics, "not_finite" if metrics["not_finite"] else "")

    async def save(self, directory: Path) -> None:
        """Write the model, and what is needed to continue, into a directory."""
        await trio.to_thread.run_sync(self._trainer.save, directory)

    async def publish(self, path: Path | None = None) -> PublishedWeights:
        """Return the weights as they are now: a reference to shared memory of this process, or to a file.

        Args:
            path: file of safetensors to write. Default: shared memory, and where there is no room for it, memory of
                this process that readers copy.
        """
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
