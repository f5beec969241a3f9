"""Tables of the past in the store: ended attempts and reservations, and machines that are gone.

Rows are added, and never changed. They are written in the transaction that decides the end, so each end has exactly one
row, also over restarts of the controller. They are not loaded at its start. The oldest rows are deleted when there are
too many.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from attrs import fields

from fray.model.messages.history import AttemptRecord, NodeRecord, RecordedReservation
from fray.model.reservations import ReservationId
from fray.model.text import encodable

HISTORY_LIMIT = 200_000
"""Ended attempts on record, as many machines that are gone, and as many ended reservations."""
WINDOW = 250
"""Rows that are looked at for one page, which takes the loop about 3 ms: it serves others between two pages."""
NODES_LIMIT = 1_000
"""Machines in one answer."""

HistoryRecord: TypeAlias = AttemptRecord | NodeRecord | RecordedReservation

_TRIM = 1_000
_ATTEMPT = tuple(each.name for each in fields(AttemptRecord))
_NODE = tuple(each.name for each in fields(NodeRecord))
_RESERVATION = tuple(each.name for each in fields(RecordedReservation))
SCHEMA = (
    f"CREATE TABLE IF NOT EXISTS past_attempts (id INTEGER PRIMARY KEY, {', '.join(_ATTEMPT)})",
    f"CREATE TABLE IF NOT EXISTS past_nodes (id INTEGER PRIMARY KEY, {', '.join(_NODE)}, UNIQUE (node, incarnation))",
    f"CREATE TABLE IF NOT EXISTS past_reservations (id INTEGER PRIMARY KEY, {', '.join(_RESERVATION)})",
    "CREATE INDEX IF NOT EXISTS past_reservations_by_id ON past_reservations (reservation_id)",
)
"""Statements that add the tables to a store, which an earlier version may have made without them."""


class Database(Protocol):
    """Connection to SQLite, of which only these methods are used."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Any: ...
    def executemany(self, sql: str, parameters: Any, /) -> Any: ...


class HistoryTables:
    """Reader and writer of the tables.

    Args:
        select: runs a query and returns its rows.
        limit: rows of each table; the oldest are deleted.
    """

    def __init__(self, db: Database, select: Callable[..., list[Any]], limit: int = HISTORY_LIMIT) -> None:
        self._db, self._select = db, select
        self.limit = limit
        for statement in SCHEMA:
            db.execute(statement)

    def __repr__(self) -> str:
        return f"<HistoryTables of at most {self.limit} rows each>"

    def add(self, records: Sequence[HistoryRecord]) -> None:
        """Add records; the caller has begun a transaction."""
        attempts = [_row(record, _ATTEMPT) for record in records if isinstance(record, AttemptRecord)]
        append_rows(self._db, "past_attempts", _ATTEMPT, attempts, self.limit)
        ended = [_row(record, _RESERVATION) for record in records if isinstance(record, RecordedReservation)]
        append_rows(self._db, "past_reservations", _RESERVATION, ended, self.limit)
        nodes = [_row(record, _NODE) for record in records if isinstance(record, NodeRecord)]
        if nodes:
            marks = ", ".join("?" * len(_NODE))
            # A machine that died and stays listed, because it is cordoned, is dropped later: its first end counts.
            insert = f"INSERT INTO past_nodes ({', '.join(_NODE)}) VALUES ({marks}) ON CONFLICT DO NOTHING"
            self._db.executemany(insert, nodes)
            self._db.execute("DELETE FROM past_nodes WHERE id <= (SELECT max(id) FROM past_nodes) - ?", (self.limit,))

    def attempts(self, after: int, since: float, **equal: str) -> tuple[tuple[AttemptRecord, ...], int]:
        """Return attempts among the next `WINDOW` rows, and the row after which to continue; 0 if these were the last.

        Args:
            after: row of the page before; 0: the first row that was recorded since ``since``.
            equal: columns and their values.
        """
        start = after or self.first_since("past_attempts", "recorded_at", since) - 1
        rows, last = self._window("past_attempts", _ATTEMPT, start, equal)
        return tuple(AttemptRecord(**row) for row in rows), last

    def reservations(self, after: int, since: float) -> tuple[tuple[RecordedReservation, ...], int]:
        """Return ended reservations in the same way; 0 as ``after``: from the first that has ended since ``since``."""
        start = after or self.first_since("past_reservations", "ended_at", since) - 1
        rows, last = self._window("past_reservations", _RESERVATION, start, {})
        return tuple(map(_reservation_record, rows)), last

    def reservation(self, reservation_id: ReservationId) -> RecordedReservation | None:
        """Return the latest ended reservation of this id; None: there is none on record."""
        rows = self._select(
            f"SELECT {', '.join(_RESERVATION)} FROM past_reservations WHERE reservation_id = ? "
            "ORDER BY id DESC LIMIT 1",
            encodable(reservation_id),
        )
        return _reservation_record(dict(zip(_RESERVATION, rows[0], strict=True))) if rows else None

    def _window(
        self, table: str, columns: Sequence[str], start: int, equal: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]], int]:
        """Return those of the next `WINDOW` rows that have these values, and the row after which to continue."""
        wheres = "".join(f" AND {column} = ?" for column in equal)
        rows = self._select(
            f"SELECT {', '.join(columns)} FROM {table} WHERE id > ? AND id <= ?{wheres} ORDER BY id",
            *(start, start + WINDOW, *equal.values()),
        )
        end = self._select(f"SELECT max(id) FROM {table}")[0][0] or 0
        found = [dict(zip(columns, row, strict=True)) for row in rows]
        return found, 0 if start + WINDOW >= end else start + WINDOW

    def sum_rows(self, since: float) -> tuple[int, int]:
        """Return the rows of attempts whose ends were decided since then: after the first number, up to the second."""
        end = self._select("SELECT max(id) FROM past_attempts")[0][0] or 0
        return self.first_since("past_attempts", "recorded_at", since) - 1, end

    def nodes(self, since: float = 0.0, node: str = "") -> tuple[NodeRecord, ...]:
        """Return the newest machines that are gone since then, oldest first."""
        rows = self._select(
            f"SELECT {', '.join(_NODE)} FROM past_nodes WHERE gone_at >= ? AND (? = '' OR node = ?) "
            "ORDER BY id DESC LIMIT ?",
            *(since, node, node, NODES_LIMIT),
        )
        return tuple(_node_record(dict(zip(_NODE, row, strict=True))) for row in reversed(rows))

    def first_since(self, table: str, column: str, since: float) -> int:
        """Return the id of the first row of which ``column``, which never decreases, is ``since`` or more."""
        return first_since(self._select, table, column, since)


def first_since(select: Callable[..., list[Any]], table: str, column: str, since: float) -> int:
    """Return the id of the first row of which ``column``, which never decreases, is ``since`` or more."""
    # By bisection: an index over the times would cost each insertion something.
    # Two queries in one: of min and max together SQLite would read the whole table.
    ends = f"SELECT (SELECT min(id) FROM {table}), (SELECT max(id) FROM {table})"
    first, last = select(ends)[0]
    low, high = first or 1, (last or 0) + 1
    while low < high:
        middle = (low + high) // 2
        found = select(f"SELECT id, {column} FROM {table} WHERE id >= ? ORDER BY id LIMIT 1", middle)
        if found and found[0][1] < since:
            low = found[0][0] + 1
        else:
            high = middle
    return int(low)


def append_rows(
    db: Database, table: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]], limit: int | None
) -> bool:
    """Add rows to a table; return whether it was time to delete the oldest, those beyond the limit. None: the caller
    does that."""
    if not rows:
        return False
    db.executemany(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", rows)
    # Trimmed once in 1,000 rows and not in each transaction: the ids count up without gaps, so that no COUNT is needed.
    last = db.execute("SELECT last_insert_rowid()").fetchone()[0]
    is_time = last // _TRIM > (last - len(rows)) // _TRIM
    if is_time and limit is not None:
        db.execute(f"DELETE FROM {table} WHERE id <= ?", (last - limit,))
    return bool(is_time)


def _row(record: HistoryRecord, columns: Sequence[str]) -> tuple[Any, ...]:
    return tuple(_stored(getattr(record, column)) for column in columns)


def _stored(value: Any) -> Any:
    if isinstance(value, dict | tuple):
        return json.dumps(value)
    return encodable(value) if isinstance(value, str) else value


def _node_record(row: dict[str, Any]) -> NodeRecord:
    return NodeRecord(**(row | {"attributes": json.loads(row["attributes"])}))


def _reservation_record(row: dict[str, Any]) -> RecordedReservation:
    return RecordedReservation(**(row | {"nodes": tuple(json.loads(row["nodes"]))}))
