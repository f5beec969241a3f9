"""The client: what it can do, and which one the running code has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from fray.v2.actor import ActorGroup, ActorHandle, HostedActor
from fray.v2.job import JobAlreadyExists, JobFailed, JobHandle, JobStatus, wait_all
from fray.v2.types import ActorConfig, JobRequest, ResourceConfig


@runtime_checkable
class Client(Protocol):
    """Submits jobs and makes actors."""

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> JobHandle:
        """Submit a job and return at once.

        Args:
            adopt_existing: on a cluster, go on with a living job of this name if there is one.

        Raises:
            JobAlreadyExists: there is one, and ``adopt_existing`` is False.
            ValueError: the request has no entrypoint, or cannot be run there.
            RuntimeError: the client was shut down.
        """

    def create_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        resources: ResourceConfig = ...,
        actor_config: ActorConfig = ...,
        **kwargs: Any,
    ) -> ActorHandle:
        """Make ``actor_class(*args, **kwargs)`` under ``name``. The handle can be used at once."""

    def create_actor_group(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        count: int,
        resources: ResourceConfig = ...,
        actor_config: ActorConfig = ...,
        **kwargs: Any,
    ) -> ActorGroup:
        """Make ``count`` instances: ``{name}-0``, ``{name}-1``, …; returns without waiting for them on a cluster."""

    def host_actor(
        self, actor_class: type, *args: Any, name: str, actor_config: ActorConfig = ..., **kwargs: Any
    ) -> HostedActor:
        """Make one in this process, for others to call."""

    def shutdown(self, wait: bool = True) -> None:
        """End the client and what it made; ``wait`` for running jobs before. May be repeated."""


_current_client_var: ContextVar[Any] = ContextVar("fray_v2_current_client", default=None)

C = TypeVar("C")


@contextmanager
def set_current_client(client: C) -> Iterator[C]:
    """In this ``with`` block, and in what is submitted there, `current_client` gives this very object."""
    token = _current_client_var.set(client)
    try:
        yield client
    finally:
        _current_client_var.reset(token)


def current_client() -> Any:
    """The client of the running code.

    In this order: the one of `set_current_client`; by ``FRAY_CLIENT_SPEC`` (`client_of`); in a job of Iris, or where
    Ray is initialized, or in a job of Fray, that cluster's; else a new `LocalClient`.

    Raises:
        ValueError: ``FRAY_CLIENT_SPEC`` names nothing.
    """
    client = _current_client_var.get()
    if client is not None:
        return client
    spec = os.environ.get("FRAY_CLIENT_SPEC")
    return client_of(spec) if spec else detected_client() or client_of("local")


def client_of(spec: str) -> Any:
    """The client that a spec names: ``local`` (a new one each time), ``machine`` and ``fray://host:port`` (as
    `fray.open_cluster` has them), ``ray``, ``iris://host:port``; these are one a process.

    Raises:
        ValueError: it names nothing.
    """
    if spec == "local":
        from fray.v2.local_backend import LocalClient

        return LocalClient()
    if spec == "ray" or spec.startswith("ray://"):
        from fray.v2.ray_backend.backend import shared_ray_client

        return shared_ray_client(spec)
    if spec.startswith("iris://"):
        from fray.v2.iris_backend import shared_iris_client

        return shared_iris_client(spec)
    if spec.partition("?")[0] == "machine" or spec.startswith("fray://"):
        from fray.v2.fray.client import shared_fray_client

        return shared_fray_client(spec)
    raise ValueError(f"FRAY_CLIENT_SPEC={spec!r} is none of local, machine, fray://host:port, ray, iris://host:port")


def detected_client() -> Any:
    """The client of the cluster whose job this is; None: it is no cluster's job."""
    if "iris" in sys.modules or "IRIS_JOB_ID" in os.environ:
        from fray.v2.iris_backend import client_of_iris_job

        if (client := client_of_iris_job()) is not None:
            return client
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return client_of("ray")
    from fray.v2.fray.client import client_of_fray_job

    return client_of_fray_job()


if TYPE_CHECKING:  # callers annotate with the protocols: each client must be one, for mypy too
    from fray.v2.fray.client import FrayClient
    from fray.v2.iris_backend import FrayIrisClient
    from fray.v2.local_backend import LocalClient
    from fray.v2.ray_backend.backend import RayClient

    def _are_clients(a: LocalClient, b: FrayClient, c: RayClient, d: FrayIrisClient) -> list[Client]:
        return [a, b, c, d]


__all__ = [
    "Client",
    "JobAlreadyExists",
    "JobFailed",
    "JobHandle",
    "JobStatus",
    "client_of",
    "current_client",
    "set_current_client",
    "wait_all",
]
