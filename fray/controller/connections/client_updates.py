"""Pending updates of one client.

Invariants: an update waits here as *which* (job, key, attempt) until the channel has room, so their number is bounded
by the subscriptions, and a slow client is sent the latest state of each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from fray.controller.connections.client_logs import ClientLogs
from fray.controller.context import ControllerContext, NameFilter
from fray.errors import ChannelClosed, ChannelFull
from fray.model.ids import AttemptId, JobId
from fray.model.messages import client as messages
from fray.model.reservations import ReservationId
from fray.model.specs import JobInfo
from fray.net.channel.public import Channel
from fray.scheduler.reservations.view import reservation_info

UPDATES_AT_ONCE = 32
"""Updates that are sent before other tasks get a turn: each takes 0.1 ms or more, and a burst of jobs has thousands."""
LOGS_WAITING_BYTES = 256 * 1024
"""Lines are sent only while less than this waits for the client, so that no other update waits behind many of them."""


class ClientUpdates:
    """Pending updates of one client."""

    def __init__(
        self,
        context: ControllerContext,
        logs: ClientLogs,
        names_scope: Callable[[], NameFilter | None],
        hide_others: Callable[[Any], Any] = lambda message: message,
    ) -> None:
        self._context = context
        self._hide_others = hide_others
        self._names_scope = names_scope
        self._logs = logs
        self._jobs: dict[JobId, JobInfo] = {}
        self._metrics: dict[JobId, dict[AttemptId, None]] = {}
        self._reservations: dict[ReservationId, None] = {}
        self._names: dict[str, None] = {}
        self._wake = trio.Event()
        self._close: Callable[[], Awaitable[None]] | None = None
        logs.on_pending = self.wake

    def __repr__(self) -> str:
        return f"<ClientUpdates of {len(self._jobs)} jobs, {len(self._names)} names>"

    # What has changed

    def job_changed(self, info: JobInfo) -> None:
        # In place of an earlier one: a reader that was slow sees the latest state, and the queue has at most one entry
        # a job.
        self._jobs[info.job_id] = info
        self.wake()

    def metrics_changed(self, job_id: JobId, attempts: tuple[AttemptId, ...]) -> None:
        self._metrics.setdefault(job_id, {}).update(dict.fromkeys(attempts))
        self.wake()

    def reservation_changed(self, reservation_id: ReservationId) -> None:
        self._reservations[reservation_id] = None
        self.wake()

    def names_changed(self, key: str) -> None:
        # Only the key: the endpoints are read when they are sent, and are then the latest.
        self._names[key] = None
        self.wake()

    def names_sent(self, key: str) -> None:
        """Drop the update for a key whose endpoints have just been sent in a reply."""
        self._names.pop(key, None)

    def clear(self) -> None:
        """Drop the updates of jobs, reservations and names."""
        self._jobs.clear()
        self._reservations.clear()
        self._names.clear()

    # Sending

    def wake(self) -> None:
        """Wake the sender."""
        self._wake.set()

    def finish(self, close: Callable[[], Awaitable[None]]) -> None:
        """Send the pending updates, then close the channel."""
        self._close = close
        self.wake()

    async def run(self, channel: Channel) -> None:
        """Send updates whenever the channel has room, until it has ended."""
        try:
            while channel.error is None:
                await self._wake.wait()
                # Before the queues are looked at, so that what arrives during a send wakes the next round.
                self._wake = trio.Event()
                sent = 0
                while channel.error is None:
                    if self._names or self._reservations or self._metrics or self._jobs or self._logs.hints:
                        await channel.wait_room()
                    elif self._logs.pending:
                        # A lower limit for lines: a change that comes next waits behind 256 KiB at most, not behind 16
                        # MiB.
                        await channel.wait_room(LOGS_WAITING_BYTES)
                    else:
                        break
                    self._send_next(channel)
                    sent += 1
                    if sent % UPDATES_AT_ONCE == 0:
                        await trio.lowlevel.checkpoint()
                # Only with empty queues: the last changes of its jobs go out before the channel closes.
                if self._close is not None:
                    await self._close()
        except ChannelFull as error:
            channel.end(error)  # without an error to the client: it reconnects and subscribes again
        except ChannelClosed:
            pass

    def _send_next(self, channel: Channel) -> None:
        """Send one update: names first, then measurements, jobs (each after the lines it has printed so far),
        reservations, hints, and the lines of other jobs."""
        # First, since calls to actors that have moved or ended wait for them.
        if self._names:
            key = next(iter(self._names))
            del self._names[key]
            channel.notice(*self._context.current_names(key, self._names_scope()))
        elif self._metrics:
            job_id, attempts = self._metrics.popitem()
            channel.notice(messages.JobMeasured(job_id=job_id, metrics=self._context.attempt_metrics.latest(attempts)))
        elif self._jobs:
            self._send_job(channel, next(iter(self._jobs)))
        elif self._reservations:
            self._send_reservation(channel, self._reservations.popitem()[0])
        elif (hint := self._logs.take_hint()) is not None:
            channel.notice(hint)
        else:
            self._send_lines(channel)

    def _send_reservation(self, channel: Channel, reservation_id: ReservationId) -> None:
        state = self._context.state
        if reservation_id in state.reservations:
            channel.notice(messages.ReservationChanged(reservation=reservation_info(state, reservation_id)))

    def _send_job(self, channel: Channel, job_id: JobId) -> None:
        # A job's lines go before its change: a driver that sees the end has all that was printed before it.
        attempt = self._logs.next_pending(job_id) if self._logs.pending else None
        if attempt is not None:
            self._send_lines(channel, attempt)
            return
        # With the measurements of this moment, and the value read from the store only now: results do not queue in
        # memory.
        info = self._jobs.pop(job_id).with_metrics(self._context.attempt_metrics.last_reported)
        info, value = self._context.attach_value(info)
        channel.notice(self._hide_others(messages.JobChanged(job=info)), value)

    def _send_lines(self, channel: Channel, attempt: AttemptId | None = None) -> None:
        found = self._logs.take_lines(attempt)
        if found is not None:
            channel.notice(found[0], [found[1]])
