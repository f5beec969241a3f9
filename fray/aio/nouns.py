"""Classes and functions of `fray.aio`: those of `fray`, with the few differences written out."""

from __future__ import annotations

from collections.abc import Callable
from types import AsyncGeneratorType
from typing import Any

from fray.aio.crossing import Block
from fray.aio.mirror import Mirror, await_native, mirror, unwrap, wrap
from fray.api import actor_server, port_forward, reservation, resolver, scope
from fray.api import cluster as native
from fray.api.actors import group, handle, host, monitor
from fray.api.async_block import AsyncBlock
from fray.api.jobs import job, job_group
from fray.api.open import open_cluster as open_native
from fray.api.pools import actor_pool, task_pool, task_stream, worker_pool
from fray.blocking.bridge import background_loop
from fray.blocking.bridge.background_loop import current_runtime, job_runtime, own_portal, portal_of
from fray.errors import ChannelFull
from fray.missing_names import check_interface
from fray.runtime.calls import streams
from fray.runtime.logs import reader

_CALLBACKS = ("add_done_callback", "remove_done_callback", "on_size")
_FOR_FRAY = (
    *("add", "queue", "known_function", "pickled", "start_soon", "keep", "wait_jobs_then_end_actors", "on_appended"),
    *("add_item", "answer", "answer_cancelled", "defer_answer", "encoded_outcome", "fail", "fail_lost_items"),
    *("has_missing_buffers", "on_credit", "on_sent", "wait_done"),
)
"""Public methods of the classes that other parts of Fray call, and not users."""
_WITHOUT = (*_CALLBACKS, *_FOR_FRAY)

ActorGroup = mirror(group.ActorGroup, in_loop=("ready_count",))
ActorHandle = mirror(handle.ActorHandle)
ActorHost = mirror(host.ActorHost, without=_WITHOUT)
ActorPool = mirror(actor_pool.ActorPool, without=_WITHOUT, in_loop=("size", "endpoints"))
ActorServer = mirror(actor_server.ActorServer)
ClusterResolver = mirror(resolver.ClusterResolver)
DuplexStream = mirror(streams.DuplexStream, without=_WITHOUT)
FixedResolver = mirror(resolver.FixedResolver)
Job = mirror(job.Job, without=_WITHOUT)
JobGroup = mirror(job_group.JobGroup, without=("count", "index"))
Monitor = mirror(monitor.Monitor)
Reservation = mirror(reservation.Reservation)
Scope = mirror(scope.Scope, without=_WITHOUT)
Stream = mirror(streams.CallStream, without=_WITHOUT)

for _returned in (
    *(actor_pool._Broadcast, actor_pool._RoundRobinHandle, actor_pool.BroadcastMethod, reader.LogReader),
    *(reservation.ReservationEvents, task_pool.TaskPool, task_stream.TaskStream, AsyncGeneratorType),
):
    mirror(_returned, without=_WITHOUT)


class ActorMethod(mirror(handle.ActorMethod)):  # type: ignore[misc]
    __doc__ = handle.ActorMethod.__doc__

    async def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return its result. Cancelling the await cancels the remote call. Calls that are made in
        one loop start in the order in which they are awaited, also by ``asyncio.gather``. As in `fray`.
        """

        def call() -> Any:
            try:
                return self._native.start(*args, **kwargs)
            except ChannelFull:
                return self._native(*args, **kwargs)  # waits for room

        return await await_native(self._portal, call)


class ActorCall(mirror(handle.ActorCall)):  # type: ignore[misc]
    __doc__ = handle.ActorCall.__doc__

    async def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return its result: ``await counter.call(Counter.add, 3)``. As in `fray`."""
        method, rest = self._native._find(args)
        return await wrap(self._portal, method)(*rest, **kwargs)


class Cluster(mirror(native.Cluster)):  # type: ignore[misc]
    __doc__ = native.Cluster.__doc__

    async def monitor(
        self, job: Any, on_line: Callable[[Any], object] | None = None, *, tail: int | None = None, tree: bool = False
    ) -> Any:
        """Follow the output of a job until it ends; return its final state. As `fray.Cluster.monitor`, but ``on_line``
        is called in the asyncio loop.
        """
        if on_line is None:
            return await super().monitor(job, tail=tail, tree=tree)
        async with self.logs(job, follow=True, tail=tail, tree=tree) as lines:
            async for line in lines:
                on_line(line)
        return await self.wait(job)


class WorkerPool(mirror(worker_pool.WorkerPool, without=_WITHOUT)):  # type: ignore[misc]
    __doc__ = worker_pool.WorkerPool.__doc__

    def __init__(self, cluster: Any, *args: Any, **kwargs: Any) -> None:
        check_interface(cluster, "fray.aio", "WorkerPool")
        super().__init__(cluster, *args, **kwargs)

    async def __aenter__(self) -> WorkerPool:
        # A pool owns a nursery: it is entered and left by one task of Fray's loop.
        self._block: Block[object] = Block(lambda: self._portal, self._native, lambda pool: pool)
        await self._block.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._block.__aexit__(*error)


def open_cluster(*args: Any, **kwargs: Any) -> Block[Any]:
    """Connect to a cluster, or make one, for the block: ``async with fray.aio.open_cluster() as cluster``. Arguments
    and errors are those of `fray.open_cluster`. Fray's loop is a thread of this process, shared by all clusters.
    """
    opened: list[Any] = []

    def find_portal() -> Any:
        runtime = job_runtime()
        return own_portal() if runtime is None or runtime.job_id is None else portal_of(runtime)

    def wrap_cluster(cluster: Any) -> Any:
        if cluster._runtime is not job_runtime():
            opened.append(cluster._runtime)
            with background_loop.opening:
                background_loop.opened.append(cluster._runtime)
        return Cluster.of(portal_of(cluster._runtime), cluster)

    def on_leave() -> None:
        for runtime in opened:
            background_loop.forget(runtime)

    block = AsyncBlock(open_native(*args, **kwargs), "async with fray.aio.open_cluster(...) as cluster")
    return Block(find_portal, block, wrap_cluster, on_leave)


def current_cluster() -> Any:
    """Return the cluster of the running code: of its job, or the one that this process has opened last.

    Raises:
        FrayError: neither in a job nor in `open_cluster`.
    """
    runtime = current_runtime()
    return Cluster.of(portal_of(runtime), native.cluster_of(runtime))


async def metrics_of(actor: Any) -> Any:
    """Return counts of an actor: see `fray.metrics_of`."""
    portal = actor._portal if isinstance(actor, Mirror) else portal_of(current_runtime())
    return await await_native(portal, handle.metrics_of, unwrap(actor))


def open_forward(job: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward a port of a job to this machine: ``async with fray.aio.open_forward(job, "http") as address``. Arguments
    are those of `fray.open_forward`.
    """
    portal = job._portal if isinstance(job, Mirror) else portal_of(current_runtime())
    return wrap(portal, port_forward.open_forward(unwrap(job), *args, **kwargs))
