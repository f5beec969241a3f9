"""All outgoing calls of one session: its routes, and one connection per actor host. See `fray.runtime.calls.route`."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import trio

from fray.errors import ChannelClosed, FrayError
from fray.model.ids import SessionId, split_actor_id
from fray.model.messages.calls import ActorNumber, LookUpActor
from fray.model.messages.client import ActorEndpoint
from fray.net.transport import Network
from fray.runtime.calls.flow_control import BufferBudget
from fray.runtime.calls.host_connection import HostConnection
from fray.runtime.calls.route import NameDirectory, Route

# A directory reports deaths. Without one, only the dialer's patience ends the calls to an address that has vanished.
NO_DIRECTORY_GIVE_UP_S = 30.0
"""Seconds that an endpoint which no directory reports on may be unreachable."""


class Caller:
    """All calls of one session. ``run`` must be running (in a nursery of the owner) for calls to go out."""

    def __init__(
        self, network: Network, directory: NameDirectory | None, *, session: SessionId, rng: random.Random
    ) -> None:
        self.network = network
        self.directory = directory
        self.session = session
        self.rng = rng
        self.buffer_budget = BufferBudget()
        self.closed: FrayError | None = None
        """Error of every call once the session has ended."""
        self._connection_numbers = count(1)
        self._marks = count(1)
        # Weak: a session that looks up many short-lived actors must not keep a route and a watch in the directory for
        # each.
        self._routes: WeakValueDictionary[str | tuple[str, int], Route] = WeakValueDictionary()
        """Kept alive by handles, by calls, by the directory while the actor may live, and by the connection in use."""
        self._connections: dict[tuple[str | tuple[str, ...], bool], HostConnection] = {}
        self._nursery: trio.Nursery | None = None
        self._early: list[tuple[Callable[..., Coroutine[Any, Any, None]], tuple[Any, ...]]] = []
        """Tasks to start once `run` runs."""
        self._scope = trio.CancelScope()

    # Lifetime --------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the connections until cancelled; they say goodbye then (at most 1 s), and open calls fail."""
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    # Calls may be made before the nursery runs: a handle is usable as soon as it exists.
                    for task, args in self._early:
                        self._nursery.start_soon(task, *args)
                    self._early = []
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            self._nursery = None
            self._fail_all()

    def end(self, error: FrayError) -> None:
        """Answer every open and every later call with ``error``; then say goodbye to the hosts."""
        # The first reason wins: it is the cause, and what follows it is clean-up.
        self.closed = self.closed or error
        # Before the scope is cancelled, so that tasks see this error and not the end of their connection.
        self._fail_all()
        self._scope.cancel()

    def _fail_all(self) -> None:
        self.closed = self.closed or ChannelClosed("the caller has ended", reason="caller ended")
        # Over copies: failing a call runs callbacks, which may end connections and drop routes.
        for connection in list(self._connections.values()):
            connection.fail_all(self.closed)
        for route in list(self._routes.values()):
            route.close()
            route.fail_all(self.closed)

    def spawn(self, task: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run a task as long as this caller lives."""
        if self._nursery is not None:
            self._nursery.start_soon(task, *args)
        elif self.closed is None:
            self._early.append((task, args))

    @property
    def is_closed(self) -> bool:
        """Flag: the caller has ended, and calls fail at once."""
        return self.closed is not None

    # Routes ----------------------------------------------------------------------------------------------------------

    def route(self, key: str, label: str = "") -> Route:
        """Return the route to the actor under a directory key ``actor:{actor_id}``; the same one each time."""
        route = self._routes.get(key)
        if route is None:
            home, number = split_actor_id(key)
            route = self._routes[key] = Route(self, label or key.partition(":")[2], home, number)
            if self.directory is not None:
                route.follow(self.directory)
        return route

    def route_to(self, endpoint: ActorEndpoint) -> Route:
        """Return the route to this very incarnation of an actor: when that is gone, so is the route."""
        key = (endpoint.incarnation, endpoint.number)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = Route(self, endpoint.name or endpoint.actor_id)
            route.endpoint = endpoint
        return route

    def forget(self, route: Route) -> None:
        """Drop a route that is not needed any longer; calls under way continue."""
        route.close()
        binding = route.binding
        if binding is not None and not binding.connection.has_calls(binding):
            route.binding = None
            binding.connection.release(binding)
        # The keys are found by identity: a route is entered under a directory key, or under an incarnation and a
        # number.
        for key in [key for key, known in list(self._routes.items()) if known is route]:
            del self._routes[key]

    def next_mark(self) -> str:
        """Return a new id for a call made inside another call."""
        return f"{self.session}/{next(self._marks):x}"

    # Hosts -----------------------------------------------------------------------------------------------------------

    def connect(self, endpoint: ActorEndpoint, *, keyed: bool) -> HostConnection:
        """Return the connection to the endpoint's host; open one if there is none. ``keyed``: it has a directory."""
        # The incarnation identifies a process whatever address it is dialed at, so all its actors share one connection.
        # A host whose incarnation is not known yet (`bind`) can only be identified by its addresses.
        # With and without a directory connections differ in when they give up, so the two do not share.
        key = (endpoint.incarnation or (*endpoint.addresses, endpoint.key), keyed)
        connection = self._connections.get(key)
        if connection is None or connection.ended is not None:
            give_up_s = None if keyed else NO_DIRECTORY_GIVE_UP_S
            # A new name for each connection: numbers of calls begin at 1 again, and the host must not take them for
            # calls of the connection before.
            name = f"{self.session}/{next(self._connection_numbers)}"
            connection = self._connections[key] = HostConnection(self, name, endpoint, give_up_s)
            self.spawn(connection.run)
        return connection

    def on_connection_end(self, connection: HostConnection) -> None:
        """Forget a connection that has ended, or is about to: the next call opens another."""
        for key in [key for key, known in self._connections.items() if known is connection]:
            del self._connections[key]

    async def bind(
        self, addresses: Sequence[str], name: str, *, key: str = "", timeout_s: float | None = None
    ) -> ActorEndpoint:
        """Ask the host at ``addresses`` for the actor ``name``, without a directory.

        Raises:
            NoSuchActor: it has none of this name.
            ConnectionFailed: it cannot be reached, or refuses the key.
        """
        endpoint = ActorEndpoint(actor_id="", name=name, job_id="", namespace="", addresses=tuple(addresses), key=key)
        connection = self.connect(endpoint, keyed=False)
        bound = await connection.request(LookUpActor(name=name), timeout_s=timeout_s)
        assert isinstance(bound, ActorNumber)
        # With the incarnation known, calls through the returned endpoint use this connection instead of a second one.
        self._connections.setdefault((bound.incarnation, False), connection)
        return ActorEndpoint(
            actor_id=bound.actor_id,
            name=name,
            job_id="",
            namespace="",
            incarnation=bound.incarnation,
            number=bound.number,
            addresses=tuple(addresses),
            key=key,
        )
