"""Log subscriptions of this process: lines to print here, and hints to log readers that more has been printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

import trio

from fray.errors import FrayError
from fray.model.ids import JobId, SessionId
from fray.model.log_records import LogLine
from fray.model.messages.client import LogAppended, LogLines, WatchLogs
from fray.model.specs import JobInfo
from fray.net.codec import Bytes
from fray.runtime.controller_client.request import SendRequest
from fray.runtime.notebook_cells import run_in_cell_of

OnLog: TypeAlias = Callable[[Sequence[LogLine]], None]
"""Function that receives new lines of one attempt."""


class LogFollower(Protocol):
    """Interface of a log reader that follows a job."""

    watched: tuple[JobId, bool]
    """The job, and whether its descendants are followed, too."""

    def on_appended(self, moved: LogAppended | None) -> None:
        """Handle a hint that an attempt has printed; None: any attempt may have, as hints may have been lost."""


class LogSubscriptions:
    """Log subscriptions of one session; the controller sends lines of the jobs in `followed`."""

    def __init__(
        self, session: SessionId, send: SendRequest, resubscribe: Callable[[], None], on_log: OnLog | None
    ) -> None:
        self._session = session
        self._send = send
        self._resubscribe = resubscribe
        self.on_log = on_log
        self.followed: dict[JobId | None, bool] = {}
        self._not_printed: Counter[JobId] = Counter()
        # No WeakSet: that iterates by address, and the order in which readers wake would differ from run to run.
        self._readers: WeakKeyDictionary[LogFollower, None] = WeakKeyDictionary()

    def follow(self, job: JobId | None, on: bool = True) -> None:
        """Start or stop to pass lines of one job, or (None) of all this session owns, to `on_log`."""
        self.followed[job] = on
        self._resubscribe()

    def is_printed(self, job: JobInfo) -> bool:
        """Return whether the lines of this job are passed to `on_log` without a request."""
        return self.on_log is not None and job.owner == self._session

    @contextmanager
    def suppress_printing(self, job: JobId) -> Iterator[None]:
        """Do not pass lines of this job to `on_log` inside the block, because other code prints them."""
        self._not_printed[job] += 1
        try:
            yield
        finally:
            self._not_printed[job] -= 1
            self._not_printed += Counter()  # without those that are 0

    def add_reader(self, reader: LogFollower) -> None:
        """Call the reader's `on_appended` with every `LogAppended` notice, as long as the reader exists."""
        self._readers[reader] = None

    async def remove_reader(self, reader: LogFollower) -> None:
        """Remove a reader; if it is the last one of its job, unsubscribe at the controller. Takes at most a second."""
        self._readers.pop(reader, None)
        if any(other.watched == reader.watched for other in self._readers):
            return
        job_id, tree = reader.watched
        with trio.move_on_after(1, shield=True):
            try:
                await self._send(WatchLogs(job=job_id, tree=tree, follow=False))
            except FrayError:
                pass  # the session has ended, or the controller has dropped the job: it sends no hints then

    def on_lines(self, message: LogLines, data: Bytes) -> None:
        """Handle a notice with lines of one attempt."""
        if self.on_log is not None and message.job_id not in self._not_printed:
            from fray.runtime.controller_client.log_lines import lines_of_notice  # not every process prints logs

            run_in_cell_of(message.launched_job or message.job_id, self.on_log, lines_of_notice(message, data))

    def on_appended(self, message: LogAppended | None) -> None:
        """Handle a notice that an attempt has printed; None: some notices may have been lost."""
        for reader in list(self._readers):
            reader.on_appended(message)
