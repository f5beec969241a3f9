"""Reporter of attempt metrics to the controller: the latest of each attempt, at most every `REPORT_EVERY_S`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import trio
from attrs import evolve

from fray.errors import ChannelClosed, ChannelFull
from fray.model.ids import AttemptId
from fray.model.messages.node import AttemptMetricsReport
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.monitoring.health import Progress
from fray.net.channel.public import Channel

REPORT_EVERY_S = 0.5
CHUNK_LIMIT_BYTES = 1024 * 1024
"""Approximate size of one message; the rest follows in the next."""
_COST_BYTES = 200


class MetricsReporter:
    """Metrics of the attempts of one membership."""

    def __init__(self) -> None:
        self.latest: dict[AttemptId, AttemptMetrics] = {}
        """Latest metrics by attempt; the other tables have entries of these attempts only."""
        self._progress_at: dict[AttemptId, float] = {}
        self._changed: dict[AttemptId, None] = {}
        self._captured: dict[AttemptId, str] = {}
        self._unsent_captures: dict[AttemptId, None] = {}
        """Attempts whose stack captures the controller does not have."""
        self._wake = trio.Event()

    def update(self, attempt_id: AttemptId, **changes: Any) -> None:
        """Set fields of an attempt's `AttemptMetrics`."""
        before = self.latest.get(attempt_id) or AttemptMetrics(attempt_id=attempt_id)
        after = evolve(before, **changes)
        if after != before:
            self.latest[attempt_id] = after
            self._mark_changed(attempt_id)

    def on_progress(self, attempt_id: AttemptId, progress: Progress) -> None:
        self._progress_at[attempt_id] = trio.current_time()
        self.update(attempt_id, progress=progress)

    def add_capture(self, attempt_id: AttemptId, text: str) -> None:
        """Store stacks for the attempt's record."""
        self._captured[attempt_id] = text
        self._unsent_captures[attempt_id] = None
        self.latest.setdefault(attempt_id, AttemptMetrics(attempt_id=attempt_id))
        self._mark_changed(attempt_id)

    def last_capture(self, attempt_id: AttemptId) -> str:
        """Return the last stacks; empty if there are none."""
        return self._captured.get(attempt_id, "")

    def last_progress(self, attempt_id: AttemptId) -> Progress | None:
        known = self.latest.get(attempt_id)
        return known.progress if known is not None else None

    def forget(self, attempt_id: AttemptId) -> None:
        for book in (self.latest, self._progress_at, self._changed, self._captured, self._unsent_captures):
            book.pop(attempt_id, None)

    def resend_all(self) -> None:
        """Send everything again: the controller was restarted."""
        self._unsent_captures = dict.fromkeys(self._captured)
        for attempt_id in self.latest:
            self._mark_changed(attempt_id)

    def _mark_changed(self, attempt_id: AttemptId) -> None:
        self._changed[attempt_id] = None
        self._wake.set()

    # Sending

    async def run(self, channel: Channel) -> None:
        """Send what has changed, until the channel has ended."""
        try:
            while channel.error is None:
                await self._wake.wait()
                await channel.wait_room()
                self._wake = trio.Event()
                self.send(channel, self._changed)
                if self._changed:
                    self._wake.set()
                # After the sending: a single change goes out at once, and later ones are merged.
                await trio.sleep(REPORT_EVERY_S)
        except ChannelClosed:
            pass

    def send(self, channel: Channel, attempts: Iterable[AttemptId]) -> None:
        """Send what has changed of these attempts, as much as fits one message."""
        sent, size_bytes = [], 0
        for attempt_id in list(attempts):
            if attempt_id in self._changed and size_bytes < CHUNK_LIMIT_BYTES:
                sent.append(self._take(attempt_id))
                size_bytes += _COST_BYTES + len(sent[-1].captured)
        if sent:
            try:
                channel.notice(AttemptMetricsReport(metrics=tuple(sent)))
            except (ChannelClosed, ChannelFull):
                pass  # a new connection sends everything again

    def _take(self, attempt_id: AttemptId) -> AttemptMetrics:
        del self._changed[attempt_id]
        captured = self._captured[attempt_id] if attempt_id in self._unsent_captures else ""
        self._unsent_captures.pop(attempt_id, None)
        # An age and not a time: the clocks of machines differ.
        age_s = max(0.0, trio.current_time() - self._progress_at.get(attempt_id, trio.current_time()))
        return evolve(self.latest[attempt_id], age_s=round(age_s, 3), captured=captured)
