"""What this process is told of logs: lines that are printed here, and hints to those who read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias
from weakref import WeakSet

import trio

from fray.errors import FrayError
from fray.model.ids import JobId, SessionId
from fray.model.log_records import LogLine
from fray.model.messages.client import LogAppended, LogLines, WatchLogs
from fray.model.specs import JobInfo
from fray.net.codec import Bytes
from fray.runtime.controller_client.request import SendRequest

OnLog: TypeAlias = Callable[[Sequence[LogLine]], None]
"""Told of lines of one attempt."""


class LogFollower(Protocol):
    """One who reads logs and follows."""

    watched: tuple[JobId, bool]
    """The job, and whether also all below it."""

    def on_appended(self, moved: LogAppended | None) -> None:
        """Told of an attempt that has printed; None: of any, as hints may have been lost."""


class LogSubscriptions:
    """Of one conversation with the controller, which tells it of each job as long as it is among those `followed`."""

    def __init__(
        self, session: SessionId, send: SendRequest, resubscribe: Callable[[], None], on_log: OnLog | None
    ) -> None:
        self._session = session
        self._send = send
        self._resubscribe = resubscribe
        self.on_log = on_log
        self.followed: dict[JobId | None, bool] = {}
        self._not_printed: Counter[JobId] = Counter()
        self._readers: WeakSet[LogFollower] = WeakSet()

    def follow(self, job: JobId | None, on: bool = True) -> None:
        """Have `on_log` called with lines of one job, or (None) of all this session owns."""
        self.followed[job] = on
        self._resubscribe()

    def is_printed(self, job: JobInfo) -> bool:
        """Whether what this job writes is told to `on_log` without being asked for."""
        return self.on_log is not None and job.owner == self._session

    @contextmanager
    def suppress_printing(self, job: JobId) -> Iterator[None]:
        """Somebody else prints the lines of this job meanwhile."""
        self._not_printed[job] += 1
        try:
            yield
        finally:
            self._not_printed[job] -= 1
            self._not_printed += Counter()  # without those that are 0

    def add_reader(self, reader: LogFollower) -> None:
        """Have its `on_moved` called with every `LogAppended` of whatever is watched, as long as it is there."""
        self._readers.add(reader)

    async def remove_reader(self, reader: LogFollower) -> None:
        """No more; the last one to watch a job says so to the controller. Takes at most a second."""
        self._readers.discard(reader)
        if any(other.watched == reader.watched for other in self._readers):
            return
        job_id, tree = reader.watched
        with trio.move_on_after(1, shield=True):
            try:
                await self._send(WatchLogs(job=job_id, tree=tree, follow=False))
            except FrayError:
                pass  # it has ended, or the job is forgotten: nobody is told of it then

    def on_lines(self, message: LogLines, data: Bytes) -> None:
        """A notice of the controller's."""
        if self.on_log is not None and message.job_id not in self._not_printed:
            from fray.runtime.controller_client.log_lines import lines_of_notice  # not every process prints logs

            self.on_log(lines_of_notice(message, data))

    def on_appended(self, message: LogAppended | None) -> None:
        """A notice of the controller's; None: some may have been lost."""
        for reader in list(self._readers):
            reader.on_appended(message)
