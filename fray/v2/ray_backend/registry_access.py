"""Access to the registry of this driver: found or made, and called."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from fray.v2.ray_backend import process_context
from fray.v2.ray_backend.errors import own_error
from fray.v2.ray_backend.registry import RayRegistry

REGISTRY_NAME = "fray-registry-{}"
"""Name of the Ray actor, with the id of the driver, so that names of jobs and actors never clash between drivers,
whatever namespace they are in."""
ON_HEAD_NODE = {"node:__internal_head__": 0.001}
"""Ray's own resource of the node that lives as long as the cluster."""
MAX_CALLS = 100_000
"""Concurrent calls of the registry: each waiting caller is a call."""


def find_registry() -> Any:
    """Return the registry of this driver and of all that it started; it is made when there is none, and ends with the
    driver.

    Raises:
        RuntimeError: Ray is not initialized in this process.
    """
    if not ray.is_initialized():
        raise RuntimeError("Ray is not initialized here: make a RayClient, or use this in a job or an actor of one")
    found = process_context.known_registry()
    if found is None:
        named = ray.remote(RayRegistry).options(
            name=REGISTRY_NAME.format(ray.get_runtime_context().get_job_id()),
            get_if_exists=True,
            num_cpus=0,
            resources=ON_HEAD_NODE,
            max_concurrency=MAX_CALLS,
        )
        found = named.remote()
        process_context.remember_registry(found)
    return found


def registry_call(ref: Any) -> Any:
    """Return the registry's answer.

    Raises:
        RuntimeError: the registry has ended, with the driver that made it.
    """
    try:
        return ray.get(ref)
    except RayActorError:
        process_context.forget_registry()
        raise RuntimeError("the RayClient that made this has ended, and everything it made with it") from None
    except RayError as error:
        raise own_error(error, "the registry") from None
