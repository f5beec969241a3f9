"""Engine behind the Tinker API: the actor whose process has a base model, and trains and samples its adapters."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from fray.rl.model_spec import ModelSpec
from fray.rl.train.lora import LoRA
from fray.tinker.core.adapter_operations import AdapterOperation, OperationResult
from fray.tinker.core.sampling_requests import SampleAnswer, SampleRequest


@frozen(kw_only=True)
class AdapterEngineSettings:
    """Settings of an engine.

    Attributes:
        resident: most adapters in memory, those of samplers included; the others are on disk until they are used.
        slots: samples that are decoded at a time.
        slice_tokens: tokens of one forward pass of training, padding included: the unit in which users take turns.
        threads: of the computation; None: as many as torch takes.
        dtype: of the base model; adapters have float32 at least.
        device: as torch has it.
    """

    resident: int = 64
    slots: int = 128
    slice_tokens: int = 4096
    threads: int | None = None
    dtype: str = "float32"
    device: str = "cpu"


class AdapterEngine:
    """Actor with one base model: trains adapters, and samples from them and from the base model.

    All methods may be called at the same time; what is computed next is decided by the time that each user has had.
    Results of training do not depend on what else runs.

    Args:
        model: the base model.
        directory: of this engine, shared with one that replaces it; saved weights are below it at their ``path``.
        settings: its settings.
    """

    def __init__(self, model: ModelSpec, directory: Path, settings: AdapterEngineSettings) -> None:
        raise NotImplementedError

    async def create_adapter(self, model_id: str, user: str, lora: LoRA) -> int:
        """Make the adapter of a model, or find that of its newest snapshot; to be called first, also after a restart.

        Returns:
            The number up to which it has all requests, -1 for a new one. Later ones are to be executed (again).

        Raises:
            ValueError: the name is refused, a model of this name has other settings, or the base model has none of the
                layers.
        """
        raise NotImplementedError

    async def remove_adapter(self, model_id: str) -> None:
        """Remove a model with its snapshots, if it is there. What it has saved stays."""
        raise NotImplementedError

    async def execute(self, model_id: str, seq: int, operation: AdapterOperation) -> OperationResult:
        """Execute a request of a model, each number once.

        The caller sends the requests of one model in the order of their numbers, each after it has kept the answer to
        the one before: a snapshot may have it then. A number that was just executed is answered again.

        Raises:
            KeyError: there is no such model: `create_adapter` makes it.
            ValueError: the number is before the last one that was executed.
        """
        raise NotImplementedError

    async def sample(self, user: str, request: SampleRequest) -> SampleAnswer:
        """Return samples; those of all callers share batches, whatever their weights.

        Raises:
            ValueError: the request cannot be answered by this model; the message says why.
            FileNotFoundError: nothing was saved at ``weights``.
        """
        raise NotImplementedError

    async def info(self) -> dict[str, object]:
        """Return facts: ``max_length``, ``vocabulary_size``, ``resident``, ``offloaded``, seconds by user."""
        raise NotImplementedError
