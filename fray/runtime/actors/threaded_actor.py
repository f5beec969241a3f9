"""Actor of an all-sync class: its calls run on the threads of executors, one executor for each concurrency group."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

import trio

from fray.errors import CancelIgnored, FrayError
from fray.model.monitoring.served_calls import ActorMetrics
from fray.runtime.actors.incoming_call import IncomingCall, OutputStream
from fray.runtime.actors.lifecycle import ShutdownRequest
from fray.runtime.actors.method_streams import BlockingStream
from fray.runtime.actors.methods import NO_GROUP
from fray.runtime.actors.served_actor import ServedActor
from fray.runtime.calls.dedup import CANCELLED_ANSWER, Answer
from fray.runtime.serialization.buffers import PickledObject
from fray.runtime.threads.executor import SerialExecutor

# Handing a generator to the thread and back costs a wake-up each, so a slice holds many items; 2 ms is short for a call
# that waits behind it.
SLICE_S = 0.002
"""Time that a generator may run before other calls of its actor get a turn."""


class ThreadedActor(ServedActor):
    """Actor of an all-sync class.

    Args:
        executors: one for each concurrency group, by name.
        limits: calls under way at once, for each group.
        kill_after_s: see `ActorConfig`.
        owned: executors to stop at its end.
    """

    stream_type = BlockingStream

    def __init__(
        self,
        instance: Any,
        name: str,
        actor_id: str,
        number: int,
        *,
        executors: Mapping[str, SerialExecutor],
        limits: Mapping[str, int],
        kill_after_s: float | None = None,
        owned: tuple[SerialExecutor, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(instance, name, actor_id, number, **options)
        self.executor = executors[NO_GROUP]
        """Executor of constructor, cleanup, and calls of no group."""
        self._executors = executors
        self._limits = limits
        # A thread and the loop claim a call by one atomic pop of this dictionary. So what the loop takes back has
        # certainly not been run, and calls that were queued when an actor ended can go to its next incarnation.
        self._queued: dict[IncomingCall, None] = {}
        self._kill_after_s = kill_after_s
        self._deadline_scope: trio.CancelScope | None = None
        self._owned = owned
        self._generators: dict[IncomingCall, ThreadGenerator] = {}

    def executor_of(self, call: IncomingCall) -> SerialExecutor:
        """Return the executor of the call's concurrency group."""
        assert call.spec is not None
        return self._executors[call.spec.group]

    def _start(self, call: IncomingCall) -> None:
        # It may have waited for buffers, or in the channel, until its deadline had passed.
        if self.reject_if_late(call):
            return
        self.active_calls[call] = None
        self._queued[call] = None
        if call.deadline is not None:
            self._watch_deadline(call.deadline)
        # A method with a stream of its own blocks its thread as it likes. Plain generators run in slices, or a slow
        # reader would hold the thread of an actor whose other calls could run.
        if call.stream is None or call.method_stream is not None:
            self.executor_of(call).submit(call)
        else:
            self._generators[call] = generator = ThreadGenerator(self, call, call.stream)
            generator.resume()
        if call.links:
            self.executor_of(call).flush()
            self.watch_for_cycle(call)

    def flush(self) -> None:
        for executor in self._executors.values():
            executor.flush()

    def cancel(self, call: IncomingCall) -> None:
        """Set the call's cancel event, which is all that can be done to a thread; a call that has not begun never does.

        With ``kill_after_s``, a method that ignores this ends the actor as failed: first its other calls and its
        cleanup, in order, then KeyboardInterrupt in its thread, half a second, and ``os._exit`` with the outcome
        written. In ``local``, where the process is shared, the thread is left behind.
        """
        call.mark_cancelled()
        # At once: a caller must not wait for code that cannot be interrupted.
        call.finish(CANCELLED_ANSWER)
        # Claiming it here makes sure that the thread never begins a call that was answered as cancelled.
        if not self.claim(call) and self._kill_after_s is not None and self._closed is None:
            self._spawn(partial(self._kill_if_ignored, call, self._kill_after_s))
        # A suspended generator is only closed by a slice that sees the flag.
        if call in self._generators:
            self._generators[call].resume()
        if isinstance(call.method_stream, BlockingStream):
            call.method_stream.wake()

    def on_call_ended(self, call: IncomingCall, answer: Answer) -> None:
        self._generators.pop(call, None)
        super().on_call_ended(call, answer)

    def group_calls(self, call: IncomingCall) -> tuple[list[IncomingCall], list[IncomingCall], int]:
        assert call.spec is not None
        group = call.spec.group
        mine = [each for each in self.active_calls if each.spec is not None and each.spec.group == group]
        queued = [each for each in mine if each in self._queued]
        return [each for each in mine if self.is_running(each)], queued, self._limits[group]

    def fail_queued(self, call: IncomingCall, error: FrayError) -> None:
        if self.claim(call):
            call.outcome = call.error_answer(error)
            call.finish(call.outcome)

    def claim(self, call: IncomingCall) -> bool:
        # The entries are None, so the default tells a missing call from a claimed one. Under the GIL the pop is atomic.
        return self._queued.pop(call, call) is None

    def is_running(self, call: IncomingCall) -> bool:
        # A thread has set its outcome, but the loop has not been informed yet: it does not wait for anything any more.
        return call not in self._queued and call.outcome is None

    def end_calls(self, error: BaseException | None) -> None:
        # Refused and not cancelled: they have surely not begun, so callers may repeat them at the next incarnation.
        for call in list(self._queued):
            if self.claim(call):
                call.outcome = CANCELLED_ANSWER
                call.refuse(self._closed or self._shut_down_error(call))
        super().end_calls(error)

    # One call on its thread ------------------------------------------------------------------------------------------

    def run_on_thread(self, call: IncomingCall) -> None:
        # The loop may have taken it back since it was queued.
        if self.claim(call):
            self.context.copy().run(self._run, call)

    def _run(self, call: IncomingCall) -> None:
        try:
            value = [call.invoke()]
            if isinstance(call.method_stream, BlockingStream) and call.spec is not None and call.spec.is_generator:
                value = [call.method_stream.produce(value[0])]
            call.outcome = call.result_answer(value.pop())  # the popped value is released once it has been pickled
        except BaseException as error:
            call.outcome = call.error_answer(error)
            # Passed on to the executor: it is how the thread itself is asked to end.
            if isinstance(error, KeyboardInterrupt):
                raise

    def on_thread_done(self, call: IncomingCall) -> None:
        if isinstance(call.method_stream, BlockingStream):
            call.method_stream.flush()
        # No outcome: the loop had claimed and answered the call, and the thread has skipped it.
        self.on_call_ended(call, call.outcome or CANCELLED_ANSWER)

    # Cancellation and deadlines --------------------------------------------------------------------------------------

    async def _kill_if_ignored(self, call: IncomingCall, kill_after_s: float) -> None:
        await trio.sleep(kill_after_s)
        # It may have ended meanwhile, or the actor may be ending anyway.
        if call in self.active_calls and self._closed is None and self.lifecycle is not None:
            text = f"{self.name}.{call.method}() was cancelled and did not end within kill_after_s={kill_after_s:g}"
            self.lifecycle.request_shutdown(ShutdownRequest(text, CancelIgnored(text, method=call.method)))

    def _watch_deadline(self, deadline: float) -> None:
        # One task and one timer for all calls of the actor, at the earliest deadline.
        if self._deadline_scope is None:
            self._deadline_scope = trio.CancelScope(deadline=deadline)
            self._spawn(self._watch_deadlines)
        else:
            # Moving the deadline of a scope wakes its sleeping task in time; no event is needed.
            self._deadline_scope.deadline = min(deadline, self._deadline_scope.deadline)

    async def _watch_deadlines(self) -> None:
        """Cancel the calls that run past their deadlines; the caller may be unable to."""
        while self._deadline_scope is not None:
            with self._deadline_scope:
                await trio.sleep_forever()
            timed = [call for call in self.active_calls if call.deadline is not None and not call.cancelled]
            late = [call for call in timed if call.is_past_deadline()]
            for call in late:
                # The thread is still busy, but its caller gets the answer now.
                call.finish(call.error_answer(call.deadline_error()))
                self.cancel(call)
            pending = [call.deadline for call in timed if call.deadline is not None and call not in late]
            self._deadline_scope = trio.CancelScope(deadline=min(pending)) if pending else None

    def stop(self) -> None:
        for executor in self._owned:
            executor.stop()

    def metrics(self) -> ActorMetrics:
        queued = len(self._queued)
        return self.counters.snapshot(running=len(self.active_calls) - queued, queued=queued)


class ThreadGenerator:
    """Generator on an actor's thread, run as work items of its executor.

    Each work item produces what the credit allows, for one slice of time. Between two of them other calls of the actor
    get their turn.
    """

    def __init__(self, actor: ThreadedActor, call: IncomingCall, stream: OutputStream) -> None:
        self._actor = actor
        self._call = call
        self._stream = stream
        # One context for all slices: what the generator sets between two items it finds again.
        self._context = actor.context.copy()
        self._source: Generator[Any, Any, Any] | None = None
        self._items: list[bytes | PickledObject] = []
        self._value: Any = None
        self._allowed_items = 0
        self._allowed_bytes = 0
        self._answer: Answer | None = None
        self._submitted = False
        stream.on_credit = self._on_credit

    def _on_credit(self, items: int) -> None:
        self._stream.window.on_credit(items)
        self.resume()

    def resume(self) -> None:
        """Submit the next work item if there is credit, or the call was cancelled."""
        window = self._stream.window
        # Cancelled generators get one more slice without credit, in which they are closed.
        if not self._submitted and self._answer is None and (window.is_open or self._call.cancelled):
            self._submitted = True
            # A snapshot: the window belongs to the loop and changes while the thread runs.
            self._allowed_items, self._allowed_bytes = window.credit, window.room_bytes
            executor = self._actor.executor_of(self._call)
            executor.submit(self)
            # Credit does not arrive in a batch of calls that would flush later.
            executor.flush()

    # On the thread

    def run(self) -> None:
        if self._source is not None or self._actor.claim(self._call):
            self._context.run(self._run)
        else:
            # It was cancelled before its first slice, so the method is never entered.
            self._answer = CANCELLED_ANSWER

    def _run(self) -> None:
        try:
            if self._call.cancelled:
                self._close()
            elif not self._produce():
                self._answer = self._call.result_answer(self._value)
        except BaseException as error:
            self._answer = self._call.error_answer(error)
            if isinstance(error, KeyboardInterrupt):
                raise

    def _produce(self) -> bool:
        """Produce items for one slice. Return False when the generator has ended."""
        if self._source is None:
            self._source = self._call.invoke()
        until = time.perf_counter() + SLICE_S
        while len(self._items) < self._allowed_items and self._allowed_bytes > 0:
            try:
                item = next(self._source)
            except StopIteration as end:
                self._value = end.value
                return False
            # Pickled on the thread: the loop would be held up, and the generator may change the item after the yield.
            self._items.append(self._stream.pickle_item(item))
            self._allowed_bytes -= len(self._items[-1])
            if time.perf_counter() >= until or self._call.cancelled:
                break
        return True

    def _close(self) -> None:
        self._answer = CANCELLED_ANSWER
        if self._source is not None:
            self._source.close()

    # In the loop

    def done(self) -> None:
        self._submitted = False
        items, self._items = self._items, []
        # Items leave before the answer, which ends the stream for the reader.
        for data in items:
            self._stream.send(data)
        if self._answer is not None:
            self._actor.on_call_ended(self._call, self._answer)
        else:
            self.resume()
