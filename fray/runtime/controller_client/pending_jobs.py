"""Lines on standard error that say for what the pending jobs of a driver wait."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import trio
from attrs import Factory, define

from fray.model.ids import JobId
from fray.model.specs import JobInfo, JobState
from fray.model.text import plural
from fray.runtime.controller_client.jobs import JobTracker

AFTER_S = 5.0
"""Seconds that a job is pending before the driver says so."""
LOOK_S = 1.0
LOOKED_AT_PER_S = 10_000
"""Pending jobs looked at in a second: about 1 % of a core."""
LINES_LIMIT = 3
"""Lines about jobs that wait for one kind of reason, until none of them does."""


def print_waits(lines: Sequence[str]) -> None:
    """Print ``fray: line`` for each on standard error."""
    sys.stdout.flush()
    sys.stderr.write("".join(f"fray: {line}\n" for line in lines))
    sys.stderr.flush()


async def report_pending(jobs: JobTracker, write: Callable[[Sequence[str]], object] = print_waits) -> None:
    """Write why jobs wait: `AFTER_S` after they became pending, then at each change of the reason; until cancelled."""
    report = PendingReport()
    while True:
        if not jobs.pending:
            report = PendingReport()
            jobs.became_pending = trio.Event()
            await jobs.became_pending.wait()
        if lines := report.look(trio.current_time(), jobs.pending_infos()):
            write(lines)
        # Looks instead of notices: a thousand changes in one second cost one look; and less often if they are long.
        await trio.sleep(max(LOOK_S, len(jobs.pending) / LOOKED_AT_PER_S))


@define
class _Wait:
    since: float
    is_placed: bool
    said: str = ""
    """Kind of the reason of which the user has been notified."""


@define
class PendingReport:
    """Decision about which pending jobs to report, from those reported before. Pure."""

    waits: dict[JobId, _Wait] = Factory(dict)
    said: Counter[str] = Factory(Counter)
    """Number of lines by kind of reason, of the kinds for which jobs wait."""

    def look(self, now: float, infos: Iterable[JobInfo]) -> list[str]:
        """Return the lines to write, given all pending jobs in the order of their launch."""
        due: list[JobInfo] = []
        waits: dict[JobId, _Wait] = {}
        for info in infos:
            wait, is_placed = self.waits.get(info.job_id), bool(info.members)
            # Starting has its own five seconds: a job that was placed is mostly about to run.
            if wait is None or wait.is_placed is not is_placed:
                wait = _Wait(now, is_placed)
            waits[info.job_id] = wait
            if now >= wait.since + AFTER_S and info.reason and info.state is JobState.PENDING:
                due.append(info)
        self.waits = waits
        new = [info for info in due if waits[info.job_id].said != info.reason_kind]
        for info in new:
            waits[info.job_id].said = info.reason_kind
        kinds = {wait.said for wait in waits.values()}
        self.said = Counter({kind: lines for kind, lines in self.said.items() if kind in kinds})
        new.sort(key=lambda info: info.reason_kind)  # stable: of one kind in the order of the launches
        lines: list[str] = []
        for kind, group in groupby(new, lambda info: info.reason_kind):
            lines += self._lines(kind, list(group))
        return lines

    def _lines(self, kind: str, infos: Sequence[JobInfo]) -> list[str]:
        # Limited: the thousand jobs of a sweep wait for the same, and would fill the terminal.
        room = LINES_LIMIT - self.said[kind]
        shown = infos if len(infos) <= room else infos[: max(0, room - 1)]
        lines = [f"{info.job_id} waits: {info.reason}" for info in shown]
        if room > len(lines) and len(shown) < len(infos):
            more = plural(len(infos) - len(shown), "more job")
            verb = "wait" if len(infos) - len(shown) > 1 else "waits"
            lines.append(f"{more} {verb} for similar reasons: job.info.reason has that of each")
        self.said[kind] += len(lines)
        return lines
