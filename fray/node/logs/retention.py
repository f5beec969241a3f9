"""Background work on a node's logs: reading pages, retention, archiving.

Invariants: all of it happens in threads and a task of its own; no start or end of an attempt waits for it.
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
"""Multiple of the duration of a sweep that passes before the next one."""
READERS = 2
"""Threads that read pages at a time."""

log = logging.getLogger("fray.node.logs.store")


class DiskLogs:
    """The `fray.node.logs.store.AttemptLogs` of a node with a disk."""

    def __init__(self, store: LogStore) -> None:
        self.store = store
        self.archiver: Archiver | None = None
        if store.rules.archive:
            from fray.node.logs.archive import Archiver  # few nodes have one, and every start imports this module

            self.archiver = Archiver(store)
        self._readers = trio.CapacityLimiter(READERS)

    async def read(self, ask: ReadLog) -> tuple[LogPage, Bytes]:
        look = partial(self.store.read, ask, time.time())
        # A limiter of its own, so that slow disks do not use up the threads of everything else in the node.
        return await trio.to_thread.run_sync(look, limiter=self._readers, abandon_on_cancel=True)

    def ended(self, attempt_id: AttemptId) -> None:
        """Note that an attempt's log is complete."""
        if self.archiver is not None:
            self.archiver.wake()

    async def run(self) -> None:
        """Sweep and archive until cancelled."""
        async with trio.open_nursery() as nursery:
            if self.archiver is not None:
                nursery.start_soon(self.archiver.run)
            took_s = 0.0
            while True:
                # A hundred times as long as the sweep took: with thousands of directories on a slow disk it costs 1 %
                # at most.
                await trio.sleep(max(SWEEP_EVERY_S, took_s * SWEEP_REST))
                began = trio.current_time()
                await trio.to_thread.run_sync(self._sweep, abandon_on_cancel=True)
                took_s = trio.current_time() - began

    def _sweep(self) -> None:
        try:
            self.store.sweep(time.time())
        except OSError as error:
            # Tried again with the next sweep; a log that cannot be removed must not end the node.
            log.warning("log retention failed: %s", error)
