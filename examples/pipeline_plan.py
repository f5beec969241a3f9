"""What the pipeline example computes: a dataset of operations on rows, and the stages that come of it.

Nothing here runs anything. A dataset is a description: rows of files, then operations, then a name under which the rows
are stored, and so on. What stands between two stores is one stage; a stage has shards, and each shard is one task, that
reads some stored shards, and writes one. Operations are functions at the top of a module, so that they travel by name.
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
"""Names and Arrow types of what is stored."""


class Kind(Enum):
    """What an operation's function is given, and gives."""

    MAP = "map"
    FLAT_MAP = "flat_map"
    FILTER = "filter"
    GROUP = "group"
    WHOLE = "whole"


@dataclass(frozen=True)
class Operation:
    """One step; of `Kind.GROUP`, ``key`` names the column that members of a group have in common."""

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
    """All of them, one after the other, row by row where they can."""
    for one in operations:
        rows = one.apply(rows)
    return iter(rows)


def part_of(key: Any, parts: int) -> int:
    """In which of so many parts rows of this key go: the same in every process."""
    return zlib.crc32(repr(key).encode("utf-8", "surrogatepass")) % parts


# Stages --------------------------------------------------------------------------------------------------------------


class Reads(Enum):
    """What shard ``n`` of a stage reads of the stages before it."""

    FILES = "files"  # its own share of the input
    SAME = "same"  # their shard n
    PART = "part"  # part n of all their shards
    ALL = "all"  # everything


@dataclass(frozen=True)
class Stage:
    """One pass: ``shards`` tasks, each writes one file, of ``parts`` parts by the column ``split_by``."""

    name: str
    sources: tuple[str, ...]
    reads: Reads
    operations: tuple[Operation, ...]
    columns: Columns
    shards: int
    split_by: str = ""
    parts: int = 1

    def file(self, shard: int) -> str:
        """Where in the output a shard of it is."""
        return f"{self.name}/{shard:05}-of-{self.shards:05}.parquet"


@dataclass(frozen=True)
class Piece:
    """Something to read: a stored shard, or one part of it."""

    path: str
    part: int | None = None


@dataclass(frozen=True)
class Plan:
    """The stages in order; ``files`` are the shards of the input, each file with its size and age."""

    root: str
    files: tuple[tuple[tuple[str, int, float], ...], ...]
    stages: tuple[Stage, ...]

    def pieces(self, stage: Stage, shard: int) -> list[Piece]:
        """What a task reads of the output of others."""
        if stage.reads is Reads.FILES:
            return [Piece(path) for path, _, _ in self.files[shard]]
        before = [one for name in stage.sources for one in self.stages if one.name == name]
        if stage.reads is Reads.SAME:
            return [Piece(one.file(shard)) for one in before]
        part = shard if stage.reads is Reads.PART else None
        return [Piece(one.file(number), part) for one in before for number in range(one.shards)]

    def fingerprint(self) -> str:
        """Of all that makes up the result, but for the code of the functions: finished shards of another are no use."""
        stages = [replace(one, operations=()) for one in self.stages]
        steps = [[str(step) for step in one.operations] for one in self.stages]
        return hashlib.sha256(repr((self.root, self.files, stages, steps)).encode()).hexdigest()[:16]


# Datasets ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """Rows to come. Each method gives another dataset; `plan` makes stages of it."""

    root: str
    files: tuple[tuple[tuple[str, int, float], ...], ...]
    done: tuple[Stage, ...] = ()
    sources: tuple[str, ...] = ()
    reads: Reads = Reads.FILES
    shards: int = 0
    operations: tuple[Operation, ...] = ()

    @staticmethod
    def from_files(root: str, files: Sequence[tuple[str, int, float]], shards: int) -> Dataset:
        """A row of ``path`` and ``text`` for each file of a name below ``root``, size and age; of like weight."""
        split = spread(files, shards)
        return Dataset(root, split, shards=len(split))

    def map(self, fn: Callable[[Row], Row]) -> Dataset:
        return self._and(Operation(Kind.MAP, fn))

    def flat_map(self, fn: Callable[[Row], Iterable[Row]]) -> Dataset:
        return self._and(Operation(Kind.FLAT_MAP, fn))

    def filter(self, fn: Callable[[Row], bool]) -> Dataset:
        return self._and(Operation(Kind.FILTER, fn))

    def group(self, key: str, fn: Callable[[Any, list[Row]], Iterable[Row]]) -> Dataset:
        """``fn(key, rows)`` of those in this shard that have ``key`` in common: of all, after a `shuffle` by it."""
        return self._and(Operation(Kind.GROUP, fn, key))

    def whole(self, fn: Callable[[Iterable[Row]], Iterable[Row]]) -> Dataset:
        """``fn(rows)`` of the shard."""
        return self._and(Operation(Kind.WHOLE, fn))

    def _and(self, operation: Operation) -> Dataset:
        return replace(self, operations=(*self.operations, operation))

    def store(self, name: str, columns: Columns) -> Dataset:
        """Stored, shard by shard; what follows has the same shards."""
        return self._stored(name, columns, Reads.SAME, self.shards)

    def shuffle(self, name: str, columns: Columns, key: str, parts: int) -> Dataset:
        """Stored, so that all rows of one ``key`` are in one shard of what follows."""
        return self._stored(name, columns, Reads.PART, parts, key)

    def gather(self, name: str, columns: Columns) -> Dataset:
        """Stored; what follows has all of it in one shard."""
        return self._stored(name, columns, Reads.ALL, 1)

    def _stored(self, name: str, columns: Columns, reads: Reads, shards: int, key: str = "") -> Dataset:
        if any(stage.name == name for stage in self.done):
            raise ValueError(f"two stages are named {name!r}: each needs a name of its own")
        parts = shards if reads is Reads.PART else 1
        stage = Stage(name, self.sources, self.reads, self.operations, columns, self.shards, key, parts)
        return Dataset(self.root, self.files, (*self.done, stage), (name,), reads, shards)

    def union(self, other: Dataset) -> Dataset:
        """Rows of both, which must have been shuffled into equally many parts.

        Raises:
            ValueError: they have other shards, or steps that are not stored.
        """
        if (self.reads, self.shards, self.operations) != (other.reads, other.shards, other.operations):
            raise ValueError("a union is of two datasets that were just stored, with the same shards")
        more = tuple(stage for stage in other.done if stage not in self.done)
        return replace(self, done=(*self.done, *more), sources=(*self.sources, *other.sources))

    def plan(self) -> Plan:
        """Raises: ValueError: the last step is not stored."""
        if self.operations or not self.done:
            raise ValueError("what a dataset computes must be stored at last: store(name, columns)")
        return Plan(self.root, self.files, self.done)


def spread(files: Sequence[tuple[str, int, float]], shards: int) -> tuple[tuple[tuple[str, int, float], ...], ...]:
    """So many shards (fewer, if there are fewer files), neighbours together, of about the same number of bytes."""
    total, taken = sum(size for _, size, _ in files), 0
    shards = max(1, min(shards, len(files)))
    split: list[list[tuple[str, int, float]]] = [[] for _ in range(shards)]
    for file in files:
        split[min(shards - 1, taken * shards // max(1, total))].append(file)
        taken += file[1]
    return tuple(tuple(shard) for shard in split)
