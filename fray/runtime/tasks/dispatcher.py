"""Dispatcher of a worker pool: carries out `fray.runtime.tasks.policy`, calls the workers, settles the futures.

A `WorkerConnection` calls one incarnation of one worker. As long as the worker has a task, at least one call of
`TaskWorker.exchange` is open there; its answer brings outcomes and triggers the next call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Protocol

import trio
from attrs import define, field, frozen

from fray.errors import ChannelFull, FrayError, MachineLost, OutcomeUnknown
from fray.model.messages.client import ActorEndpoint
from fray.runtime import tracing
from fray.runtime.calls.futures import CallFuture
from fray.runtime.current_call import current_actor_var
from fray.runtime.serialization import errors
from fray.runtime.serialization.pickling import Enclosed
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

# Pickles of functions may be large, and a long-lived pool is given ever new ones (lambdas, closures).
FUNCTIONS_LIMIT = 256
"""Number of functions one worker caches."""
# The registry's report may overtake answers that the dead worker had sent. Their tasks need not run again.
NO_ROOM_S = 0.1
"""Seconds until tasks are assigned again that found no room beside the unanswered calls of this process."""
PROOF_WAIT_S = 1.0
"""Seconds after the registry has dropped a worker during which its last answers are still accepted."""


class TaskFuture(Protocol):
    """Interface of the future of a task; `fray.runtime.calls.futures.Future` implements it."""

    def resolve_pickled(self, data: Enclosed) -> None: ...

    def fail_pickled(self, data: bytes) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def fail_cancelled(self) -> None: ...


@frozen(eq=False)
class TaskFunction:
    """A pickled callable, sent once to each worker that needs it."""

    number: int
    data: bytes
    name: str
    is_async: bool
    what: str = field(init=False)
    """Description for error messages."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "what", f"task {self.name!r}")


@define(eq=False)
class Task:
    """One task of a pool; a `fray.runtime.tasks.policy.SchedulableTask`."""

    number: int
    size: int
    retries_left: int
    function: TaskFunction
    args: Enclosed
    has_kwargs: bool
    future: TaskFuture
    timeout_s: float | None = None
    retry_exceptions: tuple[type[BaseException], ...] = ()
    excluded: frozenset[str] = frozenset()
    runs_alone: bool = False
    cancelled: bool = False
    worker: str = ""
    """Worker that has the task, or had it last."""


@define
class TaskCounts:
    """Counts of the tasks that have ended, and of retries."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    by_worker: dict[str, int] = field(factory=dict)

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.cancelled


class TaskDispatcher:
    """Dispatcher of the tasks of one pool. `run` must be running; all methods are called in the loop."""

    def __init__(self, caller: Caller, name: str) -> None:
        self.assignment: TaskAssignment[Task] = TaskAssignment()
        self.connections: dict[str, WorkerConnection] = {}
        self.counts = TaskCounts()
        self.unfinished = 0
        self.held_bytes = 0
        """Total size in bytes of the arguments of the tasks that have not ended."""
        self.changed = trio.Event()
        """Event that is set, and replaced, whenever a worker comes or goes, or the last task has ended."""
        self.error: BaseException | None = None
        """Error of all later tasks, once no task can run any more."""
        self._caller = caller
        self._name = name
        self._numbers = count(1)
        self._wake = trio.Event()
        self._found_no_room = False

    # Tasks -----------------------------------------------------------------------------------------------------------

    def add(self, task: Task) -> None:
        """Add a task; it is assigned together with others that are added before the next checkpoint."""
        self.unfinished += 1
        self.held_bytes += task.size
        # The pool cannot run it any more, but its author still gets a future that ends.
        if self.error is not None:
            self._settle_failed(task, self.error)
            return
        self.assignment.add(task)
        self._wake.set()

    def next_number(self) -> int:
        return next(self._numbers)

    def cancel(self, task: Task) -> None:
        """Cancel a task, wherever it is."""
        if self.assignment.drop(task.number):
            self._settle_cancelled(task)
            return
        task.cancelled = True  # in case its worker is lost before the request arrives
        connection = self.connections.get(task.worker)
        # Its outcome still comes from the worker: until then it is not known whether the task has stopped.
        if connection is not None and not connection.is_closed:
            connection.send(cancel=(task.number,))

    def _settle(self, task: Task, settle: Callable[[], None]) -> None:
        """Settle the future of a task, by ``settle``, and count the task as ended."""
        # Before the future is settled: its callbacks may look at these numbers, or add the next task.
        self.unfinished -= 1
        self.held_bytes -= task.size
        settle()
        if not self.unfinished:
            self.notify()

    def notify(self) -> None:
        """Wake all waiters for a change."""
        self.changed.set()
        self.changed = trio.Event()
        self._wake.set()

    def end(self, error: BaseException) -> None:
        """End the pool: all unfinished and later tasks fail with ``error``."""
        if self.error is not None:
            return
        self.error = error
        tasks = self.assignment.clear()
        for worker, connection in list(self.connections.items()):
            # Also those of workers that are down and whose last answers were still awaited.
            tasks += [*connection.lost, *self.assignment.worker_down(worker)]
            connection.lost = []
            # Late answers must not settle these futures again.
            connection.is_closed = True
        for task in tasks:
            self._settle_failed(task, error)
        self.notify()

    def _settle_cancelled(self, task: Task) -> None:
        self.counts.cancelled += 1
        self._settle(task, task.future.fail_cancelled)

    def _settle_failed(self, task: Task, error: BaseException) -> None:
        self.counts.failed += 1
        self._settle(task, lambda: task.future.fail(error))

    # Assignment ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Assign tasks whenever something has changed."""
        while True:
            await self._wake.wait()
            # Replaced first, so that a change during the assignment causes another round.
            self._wake = trio.Event()
            if self._found_no_room:
                self._found_no_room = False
                await trio.sleep(NO_ROOM_S)
            # One round for all that was added since: a loop of `submit` becomes a few batches, not a message for each
            # task.
            self.assign()

    def assign(self) -> None:
        """Send the orders of the policy to the workers."""
        for order in self.assignment.assign():
            connection = self.connections[order.worker]
            if isinstance(order, Steal):
                connection.send(back=order.numbers)
            elif isinstance(order, Assign):
                connection.send(order.tasks)

    # Workers ---------------------------------------------------------------------------------------------------------

    def join(self, worker: str, endpoint: ActorEndpoint) -> WorkerConnection:
        """Connect to an incarnation of a worker, which takes tasks from now on."""
        # A new incarnation begins with an empty queue; tasks of the one before were requeued or retried when it was
        # lost.
        self.assignment.worker_up(worker)
        connection = self.connections[worker] = WorkerConnection(self, worker, endpoint, self._caller)
        self.notify()
        return connection

    def on_connection_down(self, connection: WorkerConnection) -> None:
        """Stop sending tasks to a worker; those it had wait for `on_connection_lost`."""
        if not connection.is_down:
            connection.is_down = True
            # Not requeued yet: answers that are still on the way may settle some of them.
            connection.lost = self.assignment.worker_down(connection.worker)
            self.notify()

    def on_connection_lost(self, connection: WorkerConnection, unsent: set[int], error: BaseException) -> None:
        """Requeue or retry the tasks of a lost worker: ``unsent`` were certainly not delivered, others may have run."""
        # Both the connection and the registry report a loss; the first report counts.
        if connection.is_closed:
            return
        self.on_connection_down(connection)
        connection.is_closed = True
        connection.forget()
        lost, connection.lost = connection.lost, []
        # Undelivered tasks cost no retry. Any of the others may have begun, and may have killed the worker.
        self.requeue([task for task in lost if task.number in unsent])
        begun = [task for task in lost if task.number not in unsent]
        for task in self._retry(connection.worker, begun):
            self._settle_failed(task, _loss_error(task, connection.worker, error))
        self.notify()

    async def drain_lost_worker(self, connection: WorkerConnection) -> None:
        """Wait briefly for the last answers of an incarnation that the registry has dropped, then count it as lost."""
        self.on_connection_down(connection)
        # A connection that has failed ends this wait at once; one that is silent must not hold the tasks for ever.
        with trio.move_on_after(PROOF_WAIT_S):
            await connection.ended.wait()
        error = MachineLost(f"worker {connection.worker} of pool {self._name!r} was declared lost by the cluster")
        self.on_connection_lost(connection, set(), error)

    def worker_gone(self, worker: str, reason: BaseException) -> None:
        """Mark a worker as ended for good; with the last one, end the pool with ``reason``."""
        self.assignment.worker_gone(worker)
        # Workers that may still come keep the pool alive, even if none is connected now.
        if not self.assignment.expected:
            self.end(reason)
        self.notify()

    def _retry(self, worker: str, tasks: Sequence[Task]) -> Sequence[Task]:
        """Requeue tasks that may have begun; return those that have no retries left."""
        failed = self.assignment.retry(worker, tasks)
        # Neither those that have no retries left nor those that were cancelled meanwhile run again.
        self.counts.retried += len(tasks) - len(failed) - self._settle_returned_cancelled()
        return failed

    def requeue(self, tasks: Sequence[Task]) -> None:
        """Requeue tasks that were certainly not begun."""
        self.assignment.requeue(tasks)
        self._settle_returned_cancelled()

    def on_no_room(self, worker: str, tasks: Sequence[Task]) -> None:
        """Take tasks back that could not be sent to a worker now, and assign them again soon."""
        self.requeue([task for task in tasks if self.assignment.ended(worker, task.number) is not None])
        self._found_no_room = True
        self._wake.set()

    def returned(self, worker: str, numbers: Sequence[int]) -> None:
        """Requeue the tasks a worker returned in answer to a `Steal`."""
        self.assignment.returned(worker, numbers)
        self._settle_returned_cancelled()

    def _settle_returned_cancelled(self) -> int:
        """Settle the cancelled tasks that came back from workers; return how many."""
        returned, self.assignment.returned_cancelled = self.assignment.returned_cancelled, []
        for task in returned:
            self._settle_cancelled(task)
        return len(returned)

    # Outcomes --------------------------------------------------------------------------------------------------------

    def on_outcome(self, connection: WorkerConnection, number: int, kind: int, data: Enclosed) -> None:
        """Settle or retry a task that has ended; ignored if it is not assigned to that worker any more."""
        worker, counts = connection.worker, self.counts
        # Not an outcome: the task keeps its worker and will report again.
        if kind == BLOCKED:
            self.assignment.mark_blocked(worker, number)
            return
        # A task that was taken back or retried elsewhere is found in neither, so its late outcome is ignored.
        task = connection.take_lost(number) if connection.is_down else self.assignment.ended(worker, number)
        if task is None:
            return
        counts.by_worker[worker] = counts.by_worker.get(worker, 0) + 1
        if kind == VALUE:
            counts.done += 1
            self._settle(task, lambda: task.future.resolve_pickled(data))
        elif kind == CANCELLED or not isinstance(data, bytes):  # errors are never enclosed
            self._settle_cancelled(task)
        elif not self._is_repeated(worker, task, kind, data):
            counts.failed += 1
            self._settle(task, lambda: task.future.fail_pickled(data))

    def _is_repeated(self, worker: str, task: Task, kind: int, data: bytes) -> bool:
        if kind != ERROR or not task.retry_exceptions or task.retries_left == 0:
            return False
        # The user's error is unpickled here only if its author asked for a decision by its type.
        if not isinstance(errors.load_error(data), task.retry_exceptions):
            return False
        self._retry(worker, [task])
        return True


def _loss_error(task: Task, worker: str, error: BaseException) -> FrayError:
    """Return the error of a task that was lost with its worker and has no retries left."""
    lost = (MachineLost if isinstance(error, MachineLost) else OutcomeUnknown)(
        f"{task.function.what} was lost with its worker {worker} and has no retries left: "
        f"it may or may not have taken effect. A task that kills its workers fails like this",
        worker=worker,
    )
    lost.__cause__ = error
    return lost


@frozen
class _SentExchange:
    """Contents of one call of `TaskWorker.exchange`: numbers of the tasks, and whether it stole some."""

    tasks: tuple[int, ...]
    back: bool


class WorkerConnection:
    """Connection to one incarnation of one worker."""

    def __init__(self, dispatcher: TaskDispatcher, worker: str, endpoint: ActorEndpoint, caller: Caller) -> None:
        self.worker = worker
        self.endpoint = endpoint
        self.is_down = False
        self.is_closed = False
        self.lost: list[Task] = []
        """Tasks the worker had when it went down, until they are settled, requeued or retried."""
        self.ended = trio.Event()
        """Event set when the last call has ended after the first has failed."""
        self._dispatcher, self._caller = dispatcher, caller
        self._route = caller.route_to(endpoint)
        self._open: dict[CallFuture, _SentExchange] = {}
        self._unsent: set[int] = set()
        self._functions: OrderedDict[int, None] = OrderedDict()

    def take_lost(self, number: int) -> Task | None:
        """Remove and return a task whose outcome arrived after the worker went down."""
        task = next((task for task in self.lost if task.number == number), None)
        if task is not None:
            self.lost.remove(task)
        return task

    def send(self, tasks: Sequence[Task] = (), back: Sequence[int] = (), cancel: Sequence[int] = ()) -> None:
        """Send one exchange. Errors of the connection are handled as its answer."""
        functions, forget = self._functions_to_send(tasks)
        for task in tasks:
            # Before sending: a cancellation has to find the worker, even if the call is still queued.
            task.worker = self.worker
        wire = [
            (task.number, task.function.number, task.args, task.has_kwargs, task.function.is_async, task.timeout_s)
            for task in tasks
        ]
        request = (wire, functions, forget, tuple(back), tuple(cancel))
        token = current_actor_var.set(None)  # so that tasks do not inherit the deadline of the code that sends them
        try:
            # Not awaited: the connection is a pipeline, and orders reach the worker in the order they are made.
            with tracing.untraced():  # it is a batch of tasks of any origin
                call = self._route.start("exchange", request)
        except ChannelFull:
            # Other calls have the room for large buffers: nothing is wrong with the worker.
            for number, _, _ in functions:
                self._functions.pop(number, None)
            self._dispatcher.on_no_room(self.worker, tasks)
            return
        except FrayError as error:
            self._on_send_failed(tasks, error)
            return
        finally:
            current_actor_var.reset(token)
        self._open[call] = _SentExchange(tuple(task.number for task in tasks), bool(back))
        # A callback and not a task: there are as many exchanges as batches.
        call.add_done_callback(self._on_answer)

    def _functions_to_send(self, tasks: Sequence[Task]) -> tuple[list[WireFunction], list[int]]:
        """Return the functions the worker needs beside the tasks, and the numbers of those to drop from its cache."""
        known, new = self._functions, []
        for function in dict.fromkeys(task.function for task in tasks):
            if function.number in known:
                known.move_to_end(function.number)
            else:
                known[function.number] = None
                new.append((function.number, function.data, function.name))
        forget = []
        # Never one of this exchange: its tasks could each have a function of their own.
        while len(known) > max(FUNCTIONS_LIMIT, len(tasks)):
            forget.append(known.popitem(last=False)[0])
        return new, forget

    def _on_send_failed(self, tasks: Sequence[Task], error: FrayError) -> None:
        self._unsent.update(task.number for task in tasks)
        # Other exchanges may still be answered, so the tasks are settled only after the last one.
        self._dispatcher.on_connection_down(self)
        if not self._open:
            self._finish(error)

    def _on_answer(self, call: CallFuture) -> None:
        sent = self._open.pop(call)
        # After the pool's end, or once this worker was given up, answers change nothing.
        error = None if self.is_closed else call.exception()
        if error is not None:
            self._on_error(call, sent, error)
        elif not self.is_closed:
            self._on_result(sent, *call.result())

    def _on_result(
        self, sent: _SentExchange, outcomes: Sequence[WireOutcome], returned: Sequence[int], ran: int, busy_s: float
    ) -> None:
        dispatcher = self._dispatcher
        for number, kind, data in outcomes:
            dispatcher.on_outcome(self, number, kind, data)
        # Outcomes count, but a lost worker gets nothing more.
        if self.is_down:
            return
        dispatcher.assignment.record_pace(self.worker, ran, busy_s)
        if sent.back:
            dispatcher.returned(self.worker, returned)
        # At once and not through `run`: the worker is idle until its next batch arrives.
        dispatcher.assign()
        # The worker can only report by answering a call, so one has to be open as long as it has tasks.
        if not self._open and not self.is_down and dispatcher.assignment.workers[self.worker].held:
            self.send()

    def _on_error(self, call: CallFuture, sent: _SentExchange, error: BaseException) -> None:
        self._dispatcher.on_connection_down(self)
        if call.number == 0:  # it never left this process
            self._unsent.update(sent.tasks)
        if not self._open:
            self._finish(error)

    def forget(self) -> None:
        """Release the route: nothing is sent to this worker any more."""
        self._caller.forget(self._route)

    def _finish(self, error: BaseException) -> None:
        self.ended.set()
        self._dispatcher.on_connection_lost(self, self._unsent, error)
