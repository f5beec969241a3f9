"""Job groups for sync code."""

from __future__ import annotations

from typing import Any

from fray.api.jobs.job_group import JobGroup as NativeGroup
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import Portal
from fray.blocking.jobs import Job, wait_stopped
from fray.model.job_groups import JobGroupInfo


class JobGroup(list[Job]):
    """Jobs of a group as a list, in the order of the request, and the group as a whole. As `fray.JobGroup`."""

    def __init__(self, portal: Portal, group: NativeGroup) -> None:
        super().__init__(Job(portal, job) for job in group)
        self._portal, self._native = portal, group

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as the list of its jobs."""
        return list, (list(self),)

    @property
    def id(self) -> str:
        return self._native.id

    @property
    def name(self) -> str:
        return self._native.name

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Return the results of its jobs, in order; None for a job that the group did not need. Raises as
        `fray.JobGroup.wait`.

        Args:
            timeout: seconds until TimeoutError; the group continues. Default: no limit.
        """
        return self._portal.call_within(timeout, f"job group {self.id} has not ended", self._native.wait)

    def wait_ended(self, timeout: float | None = None) -> JobGroupInfo:
        """Wait for the end of all its jobs, however it came. Raises TimeoutError, ConnectionFailed."""
        return self._portal.call_within(timeout, f"job group {self.id} has not ended", self._native.wait_ended)

    info = make_blocking(NativeGroup.info)

    def terminate(self, reason: str = "terminated by its owner") -> None:
        """Request the end of all its jobs; returns when the controller has recorded the request. As `Job.terminate`."""
        self._portal.call(self._native.terminate, reason)
        wait_stopped(self._portal, self._native.wait_ended)

    def __repr__(self) -> str:
        return repr(self._native)
