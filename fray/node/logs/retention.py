"""What a node does with its logs besides writing them: answers who reads, drops what is too old or too much, archives.

Law: all of it is work for threads and for a task of its own; no attempt's start or end waits for any of it.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import trio

from fray.model.ids import AttemptId
from fray.model.log_records import Bytes
from fray.model.messages.node import LogPage, ReadLog
from fray.node.logs.store import LogStore

if TYPE_CHECKING:
    from fray.node.logs.archive import Archiver

SWEEP_EVERY_S = 60.0
SWEEP_REST = 100
"""After a sweep it rests so many times as long as that took."""
READERS = 2
"""Threads that look for pages at a time."""

log = logging.getLogger("fray.node.logs.store")


class DiskLogs:
    """`fray.node.logs.store.Logs` of a node with a disk."""

    def __init__(self, store: LogStore) -> None:
        self.store = store
        self.archiver: Archiver | None = None
        if store.rules.archive:
            from fray.node.logs.archive import Archiver  # few have one, and every node starts here

            self.archiver = Archiver(store)
        self._readers = trio.CapacityLimiter(READERS)

    async def read(self, ask: ReadLog) -> tuple[LogPage, Bytes]:
        look = partial(self.store.read, ask, time.time())
        return await trio.to_thread.run_sync(look, limiter=self._readers, abandon_on_cancel=True)

    def ended(self, attempt_id: AttemptId) -> None:
        """Nothing more is written to its log."""
        if self.archiver is not None:
            self.archiver.wake()

    async def run(self) -> None:
        """Sweep and archive until cancelled."""
        async with trio.open_nursery() as nursery:
            if self.archiver is not None:
                nursery.start_soon(self.archiver.run)
            took_s = 0.0
            while True:
                await trio.sleep(max(SWEEP_EVERY_S, took_s * SWEEP_REST))
                began = trio.current_time()
                await trio.to_thread.run_sync(self._sweep, abandon_on_cancel=True)
                took_s = trio.current_time() - began

    def _sweep(self) -> None:
        try:
            self.store.sweep(time.time())
        except OSError as error:
            log.warning("logs cannot be tidied up: %s", error)
