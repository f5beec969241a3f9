"""WorkerPool: stateless workers that run any callable, each task on whichever worker is free.

The law: a task is queued, then on one worker, then done. A task whose worker died goes back to the front of the queue
and to another worker, at most ``max_retries`` times; a task that raised is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import trio
from attrs import define, field, frozen

from fray.actors import ActorHandle
from fray.errors import ActorDied, ChannelClosed, DeadlineExceeded, FrayError, InvalidRequest
from fray.futures import Future
from fray.jobs import build_actor_spec, error_of
from fray.model.ids import JobId, check_name, mint
from fray.model.resources import ResourceConfig
from fray.model.specs import EnvironmentConfig, JobRequest, JobState
from fray.runtime import payload
from fray.runtime.attempt import is_async
from fray.runtime.context import Runtime
from fray.runtime.family import Kind, Supervision
from fray.runtime.links import JobRecord
from fray.runtime.scope import ChildScope, open_service_scope

if TYPE_CHECKING:
    from fray.cluster import Cluster

IN_FLIGHT_PER_WORKER = 2
"""One task runs while the next is already there, so that no worker waits for the wire."""


class _Worker:
    """The actor in each worker process. One task at a time: the next is only already there."""

    def __init__(self) -> None:
        self._turn = trio.Lock()

    async def run(self, task: bytes) -> bytes:
        """Open and run one task; the result travels closed, so that only the submitter opens it."""
        async with self._turn:
            return await self._run(task)

    async def _run(self, task: bytes) -> bytes:
        fn, args, kwargs = payload.loads(task)
        if is_async(fn):
            value = await fn(*args, **kwargs)
        else:
            value = await trio.to_thread.run_sync(lambda: fn(*args, **kwargs), abandon_on_cancel=True)
        return payload.dumps(value, f"the result of {getattr(fn, '__name__', fn)!r}")


@define(eq=False)
class _Task:
    content: bytes
    future: Future
    retries_left: int
    excluded: set[JobId] = field(factory=set)


@frozen
class WorkerInfo:
    """One worker process, as `WorkerPool.workers` shows it."""

    job_id: JobId
    node: str
    pid: int | None
    busy: bool
    running: int
    """Tasks it has been given and not answered."""
    done: int


class _Slot:
    """One worker: its job, its handle, and what it has to do."""

    def __init__(self, record: JobRecord, handle: ActorHandle) -> None:
        self.record, self.handle = record, handle
        self.running: list[_Task] = []
        self.done = 0
        self._dead = ""
        """The attempt on which a call died: the controller may still call it running."""

    @property
    def job_id(self) -> JobId:
        return self.record.info.job_id

    @property
    def attempt(self) -> str:
        attempts = self.record.info.attempts
        return attempts[-1].attempt_id if attempts else ""

    @property
    def up(self) -> bool:
        return self.record.info.state is JobState.RUNNING and self.attempt != self._dead

    def died(self, attempt: str) -> None:
        self._dead = attempt

    def info(self) -> WorkerInfo:
        attempts = self.record.info.attempts
        last = attempts[-1] if attempts else None
        return WorkerInfo(
            job_id=self.job_id,
            node=last.node if last else "",
            pid=last.pid if last else None,
            busy=bool(self.running),
            running=len(self.running),
            done=self.done,
        )


class WorkerPool:
    """Workers for tasks that keep no state; use as ``async with WorkerPool(...) as pool``.

    Args:
        cluster: where the workers run.
        num_workers: processes to launch, each a job named ``{name_prefix}-{token}-{index}``.
        resources: of each worker. Default 1 CPU and 2 GB.
        environment: variables of the worker processes.
        name_prefix: default ``worker``.
        max_retries: how many times one task may be repeated because its worker died. Default 3.
        max_restarts: how many times each worker is started anew after a failure. Default 10.

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
    ) -> None:
        if not isinstance(num_workers, int) or num_workers < 1:
            raise InvalidRequest(f"num_workers={num_workers!r} must be a whole number, 1 or more")
        check_name(name_prefix, "a worker")
        self._runtime: Runtime = cluster._runtime
        self._num_workers = num_workers
        self._request = JobRequest(
            name=name_prefix,
            resources=resources or ResourceConfig(),
            environment=environment,
            max_retries_failure=max_restarts,
        )
        self._max_retries = max_retries
        self._queue: deque[_Task] = deque()
        self._slots: list[_Slot] = []
        self._wake = trio.Event()
        self._open = False
        self._unfinished = 0
        self._retried = 0

    # Life ------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> WorkerPool:
        self._manager = open_service_scope(self._runtime, f"pool {self._request.name}")
        self._children = await self._manager.__aenter__()
        try:
            self._open = True
            await self._launch(self._children)
        except BaseException as error:
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
        token = mint(self._runtime.rng, 6)
        for index in range(self._num_workers):
            request = JobRequest(
                name=f"{self._request.name}-{token}-{index}",
                resources=self._request.resources,
                environment=self._request.environment,
                max_retries_failure=self._request.max_retries_failure,
            )
            spec, content = build_actor_spec(request, self._runtime, _Worker, (), {})
            (record,) = await children.launch([spec], [content], Kind.ACTOR, Supervision.ABSORB, error_of)
            slot = _Slot(record, ActorHandle(spec.job_id, request.name, None, self._runtime))
            self._slots.append(slot)
            for _ in range(IN_FLIGHT_PER_WORKER):
                children.start_soon(self._serve, slot)
            children.start_soon(self._mourn, slot)

    async def _drained(self) -> None:
        self._open = False
        while self._unfinished:
            await self._event()

    def _close(self) -> None:
        self._open = False
        for task in self._queue:
            task.future.fail(ChannelClosed("the worker pool was shut down before this task ran", reason="shutdown"))
        self._queue.clear()
        self._notify()

    # Tasks -----------------------------------------------------------------------------------------------------------

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Queue ``fn(*args, **kwargs)`` (sync, or async) and return a future at once; ``await`` it for the result.

        Raises:
            InvalidRequest: the pool is not open (not entered, or shut down), or ``fn`` is not callable.
            NotPicklable, MessageTooLarge: it cannot travel.
        """
        if not self._open:
            raise InvalidRequest("this WorkerPool takes no tasks: enter it with `async with`; submit before its end")
        if not callable(fn):
            raise InvalidRequest(f"submit needs a callable, not {fn!r}")
        content = payload.dumps((fn, args, kwargs), f"task {getattr(fn, '__name__', fn)!r}")
        future = Future(f"task {getattr(fn, '__name__', fn)!r}")
        self._queue.append(_Task(content, future, self._max_retries))
        self._unfinished += 1
        future.add_done_callback(self._finished)
        self._notify()
        return future

    def map(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> list[Future]:
        """`submit` for each item; futures in the order of the items."""
        return [self.submit(fn, item) for item in items]

    def _finished(self, future: Future) -> None:
        self._unfinished -= 1
        self._notify()

    # Workers ---------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Workers running now."""
        return sum(slot.up for slot in self._slots)

    @property
    def retried(self) -> int:
        """How many times a task was given to another worker because its own died."""
        return self._retried

    def workers(self) -> list[WorkerInfo]:
        """A snapshot of the workers."""
        return [slot.info() for slot in self._slots]

    async def wait_for_workers(self, min_workers: int | None = None, timeout: float = 60.0) -> None:
        """Wait until ``min_workers`` (default all) run.

        Raises:
            DeadlineExceeded: not within ``timeout`` seconds.
        """
        wanted = self._num_workers if min_workers is None else min_workers
        with trio.move_on_after(timeout):
            while self.size < wanted:
                await self._any_change()
            return
        raise DeadlineExceeded(f"{self.size} of {wanted} workers run after {timeout:g} s")

    async def _any_change(self) -> None:
        async def one(event: trio.Event, done: trio.CancelScope) -> None:
            await event.wait()
            done.cancel()

        async with trio.open_nursery() as nursery:
            for slot in self._slots:
                nursery.start_soon(one, slot.record.changed, nursery.cancel_scope)

    def _notify(self) -> None:
        self._wake.set()
        self._wake = trio.Event()

    async def _event(self) -> None:
        await self._wake.wait()

    async def _serve(self, slot: _Slot) -> None:
        """Take task after task to one worker, until its job has ended for good."""
        while not slot.record.ended.is_set():
            if not slot.up:
                await slot.record.changed.wait()
                continue
            task = self._take(slot)
            if task is None:
                await self._event()
                continue
            slot.running.append(task)
            try:
                await self._do(slot, task)
            finally:
                slot.running.remove(task)
                slot.done += 1

    def _take(self, slot: _Slot) -> _Task | None:
        """The first task this worker may have: not one whose worker it was when it died, unless no other is left.

        A busy worker gets its next task early only while there is enough for everybody.
        """
        if slot.running and len(self._queue) <= len(self._slots):
            return None
        others = [other for other in self._slots if other is not slot and not other.record.ended.is_set()]
        for index, task in enumerate(self._queue):
            if slot.job_id not in task.excluded or not others:
                del self._queue[index]
                return task
        return None

    async def _do(self, slot: _Slot, task: _Task) -> None:
        attempt = slot.attempt
        try:
            answer = await slot.handle.run(task.content)
        except ActorDied as death:
            slot.died(attempt)
            self._again(slot, task, death)
        except trio.Cancelled:
            task.future.fail(ChannelClosed("the worker pool was ended before this task was done", reason="shutdown"))
            raise
        except Exception as error:  # noqa: BLE001  # what the task raised belongs to its future
            task.future.fail(error)
        else:
            task.future.resolve(lambda: payload.loads(answer))

    def _again(self, slot: _Slot, task: _Task, death: FrayError) -> None:
        if task.retries_left == 0:
            task.future.fail(death)
            return
        task.retries_left -= 1
        task.excluded.add(slot.job_id)
        self._retried += 1
        self._queue.appendleft(task)
        self._notify()

    async def _mourn(self, slot: _Slot) -> None:
        """When the last worker is gone for good, no task may wait for ever."""
        await slot.record.ended.wait()
        self._notify()
        if all(other.record.ended.is_set() for other in self._slots):
            reason = error_of(slot.record)
            while self._queue:
                self._queue.popleft().future.fail(reason)
