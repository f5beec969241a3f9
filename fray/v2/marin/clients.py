"""`LocalClient` and `current_client` as Marin has them today."""

from __future__ import annotations

import os
from typing import Any, TypeVar, cast

from fray.v2 import local_backend as april
from fray.v2.client import client_of, detected_client
from fray.v2.interface import Client, HostedActor, _current_client_var
from fray.v2.marin.version import SameInstances
from fray.v2.types import ActorConfig, JobRequest

T = TypeVar("T")


class LocalJobHandle(april.LocalJobHandle, metaclass=SameInstances):
    """Job of this process, whose output is lines."""

    _same_as = april.LocalJobHandle

    def logs(self, max_lines: int = 0) -> tuple[str, ...]:  # type: ignore[override]
        """Return the last ``max_lines`` lines of a program's output (0: all); none for a function."""
        return tuple(super().logs().splitlines()[-max_lines:])


class LocalClient(april.LocalClient, metaclass=SameInstances):
    """Jobs and actors as threads of this process."""

    _same_as = april.LocalClient
    _job_class = LocalJobHandle

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


def current_client() -> Client:
    """Return the client of the running code, as `fray.v2.current_client` does; threads of this process are Marin's
    `LocalClient`.

    Raises:
        ValueError: ``FRAY_CLIENT_SPEC`` is invalid.
    """
    client: Client | None = _current_client_var.get()
    if client is not None:
        return client
    spec = os.environ.get("FRAY_CLIENT_SPEC")
    if spec and spec != "local":
        return client_of(spec)
    detected = None if spec else detected_client()
    if detected is not None:
        return detected
    return cast(Client, LocalClient())  # its jobs return lines, where the protocol of `fray.v2` has a text
