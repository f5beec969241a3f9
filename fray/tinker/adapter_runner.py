"""Base model of an engine with its adapters: in memory, on disk, in snapshots. Sync, in the threads of its engine.

A model is an adapter that is trained. What it saves is below the directory of the engine at ``MODEL/weights/NAME``,
``MODEL/sampler_weights/NAME`` and ``MODEL/external_weights/NAME``, beside ``MODEL/snapshots`` and, while it is not in
memory, ``MODEL/offloaded`` (``MODEL/offloaded-1`` by the second engine of the directory, and so on).
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path

from attrs import asdict, define, evolve, frozen

from fray.rl.checkpoint import begin_checkpoint, checkpoint_directories, finish_checkpoint, remove_older
from fray.rl.core.versions import VersionName
from fray.rl.inference.requests import Completion, GenerateRequest, TokenEvent
from fray.rl.model_spec import ModelSpec
from fray.rl.records.run_files import write_file
from fray.rl.train.lora import LoRA
from fray.tinker.core.adapter_operations import (
    AdapterOperation,
    ForwardPass,
    LoadWeights,
    OperationResult,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
    check_name,
    check_path,
)
from fray.tinker.saving import saving

SNAPSHOT_SHARE = 0.1
"""Share of a model's time that its snapshots may take."""
SNAPSHOT_FILE = "snapshot.json"
SAVED_FILE = "saved.json"
ENGINE_FILE = "engine.json"
"""Settings that a directory keeps."""
STEPS_S = 0.02
"""Seconds of sampling steps in one turn."""

log = logging.getLogger("fray.tinker")


@frozen(kw_only=True)
class AdapterEngineSettings:
    """Settings of an engine.

    Attributes:
        resident: most adapters in memory, those of samplers included; the others are on disk until they are used.
        slots: samples that are decoded at a time.
        slice_tokens: tokens of one forward pass of training, padding included: the unit in which users take turns. A
            directory keeps the value it began with, because the last digits of losses depend on it. None: that value,
            1024 for a new directory.
        threads: of the computation; None: as many as torch takes.
        dtype: of the base model; adapters have float32 at least.
        device: as torch has it.
        number: of the engine among those that share its directory; each model is trained by one of them.
    """

    resident: int = 64
    slots: int = 128
    slice_tokens: int | None = None
    threads: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    number: int = 0


@define(eq=False)
class TrainedModel:
    """A model and the place that it has reached.

    Attributes:
        name: of the adapter.
        user: who is served.
        lora: as it was made.
        seq: number of the last request that was executed; -1: none.
        before: number of the one before that.
        answer: to the last; None if it was executed by an engine that was lost.
        snapshot: number up to which a snapshot has everything; -1: there is none.
        snapshot_due: seconds of the clock.
        snapshot_error: why the last one failed; empty: it did not.
    """

    name: str
    user: str
    lora: LoRA
    seq: int = -1
    before: int = -1
    answer: OperationResult | None = None
    snapshot: int = -1
    snapshot_due: float = 0.0
    snapshot_error: str = ""


class AdapterRunner:
    """Base model, adapters and samples under way; its methods are called one at a time.

    Args:
        model: the base model.
        directory: of the engine.
        settings: of the engine.
        clock: seconds.

    Raises:
        ValueError: the directory has another ``slice_tokens``.
    """

    def __init__(
        self,
        model: ModelSpec,
        directory: Path,
        settings: AdapterEngineSettings,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # Torch is loaded here, in the engine's process.
        from fray.rl.tensors.adapter_trainer import SLICE_TOKENS, AdapterTrainer
        from fray.rl.tensors.engine import Engine
        from fray.rl.tensors.language_model import hide_progress, load_model, set_threads

        self.slice_tokens = _kept_slice_tokens(directory, settings.slice_tokens, SLICE_TOKENS)
        """Tokens of one forward pass of training."""
        hide_progress()
        if settings.threads is not None:
            set_threads(settings.threads)
        lm = load_model(model, settings.dtype, settings.device)
        self._trainer = AdapterTrainer(lm, slice_tokens=self.slice_tokens)
        self._adapters = self._trainer.adapters
        self._engine = Engine(lm, VersionName(0, 0), slots=settings.slots, adapters=self._adapters)
        self.slots = settings.slots
        self._directory, self._clock = directory, clock
        self._offloaded_folder = f"offloaded{f'-{settings.number}' if settings.number else ''}"
        self.max_length, self.vocabulary_size = lm.max_length, lm.vocabulary_size
        self.models: dict[str, TrainedModel] = {}
        self.resident: set[str] = set()
        self.keep: frozenset[str] = frozenset()
        """Adapters that may be in memory; another one leaves it when one comes."""
        # Of an engine that was lost: its snapshots count.
        for path in directory.glob(f"*/{self._offloaded_folder}"):
            shutil.rmtree(path, ignore_errors=True)

    # Models -----------------------------------------------------------------------------------------------------------

    def create(self, model_id: str, user: str, lora: LoRA) -> int:
        """Make a model or continue with its newest snapshot, as `AdapterEngine.create_adapter`."""
        check_name("model_id", model_id)
        if (model := self.models.get(model_id)) is not None:
            _check_same(model, lora)
            # The answer to the last may have been lost: it is asked for again.
            return model.seq if model.answer is None else model.before
        self._make_room()
        model = TrainedModel(model_id, user, lora)
        found = [
            (number, path)
            for path, number in checkpoint_directories(self._snapshots_of(model_id))
            if (path / SNAPSHOT_FILE).is_file()
        ]
        if found:
            number, path = max(found)
            model.lora = LoRA(**json.loads((path / SNAPSHOT_FILE).read_text(encoding="utf-8")))
            _check_same(model, lora)
            self._trainer.load(model_id, path, gradients=True)
            model.seq = model.before = model.snapshot = number
        else:
            self._trainer.create(model_id, lora)
        self.models[model_id] = model
        self.resident.add(model_id)
        return model.seq

    def remove(self, model_id: str) -> None:
        """Remove a model, its snapshots included."""
        check_name("model_id", model_id)
        self._forget(model_id)
        for place in (self._snapshots_of(model_id), self._offloaded(model_id)):
            shutil.rmtree(place, ignore_errors=True)

    def release(self, model_id: str) -> str:
        """Write a snapshot of a model and forget the model; return why it stays, empty: it has gone."""
        model = self.models[model_id]
        if model.seq > model.snapshot:
            self._bring(model_id)
            self._take_snapshot(model)
            if model.snapshot_error:
                return model.snapshot_error
        self._forget(model_id)
        shutil.rmtree(self._offloaded(model_id), ignore_errors=True)
        return ""

    def _forget(self, model_id: str) -> None:
        """Drop a model from memory, if it is known. Its files stay."""
        self.models.pop(model_id, None)
        if model_id in self.resident:
            self.resident.discard(model_id)
            self._trainer.remove(model_id)

    # Requests ---------------------------------------------------------------------------------------------------------

    def work(
        self, model: TrainedModel, seq: int, operation: AdapterOperation
    ) -> Generator[None, None, OperationResult]:
        """Execute an operation; yields where others may be served. One that fails has no effect."""
        self._bring(model.name)
        if model.seq > model.snapshot and self._clock() >= model.snapshot_due:
            self._take_snapshot(model)
        try:
            if isinstance(operation, ForwardPass):
                output = yield from self._trainer.forward(
                    model.name, operation.data, operation.loss, backward=operation.backward
                )
                answer = OperationResult(logprobs=output.logprobs, losses=output.losses, metrics={"loss": output.loss})
            elif isinstance(operation, OptimStep):
                answer = OperationResult(metrics=self._trainer.step(model.name, operation.params))
            elif isinstance(operation, LoadWeights):
                answer = self._load(model, operation)
            else:
                answer = self._save(model, seq, operation)
        except (ValueError, LookupError, OSError) as error:
            answer = OperationResult(error=str(error))
        except Exception as error:  # as one that needs more memory than there is: it fails alone
            log.exception("model %s: request %d failed", model.name, seq)
            answer = OperationResult(error=f"{type(error).__name__}: {error}")
        return evolve(answer, snapshot=model.snapshot, snapshot_error=model.snapshot_error)

    def finish(self, model: TrainedModel, seq: int, answer: OperationResult) -> None:
        """Note that a request was executed."""
        model.before, model.seq, model.answer = model.seq, seq, answer

    def _save(self, model: TrainedModel, seq: int, operation: SaveWeights | SaveWeightsForSampler) -> OperationResult:
        folder = "weights"
        if isinstance(operation, SaveWeightsForSampler):
            folder = "external_weights" if operation.is_external else "sampler_weights"
        path = f"{model.name}/{folder}/{operation.name}"
        if isinstance(operation, SaveWeights) and operation.overwrite:
            path += f"@{seq}"
        target, mark = self._directory / path, {"request": seq}
        is_there = (target / SAVED_FILE).is_file()
        # Of this request, before the engine was lost.
        is_mine = is_there and json.loads((target / SAVED_FILE).read_text(encoding="utf-8")) == mark
        if is_there and not is_mine:
            raise ValueError(f"{path}: there are saved weights of this name already; choose another name")
        if not is_mine:
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = begin_checkpoint(self._directory / model.name / "saving", 0)
            with saving(path, unfinished):
                self._trainer.save(model.name, unfinished, optimizer=folder == "weights")
                (unfinished / SAVED_FILE).write_text(json.dumps(mark), encoding="utf-8")
                saved = finish_checkpoint(unfinished, 0)
                if target.exists():
                    shutil.rmtree(target)
                saved.rename(target)
        return OperationResult(path=path, size=sum(file.stat().st_size for file in target.iterdir()))

    def _load(self, model: TrainedModel, operation: LoadWeights) -> OperationResult:
        source = self.saved(operation.path)
        if operation.optimizer and operation.path.split("/")[1] != "weights":
            raise ValueError(f"{operation.path} has no optimizer: expected MODEL/weights/NAME, or optimizer=False")
        self._trainer.load(model.name, source, optimizer=operation.optimizer)
        return OperationResult(path=operation.path)

    def saved(self, path: str) -> Path:
        """Return the directory of saved weights. Raises ValueError, FileNotFoundError as `AdapterEngine.sample`."""
        check_path(path)
        if not (self._directory / path / SAVED_FILE).is_file():
            raise FileNotFoundError(f"nothing was saved at {path!r}")
        return self._directory / path

    def remove_saved(self, path: str) -> None:
        """Remove saved weights, if they are there."""
        check_path(path)
        shutil.rmtree(self._directory / path, ignore_errors=True)

    def _take_snapshot(self, model: TrainedModel) -> None:
        began, place = self._clock(), self._snapshots_of(model.name)
        try:
            unfinished = begin_checkpoint(place, model.seq)
            with saving(f"the snapshot of request {model.seq}", unfinished):
                self._trainer.save(model.name, unfinished, gradients=True)
                (unfinished / SNAPSHOT_FILE).write_text(json.dumps(asdict(model.lora)), encoding="utf-8")
                path = finish_checkpoint(unfinished, model.seq)
            remove_older(place, path)
            model.snapshot, model.snapshot_error = model.seq, ""
        except OSError as error:
            # The older one still counts; more requests are executed again if this engine is lost.
            model.snapshot_error = str(error)
            log.warning("model %s: %s", model.name, error)
        ended = self._clock()
        model.snapshot_due = ended + (ended - began) / SNAPSHOT_SHARE

    # Memory -----------------------------------------------------------------------------------------------------------

    def _bring(self, name: str) -> None:
        """Have an adapter in memory: that of a model, or saved weights by their path."""
        self._make_room()
        if name in self.resident:
            return
        if name in self.models:
            self._trainer.load(name, self._offloaded(name), gradients=True)
            shutil.rmtree(self._offloaded(name), ignore_errors=True)
        else:
            self._adapters.load(name, self.saved(name))
        self.resident.add(name)

    def _make_room(self) -> None:
        for name in self.resident - self.keep:
            try:
                if name in self.models:
                    with saving(f"adapter {name}", self._offloaded(name)):
                        self._trainer.save(name, self._offloaded(name), gradients=True)
                    self._trainer.remove(name)
                else:
                    self._adapters.remove(name)
            except OSError as error:
                log.warning("%s stays in memory: %s", name, error)
            else:
                self.resident.discard(name)

    def _offloaded(self, model_id: str) -> Path:
        return self._directory / model_id / self._offloaded_folder

    def _snapshots_of(self, model_id: str) -> Path:
        return self._directory / model_id / "snapshots"

    # Samples ----------------------------------------------------------------------------------------------------------

    def sample(
        self, new: Sequence[GenerateRequest], cancelled: Sequence[str], streamed: Collection[str] = ()
    ) -> list[tuple[str, TokenEvent | Completion | Exception]]:
        """Generate tokens for `STEPS_S`, or until a sample has ended.

        Args:
            new: requests that begin.
            cancelled: ids of those that end without an answer.
            streamed: ids of those whose tokens are returned, too.

        Returns:
            Ids with a token, a completion that has ended, or the error for which a new one was refused.
        """
        found: list[tuple[str, TokenEvent | Completion | Exception]] = []
        # First: the adapters of these may leave memory when one comes.
        for request_id in cancelled:
            self._engine.cancel(request_id)
        for request in new:
            try:
                if request.adapter is not None:
                    self._bring(request.adapter)
                self._engine.add(request, stream=request.request_id in streamed)
            except Exception as error:  # noqa: BLE001 (whatever it is, others share this batch)
                found.append((request.request_id, error))
        until, has_ended = self._clock() + STEPS_S, bool(found)
        while self._engine.has_work and not has_ended:
            for answer in self._engine.step():
                if isinstance(answer, TokenEvent):
                    found.append((answer.request_id, answer))
                else:
                    found.append(answer)
                    has_ended = True
            if self._clock() >= until:
                break
        return found


def _check_same(model: TrainedModel, lora: LoRA) -> None:
    if model.lora != lora:
        raise ValueError(f"model {model.name} has {model.lora}; it cannot become {lora}")


def _kept_slice_tokens(directory: Path, wanted: int | None, default: int) -> int:
    """Return the slice size of a directory; a new one keeps ``wanted``, or else ``default``."""
    path = directory / ENGINE_FILE
    if path.is_file():
        kept: int = json.loads(path.read_text(encoding="utf-8"))["slice_tokens"]
        if wanted not in (None, kept):
            raise ValueError(
                f"slice_tokens={wanted}: {directory} was begun with {kept}, and with another value the requests that "
                "are executed again would have other losses; choose another directory, or leave slice_tokens out"
            )
        return kept
    chosen = default if wanted is None else wanted
    directory.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps({"slice_tokens": chosen}).encode())
    return chosen
