"""Calls for light actors that are not there: not yet, not now, or never again.

The number of a light actor is a promise of its owner, given before the actor is made. A call may be faster than the
actor, after a restart too: it waits here, for a bounded time unless the actor is known to be on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import trio

from fray.errors import ActorDied, FrayError
from fray.runtime.actors.hosted_actor import HostedActor, no_such_actor
from fray.runtime.actors.incoming_call import CallOrigin, IncomingCall
from fray.runtime.calls.range_set import (
    ENDED_HERE,
    ENDS_KEPT,
    LONG_AGO,
    RangeSet,
)

FIRST_LIGHT = 1 << 20
"""Numbers from here on are those of light actors; the host itself gives out lower ones."""
PROMISE_WAIT_S = 10.0
"""How long a call waits for an actor of which nobody here knows."""


class PendingLightCalls:
    """Calls of one host for light actors that are not there.

    Args:
        actors: the actors of the host, by number; shared with it.
        spawn: starts a task of the host.
    """

    def __init__(self, actors: Mapping[int, HostedActor], spawn: Callable[[Callable[[], Any]], None]) -> None:
        self._actors = actors
        self._spawn = spawn
        self._calls: dict[int, list[tuple[CallOrigin, IncomingCall]]] = {}
        self.expected: set[int] = set()
        """Actors that are being made (again)."""
        self._closed: FrayError | None = None
        self.end_errors: dict[int, FrayError] = {}
        """What calls of actors hear that have ended for good; of the last `ENDS_KEPT`."""
        self.ended = RangeSet()
        """All others that have."""

    def admit(self, number: int, origin: CallOrigin, call: IncomingCall) -> None:
        """There is no actor ``number`` now: refuse the call, or let it wait."""
        if number < FIRST_LIGHT or self._closed is not None:
            call.refuse(self._closed or no_such_actor(number))
        elif number in self.end_errors:
            call.refuse(self.end_errors[number])
        elif number in self.ended:
            call.refuse(ActorDied(f"actor {number} is gone: {LONG_AGO}", **{ENDED_HERE: LONG_AGO}))
        else:
            self.hold(number, origin, call)

    def hold(self, number: int, origin: CallOrigin, call: IncomingCall) -> None:
        waiting = self._calls.setdefault(number, [])
        waiting.append((origin, call))
        if len(waiting) == 1 and number not in self.expected:
            self._spawn(partial(self._give_up, number, waiting))

    async def _give_up(self, number: int, waiting: list[tuple[CallOrigin, IncomingCall]]) -> None:
        await trio.sleep(PROMISE_WAIT_S)
        if number not in self.expected and self._calls.get(number) is waiting:
            self.refuse(number, no_such_actor(number))

    def release(self, number: int) -> None:
        """The actor is there."""
        self.expected.discard(number)
        for origin, call in self._calls.pop(number, []):
            if not call.cancelled:
                origin.deliver(number, call)
        actor = self._actors.get(number)
        if actor is not None:
            actor.flush()

    def has_ended(self, number: int) -> bool:
        """Whether the actor has ended for good."""
        return number in self.end_errors or number in self.ended

    def record_end(self, number: int, error: FrayError) -> None:
        """The actor has ended for good."""
        self.expected.discard(number)
        self.end_errors[number] = error
        while len(self.end_errors) > ENDS_KEPT:
            oldest = next(iter(self.end_errors))
            del self.end_errors[oldest]
            self.ended.add(oldest)
        self.refuse(number, error)

    def refuse(self, number: int, error: FrayError) -> None:
        for _, call in self._calls.pop(number, []):
            if not call.cancelled:
                call.refuse(error)

    def close(self, error: FrayError) -> None:
        """The host is going."""
        self._closed = error
        for number in list(self._calls):
            self.refuse(number, error)
