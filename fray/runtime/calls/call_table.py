"""Client side: the unanswered calls of one connection to an actor host. Pure.

A call is queued (surely not delivered) or open (sent, maybe delivered). It gets its number when it is sent, so numbers
arrive at the host in rising order; see `fray.runtime.calls.dedup` for the host's side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Generic, Protocol, TypeVar

from attrs import define, field

from fray.runtime.calls.wire import OPEN_BYTES_LIMIT, OPEN_CALLS_LIMIT, SETTLE_EVERY_BYTES, SETTLE_EVERY_CALLS
from fray.runtime.serialization.number_list import pack_numbers


class PendingCall(Protocol):
    """Fields of a call that the table uses."""

    number: int
    """Number on the connection; 0 until the call is sent."""
    size: int
    """Bytes held for it."""


T = TypeVar("T", bound=PendingCall)


@define(eq=False)
class PendingCalls(Generic[T]):
    """All unanswered calls of one caller to one host incarnation."""

    numbers: Callable[[], int] = field(factory=lambda: count(1).__next__)
    open: dict[int, T] = field(factory=dict, init=False)
    queued: deque[T] = field(factory=deque, init=False)
    held_bytes: int = 0
    _settled: list[int] = field(factory=list, init=False)
    """Numbers of answers that the host may forget and does not know of yet."""
    _settled_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.open) + len(self.queued) >= OPEN_CALLS_LIMIT or self.held_bytes >= OPEN_BYTES_LIMIT

    def queue(self, call: T) -> None:
        """Add a call that cannot be sent yet."""
        self.queued.append(call)
        self.held_bytes += call.size

    def sent(self, call: T) -> int:
        """Number a call that is sent now without having been queued; return the number."""
        call.number = number = self.numbers()
        self.open[number] = call
        self.held_bytes += call.size
        return number

    def sent_queued(self) -> T:
        """Number the first queued call, which is sent now, and return it."""
        call = self.queued.popleft()
        self.held_bytes -= call.size
        self.sent(call)
        return call

    def unsend(self, call: T) -> None:
        """Put a call whose frame could not be handed over back to the front of the queue."""
        del self.open[call.number]
        call.number = 0
        self.queued.appendleft(call)

    def withdraw(self, call: T) -> bool:
        """Forget a call that is still queued; return False if it has been sent."""
        try:
            self.queued.remove(call)
        except ValueError:
            return False
        self.held_bytes -= call.size
        return True

    def answered(self, number: int, size: int) -> T | None:
        """Return the call that an answer of ``size`` bytes ends; None if it was answered before."""
        call = self.open.pop(number, None)
        self._settled.append(number)
        self._settled_bytes += size
        if call is not None:
            self.held_bytes -= call.size
        return call

    def take_settled(self, force: bool = False) -> bytes | None:
        """Return the body of a SETTLED frame once enough answers have come to be worth one."""
        due = len(self._settled) >= SETTLE_EVERY_CALLS or self._settled_bytes >= SETTLE_EVERY_BYTES
        if not due and not (force and self._settled):
            return None
        body = pack_numbers(self._settled)
        self._settled, self._settled_bytes = [], 0
        return body

    def reset(self) -> tuple[bytes, list[T]]:
        """Start over with a host that has forgotten the conversation.

        Returns:
            The body of the first frame, SETTLED flagged ONLY, and the calls to send again, in order, flagged AGAIN.
        """
        self._settled, self._settled_bytes = [], 0
        return pack_numbers(self.open), list(self.open.values())

    def take(self, mine: Callable[[T], bool] = lambda call: True) -> tuple[list[T], list[T]]:
        """Remove the calls for which ``mine`` is true and return (queued ones, open ones), each in order."""
        queued = [call for call in self.queued if mine(call)]
        opened = [call for call in self.open.values() if mine(call)]
        self.queued = deque(call for call in self.queued if not mine(call))
        for call in opened:
            del self.open[call.number]
        self.held_bytes -= sum(call.size for call in queued) + sum(call.size for call in opened)
        return queued, opened
