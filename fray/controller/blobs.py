"""Storage of payloads and results: opaque bytes named by their SHA-256, in a directory or in memory."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fray.model.ids import BlobId
from fray.net.atomic_file import write_atomically


class Blobs(Protocol):
    """Blob storage. A blob is readable once it is put, and durable after the next `commit`."""

    def put(self, data: bytes) -> BlobId: ...
    def commit(self) -> None: ...
    def has(self, blob: BlobId) -> bool: ...
    def get(self, blob: BlobId) -> bytes | None: ...
    def forget(self, blob: BlobId) -> None: ...
    def all(self) -> set[BlobId]: ...


class BlobDict:
    """Blobs in memory."""

    def __init__(self) -> None:
        self._blobs: dict[BlobId, bytes] = {}

    def put(self, data: bytes) -> BlobId:
        blob = hashlib.sha256(data).hexdigest()
        self._blobs[blob] = data
        return blob

    def commit(self) -> None:
        pass

    def has(self, blob: BlobId) -> bool:
        return blob in self._blobs

    def get(self, blob: BlobId) -> bytes | None:
        return self._blobs.get(blob)

    def forget(self, blob: BlobId) -> None:
        self._blobs.pop(blob, None)

    def all(self) -> set[BlobId]:
        return set(self._blobs)


class BlobDirectory:
    """Blobs as files. A file under its final name is complete: it was flushed before it got that name."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True, mode=0o700)
        self._directory = directory
        self._unwritten: dict[BlobId, bytes] = {}
        # Drafts of a controller that was killed while it wrote.
        for draft in directory.glob("*.new"):
            draft.unlink()
        self._stored = {entry.name for entry in directory.iterdir()}

    def put(self, data: bytes) -> BlobId:
        blob = hashlib.sha256(data).hexdigest()
        if blob not in self._stored:
            # Written by `commit`: one flush of the directory serves a batch, and the blob of a refused request never
            # reaches the disk.
            self._unwritten[blob] = data
        return blob

    def commit(self) -> None:
        if not self._unwritten:
            return
        for blob, data in self._unwritten.items():
            write_atomically(self._directory / blob, data, durable=True)
        # The renames; without it a power cut may lose the names of files whose content is on disk.
        flush(self._directory)
        self._stored.update(self._unwritten)
        self._unwritten.clear()

    def has(self, blob: BlobId) -> bool:
        # The names are in memory, so that a launch of 10,000 jobs makes no system calls to look for their payloads.
        return blob in self._unwritten or blob in self._stored

    def get(self, blob: BlobId) -> bytes | None:
        if blob not in self._stored:
            return self._unwritten.get(blob)
        try:
            data = (self._directory / blob).read_bytes()
        except OSError:
            data = b""
        # Checked at each read: a damaged pickle could run as something else in a user's job.
        if hashlib.sha256(data).hexdigest() == blob:
            return data
        self._stored.discard(blob)  # so that the next upload repairs it
        return None

    def forget(self, blob: BlobId) -> None:
        self._unwritten.pop(blob, None)
        if blob in self._stored:
            self._stored.discard(blob)
            with suppress(OSError):  # a file that stays does no harm
                (self._directory / blob).unlink(missing_ok=True)

    def all(self) -> set[BlobId]:
        return self._stored | self._unwritten.keys()


def flush(path: Path) -> None:
    """Flush a file, or the renames in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
