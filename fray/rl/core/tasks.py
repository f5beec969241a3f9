"""Tasks of a run, in the order in which they are given to rollout workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256

from attrs import define, field, frozen, validators


@frozen
class RolloutTask:
    """One episode to be rolled out: a row of the data, and which of its repeats.

    Tasks sort as they were loaded.
    """

    epoch: int
    position: int
    """Place of the row in its epoch, after shuffling; rows added later have an epoch of -1 and count on."""
    repeat: int
    row: int
    """Index of the row in the data; that of an added row is its place behind the data."""
    samples: int = 1
    """Number of samples that the episode returns: 1, or the size of the group if it rolls out a whole one."""

    def __lt__(self, other: RolloutTask) -> bool:
        # Written out: those of attrs take five times as long, and every sample is compared many times.
        return (self.epoch, self.position, self.repeat) < (other.epoch, other.position, other.repeat)

    @property
    def task_id(self) -> str:
        return f"{self.group_id}-{self.repeat}"

    @property
    def group_id(self) -> str:
        """Name of the group: all repeats of a row in one epoch."""
        return f"{self.epoch}-{self.position}"


@define
class TaskOrder:
    """Rows of the data as tasks, batch by batch and epoch by epoch.

    Args:
        rows: number of rows; at least 1.
        batch_rows: rows that are loaded at a time. The last batch of an epoch may be smaller.
        repeats: tasks for each row (the size of a group).
        epochs: None for as many as the run takes.
        seed: shuffles each epoch in an order of its own; None keeps the order of the data.
        skip_batches: batches that are not loaded at the start.
        whole_groups: one task for all repeats of a row.

    Raises:
        ValueError: a number is below 1, or ``skip_batches`` below 0.
    """

    rows: int = field(validator=validators.ge(1))
    batch_rows: int = field(validator=validators.ge(1))
    repeats: int = field(default=1, validator=validators.ge(1))
    epochs: int | None = 1
    seed: int | None = None
    skip_batches: int = field(default=0, validator=validators.ge(0))
    whole_groups: bool = False
    _shuffled: tuple[int, list[int]] = field(init=False, default=(-1, []))

    def __attrs_post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"invalid epochs {self.epochs}: expected at least 1, or None")

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.rows // self.batch_rows)

    def has_batch(self, number: int) -> bool:
        """Return whether there is a batch of this number, counted from 0 over all epochs."""
        return self.epochs is None or self.skip_batches + number < self.epochs * self.batches_per_epoch

    def batch(self, number: int) -> list[RolloutTask]:
        """Return the tasks of a batch. Raises IndexError if there is none."""
        if not self.has_batch(number):
            raise IndexError(f"batch {number} of {self.rows} rows in {self.epochs} epochs")
        epoch, index = divmod(self.skip_batches + number, self.batches_per_epoch)
        order = self._order(epoch)
        places = range(index * self.batch_rows, min((index + 1) * self.batch_rows, self.rows))
        return [task for place in places for task in self.tasks_of(epoch, place, order[place])]

    def tasks_of(self, epoch: int, position: int, row: int) -> Iterator[RolloutTask]:
        """Return the tasks of a row."""
        if self.whole_groups:
            yield RolloutTask(epoch, position, 0, row, self.repeats)
            return
        for repeat in range(self.repeats):
            yield RolloutTask(epoch, position, repeat, row)

    def _order(self, epoch: int) -> list[int]:
        if self._shuffled[0] != epoch:
            rows: Iterable[int] = range(self.rows)
            if self.seed is not None:
                # By hashes, which are the same with every version of Python, and need no other epoch.
                rows = sorted(rows, key=lambda row: sha256(f"{self.seed}-{epoch}-{row}".encode()).digest())
            self._shuffled = (epoch, list(rows))
        return self._shuffled[1]
