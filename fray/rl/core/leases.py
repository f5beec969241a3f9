"""Leases of tasks: which worker has which task, until when. Nothing of it survives the process that holds it.

Invariant: a task is in at most one lease, and a result counts only if its lease is still open. So a worker that was
taken for dead, or a process from before a restart, cannot deliver a task that another one has by then.
"""

from __future__ import annotations

from collections import Counter

from attrs import define, field, frozen

from fray.rl.core.tasks import RolloutTask


@frozen
class Lease:
    """A task in the possession of a worker."""

    number: str
    """Unique in the run; begins with the incarnation of the table that made it."""
    task: RolloutTask
    worker: str
    expires_at: float
    """Seconds on the clock of the caller."""


@define
class LeaseTable:
    """The open leases.

    Args:
        incarnation: of this table; leases of earlier ones are unknown to it.
        duration_s: seconds after which a lease expires.
    """

    incarnation: str
    duration_s: float
    groups: Counter[str] = field(init=False, factory=Counter)
    """Number of open leases by the group of their tasks."""
    _open: dict[str, Lease] = field(init=False, factory=dict)
    _made: int = field(init=False, default=0)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def samples(self) -> int:
        """Number of samples that the open leases will bring."""
        return sum(lease.task.samples for lease in self._open.values())

    @property
    def all(self) -> list[Lease]:
        """The open leases, as they were made."""
        return list(self._open.values())

    def make(self, task: RolloutTask, worker: str, now: float) -> Lease:
        """Lease a task to a worker."""
        self._made += 1
        lease = Lease(f"{self.incarnation}.{self._made}", task, worker, now + self.duration_s)
        self._open[lease.number] = lease
        self.groups[task.group_id] += 1
        return lease

    def get(self, number: str) -> Lease | None:
        """Return an open lease; None if it was closed, has expired, or is of an earlier incarnation."""
        return self._open.get(number)

    def close(self, number: str) -> None:
        """Close an open lease. Raises KeyError if it is not open."""
        group_id = self._open.pop(number).task.group_id
        self.groups[group_id] -= 1
        if not self.groups[group_id]:
            del self.groups[group_id]

    def of_worker(self, worker: str) -> list[Lease]:
        """Return the open leases of a worker."""
        return [lease for lease in self._open.values() if lease.worker == worker]

    def expired(self, now: float) -> list[Lease]:
        """Return the open leases whose time has passed."""
        return [lease for lease in self._open.values() if lease.expires_at <= now]
