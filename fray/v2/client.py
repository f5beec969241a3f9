"""Client of the running code: `current_client` and the factory of all backends.

Every backend is imported when it is first chosen: Ray and Iris may not be installed, and a process that runs jobs as
threads never loads the cluster's runtime.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from fray.v2.interface import Client, _current_client_var, _set_client_factory, set_current_client
from fray.v2.job import JobAlreadyExists, JobFailed, JobHandle, JobStatus, wait_all


def current_client() -> Client:
    """Return the client of the running code.

    In this order: the one of `set_current_client`; by ``FRAY_CLIENT_SPEC`` (`client_of`); in a job of Iris, or where
    Ray is initialized, or in a job of Fray, that cluster's; else a new `LocalClient`.

    Raises:
        ValueError: ``FRAY_CLIENT_SPEC`` is invalid.
    """
    client: Client | None = _current_client_var.get()
    if client is not None:
        return client
    spec = os.environ.get("FRAY_CLIENT_SPEC")
    return client_of(spec) if spec else detected_client() or client_of("local")


def client_of(spec: str) -> Client:
    """Return the client that a spec names: ``local`` (a new one each time), ``machine`` and ``fray://host:port`` (as
    for `fray.open_cluster`), ``ray``, ``iris://host:port`` (of these, one per process).

    Raises:
        ValueError: the spec is invalid.
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
    raise ValueError(
        f"invalid FRAY_CLIENT_SPEC={spec!r}; expected one of local, machine, fray://host:port, ray, iris://host:port"
    )


def detected_client() -> Client | None:
    """Return the client of the cluster whose job this process is; None outside of jobs."""
    # The innermost cluster counts: a job of Iris may have Ray imported, and a job of Ray this package.
    if "iris" in sys.modules or "IRIS_TASK_ID" in os.environ or "IRIS_JOB_ID" in os.environ:
        from fray.v2.iris_backend import client_of_iris_job

        if (client := client_of_iris_job()) is not None:
            return client
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return client_of("ray")
    from fray.v2.fray.client import client_of_fray_job

    return client_of_fray_job()


_set_client_factory(client_of)

if TYPE_CHECKING:  # callers annotate with the protocols: each client must be one, for mypy too
    from fray.v2.fray.client import FrayClient
    from fray.v2.iris_backend import FrayIrisClient
    from fray.v2.local_backend import LocalClient
    from fray.v2.ray_backend.backend import RayClient

    def _check_protocol(a: LocalClient, b: FrayClient, c: RayClient, d: FrayIrisClient) -> list[Client]:
        return [a, b, c, d]


__all__ = [
    "Client",
    "JobAlreadyExists",
    "JobFailed",
    "JobHandle",
    "JobStatus",
    "_current_client_var",
    "client_of",
    "current_client",
    "set_current_client",
    "wait_all",
]
