"""States of an inference server, as a table, and the choice of the server for a request.

A server answers requests only as HEALTHY. After it has died it holds the weights of its start, so its way back leads
through STALE: there is no edge from DEAD or RESTARTING to HEALTHY.
"""

from __future__ import annotations

from enum import Enum

from attrs import define, field

from fray.rl.core.versions import VersionLine, VersionName


class ServerState(Enum):
    """State of an inference server."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Missed a deadline: gets no new requests; those it has may still be answered."""
    DEAD = "dead"
    """The process has ended, or was suspect for too long. Its messages are ignored."""
    RESTARTING = "restarting"
    STALE = "stale"
    """Answers, without the current weights: gets no requests."""
    RETIRED = "retired"
    """Spent its restart budget; it is replaced elsewhere."""
    LEAVING = "leaving"
    """Is not wanted any more: answers the requests it has, with the weights it has, and is removed."""


class ServerEvent(Enum):
    """Observation of a server, or an action on it."""

    ANSWERED = "answered"
    DEADLINE_MISSED = "deadline missed"
    SUSPECT_TOO_LONG = "suspect too long"
    ENDED = "ended"
    RESTARTED = "restarted"
    READY = "ready"
    LOADED = "loaded"
    TRANSFER_MISSED = "transfer missed"
    BUDGET_SPENT = "budget spent"
    LEAVE = "leave"


_S, _E = ServerState, ServerEvent

TRANSITIONS: dict[tuple[ServerState, ServerEvent], ServerState] = {
    (_S.HEALTHY, _E.DEADLINE_MISSED): _S.SUSPECT,
    (_S.HEALTHY, _E.TRANSFER_MISSED): _S.STALE,
    (_S.HEALTHY, _E.ENDED): _S.DEAD,
    (_S.SUSPECT, _E.ANSWERED): _S.HEALTHY,
    (_S.SUSPECT, _E.TRANSFER_MISSED): _S.STALE,
    (_S.SUSPECT, _E.SUSPECT_TOO_LONG): _S.DEAD,
    (_S.SUSPECT, _E.ENDED): _S.DEAD,
    (_S.STALE, _E.LOADED): _S.HEALTHY,
    (_S.STALE, _E.SUSPECT_TOO_LONG): _S.DEAD,
    (_S.STALE, _E.ENDED): _S.DEAD,
    (_S.DEAD, _E.RESTARTED): _S.RESTARTING,
    (_S.DEAD, _E.BUDGET_SPENT): _S.RETIRED,
    (_S.RESTARTING, _E.READY): _S.STALE,
    (_S.RESTARTING, _E.ENDED): _S.DEAD,
    **{(state, _E.LEAVE): _S.LEAVING for state in _S if state is not _S.LEAVING},
}
"""Every other event leaves the state as it is."""


@define
class ServerRecord:
    """One server, as the run sees it.

    Args:
        name: of the server, the same over restarts.
        restarts_left: restarts that the budget still allows.
    """

    name: str
    restarts_left: int = 3
    state: ServerState = ServerState.RESTARTING
    incarnation: int = 0
    version: VersionName | None = None
    """The version whose weights it has loaded; None after a start."""
    in_flight: int = 0

    def observe(self, event: ServerEvent, incarnation: int, version: VersionName | None = None) -> bool:
        """Apply what was observed of one incarnation. Return whether the state changed.

        Args:
            incarnation: of the server that was observed; anything about an earlier one is ignored.
            version: with LOADED, the version that it loaded.
        """
        if incarnation != self.incarnation:
            return False
        if event is ServerEvent.RESTARTED and self.restarts_left == 0:
            event = ServerEvent.BUDGET_SPENT
        after = TRANSITIONS.get((self.state, event))
        # A server that answers keeps its state, but has the newer weights.
        if event is ServerEvent.LOADED and self.state in (ServerState.HEALTHY, ServerState.SUSPECT, ServerState.STALE):
            self.version = version
        if after is None:
            return False
        if after is ServerState.DEAD:
            self.version, self.in_flight = None, 0
        if after is ServerState.RESTARTING:
            self.incarnation += 1
            self.restarts_left -= 1
        self.state = after
        return True


@define
class BusyShare:
    """Share of time for which servers decoded, over all that was noted since the last `take`."""

    _busy_s: float = 0.0
    _elapsed_s: float = 0.0
    _last: float | None = None

    def add(self, before: tuple[float, float], now: tuple[float, float]) -> None:
        """Note two observations of one incarnation of a server: its clock and its busy time, seconds."""
        self._elapsed_s += now[0] - before[0]
        self._busy_s += now[1] - before[1]

    def take(self) -> float | None:
        """Return the share, 0 to 1; the last one if nothing was noted since then, None if nothing ever was."""
        if self._elapsed_s > 0:
            # A decoding step counts when it ends, and may have begun before the time that is counted.
            self._last = min(max(self._busy_s / self._elapsed_s, 0.0), 1.0)
        self._busy_s = self._elapsed_s = 0.0
        return self._last


@define
class ServerFleet:
    """The servers of a run, and the version that they shall have."""

    servers: dict[str, ServerRecord] = field(factory=dict)

    def choose(self, line: VersionLine) -> ServerRecord | None:
        """Return the server for a request: healthy, with a version of this line, and the fewest requests in flight.

        None if there is none. Equal servers are taken by name.
        """
        healthy = [server for server in self._in(ServerState.HEALTHY) if server.version and line.has(server.version)]
        return min(healthy, key=lambda server: (server.in_flight, server.name), default=None)

    def to_load(self, version: VersionName) -> list[ServerRecord]:
        """Return the servers that shall load a version."""
        answering = self._in(ServerState.HEALTHY, ServerState.SUSPECT)
        # A stale one in any case: it may have the version, but has not said so since it missed a transfer.
        return [*self._in(ServerState.STALE), *(server for server in answering if server.version != version)]

    def has_loaded(self, version: VersionName) -> bool:
        """Return whether no server gets requests by another version, and one by this.

        One that is suspect is not waited for; `end_transfer` makes it stale.
        """
        answering = self._in(ServerState.HEALTHY)
        return bool(answering) and all(server.version == version for server in answering)

    def end_transfer(self, version: VersionName) -> None:
        """Note that the servers have a version: those without it get no requests until they have it."""
        for server in self._in(ServerState.HEALTHY, ServerState.SUSPECT):
            if server.version != version:
                server.observe(ServerEvent.TRANSFER_MISSED, server.incarnation)

    def _in(self, *states: ServerState) -> list[ServerRecord]:
        return [server for server in self.servers.values() if server.state in states]
