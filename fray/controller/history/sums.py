"""Sums over attempts in SQL, for ``fray history``: in a thread, over a second connection to the store.

They are equal to those of `fray.model.monitoring.accounting`, which tests compare with them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from attrs import fields

from fray.controller.history.tables import Database
from fray.model.frozen import frozen
from fray.model.ids import Namespace
from fray.model.messages.history import AttemptRecord, AttemptSum, SumAttempts

ROWS_LIMIT = 2_000
"""Rows of an answer. With more, the client sums up by itself."""

_KEYS = {
    "user": "user",
    "namespace": "namespace",
    "machine": "machine",
    "node": "node",
    "job": "job_id",
    "cause": "CASE cause WHEN '' THEN 'running' ELSE cause END",
}
DAY = "day"
"""Key of sums by day, which have user, namespace and kind of machine, too."""
_COLUMNS = (
    *("attempt_id", "job_id", "name", "user", "namespace", "machine", "node", "cause", "cpu_milli", "memory_bytes"),
    *("device_kind", "device_variant", "devices", "queued_at", "placed_at", "ended_at", "cpu_s"),
)
_SUMMED = [each.name for each in fields(AttemptSum)]


@frozen
class SumInput:
    """Attempts to sum up, as they are at one moment of the loop.

    Attributes:
        first, last: rows of ended attempts: after ``first``, up to ``last``.
        living: attempts that had not ended.
        user, namespaces: of the client: only attempts of this user or in these namespaces. None: all.
    """

    query: SumAttempts
    first: int
    last: int
    living: Sequence[AttemptRecord]
    user: str | None = None
    namespaces: Sequence[Namespace] = ()


def recorded_namespaces(db: Database) -> list[Namespace]:
    """Return all namespaces of ended attempts."""
    return [row[0] for row in db.execute("SELECT DISTINCT namespace FROM past_attempts").fetchall()]


def sum_attempts(db: Database, given: SumInput) -> list[AttemptSum]:
    """Return the sums by key and kind of accelerators; one more than `ROWS_LIMIT` if there are more.

    Args:
        db: connection that nothing else uses meanwhile; it gets temporary tables.
    """
    query = given.query
    named = {"since": query.since, "until": query.until}
    try:
        _choose(db, given)
        if query.by == DAY:
            _add_days(db, named)
            source, key = "chosen JOIN days ON n BETWEEN first_day AND last_day", "date(n * 86400, 'unixepoch')"
            groups, begin, end = (
                "n, user, namespace, machine",
                "max(:since, n * 86400.0)",
                "min(:until, (n + 1) * 86400.0)",
            )
        else:
            source, key = "chosen", _KEYS[query.by]
            groups, begin, end = "key", ":since", ":until"
        held_s = f"min({end}, ifnull(ended_at, {end})) - max({begin}, placed_at)"
        db.execute(
            f"CREATE TEMP TABLE held AS SELECT {key} AS key, {'n, ' if query.by == DAY else ''}name, user, namespace, "
            "machine, job_id, cpu_milli / 1000.0 AS cpus, memory_bytes / 1073741824.0 AS gib, devices, cpu_s, "
            "iif(devices, device_kind || ':' || device_variant, '') AS kind, ended_at - placed_at AS whole_s, "
            "generation < ifnull(newest, 0) AS is_followed, cause = 'preempted' AS is_preempted, "
            f"iif(substr(attempt_id, -2) = ':0' AND placed_at >= {begin}, max(0, placed_at - queued_at), 0) AS wait_s, "
            f"({held_s}) / 3600.0 AS hours FROM {source} LEFT JOIN latest USING (job_id) "
            f"WHERE placed_at < {end} AND {held_s} >= 0",
            named,
        )
        return _summed(db, groups, by_job=query.by == "job", by_day=query.by == DAY)
    finally:
        for table in ("chosen", "latest", "days", "held"):
            db.execute(f"DROP TABLE IF EXISTS temp.{table}")


def _choose(db: Database, given: SumInput) -> None:
    """Copy the attempts in question, and find which of them were followed by another one of their job."""
    query = given.query
    wheres = ["id > ? AND id <= ? AND ended_at >= ?"]
    values: list[Any] = [given.first, given.last, query.since]
    for column in ("user", "namespace", "node"):
        if value := getattr(query, column):
            wheres.append(f"{column} = ?")
            values.append(value)
    if query.job:
        wheres.append("? IN (job_id, name)")
        values.append(query.job)
    if given.user is not None:
        wheres.append("(user = ? OR namespace IN (SELECT value FROM json_each(?)))")
        values += [given.user, json.dumps(given.namespaces)]
    columns = ", ".join(_COLUMNS)
    # "j-1:12:0" begins with its job and a colon; a cast reads the number that comes next.
    number = "CAST(substr(attempt_id, length(job_id) + 2) AS INTEGER)"
    days = "CAST(max(placed_at, ?) / 86400 AS INTEGER) AS first_day, CAST(ifnull(ended_at, ?) / 86400 AS INTEGER)"
    made = f"{columns}, {number} AS generation, {days} AS last_day"
    bounds: list[Any] = [query.since, query.until]
    db.execute(
        f"CREATE TEMP TABLE chosen AS SELECT {made} FROM past_attempts WHERE {' AND '.join(wheres)}",
        [*bounds, *values],
    )
    rows = [tuple(getattr(one, column) for column in _COLUMNS) for one in given.living]
    given_columns = ", ".join(f"? AS {column}" for column in _COLUMNS)
    db.executemany(f"INSERT INTO chosen SELECT {made} FROM (SELECT {given_columns})", [(*bounds, *row) for row in rows])
    db.execute("CREATE TEMP TABLE latest (job_id PRIMARY KEY, newest)")
    db.execute(
        "INSERT INTO latest SELECT job_id, max(generation) FROM chosen WHERE job_id IN "
        "(SELECT job_id FROM chosen WHERE generation > 0) GROUP BY job_id"
    )


def _add_days(db: Database, named: dict[str, float]) -> None:
    db.execute("CREATE TEMP TABLE days (n INTEGER PRIMARY KEY)")
    db.execute(
        "INSERT INTO days WITH RECURSIVE counted(n) AS (SELECT min(first_day) FROM chosen UNION ALL SELECT n + 1 "
        "FROM counted WHERE (n + 1) * 86400 < :until) SELECT n FROM counted WHERE n IS NOT NULL",
        {"until": named["until"]},
    )


def _summed(db: Database, groups: str, *, by_job: bool, by_day: bool) -> list[AttemptSum]:
    def parts(condition: str) -> str:
        amounts = (f"sum({amount} * hours * ({condition}))" for amount in ("cpus", "gib", "devices"))
        return ", ".join(amounts)

    known = "(cpu_s <> 0 AND whole_s > 0)"
    # Of an attempt that lived longer than the time in question, its average use.
    idle = "max(0, cpus * hours - cpu_s / 3600.0 * (hours * 3600.0 / whole_s))"
    # By day all kinds are one row.
    who, kind = ("user, namespace, machine", "''") if by_day else ("'', '', ''", "kind")
    jobs = {} if by_day else dict(db.execute("SELECT key, count(DISTINCT job_id) FROM held GROUP BY key").fetchall())
    rows = db.execute(
        f"SELECT key, {'max(name)' if by_job else repr('')}, {who}, {kind}, 0, count(*), {parts('1')}, "
        f"{parts('is_followed AND NOT is_preempted')}, {parts('is_followed AND is_preempted')}, "
        f"total(iif({known}, {idle}, 0)), total(iif({known}, cpus * hours, 0)), total(wait_s) / 3600.0 "
        f"FROM held GROUP BY {groups}, {kind} ORDER BY {groups}, {kind} LIMIT {ROWS_LIMIT + 1}"
    ).fetchall()
    found = []
    for row in rows:
        made: dict[str, Any] = dict(zip(_SUMMED, row, strict=True))
        found.append(AttemptSum(**(made | {"jobs": jobs.get(row[0], 0)})))
    return found
