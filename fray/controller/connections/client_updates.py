"""What one client shall be told and has not been yet.

Law: news waits here as *which* (job, key, attempt), bounded by what is subscribed, until the channel has room; so a
slow client is told the latest, and a log reader what it missed.
"""

from __future__ import annotations

import trio

from fray.controller.connections.client_logs import ClientLogs
from fray.controller.context import ControllerContext
from fray.model.ids import AttemptId, JobId
from fray.model.messages import client as words
from fray.model.reservations import ReservationId
from fray.model.specs import JobInfo
from fray.net.channel.public import Channel

LOGS_WAITING_BYTES = 256 * 1024
"""Lines are sent only while less than this waits for the client: so nothing else waits behind many of them."""


class ClientUpdates:
    """Of one client."""

    def __init__(self, house: ControllerContext, logs: ClientLogs) -> None:
        self._house = house
        self._logs = logs
        self._jobs: dict[JobId, JobInfo] = {}
        self._measured: dict[JobId, dict[AttemptId, None]] = {}
        self._reservations: dict[ReservationId, None] = {}
        self._names: dict[str, None] = {}
        self._wake = trio.Event()

    def __repr__(self) -> str:
        return f"<News of {len(self._jobs)} jobs, {len(self._names)} names>"

    # What has happened

    def job_moved(self, info: JobInfo) -> None:
        self._jobs[info.job_id] = info
        self.wake()

    def measured(self, job_id: JobId, attempts: tuple[AttemptId, ...]) -> None:
        self._measured.setdefault(job_id, {}).update(dict.fromkeys(attempts))
        self.wake()

    def reservation_moved(self, reservation_id: ReservationId) -> None:
        self._reservations[reservation_id] = None
        self.wake()

    def names_moved(self, key: str) -> None:
        self._names[key] = None
        self.wake()

    def names_told(self, key: str) -> None:
        """They are, now, in an answer."""
        self._names.pop(key, None)

    def log_moved(self, attempt: AttemptId) -> None:
        self._logs.printed(attempt)
        self.wake()

    def log_watched(self, attempt: AttemptId) -> None:
        if self._logs.hint(attempt):
            self.wake()

    def forget(self) -> None:
        """Of jobs and names nothing more is told."""
        self._jobs.clear()
        self._reservations.clear()
        self._names.clear()

    # Who tells it

    def wake(self) -> None:
        """Have whoever waits look again."""
        self._wake.set()

    async def wait(self) -> None:
        """Until there may be some."""
        await self._wake.wait()
        self._wake = trio.Event()

    @property
    def room_bytes(self) -> tuple[int, ...]:
        """What the channel's `wait_room` is asked for."""
        return () if self._more_than_lines() else (LOGS_WAITING_BYTES,)

    def __bool__(self) -> bool:
        return self._more_than_lines() or self._logs.behind() is not None

    def _more_than_lines(self) -> bool:
        return bool(self._names or self._reservations or self._measured or self._jobs or self._logs.has_hints)

    def tell_one(self, channel: Channel) -> None:
        """Names first, then measurements, jobs, each after the lines it has printed so far, reservations, the lines of
        the other jobs.

        Raises:
            ChannelClosed, ChannelFull: the channel cannot take it.
        """
        if self._names:
            key = next(iter(self._names))
            del self._names[key]
            channel.notice(*self._house.names_now(key))
        elif self._measured:
            job_id, attempts = self._measured.popitem()
            channel.notice(words.JobMeasured(job_id=job_id, vitals=self._house.vitals.of(attempts)))
        elif self._jobs:
            self._tell_job(channel, next(iter(self._jobs)))
        elif self._reservations:
            self._tell_reservation(channel, self._reservations.popitem()[0])
        elif (hint := self._logs.take_hint()) is not None:
            channel.notice(hint)
        else:
            self._tell_lines(channel, self._logs.behind())

    def _tell_reservation(self, channel: Channel, reservation_id: ReservationId) -> None:
        state = self._house.state
        if reservation_id in state.reservations:
            channel.notice(words.ReservationChanged(reservation=state.reservation_info(reservation_id)))

    def _tell_job(self, channel: Channel, job_id: JobId) -> None:
        attempt = self._logs.behind(job_id)
        if attempt is not None:
            self._tell_lines(channel, attempt)
            return
        info, value = self._house.with_value(self._house.vitals.complete(self._jobs.pop(job_id)))
        channel.notice(words.JobChanged(job=info), value)

    def _tell_lines(self, channel: Channel, attempt: AttemptId | None) -> None:
        found = self._logs.take_lines(attempt) if attempt is not None else None
        if found is not None:
            channel.notice(found[0], [found[1]])
