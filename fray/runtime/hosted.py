"""One object that others may call: its calls, first in, first started.

An object of a class with any async method lives in the loop. Its sync methods run there too, inline where nobody waits
before them. Async methods are run by workers: tasks that take the next call when they get their turn, whichever
worker that is, because Trio runs its tasks in any order; so calls start in the order they came. An object of an
all-sync class lives on a thread (`fray.runtime.executor`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from types import CoroutineType
from typing import Any

import trio

from fray.errors import ActorDied, FrayError, InvalidRequest, NoSuchActor
from fray.runtime.calls import CANCELLED_ANSWER, STREAM, Answer
from fray.runtime.current import current_actor_var
from fray.runtime.executor import Runner
from fray.runtime.host_call import HostCall
from fray.runtime.host_stream import HostStream, ThreadStream
from fray.runtime.life import Ending, Life
from fray.runtime.methods import Method, Style, find_method

RESTING_LIMIT = 64
"""Workers of one actor that may wait for more work."""
SLICE_S = 0.002
"""How long sync methods and async ones that never wait may hold the loop before others get a turn."""


class Hosted:
    """What both kinds have in common."""

    def __init__(self, instance: Any, name: str, actor_id: str, number: int) -> None:
        self.instance = instance
        self.name = name
        self.actor_id = actor_id
        self.number = number
        self.life: Life | None = None
        """Set by the host."""
        self.touched_s: float | None = None
        """When a call last came or ended, on Trio's clock; kept up to date only if it is not None."""
        self.make_context: Callable[[HostCall], Any] = lambda call: call
        self.under_way: dict[HostCall, None] = {}
        """Started, or handed to the thread, and not ended."""
        self._methods: dict[str, Method] = {}
        self._idle: trio.Event | None = None
        self._closed: FrayError | None = None

    def __repr__(self) -> str:
        return f"<hosted {self.name} ({self.actor_id}): {len(self.under_way)} calls under way>"

    def take(self, call: HostCall) -> None:
        """A call has come: start it in its turn."""
        call.actor = self
        if self.touched_s is not None:
            self.touched_s = trio.current_time()
        if self._closed is not None:
            call.refuse(self._closed)
            return
        spec = self._methods.get(call.method)
        if spec is None:
            try:
                spec = self._methods[call.method] = find_method(self.instance, call.method)
            except Exception as error:  # noqa: BLE001 - a user's __getattr__ raises anything
                call.finish(call.raised(error))
                return
        call.spec = spec
        if spec.streams != bool(call.flags & STREAM):
            how = "a generator: iterate over its stream()" if spec.streams else "no generator: await it"
            call.finish(call.raised(InvalidRequest(f"{self.name}.{call.method}() is {how}")))
            return
        if spec.streams:
            call.stream = HostStream(call)
        self._start(call)

    def _start(self, call: HostCall) -> None:
        raise NotImplementedError

    def cancel(self, call: HostCall) -> None:
        """The caller no longer waits."""
        raise NotImplementedError

    def flush(self) -> None:
        """A burst of calls is complete."""

    def ended(self, call: HostCall, answer: Answer) -> None:
        """A call has ended."""
        self.under_way.pop(call, None)
        call.finish(answer)
        if self.touched_s is not None:
            self.touched_s = trio.current_time()
        if call.fatal is not None and self.life is not None:
            self.life.ask(ending_of(call.fatal))
        if self._idle is not None and not self.is_busy:
            self._idle.set()
            self._idle = None

    def close(self, error: FrayError) -> None:
        """Take no more calls; those that have not begun are refused with ``error``. What is under way goes on."""
        self._closed = self._closed or error

    @property
    def is_busy(self) -> bool:
        """A call runs or waits for its turn."""
        return bool(self.under_way)

    async def wait_idle(self) -> None:
        """After `close`: until nothing is under way."""
        while self.is_busy:
            self._idle = self._idle or trio.Event()
            await self._idle.wait()

    async def drain(self, grace_s: float) -> None:
        """After `close`: let what is under way end for ``grace_s``, then cancel it and answer `ActorDied`."""
        with trio.move_on_after(grace_s):
            await self.wait_idle()
        self.end_calls(None)

    def end_calls(self, error: BaseException | None) -> None:
        """Cancel what is under way and answer it with ``error``, or (None) `ActorDied`."""
        for call in list(self.under_way):
            call.finish(call.raised(error or self._shut_down(call)))
            self.cancel(call)

    def _shut_down(self, call: HostCall) -> ActorDied:
        return ActorDied(f"actor {self.name} was shut down while {call.method}() was under way", actor=self.name)


class LoopActor(Hosted):
    """An object that lives in the loop. ``spawn`` starts a task in the host's nursery."""

    def __init__(
        self,
        instance: Any,
        name: str,
        actor_id: str,
        number: int,
        *,
        spawn: Callable[[Callable[[], Any]], None],
        max_concurrency: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(instance, name, actor_id, number)
        self._spawn = spawn
        self._limit = max_concurrency or 1 << 30
        self._clock = clock
        self._queue: deque[HostCall] = deque()
        self._spare = False
        """A worker is on its way that will take from the queue."""
        self._resting: list[trio.lowlevel.Task] = []
        """Workers without work: waking one is cheaper than starting one."""
        self._context = copy_context()
        self._slice_ends: float | None = None

    def _start(self, call: HostCall) -> None:
        assert call.spec is not None
        if call.spec.style is Style.SYNC and not self._queue and len(self.under_way) < self._limit and self._has_time():
            self._context.run(self._run_sync, call)
        else:
            self._queue.append(call)
            self._call_worker()

    @property
    def is_busy(self) -> bool:
        return bool(self.under_way or self._queue)

    def flush(self) -> None:
        self._slice_ends = None

    def _has_time(self) -> bool:
        now = self._clock()
        if self._slice_ends is None:
            self._slice_ends = now + SLICE_S
        return now < self._slice_ends

    def cancel(self, call: HostCall) -> None:
        call.cancelled = True
        if call.scope is not None:
            call.scope.cancel()
        elif call in self._queue:
            self._queue.remove(call)
            call.finish(CANCELLED_ANSWER)

    def close(self, error: FrayError) -> None:
        super().close(error)
        waiting, self._queue = self._queue, deque()
        for call in waiting:
            call.refuse(error)
        resting, self._resting = self._resting, []
        for task in resting:
            trio.lowlevel.reschedule(task)

    # Workers ---------------------------------------------------------------------------------------------------------

    def _call_worker(self) -> None:
        if not self._spare and len(self.under_way) < self._limit:
            self._spare = True
            if self._resting:
                trio.lowlevel.reschedule(self._resting.pop())
            else:
                self._context.run(self._spawn, self._work)

    async def _work(self) -> None:
        """A worker: take calls, rest, take calls, until the actor is closed or enough others rest."""
        while True:
            self._spare = False
            await self._take_calls()
            if self._closed is not None or len(self._resting) >= RESTING_LIMIT:
                return
            await self._rest()
            if self._closed is not None:
                return

    async def _rest(self) -> None:
        task = trio.lowlevel.current_task()
        self._resting.append(task)

        def abort(_: Any) -> trio.lowlevel.Abort:
            if task in self._resting:
                self._resting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _take_calls(self) -> None:
        """Take calls until none is left. Before a call that may wait, see that somebody else will take the next."""
        turn_ends = self._clock() + SLICE_S
        while self._queue and len(self.under_way) < self._limit:
            call = self._queue.popleft()
            assert call.spec is not None
            if call.spec.style is Style.SYNC:
                self._run_sync(call)
            else:
                await self._run_async(call)
            if self._clock() >= turn_ends:
                await trio.lowlevel.checkpoint()
                turn_ends = self._clock() + SLICE_S

    def _run_sync(self, call: HostCall) -> None:
        if call.is_late():
            return
        try:
            value = call.invoke()
            if type(value) is CoroutineType:
                self._run_coroutine(call, value)
                return
            answer = call.returned(value)
        except BaseException as error:  # noqa: BLE001 - it is the caller's answer
            answer = call.raised(error)
        finally:
            current_actor_var.set(None)
        self.ended(call, answer)
        if call.fatal is not None and _is_from_signal(call.fatal):
            raise call.fatal

    def _run_coroutine(self, call: HostCall, coroutine: CoroutineType[Any, Any, Any]) -> None:
        """A plain function that returns a coroutine (a decorated async method): await it."""
        self.under_way[call] = None
        self._spawn(lambda: self._attend(call, lambda: coroutine))

    async def _run_async(self, call: HostCall) -> None:
        if call.is_late():
            return
        self.under_way[call] = None
        if self._queue:
            self._call_worker()
        stream = call.stream
        await self._attend(call, call.invoke if stream is None else lambda: stream.run_in_loop(call.invoke()))

    async def _attend(self, call: HostCall, make: Callable[[], Any]) -> None:
        """Await what ``make`` makes, within the call's deadline and cancellation, and answer."""
        answer = CANCELLED_ANSWER
        current_actor_var.set(call)
        call.scope = scope = trio.CancelScope() if call.deadline is None else trio.CancelScope(deadline=call.deadline)
        if call.cancelled:
            scope.cancel()
        try:
            with scope:
                answer = call.returned(await make())
            if scope.cancelled_caught and not call.cancelled:
                answer = call.raised(call.too_late())
        except trio.Cancelled:
            answer = call.raised(self._shut_down(call))
            raise
        except BaseException as error:
            answer = call.raised(error)
            if _must_go_up(error):
                raise
        finally:
            current_actor_var.set(None)
            self.ended(call, answer)
            if self._queue:
                self._call_worker()


class ThreadActor(Hosted):
    """An object of an all-sync class: its calls run on a `Runner`."""

    def __init__(self, instance: Any, name: str, actor_id: str, number: int, *, runner: Runner) -> None:
        super().__init__(instance, name, actor_id, number)
        self.runner = runner
        self.owns_runner = False

    def _start(self, call: HostCall) -> None:
        if call.is_late():
            return
        self.under_way[call] = None
        if call.stream is None:
            self.runner.submit(call)
        else:
            call.stream.waiting_thread = ThreadStream(self, call, call.stream)
            call.stream.waiting_thread.resume()

    def flush(self) -> None:
        self.runner.flush()

    def cancel(self, call: HostCall) -> None:
        """It is told, and that is all that can be done to a thread; if it has not begun, it never does."""
        call.cancelled = True
        call.finish(CANCELLED_ANSWER)
        if call.stream is not None and call.stream.waiting_thread is not None:
            call.stream.waiting_thread.resume()


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


def ending_of(error: BaseException) -> Ending:
    """What a SystemExit or KeyboardInterrupt of a method asks for: ``sys.exit()`` is an end in order."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return Ending("it has left by sys.exit()")
    return Ending(f"it has left by {type(error).__name__}", error)


def no_such_actor(number: int) -> NoSuchActor:
    return NoSuchActor(f"the host has no actor number {number} (any more)", number=number)
