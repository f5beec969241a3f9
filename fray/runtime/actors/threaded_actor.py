"""An object of an all-sync class: its calls run on a `Runner`, and each concurrency group has one of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import trio

from fray.errors import CancelIgnored, FrayError
from fray.model.messages.calls import ActorMetrics
from fray.runtime.actors.hosted_actor import HostedActor
from fray.runtime.actors.incoming_call import IncomingCall
from fray.runtime.actors.input_stream import BlockingStream
from fray.runtime.actors.lifecycle import ShutdownRequest
from fray.runtime.actors.methods import NO_GROUP
from fray.runtime.actors.output_stream import ThreadOutputStream
from fray.runtime.calls.wire import CANCELLED_ANSWER, Answer
from fray.runtime.threads.executor import SerialExecutor


class ThreadedActor(HostedActor):
    """``runners``, ``limits``: of each concurrency group by name. ``owned``: the runners it stops at its end.
    ``kill_after_s``: see `ActorConfig`."""

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
        """Where constructor and cleanup run, and calls of no group."""
        self._runners = executors
        self._limits = limits
        self._waiting: dict[IncomingCall, None] = {}
        """Under way and not begun. Whoever takes a call out, a thread or the loop, decides what becomes of it."""
        self._kill_after_s = kill_after_s
        self._watch: trio.CancelScope | None = None
        self._owned = owned
        self._streams: dict[IncomingCall, ThreadOutputStream] = {}

    def executor_of(self, call: IncomingCall) -> SerialExecutor:
        """Where a call runs."""
        assert call.spec is not None
        return self._runners[call.spec.group]

    def _start(self, call: IncomingCall) -> None:
        if self.reject_if_late(call):
            return
        self.active_calls[call] = None
        self._waiting[call] = None
        if call.deadline is not None:
            self._see_to(call.deadline)
        if call.stream is None or call.method_stream is not None:
            self.executor_of(call).submit(call)
        else:
            self._streams[call] = stream = ThreadOutputStream(self, call, call.stream)
            stream.resume()
        if call.links:
            self.executor_of(call).flush()
            self.watch_for_cycle(call)

    def flush(self) -> None:
        for runner in self._runners.values():
            runner.flush()

    def cancel(self, call: IncomingCall) -> None:
        """It is told, and that is all that can be done to a thread; if it has not begun, it never does."""
        call.mark_cancelled()
        call.finish(CANCELLED_ANSWER)
        if not self.claim(call) and self._kill_after_s is not None and self._closed is None:
            self._spawn(partial(self._kill_if_ignored, call, self._kill_after_s))
        if call in self._streams:
            self._streams[call].resume()
        if isinstance(call.method_stream, BlockingStream):
            call.method_stream.wake()

    def on_call_ended(self, call: IncomingCall, answer: Answer) -> None:
        self._streams.pop(call, None)
        super().on_call_ended(call, answer)

    def group_calls(self, call: IncomingCall) -> tuple[list[IncomingCall], list[IncomingCall], int]:
        assert call.spec is not None
        group = call.spec.group
        mine = [each for each in self.active_calls if each.spec is not None and each.spec.group == group]
        waiting = [each for each in mine if each in self._waiting]
        return [each for each in mine if self.is_running(each)], waiting, self._limits[group]

    def fail_queued(self, call: IncomingCall, error: FrayError) -> None:
        if self.claim(call):
            call.outcome = call.error_answer(error)
            call.finish(call.outcome)

    def claim(self, call: IncomingCall) -> bool:
        return self._waiting.pop(call, call) is None

    def is_running(self, call: IncomingCall) -> bool:
        return call not in self._waiting and call.outcome is None

    def end_calls(self, error: BaseException | None) -> None:
        for call in list(self._waiting):
            if self.claim(call):
                call.outcome = CANCELLED_ANSWER
                call.refuse(self._closed or self._shut_down(call))
        super().end_calls(error)

    # Cancellation and deadlines --------------------------------------------------------------------------------------

    async def _kill_if_ignored(self, call: IncomingCall, kill_after_s: float) -> None:
        await trio.sleep(kill_after_s)
        if call in self.active_calls and self._closed is None and self.lifecycle is not None:
            text = f"{self.name}.{call.method}() was cancelled and did not end within kill_after_s={kill_after_s:g}"
            self.lifecycle.request_shutdown(ShutdownRequest(text, CancelIgnored(text, method=call.method)))

    def _see_to(self, deadline: float) -> None:
        if self._watch is None:
            self._watch = trio.CancelScope(deadline=deadline)
            self._spawn(self._watch_deadlines)
        else:
            self._watch.deadline = min(deadline, self._watch.deadline)

    async def _watch_deadlines(self) -> None:
        """Tell the methods that go on past their deadlines, also when nobody else can."""
        while self._watch is not None:
            with self._watch:
                await trio.sleep_forever()
            timed = [call for call in self.active_calls if call.deadline is not None and not call.cancelled]
            late = [call for call in timed if call.is_past_deadline()]
            for call in late:
                call.finish(call.error_answer(call.deadline_error()))
                self.cancel(call)
            waiting = [call.deadline for call in timed if call.deadline is not None and call not in late]
            self._watch = trio.CancelScope(deadline=min(waiting)) if waiting else None

    def stop(self) -> None:
        for runner in self._owned:
            runner.stop()

    def metrics(self) -> ActorMetrics:
        queued = len(self._waiting)
        return self.counters.snapshot(running=len(self.active_calls) - queued, queued=queued)
