"""Calls of sync code: made on the thread, arguments pickled there, and sent by the loop."""

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
    """The way of one thread-side handle to its actor: calls are made on the thread and sent, in order, by the loop."""

    def __init__(self, portal: Portal, route: Route) -> None:
        self.portal = portal
        assert portal.runtime is not None
        self._caller = portal.runtime.caller
        self._route = route
        self._waiting: deque[tuple[CallFuture, CallOptions, CurrentCall | None]] = deque()

    @property
    def is_over(self) -> bool:
        """The actor will never be there again, as far as is known here."""
        return self._route.loss is not None and not self._route.may_return

    def make(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture:
        """The call, its arguments pickled. Raises NotPicklable, MessageTooLarge, or why the cluster has ended."""
        return self._route.make(method, args, kwargs)

    def send(self, call: CallFuture, options: CallOptions) -> None:
        """Send it behind what was sent before. Waits while the callee does not keep up (in the loop: never)."""
        if (self._waiting or self.portal.is_behind) and not trio.lowlevel.in_trio_run():
            self.portal.call(self._wait_room)
        self.portal.send(self._send, call, options, current_actor_var.get())

    # In the loop

    def _send(self, call: CallFuture, options: CallOptions, inside: CurrentCall | None) -> None:
        if not self._waiting and (self._caller.is_closed or not self._route.is_full):
            self._route.send(call, options, inside)
            if call.deadline is not None:
                self._caller.spawn(_watch, call)
            return
        self._waiting.append((call, options, inside))
        if len(self._waiting) == 1:
            self._caller.spawn(self._pump)

    async def _pump(self) -> None:
        try:
            while self._waiting:
                if self._route.is_full:
                    await self._route.wait_room()
                call, options, inside = self._waiting[0]
                self._route.send(call, options, inside)
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
    """A thread that waits has no clock in the loop: this one holds the call to its deadline."""
    await call.wait_done()


def line_of(runtime: Runtime | None, way: Callable[[], Route]) -> CallSender:
    """The line to the actor that ``way`` leads to, one for all its handles; ``runtime``: default that of the code."""
    portal = portal_of(runtime or current_runtime())
    route = way() if trio.lowlevel.in_trio_run() else portal.run(way)
    line: CallSender = portal.extras.setdefault(route, CallSender(portal, route))
    return line
