"""The inference servers of a run: which of them get requests and weights, which are replaced, and which leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, islice
from typing import Generic, Protocol, TypeVar

from attrs import define, field, frozen

from fray.rl.core.server_states import ServerEvent, ServerRecord, ServerState
from fray.rl.core.versions import VersionName

RESTARTS, RESTART_PERIOD_S = 5, 600.0
"""Restarts of a server within the period, before it is retired and replaced. Its supervisor counts them."""
REPLACEMENTS, REPLACEMENT_PERIOD_S = 3, 3_600.0
"""Replacements of one server within the period, before the run fails."""


class AnyRoute(Protocol):
    """Server that answers requests, as those who send them know it."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> VersionName: ...
    @property
    def accepts(self) -> bool: ...
    @property
    def leaves(self) -> bool: ...


@frozen
class RequestRoute:
    """Server that answers requests.

    Attributes:
        accepts: False: it gets no requests, and those it has go to another, if there is one.
        leaves: True: it gets no requests, and answers those it has.
    """

    name: str
    version: VersionName
    accepts: bool = True
    leaves: bool = False


R = TypeVar("R", bound=AnyRoute)


@define
class RouteTable(Generic[R]):
    """Servers to which one sender may send requests, and how many each of them has of it."""

    routes: list[R] = field(factory=list)
    in_flight: Counter[str] = field(factory=Counter)
    """Requests of each server."""

    def replace(self, routes: Iterable[R]) -> list[R]:
        """Replace the servers; return those whose requests are ended here and sent to others.

        With no server that accepts them, a silent one may still answer.
        """
        self.routes = list(routes)
        if not any(route.accepts for route in self.routes):
            return []
        return [route for route in self.routes if not (route.accepts or route.leaves)]

    def choose(self) -> R | None:
        """Return the server that accepts requests and has the fewest of this sender; None if there is none.

        Equal servers are taken by name.
        """
        accepting = [route for route in self.routes if route.accepts]
        return min(accepting, key=lambda route: (self.in_flight[route.name], route.name), default=None)

    def lose(self, route: R) -> None:
        """Leave out a server that was found dead, until the table is replaced."""
        self.routes = [each for each in self.routes if each is not route]

    @property
    def newest_version(self) -> int:
        """Number of updates of the newest weights that a server has; 0 while there is none."""
        return max((route.version.number for route in self.routes), default=0)


@define
class ServerFleet:
    """The servers of a run, and the version that they shall have.

    Args:
        servers: by name.
        least: servers without which no task is given out.
        freezes: whether a server that has not loaded the target gets no new requests.
        is_endless: whether servers are replaced without a limit.
        suspect_s: see `ServerRecord`.
        stale_s: see `ServerRecord`.
    """

    servers: dict[str, ServerRecord] = field(factory=dict)
    least: int = 1
    freezes: bool = False
    is_endless: bool = False
    suspect_s: float = 60.0
    stale_s: float = 600.0
    target: VersionName | None = None
    """Version that the servers shall have; None until it is known."""
    _replaced_at: dict[str, list[float]] = field(factory=dict)
    """Times of the replacements of each server within the last period."""

    # Requests

    def routes(self, *, is_published: bool) -> list[RequestRoute]:
        """Return the servers that answer requests.

        Args:
            is_published: whether servers can load the target now: nothing waits for weights before.
        """
        answering = self._in(ServerState.HEALTHY, ServerState.SUSPECT, ServerState.LEAVING)
        return [self._route(one, one.version, is_published) for one in answering if one.version is not None]

    def _route(self, server: ServerRecord, version: VersionName, is_published: bool) -> RequestRoute:
        is_healthy = server.state is ServerState.HEALTHY
        is_frozen = self.freezes and is_published and version != self.target
        is_leaving = server.state is ServerState.LEAVING or (is_healthy and is_frozen)
        return RequestRoute(server.name, version, is_healthy and not is_frozen, is_leaving)

    def missing_text(self) -> str:
        """Return which servers are waited for; empty if enough of them answer."""
        healthy = len(self._in(ServerState.HEALTHY))
        if healthy >= self.least:
            return ""
        others = ", ".join(
            f"{one.name} is {one.state.value}" for one in self.servers.values() if one.state is not ServerState.HEALTHY
        )
        return f"the run waits for servers: {healthy} of at least {self.least} answer ({others})"

    # Weights

    def aim(self, version: VersionName) -> bool:
        """Let the servers have a version; return whether that may change their routes.

        Servers with weights of a trainer that was lost get no requests until they have it.
        """
        before, self.target = self.target, version
        if before is None or before.incarnation >= version.incarnation:
            return self.freezes
        for server in self._in(ServerState.HEALTHY, ServerState.SUSPECT):
            if server.version is not None and server.version.incarnation < version.incarnation:
                server.observe(ServerEvent.LINE_LOST, server.incarnation)
        return True

    def to_load(self, version: VersionName) -> list[ServerRecord]:
        """Return the servers that shall load a version."""
        answering = self._in(ServerState.HEALTHY, ServerState.SUSPECT)
        # A stale one in any case: it may have the version, but has not said so since it missed a transfer.
        return [*self._in(ServerState.STALE), *(server for server in answering if server.version != version)]

    def note_loaded(self, server: ServerRecord, incarnation: int, version: VersionName) -> None:
        """Note that a server has loaded a version. One that is stale answers only with the version of now."""
        if server.state is not ServerState.STALE or version == self.target:
            server.observe(ServerEvent.LOADED, incarnation, version)

    def has_loaded(self, version: VersionName) -> bool:
        """Return whether no server gets requests by another version, and one by this.

        One that is suspect is not waited for; `end_transfer` makes it stale.
        """
        answering = self._in(ServerState.HEALTHY)
        return bool(answering) and all(server.version == version for server in answering)

    def end_transfer(self, version: VersionName, now: float) -> None:
        """Note that the servers have a version: those without it get no requests until they have it."""
        for server in self._in(ServerState.HEALTHY, ServerState.SUSPECT):
            if server.version != version:
                server.observe(ServerEvent.TRANSFER_MISSED, server.incarnation, now=now)

    # Number

    @property
    def staying(self) -> list[ServerRecord]:
        """The servers that do not leave."""
        return [one for one in self.servers.values() if one.state is not ServerState.LEAVING]

    def add(self, number: int) -> list[str]:
        """Add servers, which are to be created; return their names."""
        free = (index for index in count() if f"server-{index}" not in self.servers)
        return self.add_numbered(islice(free, number))

    def add_numbered(self, indices: Iterable[int]) -> list[str]:
        """Add servers that exist already, by their numbers; return their names."""
        names = [f"server-{index}" for index in indices]
        for name in names:
            self.servers[name] = ServerRecord(name, self.suspect_s, self.stale_s)
        return names

    def let_leave(self, number: int) -> list[ServerRecord]:
        """Let servers leave: they are to be ended when their requests have; return them.

        First those that answer no requests now; of equal ones the last by number.
        """
        order = sorted(self.staying, key=lambda one: (one.state is ServerState.HEALTHY, -server_index(one.name)))
        leaving = order[:number]
        for server in leaving:
            server.observe(ServerEvent.LEAVE, server.incarnation)
        return leaving

    def remove(self, name: str) -> None:
        """Remove a server that has left."""
        del self.servers[name]
        self._replaced_at.pop(name, None)

    def replace(self, name: str, now: float) -> ServerRecord | None:
        """Return the record of the server that replaces a retired one, which is to be created.

        None if the run must end: the server was never ready, so another would not be either, or it was replaced as
        often as it may be.
        """
        old = self.servers[name]
        recent = [at for at in self._replaced_at.get(name, ()) if now - at < REPLACEMENT_PERIOD_S]
        if not old.starts or (len(recent) >= REPLACEMENTS and not self.is_endless):
            return None
        self._replaced_at[name] = [*recent, now]
        self.servers[name] = ServerRecord(name, self.suspect_s, self.stale_s, incarnation=old.incarnation + 1)
        return self.servers[name]

    def _in(self, *states: ServerState) -> list[ServerRecord]:
        return [server for server in self.servers.values() if server.state in states]


def server_index(name: str) -> int:
    """Return the number of a server in its name."""
    return int(name.rpartition("-")[2])


def names_in_order(servers: Sequence[ServerRecord]) -> list[str]:
    """Return the names of servers by their numbers."""
    return sorted((one.name for one in servers), key=server_index)
