"""Table of the past capacity in the store: a sample of each minute for a day, and of every tenth minute before it.

No decision is made from samples: they are written in transactions of their own. Rows are added and never changed; the
oldest are deleted when there are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio
from attrs import fields

from fray.controller.history.tables import Database, append_rows, first_since
from fray.model.messages.history import CapacitySample
from fray.scheduler.explain.capacity import capacity_samples
from fray.scheduler.state.state import State

PERIOD_S = 60.0
"""Time between samples."""
KEPT_PART = 10
"""One of so many samples stays of those that are older than `FINE_S`."""
FINE_S = 86_400.0
LOOK_BACK_S = 2 * FINE_S
"""Time before `FINE_S` in which samples are looked for that are to go: what a controller that was down for longer has
left stays, within the limit of rows."""
ROWS_LIMIT = 2_000
"""Rows of an answer."""

_COLUMNS = tuple(each.name for each in fields(CapacitySample))
_AMOUNTS = _COLUMNS[_COLUMNS.index("total") :]
SCHEMA = f"CREATE TABLE IF NOT EXISTS past_capacity (id INTEGER PRIMARY KEY, {', '.join(_COLUMNS)})"
"""Statement that adds the table to a store, which an earlier version may have made without it."""


async def record_capacity(
    state: State, clock: Callable[[], float], save: Callable[[Sequence[CapacitySample]], object]
) -> None:
    """Save a sample at the beginning of each minute, also while nothing happens, until cancelled.

    Args:
        clock: the scheduler's.

    Raises:
        StoreError: a save has failed.
    """
    while True:
        now = clock()
        due = (now // PERIOD_S + 1) * PERIOD_S
        await trio.sleep(due - now)
        # Each minute has one sample, also where the clock shows a little less than was slept.
        if samples := capacity_samples(state, max(due, clock())):
            save(samples)


class CapacityTable:
    """Writer of the table.

    Args:
        select: runs a query and returns its rows.
        limit: rows, one for each kind and zone; the oldest are deleted, at most 1,000 rows late.
    """

    def __init__(self, db: Database, select: Callable[..., list[Any]], limit: int) -> None:
        self._db, self._select = db, select
        self.limit = limit
        db.execute(SCHEMA)

    def __repr__(self) -> str:
        return f"<CapacityTable of at most {self.limit} rows>"

    def add(self, samples: Sequence[CapacitySample]) -> None:
        """Add the samples of one moment; the caller has begun a transaction."""
        rows = [tuple(getattr(each, column) for column in _COLUMNS) for each in samples]
        if not append_rows(self._db, "past_capacity", _COLUMNS, rows, None):
            return
        first, last = self.rows_between(samples[0].at - FINE_S - LOOK_BACK_S, samples[0].at - FINE_S)
        self._db.execute(
            f"DELETE FROM past_capacity WHERE id >= ? AND id < ? AND CAST(at / {PERIOD_S} AS INTEGER) % {KEPT_PART}",
            (first, last),
        )
        # By counting rows: those that were deleted between others leave gaps between the ids.
        self._db.execute(
            "DELETE FROM past_capacity WHERE id <= (SELECT id FROM past_capacity ORDER BY id DESC LIMIT 1 OFFSET ?)",
            (self.limit,),
        )

    def rows_between(self, since: float, until: float) -> tuple[int, int]:
        """Return the ids of the first rows since the one time and since the other."""
        return (
            first_since(self._select, "past_capacity", "at", since),
            first_since(self._select, "past_capacity", "at", until),
        )


def mean_capacity(db: Database, rows: tuple[int, int], period_s: float) -> tuple[list[CapacitySample], float]:
    """Return the means of each period by kind and zone, and the time at which to continue; 0 if these are all.

    Args:
        rows: ids of the first row, and of the first one that is not to be read.
    """
    # Divided by the samples of the period, also where one of them has no machine of this kind in this zone.
    means = ", ".join(f"sum({amount}) / taken" for amount in _AMOUNTS)
    found = db.execute(
        "WITH chosen AS (SELECT CAST(at / ? AS INTEGER) AS period, * FROM past_capacity WHERE id >= ? AND id < ?), "
        "times AS (SELECT period, CAST(count(DISTINCT at) AS REAL) AS taken FROM chosen GROUP BY period) "
        f"SELECT period * ?, kind, zone, {means} FROM chosen JOIN times USING (period) "
        "GROUP BY period, kind, zone ORDER BY period, kind, zone LIMIT ?",
        (period_s, *rows, period_s, ROWS_LIMIT + 1),
    ).fetchall()
    samples = [CapacitySample(**dict(zip(_COLUMNS, row, strict=True))) for row in found]
    if len(samples) <= ROWS_LIMIT:
        return samples, 0.0
    # Whole periods; one has far fewer rows than an answer.
    next_at = samples[-1].at
    return [each for each in samples if each.at < next_at], next_at
