"""Calls that wait for their buffers, and the calls of the same caller to the same actor that arrived after them.

Calls are started in the order of arrival, so a call waits for the buffers of those before it. Calls to other actors
do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from attrs import Factory, define

from fray.runtime.actors.incoming_call import IncomingCall
from fray.runtime.serialization.buffers import IncomingTransfer


@define(eq=False)
class BufferWaits:
    """Queues of calls that wait for buffers, one for each actor.

    ``on_ready`` is called with the actor's number and each call, in order, once everything before it has arrived.
    """

    on_ready: Callable[[int, IncomingCall], None]
    _queues: dict[int, deque[IncomingCall]] = Factory(dict)

    def add(self, target: int, call: IncomingCall) -> bool:
        """Keep the call until it is its turn. Return False if it need not wait."""
        queue = self._queues.get(target)
        if queue is None:
            if call.transfer is None or call.transfer.is_ready:
                return False
            queue = self._queues[target] = deque()
        queue.append(call)
        self.watch(target, call)
        return True

    def watch(self, target: int, call: IncomingCall) -> None:
        """Release calls when the buffers of ``call`` are there (they may have been sent again, in a new transfer)."""
        if call.transfer is not None:
            call.transfer.on_ready = lambda: self._release(target)
            if call.transfer.is_ready:
                self._release(target)

    def find(self, number: int) -> tuple[int, IncomingCall] | None:
        """Return the waiting call of this number and its actor's number; None if it does not wait."""
        return next(((target, call) for target, call in self if call.number == number), None)

    def drop(self, call: IncomingCall) -> None:
        """Remove a cancelled call: those behind it need not wait for its buffers."""
        call.transfer = None
        for target, queue in list(self._queues.items()):
            if call in queue:
                queue.remove(call)
                self._release(target)

    def clear(self) -> list[IncomingCall]:
        """Remove and return all waiting calls."""
        waiting = [call for _, call in self]
        self._queues.clear()
        return waiting

    def __iter__(self) -> Iterator[tuple[int, IncomingCall]]:
        return iter([(target, call) for target, queue in self._queues.items() for call in queue])

    def _release(self, target: int) -> None:
        queue = self._queues.get(target)
        while queue and _is_complete(queue[0].transfer):
            call = queue.popleft()
            if not queue:
                self._queues.pop(target, None)
            self.on_ready(target, call)
        if queue is not None and not queue:
            self._queues.pop(target, None)


def _is_complete(transfer: IncomingTransfer | None) -> bool:
    return transfer is None or transfer.is_ready
