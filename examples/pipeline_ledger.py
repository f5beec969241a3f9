"""Who does which shard of a stage, and what becomes of those that fail: what the pipeline example decides.

A shard whose worker is lost, or whose operations raise, goes to another worker. These are different things: the first
is nobody's fault, and happens again as long as machines die, but a shard that takes `MOST_LOSSES` workers with it is
given up; the second would most likely happen again, so it is tried `MOST_ERRORS` times in all, by different workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_LOSSES = 4
MOST_ERRORS = 2


class ShardFailed(RuntimeError):
    """A shard was given up. ``reason`` is what was raised at last, with its traceback."""

    def __init__(self, stage: str, shard: int, tries: int, reason: str) -> None:
        last = reason.strip().splitlines()[-1] if reason.strip() else "no reason given"
        super().__init__(f"shard {shard} of stage {stage!r} failed {tries} times, at last with: {last}")
        self.stage, self.shard, self.tries, self.reason = stage, shard, tries, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardFailed, (self.stage, self.shard, self.tries, self.reason)


@dataclass
class Entry:
    """A shard that is to be done."""

    worker: str = ""
    attempt: int = 0
    lost: int = 0
    errors: int = 0
    tried_by: set[str] = field(default_factory=set)


class Ledger:
    """One stage. Workers are names, which a worker that comes again after its end does not share with its former self.

    Args:
        finished: shards that were done before.
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
        """Shard and attempt that this worker does next; None: nothing for it now. Who asks twice is told the same.

        A shard that it has tried before is left to those ``others`` that have not.
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
        """It is written, whoever did it: one who was thought lost may be quicker than the one who does it again."""
        if self._open.pop(shard, None) is not None:
            self.rows[shard] = rows

    def fail(self, worker: str, shard: int, attempt: int, reason: str) -> None:
        """Its operations raised.

        Raises:
            ShardFailed: too often.
        """
        entry = self._open.get(shard)
        if entry is None or (entry.worker, entry.attempt) != (worker, attempt):
            return
        entry.errors += 1
        self._again(shard, entry, entry.errors >= MOST_ERRORS, reason)

    def lose(self, worker: str) -> list[int]:
        """This worker is no more; the shards that it was doing.

        Raises:
            ShardFailed: one of them has cost too many workers.
        """
        lost = [shard for shard, entry in self._open.items() if entry.worker == worker]
        for shard in lost:
            entry = self._open[shard]
            entry.lost += 1
            self._again(shard, entry, entry.lost >= MOST_LOSSES, "its worker was lost, as those before")
        return lost

    def _again(self, shard: int, entry: Entry, enough: bool, reason: str) -> None:
        entry.worker = ""
        if enough:
            raise ShardFailed(self.stage, shard, entry.attempt, reason)
        self.retried += 1
