"""Maker of the engine of a model, for `fray.rl.inference.server`; torch is loaded where it is called."""

from __future__ import annotations

from attrs import field, frozen

from fray.rl.core.versions import VersionName
from fray.rl.inference.decoding import DecodingEngine
from fray.rl.model_spec import ModelSpec
from fray.rl.train.lora import LoRA


@frozen
class ModelEngine:
    """Call that loads a model and makes its engine: ``InferenceServer(ModelEngine("Qwen/Qwen3-0.6B"))``.

    Args:
        model: name, directory or `TinyLlama`.
        slots: completions that are decoded at a time; more wait.
        max_length: tokens of a prompt and a completion together. Default: those of the model.
        dtype: of the weights.
        device: such as ``cpu`` or ``cuda:0``.
        threads: of torch in this process; None leaves its default, a thread for each core.
        version: name of the weights that the model has when it is loaded.
        lora: settings of the adapter that is trained: weights that are loaded are those of the adapter.
    """

    model: ModelSpec
    slots: int = 64
    max_length: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    version: VersionName = field(default=VersionName(0, 0))
    lora: LoRA | None = None

    def __call__(self) -> DecodingEngine:
        """Return the engine. Raises what loading the model raises."""
        from fray.rl.tensors.adapters import POLICY_ADAPTER, AdapterSet
        from fray.rl.tensors.engine import Engine
        from fray.rl.tensors.language_model import load_model, set_threads

        if self.threads is not None:
            set_threads(self.threads)
        model = load_model(self.model, dtype=self.dtype, device=self.device)
        if self.lora is None:
            return Engine(model, self.version, slots=self.slots, max_length=self.max_length)
        adapters = AdapterSet(model.model)
        adapters.add(POLICY_ADAPTER, self.lora)
        return Engine(
            model,
            self.version,
            slots=self.slots,
            max_length=self.max_length,
            adapters=adapters,
            adapter=POLICY_ADAPTER,
        )
