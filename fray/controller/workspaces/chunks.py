"""Storage of the chunks of workspaces and large values: files named by the SHA-256 of their bytes, or memory.

A chunk under its final name is complete, though not flushed; that is done once, before the bundle that needs it counts
as complete. Everything here blocks; `fray.controller.workspaces.bundles` calls it from threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from attrs import define, field, frozen

from fray.controller.blobs import flush
from fray.model.ids import BlobId
from fray.net.atomic_file import write_atomically


@frozen
class CompleteBundle:
    """Record of a complete bundle."""

    parts: tuple[BlobId, ...]
    """Chunks of its manifest."""
    chunks: frozenset[BlobId]
    size_bytes: int = 0
    """Size of a large value, whose content ``parts`` are then; 0 for a workspace."""


class ChunkStore(Protocol):
    """Storage of chunks and of the records of complete bundles."""

    blocks: bool
    """True if calls wait for a disk, so that they must be made from a thread."""

    def has(self, chunk: BlobId) -> bool: ...
    def put(self, chunk: BlobId, data: bytes) -> None:
        """Store a chunk. Raises OSError; nothing of the chunk is left then."""

    def get(self, chunk: BlobId) -> bytes | None:
        """Return a chunk; None if it is missing or damaged (then it is deleted)."""

    def drop(self, chunks: Iterable[BlobId]) -> None: ...
    def ages(self) -> dict[BlobId, tuple[int, float]]:
        """Return the size and the age in seconds of every chunk."""

    def free_bytes(self) -> int:
        """Return the free space on the disk."""

    def complete(self, bundle: BlobId, record: CompleteBundle) -> None:
        """Record a bundle whose chunks are all stored; durable when this returns."""

    def bundles(self) -> dict[BlobId, float]:
        """Return the complete bundles, with the seconds since each was used."""

    def record(self, bundle: BlobId) -> CompleteBundle | None: ...
    def touch(self, bundle: BlobId) -> None:
        """Record that the bundle is used now."""

    def forget(self, bundle: BlobId) -> None:
        """Delete the record; the chunks stay."""


@define
class ChunkDict:
    """Chunks in memory, for simulated clusters."""

    blocks: bool = False
    _data: dict[BlobId, bytes] = field(factory=dict)
    _records: dict[BlobId, CompleteBundle] = field(factory=dict)

    def has(self, chunk: BlobId) -> bool:
        return chunk in self._data

    def put(self, chunk: BlobId, data: bytes) -> None:
        self._data[chunk] = data

    def get(self, chunk: BlobId) -> bytes | None:
        return self._data.get(chunk)

    def drop(self, chunks: Iterable[BlobId]) -> None:
        for chunk in chunks:
            self._data.pop(chunk, None)

    def ages(self) -> dict[BlobId, tuple[int, float]]:
        return {chunk: (len(data), 0.0) for chunk, data in self._data.items()}

    def free_bytes(self) -> int:
        return 1 << 62

    def complete(self, bundle: BlobId, record: CompleteBundle) -> None:
        self._records[bundle] = record

    def bundles(self) -> dict[BlobId, float]:
        return dict.fromkeys(self._records, 0.0)

    def record(self, bundle: BlobId) -> CompleteBundle | None:
        return self._records.get(bundle)

    def touch(self, bundle: BlobId) -> None:
        pass

    def forget(self, bundle: BlobId) -> None:
        self._records.pop(bundle, None)


class ChunkDirectory:
    """Chunks as files in ``chunks/`` and records in ``complete/``, below a directory made with the first chunk.

    Args:
        durable: flush what is complete, so that it survives a power cut.
    """

    blocks = True

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        self._root, self._durable = directory, durable
        self._chunks, self._complete = directory / "chunks", directory / "complete"
        for draft in (*self._chunks.glob("*.new"), *self._complete.glob("*.new")):
            draft.unlink(missing_ok=True)

    def has(self, chunk: BlobId) -> bool:
        return (self._chunks / chunk).exists()

    def put(self, chunk: BlobId, data: bytes) -> None:
        self._chunks.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Not flushed: one flush a chunk would make an upload wait for the disk hundreds of times.
        write_atomically(self._chunks / chunk, data)

    def get(self, chunk: BlobId) -> bytes | None:
        try:
            data = (self._chunks / chunk).read_bytes()
        except OSError:
            return None
        if hashlib.sha256(data).hexdigest() == chunk:
            return data
        self.drop((chunk,))
        return None

    def drop(self, chunks: Iterable[BlobId]) -> None:
        for chunk in chunks:
            (self._chunks / chunk).unlink(missing_ok=True)

    def ages(self) -> dict[BlobId, tuple[int, float]]:
        return {name: (size, age_s) for name, size, age_s in _entries(self._chunks)}

    def free_bytes(self) -> int:
        # The directory is made with the first chunk, but its disk is known before.
        existing = next(path for path in (self._root, *self._root.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def complete(self, bundle: BlobId, record: CompleteBundle) -> None:
        # All contents before the record: after a power cut a record must not name chunks that are empty files.
        if self._durable:
            for chunk in {*record.parts, *record.chunks}:
                flush(self._chunks / chunk)
            flush(self._chunks)
        self._complete.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = {"parts": record.parts, "chunks": sorted(record.chunks), "size_bytes": record.size_bytes}
        write_atomically(self._complete / bundle, json.dumps(content).encode())
        if self._durable:
            flush(self._complete / bundle)
            flush(self._complete)

    def bundles(self) -> dict[BlobId, float]:
        return {name: age_s for name, _, age_s in _entries(self._complete)}

    def record(self, bundle: BlobId) -> CompleteBundle | None:
        try:
            record = json.loads((self._complete / bundle).read_bytes())
            size_bytes = int(record.get("size_bytes", 0))  # records of earlier versions are of workspaces
            return CompleteBundle(tuple(record["parts"]), frozenset(record["chunks"]), size_bytes)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def touch(self, bundle: BlobId) -> None:
        # The modification time of the record is the time of its last use; a sweep may have removed it just now.
        with suppress(OSError):
            os.utime(self._complete / bundle)

    def forget(self, bundle: BlobId) -> None:
        (self._complete / bundle).unlink(missing_ok=True)


def _entries(directory: Path) -> list[tuple[str, int, float]]:
    """Return name, size and age of the files that have their final name."""
    found, now = [], time.time()
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.endswith(".new"):
                seen = entry.stat()
                # A clock that was set back would give negative ages.
                found.append((entry.name, seen.st_size, max(0.0, now - seen.st_mtime)))
    return found
