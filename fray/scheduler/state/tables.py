"""The law's tables and the indexes over them: each row is changed in one place, and marked to be saved.

Rows are stored; indexes are not, they are built again by `Tables.load`. Dicts stand where sets would do, so that every
walk has the same order in every run.
"""

from __future__ import annotations

from collections.abc import Iterable

from fray.scheduler.state.jobs import JobTables
from fray.scheduler.state.names import NameTables
from fray.scheduler.state.rows import SchedulerMeta
from fray.scheduler.state.sessions import SessionTables
from fray.scheduler.state.usage import counted_capacity


class Tables(JobTables, SessionTables, NameTables):
    """Rows and indexes, without decisions."""

    def load(self, rows: Iterable[tuple[str, str, object]]) -> None:
        """Fill empty tables from the store, in any order, and build the indexes."""
        found = {(table, key): row for table, key, row in rows}
        law = found.pop(("law", "law"), None)
        if isinstance(law, SchedulerMeta):
            self.meta = law
        for (table, key), row in found.items():
            self.rows(table)[key] = row
        self._sort_tables()
        self._index_all()
        self.shares.rank_all(self.now)

    def _index_all(self) -> None:
        for used in self.usage.values():
            self.shares.open_account(used)
        self.fleet.rebuild()
        for node in self.nodes.values():
            self.index_node(node)
            self.shares.set_node_capacity(node.name, counted_capacity(node))
        for session in sorted(self.sessions.values(), key=lambda s: (s.ended_at, s.session)):
            self.index_session(session)
        for group in self.job_groups.values():
            self._index_group(group)
        for job in sorted(self.jobs.values(), key=lambda j: (j.ended_at or 0.0, j.order)):
            self._index_job(job)
        for group_id in self.job_groups:
            self.enqueue_group_if_complete(group_id)
        for row in sorted(self.reservations.values(), key=lambda row: (row.ended_at or 0.0, row.order)):
            self._index_reservation(row)
        for attempt in self.attempts.values():
            self._index_attempt(attempt)
        self._index_ports()
        for binding in self.registrations.values():
            self._index_registration(binding)
        self.blob_refs = self.count_blob_refs()
