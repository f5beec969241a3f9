"""Clusters for sync code: `open_cluster`, `current_cluster`, and a class for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fray.api.cluster as native
from fray.api.open import default_spec
from fray.api.open import open_cluster as open_native
from fray.blocking.bridge import background_loop
from fray.blocking.bridge.background_loop import job_runtime, own_portal, portal_of
from fray.blocking.bridge.portal import BlockingContext, refuse_in_loop
from fray.blocking.cluster import ASYNC_LINE, Cluster
from fray.model.ids import Namespace
from fray.model.service_key import ServiceKey


class LocalCluster(Cluster):
    """Cluster within this process: its jobs are threads and tasks of it. As ``open_cluster("local")``.

    Arguments and results are pickled all the same. Without ``with``, `Cluster.close` or the interpreter's exit ends it.

    Args:
        grace_s: seconds that leaving waits for threads of jobs and actors that were ended and have not returned; a
            RuntimeWarning names those that are left then. Default 2.
        namespace, logs, env_vars, report_waits: as `open_cluster`.
    """

    def __init__(
        self,
        *,
        namespace: Namespace | None = None,
        logs: bool = True,
        grace_s: float | None = None,
        env_vars: Mapping[str, str] | None = None,
        report_waits: bool | None = None,
    ) -> None:
        options = {"grace_s": grace_s, "env_vars": env_vars, "report_waits": report_waits}
        _open(self, "local", namespace=namespace, logs=logs, **options)


class FrayCluster(Cluster):
    """Connection to a running controller. As ``open_cluster("fray://host:port")``, with its errors.

    Args:
        address: ``host:port``, ``fray://host:port`` or ``fray+unix:///path``.
        token, namespace, logs, grace_s, report_waits: as `open_cluster`.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        namespace: Namespace | None = None,
        logs: bool = True,
        grace_s: float | None = None,
        report_waits: bool | None = None,
    ) -> None:
        spec = address if "://" in address else f"fray://{address}"
        options = {"grace_s": grace_s, "report_waits": report_waits}
        _open(self, spec, namespace=namespace, token=token, logs=logs, **options)


def open_cluster(
    spec: str | None = None,
    *,
    namespace: Namespace | None = None,
    token: str | None = None,
    logs: bool = True,
    grace_s: float | None = None,
    env_vars: Mapping[str, str] | None = None,
    report_waits: bool | None = None,
) -> Cluster:
    """Connect to a cluster, or make one: ``with open_cluster() as cluster``; without ``with``, `Cluster.close` or the
    interpreter's exit ends it. It runs in one thread of this process, shared by all clusters.

    Args:
        spec: ``local``, ``machine``, ``machine?nodes=2&cpu=4`` or ``fray://host:port``. Default: ``FRAY_CLUSTER_SPEC``,
            else the cluster of the last ``fray login``, else ``local``; inside a job, the job's own cluster.
        namespace: namespace of names. Default: a new one.
        token: for ``fray://``; default ``FRAY_TOKEN``, the file ``FRAY_TOKEN_FILE``, or the key of ``fray login``.
        logs: print the output of jobs to this terminal, each line prefixed with the job's name. Default True.
        grace_s: for ``fray://``: seconds that this driver may be disconnected before all it owns is ended; for
            ``local``: seconds that leaving waits for threads that have been ended and still run. As
            `fray.open_cluster`.
        env_vars: variables of every job of a cluster that is made here.
        report_waits: print to standard error for what a job waits that has been pending for 5 s. As
            `fray.open_cluster`.

    Raises:
        UnknownClusterSpec: not a valid spec.
        Unreachable, Unauthorized, ProtocolMismatch: the controller cannot be reached or refuses the connection.
        FrayError: this is async code: use `fray.open_cluster` there.
    """
    runtime = job_runtime()
    if spec is None and runtime is not None and runtime.job_id is not None:
        return cluster_of(runtime)
    chosen = spec or default_spec()
    opened = _of_kind(chosen)
    options = {"grace_s": grace_s, "env_vars": env_vars, "report_waits": report_waits}
    _open(opened, chosen, namespace=namespace, token=token, logs=logs, **options)
    return opened


def current_cluster() -> Cluster:
    """Return the cluster of the running code: in a job its own; in a driver the one opened last; else one that is
    opened now, by ``FRAY_CLUSTER_SPEC`` (default ``local``), shared by all threads and closed with the interpreter.
    Raises as `open_cluster`.
    """
    runtime = job_runtime()
    if runtime is not None:
        return cluster_of(runtime)
    with background_loop.opening:
        for opened in reversed(background_loop.opened):
            cluster = cluster_of(opened)
            if cluster._context is None or not cluster._context.has_ended:
                return cluster
        return open_cluster()


BLOCKING_CLUSTER: ServiceKey[Cluster] = ServiceKey("blocking cluster")


def cluster_of(runtime: Any) -> Cluster:
    """Return the `Cluster` of a runtime, which is made on first use."""

    def make() -> Cluster:
        cluster = _of_kind("local" if background_loop.is_in_process(runtime) else "")
        Cluster.__init__(cluster, portal_of(runtime), native.cluster_of(runtime))
        return cluster

    found: Cluster = runtime.services.get_or_make(BLOCKING_CLUSTER, make)
    return found


def _of_kind(spec: str) -> Cluster:
    """Return a cluster of the class for this spec, not opened yet."""
    if spec.partition("?")[0] == "local":
        return LocalCluster.__new__(LocalCluster)
    return FrayCluster.__new__(FrayCluster) if spec.startswith("fray") else Cluster.__new__(Cluster)


def _open(cluster: Cluster, spec: str, **options: Any) -> None:
    refuse_in_loop(f"{ASYNC_LINE}: opening a cluster of fray.blocking waits")
    context = BlockingContext(own_portal(), open_native(spec, **options))
    opened = context.enter()
    Cluster.__init__(cluster, portal_of(opened._runtime), opened, context)
    opened._runtime.services[BLOCKING_CLUSTER] = cluster
    with background_loop.opening:
        background_loop.opened.append(opened._runtime)
