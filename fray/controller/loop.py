"""The event loop of the controller: the only task that changes the cluster's state.

Invariants: the loop takes the pending events (up to a limit of their work), steps each, saves once, and only then
carries out the effects. No await is between the first step and the end of the save, so every other task sees only state
that is on disk. If the store fails, the loop ends with that error and no effect of the batch has been carried out. If
anything else fails, the state becomes that of the last save again, the events are stepped and saved one by one, and
those at which it fails are refused: a defect costs the request that meets it, and not the controller.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import trio

from fray.controller.context import ControllerContext
from fray.controller.restore import reload_state
from fray.errors import ChannelFull, InternalError, StoreError
from fray.gc_tuning import gc_paused
from fray.net.alarm import Alarm
from fray.scheduler.effects import (
    ControllerStarted,
    Effect,
    Event,
    EventRecorded,
    EventRefused,
    HistoryRecorded,
    LaunchRequested,
    NodeReported,
    TerminateRequested,
    Tick,
)
from fray.scheduler.step import step

INBOX_LIMIT_EVENTS = 100_000
"""Pending requests; one more is refused and may be retried."""
BATCH_LIMIT_UNITS = 400
"""Work of the events saved in one transaction, in units of some 0.1 ms on an idle machine: one for each event, and
`JOB_UNITS` for each job or attempt in it. A single event may have more."""
JOB_UNITS = 4
TICK_WAITS_FOR_EVENTS = 1_000
"""Events that a due timer waits for at most, of those that were pending when it became due."""

TICK_RETRY_S = 5.0
"""Seconds until a tick that failed is tried again; its timers are late by that."""

CarryOut: TypeAlias = Callable[[Sequence[Event], Sequence[Effect]], None]

SLICE_S = 5.0
"""Longest sleep while a deadline is pending, in seconds."""
STALL_S = 2.5
"""Waking up later than requested by more than this means that this process was suspended, not that its peers were
silent."""

_log = logging.getLogger("fray.controller.loop")


def work_of(event: Event) -> int:
    """Return what the event costs the loop, in the units of `BATCH_LIMIT_UNITS`."""
    match event:
        case LaunchRequested():
            return 1 + JOB_UNITS * len(event.launch.jobs)
        case NodeReported():
            return 1 + JOB_UNITS * (len(event.report.observed) + len(event.report.removed))
        case TerminateRequested():
            return 1 + JOB_UNITS * len(event.jobs)
    return 1


def anchored_clock() -> Callable[[], float]:
    """Return a clock: seconds since the epoch that advance like the monotonic clock, so a correction of the wall clock
    ends no lease."""
    # Not `time.time()` at each call: a step of NTP, or an operator who sets the clock, would end leases and grace
    # periods too early or too late.
    offset = time.time() - trio.current_time()
    return lambda: trio.current_time() + offset


class Loop:
    """Inbox of events and the task that processes them. Becomes the context's inbox."""

    def __init__(
        self, context: ControllerContext, clock: Callable[[], float], *, inbox_limit_events: int = INBOX_LIMIT_EVENTS
    ) -> None:
        self.now = context.state.now
        """Time of the scheduler in its last turn, in seconds since the epoch; it never decreases."""
        self.turns = 0
        self._state = context.state
        self._usage_history = context.usage_history
        self._store = context.store
        self._clock = clock
        self._stalled_s = 0.0
        self._no_tick_before = 0.0
        self._before_tick: int | None = None
        """Pending events that come before the tick that is due; None if none is due."""
        self._carry_out: CarryOut = lambda events, effects: None
        self._observers: list[tuple[tuple[type, ...], CarryOut]] = []
        self._inbox: deque[Event] = deque()
        self._inbox_limit_events = inbox_limit_events
        self._wakeup = trio.lowlevel.ParkingLot()
        context.inbox = self

    def __repr__(self) -> str:
        return f"<Loop {len(self._inbox)} events waiting, {self.turns} turns>"

    def submit(self, event: Event) -> None:
        """Put a peer's request into the inbox.

        Raises:
            ChannelFull: too many requests are pending; nothing was done.
        """
        if len(self._inbox) >= self._inbox_limit_events:
            raise ChannelFull(
                f"controller overloaded: {len(self._inbox)} requests pending (limit {self._inbox_limit_events}); "
                "retry later",
                limit_events=self._inbox_limit_events,
            )
        self.post(event)

    def post(self, event: Event) -> None:
        """Put in an event that the controller itself observed. These are not limited: there are never more than
        connections."""
        self._inbox.append(event)
        self._wakeup.unpark_all()

    @property
    def is_empty(self) -> bool:
        """Return whether the state has all events that were queued."""
        return not self._inbox

    def start(self, started: ControllerStarted, carry_out: CarryOut) -> None:
        """Step the start of the controller, before any peer can connect.

        Args:
            carry_out: called after each save with the events and the effects of the batch.

        Raises:
            Exception: whatever the scheduler or the store has raised.
        """
        self._carry_out = carry_out
        self.now = self.current_time()
        # Nothing to return to before it: a controller that cannot start ends, with the error as it is.
        self._publish([started], self._step_and_save([started], may_tick=True))

    def observe(self, concerns: tuple[type, ...], observer: CarryOut) -> None:
        """Call ``observer`` with the events and the effects of each later batch that has one of these classes."""
        self._observers.append((concerns, observer))

    async def run(self) -> None:
        """Process events until cancelled.

        Raises:
            StoreError: a save failed.
        """
        while True:
            await self._wait()
            # `_wait` may return without one. A cancelled controller must not act on the events that its shutdown
            # causes: the lost connections of all its peers.
            await trio.lowlevel.checkpoint()
            # A store that fails ends this task and with it the controller. The next one starts from the last saved
            # state, and peers repeat what was not answered.
            self.run_turn()

    async def _wait(self) -> None:
        """Wait until an event is pending, a deadline has come, or one slice of the time until then has passed."""
        deadline = self._state.next_deadline()
        if deadline is not None:
            deadline = max(deadline, self._no_tick_before)
        # A suspension shows only as a late wake-up: of one that lies within a long sleep nothing would be seen, and the
        # timers due after it would fire. Within slices at most `SLICE_S` of it goes unnoticed. Without a deadline there
        # is nothing to guard.
        slice_s = float("inf") if deadline is None else min(SLICE_S, max(0.0, deadline - self.current_time()))
        before = self._clock()
        # No checkpoint between the check of the inbox and the wait: no wake-up is lost.
        if not self._inbox:
            await Alarm(trio.current_time() + slice_s).wait(self._wakeup)
        late_s = self._clock() - before - slice_s
        if late_s > STALL_S:
            self._stalled_s += late_s
            _log.warning("event loop stalled for %.1f s (process suspended?)", late_s)

    def current_time(self) -> float:
        """Return the scheduler's time now, without the time in which this process was suspended (SIGSTOP, a frozen
        machine): a peer's silence does not count while it could not be heard."""
        return max(self.now, self._clock() - self._stalled_s)

    def _is_timer_due(self) -> bool:
        deadline = self._state.next_deadline()
        return deadline is not None and max(deadline, self._no_tick_before) <= self.now

    def run_turn(self) -> None:
        """Process one batch: step the events and, if a timer is due, a tick; save; carry out."""
        self.now = self.current_time()
        # A node or driver whose return already waits in the inbox must not be given up before it is heard; but a
        # controller with too many requests must not hold up its timers for as long.
        if self._before_tick is None and self._is_timer_due():
            self._before_tick = min(len(self._inbox), TICK_WAITS_FOR_EVENTS)
        events = self._take_batch()
        if self._before_tick is not None:
            self._before_tick -= len(events)
        may_tick = not self._inbox if self._before_tick is None else self._before_tick <= 0
        if may_tick:
            self._before_tick = None
        if self._try(events, is_batch=True, may_tick=may_tick):
            return
        # One by one, so that one bad event refuses none of the others. They pay with an fsync each.
        for event in events:
            self._try([event])
        if may_tick and self._is_timer_due() and not self._try([Tick()]):
            # Not at once: the timer is still due, and it would fail again.
            self._no_tick_before = self.now + TICK_RETRY_S

    def _take_batch(self) -> list[Event]:
        """Take the next events from the inbox, at least one if there are any."""
        # All that has piled up shares one transaction: one fsync for a burst of launches. The limit bounds the time for
        # which the loop serves no connection; it counts work and not time, so that a simulation takes the same batches.
        events: list[Event] = []
        units = 0
        while self._inbox:
            units += work_of(self._inbox[0])
            if events and units > BATCH_LIMIT_UNITS:
                break
            events.append(self._inbox.popleft())
        return events

    def _try(self, events: Sequence[Event], *, is_batch: bool = False, may_tick: bool = False) -> bool:
        """Process events, and a tick if one may be due; return False if that failed, and the state is as it was before.

        Args:
            is_batch: the events can be tried one by one after a failure; else the only one is refused.

        Raises:
            StoreError: the save has failed, or what was saved cannot be read.
        """
        settings = self._state.settings()
        try:
            effects = self._step_and_save(events, may_tick=may_tick)
        except StoreError:
            raise
        # Anything: a defect of the scheduler, or a value that SQLite cannot store.
        except Exception as error:  # noqa: BLE001 - a defect must not end the controller
            before = time.perf_counter()
            # All of it and not the rows that the step has touched: indexes, accounts and queues of other rows may be
            # changed by half, too. What is on disk is right by construction.
            reload_state(self._state, self._store, self.now, settings)
            if is_batch:
                return False  # one of several; which one, is found out next
            kind = type(events[0]).__name__
            _log.exception(
                "%s refused: %r; nothing was changed (state read from the store in %.1f s): %.500r",
                kind,
                error,
                time.perf_counter() - before,
                events[0],
                extra={"event": "EventRefused"},
            )
            refusal = InternalError(
                f"the controller could not handle this request ({kind}: {error!r}); nothing was changed. This is a "
                "defect of Fray: the controller's log has the traceback",
                event=kind,
            )
            self._publish([], [EventRefused(event=events[0], error=refusal)])
            return False
        self._publish(events, effects)
        return True

    def _step_and_save(self, events: Sequence[Event], *, may_tick: bool) -> list[Effect]:
        """Step the events, then a tick if one is due; save; return the effects."""
        # Also without events: views count from the state's time ("expected start: in 590 s").
        self._state.meta.now = max(self._state.meta.now, self.now)
        effects: list[Effect] = []
        for event in events:
            with gc_paused():
                effects += step(self._state, event, self.now)
        # After the events, see `run_turn`.
        if may_tick and self._is_timer_due():
            with gc_paused():
                effects += step(self._state, Tick(), self.now)
        # Save before publish: what a peer has been sent must survive `kill -9` of this process (P7). The other order
        # could announce a launch that the next controller does not know.
        self._save(effects)
        return effects

    def _publish(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """Carry out the effects of what was saved."""
        self.turns += 1
        if self._usage_history.next_at <= self.now:
            self._usage_history.take_sample(self._state, self.now)
        carried_out = [self._carry_out]
        for concerns, observer in self._observers:
            if any(isinstance(each, concerns) for each in (*events, *effects)):
                carried_out.append(observer)
        for carry_out in carried_out:
            try:
                carry_out(events, effects)
            except StoreError:
                raise
            except Exception:  # noqa: BLE001 - a defect must not end the controller
                # What was decided is saved; connections and providers read it again with their next change.
                _log.exception("effects of a saved batch could not be carried out")

    def _save(self, effects: Sequence[Effect]) -> None:
        upserts, deletes = self._state.take_dirty()
        recorded = [effect.event for effect in effects if isinstance(effect, EventRecorded)]
        history = [effect.record for effect in effects if isinstance(effect, HistoryRecorded)]
        # A turn that changed nothing (the report of a node's former incarnation) costs no transaction and no fsync.
        if upserts or deletes or recorded:
            self._store.save(upserts, deletes, recorded, {"now": self.now}, history)
        # After the save, so that the daemon's log never shows what a crash has undone.
        for event in recorded:
            # In the text as well: an embedded controller logs to the driver's handlers, which print nothing else.
            text = ": ".join(filter(None, (event.job, event.what, event.text)))
            _log.info("%s", text, extra={"job": event.job, "event": event.what, "detail": event.text})
