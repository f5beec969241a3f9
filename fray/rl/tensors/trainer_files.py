"""Files of a trainer: its state beside a saved model, and dumps of batches."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fray.rl.nexrl_types import Trajectory
from fray.rl.tensors import flat_weights
from fray.rl.tensors.language_model import pretrained

STATE_FILE = "trainer_state.pt"
"""Optimizer, schedule and generators, beside the files of the model."""


def save_state(directory: str | Path, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Write the state of a trainer and its optimizer into ``directory``, which holds the model already."""
    torch.save({**state, "optimizer": optimizer.state_dict()["state"]}, Path(directory, STATE_FILE))


def load_model_weights(directory: str | Path, model: Any) -> None:
    """Load the weights of a saved model into ``model``.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: it is another model; then nothing was loaded.
    """
    if not Path(directory, "config.json").is_file():
        raise FileNotFoundError(f"no checkpoint of a model in {directory}: it has no file config.json")
    dtype = next(iter(model.parameters())).dtype
    saved = pretrained(directory, dtype)
    if difference := flat_weights.table_of(model).difference_text(flat_weights.table_of(saved)):
        raise ValueError(f"the checkpoint in {directory} is of another model: {difference}")
    model.load_state_dict(saved.state_dict())


def read_state(directory: str | Path) -> dict[str, Any]:
    """Return what `save_state` got, the moments of the optimizer as ``optimizer``. Raises FileNotFoundError."""
    path = Path(directory, STATE_FILE)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint of a trainer in {directory}: it has no file {STATE_FILE}")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def dump(trajectories: Iterable[Trajectory], directory: str | Path) -> Path:
    """Write trajectories to ``not_finite_batch.jsonl``, one a line; return the path. What JSON lacks becomes text."""
    path = Path(directory, "not_finite_batch.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for trajectory in trajectories:
            file.write(json.dumps(trajectory, default=_as_json) + "\n")
    return path


def _as_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
