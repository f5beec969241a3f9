"""Use of the engines by user, which the service counts and keeps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import trio

from fray.tinker.core.usage import DayTotals, DayUsage, UsageWindow, UserUsage
from fray.tinker.store import ServiceStore

WRITE_S = 10.0
"""Pause between two writes: what was used since the last is lost if the service is killed."""
DAY_S = 86_400
KEPT_DAYS = 400
"""Days that are kept: a year can be compared with the one before it in its first month."""


class ServiceUsage:
    """Use of the last minute in memory, and by day in the store. `run` writes it.

    Args:
        store: of the service.
    """

    def __init__(self, store: ServiceStore) -> None:
        self._store, self._window, self._unwritten = store, UsageWindow(), DayTotals()

    def add(self, user_id: str, tokens: int, seconds: float) -> None:
        """Count tokens, and seconds of an engine."""
        self._window.add(trio.current_time(), user_id, tokens, seconds)
        self._unwritten.add(DayUsage(_today(), user_id, tokens, seconds))

    def last_minute(self) -> Mapping[str, UserUsage]:
        """Return the use by user id; users without any are missing."""
        return self._window.by_user(trio.current_time())

    async def by_day(self, days: int) -> Sequence[DayUsage]:
        """Return the use of the last ``days`` days with today, oldest first. Raises StoreFailed."""
        # What is not on disk yet would be missing.
        await self._write()
        found: Sequence[DayUsage] = await self._store.call(self._store.usage_since, _today(before=days - 1))
        return found

    async def run(self) -> None:
        """Write the use each `WRITE_S` seconds until cancelled, and what is left then."""
        try:
            while True:
                await trio.sleep(WRITE_S)
                await self._write()
        finally:
            await self._write()

    async def _write(self) -> None:
        """Write what was used since the last time; if the database fails, it is written the next time."""
        if taken := self._unwritten.take():
            oldest = _today(before=KEPT_DAYS - 1)
            if not await self._store.attempt(self._store.add_usage, taken, oldest):
                self._unwritten.restore(taken)


def _today(*, before: int = 0) -> str:
    """Return the day (UTC), or the one so many days before it."""
    return time.strftime("%Y-%m-%d", time.gmtime(time.time() - before * DAY_S))
