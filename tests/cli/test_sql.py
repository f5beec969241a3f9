"""``fray sql``: what a query may do, its limits, and tables that agree with the sums of ``fray history``."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fray.api.history import daily
from fray.cli.history.sql import QueryDatabase
from fray.cli.history.sql_tables import COLUMNS, READERS
from fray.errors import DeadlineExceeded, InvalidRequest
from fray.model.messages.history import AttemptRecord
from fray.model.monitoring.accounting import sums

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


@pytest.fixture
def database() -> QueryDatabase:
    database = QueryDatabase()
    database.fill("events", [(float(number), f"job-{number}", "launched", "") for number in range(10)])
    return database


def test_a_query_names_the_tables_that_it_reads(database: QueryDatabase) -> None:
    assert database.tables_of("select e.text from events e where job_id in (select job_id from jobs)") == [
        "jobs",
        "events",
    ]
    assert database.tables_of("SELECT count(*) FROM usage") == ["usage"]
    assert database.tables_of("-- numbers\n/* of\none */ values (1)") == []


def test_rows_are_given_up_to_the_limit_which_is_said(database: QueryDatabase) -> None:
    query = "SELECT job_id AS job, time FROM events ORDER BY time DESC"
    answer = database.run(query, 2, 30.0)
    assert (answer.columns, answer.rows, answer.is_cut) == (("job", "time"), [("job-9", 9.0), ("job-8", 8.0)], True)
    assert not database.run(query, 10, 30.0).is_cut
    assert len(database.run(query, 0, 30.0).rows) == 10


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM events",
        "INSERT INTO events VALUES (1, 'a', 'b', 'c')",
        "UPDATE events SET text = 'x'",
        "DROP TABLE events",
        "CREATE TABLE more (a)",
        "CREATE TEMP TABLE more AS SELECT * FROM events",
        "ATTACH '/tmp/other.db' AS other",
        "PRAGMA writable_schema = 1",
        "VACUUM INTO '/tmp/copy.db'",
        "SELECT * FROM pragma_table_info('events')",
        "WITH some AS (SELECT 1) DELETE FROM events",
        "BEGIN",
    ],
)
def test_a_query_may_only_read(database: QueryDatabase, query: str) -> None:
    for attempt in (lambda: database.tables_of(query), lambda: database.run(query, 10, 30.0)):
        with pytest.raises(InvalidRequest, match="a query may only read"):
            attempt()
    assert len(database.run("SELECT * FROM events", 0, 30.0).rows) == 10


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT color FROM events", "no such column: color"),
        ("SELECT * FROM machines", "no such table: machines"),
        ("SELEC 1", "a query may only read: write SELECT"),
        ("SELECT 1 FRM events", 'near "events": syntax error'),
        ("", "a query may only read: write SELECT"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT 'a\0b'", "the query is wrong"),
    ],
)
def test_a_wrong_query_gets_a_clear_message(database: QueryDatabase, query: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match="see `fray sql --tables`") as refused:
        database.tables_of(query)
        database.run(query, 10, 30.0)
    assert message in str(refused.value)


def test_a_query_without_end_is_ended(database: QueryDatabase) -> None:
    assert database.tables_of(ENDLESS) == []
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"more than 0\.2 s: ask for less, or pass --timeout S"):
        database.run(ENDLESS, 10, 0.2)
    assert time.monotonic() - began < 30.0
    # The database can be asked again.
    assert database.run("SELECT 1", 10, 30.0).rows == [(1,)]


def test_a_value_has_a_limit(database: QueryDatabase) -> None:
    with pytest.raises(InvalidRequest, match="too big"):
        database.run("SELECT zeroblob(1000000000)", 10, 30.0)


def test_the_days_of_usage_add_up_to_the_sums_of_history() -> None:
    hour, day = 3600.0, 86_400.0
    some = [
        AttemptRecord(
            attempt_id=f"j{number}:0:0",
            job_id=f"j{number}",
            name="j",
            user="ada" if number % 2 else "bob",
            namespace="ns",
            band="batch",
            node="n1",
            machine="h100",
            cpu_milli=1000,
            memory_bytes=0,
            device_kind="gpu",
            device_variant="h100",
            devices=number,
            placed_at=number * 7 * hour,
            ended_at=None if number == 9 else number * 7 * hour + number * hour,
        )
        for number in range(10)
    ]
    since, until = 0.3 * day, 3.6 * day
    rows = list(daily(some, since, until))
    assert [row.key for row in rows] == sorted(row.key for row in rows)
    assert {row.key for row in rows} == {"1970-01-01", "1970-01-02", "1970-01-03", "1970-01-04"}
    for total in sums(some, "user", since, until):
        of_user = [row for row in rows if row.user == total.key]
        assert sum(row.cpu for row in of_user) == pytest.approx(total.held.cpu)
        assert sum(row.chips for row in of_user) == pytest.approx(total.held.all_chips)


def test_the_page_has_every_table_with_its_columns() -> None:
    page = (Path(__file__).parents[2] / "docs" / "history.md").read_text()
    assert READERS.keys() == COLUMNS.keys()
    for name, columns in COLUMNS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert [word for word in row.split("`") if word in columns] == list(columns)
