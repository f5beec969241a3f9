"""Shards of the pipeline example: Parquet files in fsspec storage, written whole or not at all.

A shard is written under a temporary name and then renamed, so that a file of the right name is a finished shard, even
if a worker died while writing. (A local rename is atomic. Object stores copy, and show the copy when it is complete.)
Two workers with the same task write the same rows, so either may rename last.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline_plan import Piece, Plan, Reads, Row, Stage, applied, part_of

PLAN_FILE = "plan.json"
NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}
SUFFIXES = (".py", ".pyi", ".txt", ".md", ".rst")


class OtherPlan(ValueError):
    """The output holds shards of another computation."""


class Store:
    """Directory in any storage that fsspec supports: ``/data/out``, ``gs://bucket/out``, ``memory://out``."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self._root = fsspec.core.url_to_fs(self.url)

    def at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def write(self, path: str, fill: Callable[[Any], None], before_name: Callable[[], None] = lambda: None) -> None:
        """Let ``fill(file)`` write a file, then give it its name. After a failure, no file has the name."""
        self.fs.makedirs(self.at(path).rpartition("/")[0], exist_ok=True)
        part = self.at(f"{path}.{uuid.uuid4().hex}.tmp")
        try:
            with self.fs.open(part, "wb") as file:
                fill(file)
            before_name()
            self.fs.mv(part, self.at(path))
        except BaseException:
            if self.fs.exists(part):
                self.fs.rm(part)
            raise

    def files(self, directory: str) -> set[str]:
        """Return the names in a directory; empty if it does not exist."""
        self.fs.invalidate_cache()
        try:
            return {name.rsplit("/", 1)[1] for name in self.fs.ls(self.at(directory), detail=False)}
        except FileNotFoundError:
            return set()

    def clear(self, directories: Iterable[str]) -> int:
        """Delete half-written files; return their number. No worker may be writing."""
        left = [f"{one}/{name}" for one in directories for name in self.files(one) if name.endswith(".tmp")]
        for path in left:
            self.fs.rm(self.at(path))
        return len(left)


# The input -----------------------------------------------------------------------------------------------------------


def list_files(root: str, suffixes: Sequence[str] = SUFFIXES) -> list[tuple[str, int, float]]:
    """Return name below ``root``, size and age of each text there, in order; skip installed packages.

    Raises:
        FileNotFoundError: no such directory, or no text in it.
    """
    store = Store(root)
    if not store.fs.isdir(store.at("")):
        raise FileNotFoundError(f"there is no directory {root}: pass one with --input")
    found = []
    for _, directories, files in store.fs.walk(store.at(""), detail=True):
        for name in NOT_OURS & directories.keys():
            del directories[name]  # so that it is not walked
        for name, about in files.items():
            if name.endswith(tuple(suffixes)):
                path = about["name"][len(store.at("")) :]
                found.append((path, int(about["size"]), float(about.get("mtime") or 0)))
    if not found:
        raise FileNotFoundError(f"there is no text in {root}: files that end in {', '.join(suffixes)} count")
    return sorted(found)


def sources(root: str, paths: Iterable[str]) -> Iterator[Row]:
    """Yield rows of ``path`` and ``text``; bytes that are not valid UTF-8 become question marks."""
    store = Store(root)
    for path in paths:
        with store.fs.open(store.at(path), "rb") as file:
            yield {"path": path, "text": file.read().decode("utf-8", "replace")}


# Shards --------------------------------------------------------------------------------------------------------------


def read_rows(store: Store, pieces: Iterable[Piece]) -> Iterator[Row]:
    """Yield all rows of these shards, or of one part of each."""
    for piece in pieces:
        with store.fs.open(store.at(piece.path), "rb") as file:
            parquet = pq.ParquetFile(file)
            table = parquet.read() if piece.part is None else parquet.read_row_group(piece.part)
        yield from table.to_pylist()


def write_rows(
    store: Store, path: str, stage: Stage, rows: Iterable[Row], before_name: Callable[[], None] = lambda: None
) -> int:
    """Write a finished shard, with a row group for each part, in the order of the rows; return their number."""
    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in stage.columns])
    parts: list[list[Row]] = [[] for _ in range(stage.parts)]
    for row in rows:
        parts[part_of(row[stage.split_by], stage.parts) if stage.split_by else 0].append(row)

    def fill(file: Any) -> None:
        with pq.ParquetWriter(file, schema, compression="zstd") as parquet:
            for part in parts:
                parquet.write_table(pa.Table.from_pylist(part, schema=schema), row_group_size=max(1, len(part)))

    store.write(path, fill, before_name)
    return sum(map(len, parts))


def rows_in(store: Store, path: str) -> int:
    """Return the number of rows of a finished shard, without reading them."""
    with store.fs.open(store.at(path), "rb") as file:
        return int(pq.read_metadata(file).num_rows)


def run_shard(
    store: Store,
    root: str,
    stage: Stage,
    shard: int,
    pieces: Sequence[Piece],
    before_name: Callable[[], None] = lambda: None,
) -> int:
    """Run a task: read, apply the stage's operations, write. Return the number of rows written."""
    paths = (piece.path for piece in pieces)
    rows = sources(root, paths) if stage.reads is Reads.FILES else read_rows(store, pieces)
    return write_rows(store, stage.file(shard), stage, applied(stage.operations, rows), before_name)


def finished_shards(store: Store, stage: Stage) -> set[int]:
    """Return the shards that an earlier run has finished."""
    names = store.files(stage.name)
    return {shard for shard in range(stage.shards) if stage.file(shard).rpartition("/")[2] in names}


def stored_rows(output: str, plan: Plan, name: str) -> list[Row]:
    """Return all rows of a finished stage."""
    (stage,) = (stage for stage in plan.stages if stage.name == name)
    return list(read_rows(Store(output), (Piece(stage.file(shard)) for shard in range(stage.shards))))


def open_output(url: str, plan: Plan) -> tuple[Store, int]:
    """Open the output of a plan; return it with the number of half-written files of an earlier run, which are deleted.

    Raises:
        OtherPlan: the output belongs to another plan.
    """
    store = Store(url)
    fingerprint = plan.fingerprint()
    if PLAN_FILE in store.files(""):
        with store.fs.open(store.at(PLAN_FILE), "rb") as file:
            if json.load(file)["fingerprint"] != fingerprint:
                raise OtherPlan(
                    f"{url} has shards of another input or of another plan: pass another --output, or remove it"
                )
        return store, store.clear(stage.name for stage in plan.stages)
    text = json.dumps({"fingerprint": fingerprint, "stages": [stage.name for stage in plan.stages]}, indent=1)
    store.write(PLAN_FILE, lambda file: file.write(text.encode()))
    return store, 0
