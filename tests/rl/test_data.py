"""Rows of data: files and iterables are read, and what is wrong is named with file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fray.errors import InvalidRequest
from fray.rl.data import load_rows

ROWS = [{"prompt": "1>", "answer": "1"}, {"prompt": "ü>", "answer": "2"}]


def test_rows_of_files_and_iterables_are_equal(tmp_path: Path) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    jsonl = tmp_path / "tasks.jsonl"
    jsonl.write_text("\n\n".join(json.dumps(row) for row in ROWS) + "\n", encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "tasks.parquet")
    assert load_rows(jsonl) == load_rows(str(tmp_path / "tasks.parquet")) == load_rows(iter(ROWS)) == ROWS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "tasks.jsonl has no rows"),
        ('{"a": 1}\n{"a": \n', "line 2 of .*tasks.jsonl is not JSON"),
        ('{"a": 1}\n\n[1]\n', "line 3 of .*tasks.jsonl is of type list; expected a dict"),
    ],
)
def test_the_line_that_is_wrong_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        load_rows(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("no-such.jsonl", "there is no such file in"),
        (__file__, "expected a file whose name ends in .jsonl or .parquet"),
        ([], "the iterable has no rows"),
        ([{}, 3], "row 1 is of type int; expected a dict"),
    ],
)
def test_invalid_data_is_refused(data: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        load_rows(data)
