"""JAX cluster environment for gangs, so that ``jax.distributed.initialize()`` works without arguments.

JAX reads the coordinator's address from a variable, but the number of processes and the index of this one come from
"cluster environments", classes for Slurm, Open MPI and others. This module adds one for Fray. It is made after JAX has
been imported, never before: most jobs do not use JAX, and must not wait for its import.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from fray.import_hooks import after_import

_CLUSTERS = "jax._src.clusters"
_NEEDED = ("FRAY_COORDINATOR_ADDRESS", "FRAY_RANK", "FRAY_WORLD_SIZE")

log = logging.getLogger("fray.jax")


def install() -> None:
    """Register the gang with JAX: now if JAX has been imported, else when it is. Idempotent."""
    after_import(_CLUSTERS, _register)


def _register(clusters: Any) -> None:
    """Add the class at the front of JAX's list, which is searched in order."""
    try:
        known = clusters.ClusterEnv._cluster_types
        if any(kind.name == "fray" for kind in known):
            return
        known.insert(0, _make(clusters.ClusterEnv))
        del known[-1]  # JAX has appended it by itself
    except AttributeError as error:
        log.warning(
            "this version of JAX is not supported for gangs: pass num_processes and process_id to "
            "jax.distributed.initialize (%s)",
            error,
        )


def _make(base: Any) -> Any:
    class FrayGang(base):  # type: ignore[misc]
        """Gang of Fray, described by its environment variables."""

        name = "fray"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(name in os.environ for name in _NEEDED)

        @classmethod
        def get_coordinator_address(cls, *_: object, **__: object) -> str:
            return os.environ["FRAY_COORDINATOR_ADDRESS"]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["FRAY_WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["FRAY_RANK"])

    return FrayGang
