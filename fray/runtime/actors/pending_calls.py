"""Calls for light actors that are not there: not yet, between two incarnations, or ended for good.

The number of a light actor is promised by its owner before the actor is made, so a call may arrive before the actor,
after a restart too. It waits here, for a bounded time unless the actor is known to be expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import trio

from fray.errors import ActorDied, FrayError
from fray.runtime.actors.incoming_call import CallOrigin, IncomingCall
from fray.runtime.actors.served_actor import ServedActor, no_such_actor
from fray.runtime.calls.range_set import (
    ENDED_HERE,
    ENDS_KEPT,
    LONG_AGO,
    RangeSet,
)

# Far above what a host assigns itself (1, 2, 3, …), so a number alone tells the two kinds apart.
FIRST_LIGHT = 1 << 20
"""First number of light actors; the host itself assigns lower ones."""
# The owner's request to make the actor and a call to it travel by different connections; the call may be first.
PROMISE_WAIT_S = 10.0
"""Seconds that a call waits for an actor whose number is unknown here."""


class PendingLightCalls:
    """Calls of one host for light actors that are not there.

    Args:
        actors: the actors of the host, by number; shared with it.
        spawn: starts a task of the host.
    """

    def __init__(self, actors: Mapping[int, ServedActor], spawn: Callable[[Callable[[], Any]], None]) -> None:
        self._actors = actors
        self._spawn = spawn
        self._calls: dict[int, list[tuple[CallOrigin, IncomingCall]]] = {}
        self.expected: set[int] = set()
        """Actors that are being made or restarted."""
        self._closed: FrayError | None = None
        # Of the last `ENDS_KEPT` ends a host can say how they came; of older ones, only that they did. Numbers are
        # given out in order, so the ended ones form a few ranges.
        self.end_errors: dict[int, FrayError] = {}
        """Errors for calls of actors that have ended for good; the last `ENDS_KEPT`."""
        self.ended = RangeSet()
        """Other actors that have ended for good."""

    def admit(self, number: int, origin: CallOrigin, call: IncomingCall) -> None:
        """Refuse a call for an actor that is not there, or let it wait."""
        # A plain actor that is not there has ended: its number is made known only after it was registered.
        if number < FIRST_LIGHT or self._closed is not None:
            call.refuse(self._closed or no_such_actor(number))
        elif number in self.end_errors:
            call.refuse(self.end_errors[number])
        elif number in self.ended:
            call.refuse(ActorDied(f"actor {number} is gone: {LONG_AGO}", **{ENDED_HERE: LONG_AGO}))
        else:
            self.hold(number, origin, call)

    def hold(self, number: int, origin: CallOrigin, call: IncomingCall) -> None:
        """Let a call wait for its actor."""
        waiting = self._calls.setdefault(number, [])
        waiting.append((origin, call))
        # One timer for each actor and not for each call. An expected actor needs none: its making ends in `release` or
        # `record_end`.
        if len(waiting) == 1 and number not in self.expected:
            self._spawn(partial(self._refuse_later, number, waiting))

    async def _refuse_later(self, number: int, waiting: list[tuple[CallOrigin, IncomingCall]]) -> None:
        await trio.sleep(PROMISE_WAIT_S)
        # Another list under the same number means that the actor was there meanwhile and has gone again.
        if number not in self.expected and self._calls.get(number) is waiting:
            self.refuse(number, no_such_actor(number))

    def release(self, number: int) -> None:
        """Deliver the calls of an actor that is there now."""
        self.expected.discard(number)
        for origin, call in self._calls.pop(number, []):
            if not call.cancelled:
                origin.deliver(number, call)
        # Delivered outside of a batch of frames, so no `on_batch` will flush.
        actor = self._actors.get(number)
        if actor is not None:
            actor.flush()

    def has_ended(self, number: int) -> bool:
        """Return whether the actor has ended for good."""
        return number in self.end_errors or number in self.ended

    def record_end(self, number: int, error: FrayError) -> None:
        """Refuse the calls of an actor that has ended for good, now and from now on."""
        self.expected.discard(number)
        self.end_errors[number] = error
        # The oldest keep only their number: a few ranges, however many light actors come and go.
        while len(self.end_errors) > ENDS_KEPT:
            oldest = next(iter(self.end_errors))
            del self.end_errors[oldest]
            self.ended.add(oldest)
        self.refuse(number, error)

    def refuse(self, number: int, error: FrayError) -> None:
        """Refuse the calls that wait for an actor."""
        for _, call in self._calls.pop(number, []):
            if not call.cancelled:
                call.refuse(error)

    def close(self, error: FrayError) -> None:
        """Refuse all calls: the host shuts down."""
        self._closed = error
        for number in list(self._calls):
            self.refuse(number, error)
