"""The law of a pool of workers: who gets which task, who gives some back, who may not have one again. Pure.

A task is in exactly one place: waiting, in the hands of one worker, or gone (ended, dropped, or failed for good).

- **Ahead.** Workers run what they hold one by one, in order, so tasks are given ahead in batches: as many as last
  `HORIZON_S` at the pace that was measured, so that neither worker nor wire waits; nobody takes more than its share.
- **Stealing.** A worker with empty hands, when nothing waits for it, has the fullest one asked for half of what it has
  not begun. So nothing stays behind a long task while somebody is idle.
- **Aside.** A task that waits for other tasks keeps its worker, and the worker takes others beside it: else tasks that
  wait for tasks would fill all hands.
- **Death.** Whatever a dead worker held may have been what killed it: each such task has one repetition less and is
  not given to that worker again, as long as anybody else is there. It then travels alone: nobody else can be charged
  for it, and it is charged for nobody else. A task that may not be repeated at all travels alone from the beginning.
- **Cancelled** tasks are given to nobody again: one that comes back from a worker, whyever, is `void`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, Protocol, TypeAlias, TypeVar

from attrs import define, field, frozen

HORIZON_S = 0.02
"""How much work a worker is given ahead."""
FIRST_DEPTH = 4
"""Tasks given ahead to a worker whose pace is not known."""
DEPTH_LIMIT = 512
AHEAD_BYTES = 4 * 1024 * 1024
"""Arguments given ahead to one worker: as many tasks as fit, and at least one."""


class SchedulableTask(Protocol):
    """What the law must know of a task."""

    number: int
    size: int
    """Bytes of its arguments."""
    retries_left: int
    excluded: frozenset[str]
    """Workers that failed with it."""
    runs_alone: bool
    """It is never in a worker's hands together with another."""
    cancelled: bool
    """Nobody waits for it any more."""


T = TypeVar("T", bound=SchedulableTask)


@frozen
class Assign(Generic[T]):
    """The worker gets these tasks, behind those it has."""

    worker: str
    tasks: tuple[T, ...]


@frozen
class Steal:
    """The worker is asked to give these back, if it has not begun them; it says which, by `Board.returned`."""

    worker: str
    numbers: tuple[int, ...]


Order: TypeAlias = Assign[T] | Steal


@define(eq=False)
class WorkerQueue(Generic[T]):
    """What one worker holds."""

    assigned: dict[int, T] = field(factory=dict)
    """In the order in which it runs them."""
    blocked: dict[int, T] = field(factory=dict)
    """Begun, and waiting for something: it runs others meanwhile."""
    steal_pending: bool = False
    """It has been asked to give some back, and has not answered."""
    no_progress: bool = False
    """Since it was asked, it has ended nothing: what it has may last long."""
    pace_s: float | None = None
    """How long a task lately took there."""
    size: int = 0

    @property
    def depth(self) -> int:
        if self.pace_s is None:
            return FIRST_DEPTH
        return max(2, min(DEPTH_LIMIT, int(HORIZON_S / max(self.pace_s, 1e-9))))

    @property
    def room(self) -> int:
        """How many more it may get; none before half is done, so that batches are worth their message."""
        held, depth = len(self.assigned), self.depth
        return 0 if self.no_progress or held * 2 > depth or self.size >= AHEAD_BYTES else depth - held

    @property
    def held(self) -> int:
        """How many it has not ended."""
        return len(self.assigned) + len(self.blocked)

    @property
    def is_alone(self) -> bool:
        return len(self.assigned) == 1 and next(iter(self.assigned.values())).runs_alone

    @property
    def spare(self) -> int:
        """How many it has surely not begun, as far as is known."""
        return 0 if self.steal_pending else max(0, len(self.assigned) - 1)


class TaskAssignment(Generic[T]):
    """All tasks that have not ended, and all workers."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[int, T] = OrderedDict()
        self.singles: OrderedDict[int, T] = OrderedDict()
        """Waiting too, before the others: those that travel alone."""
        self.workers: dict[str, WorkerQueue[T]] = {}
        """Workers that take tasks now."""
        self.expected: set[str] = set()
        """Workers that are there or may come back."""
        self.returned_cancelled: list[T] = []
        """Cancelled tasks that came back from a worker; whoever told the board of it takes them out."""

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self.waiting) + len(self.singles)

    # Workers ---------------------------------------------------------------------------------------------------------

    def expect_worker(self, worker: str) -> None:
        """There will be such a worker."""
        self.expected.add(worker)

    def worker_up(self, worker: str) -> None:
        """It takes tasks now."""
        self.workers[worker] = WorkerQueue()

    def worker_down(self, worker: str) -> list[T]:
        """It takes none any more; what it held is in nobody's hands (see `again` and `spare`)."""
        hand = self.workers.pop(worker, None)
        return [*hand.blocked.values(), *hand.assigned.values()] if hand is not None else []

    def worker_gone(self, worker: str) -> None:
        """It will never come back."""
        self.expected.discard(worker)

    # Tasks -----------------------------------------------------------------------------------------------------------

    def add(self, task: T) -> None:
        """A new task, behind the others."""
        task.runs_alone = task.runs_alone or task.retries_left == 0
        (self.singles if task.runs_alone else self.waiting)[task.number] = task

    def ended(self, worker: str, number: int) -> T | None:
        """Its outcome has come from this worker. None: it is not in this worker's hands, and the outcome void."""
        hand = self.workers.get(worker)
        if hand is None:
            return None
        if number in hand.blocked:
            return hand.blocked.pop(number)
        task = hand.assigned.pop(number, None)
        if task is not None:
            hand.size -= task.size
            hand.no_progress = False
        return task

    def mark_blocked(self, worker: str, number: int) -> None:
        """It waits for something there, and others may be run beside it."""
        hand = self.workers.get(worker)
        if hand is not None and number in hand.assigned and (task := self.ended(worker, number)) is not None:
            hand.blocked[number] = task

    def record_pace(self, worker: str, tasks: int, seconds: float) -> None:
        """The worker has run so many tasks in that time."""
        hand = self.workers.get(worker)
        if hand is not None and tasks:
            pace_s = seconds / tasks
            hand.pace_s = pace_s if hand.pace_s is None else (hand.pace_s + pace_s) / 2

    def returned(self, worker: str, numbers: Iterable[int]) -> None:
        """The worker's answer to a `Steal`: these it gives back."""
        hand = self.workers.get(worker)
        if hand is not None:
            hand.steal_pending, stuck = False, hand.no_progress
            self.requeue([task for number in numbers if (task := self.ended(worker, number)) is not None])
            hand.no_progress = stuck and bool(hand.assigned)

    def requeue(self, tasks: Iterable[T]) -> None:
        """These have surely not been begun: they wait again, before the others."""
        for task in reversed(list(tasks)):
            self._put_first(task)

    def retry(self, worker: str, tasks: Iterable[T]) -> list[T]:
        """These may have been begun by a worker that failed; returns those that may not be repeated any more."""
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
        """Nobody waits for it any more. False: it is not waiting."""
        return self.waiting.pop(number, None) is not None or self.singles.pop(number, None) is not None

    def clear(self) -> list[T]:
        """Take out all that wait."""
        tasks = [*self.singles.values(), *self.waiting.values()]
        self.singles.clear()
        self.waiting.clear()
        return tasks

    def may_have(self, worker: str, task: T) -> bool:
        """Not a worker that failed with it, unless nobody else is there: one that may come may be long in coming."""
        return worker not in task.excluded or self.workers.keys() <= task.excluded

    def _put_first(self, task: T) -> None:
        if task.cancelled:
            self.returned_cancelled.append(task)
            return
        queue = self.singles if task.runs_alone else self.waiting
        queue[task.number] = task
        queue.move_to_end(task.number, last=False)

    # Dealing ---------------------------------------------------------------------------------------------------------

    def assign(self) -> list[Order[T]]:
        """What shall be done now; the board takes it as done."""
        orders: list[Order[T]] = []
        by_load = sorted(self.workers, key=lambda worker: len(self.workers[worker].assigned))
        for worker in by_load:
            if not self.waiting and not self.singles:
                break
            tasks = self._take(worker, self.workers[worker])
            if tasks:
                orders.append(Assign(worker, tuple(tasks)))
        if not self.waiting:
            orders += self._steal()
        return orders

    def _take(self, worker: str, hand: WorkerQueue[T]) -> list[T]:
        if hand.is_alone:
            return []
        single = next((task for task in self.singles.values() if self.may_have(worker, task)), None)
        if single is None:
            return self._batch(hand)
        if hand.assigned:
            return []  # it runs dry first: the single one goes before the others
        del self.singles[single.number]
        return self._assign_to(hand, [single])

    def _batch(self, hand: WorkerQueue[T]) -> list[T]:
        share = -(-len(self.waiting) // max(1, sum(not hand.no_progress for hand in self.workers.values())))
        count, room_bytes = min(hand.room, share), AHEAD_BYTES - hand.size
        tasks: list[T] = []
        while count and self.waiting and (room_bytes > 0 or not (tasks or hand.assigned)):
            _, task = self.waiting.popitem(last=False)
            tasks.append(task)
            count -= 1
            room_bytes -= task.size
        return self._assign_to(hand, tasks)

    def _assign_to(self, hand: WorkerQueue[T], tasks: list[T]) -> list[T]:
        for task in tasks:
            hand.assigned[task.number] = task
            hand.size += task.size
        return tasks

    def _steal(self) -> list[Steal]:
        """Each idle worker looks at the fullest hand that nobody else looks at."""
        idle = sum(not hand.assigned for hand in self.workers.values())
        orders = []
        for _ in range(idle):
            worker, hand = max(self.workers.items(), key=lambda entry: entry[1].spare)
            if hand.spare == 0:
                break
            numbers = list(hand.assigned)[-((hand.spare + 1) // 2) :]
            hand.steal_pending = hand.no_progress = True
            orders.append(Steal(worker, tuple(numbers)))
        return orders
