"""Default context of the running code, and the factory of contexts."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fray.blocking.bridge.background_loop import runtime_here
from fray.errors import InvalidRequest
from fray.job.default_context import JOB_CONTEXT, default_context, opening, stored_context

if TYPE_CHECKING:
    from fray.job.context import JobContext
    from fray.job.fray_context import FrayContext

C = TypeVar("C")

_of_process: JobContext | None = None


class set_default_job_ctx(Generic[C]):
    """Set what `get_default_job_ctx` returns, in this thread or task and in the functions that the context runs for it.

    As a ``with`` block it yields the context, and restores the previous one at the end.
    """

    def __init__(self, context: C) -> None:
        self._context = context
        self._token = default_context.set(context)

    def __enter__(self) -> C:
        return self._context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        default_context.reset(self._token)


def get_default_job_ctx() -> Any:
    """Return the context of the running code.

    In this order: the one of `set_default_job_ctx`; in a function that a `FrayContext` runs, that context; in a job of
    Fray, or where a cluster is open, a `FrayContext` of it; where ``FRAY_CLUSTER_SPEC`` is set, one of that cluster;
    else one `ThreadContext` for the whole process.
    """
    context = default_context.get()
    if context is not None:
        return context
    # Only where a cluster is in use: the default must not start one.
    if runtime_here() is not None or os.environ.get("FRAY_CLUSTER_SPEC"):
        return own_context()
    return _threads_of_process()


def _threads_of_process() -> JobContext:
    from fray.job.local import ThreadContext

    global _of_process
    # All code of the process shares one pool of threads.
    with opening:
        if _of_process is None:
            _of_process = ThreadContext()
        return _of_process


def own_context() -> FrayContext:
    """Return the `FrayContext` of the cluster of the running code, one for all its code. Raises as `FrayContext`."""
    from fray.blocking.open import current_cluster
    from fray.job.fray_context import FrayContext

    services = (runtime_here() or current_cluster()._runtime).services
    # Two threads at once would make two pools on the cluster.
    with opening:
        context: FrayContext = stored_context(services)
        if context is None:
            context = services[JOB_CONTEXT] = FrayContext()
        return context


def create_job_ctx(context_type: str = "auto", **options: Any) -> JobContext:
    """Return a new context: ``sync``, ``threadpool`` (``max_workers=``) or ``fray`` (the arguments of `FrayContext`);
    for ``auto``, the result of `get_default_job_ctx` (no options).

    Raises:
        InvalidRequest: (a ValueError) the kind is invalid.
    """
    from fray.job.fray_context import FrayContext
    from fray.job.local import SyncContext, ThreadContext

    kinds: dict[str, Callable[..., JobContext]] = {
        "auto": get_default_job_ctx,
        "sync": SyncContext,
        "thread": ThreadContext,
        "threadpool": ThreadContext,
        "fray": FrayContext,
    }
    if context_type not in kinds:
        raise InvalidRequest(f"invalid context_type={context_type!r}; expected one of {', '.join(map(repr, kinds))}")
    return kinds[context_type](**options)
