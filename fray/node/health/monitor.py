"""Monitor of running attempts: health checks, stall detection, stack captures.

`fray.node.health.counters` decides; the tasks here ask, wait and act. Invariants: an attempt is monitored from when it
runs until its end begins, for whatever reason. A failed check, or a stall with a restart policy, has one consequence:
stacks are captured, then `HealthActions.fail_attempt` ends the attempt by its termination policy, as a failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Protocol

import trio
from attrs import define, field

from fray.model.ids import AttemptId
from fray.model.monitoring.attempt_metrics import CAPTURE_LIMIT_BYTES, truncate_middle
from fray.model.monitoring.health import HealthCheck, OnStall, Progress
from fray.model.monitoring.progress_protocol import (
    AttemptReport,
    HealthReport,
    UsageReport,
    progress_text,
)
from fray.model.monitoring.served_calls import ServedCalls
from fray.model.specs import JobSpec
from fray.node.health.counters import HealthCounter, HealthState, StallDetector
from fray.node.health.http_check import BadAnswer, check_path
from fray.node.health.metrics_report import MetricsReporter
from fray.node.launcher import Launcher

CAPTURE_TIMEOUT_S = 10.0
"""Seconds after which a stack capture is given up."""
CAPTURES_LIMIT = 4
"""Number of attempts whose stacks are captured at the same time."""
NOTES_LIMIT = 100
"""Number of health events recorded for one attempt."""


class HealthActions(Protocol):
    """Actions on findings, implemented by `fray.node.membership`."""

    def fail_attempt(self, attempt_id: AttemptId, message: str) -> None:
        """End an attempt as a failure."""

    def annotate(self, attempt_id: AttemptId, what: str, text: str) -> None:
        """Add an event to the attempt's job."""


@define(eq=False)
class _MonitoredAttempt:
    attempt_id: AttemptId
    spec: JobSpec
    port: int
    ended: trio.Event = field(factory=trio.Event)
    stall_detector: StallDetector | None = None
    health: HealthCounter | None = None
    last_report: HealthReport | None = None
    moved: trio.Event = field(factory=trio.Event)
    notes: int = 0

    def status_text(self) -> str:
        """Return the text of `AttemptInfo.health`."""
        if self.stall_detector is not None and self.stall_detector.stalled:
            return "stalled"
        return self.health.status_text() if self.health is not None else ""

    def wake(self) -> None:
        self.moved.set()
        self.moved = trio.Event()


class HealthMonitor:
    """Monitor of all attempts of one membership."""

    def __init__(self, launcher: Launcher, actions: HealthActions, metrics: MetricsReporter) -> None:
        self._launcher = launcher
        self._check_path = launcher.check_path or _check_port
        self._actions, self._metrics = actions, metrics
        self._attempts: dict[AttemptId, _MonitoredAttempt] = {}
        self._capture_slots = trio.Semaphore(CAPTURES_LIMIT)
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own all tasks, until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    # Events of attempts

    def on_running(self, attempt_id: AttemptId, spec: JobSpec, port: int) -> None:
        """Start to monitor an attempt. ``port``: where its health is checked; 0 if there is none."""
        if attempt_id in self._attempts or self._nursery is None or (spec.health is None and spec.stall_s is None):
            return
        now = trio.current_time()
        attempt = self._attempts[attempt_id] = _MonitoredAttempt(attempt_id, spec, port)
        if spec.health is not None:
            attempt.health = HealthCounter(spec.health, now)
            watch = self._watch_path if spec.health.path is not None else self._watch_own_reports
            self._nursery.start_soon(self._run_until_ended, attempt, partial(watch, attempt, spec.health))
        if spec.stall_s is not None:
            attempt.stall_detector = StallDetector(spec.stall_s, now)
            self._nursery.start_soon(
                self._run_until_ended, attempt, partial(self._watch_progress, attempt, attempt.stall_detector)
            )

    async def _run_until_ended(self, attempt: _MonitoredAttempt, watch: Callable[[], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await attempt.ended.wait()
            nursery.cancel_scope.cancel()

    def on_ending(self, attempt_id: AttemptId) -> None:
        """Stop monitoring an attempt: its end has begun."""
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            attempt.ended.set()

    def on_report(self, attempt_id: AttemptId, report: AttemptReport) -> None:
        """Handle a report of an attempt."""
        attempt = self._attempts.get(attempt_id)
        if isinstance(report, Progress):
            self._metrics.on_progress(attempt_id, report)
            if attempt is not None and attempt.stall_detector is not None:
                self._on_progress(attempt, attempt.stall_detector, report)
        elif isinstance(report, UsageReport):
            self._metrics.update(
                attempt_id,
                memory_bytes=report.memory_bytes,
                peak_memory_bytes=report.peak_memory_bytes,
                cpu_s=report.cpu_s,
            )
        elif isinstance(report, ServedCalls):
            self._metrics.update(attempt_id, calls=report)
        elif attempt is not None:
            attempt.last_report = report
            attempt.wake()

    # Stalls

    def _on_progress(self, attempt: _MonitoredAttempt, stall_detector: StallDetector, progress: Progress) -> None:
        silent_s = trio.current_time() - stall_detector.since
        if stall_detector.on_progress(trio.current_time()):
            self._annotate(attempt, "recovered", f"after {silent_s:.0f} s: {progress_text(progress)}")
            self._metrics.update(attempt.attempt_id, health=attempt.status_text())
        attempt.wake()

    async def _watch_progress(self, attempt: _MonitoredAttempt, stall_detector: StallDetector) -> None:
        while True:
            with trio.move_on_at(stall_detector.stalls_at()):
                await attempt.moved.wait()
            if stall_detector.check(trio.current_time()):
                await self._on_stall(attempt, stall_detector)

    async def _on_stall(self, attempt: _MonitoredAttempt, stall_detector: StallDetector) -> None:
        self._metrics.update(attempt.attempt_id, health=attempt.status_text())
        last = self._metrics.last_progress(attempt.attempt_id)
        text = f"no progress for {stall_detector.stall_s:g} s"
        text += f"; the last was {progress_text(last)}" if last is not None else " since it started"
        restarts = attempt.spec.on_stall is OnStall.RESTART
        self._annotate(attempt, "stalled", text)
        self._metrics.add_capture(
            attempt.attempt_id, truncate_middle(await self.capture(attempt.attempt_id), CAPTURE_LIMIT_BYTES)
        )
        # Checked again: the capture takes seconds, in which the job may have reported progress.
        if restarts and stall_detector.stalled:
            self._actions.fail_attempt(attempt.attempt_id, f"stalled: {text}")

    # Health

    async def _watch_path(self, attempt: _MonitoredAttempt, check: HealthCheck) -> None:
        """Check once per period, which is also the timeout of the answer."""
        while True:
            # When it is really asked: after a suspension of the machine, missed checks are not made up for at once.
            asked_at = trio.current_time()
            await self._record_answer(attempt, await self._check_path_once(attempt, check))
            await trio.sleep_until(asked_at + check.period_s)

    async def _check_path_once(self, attempt: _MonitoredAttempt, check: HealthCheck) -> str:
        """Return what was wrong; empty if nothing was."""
        try:
            with trio.fail_after(check.period_s):
                await self._check_path(attempt.attempt_id, attempt.port, check.path or "/")
        except trio.TooSlowError:
            return f"no answer within {check.period_s:g} s"
        except BadAnswer as error:
            return str(error)
        return ""

    async def _watch_own_reports(self, attempt: _MonitoredAttempt, check: HealthCheck) -> None:
        """Count the answers of an attempt that checks itself every period; a missing report is an answer, too."""
        patience_s = 2 * check.period_s  # one until the next check, one for its answer
        while True:
            with trio.move_on_after(patience_s):
                while attempt.last_report is None:
                    await attempt.moved.wait()
            last_report, attempt.last_report = attempt.last_report, None
            patience_s = (1 if last_report is None else 2) * check.period_s
            if last_report is None:
                last_report = HealthReport(
                    False, f"no answer within {check.period_s:g} s, and no report from its process"
                )
            await self._record_answer(attempt, "" if last_report.good else last_report.text)

    async def _record_answer(self, attempt: _MonitoredAttempt, wrong: str) -> None:
        health = attempt.health
        assert health is not None
        before = health.state
        state = health.record_bad(wrong, trio.current_time()) if wrong else health.record_good()
        self._metrics.update(attempt.attempt_id, health=attempt.status_text())
        if (before, state) in ((HealthState.WELL, HealthState.UNWELL), (HealthState.UNWELL, HealthState.WELL)):
            self._annotate(attempt, state.value, wrong)
        if state is HealthState.FAILED:
            # Before the attempt is ended: afterwards its stacks show its shutdown.
            text = await self.capture(attempt.attempt_id)
            self._metrics.add_capture(attempt.attempt_id, truncate_middle(text, CAPTURE_LIMIT_BYTES))
            self._actions.fail_attempt(attempt.attempt_id, health.failure_text())
            # The attempt's end cancels this task; until then, nothing more is checked.
            await trio.sleep_forever()

    # Stack captures

    def capture_each(self, attempts: Iterable[AttemptId], tell: Callable[[AttemptId, str], object]) -> None:
        """Capture stacks on request; ``tell`` is called with each as soon as it is there."""
        for attempt_id in attempts:
            if self._nursery is not None:
                self._nursery.start_soon(self._capture_one, attempt_id, tell)

    async def _capture_one(self, attempt_id: AttemptId, tell: Callable[[AttemptId, str], object]) -> None:
        tell(attempt_id, await self.capture(attempt_id))

    async def capture(self, attempt_id: AttemptId) -> str:
        """Return the stacks of an attempt, or why there are none; in bounded time."""
        # Each capture stops processes and takes CPU time: a gang of hundreds is captured in turn.
        async with self._capture_slots:
            with trio.move_on_after(CAPTURE_TIMEOUT_S):
                return await self._launcher.capture(attempt_id)
            return f"[fray] no stacks came within {CAPTURE_TIMEOUT_S:g} s"

    def _annotate(self, attempt: _MonitoredAttempt, what: str, text: str) -> None:
        attempt.notes += 1
        if attempt.notes <= NOTES_LIMIT:
            self._actions.annotate(attempt.attempt_id, what, text)


async def _check_port(attempt_id: AttemptId, port: int, path: str) -> None:
    await check_path(port, path)
