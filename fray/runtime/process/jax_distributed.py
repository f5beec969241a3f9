"""JAX cluster environment for gangs, so that ``jax.distributed.initialize()`` works without arguments.

JAX reads the coordinator's address from a variable, but the number of processes and the index of this one come from
"cluster environments", classes for Slurm, Open MPI and others. This module adds one for Fray. It is made after JAX has
been imported, never before: most jobs do not use JAX, and must not wait for its import.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_CLUSTERS = "jax._src.clusters"
_NEEDED = ("FRAY_COORDINATOR_ADDRESS", "FRAY_RANK", "FRAY_WORLD_SIZE")

log = logging.getLogger("fray.jax")


def install() -> None:
    """Register the gang with JAX: now if JAX has been imported, else when it is. Idempotent."""
    if _CLUSTERS in sys.modules:
        _register(sys.modules[_CLUSTERS])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # First in the path, before the finder that would import the module without this hook.
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Import hook that registers the gang after the import of JAX's cluster module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Asked directly: `importlib.util.find_spec` would call this finder again.
        spec = PathFinder.find_spec(name, path) if name == _CLUSTERS else None
        if spec is None or spec.loader is None:
            return None
        # Needed once; every further import would pay for it.
        sys.meta_path.remove(self)
        loader: Any = spec.loader
        exec_original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            exec_original(module)
            _register(module)

        loader.exec_module = exec_module
        return spec


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
