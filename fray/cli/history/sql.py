"""``fray sql``: a query over tables of what the role may see, in a database in the memory of this process.

The controller only answers the requests that the other verbs send, too: the query itself costs it nothing. The database
may only be read, and has limits of time and of rows.
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

import trio
from attrs import frozen

from fray.api.cluster import Cluster
from fray.cli.formatting import span_of, table
from fray.cli.history.parquet import check_output, write_parquet
from fray.cli.history.sql_tables import COLUMNS, READERS, Rows
from fray.cli.output import note, say, say_json, width
from fray.errors import DeadlineExceeded, InvalidRequest
from fray.model.text import plural

ROWS_SHOWN = 1_000
"""Rows that are shown without ``--limit``; a file has all."""
STEPS = 10_000
"""Instructions of SQLite between two looks at the clock."""
VALUE_LIMIT_BYTES = 10_000_000
"""Size of one value or row."""
READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
"""Actions of a query that are allowed; all others (writing, ATTACH, PRAGMA) are refused."""

ONLY_READING = "a query may only read: write SELECT … FROM …; see `fray sql --tables`"
_KIND = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*(?:select|with|values)\b", re.IGNORECASE | re.DOTALL)


@frozen
class Answer:
    """Columns and rows of a query; ``is_cut``: there are more rows than its limit."""

    columns: tuple[str, ...]
    rows: Rows
    is_cut: bool = False


class QueryDatabase:
    """Database in memory with the tables of `COLUMNS`, which are empty until they are filled."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_LIMIT_BYTES)
        for name, columns in COLUMNS.items():
            self._db.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
        self._read: set[str] = set()
        self._refused = False

    def __repr__(self) -> str:
        return f"<QueryDatabase of {', '.join(COLUMNS)}>"

    def tables_of(self, query: str) -> list[str]:
        """Return the tables that a query reads, without running it.

        Raises:
            InvalidRequest: it is wrong, does not only read, or is more than one statement.
        """
        self._read.clear()
        _check_kind(query)
        self._db.set_authorizer(self._authorize)
        try:
            # Prepared and not run: EXPLAIN lists the instructions that it would execute.
            self._db.execute(f"EXPLAIN {query}").fetchall()
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise self._wrong(error) from None
        finally:
            self._db.set_authorizer(None)
        return [name for name in COLUMNS if name in self._read]

    def fill(self, name: str, rows: Rows) -> None:
        """Add rows to a table."""
        self._db.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(COLUMNS[name]))})", rows)

    def run(self, query: str, limit: int, timeout_s: float) -> Answer:
        """Return the rows of a query.

        Args:
            limit: number of rows; 0: all.

        Raises:
            InvalidRequest: the query is wrong, or does not only read.
            DeadlineExceeded: it has taken more than ``timeout_s`` seconds.
        """
        _check_kind(query)
        deadline = time.monotonic() + timeout_s
        self._db.set_authorizer(self._authorize)
        self._db.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
        try:
            cursor = self._db.execute(query)
            rows = cursor.fetchmany(limit + 1) if limit else cursor.fetchall()
            columns = tuple(column[0] for column in cursor.description or ())
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the query has taken more than {timeout_s:g} s: ask for less, or pass --timeout S"
                ) from None
            raise self._wrong(error) from None
        finally:
            self._db.set_progress_handler(None, 0)
            self._db.set_authorizer(None)
        is_cut = bool(limit) and len(rows) > limit
        return Answer(columns, rows[:limit] if is_cut else rows, is_cut)

    def _authorize(self, action: int, first: str | None, second: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_READ and first is not None:
            self._read.add(first)
        if action in READING:
            return sqlite3.SQLITE_OK
        self._refused = True
        return sqlite3.SQLITE_DENY

    def _wrong(self, error: Exception) -> InvalidRequest:
        refused, self._refused = self._refused, False
        if refused:
            return InvalidRequest(ONLY_READING)
        return InvalidRequest(f"the query is wrong: {error}; see `fray sql --tables` for tables and columns")


def _check_kind(query: str) -> None:
    # VACUUM INTO writes a file, and is authorized as nothing else before it runs.
    if not _KIND.match(query):
        raise InvalidRequest(ONLY_READING)


async def sql(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray sql``.

    Raises:
        InvalidRequest: a wrong query or option.
        DeadlineExceeded: the query has taken too long.
    """
    if options.tables:
        _say_tables(options.json)
        return 0
    if not options.query:
        raise InvalidRequest('no query given: write fray sql "SELECT …"; see `fray sql --tables`')
    if (options.limit or 0) < 0 or not options.timeout > 0:
        raise InvalidRequest("--limit must be 0 (all) or more, and --timeout more than 0")
    if options.output:
        check_output(options.output)
    since_s = span_of(options.since, "--since")
    assert since_s is not None
    database = QueryDatabase()
    since = time.time() - since_s
    # Refused before anything is fetched, and only what it reads is fetched.
    for name in database.tables_of(options.query):
        database.fill(name, await READERS[name](cluster, since))
    # In a thread: Ctrl-C ends this process, and its query with it.
    limit = options.limit if options.limit is not None else 0 if options.output else ROWS_SHOWN
    answer = await trio.to_thread.run_sync(database.run, options.query, limit, options.timeout, abandon_on_cancel=True)
    if options.output:
        await write_parquet(options.output, answer.columns, answer.rows)
        say([f"{plural(len(answer.rows), 'row')} written to {options.output}"])
    elif options.json:
        say_json([dict(zip(answer.columns, map(_json_value, row), strict=True)) for row in answer.rows])
    else:
        rows = [[_text(value) for value in row] for row in answer.rows]
        say(table(answer.columns, rows, width()))
    if answer.is_cut:
        note(f"only the first {limit} rows are {'written' if options.output else 'shown'}; --limit 0 has all")
    return 0


def _say_tables(as_json: bool) -> None:
    tables: Mapping[str, Any] = COLUMNS
    if as_json:
        say_json(dict(tables))
    else:
        say(f"{name} ({', '.join(columns)})" for name, columns in tables.items())


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.12g}" if isinstance(value, float) else str(_json_value(value))


def _json_value(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
