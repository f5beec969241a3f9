"""Counts of placements and ends since the controller's start, and of what lives now, for monitoring.

What happened is counted as it is saved, so that a request reads no history.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from fray.model.messages.history import AttemptRecord
from fray.model.messages.usage import ClusterCounts
from fray.model.reservations import ReservationState
from fray.scheduler.effects import Effect, Event, EventRecorded, HistoryRecorded
from fray.scheduler.state.state import State

BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0)
NAMES_LIMIT = 1_000
"""Users, and namespaces, that are counted by name; the others are one, with an empty name."""


class JobCounts:
    """Counters of one run of the controller, in its memory.

    Args:
        state: of the scheduler, in which the jobs of the effects are looked up.
    """

    CONCERNS = (EventRecorded, HistoryRecorded)
    """Effects that are counted."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._ended_jobs: Counter[str] = Counter()
        self._ended_attempts: Counter[str] = Counter()
        self._waits = [0] * (len(BOUNDS_S) + 1)
        self._waited_s = 0.0

    def observe(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """Count the effects of a batch that is saved."""
        for effect in effects:
            if isinstance(effect, HistoryRecorded):
                if isinstance(effect.record, AttemptRecord):
                    self._ended_attempts[effect.record.cause] += 1
            elif isinstance(effect, EventRecorded) and effect.event.job in self._state.jobs:
                self._count_event(effect.event.job, effect.event.what, effect.event.time)

    def _count_event(self, job_id: str, what: str, at: float) -> None:
        job = self._state.jobs[job_id]
        if what == "placed":
            waited_s = max(0.0, at - job.queued_at)
            self._waits[bisect_left(BOUNDS_S, waited_s)] += 1
            self._waited_s += waited_s
        elif what == "ended" and job.outcome is not None:
            self._ended_jobs[job.outcome.cause.value] += 1

    def counts(self, now: float) -> ClusterCounts:
        """Return the counts; walks over the queue and over living reservations."""
        state = self._state
        living = state.living_jobs.items()
        longest = min((each.waiting_since for each in state.queue.applicants.values()), default=now)
        rows = [row for row in state.reservations.values() if row.phase is not ReservationState.ENDED]
        return ClusterCounts(
            users=_by_name(((user, job_state.value, number) for (user, _, job_state), number in living)),
            namespaces=_by_name(((space, job_state.value, number) for (_, space, job_state), number in living)),
            ended_jobs=dict(self._ended_jobs),
            ended_attempts=dict(self._ended_attempts),
            wait_bounds_s=BOUNDS_S,
            wait_counts=tuple(self._waits),
            waited_s=self._waited_s,
            longest_wait_s=max(0.0, now - longest),
            reservations=dict(Counter(row.phase.value for row in rows)),
            reserved_units={
                "minimum": sum(row.spec.min_units for row in rows if not row.is_closed),
                "held": sum(len(row.units) for row in rows),
            },
        )


def _by_name(found: Iterable[tuple[str, str, int]]) -> dict[str, dict[str, int]]:
    """Return numbers by name and state; those of the names with the fewest jobs together, if there are many."""
    names: dict[str, Counter[str]] = {}
    for name, job_state, number in found:
        names.setdefault(name, Counter())[job_state] += number
    ordered = sorted(names, key=lambda name: (-names[name].total(), name))
    for name in ordered[NAMES_LIMIT:]:
        names.setdefault("", Counter()).update(names.pop(name))
    return {name: dict(numbers) for name, numbers in names.items()}
