"""Reinforcement learning of language models, in the architecture of NexRL. See docs/rl.md, docs/rl-internals.md.

Upwards, each may import those above it:

- `core`: what decides, without torch, Trio, clocks and files; a simulation with faults runs the same code.
- `nexrl_types`, `model_spec`, `weights_table`, `train`, `data`: values and settings.
- `journal_file`, `checkpoint`: files of a run. `tokenizers`: texts as tokens.
- `tensors`: losses, models, engine and trainer; the only folder that imports torch.
- `inference`: servers and their client. `messages`: between the parts of a run.
- `rollout`, `coordinator`, `trainer_process`: the actors. `controller`: the scope that owns them.
- `run`: settings and results of a run.

Importing this package loads neither torch nor Trio; a name loads its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fray.rl.inference.client import LLM, ModelReply
    from fray.rl.model_spec import TinyLlama
    from fray.rl.rollout.scores import Score, score
    from fray.rl.run import Run, RunResult
    from fray.rl.train.settings import GRPO, KlPenalty, OffPolicyCorrection

_MODULES = {
    "GRPO": "train.settings",
    "KlPenalty": "train.settings",
    "LLM": "inference.client",
    "OffPolicyCorrection": "train.settings",
    "ModelReply": "inference.client",
    "Run": "run",
    "RunResult": "run",
    "Score": "rollout.scores",
    "TinyLlama": "model_spec",
    "score": "rollout.scores",
}
"""Module of each public name, in `fray.rl`."""

__all__ = [
    "GRPO",
    "LLM",
    "KlPenalty",
    "ModelReply",
    "OffPolicyCorrection",
    "Run",
    "RunResult",
    "Score",
    "TinyLlama",
    "score",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'fray.rl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"fray.rl.{_MODULES[name]}"), name)
