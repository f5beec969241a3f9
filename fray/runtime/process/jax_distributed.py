"""So that ``jax.distributed.initialize()`` works unaided in a gang.

JAX reads the coordinator's address from a variable, but how many processes there are, and which one this is, it asks
"cluster environments": classes it knows, for Slurm, Open MPI and others. Fray's is one more. It is made when JAX has
been imported, never before: most jobs do without, and no process of Fray shall wait for JAX.
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
    """Tell JAX of this gang as soon as it is imported; now, if it has been. Repeating it changes nothing."""
    if _CLUSTERS in sys.modules:
        _tell(sys.modules[_CLUSTERS])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds one module as everybody does, and adds a step behind its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _CLUSTERS else None
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        loader: Any = spec.loader
        really = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            really(module)
            _tell(module)

        loader.exec_module = exec_module
        return spec


def _tell(clusters: Any) -> None:
    """Make the class; JAX looks through all of them in order, so it goes to the front."""
    try:
        known = clusters.ClusterEnv._cluster_types
        if any(kind.name == "fray" for kind in known):
            return
        known.insert(0, _make(clusters.ClusterEnv))
        del known[-1]  # where JAX has put it by itself
    except AttributeError as error:
        log.warning(
            "this version of JAX cannot be told of the gang: pass num_processes and process_id to "
            "jax.distributed.initialize (%s)",
            error,
        )


def _make(base: Any) -> Any:
    class FrayGang(base):  # type: ignore[misc]
        """A gang of Fray, as its variables say."""

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
