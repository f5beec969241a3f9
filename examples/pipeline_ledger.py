"""Assignment of the shards of a stage to workers, and the treatment of failed ones, in the pipeline example.

A shard whose worker is lost, or whose operations raise, goes to another worker. The first is not the shard's fault as
long as machines fail, but a shard that has lost `MOST_LOSSES` workers is given up; the second would most likely happen
again, so it is tried `MOST_ERRORS` times in all, by different workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_LOSSES = 4
MOST_ERRORS = 2


class ShardFailed(RuntimeError):
    """A shard was given up. ``reason`` is the last error, with its traceback."""

    def __init__(self, stage: str, shard: int, tries: int, reason: str) -> None:
        last = reason.strip().splitlines()[-1] if reason.strip() else "no reason given"
        super().__init__(f"shard {shard} of stage {stage!r} failed {tries} times, last with: {last}")
        self.stage, self.shard, self.tries, self.reason = stage, shard, tries, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardFailed, (self.stage, self.shard, self.tries, self.reason)


@dataclass
class Entry:
    """Unfinished shard."""

    worker: str = ""
    attempt: int = 0
    lost: int = 0
    errors: int = 0
    tried_by: set[str] = field(default_factory=set)


class Ledger:
    """State of a stage. Workers are names; a worker that restarts has a new name.

    Args:
        finished: shards that were finished before.
    """

    def __init__(self, stage: str, shards: int, finished: Collection[int] = ()) -> None:
        self.stage, self.shards, self.skipped = stage, shards, len(finished)
        self._open = {shard: Entry() for shard in range(shards) if shard not in finished}
        self.rows: dict[int, int] = {}
        self.retried = 0

    @property
    def done(self) -> int:
        return self.shards - len(self._open)

    @property
    def busy(self) -> int:
        return sum(1 for entry in self._open.values() if entry.worker)

    def finished(self) -> bool:
        return not self._open

    def take(self, worker: str, others: Iterable[str] = ()) -> tuple[int, int] | None:
        """Return the next shard and attempt for this worker; None: nothing now. A repeated call returns the same.

        A shard that the worker has tried before is left to ``others`` that have not.
        """
        for shard, entry in self._open.items():
            if entry.worker == worker:
                return shard, entry.attempt
        elsewhere = set(others) - {worker}
        for shard, entry in self._open.items():
            if not entry.worker and (worker not in entry.tried_by or elsewhere <= entry.tried_by):
                entry.worker, entry.attempt = worker, entry.attempt + 1
                entry.tried_by.add(worker)
                return shard, entry.attempt
        return None

    def succeed(self, shard: int, rows: int) -> None:
        """Record a finished shard, from any worker: one that seemed lost may finish before its replacement."""
        if self._open.pop(shard, None) is not None:
            self.rows[shard] = rows

    def fail(self, worker: str, shard: int, attempt: int, reason: str) -> None:
        """Record that the operations of a shard raised an error.

        Raises:
            ShardFailed: that happened too often.
        """
        entry = self._open.get(shard)
        if entry is None or (entry.worker, entry.attempt) != (worker, attempt):
            return
        entry.errors += 1
        self._again(shard, entry, entry.errors >= MOST_ERRORS, reason)

    def lose(self, worker: str) -> list[int]:
        """Record the loss of a worker; return the shards that it was computing.

        Raises:
            ShardFailed: a shard has lost too many workers.
        """
        lost = [shard for shard, entry in self._open.items() if entry.worker == worker]
        for shard in lost:
            entry = self._open[shard]
            entry.lost += 1
            self._again(shard, entry, entry.lost >= MOST_LOSSES, "its worker was lost, like earlier ones")
        return lost

    def _again(self, shard: int, entry: Entry, enough: bool, reason: str) -> None:
        entry.worker = ""
        if enough:
            raise ShardFailed(self.stage, shard, entry.attempt, reason)
        self.retried += 1
