"""Changes of a node's attempts that are not reported yet, and the next message about them. Pure.

Busy devices are a complete set in every report, and they are in the report of an attempt's end: a lost message needs no
repair, and the scheduler cannot allocate a device between the end of an attempt and the news that it is still in use.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from fray.model.ids import AttemptId
from fray.model.messages.node import ObservedState
from fray.model.specs import ObservedAttempt, Phase

REPORT_CHUNK_BYTES = 8 * 1024 * 1024
"""Approximate bytes of values in one `ObservedState`; the rest follows when there is room."""


class PendingReports:
    """Pending reports of one membership; ``held`` are the node's attempts, owned by the membership."""

    def __init__(self, held: Mapping[AttemptId, ObservedAttempt]) -> None:
        self._held = held
        self._values: dict[AttemptId, bytes] = {}
        self._changed: dict[AttemptId, None] = {}
        self._gone: dict[AttemptId, None] = {}
        # The first message of an incarnation names all attempts.
        self._full = True
        self._reported_busy: dict[str, str] = {}

    def __repr__(self) -> str:
        return (
            f"<PendingReports: {len(self._changed)} changed, {len(self._gone)} gone{', full report due' * self._full}>"
        )

    @property
    def has_changes(self) -> bool:
        """True if something has changed that was not reported."""
        return bool(self._changed)

    def report_all(self) -> None:
        """Report everything again: the controller has lost its state."""
        self._full = True

    def add_value(self, attempt_id: AttemptId, value: bytes) -> None:
        """Store the value that goes with the attempt's end."""
        self._values[attempt_id] = value

    def mark_changed(self, attempt_id: AttemptId) -> None:
        """Report an attempt with the next message."""
        self._changed[attempt_id] = None

    def forget(self, attempt_id: AttemptId) -> None:
        """Report that an attempt is not held."""
        self._values.pop(attempt_id, None)
        self._changed.pop(attempt_id, None)
        self._gone[attempt_id] = None

    def has_report(self, busy: Mapping[str, str]) -> bool:
        """Return whether there is something to report; ``busy``: devices that are busy, and why."""
        # Compared by content, which works because `ResourceAllocator` replaces the dict with each change and never
        # modifies it.
        return bool(self._full or self._changed or self._gone or self._reported_busy != busy)

    def next(self, busy: dict[str, str]) -> tuple[ObservedState, list[bytes], list[AttemptId]]:
        """Return the next report, its values, and the attempts whose end it reports."""
        full, self._full = self._full, False
        # A full report makes all pending differences obsolete.
        if full:
            self._changed, self._gone = dict.fromkeys(self._held), {}
        chunk = self._take_chunk()
        # An attempt that a full report does not name counts as lost, so those that do not fit are in it, too.
        later = [self._without_end(self._held[attempt_id]) for attempt_id in self._changed] if full else []
        gone, self._gone = tuple(self._gone), {}
        self._reported_busy = busy
        # Kept until the attempt is forgotten: a restarted controller gets them again.
        values = [self._values[one.attempt_id] for one in chunk if one.attempt_id in self._values]
        ended = [one.attempt_id for one in chunk if one.phase is Phase.ENDED]
        return ObservedState(full=full, observed=(*chunk, *later), removed=gone, busy=busy), values, ended

    def _take_chunk(self) -> list[ObservedAttempt]:
        """Return the next changed attempts, with no more values than fit one message; at least one."""
        chunk, size_bytes = [], 0
        for attempt_id in list(self._changed):
            # Checked before the addition, so that a value above the limit is sent as well, alone.
            if size_bytes >= REPORT_CHUNK_BYTES:
                break
            size_bytes += len(self._values.get(attempt_id, b""))
            chunk.append(self._held[attempt_id])
            del self._changed[attempt_id]
        return chunk

    def _without_end(self, observed: ObservedAttempt) -> ObservedAttempt:
        """Return the attempt as stopping if it has ended: in a full report, ends whose values follow later are held
        back."""
        ended = observed.phase is Phase.ENDED
        return evolve(observed, phase=Phase.STOPPING, outcome=None) if ended else observed
