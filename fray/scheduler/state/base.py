"""The law's rows: each is changed in one place, marked to be saved, and loaded again."""

from __future__ import annotations

from typing import Any

from fray.model.ids import ActorId, AttemptId, JobId, NodeName, SessionId
from fray.model.reservations import ReservationId
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.queue.fair_share import Usage
from fray.scheduler.state.machine_groups import MachineGroupIndex
from fray.scheduler.state.reservation_rows import ReservationRow
from fray.scheduler.state.rows import (
    ActorRegistration,
    ActorTombstone,
    AttemptRow,
    CapacityClaim,
    JobGroupRow,
    JobRow,
    JobTombstone,
    Node,
    SchedulerConfig,
    SchedulerMeta,
    Session,
)
from fray.scheduler.timers import Timers


class TableBase:
    """Rows, without indexes beyond those that every table needs."""

    def __init__(self, now: float = 0.0, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self.meta = SchedulerMeta(now=now)
        self.jobs: dict[JobId, JobRow] = {}
        self.attempts: dict[AttemptId, AttemptRow] = {}
        self.nodes: dict[NodeName, Node] = {}
        self.sessions: dict[SessionId, Session] = {}
        self.registrations: dict[ActorId, ActorRegistration] = {}
        self.actor_tombstones: dict[ActorId, ActorTombstone] = {}
        self.job_tombstones: dict[JobId, JobTombstone] = {}
        """Jobs of which only a line is kept, oldest end first."""
        self.reservations: dict[ReservationId, ReservationRow] = {}
        self.job_groups: dict[str, JobGroupRow] = {}
        self.claims: dict[str, CapacityClaim] = {}
        """By applicant."""
        self.usage: dict[str, Usage] = {}
        """What tenants had, by key (see `fairness`)."""
        self._dirty: dict[tuple[str, str], None] = {}
        self.fleet = MachineGroupIndex(self.touch)
        """Machines asked of providers."""
        self._make_indexes()

    def _make_indexes(self) -> None:
        """Empty ones; each table adds its own to those below it."""
        self.pool = MachinePool()
        self.timers = Timers()
        """By node, ``drain``: when its drain waits no longer; ``probe``: when it is asked how it is. By job, ``wait``:
        when it has waited for machines as long as it may."""
        self.on_node: dict[NodeName, dict[AttemptId, None]] = {}
        """Living attempts."""

    # Time and order

    @property
    def now(self) -> float:
        """The law's time, seconds since the epoch; never decreases."""
        return self.meta.now

    def next_order(self) -> int:
        self.meta.last_order += 1
        return self.meta.last_order

    # Saving

    def touch(self, table: str, key: str) -> None:
        """The row has changed, or is gone."""
        self._dirty[(table, key)] = None

    def rows(self, table: str) -> dict[str, Any]:
        tables: dict[str, dict[str, Any]] = {
            "job": self.jobs,
            "job_group": self.job_groups,
            "attempt": self.attempts,
            "node": self.nodes,
            "session": self.sessions,
            "name": self.registrations,
            "grave": self.actor_tombstones,
            "past": self.job_tombstones,
            "usage": self.usage,
            "unit": self.fleet.units,
            "fleet_group": self.fleet.groups,
            "reservation": self.reservations,
            "claim": self.claims,
            "law": {"law": self.meta},
        }
        return tables[table]

    def take_dirty(self) -> tuple[list[tuple[str, str, object]], list[tuple[str, str]]]:
        """Rows to write ``(table, key, row)`` and to delete ``(table, key)`` since the last call.

        Rows are the living objects: turn them into text before the next step.
        """
        upserts: list[tuple[str, str, object]] = []
        deletes: list[tuple[str, str]] = []
        if self._dirty:
            self.touch("law", "law")
        for table, key in self._dirty:
            row = self.rows(table).get(key)
            if row is None:
                deletes.append((table, key))
            else:
                upserts.append((table, key, row))
        self._dirty = {}
        return upserts, deletes

    def _sort_tables(self) -> None:
        self.jobs = dict(sorted(self.jobs.items(), key=lambda item: item[1].order))
        self.job_groups = dict(sorted(self.job_groups.items(), key=lambda item: item[1].order))
        self.attempts = dict(sorted(self.attempts.items(), key=lambda item: self._order_of_attempt(item[1])))
        self.nodes = dict(sorted(self.nodes.items()))
        self.sessions = dict(sorted(self.sessions.items()))
        self.registrations = dict(sorted(self.registrations.items(), key=lambda item: item[1].order))
        self.actor_tombstones = dict(sorted(self.actor_tombstones.items(), key=lambda item: item[1].order))
        self.job_tombstones = dict(
            sorted(self.job_tombstones.items(), key=lambda item: (item[1].ended_at, item[1].order))
        )
        self.usage = dict(sorted(self.usage.items()))
        self.reservations = dict(sorted(self.reservations.items(), key=lambda item: item[1].order))
        self.claims = dict(sorted(self.claims.items(), key=lambda item: (item[1].made_at, item[0])))

    def _order_of_attempt(self, attempt: AttemptRow) -> tuple[int, int, int]:
        job = self.jobs.get(attempt.job_id)
        return (job.order if job else 0), attempt.generation, attempt.member


def discard(index: dict[Any, dict[Any, None]], key: object, item: object) -> None:
    """Remove ``item`` under ``key``, and the key with the last item."""
    items = index.get(key)
    if items is not None:
        items.pop(item, None)
        if not items:
            del index[key]
