"""Runs one random scenario of a whole cluster, which its seed decides."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import trio
from attrs import evolve

import fray.controller.loop
import fray.net.channel.connection
import fray.net.transports.memory
from fray.net.alarm import Alarm
from fray.testing.ground_truth import Violation
from fray.testing.seed import Seed, Trace, steady
from tests.simulation.code_version import code_version
from tests.simulation.scenario import GONE_WITHIN_S, ScenarioResult, simulate
from tests.simulation.scenario_plans import ScenarioPlan, draw_plan

T = TypeVar("T")
PASSES_LIMIT = 200_000
"""Turns of Trio's loop without any time passing, after which it counts as an endless loop."""
POLL_TURNS = 1000
"""Turns of Trio's loop after which it looks at its sockets in any case."""


class VirtualTimeStuck(Exception):
    """The loop turns again and again without virtual time passing."""


class _JumpingClock(trio.abc.Clock):
    """Virtual clock that jumps to the next deadline as soon as no task can run.

    `trio.testing.MockClock` needs two turns of the loop for each jump, and reads the real clock at each look.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to the deadline, unless there is none: then the loop turns, and the watchdog ends it."""
        if self.now < deadline < math.inf:
            self.now += deadline - self.now
        return 0.0


class _NoIO:
    """I/O manager of a loop that waits for nothing outside of it: asks the system only when there may be an answer.

    Counts the turns without any time passing, and cancels ``scope`` at `PASSES_LIMIT`.
    """

    def __init__(self, clock: _JumpingClock, runner: Any) -> None:
        self._clock, self._real, self._entries = clock, runner.io_manager, runner.entry_queue
        self._time = -1.0
        self._turns = self._passes = 0
        self.scope = trio.CancelScope()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_events(self, timeout: float) -> Any:
        now = self._clock.now
        self._passes = self._passes + 1 if now == self._time else 0
        self._time = now
        if self._passes > PASSES_LIMIT:
            self.scope.cancel()
        self._turns += 1
        # Finalizers and signals (Ctrl-C) wake the loop by a socket.
        if self._entries.queue or self._entries.idempotent_queue or self._turns % POLL_TURNS == 0:
            return self._real.get_events(timeout)
        return ()

    def process_events(self, events: Any) -> None:
        if events:
            self._real.process_events(events)


class _DeadlineChange:
    """Plain form of `trio.CancelScope._might_change_registered_deadline`: a generator costs more than its content.

    Entered and left with each cancel scope, thus with nearly every wait of a simulation.
    """

    __slots__ = ("_scope",)

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        scope = self._scope
        old = scope._registered_deadline
        new = math.inf if scope._cancel_status is None or scope._cancel_called else scope._deadline
        if old != new:
            scope._registered_deadline = new
            deadlines = trio._core._run.GLOBAL_RUN_CONTEXT.runner.deadlines
            if old != math.inf:
                deadlines.remove(old, scope)
            if new != math.inf:
                deadlines.add(new, scope)


class _PlainAlarm:
    """`fray.net.alarm.Alarm` as an entry among Trio's deadlines: to cancel a scope costs several times its content.

    Trio treats it as a cancel scope whose deadline has come.
    """

    __slots__ = ("_deadline", "_lot", "_registered_deadline", "_task")

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._registered_deadline = math.inf
        self._task: trio.lowlevel.Task | None = None
        self._lot: Any = None

    @property
    def deadline(self) -> float:
        return self._deadline

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._task is not None:
            self._register(deadline)

    async def wait(self, lot: trio.lowlevel.ParkingLot | None = None) -> None:
        task = self._task = trio.lowlevel.current_task()
        self._lot = lot
        self._register(self._deadline)
        if lot is not None:
            lot._parked[task] = None  # as `ParkingLot.park`
        try:
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        finally:
            self._task = None
            if self._registered_deadline != math.inf:
                self._register(math.inf)

    def _register(self, new: float) -> None:
        old, self._registered_deadline = self._registered_deadline, new
        if old != new:
            deadlines = trio._core._run.GLOBAL_RUN_CONTEXT.runner.deadlines
            if old != math.inf:
                deadlines.remove(old, self)
            if new != math.inf:
                deadlines.add(new, self)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        task, self._task = self._task, None
        if self._lot is not None and task is not None:
            del self._lot._parked[task]
        return trio.lowlevel.Abort.SUCCEEDED

    def _cancel(self, reason: object) -> None:
        """End the wait: called by Trio at the deadline."""
        self._register(math.inf)
        task, self._task = self._task, None
        if task is None or (self._lot is not None and self._lot._parked.pop(task, self) is self):
            return  # unparked or cancelled in this turn: it runs already
        trio.lowlevel.reschedule(task)


@contextmanager
def _plain_deadlines(clock: _JumpingClock) -> Iterator[None]:
    """Use `_DeadlineChange`, `_PlainAlarm` and ``clock`` itself while entered, in loops of this thread: other threads
    may be hosts of a guest loop."""
    current_time = trio.current_time
    original, sleep_until = trio.CancelScope._might_change_registered_deadline, trio.sleep_until
    thread_id = threading.get_ident()

    def change(scope: Any) -> Any:
        return _DeadlineChange(scope) if threading.get_ident() == thread_id else original(scope)

    def alarm(deadline: float) -> Any:
        return (_PlainAlarm if threading.get_ident() == thread_id else Alarm)(deadline)

    def now() -> float:
        return clock.now if threading.get_ident() == thread_id else current_time()

    async def sleep(deadline: float) -> None:
        await (alarm(deadline).wait() if threading.get_ident() == thread_id else sleep_until(deadline))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(trio.CancelScope, "_might_change_registered_deadline", change))
        # Trio's own asks its runner, which asks the clock: several times for each message.
        for module in (trio, trio._core._run):
            stack.enter_context(mock.patch.object(module, "current_time", now))
        for module in (fray.controller.loop, fray.net.channel.connection, fray.net.transports.memory):
            stack.enter_context(mock.patch.object(module, "Alarm", alarm))
        for module in (trio, trio._timeouts):
            stack.enter_context(mock.patch.object(module, "sleep_until", sleep))
        yield


class _ErrorLogHandler(logging.Handler):
    """Collector of errors that were only logged: nothing of ours may fail unnoticed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.texts.append(f"{record.name} logged {record.getMessage()!r}: {record.exc_info[1]!r}")


@contextmanager
def _listening() -> Iterator[_ErrorLogHandler]:
    """Collect logged failures; other messages are only printed with ``--verbose``."""
    logger, caught = logging.getLogger("fray"), _ErrorLogHandler()
    before = logger.level, logger.propagate
    if logger.level != logging.INFO:
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    logger.addHandler(caught)
    try:
        yield caught
    finally:
        logger.removeHandler(caught)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def run_seed(
    number: int, *, plan: ScenarioPlan | None = None, trace: Trace | None = None, gone_within_s: float = GONE_WITHIN_S
) -> ScenarioResult:
    """Run the scenario of a seed: the same seed, the same scenario, to the last byte on the wire.

    Args:
        plan: instead of the plan that the seed draws.
        trace: to record what happened (see `Trace`).
        gone_within_s: limit of P1.

    Raises:
        VirtualTimeStuck: virtual time stood still.
    """
    seed, trace = Seed(number), trace or Trace()
    chosen = plan or draw_plan(seed.stream("plan"))
    result, texts = run_in_virtual_time(seed, partial(simulate, seed, chosen, trace, gone_within_s=gone_within_s))
    logged = tuple(Violation("error", result.virtual_s, text) for text in texts)
    return evolve(result, breaches=(*result.breaches, *logged))


def run_in_virtual_time(seed: Seed, scenario: Callable[[], Awaitable[T]]) -> tuple[T, list[str]]:
    """Run a scenario in a loop whose clock jumps and whose order the seed decides.

    Returns:
        its result, and the errors that were only logged.

    Raises:
        VirtualTimeStuck: virtual time stood still.
    """
    clock, results = _JumpingClock(), list[T]()

    async def main() -> None:
        runner: Any = trio.lowlevel.current_task()._runner
        runner.io_manager = no_io = _NoIO(clock, runner)
        runner.instruments = {}  # asked several times for each step of a task: faster than Trio's own mapping
        with no_io.scope:
            results.append(await scenario())

    with steady(seed), _plain_deadlines(clock), _listening() as caught:
        trio.run(main, clock=clock)
    if not results:
        raise VirtualTimeStuck(f"seed {seed.number}: time stood still")
    return results[0], list(dict.fromkeys(caught.texts))


def summary(result: ScenarioResult, directed: str = "") -> str:
    """Return counts of what happened, and the breaches.

    Args:
        directed: name of the directed scenario. Default: it was the random scenario of the seed.
    """
    lines = [
        f"seed {result.seed}: {result.operations.total()} operations, {result.faults.total()} faults",
        "operations: " + counts_text(result.operations),
        "acts: " + counts_text(result.acts),
        "events: " + counts_text(result.events),
        "faults: " + counts_text(result.faults),
        "errors met: " + counts_text(result.outcomes),
        *(f"BROKEN {breach}" for breach in result.breaches),
    ]
    if result.breaches:
        how = f"--seed {result.seed}" + (f" --directed {directed!r}" if directed else "")
        lines.append(f"to run it again: python -m tests.simulation {how} --version {code_version()}")
    return "\n".join(lines)


def counts_text(counter: Counter[str]) -> str:
    """Return counts in one line, by name."""
    return ", ".join(f"{count} {what}" for what, count in sorted(counter.items())) or "none"
