"""An object of an all-sync class: its calls run on a `Runner`, and each concurrency group has one of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fray.model.messages.calls import ActorMetrics
from fray.runtime.calls import CANCELLED_ANSWER, Answer
from fray.runtime.executor import Runner
from fray.runtime.host_call import HostCall
from fray.runtime.host_input import BlockingStream
from fray.runtime.host_stream import ThreadStream
from fray.runtime.hosted import Hosted
from fray.runtime.methods import NO_GROUP


class ThreadActor(Hosted):
    """``runners``: of each concurrency group by name. ``owned``: those it stops at its end."""

    talk_type = BlockingStream

    def __init__(
        self,
        instance: Any,
        name: str,
        actor_id: str,
        number: int,
        *,
        runners: Mapping[str, Runner],
        owned: tuple[Runner, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(instance, name, actor_id, number, **options)
        self.runner = runners[NO_GROUP]
        """Where constructor and cleanup run, and calls of no group."""
        self._runners = runners
        self._owned = owned
        self._streams: dict[HostCall, ThreadStream] = {}

    def runner_of(self, call: HostCall) -> Runner:
        """Where a call runs."""
        assert call.spec is not None
        return self._runners[call.spec.group]

    def _start(self, call: HostCall) -> None:
        if self.is_late(call):
            return
        self.under_way[call] = None
        if call.stream is None or call.talk is not None:
            self.runner_of(call).submit(call)
        else:
            self._streams[call] = stream = ThreadStream(self, call, call.stream)
            stream.resume()

    def flush(self) -> None:
        for runner in self._runners.values():
            runner.flush()

    def cancel(self, call: HostCall) -> None:
        """It is told, and that is all that can be done to a thread; if it has not begun, it never does."""
        call.cancelled = True
        call.finish(CANCELLED_ANSWER)
        if call in self._streams:
            self._streams[call].resume()
        if isinstance(call.talk, BlockingStream):
            call.talk.wake()

    def ended(self, call: HostCall, answer: Answer) -> None:
        self._streams.pop(call, None)
        super().ended(call, answer)

    def stop(self) -> None:
        for runner in self._owned:
            runner.stop()

    def metrics(self) -> ActorMetrics:
        running = sum(call.began for call in self.under_way)
        return self.counters.seen(running=running, queued=len(self.under_way) - running)
