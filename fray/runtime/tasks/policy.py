"""Policy of a worker pool: assignment of tasks to workers, stealing, and retries after a worker's death. Pure.

Invariant: a task is in exactly one place: waiting, assigned to one worker, or gone (ended, dropped, failed for good).

- **Batches.** Workers run their tasks one by one, in order, so tasks are assigned ahead: as many as last `HORIZON_S`
  at the measured pace, so that neither worker nor wire waits, but no worker takes more than its share.
- **Stealing.** When nothing waits, an idle worker makes the one with the most tasks return half of those it has not
  begun. So no task stays behind a long one while a worker is idle.
- **Blocked tasks.** A task that waits for other tasks stays with its worker, which runs others beside it: otherwise
  tasks that wait for tasks could occupy all workers.
- **Death.** Any of the tasks a dead worker held may have killed it. Each has one retry less and is not assigned to
  that worker again as long as another is available. From then on it runs alone, so that no other task is charged
  for its next failure, nor it for theirs: a task that kills its workers fails alone. A task without retries runs alone
  from the beginning, so that `max_retries=0` means at most once.
- **Cancelled** tasks are not assigned again: if a worker returns one, it is listed in `returned_cancelled`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, Protocol, TypeAlias, TypeVar

from attrs import define, field, frozen

# Long enough to hide a round trip, short enough that a worker which becomes slow holds little work.
HORIZON_S = 0.02
"""Seconds of work assigned ahead to a worker."""
# A guess for unmeasured workers: with tasks of an hour, three of them would wait behind the first (and be stolen).
FIRST_DEPTH = 4
"""Number of tasks assigned ahead to a worker whose pace has not been measured yet."""
# For tasks of microseconds, so that one message and one answer stay small.
DEPTH_LIMIT = 512
AHEAD_BYTES = 4 * 1024 * 1024
"""Limit of pickled arguments assigned ahead to one worker: as many tasks as fit, and at least one."""


class SchedulableTask(Protocol):
    """Fields of a task that the policy uses."""

    number: int
    size: int
    """Size of the pickled arguments in bytes."""
    retries_left: int
    excluded: frozenset[str]
    """Workers that died while they held the task."""
    runs_alone: bool
    """Flag: the task is never assigned to a worker together with another one."""
    cancelled: bool
    """Flag: its result is not wanted any more."""


T = TypeVar("T", bound=SchedulableTask)


@frozen
class Assign(Generic[T]):
    """Order: send these tasks to the worker, behind those it has."""

    worker: str
    tasks: tuple[T, ...]


@frozen
class Steal:
    """Order: request these tasks back from the worker; those not begun come back by `TaskAssignment.returned`."""

    worker: str
    numbers: tuple[int, ...]


Order: TypeAlias = Assign[T] | Steal


@define(eq=False)
class WorkerQueue(Generic[T]):
    """Tasks assigned to one worker."""

    assigned: dict[int, T] = field(factory=dict)
    """Tasks by number, in the order in which the worker runs them."""
    blocked: dict[int, T] = field(factory=dict)
    """Tasks that have begun and wait for something; the worker runs others meanwhile."""
    steal_pending: bool = False
    """Flag: a `Steal` was sent to the worker and not answered yet."""
    no_progress: bool = False
    """Flag: no task has ended there since the last `Steal`, so its current task may last long."""
    pace_s: float | None = None
    """Recent seconds per task on this worker; None: not measured yet."""
    size: int = 0

    @property
    def depth(self) -> int:
        if self.pace_s is None:
            return FIRST_DEPTH
        # Two at least: one runs while the next one is there.
        return max(2, min(DEPTH_LIMIT, int(HORIZON_S / max(self.pace_s, 1e-9))))

    @property
    def room(self) -> int:
        """Return how many more tasks it may get: none before half is done, so that each batch is worth its message."""
        held, depth = len(self.assigned), self.depth
        # A worker that did not end a task since others were stolen from it may be in a task of hours.
        return 0 if self.no_progress or held * 2 > depth or self.size >= AHEAD_BYTES else depth - held

    @property
    def held(self) -> int:
        """Return the number of tasks that have not ended."""
        return len(self.assigned) + len(self.blocked)

    @property
    def is_alone(self) -> bool:
        return len(self.assigned) == 1 and next(iter(self.assigned.values())).runs_alone

    @property
    def spare(self) -> int:
        """Return the number of tasks that have probably not begun, and could be stolen."""
        # The first one has probably begun; the worker returns only those that have not.
        return 0 if self.steal_pending else max(0, len(self.assigned) - 1)


class TaskAssignment(Generic[T]):
    """Tasks of one pool that have not ended, and its workers."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[int, T] = OrderedDict()
        self.singles: OrderedDict[int, T] = OrderedDict()
        """Waiting tasks that run alone; they take precedence over `waiting`."""
        self.workers: dict[str, WorkerQueue[T]] = {}
        """Connected workers, which take tasks now."""
        self.expected: set[str] = set()
        """Workers that are connected, or may still come or return."""
        self.returned_cancelled: list[T] = []
        """Cancelled tasks that came back from a worker; the caller of that method takes them out and settles them."""

    def __len__(self) -> int:
        """Return the number of waiting tasks."""
        return len(self.waiting) + len(self.singles)

    # Workers ---------------------------------------------------------------------------------------------------------

    def expect_worker(self, worker: str) -> None:
        """Add a worker that is going to connect."""
        self.expected.add(worker)

    def worker_up(self, worker: str) -> None:
        """Add a connected worker, which takes tasks from now on."""
        self.workers[worker] = WorkerQueue()

    def worker_down(self, worker: str) -> list[T]:
        """Remove a disconnected worker; return its tasks, for `requeue` or `retry`."""
        queue = self.workers.pop(worker, None)
        return [*queue.blocked.values(), *queue.assigned.values()] if queue is not None else []

    def worker_gone(self, worker: str) -> None:
        """Mark a worker as ended for good."""
        self.expected.discard(worker)

    # Tasks -----------------------------------------------------------------------------------------------------------

    def add(self, task: T) -> None:
        """Add a new task behind the others."""
        # Run together with others, it would fail for a worker that another task has killed.
        task.runs_alone = task.runs_alone or task.retries_left == 0
        (self.singles if task.runs_alone else self.waiting)[task.number] = task

    def ended(self, worker: str, number: int) -> T | None:
        """Remove and return a task whose outcome ``worker`` reported; None: not assigned to it, ignore the outcome."""
        queue = self.workers.get(worker)
        if queue is None:
            return None
        if number in queue.blocked:
            return queue.blocked.pop(number)
        # Missing if it was stolen, retried or dropped: then this outcome is of an earlier run.
        task = queue.assigned.pop(number, None)
        if task is not None:
            queue.size -= task.size
            queue.no_progress = False
        return task

    def mark_blocked(self, worker: str, number: int) -> None:
        """Mark a task as waiting for something, so that its worker may run others beside it."""
        queue = self.workers.get(worker)
        if queue is not None and number in queue.assigned and (task := self.ended(worker, number)) is not None:
            # `ended` also frees its share of `AHEAD_BYTES` and its slot, so that the worker gets further tasks.
            queue.blocked[number] = task

    def record_pace(self, worker: str, tasks: int, seconds: float) -> None:
        """Record that ``worker`` has run so many tasks in that time."""
        queue = self.workers.get(worker)
        if queue is not None and tasks:
            pace_s = seconds / tasks
            # Half of the old value: tasks of one pool often come in phases of different length.
            queue.pace_s = pace_s if queue.pace_s is None else (queue.pace_s + pace_s) / 2

    def returned(self, worker: str, numbers: Iterable[int]) -> None:
        """Requeue the tasks that ``worker`` returned in answer to a `Steal`."""
        queue = self.workers.get(worker)
        if queue is not None:
            # `ended` below clears `no_progress`, but a task that was returned has not run.
            queue.steal_pending, stuck = False, queue.no_progress
            self.requeue([task for number in numbers if (task := self.ended(worker, number)) is not None])
            queue.no_progress = stuck and bool(queue.assigned)

    def requeue(self, tasks: Iterable[T]) -> None:
        """Requeue tasks that were certainly not begun, before the others."""
        # Each is put first, so this keeps their order.
        for task in reversed(list(tasks)):
            self._put_first(task)

    def retry(self, worker: str, tasks: Iterable[T]) -> list[T]:
        """Requeue tasks that a failed worker may have begun; return those that have no retries left."""
        failed = []
        for task in reversed(list(tasks)):
            if task.cancelled:
                self.returned_cancelled.append(task)
                continue
            if task.retries_left == 0:
                failed.append(task)
                continue
            task.retries_left -= 1
            task.excluded |= {worker}
            task.runs_alone = True
            self._put_first(task)
        return failed[::-1]

    def drop(self, number: int) -> bool:
        """Remove a waiting task; return False if it is not waiting."""
        return self.waiting.pop(number, None) is not None or self.singles.pop(number, None) is not None

    def clear(self) -> list[T]:
        """Remove and return all waiting tasks."""
        tasks = [*self.singles.values(), *self.waiting.values()]
        self.singles.clear()
        self.waiting.clear()
        return tasks

    def may_run(self, worker: str, task: T) -> bool:
        """Return whether ``worker`` may run ``task``.

        A worker that failed with it may not, unless no other is connected: an expected one may take long to come.
        """
        return worker not in task.excluded or self.workers.keys() <= task.excluded

    def _put_first(self, task: T) -> None:
        if task.cancelled:
            self.returned_cancelled.append(task)
            return
        tasks = self.singles if task.runs_alone else self.waiting
        tasks[task.number] = task
        tasks.move_to_end(task.number, last=False)

    # Assignment ------------------------------------------------------------------------------------------------------

    def assign(self) -> list[Order[T]]:
        """Return the orders to carry out now; this object counts them as done."""
        orders: list[Order[T]] = []
        # The idlest first, so that few tasks go to workers which can begin them at once.
        by_load = sorted(self.workers, key=lambda worker: len(self.workers[worker].assigned))
        for worker in by_load:
            if not self.waiting and not self.singles:
                break
            tasks = self._tasks_for(worker, self.workers[worker])
            if tasks:
                orders.append(Assign(worker, tuple(tasks)))
        if not self.waiting:
            orders += self._steal()
        return orders

    def _tasks_for(self, worker: str, queue: WorkerQueue[T]) -> list[T]:
        # Nothing is sent behind it either: a task that waits there would be charged if the worker is killed.
        if queue.is_alone:
            return []
        single = next((task for task in self.singles.values() if self.may_run(worker, task)), None)
        if single is None:
            return self._next_batch(queue)
        if queue.assigned:
            return []  # wait until the worker is idle: the task that runs alone takes precedence over the others
        del self.singles[single.number]
        return self._assign_to(queue, [single])

    def _next_batch(self, queue: WorkerQueue[T]) -> list[T]:
        # Not more than an equal share, rounded up: 8 long tasks on 8 workers must not all go to the first.
        share = -(-len(self.waiting) // max(1, sum(not queue.no_progress for queue in self.workers.values())))
        count, room_bytes = min(queue.room, share), AHEAD_BYTES - queue.size
        tasks: list[T] = []
        # One task of any size fits into an empty queue, or it could never be assigned.
        while count and self.waiting and (room_bytes > 0 or not (tasks or queue.assigned)):
            _, task = self.waiting.popitem(last=False)
            tasks.append(task)
            count -= 1
            room_bytes -= task.size
        return self._assign_to(queue, tasks)

    def _assign_to(self, queue: WorkerQueue[T], tasks: list[T]) -> list[T]:
        for task in tasks:
            queue.assigned[task.number] = task
            queue.size += task.size
        return tasks

    def _steal(self) -> list[Steal]:
        """Steal from the worker with the most spare tasks, once for each idle worker."""
        idle = sum(not queue.assigned for queue in self.workers.values())
        orders = []
        for _ in range(idle):
            worker, queue = max(self.workers.items(), key=lambda entry: entry[1].spare)
            if queue.spare == 0:
                break
            # From the end of the queue: those are the least likely to have begun, and the longest from their turn.
            numbers = list(queue.assigned)[-((queue.spare + 1) // 2) :]
            # One request at a time: the answer changes what is left to steal.
            queue.steal_pending = queue.no_progress = True
            orders.append(Steal(worker, tuple(numbers)))
        return orders
