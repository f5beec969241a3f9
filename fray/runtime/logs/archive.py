"""Reader of an attempt's log in the archive, where its node has copied it (`fray.node.logs.archive`)."""

from __future__ import annotations

import gzip
import json

import trio

from fray.model.ids import AttemptId
from fray.model.log_records import INDEX, LogChunk, archive_directory
from fray.net import storage


class ArchivedLog:
    """Archived log of one attempt, read object by object."""

    def __init__(self, archive: str, attempt_id: AttemptId) -> None:
        self.location = archive_directory(archive, attempt_id)
        self._objects: list[tuple[int, int, str]] | None = None

    async def read(self, line: int) -> LogChunk | None:
        """Return the lines of the object with that line, or of the next object; None: nothing more is archived.

        Raises any error of the storage; InvalidRequest: fsspec is not installed here.
        """
        # Objects are in order, so the first one that ends behind the line contains it, or begins after a gap.
        for first, end, name in await self._index():
            if end > line:
                packed = await storage.read(f"{self.location}/{name}")
                # Decompressing megabytes would hold up the loop.
                return LogChunk(first, end, await trio.to_thread.run_sync(gzip.decompress, packed))
        return None

    async def _index(self) -> list[tuple[int, int, str]]:
        if self._objects is None:
            try:
                index = json.loads(await storage.read(f"{self.location}/{INDEX}"))
            # Nothing was archived before the machine ended.
            except FileNotFoundError:
                index = {"objects": []}
            self._objects = sorted((entry["first"], entry["end"], entry["object"]) for entry in index["objects"])
        return self._objects
