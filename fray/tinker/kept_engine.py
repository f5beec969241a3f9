"""Actor with a model that is started again when it is lost, and for whose next incarnation callers wait."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import trio

from fray.api.actors.monitor import Down, monitor
from fray.api.cluster import Cluster
from fray.errors import FrayError
from fray.model.specs import EndReason
from fray.tracebacks import failure_text

MakeActor: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Creates the actor in a scope that it is given."""

_OWN_DOING = (EndReason.FAILURE, EndReason.KILLED, EndReason.OUT_OF_MEMORY)
"""Causes for which another start would do no better; machines that are lost or taken away are others."""

EXPLAIN_S = 2.0
"""Seconds for which the cluster's explanation is waited for."""

log = logging.getLogger("fray.tinker")


class EngineFailed(Exception):
    """Engine that is not started again; the message has the cause."""


class EngineRestarted(KeyError):
    """Request to an engine that has not got what it is about: it was started again since its caller began with it."""


async def explained_engine(cluster: Cluster, name: str) -> str:
    """Return what the engine of a name waits for: it is a job of Fray, which may need room."""
    # Bounded: a client that asks for the state of its job must not wait for a controller that is away.
    with trio.move_on_after(EXPLAIN_S):
        try:
            engines = [each for each in await cluster.list_jobs() if each.name == name]
            return await cluster.explain(engines[-1].job_id) if engines else "it is being submitted"
        except FrayError as error:
            return f"it is being started; {error}"
    return "the cluster does not answer now"


async def failed_start(cluster: Cluster, name: str) -> str:
    """Return why the first process of the engine of a name that died by its own doing did; empty: none did.

    Nothing is said of one that is not started again: those who wait for it get its error.
    """
    for engine in [each for each in await cluster.list_jobs() if each.name == name][-1:]:
        for attempt in engine.attempts:
            if attempt.cause in _OWN_DOING and not engine.state.finished:
                return f"the engine died while it was started: {attempt.message or attempt.cause.value}"
    return ""


class KeptEngine:
    """An actor that is kept running.

    Args:
        name: of its scope, and for logs.
        make: creates it.
    """

    def __init__(self, name: str, make: MakeActor) -> None:
        self._name, self._make = name, make
        self._engine: Any = None
        self._incarnation = 0
        self._changed = trio.Event()
        self.failure = ""
        """Reason for which it is not started again; empty: it runs, or will."""

    @property
    def is_up(self) -> bool:
        return self._engine is not None

    @property
    def starts(self) -> int:
        """Incarnations so far."""
        return self._incarnation

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

    def end(self, reason: str) -> None:
        """Have all who wait for it, now and later, raise EngineFailed with the reason."""
        self.failure, self._engine = reason, None
        self._wake()

    async def run(self, cluster: Cluster) -> None:
        """Keep the engine running until cancelled, or until it cannot be started any more."""
        failure: BaseException | None = None
        try:
            async with cluster.open_scope(self._name) as scope:
                engine = await self._make(scope)
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
        except* Exception as group:  # noqa: BLE001 (whatever its start raises: those who wait for it get it)
            failure = group
        if failure is not None:
            text = failure_text(failure)
            log.error("%s failed: %s", self._name, text)
            self.end(text)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
