"""Copier of attempt logs to an archive that outlives the node (`--log-archive`).

Invariants: whole segments only: the finished ones of a running attempt, all of an ended one. Each becomes one
compressed object; an index beside them, rewritten after each object, says which lines are where, so everything it names
exists. What was copied is recorded on disk, so a restarted node continues. No attempt waits for the archive.
"""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from fray.model.backoff import backoff_s
from fray.model.log_records import INDEX, archive_directory
from fray.net import storage
from fray.net.atomic_file import write_atomically
from fray.node.logs.store import LogStore
from fray.node.logs.tail import end_of, segments

SCAN_EVERY_S = 30.0
"""Seconds between scans for finished segments of long logs; the end of an attempt triggers a scan at once."""
SCAN_MIN_S = 1.0
RETRY_FIRST_S, RETRY_MAX_S = 1.0, 300.0
ARCHIVED = "archived"
"""File in an attempt's log directory that lists what is in the archive."""

log = logging.getLogger("fray.node.logs.store")


@frozen
class _PendingCopy:
    """Segment to be copied."""

    directory: Path
    first: int
    path: Path


class Archiver:
    """The one task that copies."""

    def __init__(self, store: LogStore) -> None:
        self._store, self._archive = store, store.rules.archive
        self._wake = trio.Event()
        self._failures = 0
        self._done: set[Path] = set()
        """Attempts that have ended and are copied completely."""

    def wake(self) -> None:
        """Scan soon: an attempt has ended."""
        self._wake.set()

    async def run(self) -> None:
        """Copy until cancelled."""
        while True:
            self._wake = trio.Event()
            # After the event was replaced: an end during the copying causes another scan.
            await self.copy_pending()
            await trio.sleep(SCAN_MIN_S)  # one scan for many ends
            with trio.move_on_after(self.pause_s()):
                while self._failures:  # the end of an attempt must not shorten the back-off
                    await trio.sleep_forever()
                await self._wake.wait()

    async def copy_pending(self) -> int:
        """Copy what is pending until something fails; return the number of objects written."""
        done = 0
        for pending in await trio.to_thread.run_sync(self._find_all_pending):
            # What fails once (no network, no permission) fails for all: the others wait for the back-off, too.
            if not await self._try(pending):
                break
            done += 1
        return done

    def pause_s(self) -> float:
        """Return the seconds until the next scan; more after each failure."""
        return backoff_s(RETRY_FIRST_S, RETRY_MAX_S, self._failures) if self._failures else SCAN_EVERY_S

    async def _try(self, pending: _PendingCopy) -> bool:
        try:
            await self._copy(pending)
        except Exception as error:  # noqa: BLE001 - storages raise anything
            self._failures += 1
            if self._failures == 1:
                log.error("logs cannot be archived; retrying: %s", error, extra={"archive": self._archive})
            return False
        if self._failures:
            log.info("archiving of logs resumed", extra={"archive": self._archive, "failures": self._failures})
        self._failures = 0
        return True

    async def _copy(self, pending: _PendingCopy) -> None:
        data = await trio.to_thread.run_sync(_read, pending.path)
        if data is None:
            return  # already removed by retention
        attempt_id = (pending.directory / "attempt").read_text()
        place, name = archive_directory(self._archive, attempt_id), f"{pending.first:012d}.log.gz"
        # In a thread: compressing 4 MiB would hold up the node's loop.
        packed = await trio.to_thread.run_sync(gzip.compress, data, 6)
        # The object first, then the index: everything that the index names can be read.
        await storage.write(f"{place}/{name}", packed)
        index = _read_index(pending.directory)
        index["attempt"] = attempt_id
        end = end_of(data, pending.first)[0]
        # A copy that was interrupted before the local index was written is made once more.
        others = [one for one in index["objects"] if one["first"] != pending.first]
        index["objects"] = [*others, {"object": name, "first": pending.first, "end": end, "bytes": len(data)}]
        await storage.write(f"{place}/{INDEX}", json.dumps(index).encode())
        # Last: what is recorded here is not copied again.
        _write_index(pending.directory, index)

    def _find_all_pending(self) -> list[_PendingCopy]:
        found: list[_PendingCopy] = []
        for directory in self._store.directories():
            if directory not in self._done:
                pending = _find_pending(directory)
                if not pending and (directory / "ended").exists():
                    # Never looked at again: a node keeps up to 20,000 ended attempts, and an end triggers a scan.
                    self._done.add(directory)
                found += pending
        return found


def _find_pending(directory: Path) -> list[_PendingCopy]:
    has_ended = (directory / "ended").exists()
    archived = {one["first"] for one in _read_index(directory)["objects"]}
    found = segments(directory)
    return [
        _PendingCopy(directory, first, path)
        # The last segment of a running attempt is still being written.
        for first, path in (found if has_ended else found[:-1])
        if first not in archived
    ]


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _read_index(directory: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((directory / ARCHIVED).read_text())
    except (FileNotFoundError, ValueError):
        return {"attempt": "", "objects": []}
    return index


def _write_index(directory: Path, index: dict[str, Any]) -> None:
    write_atomically(directory / ARCHIVED, json.dumps(index).encode())
