"""Clients and `current_client` as Marin has them today."""

from __future__ import annotations

import os
from typing import Any, TypeVar, cast

from fray.type_variables import A_co
from fray.v2 import iris_backend as april_iris
from fray.v2 import local_backend as april
from fray.v2.client import client_of, detected_client
from fray.v2.interface import Client, HostedActor, _current_client_var
from fray.v2.iris import jobs as april_jobs
from fray.v2.marin.version import SameInstances, marin_function, marin_parameters
from fray.v2.types import ActorConfig, JobRequest

T = TypeVar("T")


class LocalJobHandle(april.LocalJobHandle, metaclass=SameInstances):
    """Job of this process, whose output is lines."""

    _same_as = april.LocalJobHandle

    def logs(self, max_lines: int | None = 0) -> Any:
        """Return the last ``max_lines`` lines of a program's output (0: all); none for a function."""
        return super().logs(max_lines)


class LocalActorGroup(april.LocalActorGroup[A_co], metaclass=SameInstances):
    """Actors of this process. One that has ended itself answers, and is ready, until `shutdown`: Marin's callers end
    each once more."""

    _same_as = april.LocalActorGroup

    def _living(self) -> list[int]:
        return [index for index, actor in enumerate(self._actors) if actor.answers]


@marin_parameters("max_threads")
class LocalClient(april.LocalClient, metaclass=SameInstances):
    """Jobs and actors as threads of this process."""

    _same_as = april.LocalClient
    _job_class = LocalJobHandle
    _group_class = LocalActorGroup
    _actors_stay = True

    @marin_function
    def submit(self, request: JobRequest, adopt_existing: bool = True) -> LocalJobHandle:
        """Run the job once in a thread. See `fray.v2.LocalClient.submit`."""
        job = super().submit(request, adopt_existing)
        assert isinstance(job, LocalJobHandle)
        return job

    def host_actor(
        self,
        actor_class: type[T],
        *args: Any,
        name: str,
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> HostedActor[T]:
        """Construct an actor. It answers also after ``shutdown()``, until its name is used again: pollers of an ended
        run read their last answer."""
        hosted = super().host_actor(actor_class, *args, name=name, actor_config=actor_config, **kwargs)
        return HostedActor(hosted.handle, lambda: None)


class IrisJobHandle(april_jobs.IrisJobHandle, metaclass=SameInstances):
    """Job on Iris, whose output is lines."""

    _same_as = april_jobs.IrisJobHandle

    def logs(self, max_lines: int | None = 0) -> Any:
        """Return the last ``max_lines`` lines of all tasks (0: as many as Iris returns)."""
        return super().logs(max_lines)


@marin_parameters("controller_address workspace bundle_id")
class FrayIrisClient(april_iris.FrayIrisClient, metaclass=SameInstances):
    """Jobs and actors on Iris. See `fray.v2.iris_backend.FrayIrisClient`."""

    _same_as = april_iris.FrayIrisClient
    _job_class = IrisJobHandle
    submit = marin_function(april_iris.FrayIrisClient.submit)


def current_client() -> Client:
    """Return the client of the running code, as `fray.v2.current_client` does; those of Iris and of the threads of this
    process are the classes of this module.

    Raises:
        ValueError: ``FRAY_CLIENT_SPEC`` is invalid.
        RuntimeError: this process is a job of Iris, which cannot be used.
    """
    client: Client | None = _current_client_var.get()
    if client is not None:
        return client
    spec = os.environ.get("FRAY_CLIENT_SPEC")
    found = client_of(spec) if spec and spec != "local" else None if spec else detected_client()
    if isinstance(found, april_iris.FrayIrisClient):
        return cast(Client, FrayIrisClient.from_iris_client(found._iris))
    if found is not None:
        return found
    return cast(Client, LocalClient())  # its jobs return lines, where the protocol of `fray.v2` has a text
