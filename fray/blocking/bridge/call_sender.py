"""Sender of actor calls of sync code: arguments are pickled on the calling thread, the loop sends the call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from fray.blocking.bridge.background_loop import current_runtime, portal_of
from fray.blocking.bridge.portal import Portal, ended
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.route import CallOptions, Route
from fray.runtime.current_call import CurrentCall, current_actor_var
from fray.runtime.runtime import Runtime


class CallSender:
    """Sends the calls of threads to one actor: calls are made on the threads and sent, in order, by the loop."""

    def __init__(self, portal: Portal, route: Route) -> None:
        self.portal = portal
        assert portal.runtime is not None
        self._caller = portal.runtime.caller
        self._route = route
        self._waiting: deque[tuple[CallFuture, CallOptions, CurrentCall | None]] = deque()

    @property
    def is_over(self) -> bool:
        """True if the actor will never be ready again, as far as is known here."""
        return self._route.is_gone

    def make(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture:
        """Return the call, with pickled arguments. Raises NotPicklable, MessageTooLarge, or the error that ended the
        cluster.
        """
        return self._route.make(method, args, kwargs)

    def send(self, call: CallFuture, options: CallOptions) -> None:
        """Send the call after those sent before. Waits while the callee does not keep up (never in the loop)."""
        # A callback in the loop must not wait; its call is queued beyond the limit instead.
        if (self._waiting or self.portal.is_behind) and not trio.lowlevel.in_trio_run():
            self.portal.call(self._wait_room)
        self.portal.send(self._send, call, options, current_actor_var.get())

    # In the loop

    def _send(self, call: CallFuture, options: CallOptions, current_call: CurrentCall | None) -> None:
        # Behind queued calls, so that calls of this actor keep their order.
        if not self._waiting and (self._caller.is_closed or not self._route.is_full):
            self._route.send(call, options, current_call)
            if call.deadline is not None:
                self._caller.spawn(_watch, call)
            return
        self._waiting.append((call, options, current_call))
        if len(self._waiting) == 1:
            self._caller.spawn(self._pump)

    async def _pump(self) -> None:
        try:
            while self._waiting:
                if self._route.is_full:
                    await self._route.wait_room()
                # Removed only after it was sent: `_send` sees a queue that is not empty and stays behind it.
                call, options, current_call = self._waiting[0]
                self._route.send(call, options, current_call)
                self._waiting.popleft()
                if call.deadline is not None:
                    self._caller.spawn(_watch, call)
        finally:
            while self._waiting:
                self._waiting.popleft()[0].fail(ended())

    async def _wait_room(self) -> None:
        while self._waiting:
            await self._route.wait_room()
            await trio.lowlevel.checkpoint()


async def _watch(call: CallFuture) -> None:
    """Enforce the deadline of a call: the waiting thread has no timer in the loop."""
    await call.wait_done()


def call_sender_of(runtime: Runtime | None, find_route: Callable[[], Route]) -> CallSender:
    """Return the sender to the actor of ``find_route()``, shared by all its handles. ``runtime``: default that of the
    code.
    """
    portal = portal_of(runtime or current_runtime())
    route = find_route() if trio.lowlevel.in_trio_run() else portal.run(find_route)
    # One sender for each route: two would be two queues, and calls through two handles could overtake one another.
    sender: CallSender = portal.extras.setdefault(route, CallSender(portal, route))
    return sender
