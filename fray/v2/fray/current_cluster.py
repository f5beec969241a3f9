"""Cluster of the running code, for handles and clients that came by pickle and find it at the first use."""

from __future__ import annotations

import os

from fray.blocking import Cluster
from fray.blocking.bridge import background_loop
from fray.blocking.open import cluster_of
from fray.v2.interface import _client_of_spec, _current_client_var


def cluster_here(what: str) -> Cluster:
    """Return the cluster of the current client if it is a `FrayClient`, else of the job whose code is running, else of
    ``FRAY_CLIENT_SPEC``, else the one that this process opened last.

    Args:
        what: names the object that needs the cluster, for the error.

    Raises:
        RuntimeError: there is no such cluster.
    """
    if (found := _cluster_of_client(_current_client_var.get())) is not None:
        return found
    runtime = background_loop.job_runtime()
    if runtime is not None:
        return cluster_of(runtime)
    spec = os.environ.get("FRAY_CLIENT_SPEC", "")
    if (found := _cluster_of_client(_client_of_spec(spec) if spec not in ("", "local") else None)) is not None:
        return found
    if background_loop.opened:
        return cluster_of(background_loop.opened[-1])
    raise RuntimeError(
        f"{what} belongs to a cluster of Fray, but none is open here: make a FrayClient for it and use it in "
        "`with set_current_client(client)`, or set FRAY_CLIENT_SPEC"
    )


def _cluster_of_client(client: object) -> Cluster | None:
    cluster = getattr(client, "_bound", None)  # None if it was unpickled and not used yet
    return cluster if isinstance(cluster, Cluster) else None
