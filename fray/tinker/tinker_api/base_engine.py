"""Engine of one base model: started when it is needed first, and again when it is lost."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from fray.api.actors.monitor import Down, monitor
from fray.api.cluster import Cluster
from fray.errors import FrayError
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig
from fray.rl.model_spec import ModelSpec
from fray.tinker.adapter_engine import AdapterEngine, AdapterEngineSettings
from fray.tracebacks import failure_text

RESTARTS = 100
"""Restarts of an engine within `RESTART_PERIOD_S`, before its models fail."""
RESTART_PERIOD_S = 600.0
NAME_LIMIT = 40

log = logging.getLogger("fray.tinker")


class EngineFailed(Exception):
    """Engine that is not started again; the message has the cause."""


@frozen
class AdapterPlan:
    """Settings of the engines of adapters.

    Attributes:
        models: base models by name.
        directory: below which each has its own, shared by the machines of the engines and the service.
        threads: of each engine's computation; None: as many as torch takes.
        resources: that each reserves.
        session_s: seconds without a heartbeat after which a session ends.
    """

    models: Mapping[str, ModelSpec]
    directory: Path
    threads: int | None = None
    resources: ResourceConfig | None = None
    session_s: float = 300.0

    def directory_of(self, base_model: str) -> Path:
        """Return the directory of the engine of a base model."""
        digest = hashlib.sha256(base_model.encode()).hexdigest()[:8]
        return self.directory / f"{_slug(base_model)}-{digest}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-NAME_LIMIT:].strip("-") or "model"


class BaseEngine:
    """Engine of one base model.

    Args:
        base_model: its name.
        plan: settings.
    """

    def __init__(self, base_model: str, plan: AdapterPlan) -> None:
        self.base_model, self._plan = base_model, plan
        self._engine: Any = None
        self._incarnation = 0
        self._changed = trio.Event()
        self.failure = ""
        """Reason for which it is not started again; empty: it runs, or will."""

    @property
    def is_up(self) -> bool:
        return self._engine is not None

    async def up(self, after: int = 0) -> tuple[int, Any]:
        """Wait until an incarnation after a number is ready; return its number and the engine.

        Raises:
            EngineFailed: it is not started again.
        """
        while self._engine is None or self._incarnation <= after:
            if self.failure:
                raise EngineFailed(self.failure)
            await self._changed.wait()
        return self._incarnation, self._engine

    async def run(self, cluster: Cluster) -> None:
        """Keep the engine running until cancelled, or until it cannot be started any more."""
        failure: BaseException | None = None
        name = f"tinker-engine-{_slug(self.base_model)}"
        try:
            async with cluster.open_scope(name) as scope:
                engine: Any = await scope.create_actor(
                    AdapterEngine,
                    self._plan.models[self.base_model],
                    self._plan.directory_of(self.base_model),
                    AdapterEngineSettings(threads=self._plan.threads),
                    name=name,
                    resources=self._plan.resources,
                    actor_config=ActorConfig(max_restarts=RESTARTS, restart_period_s=RESTART_PERIOD_S, must_start=True),
                    on_failure="absorb",
                )
                async with monitor(engine) as events:
                    async for event in events:
                        if not isinstance(event, Down):
                            self._incarnation += 1
                            self._engine = engine
                        elif event.will_restart:
                            self._engine = None
                        else:
                            raise event.error
                        self._wake()
        except* (FrayError, OSError, ValueError, LookupError) as group:
            failure = group
        if failure is not None:
            self.failure = failure_text(failure)
            log.error("engine of %s failed: %s", self.base_model, self.failure)
            self._engine = None
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
