"""Engine of a job: the actor whose process has the model, and executes the requests of its ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from fray.rl.model_spec import ModelSpec
from fray.tinker.core.limits import UserLimits
from fray.tinker.job_directories import check_enterable
from fray.tinker.kept_engine import EngineRestarted
from fray.tinker.training_runner import EngineAnswer, TrainingRunner


class TrainingEngine:
    """Actor that executes the requests of one training job, one at a time.

    Args:
        models: those of the service, by name.
        config: of the job.
        directory: of the job.
        threads: of the computation; None: as many as torch takes.
        limits: of the user.

    Raises:
        InvalidRequest: the account of this process cannot enter the directory.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSpec],
        config: dict[str, Any],
        directory: Path,
        threads: int | None,
        limits: UserLimits,
    ) -> None:
        check_enterable(directory)
        # Torch is loaded here, in the engine's process.
        from fray.rl.tensors.language_model import hide_progress, set_threads

        hide_progress()
        if threads is not None:
            set_threads(threads)
        self._runner = TrainingRunner(models, config, directory, limits)
        self._has_begun = False

    async def begin(self) -> int:
        """Load the newest snapshot; return the number of the request up to which it has everything, 0 without one."""
        number = await trio.to_thread.run_sync(self._runner.begin)
        self._has_begun = True
        return number

    async def execute(self, seq: int, kind: str, body: bytes, scores: Sequence[Any] | None) -> EngineAnswer:
        """Execute a request, as `TrainingRunner.execute`. Raises EngineRestarted before `begin`."""
        if not self._has_begun:
            raise EngineRestarted(f"request {seq} of an engine that has not begun")
        return await trio.to_thread.run_sync(self._runner.execute, seq, kind, body, scores)

    async def __fray_cleanup__(self) -> None:
        self._runner.close()
