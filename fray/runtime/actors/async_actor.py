"""An object that lives in the loop: of a class with any async method.

Its sync methods run inline where nobody waits before them. Async methods are run by workers: tasks that take the next
call when they get their turn, whichever worker that is, because Trio runs its tasks in any order; so calls start in
the order they came. Each concurrency group has a queue and workers of its own: a `Lane`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from types import CoroutineType
from typing import Any

import trio

from fray.errors import FrayError
from fray.model.messages.calls import ActorMetrics
from fray.runtime.actors.call_context import in_context
from fray.runtime.actors.hosted_actor import HostedActor
from fray.runtime.actors.incoming_call import IncomingCall
from fray.runtime.actors.methods import NO_GROUP, Style
from fray.runtime.calls.wire import CANCELLED_ANSWER

RESTING_LIMIT = 64
"""Workers of one lane that may wait for more work."""
SLICE_S = 0.002
"""How long sync methods and async ones that never wait may hold the loop before others get a turn."""
ANY_NUMBER = 1 << 30


class ConcurrencyGroup:
    """One concurrency group: at most ``limit`` of its calls are under way."""

    __slots__ = ("limit", "queue", "resting", "running", "spare")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.queue: deque[IncomingCall] = deque()
        self.spare = False
        """A worker is on its way that will take from the queue."""
        self.resting: list[trio.lowlevel.Task] = []
        """Workers without work: waking one is cheaper than starting one."""


class AsyncActor(HostedActor):
    """``max_concurrency``: default any number."""

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
        limits = {NO_GROUP: max_concurrency or ANY_NUMBER, **(groups or {})}
        self._lanes = {group: ConcurrencyGroup(limit) for group, limit in limits.items()}
        self._slice_ends: float | None = None

    def _start(self, call: IncomingCall) -> None:
        spec = call.spec
        assert spec is not None
        call.lane = lane = self._lanes[spec.group]
        if spec.style is Style.SYNC and not lane.queue and lane.running < lane.limit and self._has_time(call.arrived_at):
            self.context.copy().run(self._run_sync, call)
        else:
            lane.queue.append(call)
            self._call_worker(lane)
            if call.links and lane.running >= lane.limit:
                self.watch_for_cycle(call)

    @property
    def is_busy(self) -> bool:
        return bool(self.active_calls or any(lane.queue for lane in self._lanes.values()))

    def flush(self) -> None:
        self._slice_ends = None

    def _has_time(self, now: float) -> bool:
        if self._slice_ends is None:
            self._slice_ends = now + SLICE_S
        return now < self._slice_ends

    def cancel(self, call: IncomingCall) -> None:
        call.cancelled = True
        if call.scope is not None:
            call.scope.cancel()
        elif call.lane is not None and call in call.lane.queue:
            call.lane.queue.remove(call)
            self.answer_cancelled(call)

    def group_calls(self, call: IncomingCall) -> tuple[list[IncomingCall], list[IncomingCall], int]:
        lane = call.lane
        assert lane is not None
        return [each for each in self.active_calls if each.lane is lane], list(lane.queue), lane.limit

    def fail_queued(self, call: IncomingCall, error: FrayError) -> None:
        assert call.lane is not None
        call.lane.queue.remove(call)
        self.reject(call, error)

    def take_queued(self) -> list[IncomingCall]:
        unbegun = [call for lane in self._lanes.values() for call in lane.queue]
        for lane in self._lanes.values():
            lane.queue.clear()
        return unbegun

    def close(self, error: FrayError) -> None:
        super().close(error)
        for lane in self._lanes.values():
            waiting, lane.queue = lane.queue, deque()
            for call in waiting:
                call.refuse(error)
            resting, lane.resting = lane.resting, []
            for task in resting:
                trio.lowlevel.reschedule(task)

    def metrics(self) -> ActorMetrics:
        queued = sum(len(lane.queue) for lane in self._lanes.values())
        return self.counters.snapshot(running=len(self.active_calls), queued=queued)

    # Workers ---------------------------------------------------------------------------------------------------------

    def _call_worker(self, lane: ConcurrencyGroup) -> None:
        if not lane.spare and lane.running < lane.limit:
            lane.spare = True
            if lane.resting:
                trio.lowlevel.reschedule(lane.resting.pop())
            else:
                self.context.run(self._spawn, lambda: self._work(lane))

    async def _work(self, lane: ConcurrencyGroup) -> None:
        """A worker: take calls, rest, take calls, until the actor is closed or enough others rest."""
        while True:
            lane.spare = False
            await self._take_calls(lane)
            if self._closed is not None or len(lane.resting) >= RESTING_LIMIT:
                return
            await self._rest(lane)
            if self._closed is not None:
                return

    async def _rest(self, lane: ConcurrencyGroup) -> None:
        task = trio.lowlevel.current_task()
        lane.resting.append(task)

        def abort(_: Any) -> trio.lowlevel.Abort:
            if task in lane.resting:
                lane.resting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _take_calls(self, lane: ConcurrencyGroup) -> None:
        """Take calls until none is left. Before a call that may wait, see that somebody else will take the next."""
        turn_ends = self._clock() + SLICE_S
        while lane.queue and lane.running < lane.limit:
            call = lane.queue.popleft()
            assert call.spec is not None
            if call.spec.style is Style.SYNC:
                self.context.copy().run(self._run_sync, call)
            else:
                await self._run_async(lane, call)
            if self._clock() >= turn_ends:
                await trio.lowlevel.checkpoint()
                turn_ends = self._clock() + SLICE_S

    def _run_sync(self, call: IncomingCall) -> None:
        if self.reject_if_late(call):
            return
        try:
            value = [call.invoke()]
            if type(value[0]) is CoroutineType:
                self._run_coroutine(call, value[0])
                return
            answer = call.result_answer(value.pop())  # which lets go of it when it has been pickled
        except BaseException as error:  # noqa: BLE001 - it is the caller's answer
            answer = call.error_answer(error)
        self.on_call_ended(call, answer)
        if call.fatal is not None and _is_from_signal(call.fatal):
            raise call.fatal

    def _run_coroutine(self, call: IncomingCall, coroutine: Coroutine[Any, Any, Any]) -> None:
        """A plain function that returns a coroutine (a decorated async method): await it."""
        self._begin(call)
        self._spawn(lambda: self._attend(call, lambda: coroutine))

    def _begin(self, call: IncomingCall) -> None:
        assert call.lane is not None
        call.lane.running += 1
        self.active_calls[call] = None

    async def _run_async(self, lane: ConcurrencyGroup, call: IncomingCall) -> None:
        if self.reject_if_late(call):
            return
        self._begin(call)
        if lane.queue:
            self._call_worker(lane)
        assert call.spec is not None
        stream = call.stream
        if stream is None or not call.spec.is_generator:
            await self._attend(call, call.invoke)
        else:
            await self._attend(call, lambda: stream.run_in_loop(call.invoke()))

    async def _attend(self, call: IncomingCall, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Await what ``make`` makes, within the call's deadline and cancellation, and answer."""
        answer = CANCELLED_ANSWER
        context = self.context.copy()
        call.scope = scope = trio.CancelScope() if call.deadline is None else trio.CancelScope(deadline=call.deadline)
        if call.cancelled:
            scope.cancel()
        try:
            with scope:
                answer = call.result_answer(await in_context(context.run(make), context))
            if scope.cancelled_caught and not call.cancelled:
                answer = call.error_answer(call.deadline_error())
        except trio.Cancelled:
            answer = call.error_answer(self._shut_down(call))
            raise
        except BaseException as error:
            answer = call.error_answer(error)
            if _must_go_up(error):
                raise
        finally:
            lane = call.lane
            assert lane is not None
            lane.running -= 1
            self.on_call_ended(call, answer)
            if lane.queue:
                self._call_worker(lane)


def _must_go_up(error: BaseException) -> bool:
    """Whether it is Trio's business too: a cancellation from outside, or Ctrl-C."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(trio.Cancelled) is not None
    return _is_from_signal(error)


def _is_from_signal(error: BaseException) -> bool:
    """Ctrl-C, raised in user code by Trio's signal handler; a ``raise KeyboardInterrupt`` of user code is not."""
    trace = error.__traceback__ if isinstance(error, KeyboardInterrupt) else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("trio.")
