"""States of an inference server, as a table.

A server answers requests only as HEALTHY. After it has died it holds the weights of its start, so its way back leads
through STALE: there is no edge from DEAD or RESTARTING to HEALTHY. `fray.rl.core.server_fleet` has what follows from
the states of all servers of a run.
"""

from __future__ import annotations

from enum import Enum

from attrs import define

from fray.rl.core.versions import VersionName


class ServerState(Enum):
    """State of an inference server."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Missed a deadline: gets no new requests; those it has may still be answered."""
    DEAD = "dead"
    """The process has ended, or missed deadlines for too long. Its messages are ignored."""
    RESTARTING = "restarting"
    STALE = "stale"
    """Answers, without the current weights: gets no requests."""
    RETIRED = "retired"
    """Is not started again; another server replaces it."""
    LEAVING = "leaving"
    """Is not wanted any more: answers the requests it has, with the weights it has, and is removed."""


class ServerEvent(Enum):
    """Observation of a server, or an action on it."""

    ANSWERED = "answered"
    DEADLINE_MISSED = "deadline missed"
    """Gave no answer in time."""
    SUSPECT_TOO_LONG = "suspect too long"
    """Has missed every deadline since its patience began: `ServerRecord.observe` makes it of the last one."""
    ENDED = "ended"
    """The process has ended."""
    RESTARTED = "restarted"
    """Is started again by its supervisor."""
    READY = "ready"
    LOADED = "loaded"
    TRANSFER_MISSED = "transfer missed"
    """Has not loaded weights in time, or was suspect when the others had them."""
    LINE_LOST = "line lost"
    """Has weights of a trainer that was lost, which another one has replaced."""
    BUDGET_SPENT = "budget spent"
    """The supervisor does not start it again, or it must be replaced: it was taken for dead."""
    LEAVE = "leave"


_S, _E = ServerState, ServerEvent

TRANSITIONS: dict[tuple[ServerState, ServerEvent], ServerState] = {
    (_S.HEALTHY, _E.DEADLINE_MISSED): _S.SUSPECT,
    (_S.HEALTHY, _E.TRANSFER_MISSED): _S.STALE,
    (_S.HEALTHY, _E.LINE_LOST): _S.STALE,
    (_S.HEALTHY, _E.ENDED): _S.DEAD,
    (_S.SUSPECT, _E.ANSWERED): _S.HEALTHY,
    (_S.SUSPECT, _E.TRANSFER_MISSED): _S.STALE,
    (_S.SUSPECT, _E.LINE_LOST): _S.STALE,
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

DEADLINES = {
    *((state, event) for state in (_S.HEALTHY, _S.SUSPECT) for event in (_E.DEADLINE_MISSED, _E.TRANSFER_MISSED)),
    (_S.STALE, _E.TRANSFER_MISSED),
}
"""Deadlines by which the patience with a server is counted. A stale one has to load weights, and nothing else."""


@define
class ServerRecord:
    """One server, as the run sees it.

    Args:
        name: of the server, the same over restarts and replacements.
        suspect_s: seconds for which it may miss deadlines before it is taken for dead.
        stale_s: the same for transfers of weights; longer, as it may still load its model.
    """

    name: str
    suspect_s: float = 60.0
    stale_s: float = 600.0
    state: ServerState = ServerState.RESTARTING
    incarnation: int = 0
    version: VersionName | None = None
    """The version whose weights it has loaded; None after a start."""
    starts: int = 0
    """Number of times that it was ready."""
    late_since: float | None = None
    """Time of the first of the deadlines that it missed since it last kept one."""
    is_overdue: bool = False
    """True for one that was taken for dead while its process may live: it is to be ended."""

    def observe(
        self, event: ServerEvent, incarnation: int, version: VersionName | None = None, *, now: float = 0.0
    ) -> bool:
        """Apply what was observed of one incarnation. Return whether the state changed.

        Args:
            incarnation: of the server that was observed; anything about an earlier one is ignored.
            version: with LOADED, the version that it loaded.
            now: with DEADLINE_MISSED and TRANSFER_MISSED, the time by the observer's clock, seconds.
        """
        if incarnation != self.incarnation:
            return False
        if (self.state, event) in DEADLINES:
            event = self._missed(event, now)
        after = TRANSITIONS.get((self.state, event))
        # A server that answers keeps its state, but has the newer weights.
        if event is ServerEvent.LOADED and self.state in (ServerState.HEALTHY, ServerState.SUSPECT, ServerState.STALE):
            self.version = version
        if after is None:
            return False
        if after in (ServerState.HEALTHY, ServerState.DEAD):
            self.late_since = None
        if after is ServerState.DEAD:
            self.version, self.is_overdue = None, event is ServerEvent.SUSPECT_TOO_LONG
        if event is ServerEvent.READY:
            self.starts += 1
        if after is ServerState.RESTARTING:
            self.incarnation += 1
        self.state = after
        return True

    def _missed(self, event: ServerEvent, now: float) -> ServerEvent:
        """Note that a deadline was missed; return what that comes to."""
        patience_s = self.stale_s if self.state is ServerState.STALE else self.suspect_s
        if self.late_since is None:
            self.late_since = now
        return ServerEvent.SUSPECT_TOO_LONG if now - self.late_since >= patience_s else event


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
