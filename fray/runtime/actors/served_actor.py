"""Base of the actors that a host serves: how a call is checked, started, ended and counted.

An object of a class with any async method lives in the loop (`AsyncActor`), one of an all-sync class on threads
(`ThreadedActor`). Calls start in the order they arrived, within their concurrency group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

import trio

from fray.errors import CallCycle, FrayError, InvalidRequest, NoSuchActor, OutcomeUnknown
from fray.model.monitoring.served_calls import LATENCY_STEPS_PER_S, ActorMetrics
from fray.model.text import plural
from fray.net.codec import Kind
from fray.runtime.actors.incoming_call import INTERNAL_CALL, IncomingCall, OutputStream
from fray.runtime.actors.lifecycle import ActorLifecycle, ShutdownRequest
from fray.runtime.actors.method_lookup import find_method
from fray.runtime.actors.method_streams import BlockingStream, Stream
from fray.runtime.actors.methods import Method
from fray.runtime.actors.metrics import Counters
from fray.runtime.calls.dedup import CANCELLED_ANSWER, Answer
from fray.runtime.calls.wire import STREAM, TWO_WAY
from fray.runtime.deadlock import (
    comes_back,
    describe_cycle,
    is_stuck,
    marks_of,
)

_FAULT = int(Kind.FAULT)
CYCLE_CHECK_S = 0.02
"""Delay before a queued call that leads back to its own actor is checked again; doubles with each check."""
CYCLE_CHECK_MAX_S = 1.0


class ServedActor:
    """Common part of `AsyncActor` and `ThreadedActor`.

    Args:
        spawn: starts a task in the host's nursery.
        context: the context variables of which each call sees its own copy. Default: those of the current context.
        clock: seconds, for latencies.
    """

    stream_type: type[Stream | BlockingStream] = Stream
    """Class of the stream that a method with a stream parameter gets."""

    def __init__(
        self,
        instance: Any,
        name: str,
        actor_id: str,
        number: int,
        *,
        spawn: Callable[[Callable[[], Any]], None],
        context: Context | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.instance = instance
        self.name = name
        self.actor_id = actor_id
        self.number = number
        self.lifecycle: ActorLifecycle | None = None
        """Set by the host."""
        # Reading the clock for every call costs, and only an actor with `idle_s` needs it.
        self.last_active_s: float | None = None
        """Time of the last arrival or end of a call, on Trio's clock; maintained only if it is not None."""
        self.context = context or copy_context()
        self.make_context: Callable[[IncomingCall], Any] = lambda call: call
        self.active_calls: dict[IncomingCall, None] = {}
        """Calls started, or handed to a thread, that have not ended."""
        self.interrupted = False
        """True once a call that had begun was ended from outside."""
        self.counters = Counters()
        self._spawn = spawn
        self._clock = clock
        self._methods: dict[str, Method] = {}
        self._idle: trio.Event | None = None
        self._closed: FrayError | None = None

    def __repr__(self) -> str:
        return f"<hosted {self.name} ({self.actor_id}): {len(self.active_calls)} calls under way>"

    def submit(self, call: IncomingCall) -> None:
        """Start a call that has arrived, in its turn."""
        call.actor = self
        # Health checks are internal calls: they must not keep an idle actor alive.
        if self.last_active_s is not None and call.number != INTERNAL_CALL:
            self.last_active_s = trio.current_time()
        call.arrived_at = self._clock()
        # A refusal (not an error): the call has surely not run, so it may go to the next incarnation.
        if self._closed is not None:
            call.refuse(self._closed)
            return
        # Cached for each object: inspecting a function costs 0.1 ms, about as much as a whole call.
        spec = self._methods.get(call.method)
        if spec is None:
            try:
                spec = self._methods[call.method] = find_method(self.instance, call.method, self.stream_type)
            except Exception as error:  # noqa: BLE001 - a user's __getattr__ raises anything
                self.reject(call, error)
                return
        call.spec = spec
        mismatch = call_style_error(spec, call.flags)
        # The caller may know the actor by its name only and so cannot check how its methods are called.
        if mismatch:
            self.reject(call, InvalidRequest(f"{self.name}.{call.method}() {mismatch}"))
            return
        if call.flags & STREAM:
            call.stream = OutputStream(call)
            if call.inputs is not None:
                assert spec.stream_type is not None
                call.method_stream = spec.stream_type(call)
        self._start(call)

    def _start(self, call: IncomingCall) -> None:
        raise NotImplementedError

    def cancel(self, call: IncomingCall) -> None:
        """Cancel a call: its caller no longer waits."""
        raise NotImplementedError

    def is_running(self, call: IncomingCall) -> bool:
        """Return whether a call under way has begun."""
        return True

    def claim(self, call: IncomingCall) -> bool:
        """Claim a queued call for the thread that is about to begin it. False: it must not be begun."""
        raise NotImplementedError

    def run_on_thread(self, call: IncomingCall) -> None:
        """Run a call that was submitted to an executor; on its thread."""
        raise NotImplementedError

    def on_thread_done(self, call: IncomingCall) -> None:
        """End such a call; in the loop."""
        raise NotImplementedError

    def flush(self) -> None:
        """End a burst of calls: all frames that arrived together have been submitted."""

    def metrics(self) -> ActorMetrics:
        """Return the counters.

        They belong to this incarnation and live in its process; they are read on request, never collected.
        """
        raise NotImplementedError

    # Cycles of calls -------------------------------------------------------------------------------------------------
    #
    # Only a cycle that can be proven at one host is reported: every call under way in a queue waits, at this moment,
    # for a call that leads into that queue. Waits are recorded where they happen, so a mere `start` does not wait.
    # `wait_any` and `as_completed` do not count, since another future may complete first. Rings of several chains
    # through several actors are left to deadlines.

    def group_calls(self, call: IncomingCall) -> tuple[list[IncomingCall], list[IncomingCall], int]:
        """Return the calls of the same concurrency group: those under way, those that have not begun, and the limit."""
        raise NotImplementedError

    def fail_queued(self, call: IncomingCall, error: FrayError) -> None:
        """Answer a call that has not begun with ``error``, and never begin it."""
        raise NotImplementedError

    def watch_for_cycle(self, call: IncomingCall) -> None:
        """Fail a queued call if it waits for itself, now or later."""
        # Only a call whose chain contains this actor can wait for itself, so others cost nothing.
        if comes_back(call.links, self.actor_id) and not self._fail_if_cyclic(call):
            self._spawn(lambda: self._recheck_cycle(call))

    async def _recheck_cycle(self, call: IncomingCall) -> None:
        """Check again: a call that is under way may begin to wait for this one only later."""
        pause_s = CYCLE_CHECK_S
        while True:
            await trio.sleep(pause_s)
            # It has begun, or was cancelled.
            if call not in self.group_calls(call)[1] or self._fail_if_cyclic(call):
                return
            # A wait that lasts is checked less and less often.
            pause_s = min(2 * pause_s, CYCLE_CHECK_MAX_S)

    def _fail_if_cyclic(self, call: IncomingCall) -> bool:
        active, queued, limit = self.group_calls(call)
        if not is_stuck([each.awaited for each in active], [marks_of(each.links) for each in queued], limit):
            return False
        steps = describe_cycle(call.links, self.actor_id, f"{self.name}.{call.method}()")
        text = (
            f"a cycle of calls: {' → '.join(steps)}, which cannot begin: {self.name} runs "
            f"{plural(limit, 'call')} at a time and waits for this one. Raise its concurrency limit (max_concurrency, "
            "a concurrency group, async methods), or do not wait"
        )
        self.fail_queued(call, CallCycle(text, cycle=steps))
        return True

    # The end of a call -----------------------------------------------------------------------------------------------

    def on_call_ended(self, call: IncomingCall, answer: Answer) -> None:
        """Count a call that was started, and answer it."""
        # Without an error if it is missing: `end_calls` may have answered the call already.
        self.active_calls.pop(call, None)
        counters = self.counters
        # Powers of two: one bit operation for each call, and percentiles within a factor of two.
        counters.buckets[int((self._clock() - call.arrived_at) * LATENCY_STEPS_PER_S).bit_length()] += 1
        if call.cancelled:
            counters.cancelled += 1
        elif answer[0] == _FAULT:
            counters.errors += 1
        if call.trace is not None:
            call.trace.end(call.cancelled)
        call.origin.answer(call, answer)
        if self.last_active_s is not None and call.number != INTERNAL_CALL:
            self.last_active_s = trio.current_time()
        # After the answer: the caller should see what the method raised, not that the actor has died.
        if call.fatal is not None and self.lifecycle is not None:
            self.lifecycle.request_shutdown(shutdown_request_of(call.fatal))
        # `drain` waits for queued calls as well, so it is woken only when neither is left.
        if self._idle is not None and not self.is_busy:
            self._idle.set()
            self._idle = None

    def reject(self, call: IncomingCall, error: BaseException) -> None:
        """Answer a call that is not run with an error."""
        self.counters.not_run += 1
        self.counters.errors += 1
        call.finish(call.error_answer(error))

    def answer_cancelled(self, call: IncomingCall) -> None:
        """Answer a call that was cancelled before it began."""
        self.counters.not_run += 1
        self.counters.cancelled += 1
        call.finish(CANCELLED_ANSWER)

    def reject_if_late(self, call: IncomingCall) -> bool:
        """Reject a call that is past its deadline before it began; return whether it was."""
        if call.deadline is None or not call.is_past_deadline():
            return False
        self.reject(call, call.deadline_error())
        return True

    # The end of the actor --------------------------------------------------------------------------------------------

    def close(self, error: FrayError) -> None:
        """Accept no further calls; refuse those that have not begun with ``error``. What is under way continues."""
        # The first reason is the cause; a second close comes from the shutdown that follows.
        self._closed = self._closed or error

    def take_queued(self) -> list[IncomingCall]:
        """Remove and return the calls that wait for their turn, as far as they can still be stopped."""
        return []

    @property
    def is_busy(self) -> bool:
        """True while a call runs or waits for its turn."""
        return bool(self.active_calls)

    async def wait_idle(self) -> None:
        """Wait until nothing is under way; after `close`."""
        # A call that ends may start the next one in the queue.
        while self.is_busy:
            if self._idle is None:
                self._idle = trio.Event()
            await self._idle.wait()

    def stop(self) -> None:
        """Release the threads it runs on."""

    async def drain(self, grace_s: float) -> None:
        """Let what is under way end for ``grace_s``, then cancel it and answer `OutcomeUnknown`; after `close`."""
        with trio.move_on_after(grace_s):
            await self.wait_idle()
        self.end_calls(None)

    def end_calls(self, error: BaseException | None) -> None:
        """Cancel what is under way and answer it with ``error``, or (None) `OutcomeUnknown`."""
        for call in list(self.active_calls):
            # Its state may be half-way through a change: no checkpoint is taken of it (`fray.runtime.actors.shutdown`).
            self.interrupted = self.interrupted or call.has_begun
            # Answered before it is cancelled, so that the caller gets this reason and not the acknowledgement of a
            # cancellation.
            call.finish(call.interrupted_answer(error or self._shut_down_error(call)))
            self.cancel(call)

    def _shut_down_error(self, call: IncomingCall) -> OutcomeUnknown:
        text = (
            f"actor {self.name} was shut down while {call.method}() was under way. The call may or may not have taken "
            "effect; pass idempotent=True if it may be repeated"
        )
        return OutcomeUnknown(text, actor=self.name, method=call.method)


def shutdown_request_of(error: BaseException) -> ShutdownRequest:
    """Return the shutdown request of a SystemExit or KeyboardInterrupt; ``sys.exit()`` is an orderly end."""
    # As in a program: `sys.exit()` is a success, any other code a failure.
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return ShutdownRequest("it has left by sys.exit()")
    return ShutdownRequest(f"it has left by {type(error).__name__}", error)


def call_style_error(spec: Method, flags: int) -> str:
    """Return what is wrong with calling a method in this way; empty if nothing is."""
    if spec.stream_type is not None:
        return "" if flags & TWO_WAY else "takes a stream: call it with open()"
    if flags & TWO_WAY:
        return "takes no stream: await it, or give it a parameter annotated fray.Stream"
    if spec.is_generator == bool(flags & STREAM):
        return ""
    return "is a generator: iterate over its stream()" if spec.is_generator else "is not a generator: await it"


def no_such_actor(number: int) -> NoSuchActor:
    return NoSuchActor(f"the host has no actor number {number}, or it has ended", number=number)
