"""Attempts that somebody wants watched: asked whether they are well, waited for when they say nothing, looked into.

The counting is `fray.node.health.counters`'s; here are the tasks that ask, wait and act. Law: a ward is watched from
when it runs until its end begins, whoever began it. What follows from a failed check or a stall that shall restart is
one thing: stacks first, then `Guardian.condemn`, which ends the attempt by its ladder, as a failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Protocol, runtime_checkable

import trio
from attrs import define, field

from fray.model.ids import AttemptId
from fray.model.monitoring.attempt_metrics import CAPTURE_LIMIT_BYTES, cut
from fray.model.monitoring.health import HealthCheck, OnStall, Progress
from fray.model.monitoring.progress_protocol import (
    HealthReport,
    Said,
    UsageReport,
    sentence,
)
from fray.model.specs import JobSpec
from fray.node.health.counters import HealthCounter, HealthState, StallDetector
from fray.node.health.http_check import BadAnswer, ask_path
from fray.node.health.metrics_report import MetricsReporter
from fray.node.launcher import OnSaid

CAPTURE_WITHIN_S = 10.0
"""Stacks that take longer are given up."""
CAPTURES_LIMIT = 4
"""Attempts that are looked into at the same time."""
NOTES_LIMIT = 100
"""Of one attempt in its story."""

AskPath = Callable[[AttemptId, int, str], Awaitable[None]]
"""Asks an attempt's port for a path; raises `BadAnswer`."""


@runtime_checkable
class SupportsCapture(Protocol):
    """A launcher that hears what its attempts say of themselves, and can look into them."""

    on_said: OnSaid
    """Set by the node before `Launcher.run`."""

    async def capture(self, attempt_id: AttemptId) -> str:
        """The stacks of all its threads, as text for people; or why there are none. Bounded by the caller."""


class HealthActions(Protocol):
    """Who acts on what is found (`fray.node.membership`)."""

    def condemn(self, attempt_id: AttemptId, message: str) -> None:
        """End it as a failure."""

    def note(self, attempt_id: AttemptId, what: str, text: str) -> None:
        """A line for its story."""


@define(eq=False)
class _MonitoredAttempt:
    attempt_id: AttemptId
    spec: JobSpec
    port: int
    over: trio.Event = field(factory=trio.Event)
    beats: StallDetector | None = None
    pulses: HealthCounter | None = None
    pulse: HealthReport | None = None
    moved: trio.Event = field(factory=trio.Event)
    notes: int = 0

    def words(self) -> str:
        """As `AttemptInfo.health` has it."""
        if self.beats is not None and self.beats.stalled:
            return "stalled"
        return self.pulses.words() if self.pulses is not None else ""

    def wake(self) -> None:
        self.moved.set()
        self.moved = trio.Event()


class HealthMonitor:
    """All of one membership."""

    def __init__(self, launcher: object, guardian: HealthActions, vitals: MetricsReporter) -> None:
        self._launcher = launcher if isinstance(launcher, SupportsCapture) else None
        self._ask: AskPath = getattr(launcher, "ask_path", _ask_port)
        self._guardian, self._vitals = guardian, vitals
        self._wards: dict[AttemptId, _MonitoredAttempt] = {}
        self._looking = trio.Semaphore(CAPTURES_LIMIT)
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Owns all tasks, until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    # What the member tells

    def began(self, attempt_id: AttemptId, spec: JobSpec, port: int) -> None:
        """It runs. ``port``: the one its health is asked for at; 0 if there is none."""
        if attempt_id in self._wards or self._nursery is None or (spec.health is None and spec.stall_s is None):
            return
        now = trio.current_time()
        ward = self._wards[attempt_id] = _MonitoredAttempt(attempt_id, spec, port)
        if spec.health is not None:
            ward.pulses = HealthCounter(spec.health, now)
            watch = self._watch_path if spec.health.path is not None else self._watch_pulse
            self._nursery.start_soon(self._until_over, ward, partial(watch, ward, spec.health))
        if spec.stall_s is not None:
            ward.beats = StallDetector(spec.stall_s, now)
            self._nursery.start_soon(self._until_over, ward, partial(self._watch_beats, ward, ward.beats))

    async def _until_over(self, ward: _MonitoredAttempt, watch: Callable[[], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await ward.over.wait()
            nursery.cancel_scope.cancel()

    def ended(self, attempt_id: AttemptId) -> None:
        """Its end has begun: nothing it does not say counts any more."""
        ward = self._wards.pop(attempt_id, None)
        if ward is not None:
            ward.over.set()

    def said(self, attempt_id: AttemptId, said: Said) -> None:
        ward = self._wards.get(attempt_id)
        if isinstance(said, Progress):
            self._vitals.progress(attempt_id, said)
            if ward is not None and ward.beats is not None:
                self._beaten(ward, ward.beats, said)
        elif isinstance(said, UsageReport):
            self._vitals.change(
                attempt_id,
                memory_bytes=said.memory_bytes,
                peak_memory_bytes=said.peak_memory_bytes,
                cpu_s=said.cpu_s,
            )
        elif ward is not None:
            ward.pulse = said
            ward.wake()

    # Stalls

    def _beaten(self, ward: _MonitoredAttempt, beats: StallDetector, progress: Progress) -> None:
        silent_s = trio.current_time() - beats.since
        if beats.beat(trio.current_time()):
            self._note(ward, "recovered", f"after {silent_s:.0f} s: {sentence(progress)}")
            self._vitals.change(ward.attempt_id, health=ward.words())
        ward.wake()

    async def _watch_beats(self, ward: _MonitoredAttempt, beats: StallDetector) -> None:
        while True:
            with trio.move_on_at(beats.due_at()):
                await ward.moved.wait()
            if beats.look(trio.current_time()):
                await self._stalled(ward, beats)

    async def _stalled(self, ward: _MonitoredAttempt, beats: StallDetector) -> None:
        self._vitals.change(ward.attempt_id, health=ward.words())
        last = self._vitals.latest(ward.attempt_id)
        text = f"no progress for {beats.stall_s:g} s"
        text += f"; the last was {sentence(last)}" if last is not None else " since it began"
        restarts = ward.spec.on_stall is OnStall.RESTART
        self._note(ward, "stalled", text)
        self._vitals.capture(ward.attempt_id, cut(await self.look_into(ward.attempt_id), CAPTURE_LIMIT_BYTES))
        if restarts and beats.stalled:
            self._guardian.condemn(ward.attempt_id, f"stalled: {text}")

    # Health

    async def _watch_path(self, ward: _MonitoredAttempt, check: HealthCheck) -> None:
        """A question every period, whose answer may take so long."""
        asked_at = trio.current_time()
        while True:
            await self._answered(ward, await self._bad_answer(ward, check))
            asked_at = max(asked_at + check.period_s, trio.current_time())
            await trio.sleep_until(asked_at)

    async def _bad_answer(self, ward: _MonitoredAttempt, check: HealthCheck) -> str:
        """What was wrong; empty if nothing was."""
        try:
            with trio.fail_after(check.period_s):
                await self._ask(ward.attempt_id, ward.port, check.path or "/")
        except trio.TooSlowError:
            return f"no answer within {check.period_s:g} s"
        except BadAnswer as error:
            return str(error)
        return ""

    async def _watch_pulse(self, ward: _MonitoredAttempt, check: HealthCheck) -> None:
        """The attempt asks itself every period, and says what came of it; saying nothing is an answer, too."""
        patience_s = 2 * check.period_s  # one to the next question, one for its answer
        while True:
            with trio.move_on_after(patience_s):
                while ward.pulse is None:
                    await ward.moved.wait()
            pulse, ward.pulse = ward.pulse, None
            patience_s = (1 if pulse is None else 2) * check.period_s
            if pulse is None:
                pulse = HealthReport(False, f"no answer within {check.period_s:g} s, nor a word from its process")
            await self._answered(ward, "" if pulse.good else pulse.text)

    async def _answered(self, ward: _MonitoredAttempt, wrong: str) -> None:
        pulses = ward.pulses
        assert pulses is not None
        before = pulses.standing
        standing = pulses.missed(wrong, trio.current_time()) if wrong else pulses.good()
        self._vitals.change(ward.attempt_id, health=ward.words())
        if (before, standing) in ((HealthState.WELL, HealthState.UNWELL), (HealthState.UNWELL, HealthState.WELL)):
            self._note(ward, standing.value, wrong)
        if standing is HealthState.FAILED:
            text = await self.look_into(ward.attempt_id)
            self._vitals.capture(ward.attempt_id, cut(text, CAPTURE_LIMIT_BYTES))
            self._guardian.condemn(ward.attempt_id, pulses.verdict())
            await trio.sleep_forever()

    # Looking into it

    def look_for(self, attempts: Iterable[AttemptId], tell: Callable[[AttemptId, str], object]) -> None:
        """Somebody wants to see stacks now; each is told as soon as it is there."""
        for attempt_id in attempts:
            if self._nursery is not None:
                self._nursery.start_soon(self._look_for, attempt_id, tell)

    async def _look_for(self, attempt_id: AttemptId, tell: Callable[[AttemptId, str], object]) -> None:
        tell(attempt_id, await self.look_into(attempt_id))

    async def look_into(self, attempt_id: AttemptId) -> str:
        """Its stacks, or why there are none; in bounded time."""
        if self._launcher is None:
            return "[fray] this node cannot look into its attempts"
        async with self._looking:
            with trio.move_on_after(CAPTURE_WITHIN_S):
                return await self._launcher.capture(attempt_id)
            return f"[fray] no stacks came within {CAPTURE_WITHIN_S:g} s"

    def _note(self, ward: _MonitoredAttempt, what: str, text: str) -> None:
        ward.notes += 1
        if ward.notes <= NOTES_LIMIT:
            self._guardian.note(ward.attempt_id, what, text)


async def _ask_port(attempt_id: AttemptId, port: int, path: str) -> None:
    await ask_path(port, path)
