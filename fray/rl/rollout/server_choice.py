"""Requests of a rollout process: sent to the server that the route table chooses, and again when it is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from fray.errors import ActorDied
from fray.rl.core.server_fleet import RouteTable
from fray.rl.inference.requests import Completion, GenerateRequest
from fray.rl.messages import ServerRoute


class RequestGivenUp(Exception):
    """A request was ended here before its server answered it; another server shall get it."""


class ServerChoice:
    """Sends requests to the server that has the fewest requests of this process.

    Args:
        call: sends a request to a server; raises `RequestGivenUp` when ``give_up`` has ended it.
        give_up: ends the requests that a server has.
        ask_max_length: asks a server for the tokens of a prompt and its reply together.
    """

    def __init__(
        self,
        call: Callable[[ServerRoute, GenerateRequest], Awaitable[list[Completion]]],
        give_up: Callable[[ServerRoute], None],
        ask_max_length: Callable[[ServerRoute], Awaitable[int]],
    ) -> None:
        self._call, self._give_up, self._ask_max_length = call, give_up, ask_max_length
        self._max_length = 0
        self._table: RouteTable[ServerRoute] = RouteTable()
        self._changed = trio.Event()

    @property
    def newest_version(self) -> int:
        """Number of updates of the newest weights that a server has; 0 while there is none."""
        return self._table.newest_version

    def set_routes(self, routes: list[ServerRoute]) -> None:
        """Replace the servers to choose from; requests of a server that accepts none any more are sent to another."""
        for route in self._table.replace(routes):
            self._give_up(route)
        self._changed.set()
        self._changed = trio.Event()

    async def send(self, request: GenerateRequest) -> list[Completion]:
        """Return the completions of a request.

        A request is safe to repeat: its tokens have no effect until the episode is delivered. So one whose server is
        lost is sent to another, or to the same when it is back.
        """
        while True:
            route = self._table.choose()
            if route is None:
                await self._changed.wait()
                continue
            self._table.in_flight[route.name] += 1
            try:
                completions = await self._call(route, request)
            except RequestGivenUp:
                continue
            except ActorDied:
                await self._wait_for_other(route)
                continue
            finally:
                self._table.in_flight[route.name] -= 1
            # An update in mode "abort" ends requests; they are sent again to the new weights.
            if not any(one.finish_reason == "abort" for one in completions):
                return completions

    async def max_length(self) -> int:
        """Return the tokens of a prompt and its reply together; the servers of a run have one model."""
        while not self._max_length:
            route = self._table.choose()
            if route is None:
                await self._changed.wait()
                continue
            try:
                self._max_length = await self._ask_max_length(route)
            except ActorDied:
                await self._wait_for_other(route)
        return self._max_length

    async def _wait_for_other(self, lost: ServerRoute) -> None:
        """Wait until another server can be chosen, or the table has changed."""
        self._table.lose(lost)
        if self._table.choose() is None:
            await self._changed.wait()
