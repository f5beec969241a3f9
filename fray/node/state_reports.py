"""What a node has to report of its attempts: which of them have changed, and the next message about them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from fray.model.ids import AttemptId
from fray.model.messages.node import ObservedState
from fray.model.specs import ObservedAttempt, Phase

REPORT_CHUNK_BYTES = 8 * 1024 * 1024
"""Values in one `Report`, about; the rest follows when there is room."""


class PendingReports:
    """Of one membership; ``held`` is what the node holds, and stays the member's."""

    def __init__(self, held: Mapping[AttemptId, ObservedAttempt]) -> None:
        self._held = held
        self._values: dict[AttemptId, bytes] = {}
        self._changed: dict[AttemptId, None] = {}
        self._gone: dict[AttemptId, None] = {}
        self._full = True
        self._reported_busy: dict[str, str] = {}

    def __repr__(self) -> str:
        return (
            f"<PendingReports: {len(self._changed)} changed, {len(self._gone)} gone{', full report due' * self._full}>"
        )

    @property
    def has_changes(self) -> bool:
        """Something has has_changes that was not reported."""
        return bool(self._changed)

    def report_all(self) -> None:
        """The controller knows nothing of what was told before."""
        self._full = True

    def add_value(self, attempt_id: AttemptId, value: bytes) -> None:
        """The value that goes with the attempt's end."""
        self._values[attempt_id] = value

    def mark_changed(self, attempt_id: AttemptId) -> None:
        """What is observed of it is not what was told."""
        self._changed[attempt_id] = None

    def forget(self, attempt_id: AttemptId) -> None:
        """It is held no longer."""
        self._values.pop(attempt_id, None)
        self._changed.pop(attempt_id, None)
        self._gone[attempt_id] = None

    def has_report(self, busy: Mapping[str, str]) -> bool:
        """Whether there is news; ``busy``: which devices are, and why."""
        return bool(self._full or self._changed or self._gone or self._reported_busy != busy)

    def next(self, busy: dict[str, str]) -> tuple[ObservedState, list[bytes], list[AttemptId]]:
        """The next report, with its values, and whose end it tells."""
        full, self._full = self._full, False
        if full:
            self._changed, self._gone = dict.fromkeys(self._held), {}
        chunk = self._take_chunk()
        later = [self._without_end(self._held[attempt_id]) for attempt_id in self._changed] if full else []
        gone, self._gone = tuple(self._gone), {}
        self._reported_busy = busy
        values = [self._values[one.attempt_id] for one in chunk if one.attempt_id in self._values]
        ended = [one.attempt_id for one in chunk if one.phase is Phase.ENDED]
        return ObservedState(full=full, observed=(*chunk, *later), removed=gone, busy=busy), values, ended

    def _take_chunk(self) -> list[ObservedAttempt]:
        """The next of what has changed, with no more values than fit one message; at least one."""
        chunk, size_bytes = [], 0
        for attempt_id in list(self._changed):
            if size_bytes >= REPORT_CHUNK_BYTES:
                break
            size_bytes += len(self._values.get(attempt_id, b""))
            chunk.append(self._held[attempt_id])
            del self._changed[attempt_id]
        return chunk

    def _without_end(self, observed: ObservedAttempt) -> ObservedAttempt:
        """In the whole set, the end of an attempt whose value follows later is not told yet."""
        ended = observed.phase is Phase.ENDED
        return evolve(observed, phase=Phase.STOPPING, outcome=None) if ended else observed
