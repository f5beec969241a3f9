"""Process with the frozen reference of a run, whose logprobs the processes of the trainer ask for."""

from __future__ import annotations

from typing import Any

import trio

from fray.rl.model_spec import ModelSpec
from fray.rl.process_start import loading


class ReferenceProcess:
    """Actor with the model that training began with; it never changes, and a new incarnation gives the same answers.

    Args:
        model: whose weights it has.
        dtype: of the forward pass, as the trainer has it.
        threads: of the computation; None: as many as torch takes.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, model: ModelSpec, dtype: str, threads: int | None = None, device: str = "cpu") -> None:
        # One after another: the parts of several ranks at once would need the memory of all of them.
        self._turn = trio.Lock()
        with loading(thresholds=None):
            from fray.rl.tensors.kl import FrozenModel
            from fray.rl.tensors.language_model import hide_progress, load_model, set_threads

            hide_progress()
            if threads is not None:
                set_threads(threads)
            self._model = FrozenModel(load_model(model, device=device).model, dtype)

    async def ping(self) -> None:
        """Return: the process answers, whatever its thread does. For health checks."""

    async def logprobs(self, ids: Any, mask: Any) -> Any:
        """Return `fray.rl.tensors.kl.FrozenModel.logprobs` of these tensors."""
        async with self._turn:
            return await trio.to_thread.run_sync(self._model.logprobs, ids, mask)
