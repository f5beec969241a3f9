"""Waits of a job for what it has launched, counted so that the job can lend its CPUs meanwhile.

Code that waits for jobs, calls or tasks does so inside `waiting`. While at least one task or thread of a job is inside,
for longer than `DEBOUNCE_S`, its `WaitCounter` reports that to the controller, which lends its CPUs to the jobs below
it (`fray.scheduler.placement.lending`). Only jobs that have launched something have a reporter; for all other code
`waiting` costs next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import trio

from fray.errors import FrayError
from fray.model.messages.client import ReportWait

DEBOUNCE_S = 0.05
"""Seconds for which a job has to wait before it is reported: most waits are for calls that take less."""


class WaitCounter:
    """Waits of the code of one job, and the task that reports them. A wait may begin and end on any thread."""

    def __init__(self, token: trio.lowlevel.TrioToken, send: Callable[[ReportWait], Awaitable[object]]) -> None:
        self._token = token
        self._send = send
        self._count = 0
        self._lock = threading.Lock()
        self._changed = trio.Event()

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, number: int) -> None:
        with self._lock:
            was_waiting = self._count > 0
            self._count += number
            changes = was_waiting != (self._count > 0)
        if not changes:
            return
        # Directly where possible: what a thread asks for comes at a time that no seed decides.
        if trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self._token:
            self._notify()
            return
        try:
            self._token.run_sync_soon(self._notify, idempotent=True)
        except trio.RunFinishedError:
            pass  # the job has ended, and lends nothing any more

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def run(self) -> None:
        """Report changes until cancelled, one report at a time: the last one is the truth."""
        reported = False
        try:
            while True:
                waits = self._count > 0
                if waits is reported:
                    await self._changed.wait()
                    continue
                if waits:
                    await trio.sleep(DEBOUNCE_S)
                    waits = self._count > 0
                if waits is not reported:
                    await self._send(ReportWait(waiting=waits))
                    reported = waits
        except FrayError:
            pass  # the session has ended, and everything that is waited for with it


waiting: Callable[[], AbstractContextManager[None]] = nullcontext
"""Return the context in which code waits for something that its job may have launched. Call it by the module's name: it
is replaced when the first job of this process counts its waits."""


def set_finder(find: Callable[[], WaitCounter | None]) -> None:
    """Count waits from now on. ``find`` returns the counter of the running code: this module is below the `Runtime`."""

    def counted() -> AbstractContextManager[None]:
        counter = find()
        return nullcontext() if counter is None else counter.counted()

    global waiting
    waiting = counted
