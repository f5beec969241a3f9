"""Jobs whose engine dies before they have ever run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import frozen

from fray import rl, tinker
from fray.tinker.opentinker.client import TrainingServiceError
from tests.tinker.services import running

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@frozen
class DyingModel(rl.TinyLlama):
    """Model with which the second process that reads it is killed: the engine, after its service."""

    log: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self.log,)


def _read(log: str) -> DyingModel:
    with Path(log).open("a", encoding="utf-8") as file:
        file.write("x")
    if len(Path(log).read_text(encoding="utf-8")) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return DyingModel(log=log)


async def test_a_job_whose_engine_is_killed_while_it_is_started_has_failed_at_once_with_the_cause(
    tmp_path: Path,
) -> None:
    model = DyingModel(log=str(tmp_path / "log"))
    async with running(tmp_path / "service", models=[model]) as (_, service):
        scheduler = tinker.SchedulerClient(service.url)
        job_id = (await trio.to_thread.run_sync(scheduler.submit_job, {}))["job_id"]
        with pytest.raises(TrainingServiceError, match=r"is FAILED: the engine died while it was started: .*SIGKILL"):
            await trio.to_thread.run_sync(scheduler.wait_until_running, job_id)
