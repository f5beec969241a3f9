"""Actor that lives in the loop: an object of a class with any async method.

Its sync methods run inline if no call is queued before them. Async methods are run by workers: tasks that take the next
call when they get their turn. It does not matter which worker takes it, because Trio runs its tasks in any order; so
calls start in the order they arrived. Each `ConcurrencyGroup` has its own queue and workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import aclosing, closing
from contextvars import Context
from types import CoroutineType, coroutine
from typing import Any

import trio

from fray.errors import FrayError
from fray.model.monitoring.served_calls import ActorMetrics
from fray.runtime.actors.incoming_call import IncomingCall, OutputStream
from fray.runtime.actors.methods import NO_GROUP, Style
from fray.runtime.actors.served_actor import ServedActor
from fray.runtime.calls.dedup import CANCELLED_ANSWER
from fray.runtime.cancellation import split_cancelled

# Enough to run a burst without starting tasks; after a peak of thousands the rest ends.
IDLE_WORKERS_LIMIT = 64
"""Workers of one group that may wait for more work."""
# A batch of frames may hold hundreds of sync calls, which would all run before any other task.
SLICE_S = 0.002
"""Time that sync methods, and async ones that never wait, may hold the loop before other tasks get a turn."""
NO_LIMIT = 1 << 30


class ConcurrencyGroup:
    """Calls that share one limit: at most ``limit`` of them are under way."""

    __slots__ = ("idle_workers", "limit", "queue", "running", "worker_pending")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.queue: deque[IncomingCall] = deque()
        self.worker_pending = False
        """A worker was woken or started that will take from the queue."""
        self.idle_workers: list[trio.lowlevel.Task] = []
        """Workers without work: waking one is cheaper than starting one."""


class AsyncActor(ServedActor):
    """Actor of a class with any async method.

    Args:
        max_concurrency: limit of the calls of no group. Default: no limit.
        groups: limits of the concurrency groups, by name.
    """

    def __init__(
        self,
        instance: Any,
        name: str,
        actor_id: str,
        number: int,
        *,
        max_concurrency: int | None = None,
        groups: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(instance, name, actor_id, number, **options)
        limits = {NO_GROUP: max_concurrency or NO_LIMIT, **(groups or {})}
        self._groups = {group: ConcurrencyGroup(limit) for group, limit in limits.items()}
        self._slice_ends: float | None = None

    def _group_of(self, call: IncomingCall) -> ConcurrencyGroup:
        assert call.spec is not None
        return self._groups[call.spec.group]

    def _start(self, call: IncomingCall) -> None:
        spec = call.spec
        assert spec is not None
        group = self._groups[spec.group]
        # Inline calls cost no task switch. A queued call must not be overtaken, and a sync call counts against the
        # limit as long as it runs.
        is_inline = spec.style is Style.SYNC and not group.queue and group.running < group.limit
        if is_inline and self._has_slice_left(call.arrived_at):
            self.context.copy().run(self._run_sync, call)
        else:
            group.queue.append(call)
            self._wake_worker(group)
            # Only a full group can be waited for in a cycle.
            if call.links and group.running >= group.limit:
                self.watch_for_cycle(call)

    @property
    def is_busy(self) -> bool:
        return bool(self.active_calls or any(group.queue for group in self._groups.values()))

    def flush(self) -> None:
        # The next batch begins a new slice, after other tasks had their turn.
        self._slice_ends = None

    def _has_slice_left(self, now: float) -> bool:
        if self._slice_ends is None:
            self._slice_ends = now + SLICE_S
        return now < self._slice_ends

    def cancel(self, call: IncomingCall) -> None:
        call.cancelled = True
        # Between the two states, on its way to a worker, the flag alone is enough: `_await_and_answer` looks at it.
        if call.scope is not None:
            call.scope.cancel()
        elif call.spec is not None and call in (group := self._group_of(call)).queue:
            group.queue.remove(call)
            self.answer_cancelled(call)

    def group_calls(self, call: IncomingCall) -> tuple[list[IncomingCall], list[IncomingCall], int]:
        group = self._group_of(call)
        return [each for each in self.active_calls if self._group_of(each) is group], list(group.queue), group.limit

    def fail_queued(self, call: IncomingCall, error: FrayError) -> None:
        self._group_of(call).queue.remove(call)
        self.reject(call, error)

    def take_queued(self) -> list[IncomingCall]:
        queued = [call for group in self._groups.values() for call in group.queue]
        for group in self._groups.values():
            group.queue.clear()
        return queued

    def close(self, error: FrayError) -> None:
        super().close(error)
        for group in self._groups.values():
            # Swapped first, as the workers that are woken below look at it.
            queued, group.queue = group.queue, deque()
            for call in queued:
                call.refuse(error)
            idle, group.idle_workers = group.idle_workers, []
            for task in idle:
                trio.lowlevel.reschedule(task)

    def metrics(self) -> ActorMetrics:
        queued = sum(len(group.queue) for group in self._groups.values())
        return self.counters.snapshot(running=len(self.active_calls), queued=queued)

    # Workers ---------------------------------------------------------------------------------------------------------

    def _wake_worker(self, group: ConcurrencyGroup) -> None:
        # One pending worker is enough for any number of queued calls: before it awaits, it wakes the next one.
        if not group.worker_pending and group.running < group.limit:
            group.worker_pending = True
            if group.idle_workers:
                trio.lowlevel.reschedule(group.idle_workers.pop())
            else:
                # The new task inherits the context variables that the constructor has left.
                self.context.run(self._spawn, lambda: self._run_worker(group))

    async def _run_worker(self, group: ConcurrencyGroup) -> None:
        """Run calls and wait for more, until the actor is closed or enough other workers are idle."""
        while True:
            group.worker_pending = False
            await self._run_queued(group)
            if self._closed is not None or len(group.idle_workers) >= IDLE_WORKERS_LIMIT:
                return
            await self._wait_for_work(group)
            if self._closed is not None:
                return

    async def _wait_for_work(self, group: ConcurrencyGroup) -> None:
        task = trio.lowlevel.current_task()
        group.idle_workers.append(task)

        def abort(_: Any) -> trio.lowlevel.Abort:
            group.idle_workers.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _run_queued(self, group: ConcurrencyGroup) -> None:
        """Run calls until the queue is empty. Before a call that may wait, make sure another worker takes the next."""
        # Calls that never await would otherwise keep this worker running until the queue is empty.
        turn_ends = self._clock() + SLICE_S
        while group.queue and group.running < group.limit:
            call = group.queue.popleft()
            assert call.spec is not None
            if call.spec.style is Style.SYNC:
                self.context.copy().run(self._run_sync, call)
            else:
                await self._run_async(group, call)
            if self._clock() >= turn_ends:
                await trio.lowlevel.checkpoint()
                turn_ends = self._clock() + SLICE_S

    def _run_sync(self, call: IncomingCall) -> None:
        if self.reject_if_late(call):
            return
        try:
            value = [call.invoke()]
            # Its style says sync, as `inspect` does not see through a decorator; the result shows that it is not.
            if type(value[0]) is CoroutineType:
                self._run_coroutine(call, value[0])
                return
            answer = call.result_answer(value.pop())  # the popped value is released once it has been pickled
        except BaseException as error:  # noqa: BLE001 - it is the caller's answer
            answer = call.error_answer(error)
        self.on_call_ended(call, answer)
        # Ctrl-C concerns the whole process. The call that it interrupted by chance has been answered.
        if call.fatal is not None and _is_from_signal(call.fatal):
            raise call.fatal

    def _run_coroutine(self, call: IncomingCall, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Await what a plain function has returned: a decorated async method is one that returns a coroutine."""
        self._begin(call)

        def enter() -> Coroutine[Any, Any, Any]:
            call.enter()  # in the context in which it is awaited, which is another one
            return coroutine

        self._spawn(lambda: self._await_and_answer(call, enter))

    def _begin(self, call: IncomingCall) -> None:
        self._group_of(call).running += 1
        self.active_calls[call] = None

    async def _run_async(self, group: ConcurrencyGroup, call: IncomingCall) -> None:
        if call.deadline is not None and self.reject_if_late(call):
            return
        self._begin(call)
        # Before it awaits: from here on another worker must take the next call.
        if group.queue:
            self._wake_worker(group)
        assert call.spec is not None
        stream = call.stream
        if stream is None or not call.spec.is_generator:
            await self._await_and_answer(call, call.invoke)
        else:
            await self._await_and_answer(call, lambda: _send_items(stream, call.invoke()))

    async def _await_and_answer(self, call: IncomingCall, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Await the coroutine that ``make`` returns, within the call's deadline and cancellation, and answer."""
        answer = CANCELLED_ANSWER
        group = self._group_of(call)
        context = self.context.copy()
        # The deadline is kept here as well as by the caller, since the caller may be out of reach.
        call.scope = scope = trio.CancelScope() if call.deadline is None else trio.CancelScope(deadline=call.deadline)
        # Cancelled after it was taken from the queue and before it had a scope.
        if call.cancelled:
            scope.cancel()
        try:
            with scope:
                answer = call.result_answer(await in_context(context.run(make), context))
            # Not by its caller, so by the deadline of the scope.
            if scope.cancelled_caught and not call.cancelled:
                answer = call.error_answer(call.deadline_error())
        except BaseException as error:
            cancelled, rest = split_cancelled(error)
            # Cancelled from outside of the call's own scope: the host shuts down. The caller is answered before the
            # task ends.
            answer = call.interrupted_answer(self._shut_down_error(call)) if rest is None else call.error_answer(rest)
            if cancelled is not None:
                raise cancelled from None
            if _is_from_signal(error):
                raise
        finally:
            # Before the answer, which may run code that submits the next call.
            group.running -= 1
            self.on_call_ended(call, answer)
            if group.queue:
                self._wake_worker(group)


@coroutine
def in_context(work: Coroutine[Any, Any, Any], context: Context) -> Generator[Any, Any, Any]:
    """Await ``work`` in ``context``, in this task; return and raise what it does.

    Each call sees a copy of the context variables that the actor's constructor left, and what it sets is seen by no
    other call. A worker runs several calls without a checkpoint between them, so Trio cannot give each its context.
    Instead, the first step of a call is run in its context explicitly; from then on its task is in that context, until
    another call has its first step there. A coroutine that ends at once costs no more than one `Context.run`. The
    task's own context is not restored: workers have no use for it.
    """
    try:
        message = context.run(work.send, None)
        trio.lowlevel.current_task().context = context
        while True:
            try:
                got = yield message
            except BaseException as error:  # noqa: BLE001 - what is thrown in here is passed to where the work waits
                message = work.throw(error)
            else:
                message = work.send(got)
    except StopIteration as end:
        return end.value


async def _send_items(stream: OutputStream, source: Any) -> Any:
    """Send the items of a generator of either kind and close it whatever happens. Return what a sync one returns."""
    if isinstance(source, AsyncGenerator):
        async with aclosing(source):
            async for item in source:
                await stream.put(item)
    else:
        with closing(source):
            while True:
                try:
                    item = next(source)
                except StopIteration as end:
                    return end.value
                await stream.put(item)
    return None


def _is_from_signal(error: BaseException) -> bool:
    """Return whether Trio's signal handler raised it (Ctrl-C), and not a ``raise KeyboardInterrupt`` of user code."""
    # The frame that raised is decisive: Trio's handler raises in its own module, user code in another.
    trace = error.__traceback__ if isinstance(error, KeyboardInterrupt) else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("trio.")
