"""The hands of a pool: obeys `fray.runtime.tasks.policy`, speaks to the workers, settles futures.

A `Lane` is the conversation with one incarnation of one worker. As long as the worker holds a task, at least one
exchange is open there (see `fray.runtime.tasks.worker`); the answer to it brings outcomes and sends the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Protocol

import trio
from attrs import define, field, frozen

from fray.errors import FrayError, MachineLost, OutcomeUnknown
from fray.model.messages.client import ActorEndpoint
from fray.runtime.calls.futures import CallFuture
from fray.runtime.current_call import current_actor_var
from fray.runtime.serialization import errors
from fray.runtime.tasks.policy import Assign, Steal, TaskAssignment
from fray.runtime.tasks.task_run import (
    BLOCKED,
    CANCELLED,
    ERROR,
    VALUE,
    WireOutcome,
)
from fray.runtime.tasks.worker import WireFunction

if TYPE_CHECKING:
    from fray.runtime.calls.caller import Caller

FUNCTIONS_LIMIT = 256
"""Functions one worker keeps open."""
PROOF_WAIT_S = 1.0
"""How long, after the registry has dropped a worker, its last answers may still come."""


class TaskFuture(Protocol):
    """What the author of a task waits for; `fray.api.futures.Future` is one."""

    def resolve_pickled(self, data: bytes) -> None: ...

    def fail_pickled(self, data: bytes) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def fail_cancelled(self) -> None: ...


@frozen(eq=False)
class ShippedFunction:
    """A pickled callable, sent once to each worker that needs it."""

    number: int
    data: bytes
    name: str
    is_async: bool
    what: str = field(init=False)
    """For people."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "what", f"task {self.name!r}")


@define(eq=False)
class Task:
    """One piece of work; the law (`fray.runtime.tasks.policy`) knows what `Taskish` says."""

    number: int
    size: int
    retries_left: int
    function: ShippedFunction
    args: bytes
    has_kwargs: bool
    future: TaskFuture
    timeout_s: float | None = None
    retry_exceptions: tuple[type[BaseException], ...] = ()
    excluded: frozenset[str] = frozenset()
    runs_alone: bool = False
    cancelled: bool = False
    worker: str = ""
    """Who has, or last had it."""


@define
class TaskCounts:
    """What a crew has seen so far."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    by_worker: dict[str, int] = field(factory=dict)

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.cancelled


class TaskDispatcher:
    """Tasks and workers of one pool. ``run`` must be running; everything else is called in the loop."""

    def __init__(self, caller: Caller, name: str) -> None:
        self.assignment: TaskAssignment[Task] = TaskAssignment()
        self.connections: dict[str, WorkerConnection] = {}
        self.counts = TaskCounts()
        self.unfinished = 0
        self.held_bytes = 0
        """Arguments of the tasks that have not ended."""
        self.changed = trio.Event()
        """Set, and replaced, whenever a worker comes or goes, or the last task has ended."""
        self.error: BaseException | None = None
        """Why no task will run any more."""
        self._caller = caller
        self._name = name
        self._numbers = count(1)
        self._wake = trio.Event()

    # Tasks -----------------------------------------------------------------------------------------------------------

    def add(self, task: Task) -> None:
        """Take a new task; it is dealt with others that are added before the next checkpoint."""
        self.unfinished += 1
        self.held_bytes += task.size
        if self.error is not None:
            self._failed(task, self.error)
            return
        self.assignment.add(task)
        self._wake.set()

    def next_number(self) -> int:
        return next(self._numbers)

    def cancel(self, task: Task) -> None:
        """Nobody waits for the task any more."""
        if self.assignment.drop(task.number):
            self._cancelled(task)
            return
        task.cancelled = True  # whoever has it may be lost before it hears of this
        lane = self.connections.get(task.worker)
        if lane is not None and not lane.is_closed:
            lane.send(cancel=(task.number,))

    def _settle(self, task: Task, settle: Callable[[], None]) -> None:
        """The one outcome of a task."""
        self.unfinished -= 1
        self.held_bytes -= task.size
        settle()
        if not self.unfinished:
            self.notify()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self.changed.set()
        self.changed = trio.Event()
        self._wake.set()

    def end(self, error: BaseException) -> None:
        """No task will run any more: all that are left fail with ``error``."""
        if self.error is not None:
            return
        self.error = error
        tasks = self.assignment.clear()
        for worker, lane in list(self.connections.items()):
            tasks += [*lane.lost, *self.assignment.worker_down(worker)]
            lane.lost = []
            lane.is_closed = True
        for task in tasks:
            self._failed(task, error)
        self.notify()

    def _cancelled(self, task: Task) -> None:
        self.counts.cancelled += 1
        self._settle(task, task.future.fail_cancelled)

    def _failed(self, task: Task, error: BaseException) -> None:
        self.counts.failed += 1
        self._settle(task, lambda: task.future.fail(error))

    # Dealing ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Deal whenever something has changed."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            self.assign()

    def assign(self) -> None:
        """Do what the law says now."""
        for order in self.assignment.assign():
            lane = self.connections[order.worker]
            if isinstance(order, Steal):
                lane.send(back=order.numbers)
            elif isinstance(order, Assign):
                lane.send(order.tasks)

    # Workers ---------------------------------------------------------------------------------------------------------

    def join(self, worker: str, endpoint: ActorEndpoint) -> WorkerConnection:
        """This incarnation of a worker takes tasks from now on."""
        self.assignment.worker_up(worker)
        lane = self.connections[worker] = WorkerConnection(self, worker, endpoint, self._caller)
        self.notify()
        return lane

    def on_connection_down(self, lane: WorkerConnection) -> None:
        """It takes no more; what it had waits for the verdict of `lane_over`."""
        if not lane.is_down:
            lane.is_down = True
            lane.lost = self.assignment.worker_down(lane.worker)
            self.notify()

    def on_connection_lost(self, lane: WorkerConnection, unsent: set[int], error: BaseException) -> None:
        """Its last call has ended. Tasks ``unsent`` were surely not delivered; the others may have been begun."""
        if lane.is_closed:
            return
        self.on_connection_down(lane)
        lane.is_closed = True
        lane.forget()
        lost, lane.lost = lane.lost, []
        self.requeue([task for task in lost if task.number in unsent])
        self._retry(lane.worker, [task for task in lost if task.number not in unsent], error)
        self.notify()

    async def drain_lost_worker(self, lane: WorkerConnection) -> None:
        """The registry says that this incarnation is gone: give its last answers a moment."""
        self.on_connection_down(lane)
        with trio.move_on_after(PROOF_WAIT_S):
            await lane.ended.wait()
        error = MachineLost(f"worker {lane.worker} of pool {self._name!r} is gone: the cluster has given it up")
        self.on_connection_lost(lane, set(), error)

    def worker_gone(self, worker: str, reason: BaseException) -> None:
        """The worker will never come back. With the last one all hope goes."""
        self.assignment.worker_gone(worker)
        if not self.assignment.expected:
            self.end(reason)
        self.notify()

    def _retry(self, worker: str, tasks: Sequence[Task], error: BaseException) -> None:
        failed = self.assignment.retry(worker, tasks)
        self.counts.retried += len(tasks) - len(failed) - self._settle_returned_cancelled()
        for task in failed:
            self._failed(task, _lost(task, worker, error))

    def requeue(self, tasks: Sequence[Task]) -> None:
        """These have surely not been begun."""
        self.assignment.requeue(tasks)
        self._settle_returned_cancelled()

    def returned(self, worker: str, numbers: Sequence[int]) -> None:
        """These a worker gives back, as it was asked to."""
        self.assignment.returned(worker, numbers)
        self._settle_returned_cancelled()

    def _settle_returned_cancelled(self) -> int:
        """Settle those that nobody waits for and that nobody has; returns how many."""
        void, self.assignment.returned_cancelled = self.assignment.returned_cancelled, []
        for task in void:
            self._cancelled(task)
        return len(void)

    # What workers say ------------------------------------------------------------------------------------------------

    def on_outcome(self, lane: WorkerConnection, number: int, kind: int, data: bytes) -> None:
        """A task has ended there; void if it is not that worker's any more."""
        worker, counts = lane.worker, self.counts
        if kind == BLOCKED:
            self.assignment.mark_blocked(worker, number)
            return
        task = lane.take_lost(number) if lane.is_down else self.assignment.ended(worker, number)
        if task is None:
            return
        counts.by_worker[worker] = counts.by_worker.get(worker, 0) + 1
        if kind == VALUE:
            counts.done += 1
            self._settle(task, lambda: task.future.resolve_pickled(data))
        elif kind == CANCELLED:
            self._cancelled(task)
        elif not self._is_repeated(worker, task, kind, data):
            counts.failed += 1
            self._settle(task, lambda: task.future.fail_pickled(data))

    def _is_repeated(self, worker: str, task: Task, kind: int, data: bytes) -> bool:
        if kind != ERROR or not task.retry_exceptions or task.retries_left == 0:
            return False
        if not isinstance(errors.load_error(data), task.retry_exceptions):
            return False
        self._retry(worker, [task], FrayError("unused"))
        return True


def _lost(task: Task, worker: str, error: BaseException) -> FrayError:
    """The error of a task that died with its worker and may not be repeated."""
    lost = (MachineLost if isinstance(error, MachineLost) else OutcomeUnknown)(
        f"{task.function.what} was lost with its worker {worker}, and was repeated as often as it may be: "
        f"it may or may not have taken effect. A task that kills its workers ends like this",
        worker=worker,
    )
    lost.__cause__ = error
    return lost


@frozen
class _ExchangeResult:
    """What one exchange brought."""

    tasks: tuple[int, ...]
    back: bool


class WorkerConnection:
    """The conversation with one incarnation of one worker."""

    def __init__(self, crew: TaskDispatcher, worker: str, endpoint: ActorEndpoint, caller: Caller) -> None:
        self.worker = worker
        self.endpoint = endpoint
        self.is_down = False
        self.is_closed = False
        self.lost: list[Task] = []
        """What it held when it went down, until it is known what becomes of it."""
        self.ended = trio.Event()
        """Set when the last call has ended after the first has failed."""
        self._dispatcher, self._caller = crew, caller
        self._route = caller.route_to(endpoint)
        self._open: dict[CallFuture, _ExchangeResult] = {}
        self._unsent: set[int] = set()
        self._functions: OrderedDict[int, None] = OrderedDict()

    def take_lost(self, number: int) -> Task | None:
        """A task whose outcome came at the last moment."""
        task = next((task for task in self.lost if task.number == number), None)
        if task is not None:
            self.lost.remove(task)
        return task

    def send(self, tasks: Sequence[Task] = (), back: Sequence[int] = (), cancel: Sequence[int] = ()) -> None:
        """One exchange. Errors of the wire come as its answer."""
        functions, forget = self._functions_for(tasks)
        for task in tasks:
            task.worker = self.worker
        wire = [
            (task.number, task.function.number, task.args, task.has_kwargs, task.function.is_async, task.timeout_s)
            for task in tasks
        ]
        parcel = (wire, functions, forget, tuple(back), tuple(cancel))
        token = current_actor_var.set(None)  # no task runs on the time of whoever happens to send it
        try:
            call = self._route.start("exchange", parcel)
        except FrayError as error:
            self._cannot_send(tasks, error)
            return
        finally:
            current_actor_var.reset(token)
        self._open[call] = _ExchangeResult(tuple(task.number for task in tasks), bool(back))
        call.add_done_callback(self._on_answer)

    def _functions_for(self, tasks: Sequence[Task]) -> tuple[list[WireFunction], list[int]]:
        """What the worker must be given beside the tasks, and what it may forget."""
        known, new = self._functions, []
        for function in dict.fromkeys(task.function for task in tasks):
            if function.number in known:
                known.move_to_end(function.number)
            else:
                known[function.number] = None
                new.append((function.number, function.data, function.name))
        forget = []
        while len(known) > max(FUNCTIONS_LIMIT, len(tasks)):
            forget.append(known.popitem(last=False)[0])
        return new, forget

    def _cannot_send(self, tasks: Sequence[Task], error: FrayError) -> None:
        self._unsent.update(task.number for task in tasks)
        self._dispatcher.on_connection_down(self)
        if not self._open:
            self._finish(error)

    def _on_answer(self, call: CallFuture) -> None:
        sent = self._open.pop(call)
        error = None if self.is_closed else call.exception()
        if error is not None:
            self._failed(call, sent, error)
        elif not self.is_closed:
            self._on_result(sent, *call.result())

    def _on_result(
        self, sent: _ExchangeResult, outcomes: Sequence[WireOutcome], returned: Sequence[int], ran: int, busy_s: float
    ) -> None:
        crew = self._dispatcher
        for number, kind, data in outcomes:
            crew.on_outcome(self, number, kind, data)
        if self.is_down:
            return
        crew.assignment.record_pace(self.worker, ran, busy_s)
        if sent.back:
            crew.returned(self.worker, returned)
        crew.assign()
        if not self._open and not self.is_down and crew.assignment.workers[self.worker].held:
            self.send()

    def _failed(self, call: CallFuture, sent: _ExchangeResult, error: BaseException) -> None:
        self._dispatcher.on_connection_down(self)
        if call.number == 0:  # it never left this process
            self._unsent.update(sent.tasks)
        if not self._open:
            self._finish(error)

    def forget(self) -> None:
        """Nothing will be sent here any more."""
        self._caller.forget(self._route)

    def _finish(self, error: BaseException) -> None:
        self.ended.set()
        self._dispatcher.on_connection_lost(self, self._unsent, error)
