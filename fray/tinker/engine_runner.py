"""Engine of one job, which is kept running until the job ends: the part that training and inference jobs share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, frozen

from fray.api.cluster import Cluster
from fray.api.jobs.job_spec import actor_request
from fray.errors import FrayError
from fray.model.policy.priority import Band
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig
from fray.rl.model_spec import ModelSpec
from fray.tinker.core.job_states import ServiceJobState
from fray.tinker.core.limits import DEFAULT_LIMITS, UserLimits
from fray.tinker.kept_engine import EngineFailed, KeptEngine, failed_start
from fray.tinker.store import ServiceJob
from fray.tracebacks import failure_text

RESTARTS = 20
"""Restarts of an engine within `RESTART_PERIOD_S`, before its job fails."""
RESTART_PERIOD_S = 600.0

START_CHECK_S = 1.0
"""Pause between two looks whether an engine has died while it was started."""

log = logging.getLogger("fray.tinker")


@frozen
class EnginePlan:
    """Settings of engines."""

    models: Mapping[str, ModelSpec]
    directory: Path
    """Directory of the jobs, which the machines of the engines share with the service."""
    threads: int | None = None
    resources: ResourceConfig | None = None
    limits: UserLimits = DEFAULT_LIMITS
    on_behalf_of: str | None = None
    """User of the cluster whose jobs the engines are; None: the user of the service."""
    priority: Band | None = None
    """Band of these jobs; None: the default of their user."""


@frozen
class JobCallbacks:
    """Reports of a runner about its job, and one question.

    Attributes:
        on_start: called when its engine is ready, each time.
        on_failure: called with the reason for which it cannot run.
        on_use: called with tokens that were generated, and seconds for which the engine was busy.
        room: returns how many requests its user may add.
    """

    on_start: Callable[[], Awaitable[None]]
    on_failure: Callable[[str], Awaitable[None]]
    on_use: Callable[[int, float], None]
    room: Callable[[], int]


class EngineRunner(ABC):
    """Runs the engine of one job that has been accepted, once it may start.

    Args:
        job: the job.
        plan: settings of its engine.
        callbacks: of the job.
    """

    def __init__(self, job: ServiceJob, plan: EnginePlan, callbacks: JobCallbacks) -> None:
        self.job_id, self._plan, self._callbacks = job.job_id, plan, callbacks
        self._name = f"tinker-{job.job_id}"
        self._kept = KeptEngine(self._name, self._create)
        self._has_run = job.state is ServiceJobState.RUNNING
        self._cluster: Cluster | None = None
        self._scope = trio.CancelScope()
        self.seen_at = trio.current_time()
        """Time of its client's last request, or of the last answer to one."""

    @property
    def starts(self) -> int:
        """Starts of its engine, since the service began."""
        return self._kept.starts

    @property
    def is_up(self) -> bool:
        """True if its engine has a process; it may still load."""
        return self._kept.is_up

    def see_client(self) -> None:
        """Note that its client exists."""
        self.seen_at = trio.current_time()

    def end(self, reason: str) -> None:
        """End the engine; requests that wait are answered with the reason."""
        self._kept.end(reason)
        self._scope.cancel()

    async def run(self, cluster: Cluster) -> None:
        """Run the engine until the job ends; it is started again when it is lost."""
        failure: BaseException | None = None
        self._cluster = cluster
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._keep, cluster)
                    nursery.start_soon(self._watch_start, cluster)
                    await self._follow()
            except* Exception as group:  # noqa: BLE001 (whatever it is, it ends this job, and not the service)
                failure = group
        # Outside: the end of the job cancels what is inside.
        if failure is not None:
            text = failure_text(failure)
            log.error("job %s failed: %s", self.job_id, text)
            await self._callbacks.on_failure(text)

    async def _keep(self, cluster: Cluster) -> None:
        """Keep the engine running. Raises EngineFailed when it is not started again."""
        await self._kept.run(cluster)
        # Requests that wait for the engine get this, too; but between two requests of its client there is none.
        raise EngineFailed(self._kept.failure)

    async def _watch_start(self, cluster: Cluster) -> None:
        """Raise EngineFailed if the engine of a job that has never run dies by its own doing, as out of memory."""
        while not self._has_run:
            await self._check_start(cluster)
            await trio.sleep(START_CHECK_S)

    async def _check_start(self, cluster: Cluster) -> None:
        with suppress(FrayError):  # the cluster does not answer now
            if cause := await failed_start(cluster, self._name):
                raise EngineFailed(cause)

    async def _note_start(self) -> None:
        """Note that the engine is ready. Raises EngineFailed as `_watch_start`, if one was lost since it looked."""
        if not self._has_run and self._cluster is not None:
            await self._check_start(self._cluster)
        self._has_run = True
        await self._callbacks.on_start()

    @abstractmethod
    async def _follow(self) -> None:
        """Work with each engine that comes. Raises what ends the job."""

    @abstractmethod
    async def _create(self, scope: Any) -> Any:
        """Create the engine in a scope."""

    async def _create_actor(self, scope: Any, kind: type, *arguments: Any) -> Any:
        plan = self._plan
        request = evolve(
            actor_request(self._name, plan.resources, None, RESTARTS),
            on_behalf_of=plan.on_behalf_of,
            priority=plan.priority,
        )
        config = ActorConfig(max_restarts=RESTARTS, restart_period_s=RESTART_PERIOD_S, must_start=True)
        (engine,) = await scope.launch_actors(request, None, kind, arguments, {}, config, on_failure="absorb")
        return engine
