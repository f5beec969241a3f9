"""Questions about jobs and machines: all of them, by their changes, and one job with all its details."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fray.api.cluster import Cluster
from fray.model.ids import JobId
from fray.model.specs import JobInfo
from fray.monitoring.json_form import plain
from fray.monitoring.live import WAIT_S, Changes
from fray.monitoring.rows import Row, job_row, node_row

CHANGES_AT_ONCE = 100
"""Jobs in one answer: about 10 ms of the controller's time, for which all else waits."""
LIVING_AT_ONCE = 20
"""Living jobs whose progress and reason are asked again at a time."""


class JobList:
    """All jobs, kept by their changes; and the progress of living ones, and why they wait, which are not changes."""

    def __init__(self) -> None:
        self._change = 0
        self._living: dict[JobId, None] = {}
        """Living jobs; the one that was asked about longest ago comes first."""

    async def ask_changes(self, cluster: Cluster) -> Changes:
        """Return what has changed since the last question. Raises FrayError."""
        reply = await cluster.job_changes(self._change, limit=CHANGES_AT_ONCE, namespace="*", wait_s=WAIT_S)
        # An earlier release has no numbers and sends all.
        is_whole = reply.is_reset or reply.change == 0
        if is_whole:
            self._living.clear()
        self._change = reply.change
        gone, is_pushed = self._without(reply.forgotten), reply.change != 0
        return Changes(self._rows(reply.jobs), gone, is_whole, reply.has_more, is_pushed)

    async def ask_living(self, cluster: Cluster) -> Changes | None:
        """Return some living jobs, in turn; None if there are none. Raises FrayError."""
        some = list(self._living)[:LIVING_AT_ONCE]
        if not some:
            return None
        reply = await cluster.job_changes(jobs=some, namespace="*")
        for job_id in some:
            if self._living.pop(job_id, 0) is None:
                self._living[job_id] = None
        return Changes(self._rows(reply.jobs))

    def _rows(self, jobs: Sequence[JobInfo]) -> list[Row]:
        for info in jobs:
            if info.state.finished:
                self._living.pop(info.job_id, None)
            else:
                self._living.setdefault(info.job_id)
        return [job_row(info) for info in jobs]

    def _without(self, forgotten: Sequence[JobId]) -> Sequence[JobId]:
        for job_id in forgotten:
            self._living.pop(job_id, None)
        return forgotten


class NodeList:
    """All machines, kept by their changes."""

    def __init__(self) -> None:
        self._change = 0

    async def ask_changes(self, cluster: Cluster) -> Changes:
        """Return what has changed since the last question. Raises FrayError."""
        reply = await cluster.node_changes(self._change, wait_s=WAIT_S)
        # As of jobs.
        is_whole, is_pushed = reply.is_reset or reply.change == 0, reply.change != 0
        self._change = reply.change
        return Changes([node_row(node) for node in reply.nodes], reply.gone, is_whole, is_pushed=is_pushed)


class JobDocument:
    """One job as a document: its record, explanation and events. The latter two are asked again when it has changed."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._seen: Any = None
        self._rest: dict[str, Any] = {}

    async def ask(self, cluster: Cluster) -> Sequence[Row]:
        """Return the row. Raises FrayError."""
        info = await cluster.poll(self._job_id)
        seen = (info.state, info.reason, len(info.attempts), tuple(each.cause for each in info.attempts))
        if seen != self._seen:
            events = plain(await cluster.events(self._job_id))
            self._rest = {"explanation": await cluster.explain(self._job_id), "events": events}
            self._seen = seen
        return [["job", {"info": plain(info), **self._rest}]]
