"""Simulated fleet: the scheduler with its own clock, and the effects of its placements."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from attrs import define, field

from bench.schedule.loads import Work, machine
from fray.controller.store import Store
from fray.gc_tuning import gc_paused
from fray.model.messages.client import Launch, Role
from fray.model.messages.node import NodeHello, ObservedState
from fray.model.specs import EndReason, ObservedAttempt, Outcome, Phase
from fray.scheduler.effects import (
    DesiredAttemptsChanged,
    Effect,
    Event,
    EventRecorded,
    LaunchRequested,
    NodeJoined,
    NodeReported,
    SessionOpened,
    Tick,
)
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.state.state import State
from fray.scheduler.step import step

TERM_S = 2.0
"""Seconds that a preempted attempt takes to end."""
RULES = SchedulerConfig(living_limit=2_000_000, finished_limit=1_000, history_limit=1_000)
RUNNING, SUCCEEDED, PREEMPTED = "running", EndReason.SUCCEEDED, EndReason.PREEMPTED


@define
class Fleet:
    """Machines, their scheduler, and a heap of future events."""

    machines: int
    state: State = field(factory=lambda: State(0.0, RULES))
    now: float = 0.0
    took_s: dict[str, list[float]] = field(factory=lambda: defaultdict(list))
    """CPU times of the steps, by kind of event."""
    placed: int = 0
    """Number of placed attempts."""
    waited_s: dict[str, float] = field(factory=dict)
    """Seconds from arrival to the first start, by job."""
    used: list[tuple[float, int]] = field(factory=list)
    """(time, milli-CPUs in use from then on)"""
    busy_milli: int = 0
    works: dict[str, Work] = field(factory=dict)
    unsaved: bool = True
    """True if the changes of a step are dropped; otherwise they are collected for `State.take_dirty`."""
    store: Store | None = None
    """Store in which each step is saved, as by the controller; timed as ``save``."""
    _coming: list[tuple[float, int, str, str]] = field(factory=list)
    _known: dict[str, bool] = field(factory=dict)
    _numbers: itertools.count[int] = field(factory=itertools.count)

    def __attrs_post_init__(self) -> None:
        self.submit("session", SessionOpened(session="tool", role=Role.TOOL, namespace="bench"))
        for index in range(self.machines):
            hello = NodeHello(node=f"n{index:05}", incarnation="i", boot_id="b", capacity=machine(index))
            self.submit("join", NodeJoined(hello=hello))

    def submit(self, kind: str, event: Event) -> None:
        """Make a timed step, and carry out its effects."""
        # CPU time and not wall time: other work on the machine must not count as a slow step.
        with gc_paused():  # as in the controller: collections of garbage come between steps
            began = time.thread_time()
            effects = step(self.state, event, self.now)
            self.state.next_deadline()
            self.took_s[kind].append(time.thread_time() - began)
        if self.store is not None:
            self._save(self.store, effects)
        elif self.unsaved:
            self.state.take_dirty()
        self._carry_out(effects)

    def _save(self, store: Store, effects: Iterable[Effect]) -> None:
        began = time.perf_counter()
        upserts, deletes = self.state.take_dirty()
        happened = [effect.event for effect in effects if isinstance(effect, EventRecorded)]
        store.save(upserts, deletes, happened, {"now": self.now})
        self.took_s["save"].append(time.perf_counter() - began)

    def launch(self, works: Sequence[Work], kind: str = "launch") -> None:
        """Launch all works in one request."""
        self.works.update((work.spec.job_id, work) for work in works)
        launch = Launch(jobs=tuple(work.spec for work in works))
        self.submit(kind, LaunchRequested(session="tool", ref=next(self._numbers), launch=launch))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, DesiredAttemptsChanged):
                for attempt_id in effect.changed:
                    self._wished(attempt_id)

    def _wished(self, attempt_id: str) -> None:
        attempt = self.state.attempts[attempt_id]
        if attempt.stop_cause is not None:
            self._later(TERM_S, attempt_id, attempt.stop_cause.value)
        elif attempt_id not in self._known:
            self._known[attempt_id] = True
            self.placed += 1
            self._use(attempt_id, +1)
            work = self.works[attempt.job_id]
            if attempt.member == 0 and attempt.generation == 0:
                self.waited_s[attempt.job_id] = self.now - work.arrives_s
            self._later(work.runs_s, attempt_id, SUCCEEDED.value)

    def _use(self, attempt_id: str, sign: int) -> None:
        self.busy_milli += sign * self.works[self.state.attempts[attempt_id].job_id].spec.demand.cpu_milli
        self.used.append((self.now, self.busy_milli))

    def _later(self, after_s: float, attempt_id: str, what: str) -> None:
        heapq.heappush(self._coming, (self.now + after_s, next(self._numbers), attempt_id, what))

    def next_at(self) -> float:
        """Return the time of the next future event; infinity if there is none."""
        deadline = self.state.next_deadline()
        coming = self._coming[0][0] if self._coming else float("inf")
        return min(coming, float("inf") if deadline is None else deadline)

    def happen(self) -> None:
        """Process the next future event: an end, or a deadline of the scheduler."""
        deadline = self.state.next_deadline()
        if not self._coming or (deadline is not None and deadline < self._coming[0][0]):
            assert deadline is not None
            self.now = max(self.now, deadline)
            self.submit("tick", Tick())
            return
        at, _, attempt_id, what = heapq.heappop(self._coming)
        self.now = max(self.now, at)
        attempt = self.state.attempts.get(attempt_id)
        if attempt is None or not attempt.living:
            return
        self._use(attempt_id, -1)
        self._known.pop(attempt_id, None)
        outcome = Outcome(cause=EndReason(what), duration_s=self.now - attempt.placed_at)
        observed = (ObservedAttempt(attempt_id=attempt_id, phase=Phase.ENDED, outcome=outcome),)
        report = ObservedState(full=False, observed=observed)
        self.submit("end", NodeReported(node=attempt.node, incarnation="i", report=report))

    def happen_until(self, at: float) -> None:
        """Process all events up to a time."""
        while self.next_at() <= at < float("inf"):
            self.happen()
        self.now = max(self.now, at)

    def finish(self) -> None:
        """Process all future events."""
        while self.next_at() < float("inf"):
            self.happen()

    def utilisation(self, until: float) -> float:
        """Return the part of all CPU time in use from 0 to ``until``."""
        area = 0.0
        for (since, milli), (end, _) in itertools.pairwise([*self.used, (until, 0)]):
            area += milli * (min(end, until) - min(since, until))
        capacity = sum(machine(index).cpu_milli for index in range(self.machines))
        return area / (capacity * until) if until else 0.0

    def shares(self) -> Mapping[str, float]:
        """Return the part of the CPUs in use now, by user."""
        found: dict[str, int] = defaultdict(int)
        for attempt_id in self._known:
            work = self.works[self.state.attempts[attempt_id].job_id]
            found[work.user] += work.spec.demand.cpu_milli
        return {user: milli / max(1, self.busy_milli) for user, milli in sorted(found.items())}
