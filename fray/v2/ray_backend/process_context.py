"""State of this process in a Ray cluster: the job or actor whose code it runs, and the registry it belongs to."""

from __future__ import annotations

from typing import Any

import ray

untyped: Any = ray
"""Ray has types for a part of its functions, and none where it is not installed."""

_registries: dict[str, Any] = {}
"""Ray handle of the registry, by worker id: a new connection to Ray has another id. At most one entry."""
_owner: str | None = None


def known_registry() -> Any | None:
    """Return the registry that this connection to Ray has used before; None if it has used none."""
    return _registries.get(ray.get_runtime_context().get_worker_id())


def remember_registry(registry: Any) -> None:
    """Use this registry from now on."""
    _registries.clear()
    _registries[ray.get_runtime_context().get_worker_id()] = registry


def forget_registry() -> None:
    """Drop a registry that has died: the next use makes another."""
    _registries.clear()


def enter(job_id: str, registry: Any) -> None:
    """Mark this process as running the code of that job or actor."""
    global _owner
    _owner = job_id
    remember_registry(registry)


def leave() -> None:
    """Mark that code as ended."""
    global _owner
    _owner = None


def owner() -> str | None:
    """Return the id of the job or actor whose code this process runs; None in a driver."""
    return _owner
