"""Lazy datasets of rows: sources, operations, and the plan that turns them into tasks.

A `Dataset` only describes. `plan` cuts it into stages of independent tasks: between two stages, rows of equal keys
are brought together through files in storage. A task is a value: any worker may run it, any number of times, with the
same files as a result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, TypeAlias
from zlib import crc32

import fsspec

Rows: TypeAlias = Iterable[Any]


@dataclass(frozen=True)
class Map:
    fn: Callable[[Any], Any]

    def __call__(self, rows: Rows) -> Iterator[Any]:
        return map(self.fn, rows)


@dataclass(frozen=True)
class Filter:
    fn: Callable[[Any], bool]

    def __call__(self, rows: Rows) -> Iterator[Any]:
        return filter(self.fn, rows)


@dataclass(frozen=True)
class FlatMap:
    fn: Callable[[Any], Rows]

    def __call__(self, rows: Rows) -> Iterator[Any]:
        return (found for row in rows for found in self.fn(row))


@dataclass(frozen=True)
class Batch:
    size: int

    def __call__(self, rows: Rows) -> Iterator[list[Any]]:
        batch: list[Any] = []
        for row in rows:
            batch.append(row)
            if len(batch) == self.size:
                yield batch
                batch = []
        if batch:
            yield batch


@dataclass(frozen=True)
class GroupBy:
    """Operation that turns the rows of each key, of all shards, into one: ``reduce(key, rows)``."""

    key: Callable[[Any], str]
    reduce: Callable[[str, list[Any]], Any]

    def __call__(self, rows: Rows) -> Iterator[Any]:
        for key, group in groupby(sorted(rows, key=self.key), self.key):
            yield self.reduce(key, list(group))


@dataclass(frozen=True)
class Dataset:
    """Lazy rows, as in ``Dataset.from_items(paths).flat_map(read).group_by(key,
    count).write_jsonl("gs://bucket/counts")``.

    Rows that are grouped or written must be JSON.
    """

    items: tuple[Any, ...]
    steps: tuple[Callable[[Rows], Iterator[Any]], ...] = ()
    output: str | None = None

    @classmethod
    def from_items(cls, items: Iterable[Any]) -> Dataset:
        return cls(tuple(items))

    @classmethod
    def from_files(cls, pattern: str) -> Dataset:
        """Return a dataset of the URLs of matching files, in order: ``file:///data/**/*.txt``,
        ``gs://bucket/*.jsonl``."""
        system, path = fsspec.core.url_to_fs(pattern)
        return cls(tuple(system.unstrip_protocol(found) for found in sorted(system.glob(path))))

    def map(self, fn: Callable[[Any], Any]) -> Dataset:
        return self._then(Map(fn))

    def filter(self, fn: Callable[[Any], bool]) -> Dataset:
        return self._then(Filter(fn))

    def flat_map(self, fn: Callable[[Any], Rows]) -> Dataset:
        return self._then(FlatMap(fn))

    def batch(self, size: int) -> Dataset:
        if size < 1:
            raise ValueError(f"batch({size!r}): the size must be 1 or more")
        return self._then(Batch(size))

    def group_by(self, key: Callable[[Any], str], reduce: Callable[[str, list[Any]], Any]) -> Dataset:
        return self._then(GroupBy(key, reduce))

    def write_jsonl(self, directory: str) -> Dataset:
        """Write the rows; the results of the dataset are then the URLs of the files, one per shard."""
        return replace(self, output=directory.rstrip("/"))

    def _then(self, step: Callable[[Rows], Iterator[Any]]) -> Dataset:
        if self.output is not None:
            raise ValueError(f"rows written to {self.output} cannot be processed further: read them as another Dataset")
        return replace(self, steps=(*self.steps, step))


# The plan ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Shard of a stage."""

    items: tuple[Any, ...] = ()
    files: tuple[str, ...] = ()
    """Files of JSON lines that the stage before has written, in place of items."""
    steps: tuple[Callable[[Rows], Iterator[Any]], ...] = ()
    key: Callable[[Any], str] | None = None
    output: tuple[str, ...] = ()
    """Files for the rows: one, or several by ``key``. Empty: the rows are the result of the task."""


@dataclass(frozen=True)
class Stage:
    title: str
    tasks: tuple[Task, ...]


def plan(dataset: Dataset, shards: int, scratch: str) -> list[Stage]:
    """Return the stages in order; a stage may start when the one before is done. ``scratch`` stores the rows
    between."""
    groups = [index for index, step in enumerate(dataset.steps) if isinstance(step, GroupBy)]
    bounds = [0, *groups, len(dataset.steps)]
    count = max(1, min(shards, len(dataset.items)))
    tasks = [Task(items=part) for part in even_parts(dataset.items, count)]
    stages = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        steps = dataset.steps[begin:end]
        title = " → ".join(type(step).__name__.lower() for step in steps) or "read"
        if end < len(dataset.steps):
            group = dataset.steps[end]
            assert isinstance(group, GroupBy)
            left = [[f"{scratch}/{number}/{n}-{bucket}.jsonl" for bucket in range(count)] for n in range(count)]
            tasks = [replace(t, steps=steps, key=group.key, output=tuple(left[n])) for n, t in enumerate(tasks)]
            stages.append(Stage(title, tuple(tasks)))
            tasks = [Task(files=tuple(files)) for files in zip(*left, strict=True)]
        else:
            where = [() if dataset.output is None else (f"{dataset.output}/{n:05}.jsonl",) for n in range(count)]
            stages.append(Stage(title, tuple(replace(t, steps=steps, output=where[n]) for n, t in enumerate(tasks))))
    return stages


def even_parts(items: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """Return consecutive parts of nearly equal sizes."""
    bounds = [len(items) * n // count for n in range(count + 1)]
    return [tuple(items[begin:end]) for begin, end in pairwise(bounds)]


# In the workers ------------------------------------------------------------------------------------------------------


def run_task(task: Task) -> list[Any]:
    """Run a task; return its rows, or the URLs of the files with them. Idempotent."""
    rows: Rows = task.items or (row for file in task.files for row in read_jsonl(file))
    for step in task.steps:
        rows = step(rows)
    if not task.output:
        return list(rows)
    parts: list[list[Any]] = [[] for _ in task.output]
    for row in rows:
        parts[0 if task.key is None else crc32(task.key(row).encode()) % len(parts)].append(row)
    for file, part in zip(task.output, parts, strict=True):
        write_jsonl(file, part)
    return list(task.output)


def run_here(dataset: Dataset) -> list[Any]:
    """Compute a dataset in this process and in one piece, as the reference for other results."""
    rows: Rows = dataset.items
    for step in dataset.steps:
        rows = step(rows)
    return list(rows)


def read_jsonl(file: str) -> list[Any]:
    system, path = fsspec.core.url_to_fs(file)
    return [json.loads(line) for line in system.cat_file(path).splitlines()]


def write_jsonl(file: str, rows: Rows) -> None:
    system, path = fsspec.core.url_to_fs(file)
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
    system.pipe_file(path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
