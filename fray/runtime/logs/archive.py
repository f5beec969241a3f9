"""Reading the log of an attempt from the archive to which its machine has copied it (`fray.node.logs.archive`)."""

from __future__ import annotations

import gzip
import json

import trio

from fray.model.ids import AttemptId
from fray.model.log_records import INDEX, LogChunk, archive_directory
from fray.net import storage


class ArchivedLog:
    """One attempt's, object by object."""

    def __init__(self, archive: str, attempt_id: AttemptId) -> None:
        self.location = archive_directory(archive, attempt_id)
        self._objects: list[tuple[int, int, str]] | None = None

    async def read(self, line: int) -> LogChunk | None:
        """The lines of the object with that line, or of the next one there is; None: nothing more is archived.

        Raises whatever the storage raises; InvalidRequest: fsspec is not installed here.
        """
        for first, end, name in await self._index():
            if end > line:
                packed = await storage.read(f"{self.location}/{name}")
                return LogChunk(first, end, await trio.to_thread.run_sync(gzip.decompress, packed))
        return None

    async def _index(self) -> list[tuple[int, int, str]]:
        if self._objects is None:
            try:
                told = json.loads(await storage.read(f"{self.location}/{INDEX}"))
            except FileNotFoundError:
                told = {"objects": []}
            self._objects = sorted((one["first"], one["end"], one["object"]) for one in told["objects"])
        return self._objects
