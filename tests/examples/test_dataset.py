"""Dataset example: its plan, and the results of its tasks, in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import dataset_backend
from dataset import Dataset, even_parts, plan, read_jsonl, run_here, run_task


def executed(dataset: Dataset, shards: int) -> list[Any]:
    """Run the plan task by task, and some tasks twice, as after the loss of a worker."""
    results: list[list[Any]] = []
    for stage in plan(dataset, shards, f"memory://{uuid4().hex}"):
        for task in stage.tasks[::2]:
            run_task(task)
        results = [run_task(task) for task in stage.tasks]
    return [row for result in results for row in result]


def last_digit(n: int) -> str:
    return str(n % 10)


def total(key: str, rows: list[int]) -> int:
    return sum(rows)


STEPS: list[Callable[[Dataset], Dataset]] = [
    lambda data: data.map(lambda n: n + 1),
    lambda data: data.filter(lambda n: n % 3 > 0),
    lambda data: data.flat_map(lambda n: [n, n // 2]),
    lambda data: data.group_by(last_digit, total),
]


@given(
    items=st.lists(st.integers(0, 1000), max_size=40),
    steps=st.lists(st.sampled_from(STEPS), max_size=5),
    shards=st.integers(1, 6),
)
def test_shards_and_a_single_process_have_the_same_result(
    items: list[int], steps: list[Callable[[Dataset], Dataset]], shards: int
) -> None:
    data = Dataset.from_items(items)
    for step in steps:
        data = step(data)
    assert sorted(executed(data, shards)) == sorted(run_here(data))


@given(items=st.lists(st.integers(), max_size=50), count=st.integers(1, 9))
def test_parts_are_even_and_in_order(items: list[int], count: int) -> None:
    parts = even_parts(items, count)
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_batches_are_made_within_shards_and_files_are_found_and_written(tmp_path: Path) -> None:
    for name, text in {"a.txt": "x\ny\nz\n", "b.txt": "w\n"}.items():
        (tmp_path / name).write_text(text)
    data = Dataset.from_files(f"file://{tmp_path}/*.txt").flat_map(lines_of).batch(2)
    assert executed(data, 2) == [["x", "y"], ["z"], ["w"]]
    written = executed(data.write_jsonl("memory://written/here/"), 2)
    assert written == ["memory://written/here/00000.jsonl", "memory://written/here/00001.jsonl"]
    assert [row for file in written for row in read_jsonl(file)] == [["x", "y"], ["z"], ["w"]]


def lines_of(file: str) -> list[str]:
    return Path(file.removeprefix("file://")).read_text().split()


def test_invalid_datasets_are_refused_at_once() -> None:
    data = Dataset.from_items([1])
    with pytest.raises(ValueError, match="must be 1 or more"):
        data.batch(0)
    with pytest.raises(ValueError, match="read them as another Dataset"):
        data.write_jsonl("memory://there").map(str)
    with pytest.raises(ValueError, match="must be 1 or more"):
        dataset_backend.FrayBackend(max_parallelism=0)


def test_imports_are_found_and_an_invalid_python_file_is_a_row_without_module(tmp_path: Path) -> None:
    good = [
        "import os.path as p, re",
        "if p: from json import decoder as d, encoder",
        "from . import x",
        "from .y import z",
    ]
    (tmp_path / "good.py").write_text("\n".join(good) + "\n")
    (tmp_path / "bad.py").write_text("def (:\n")
    data = dataset_backend.who_imports_what([str(tmp_path / "good.py"), str(tmp_path / "bad.py")])
    unshared = Dataset.from_items(data.items).flat_map(dataset_backend.imports_of)
    assert [row["module"] for row in run_here(unshared)] == ["os", "re", "json", ""]
    assert run_here(data) == [], "no module is imported by two files"
