"""Calls that wait for their buffers, and the calls of the same caller to the same actor that came behind them.

Ruling 17: first in, first started; so a call waits for the buffers of those before it. Calls to other actors do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from attrs import Factory, define

from fray.runtime.actors.incoming_call import IncomingCall
from fray.runtime.serialization.buffer_transfer import IncomingTransfer


@define(eq=False)
class BufferWaits:
    """``go_on`` is called with the actor's number and each call, in order, once everything before it has landed."""

    on_ready: Callable[[int, IncomingCall], None]
    _queues: dict[int, deque[IncomingCall]] = Factory(dict)

    def add(self, target: int, call: IncomingCall) -> bool:
        """Keep the call until it is its turn; False: it need not wait."""
        queue = self._queues.get(target)
        if queue is None:
            if call.transfer is None or call.transfer.is_ready:
                return False
            queue = self._queues[target] = deque()
        queue.append(call)
        self.watch(target, call)
        return True

    def watch(self, target: int, call: IncomingCall) -> None:
        """Go on when the buffers of ``call`` are there (they may have been sent anew)."""
        if call.transfer is not None:
            call.transfer.on_ready = lambda: self._landed(target)
            if call.transfer.is_ready:
                self._landed(target)

    def find(self, number: int) -> tuple[int, IncomingCall] | None:
        """The call of this number, if it waits here, and whom it is for."""
        return next(((to, call) for to, call in self if call.number == number), None)

    def drop(self, call: IncomingCall) -> None:
        """It was cancelled: what is behind it need not wait for its buffers."""
        call.transfer = None
        for target, queue in list(self._queues.items()):
            if call in queue:
                queue.remove(call)
                self._landed(target)

    def clear(self) -> list[IncomingCall]:
        """Give up all that waits."""
        waiting = [call for _, call in self]
        self._queues.clear()
        return waiting

    def __iter__(self) -> Iterator[tuple[int, IncomingCall]]:
        return iter([(target, call) for target, queue in self._queues.items() for call in queue])

    def _landed(self, target: int) -> None:
        queue = self._queues.get(target)
        while queue and _is_landed(queue[0].transfer):
            call = queue.popleft()
            if not queue:
                self._queues.pop(target, None)
            self.on_ready(target, call)
        if queue is not None and not queue:
            self._queues.pop(target, None)


def _is_landed(arrival: IncomingTransfer | None) -> bool:
    return arrival is None or arrival.is_ready
