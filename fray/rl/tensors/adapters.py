"""Low-rank adapters (LoRA) of one model: many beside each other, of unlike ranks and layers.

The model itself is not changed: its layers get hooks, so its weights keep their names, and without a selected adapter
it computes what it computed before. Files are those of `peft`, which loads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from attrs import define, field, frozen
from torch import Tensor

from fray.model.text import near_text
from fray.rl.train.lora import LoRA

POLICY_ADAPTER = "policy"
"""Name of the adapter of a run that trains one."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


@frozen(eq=False)
class Adapter:
    """Weights of one adapter.

    Attributes:
        settings: as it was made.
        tensors: by name, as ``model.layers.0.mlp.up_proj.lora_A.weight`` `[rank, inputs]` and ``lora_B``
            `[outputs, rank]`; they require gradients.
    """

    settings: LoRA
    tensors: dict[str, Tensor]

    @property
    def parameters(self) -> list[Tensor]:
        """Return the tensors, in their order."""
        return list(self.tensors.values())

    def of_layer(self, layer: str) -> tuple[Tensor, Tensor] | None:
        """Return A and B of a layer; None if it is not adapted."""
        first = self.tensors.get(f"{layer}.lora_A.weight")
        return None if first is None else (first, self.tensors[f"{layer}.lora_B.weight"])


@define
class _Selection:
    """Adapters of the forward pass that runs."""

    every: str | None = None
    """Adapter of all rows."""
    of_rows: list[tuple[str, Tensor]] = field(factory=list)
    """Adapter and its rows, if rows have different ones."""


class AdapterSet:
    """Adapters of a model, by name.

    Args:
        model: causal language model of Hugging Face; its own weights no longer require gradients.

    Raises:
        ValueError: it has no linear layers that could be adapted.
    """

    def __init__(self, model: Any) -> None:
        self._layers = _linear_layers(model)
        if not self._layers:
            raise ValueError(
                f"{type(model).__name__} has no linear layers of attention or feed-forward blocks to adapt"
            )
        model.requires_grad_(False)
        weights = next(model.parameters())
        self._device, self._dtype = weights.device, torch.promote_types(weights.dtype, torch.float32)
        self._adapters: dict[str, Adapter] = {}
        self._selection = _Selection()
        for name, (_, layer) in self._layers.items():
            layer.register_forward_hook(self._hook_of(name))

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def __getitem__(self, name: str) -> Adapter:
        """Return an adapter. Raises KeyError with the nearest name."""
        self._check(name)
        return self._adapters[name]

    def _check(self, name: str) -> None:
        if name not in self._adapters:
            raise KeyError(f"there is no adapter {name!r}{near_text(name, self._adapters)}")

    def add(self, name: str, settings: LoRA) -> Adapter:
        """Make an adapter; it changes nothing until it is trained or loaded.

        Raises:
            ValueError: there is one of this name, or the model has none of the layers that the settings name.
        """
        if name in self._adapters:
            raise ValueError(f"there is an adapter {name!r} already")
        generator = torch.Generator().manual_seed(settings.seed)
        tensors: dict[str, Tensor] = {}
        for layer_name, (kind, layer) in self._layers.items():
            if not getattr(settings, kind):
                continue
            # As torch draws the weights of a linear layer, and peft those of A.
            bound = 1 / math.sqrt(layer.in_features)
            first = torch.empty(settings.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
            for matrix, value in (("A", first), ("B", torch.zeros(layer.out_features, settings.rank))):
                tensors[f"{layer_name}.lora_{matrix}.weight"] = value.to(self._device, self._dtype).requires_grad_()
        if not tensors:
            raise ValueError(f"the model has none of the layers that {settings} adapts")
        adapter = self._adapters[name] = Adapter(settings, tensors)
        return adapter

    def copy(self, name: str, new_name: str) -> Adapter:
        """Make an adapter with the present weights of another one. Raises KeyError, ValueError as `add`."""
        source = self[name]
        adapter = self.add(new_name, source.settings)
        _assign(adapter, source.tensors)
        return adapter

    def remove(self, name: str) -> None:
        """Remove an adapter. Raises KeyError with the nearest name."""
        self._check(name)
        del self._adapters[name]

    # Forward passes ---------------------------------------------------------------------------------------------------

    @contextmanager
    def selected(self, names: str | Sequence[str | None] | None) -> Iterator[None]:
        """Use adapters in the forward passes of this block, and in backward passes that repeat them.

        Args:
            names: one for all rows of the batch, or one for each row; None: the model itself.

        Raises:
            KeyError: an adapter does not exist; the message has the nearest name.
        """
        before, self._selection = self._selection, self._selection_of(names)
        try:
            yield
        finally:
            self._selection = before

    def _selection_of(self, names: str | Sequence[str | None] | None) -> _Selection:
        different = {names} if names is None or isinstance(names, str) else set(names)
        for name in different - {None}:
            self._check(str(name))
        if len(different) == 1:
            return _Selection(different.pop())
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names or ()):
            if name is not None:
                rows.setdefault(name, []).append(row)
        return _Selection(of_rows=[(name, torch.tensor(of, device=self._device)) for name, of in rows.items()])

    def _hook_of(self, layer: str) -> Any:
        def hook(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            selection = self._selection
            if selection.every is not None:
                change = self._change(selection.every, layer, inputs[0])
                return None if change is None else output + change.to(output.dtype)
            result = None
            for name, rows in selection.of_rows:
                change = self._change(name, layer, inputs[0][rows])
                if change is not None:
                    result = output.clone() if result is None else result
                    result[rows] += change.to(output.dtype)
            return result

        return hook

    def _change(self, name: str, layer: str, inputs: Tensor) -> Tensor | None:
        adapter = self._adapters[name]
        if (pair := adapter.of_layer(layer)) is None:
            return None
        first, second = pair
        scale = adapter.settings.alpha / adapter.settings.rank
        return torch.nn.functional.linear(torch.nn.functional.linear(inputs.to(first.dtype), first), second) * scale

    # Files ------------------------------------------------------------------------------------------------------------

    def save(self, name: str, directory: str | Path, base_model: str = "") -> None:
        """Write an adapter as `peft` does; the directory is made if needed.

        Args:
            base_model: name or directory of the model, for readers that load it with the adapter.

        Raises:
            KeyError: there is no such adapter.
        """
        adapter = self[name]
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        tensors = {_PEFT_PREFIX + key: value.detach().cpu().contiguous() for key, value in adapter.tensors.items()}
        safetensors.torch.save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
        settings = adapter.settings
        layers = sorted({key.partition(".lora_")[0].rpartition(".")[2] for key in adapter.tensors})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": settings.rank,
            "lora_alpha": settings.alpha,
            "target_modules": layers,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def load(self, name: str, directory: str | Path) -> Adapter:
        """Read an adapter, written by `save` or by `peft`, over one of this name, or as a new one.

        Raises:
            FileNotFoundError: a file is missing; the message names it.
            ValueError: it is of another model, or is not LoRA; the message has the difference. Nothing was changed.
        """
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            if not Path(directory, file).is_file():
                raise FileNotFoundError(f"no adapter in {directory}: it has no file {file}")
        config = json.loads(Path(directory, CONFIG_FILE).read_text(encoding="utf-8"))
        if config.get("peft_type") != "LORA":
            raise ValueError(f"the adapter in {directory} is of type {config.get('peft_type')!r}; expected 'LORA'")
        saved = safetensors.torch.load_file(Path(directory, WEIGHTS_FILE))
        tensors = {key.removeprefix(_PEFT_PREFIX): value for key, value in saved.items()}
        present = {key.partition(".lora_")[0] for key in tensors}
        kinds = {self._layers[layer][0] for layer in present if layer in self._layers}
        settings = LoRA(
            config["r"],
            alpha=float(config["lora_alpha"]),
            attention="attention" in kinds,
            mlp="mlp" in kinds,
            unembed="unembed" in kinds,
        )
        before = self._adapters.pop(name, None)
        try:
            adapter = self.add(name, settings)
            _check_same(adapter, tensors, f"the adapter in {directory}")
        except ValueError:
            self._adapters.pop(name, None)
            if before is not None:
                self._adapters[name] = before
            raise
        _assign(adapter, tensors)
        if (
            before is not None
            and before.tensors.keys() == adapter.tensors.keys()
            and before.settings.rank == settings.rank
        ):
            # In place: an optimizer knows these tensors.
            _assign(before, adapter.tensors)
            adapter = self._adapters[name] = before
        return adapter


def _linear_layers(model: Any) -> dict[str, tuple[str, torch.nn.Linear]]:
    """Return the linear layers that can be adapted, by name, with the setting of `LoRA` that chooses them."""
    unembed = model.get_output_embeddings()
    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        path = name.lower()
        if layer is unembed:
            found[name] = ("unembed", layer)
        elif "attn" in path or "attention" in path:
            found[name] = ("attention", layer)
        elif any(part in path for part in ("mlp", "feed_forward", "ffn", "experts")):
            found[name] = ("mlp", layer)
    return found


def _check_same(adapter: Adapter, tensors: Mapping[str, Tensor], what: str) -> None:
    if missing := sorted(adapter.tensors.keys() - tensors.keys()):
        raise ValueError(f"{what} is not one of this model: it lacks {missing[0]}")
    if unknown := sorted(tensors.keys() - adapter.tensors.keys()):
        raise ValueError(f"{what} is not one of this model: it has {unknown[0]}, which the model lacks")
    for name, tensor in adapter.tensors.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)} instead of {list(tensor.shape)}"
            raise ValueError(f"{what} is not one of this model: {name} has shape {shapes}")


def _assign(adapter: Adapter, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in adapter.tensors.items():
            tensor.copy_(tensors[name])
