"""The one task that changes the cluster's state.

Law: take all events that wait (at most 1,000), step each, save once, and only then let anybody see the effects. There
is no await between the first step and the end of the save, so whoever else runs sees only what is on disk. If the save
fails, or the law itself, the loop ends with that error and nothing of the batch was told to anybody.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import trio

from fray.controller.context import ControllerContext
from fray.errors import ChannelFull
from fray.scheduler.effects import ControllerStarted, Effect, Event, EventRecorded, Tick
from fray.scheduler.step import step

INBOX_LIMIT_EVENTS = 100_000
"""Requests that wait; one more is refused, its author may try again."""
BATCH_LIMIT_EVENTS = 1_000
"""Events saved in one transaction."""

CarryOut: TypeAlias = Callable[[Sequence[Event], Sequence[Effect]], None]

SLICE_S = 5.0
"""How long the loop sleeps at a time while a deadline is pending."""
STALL_S = 2.5
"""Waking up later than asked by more than this means that we were stopped, not that the others were silent."""

_log = logging.getLogger("fray.controller.loop")


def anchored_clock() -> Callable[[], float]:
    """Seconds since the epoch that run as the monotonic clock does: nobody's correction of the time ends a lease."""
    offset = time.time() - trio.current_time()
    return lambda: trio.current_time() + offset


class Loop:
    """The inbox of events and the task that works through it. Becomes the context's inbox."""

    def __init__(
        self, context: ControllerContext, clock: Callable[[], float], *, inbox_limit_events: int = INBOX_LIMIT_EVENTS
    ) -> None:
        self.now = context.state.now
        """The law's time; it never decreases."""
        self.turns = 0
        self._state = context.state
        self._usage_history = context.usage_history
        self._store = context.store
        self._clock = clock
        self._stalled_s = 0.0
        self._carry_out: CarryOut = lambda events, effects: None
        self._inbox: deque[Event] = deque()
        self._inbox_limit_events = inbox_limit_events
        self._wakeup = trio.Event()
        context.inbox = self

    def __repr__(self) -> str:
        return f"<Loop {len(self._inbox)} events waiting, {self.turns} turns>"

    def submit(self, event: Event) -> None:
        """Put a peer's request into the inbox.

        Raises:
            ChannelFull: too many wait already; nothing was done.
        """
        if len(self._inbox) >= self._inbox_limit_events:
            raise ChannelFull(
                f"the controller is behind by {len(self._inbox)} requests, its limit: try again",
                limit_events=self._inbox_limit_events,
            )
        self.post(event)

    def post(self, event: Event) -> None:
        """Put in what the context itself observed; there are never more of these than connections."""
        self._inbox.append(event)
        self._wakeup.set()

    def start(self, started: ControllerStarted, carry_out: CarryOut) -> None:
        """Tell the law that its controller has started, before anybody can connect.

        Args:
            carry_out: called after each save with the events and the effects of the batch.
        """
        self._carry_out = carry_out
        self.post(started)
        self.run_turn()

    async def run(self) -> None:
        """Work until cancelled. Raises StoreError if a save fails."""
        while True:
            await self._wait()
            await trio.lowlevel.checkpoint()  # a controller that is being ended must not act on what its end causes
            self.run_turn()

    async def _wait(self) -> None:
        """Until there is something in the inbox, a deadline has come, or a slice of the time to it is over."""
        deadline = self._state.next_deadline()
        slice_s = float("inf") if deadline is None else min(SLICE_S, max(0.0, deadline - self.current_time()))
        before = self._clock()
        with trio.move_on_after(slice_s):
            while not self._inbox:
                self._wakeup = trio.Event()
                await self._wakeup.wait()
        late_s = self._clock() - before - slice_s
        if late_s > STALL_S:
            self._stalled_s += late_s
            _log.warning("the controller was stopped for a while", extra={"stalled_s": round(late_s, 1)})

    def current_time(self) -> float:
        """The law's time now. Time in which we were stopped (SIGSTOP, a frozen machine) is nobody's silence."""
        return max(self.now, self._clock() - self._stalled_s)

    def _is_timer_due(self) -> bool:
        deadline = self._state.next_deadline()
        return deadline is not None and deadline <= self.now

    def run_turn(self) -> None:
        """One batch: step (and once more if it is time), save, carry out."""
        count = min(len(self._inbox), BATCH_LIMIT_EVENTS)
        events = [self._inbox.popleft() for _ in range(count)]
        self.now = self.current_time()
        effects: list[Effect] = []
        for event in events:
            effects += step(self._state, event, self.now)
        if self._is_timer_due():
            effects += step(self._state, Tick(), self.now)
        self._save(effects)
        self.turns += 1
        self._usage_history.sample_if_due(self._state, self.now)
        self._carry_out(events, effects)

    def _save(self, effects: Sequence[Effect]) -> None:
        upserts, deletes = self._state.take_dirty()
        recorded = [effect.event for effect in effects if isinstance(effect, EventRecorded)]
        if upserts or deletes or recorded:
            self._store.save(upserts, deletes, recorded, {"now": self.now})
        for event in recorded:
            _log.info(event.what, extra={"job": event.job, "detail": event.text} if event.text else {"job": event.job})
