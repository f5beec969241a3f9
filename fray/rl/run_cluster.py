"""The cluster of a run, and what must be on its machines, as far as that is known here before the run starts."""

from __future__ import annotations

import os
from pathlib import Path

from fray.api.cluster import Cluster
from fray.api.open import default_spec
from fray.errors import InvalidRequest
from fray.net.controller_address import is_loopback
from fray.rl.model_spec import ModelSpec
from fray.runtime.runtime import current_or_none

MADE_HERE = ("local", "machine")
"""Kinds of clusters that their driver makes, on its machine."""


def spec_of_run() -> str | None:
    """Return the spec of the cluster of a run; None: that of the job of this process."""
    runtime = current_or_none()
    if runtime is not None and runtime.job_id is not None:
        return None
    spec = default_spec()
    is_chosen = bool(os.environ.get("FRAY_CLUSTER_SPEC"))
    # In processes: in one, servers and trainer would share the interpreter's lock, and end together.
    return "machine" if spec == "local" and not is_chosen else spec


def check_model_of_spec(model: ModelSpec, spec: str | None) -> None:
    """Check that the directory of a model is there, if the cluster will be made on this machine.

    Raises:
        InvalidRequest: it is not.
    """
    if spec is not None and spec.partition("?")[0] in MADE_HERE:
        _check_directory(model)


async def check_model_of_cluster(model: ModelSpec, cluster: Cluster) -> None:
    """Check that the directory of a model is there, if all machines of the cluster are this one.

    What a machine elsewhere has cannot be known here.

    Raises:
        InvalidRequest: it is not.
    """
    kind = cluster.address.partition(":")[0]
    if kind == "memory":
        _check_directory(model)
    elif kind == "unix":
        # Its controller may listen at other addresses, too.
        nodes = await cluster.nodes()
        if nodes and all(is_loopback(node.host) for node in nodes):
            _check_directory(model)


def _check_directory(model: ModelSpec) -> None:
    if isinstance(model, str) and Path(model).is_absolute() and not Path(model).is_dir():
        raise InvalidRequest(f"invalid model {model!r}: there is no such directory on this machine")
