"""Processes of a run: created by its controller, and owned by the scope in which they are created or by its job.

Those of a job live on when the process of the controller has ended: the next attempt of the job takes them over.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import trio

from fray.api.actors.handle import ActorHandle
from fray.api.actors.monitor import Down
from fray.api.cluster import Cluster
from fray.api.scope import Scope
from fray.errors import ActorDied, NoSuchActor
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig, JobState

END_S = 30.0
"""Seconds within which the processes of a run end with it; the cluster ends those on silent machines later."""
LIVING = (JobState.PENDING, JobState.RUNNING)


class RunProcesses:
    """Creates the processes of a run, and ends them.

    Args:
        cluster: of the run.
        job: id of the job that owns them, and whose next attempt takes them over; empty: they belong to the scopes in
            which they are created.
    """

    def __init__(self, cluster: Cluster, job: str = "") -> None:
        self._cluster, self._job = cluster, job
        self._created: list[ActorHandle] = []

    async def create(
        self,
        scope: Scope,
        cls: type,
        key: str,
        *args: Any,
        resources: ResourceConfig | None = None,
        actor_config: ActorConfig,
        **kwargs: Any,
    ) -> Any:
        """Create a process, or take over the one that an earlier attempt of the job has created; return its handle.

        Args:
            scope: owns it, if no job does. Neither scope raises its failure.
            key: distinguishes processes of one class.
        """
        settings = {**kwargs, "resources": resources, "actor_config": actor_config, "on_failure": "absorb"}
        if not self._job:
            return await scope.create_actor(cls, *args, **settings)
        settings |= {"name": self._name(cls, key), "lifetime": "job", "get_if_exists": True}
        handle = await scope.create_actor(cls, *args, **settings)
        self._created.append(handle)
        return handle

    async def living_keys(self, cls: type) -> list[str]:
        """Return the keys of the processes of a class that an earlier attempt of the job has left."""
        if not self._job:
            return []
        found = await self._cluster.list_jobs(prefix=f"{cls.__name__}-", states=LIVING)
        names = [one.name for one in found if one.name.endswith(f"-{self._job}")]
        return [name.removeprefix(f"{cls.__name__}-").removesuffix(f"-{self._job}") for name in names]

    async def end_left(self, cls: type, key: str) -> None:
        """Request the end of a process that an earlier attempt of the job has left."""
        await self._cluster.terminate(name=self._name(cls, key))

    def _name(self, cls: type, key: str) -> str:
        return f"{cls.__name__}-{key}-{self._job}"

    async def end(self, handle: ActorHandle) -> None:
        """End a process whose scope has been left, wherever it is; return when it has ended."""
        if handle in self._created:
            self._created.remove(handle)
            with suppress(NoSuchActor):
                await self._cluster.delete_actor(handle)

    async def end_all(self) -> None:
        """End all processes that a job owns, in order as the end of a scope does."""
        with trio.move_on_after(END_S):
            async with trio.open_nursery() as nursery:
                for handle in list(self._created):
                    nursery.start_soon(self.end, handle)


async def raise_end(handle: Any, event: Down) -> None:
    """Raise the error of an actor that is not started again: that of its constructor itself, if it has one."""
    if not event.will_restart:
        with suppress(ActorDied):
            await handle.ping()
        raise event.error
