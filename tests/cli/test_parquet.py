"""``fray sql --output``: the file that is written, and what is missing or cannot be written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from fray.cli.history.parquet import check_output, write_parquet
from fray.cli.history.sql import sql
from fray.errors import InvalidRequest


def test_without_pyarrow_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidRequest, match=r"--output needs pyarrow: pip install 'fray\[parquet\]'"):
        check_output("file:///usage.parquet")


def test_a_storage_that_does_not_exist_is_refused_before_the_query() -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(InvalidRequest, match="invalid location 'nowhere://bucket/x'"):
        check_output("nowhere://bucket/x")


def test_names_of_other_formats_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'usage.csv' would be a file in Parquet: name it so, or use --json"):
        check_output("usage.csv")


@pytest.mark.parametrize("prefix", ["", "file://"])
async def test_rows_are_there_with_their_types(tmp_path: Path, prefix: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "new" / "usage.parquet"
    rows: list[tuple[Any, ...]] = [("ada", 1, 2, None), ("bob", None, 0.5, None)]
    # The second time in place of the first.
    for _ in range(2):
        await write_parquet(f"{prefix}{target}", ("user", "attempts", "hours", "nothing"), rows)
    table = parquet.read_table(target)
    assert table.to_pydict() == {
        "user": ["ada", "bob"],
        "attempts": [1, None],
        "hours": [2.0, 0.5],
        "nothing": [None, None],
    }
    assert [str(each) for each in table.schema.types] == ["string", "int64", "double", "null"]


async def test_no_rows_are_a_file_with_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    await write_parquet(str(tmp_path / "x.parquet"), ("user", "day"), [])
    table = parquet.read_table(tmp_path / "x.parquet")
    assert (table.column_names, table.num_rows) == (["user", "day"], 0)


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        (("a", "a"), [(1, 2)], "the columns a, a need names of their own"),
        (("a",), [(1,), ("x",)], r"column 'a' has values of several kinds .* use CAST"),
    ],
)
async def test_what_is_no_table_of_parquet_is_refused(
    tmp_path: Path, columns: tuple[str, ...], rows: list[tuple[Any, ...]], message: str
) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(InvalidRequest, match=message):
        await write_parquet(str(tmp_path / "x.parquet"), columns, rows)
    assert not (tmp_path / "x.parquet").exists()


async def test_a_file_has_all_rows_and_says_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = str(tmp_path / "x.parquet")
    query = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1500) SELECT i FROM n"

    async def run(limit: int | None) -> str:
        chosen = {"query": query, "limit": limit, "output": target, "since": "1d", "timeout": 60.0}
        options = argparse.Namespace(tables=False, json=False, **chosen)
        # It reads no table, and so asks no cluster.
        assert await sql(cast(Any, None), options) == 0
        return "".join(capsys.readouterr())

    assert await run(None) == f"1500 rows written to {target}\n"
    assert parquet.read_table(target).num_rows == 1500
    assert "only the first 10 rows are written; --limit 0 has all" in await run(10)
    assert parquet.read_table(target).num_rows == 10
