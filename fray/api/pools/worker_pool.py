"""WorkerPool: stateless workers that run any callable, each task on whichever worker is free.

Who gets which task is the law of `fray.runtime.tasks.policy`; `fray.runtime.tasks.dispatcher` obeys it. Here are the
workers' jobs and
what a user says and sees.
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
from fray.api.pools.task_pool import PoolStats, TaskOptions, TaskPool, WorkerInfo, close_function
from fray.errors import ChannelClosed, ChannelFull, DeadlineExceeded, FrayError, InvalidRequest
from fray.model.environment import EnvironmentConfig
from fray.model.ids import JobId, check_name, mint_name
from fray.model.messages.client import ActorEndpoint, Explain, Names
from fray.model.requests import JobRequest
from fray.model.resources import ResourceConfig
from fray.model.service_key import ServiceKey
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.objects.exports import exports_of
from fray.runtime.runtime import Runtime
from fray.runtime.scope.children import ChildKind, OnChildFailure
from fray.runtime.scope.scope import ChildScope, open_service_scope
from fray.runtime.serialization import pickling
from fray.runtime.tasks.dispatcher import (
    Task,
    TaskDispatcher,
    TaskFunction,
    WorkerConnection,
)
from fray.runtime.tasks.task_run import TASK_LIMIT_BYTES
from fray.runtime.tasks.worker import TaskWorker

if TYPE_CHECKING:
    from fray.api.cluster import Cluster

TASKS_LIMIT = 1_000_000
"""Tasks one pool holds that have not ended."""
BYTES_LIMIT = 2 * 1024**3
"""Arguments one pool holds of them."""
LARGE_BYTES = 100_000
FUNCTIONS_KEPT = 1_000
EXPLAIN_S = 5.0
"""How long an error waits for the controller's word of what went wrong."""
LOOK_AGAIN_S = 5.0
"""After a worker that the registry still knows has failed to answer."""


class _Worker:
    """One worker: its job, and the lane to the incarnation that lives."""

    def __init__(self, job_id: JobId, record: JobRecord) -> None:
        self.job_id, self.record = job_id, record
        self.lane: WorkerConnection | None = None
        self.endpoint: ActorEndpoint | None = None
        """Of the incarnation that is registered."""

    @property
    def up(self) -> bool:
        return self.lane is not None and not self.lane.is_down

    def info(self, crew: TaskDispatcher) -> WorkerInfo:
        attempts = self.record.info.attempts
        last = attempts[-1] if attempts else None
        hand = crew.assignment.workers.get(self.job_id)
        held = hand.held if hand is not None else 0
        return WorkerInfo(
            job_id=self.job_id,
            node=last.node if last else "",
            pid=last.pid if last else None,
            busy=held > 0,
            running=held,
            done=crew.counts.by_worker.get(self.job_id, 0),
        )


class WorkerPool(TaskPool):
    """Workers for tasks that keep no state; use as ``async with WorkerPool(...) as pool``.

    Each worker runs one task at a time: a sync one on its thread, an async one in its loop. Leaving the ``async with``
    waits for all tasks and ends the workers; an error or a cancellation ends them at once.

    Args:
        cluster: where the workers run.
        num_workers: processes to launch, each a job named ``{name_prefix}-{token}-{index}``.
        resources: of each worker. Default 1 CPU and 2 GB.
        environment: packages, files, image and variables of the worker processes.
        name_prefix: default ``worker``.
        max_retries: how many times one task may be repeated because its worker died. Default 3.
        max_restarts: how many times each worker is started anew after a failure. Default 10.
        kill_after_s: how long a sync task that was cancelled, or overran its ``timeout_s``, may keep its worker; then
            the process is ended and started anew. Default: for ever, and the worker runs nothing else meanwhile.
        services: called once, when the workers are launched: services to attach to the runtimes of the workers.

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
        self._crew = TaskDispatcher(self._runtime.caller, name_prefix)
        self._slots: list[_Worker] = []
        self._functions: dict[tuple[bytes, bool], TaskFunction] = {}
        self._function_numbers = count(1)
        self._open = False
        self._window = PoolExport(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Where it arrives it is a `RemotePool`, whose tasks are queued here."""
        shelf = exports_of(self._runtime)
        number = shelf.export_object(self._window)
        return unpickle_pool, (shelf.actor_id, number, self._request.name, self.num_workers, self._options)

    # Life ------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> WorkerPool:
        self._manager = open_service_scope(self._runtime, f"pool {self._request.name}")
        self._children = await self._manager.__aenter__()
        try:
            self._open = True
            self._children.start_soon(self._crew.run)
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
                await self._drained()
        finally:
            self._close()
        return await self._manager.__aexit__(kind, error, traceback)

    async def shutdown(self, wait: bool = True) -> None:
        """Take no more tasks; with ``wait`` let those submitted finish, else fail them; end the workers."""
        if wait:
            await self._drained()
        self._close()
        self._children.end_actors()

    async def _launch(self, children: ChildScope) -> None:
        """All workers in one request, or none."""
        about = self._kill_after_s, self._services() if self._services is not None else None
        together = mint_name(self._request.name, self._runtime.rng)
        names = [f"{together}-{index}" for index in range(self.num_workers)]
        built = [
            build_actor_spec(evolve(self._request, name=name), self._runtime, TaskWorker, about, {}) for name in names
        ]
        for spec, _ in built:
            self._crew.assignment.expect_worker(spec.job_id)
        specs, payloads = [spec for spec, _ in built], [content for _, content in built]
        records = await children.launch(specs, payloads, ChildKind.ACTOR, OnChildFailure.ABSORB, error_of)
        for spec, record in zip(specs, records, strict=True):
            slot = _Worker(spec.job_id, record)
            self._slots.append(slot)
            children.start_soon(self._follow, slot)

    async def _drained(self) -> None:
        self._open = False
        while self._crew.unfinished:
            await self._crew.changed.wait()

    def _close(self) -> None:
        self._open = False
        self._crew.end(ChannelClosed("the worker pool was shut down before this task was done", reason="shutdown"))

    def start_soon(self, task: Callable[..., Any], *args: Any) -> None:
        """Run a task as long as the pool is open."""
        self._children.start_soon(task, *args)

    # Tasks -----------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidRequest("this WorkerPool takes no tasks: enter it with `async with`; submit before its end")

    def pickled(self, fn: Callable[..., Any]) -> TaskFunction:
        """The function as it is now, pickled; equal ones are sent to each worker once."""
        self._check_open()
        name, data, runs_async = close_function(fn)
        return self.known_function(name, data, runs_async)

    def known_function(self, name: str, data: bytes, runs_async: bool) -> TaskFunction:
        """A pickled function; the same for the same pickle."""
        key = (data, runs_async)
        function = self._functions.get(key)
        if function is None:
            self._check_size(len(data), f"the function of task {name!r}")
            if len(self._functions) >= FUNCTIONS_KEPT:
                self._functions.clear()
            function = self._functions[key] = TaskFunction(next(self._function_numbers), data, name, runs_async)
        return function

    def add(
        self, function: TaskFunction, args: tuple[Any, ...], kwargs: dict[str, Any], options: TaskOptions
    ) -> Future:
        return self.queue(function, pickling.dumps_call(function.name, args, kwargs), bool(kwargs), options)

    def queue(self, function: TaskFunction, content: bytes, has_kwargs: bool, options: TaskOptions) -> Future:
        """Queue one task whose arguments are pickled."""
        self._check_open()
        crew = self._crew
        size = len(content)
        if size > LARGE_BYTES:
            self._check_size(size, f"the arguments of task {function.name!r}")
        if len(function.data) > LARGE_BYTES:
            size += len(function.data)  # it may have to travel in the same message
        if crew.unfinished >= TASKS_LIMIT or crew.held_bytes > BYTES_LIMIT:
            raise ChannelFull(
                f"the pool holds {crew.unfinished} tasks with {crew.held_bytes} bytes of arguments: await some before "
                "submitting more, or use imap"
            )
        future = Future(function.what)
        task = Task(
            crew.next_number(),
            size,
            options.max_retries,
            function,
            content,
            has_kwargs,
            future,
            options.timeout_s,
            options.retry_exceptions,
        )
        future.on_cancel = partial(crew.cancel, task)
        crew.add(task)
        return future

    def _check_size(self, size: int, what: str) -> None:
        if size > TASK_LIMIT_BYTES:
            raise pickling.too_large(what, size, TASK_LIMIT_BYTES)

    # Workers ---------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Workers that take tasks now."""
        return sum(slot.up for slot in self._slots)

    @property
    def retried(self) -> int:
        """How many times a task was given to another worker because its own died."""
        return self._crew.counts.retried

    def workers(self) -> list[WorkerInfo]:
        """A snapshot of the workers."""
        return [slot.info(self._crew) for slot in self._slots]

    def stats(self) -> PoolStats:
        """What the pool has done so far."""
        counts, board = self._crew.counts, self._crew.assignment
        return PoolStats(
            queued=len(board),
            running=sum(hand.held for hand in board.workers.values()),
            done=counts.done,
            failed=counts.failed,
            cancelled=counts.cancelled,
            retried=counts.retried,
            workers=tuple(self.workers()),
        )

    async def wait_for_workers(self, min_workers: int | None = None, timeout: float = 60.0) -> None:
        """Wait until ``min_workers`` (default all) take tasks.

        Raises:
            DeadlineExceeded: not within ``timeout`` seconds; it says what the first one that is missing waits for.
            FrayError: no worker will ever come, and why.
        """
        wanted = self.num_workers if min_workers is None else min_workers
        with trio.move_on_after(timeout):
            while self.size < wanted and self._crew.error is None:
                await self._crew.changed.wait()
            if self._crew.error is not None:
                raise self._crew.error
            return
        raise DeadlineExceeded(f"{self.size} of {wanted} workers run after {timeout:g} s{await self._why_not_all()}")

    async def _why_not_all(self) -> str:
        """What the controller says of the first worker that is not there, for the end of an error."""
        missing = next((slot.job_id for slot in self._slots if not slot.up), None)
        if missing is None:
            return ""
        try:
            reply = await self._runtime.link.request(Explain(job=missing), timeout_s=EXPLAIN_S)
        except FrayError as error:
            return f"; why {missing} does not is not known: {error}"
        return f"\n{reply.text}"

    async def _follow(self, slot: _Worker) -> None:
        """Hold a lane to whichever incarnation of the worker is registered, until its job has ended for good."""

        def on_names(names: Names, blobs: Sequence[Any]) -> None:
            slot.endpoint = names.endpoints[-1] if names.endpoints else None
            self._move(slot)

        unwatch = self._runtime.link.names.watch(f"actor:{slot.job_id}", on_names)
        try:
            await slot.record.ended.wait()
        finally:
            unwatch()
        slot.endpoint = None
        if slot.lane is not None:
            await self._crew.drain_lost_worker(slot.lane)
        self._crew.worker_gone(slot.job_id, error_of(slot.record))

    def _move(self, slot: _Worker) -> None:
        lane, endpoint = slot.lane, slot.endpoint
        if lane is not None and not lane.is_down and lane.endpoint == endpoint:
            return
        if lane is not None and not lane.is_closed:
            self._children.start_soon(self._crew.drain_lost_worker, lane)
        slot.lane = None
        if endpoint is not None:
            slot.lane = self._crew.join(slot.job_id, endpoint)
            self._children.start_soon(self._look_again, slot, slot.lane)

    async def _look_again(self, slot: _Worker, lane: WorkerConnection) -> None:
        """A worker that is registered and did not answer may answer again."""
        await lane.ended.wait()
        await trio.sleep(LOOK_AGAIN_S)
        if slot.lane is lane and slot.endpoint == lane.endpoint:
            self._move(slot)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<WorkerPool {self._request.name!r}: {self.size} workers, {stats.queued} queued, {stats.running} running>"
        )
