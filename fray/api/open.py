"""`open_cluster`, which starts the processes of a new cluster before this process has imported what it needs itself."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from fray.api.async_block import async_block
from fray.errors import FrayError, InvalidRequest
from fray.model.ids import Namespace
from fray.runtime.scope.interrupts import defer_sigint_in_fray_code

if TYPE_CHECKING:
    from fray.api.cluster import Cluster
    from fray.runtime.runtime import Runtime


REPORT_VARIABLE = "FRAY_REPORT_WAITS"
"""Environment variable that turns the lines about waiting jobs off: ``0``."""


def default_spec() -> str:
    """Return the spec of the cluster to use when none is given: ``FRAY_CLUSTER_SPEC``, else the cluster of the last
    ``fray login``, else ``local``."""
    found = os.environ.get("FRAY_CLUSTER_SPEC")
    if found:
        return found
    from fray.deploy import stored_keys

    return stored_keys.default_spec() or "local"


def reports_waits(report_waits: bool | None) -> bool:
    """Return whether the driver says for what its jobs wait: the argument, else the environment variable, else True.

    Raises:
        InvalidRequest: the variable has another value than 0 or 1.
    """
    if report_waits is not None:
        return report_waits
    value = os.environ.get(REPORT_VARIABLE) or "1"
    if value not in ("0", "1"):
        raise InvalidRequest(
            f"invalid {REPORT_VARIABLE}={value!r}: write {REPORT_VARIABLE}=0 to turn off the lines, or unset it"
        )
    return value == "1"


@async_block("async with fray.open_cluster(...) as cluster", "with fray.blocking.open_cluster(...) as cluster")
@asynccontextmanager
async def open_cluster(
    spec: str | None = None,
    *,
    namespace: Namespace | None = None,
    token: str | None = None,
    logs: bool = True,
    grace_s: float | None = None,
    env_vars: Mapping[str, str] | None = None,
    report_waits: bool | None = None,
) -> AsyncIterator[Cluster]:
    """Connect to a cluster, or make a cluster that lives as long as the ``async with``.

    Args:
        spec: ``local`` (threads and tasks of this process), ``machine`` or ``machine?nodes=2&cpu=4`` (processes on this
            machine), ``fray://host:port`` (a running controller). Default: ``FRAY_CLUSTER_SPEC``, else that of ``fray
            login``, else ``local``; inside a job, the job's own cluster.
        namespace: namespace of names. Default: a new one.
        token: for ``fray://``; default ``FRAY_TOKEN``, the file ``FRAY_TOKEN_FILE``, or the key of ``fray login``.
        logs: print the output of jobs to this terminal, each line prefixed with the job's name. Default True.
        grace_s: for ``fray://``: seconds that this driver may be disconnected (no network, suspended) before all it
            owns is ended, up to a week. Default: that of the controller (``fray-controller --driver-grace-s``, 30). For
            ``local``: seconds that leaving waits for threads of jobs and actors that have been ended and still run (a
            thread cannot be killed); a RuntimeWarning names those left. Default 2.
        env_vars: variables of every job of a cluster that is made here; a running one has ``fray-controller --env``.
        report_waits: print to standard error for what a job or actor waits that has been pending for 5 s, and again
            when the kind of its reason changes. Default: True, unless ``FRAY_REPORT_WAITS=0``.

    Raises:
        FrayError: not in a Trio task (`trio.run`).
        UnknownClusterSpec: not a valid spec.
        InvalidRequest: no token, or an impossible ``grace_s``.
        Unreachable, Unauthorized, ProtocolMismatch: the controller cannot be reached or refuses the connection.
        SessionEnded: the driver was disconnected for longer than its grace period: all waits in the block raise this,
            and the block ends with it.
    """
    from fray.deploy import connect
    from fray.deploy.cluster_spec import parse_spec

    if not trio.lowlevel.in_trio_task():
        raise FrayError(
            "fray.open_cluster() was entered outside of Trio (in asyncio.run, or in a notebook, whose cells run in "
            "asyncio): Fray's async API runs on Trio. Write `async with fray.aio.open_cluster() as cluster:`, the same "
            "for asyncio; or without await `with fray.blocking.open_cluster() as cluster:`; or run on Trio: "
            "`trio.run(main)`"
        )
    if spec is None:
        from fray.runtime.runtime import current_or_none

        runtime = current_or_none()
        # A job's own cluster is used, not left: it ends with the job.
        if runtime is not None and runtime.job_id is not None:
            yield cluster_of(runtime)
            return
    reports = reports_waits(report_waits)
    chosen = parse_spec(spec if spec is not None else default_spec())
    # For the whole block: the embedded controller runs in the same thread as the driver's code.
    with defer_sigint_in_fray_code():
        opening = connect.open_by_spec(
            chosen, namespace=namespace, token=token, logs=logs, grace_s=grace_s, env_vars=env_vars
        )
        async with opening as opened:
            cluster = cluster_of(opened)
            if reports:
                from fray.runtime.controller_client import pending_jobs

                opened.nursery.start_soon(pending_jobs.report_pending, opened.client.jobs)
            yield cluster
            # Only if the body has not failed: an error ends everything with the session.
            await cluster._root.wait_jobs_then_end_actors()


def cluster_of(runtime: Runtime) -> Cluster:
    """Return the cluster of ``runtime``."""
    from fray.api import cluster  # while the nodes of a new cluster start

    return cluster.cluster_of(runtime)
