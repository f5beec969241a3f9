"""Datasets of the pipeline example: operations on rows, and the stages that result from them.

This module runs nothing. A dataset is a description: rows of files, then operations, then a name under which the rows
are stored, and so on. The operations between two stores are a stage; a stage has shards, and each shard is a task that
reads some stored shards and writes one. Operations are functions at the top of a module, so they are pickled by name.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
Columns: TypeAlias = tuple[tuple[str, str], ...]
"""Names and Arrow types of stored columns."""


class Kind(Enum):
    """Arguments and results of an operation's function."""

    MAP = "map"
    FLAT_MAP = "flat_map"
    FILTER = "filter"
    GROUP = "group"
    WHOLE = "whole"


@dataclass(frozen=True)
class Operation:
    """Operation on rows; for `Kind.GROUP`, ``key`` names the column by which rows are grouped."""

    kind: Kind
    fn: Callable[..., Any]
    key: str = ""

    def apply(self, rows: Iterable[Row]) -> Iterator[Row]:
        return _APPLY[self.kind](self, rows)

    def __str__(self) -> str:
        return f"{self.kind.value}({', '.join(filter(None, (self.key, self.fn.__name__)))})"


def _grouped(one: Operation, rows: Iterable[Row]) -> Iterator[Row]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[one.key], []).append(row)
    return chain.from_iterable(one.fn(key, members) for key, members in sorted(groups.items(), key=itemgetter(0)))


_APPLY: dict[Kind, Callable[[Operation, Iterable[Row]], Iterator[Row]]] = {
    Kind.MAP: lambda one, rows: map(one.fn, rows),
    Kind.FLAT_MAP: lambda one, rows: chain.from_iterable(map(one.fn, rows)),
    Kind.FILTER: lambda one, rows: filter(one.fn, rows),
    Kind.GROUP: _grouped,
    Kind.WHOLE: lambda one, rows: iter(one.fn(rows)),
}


def applied(operations: Iterable[Operation], rows: Iterable[Row]) -> Iterator[Row]:
    """Apply operations one after the other, row by row where possible."""
    for one in operations:
        rows = one.apply(rows)
    return iter(rows)


def part_of(key: Any, parts: int) -> int:
    """Return the part for the rows of a key, which is the same in every process."""
    return zlib.crc32(repr(key).encode("utf-8", "surrogatepass")) % parts


# Stages --------------------------------------------------------------------------------------------------------------


class Reads(Enum):
    """Input of shard ``n`` of a stage from the stages before it."""

    FILES = "files"  # its own share of the input
    SAME = "same"  # their shard n
    PART = "part"  # part n of all their shards
    ALL = "all"  # everything


@dataclass(frozen=True)
class Stage:
    """Stage of ``shards`` tasks, each of which writes a file, in ``parts`` parts by the column ``split_by``."""

    name: str
    sources: tuple[str, ...]
    reads: Reads
    operations: tuple[Operation, ...]
    columns: Columns
    shards: int
    split_by: str = ""
    parts: int = 1

    def file(self, shard: int) -> str:
        """Return the path of a shard in the output."""
        return f"{self.name}/{shard:05}-of-{self.shards:05}.parquet"


@dataclass(frozen=True)
class Piece:
    """Stored shard, or one part of it."""

    path: str
    part: int | None = None


@dataclass(frozen=True)
class Plan:
    """Stages in order; ``files`` are the shards of the input, each file with its size and age."""

    root: str
    files: tuple[tuple[tuple[str, int, float], ...], ...]
    stages: tuple[Stage, ...]

    def pieces(self, stage: Stage, shard: int) -> list[Piece]:
        """Return the output of other stages that a task reads."""
        if stage.reads is Reads.FILES:
            return [Piece(path) for path, _, _ in self.files[shard]]
        before = [one for name in stage.sources for one in self.stages if one.name == name]
        if stage.reads is Reads.SAME:
            return [Piece(one.file(shard)) for one in before]
        part = shard if stage.reads is Reads.PART else None
        return [Piece(one.file(number), part) for one in before for number in range(one.shards)]

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the result, except the code of the functions.

        Finished shards can be used again only by a plan with the same fingerprint.
        """
        stages = [replace(one, operations=()) for one in self.stages]
        steps = [[str(step) for step in one.operations] for one in self.stages]
        return hashlib.sha256(repr((self.root, self.files, stages, steps)).encode()).hexdigest()[:16]


# Datasets ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """Description of rows. Each method returns another dataset; `plan` turns it into stages."""

    root: str
    files: tuple[tuple[tuple[str, int, float], ...], ...]
    done: tuple[Stage, ...] = ()
    sources: tuple[str, ...] = ()
    reads: Reads = Reads.FILES
    shards: int = 0
    operations: tuple[Operation, ...] = ()

    @staticmethod
    def from_files(root: str, files: Sequence[tuple[str, int, float]], shards: int) -> Dataset:
        """Return a dataset with a row of ``path`` and ``text`` for each file, given as name below ``root``, size and
        age.

        Its shards have about the same size.
        """
        split = spread(files, shards)
        return Dataset(root, split, shards=len(split))

    def map(self, fn: Callable[[Row], Row]) -> Dataset:
        return self._and(Operation(Kind.MAP, fn))

    def flat_map(self, fn: Callable[[Row], Iterable[Row]]) -> Dataset:
        return self._and(Operation(Kind.FLAT_MAP, fn))

    def filter(self, fn: Callable[[Row], bool]) -> Dataset:
        return self._and(Operation(Kind.FILTER, fn))

    def group(self, key: str, fn: Callable[[Any, list[Row]], Iterable[Row]]) -> Dataset:
        """Apply ``fn(key, rows)`` to the rows of equal ``key`` in a shard: to all of them after a `shuffle` by
        ``key``."""
        return self._and(Operation(Kind.GROUP, fn, key))

    def whole(self, fn: Callable[[Iterable[Row]], Iterable[Row]]) -> Dataset:
        """Apply ``fn(rows)`` to each shard."""
        return self._and(Operation(Kind.WHOLE, fn))

    def _and(self, operation: Operation) -> Dataset:
        return replace(self, operations=(*self.operations, operation))

    def store(self, name: str, columns: Columns) -> Dataset:
        """Store the rows, shard by shard; the next stage has the same shards."""
        return self._stored(name, columns, Reads.SAME, self.shards)

    def shuffle(self, name: str, columns: Columns, key: str, parts: int) -> Dataset:
        """Store the rows so that all rows of a ``key`` are in one shard of the next stage."""
        return self._stored(name, columns, Reads.PART, parts, key)

    def gather(self, name: str, columns: Columns) -> Dataset:
        """Store the rows; the next stage has all of them in one shard."""
        return self._stored(name, columns, Reads.ALL, 1)

    def _stored(self, name: str, columns: Columns, reads: Reads, shards: int, key: str = "") -> Dataset:
        if any(stage.name == name for stage in self.done):
            raise ValueError(f"two stages are named {name!r}: names must be unique")
        parts = shards if reads is Reads.PART else 1
        stage = Stage(name, self.sources, self.reads, self.operations, columns, self.shards, key, parts)
        return Dataset(self.root, self.files, (*self.done, stage), (name,), reads, shards)

    def union(self, other: Dataset) -> Dataset:
        """Return the rows of both datasets, which must have been shuffled into the same number of parts.

        Raises:
            ValueError: their shards differ, or an operation is not stored.
        """
        if (self.reads, self.shards, self.operations) != (other.reads, other.shards, other.operations):
            raise ValueError("a union needs two datasets that were just stored, with the same shards")
        more = tuple(stage for stage in other.done if stage not in self.done)
        return replace(self, done=(*self.done, *more), sources=(*self.sources, *other.sources))

    def plan(self) -> Plan:
        """Return the stages. Raises ValueError: the last operation is not stored."""
        if self.operations or not self.done:
            raise ValueError("the result of a dataset must be stored: end with store(name, columns)")
        return Plan(self.root, self.files, self.done)


def spread(files: Sequence[tuple[str, int, float]], shards: int) -> tuple[tuple[tuple[str, int, float], ...], ...]:
    """Split files into so many shards (or one per file) of neighbours, of about the same number of bytes."""
    total, taken = sum(size for _, size, _ in files), 0
    shards = max(1, min(shards, len(files)))
    split: list[list[tuple[str, int, float]]] = [[] for _ in range(shards)]
    for file in files:
        split[min(shards - 1, taken * shards // max(1, total))].append(file)
        taken += file[1]
    return tuple(tuple(shard) for shard in split)
