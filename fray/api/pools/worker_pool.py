"""WorkerPool: stateless workers that run any callable, each task on the next free worker.

`fray.runtime.tasks.policy` decides which worker gets a task and `fray.runtime.tasks.dispatcher` sends it; this module
launches the workers' jobs and is the interface for users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

import trio
from attrs import evolve

from fray.api.futures import Future
from fray.api.jobs.job import error_of
from fray.api.jobs.job_spec import build_actor_spec
from fray.api.pools.remote_pool import PoolExport, unpickle_pool
from fray.api.pools.task_pool import PoolStats, TaskOptions, TaskPool, WorkerInfo, close_arguments, close_function
from fray.errors import ChannelClosed, ChannelFull, DeadlineExceeded, FrayError, InvalidRequest
from fray.missing_names import check_interface
from fray.model.environment import EnvironmentConfig
from fray.model.ids import JobId, check_name, mint_name
from fray.model.messages.client import ActorEndpoint, Explain, Names
from fray.model.messages.large_values import SIZE_LIMIT_BYTES, check_size
from fray.model.requests import JobRequest
from fray.model.resources import ResourceConfig
from fray.model.service_key import ServiceKey
from fray.runtime import waits
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.objects.exports import exports_of
from fray.runtime.runtime import Runtime
from fray.runtime.scope.children import ChildKind, OnChildFailure
from fray.runtime.scope.scope import ChildScope, open_service_scope
from fray.runtime.serialization.pickling import Enclosed, size_of_enclosed
from fray.runtime.tasks.dispatcher import (
    Task,
    TaskDispatcher,
    TaskFunction,
    WorkerConnection,
)
from fray.runtime.tasks.worker import TaskWorker

if TYPE_CHECKING:
    from fray.api.cluster import Cluster

TASKS_LIMIT = 1_000_000
"""Maximum number of unfinished tasks of one pool."""
BYTES_LIMIT = SIZE_LIMIT_BYTES
"""Maximum size of their arguments; one task may have as much alone."""
LARGE_BYTES = 100_000
CACHED_FUNCTIONS = 1_000
EXPLAIN_S = 5.0
"""Seconds that an error message waits for the controller's explanation."""
LOOK_AGAIN_S = 5.0
"""Seconds before another connection to a worker that is registered and did not answer."""


class _Worker:
    """Worker: its job, and the connection to its present incarnation."""

    def __init__(self, job_id: JobId, record: JobRecord) -> None:
        self.job_id, self.record = job_id, record
        self.connection: WorkerConnection | None = None
        self.endpoint: ActorEndpoint | None = None
        """Endpoint of the incarnation that is registered."""

    @property
    def up(self) -> bool:
        return self.connection is not None and not self.connection.is_down

    def info(self, dispatcher: TaskDispatcher) -> WorkerInfo:
        attempts = self.record.info.attempts
        last = attempts[-1] if attempts else None
        queue = dispatcher.assignment.workers.get(self.job_id)
        assigned = queue.held if queue is not None else 0
        return WorkerInfo(
            job_id=self.job_id,
            node=last.node if last else "",
            pid=last.pid if last else None,
            busy=assigned > 0,
            running=assigned,
            done=dispatcher.counts.by_worker.get(self.job_id, 0),
        )


class WorkerPool(TaskPool):
    """Workers for stateless tasks; use ``async with WorkerPool(...) as pool``.

    Each worker runs one task at a time: a sync task on its thread, an async task in its loop. Leaving the ``async
    with`` waits for all tasks and ends the workers; an error or a cancellation ends them at once.

    Args:
        cluster: where the workers run.
        num_workers: processes to launch, each a job named ``{name_prefix}-{token}-{index}``.
        resources: of each worker. Default 1 CPU and 2 GB.
        environment: packages, files, image and variables of the worker processes.
        name_prefix: default ``worker``.
        max_retries: number of times one task may be repeated because its worker died. Default 3.
        max_restarts: number of restarts of each worker after failures. Default 10.
        kill_after_s: seconds that a sync task which was cancelled, or overran its ``timeout_s``, may occupy its worker;
            then the process is killed and restarted. Default: no limit, and the worker runs nothing else meanwhile.
        services: called once, when the workers are launched; returns services to attach to the runtimes of the workers.

    Raises:
        InvalidRequest: fewer than one worker, or a name with blanks.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_workers: int,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        name_prefix: str = "worker",
        *,
        max_retries: int = 3,
        max_restarts: int = 10,
        kill_after_s: float | None = None,
        services: Callable[[], Mapping[ServiceKey[Any], object]] | None = None,
    ) -> None:
        if not isinstance(num_workers, int) or num_workers < 1:
            raise InvalidRequest(f"num_workers={num_workers!r} must be a whole number, 1 or more")
        if max_retries < 0:
            raise InvalidRequest(f"max_retries={max_retries!r} must be 0 or more")
        check_name(name_prefix, "a worker")
        super().__init__(self, TaskOptions(max_retries=max_retries))
        check_interface(cluster, "fray", "WorkerPool")
        self._runtime: Runtime = cluster._runtime
        self.num_workers = num_workers
        self._kill_after_s = kill_after_s
        self._services = services
        self._request = JobRequest(
            name=name_prefix,
            resources=resources or ResourceConfig(),
            environment=environment,
            max_retries_failure=max_restarts,
        )
        self._dispatcher = TaskDispatcher(self._runtime.caller, name_prefix)
        self._workers: list[_Worker] = []
        self._functions: dict[tuple[bytes, bool], TaskFunction] = {}
        self._function_numbers = count(1)
        self._open = False
        self._export = PoolExport(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as a `RemotePool`, whose tasks are queued here."""
        exports = exports_of(self._runtime)
        number = exports.export_object(self._export)
        return unpickle_pool, (exports.actor_id, number, self._request.name, self.num_workers, self._options)

    # Life ------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> WorkerPool:
        self._manager = open_service_scope(self._runtime, f"pool {self._request.name}")
        self._children = await self._manager.__aenter__()
        try:
            self._open = True
            self._children.start_soon(self._dispatcher.run)
            await self._launch(self._children)
        except BaseException as error:
            self._close()
            if not await self._manager.__aexit__(type(error), error, error.__traceback__):
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            if error is None:
                await self._wait_tasks()
        finally:
            self._close()
        return await self._manager.__aexit__(kind, error, traceback)

    async def shutdown(self, wait: bool = True) -> None:
        """Accept no more tasks; with ``wait`` finish those submitted, else fail them; end the workers."""
        if wait:
            await self._wait_tasks()
        self._close()
        self._children.end_actors()

    async def _launch(self, children: ChildScope) -> None:
        """Launch all workers in one request, or none."""
        arguments = self._kill_after_s, self._services() if self._services is not None else None
        prefix = mint_name(self._request.name, self._runtime.rng)
        names = [f"{prefix}-{index}" for index in range(self.num_workers)]
        built = [
            build_actor_spec(evolve(self._request, name=name), self._runtime, TaskWorker, arguments, {})
            for name in names
        ]
        for spec, _ in built:
            self._dispatcher.assignment.expect_worker(spec.job_id)
        specs, payloads = [spec for spec, _ in built], [content for _, content in built]
        records = await children.launch(specs, payloads, ChildKind.ACTOR, OnChildFailure.ABSORB, error_of)
        for spec, record in zip(specs, records, strict=True):
            worker = _Worker(spec.job_id, record)
            self._workers.append(worker)
            children.start_soon(self._follow, worker)

    async def _wait_tasks(self) -> None:
        self._open = False
        with waits.waiting():
            while self._dispatcher.unfinished:
                await self._dispatcher.changed.wait()

    def _close(self) -> None:
        self._open = False
        self._dispatcher.end(
            ChannelClosed("the worker pool was shut down before this task was done", reason="shutdown")
        )

    def start_soon(self, task: Callable[..., Any], *args: Any) -> None:
        """Run a task as long as the pool is open."""
        self._children.start_soon(task, *args)

    # Tasks -----------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidRequest(
                "this WorkerPool is not open: enter it with `async with`, and submit before it is shut down"
            )

    def pickled(self, fn: Callable[..., Any]) -> TaskFunction:
        """Return the function as it is now, pickled; equal functions are sent to each worker once."""
        self._check_open()
        name, data, runs_async = close_function(fn)
        return self.known_function(name, data, runs_async)

    def known_function(self, name: str, data: bytes, runs_async: bool) -> TaskFunction:
        """Return the shipped function of a pickle; the same object for the same pickle."""
        key = (data, runs_async)
        function = self._functions.get(key)
        if function is None:
            check_size(len(data), f"the function of task {name!r}")
            if len(self._functions) >= CACHED_FUNCTIONS:
                self._functions.clear()
            function = self._functions[key] = TaskFunction(next(self._function_numbers), data, name, runs_async)
        return function

    def add(
        self, function: TaskFunction, args: tuple[Any, ...], kwargs: dict[str, Any], options: TaskOptions
    ) -> Future:
        return self.queue(function, close_arguments(function, args, kwargs), bool(kwargs), options)

    def queue(self, function: TaskFunction, content: Enclosed, has_kwargs: bool, options: TaskOptions) -> Future:
        """Queue one task whose arguments are already pickled."""
        self._check_open()
        dispatcher = self._dispatcher
        size = size_of_enclosed(content)
        if len(function.data) > LARGE_BYTES:
            size += len(function.data)  # it may have to be sent in the same message
        if dispatcher.unfinished >= TASKS_LIMIT or 0 < dispatcher.held_bytes > BYTES_LIMIT - size:
            raise ChannelFull(
                f"the pool holds {dispatcher.unfinished} tasks with {dispatcher.held_bytes} bytes of arguments: await "
                "some before submitting more, or use imap"
            )
        future = Future(function.what)
        task = Task(
            dispatcher.next_number(),
            size,
            options.max_retries,
            function,
            content,
            has_kwargs,
            future,
            options.timeout_s,
            options.retry_exceptions,
        )
        future.on_cancel = partial(dispatcher.cancel, task)
        dispatcher.add(task)
        return future

    # Workers ---------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of workers that accept tasks now."""
        return sum(worker.up for worker in self._workers)

    @property
    def retried(self) -> int:
        """Number of times a task was assigned to another worker because its worker died."""
        return self._dispatcher.counts.retried

    def workers(self) -> list[WorkerInfo]:
        """Return a snapshot of the workers."""
        return [worker.info(self._dispatcher) for worker in self._workers]

    def stats(self) -> PoolStats:
        """Return the counts of the pool."""
        counts, assignment = self._dispatcher.counts, self._dispatcher.assignment
        return PoolStats(
            queued=len(assignment),
            running=sum(queue.held for queue in assignment.workers.values()),
            done=counts.done,
            failed=counts.failed,
            cancelled=counts.cancelled,
            retried=counts.retried,
            workers=tuple(self.workers()),
        )

    async def wait_for_workers(self, min_workers: int | None = None, timeout: float = 60.0) -> None:
        """Wait until ``min_workers`` (default all) accept tasks.

        Raises:
            DeadlineExceeded: not within ``timeout`` seconds; the message explains what the first missing worker waits
                for.
            FrayError: no worker will ever come; the message says why.
        """
        wanted = self.num_workers if min_workers is None else min_workers
        with trio.move_on_after(timeout), waits.waiting():
            while self.size < wanted and self._dispatcher.error is None:
                await self._dispatcher.changed.wait()
            if self._dispatcher.error is not None:
                raise self._dispatcher.error
            return
        raise DeadlineExceeded(f"{self.size} of {wanted} workers run after {timeout:g} s{await self._why_not_all()}")

    async def _why_not_all(self) -> str:
        """Return the controller's explanation of the first missing worker, as the end of an error message."""
        missing = next((worker.job_id for worker in self._workers if not worker.up), None)
        if missing is None:
            return ""
        try:
            reply = await self._runtime.client.request(Explain(job=missing), timeout_s=EXPLAIN_S)
        except FrayError as error:
            return f"; no explanation for {missing}: {error}"
        return f"\n{reply.text}"

    async def _follow(self, worker: _Worker) -> None:
        """Stay connected to the registered incarnation of the worker, until its job has ended for good."""

        def on_names(names: Names, blobs: Sequence[Any]) -> None:
            worker.endpoint = names.endpoints[-1] if names.endpoints else None
            self._reconnect(worker)

        unwatch = self._runtime.client.names.watch(f"actor:{worker.job_id}", on_names)
        try:
            await worker.record.ended.wait()
        finally:
            unwatch()
        worker.endpoint = None
        if worker.connection is not None:
            await self._dispatcher.drain_lost_worker(worker.connection)
        self._dispatcher.worker_gone(worker.job_id, error_of(worker.record))

    def _reconnect(self, worker: _Worker) -> None:
        connection, endpoint = worker.connection, worker.endpoint
        if connection is not None and not connection.is_down and connection.endpoint == endpoint:
            return
        if connection is not None and not connection.is_closed:
            self._children.start_soon(self._dispatcher.drain_lost_worker, connection)
        worker.connection = None
        if endpoint is not None:
            worker.connection = self._dispatcher.join(worker.job_id, endpoint)
            self._children.start_soon(self._look_again, worker, worker.connection)

    async def _look_again(self, worker: _Worker, connection: WorkerConnection) -> None:
        """Connect again to a worker that is registered and did not answer."""
        await connection.ended.wait()
        await trio.sleep(LOOK_AGAIN_S)
        if worker.connection is connection and worker.endpoint == connection.endpoint:
            self._reconnect(worker)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<WorkerPool {self._request.name!r}: {self.size} workers, {stats.queued} queued, {stats.running} running>"
        )
