"""Job groups for sync code."""

from __future__ import annotations

from typing import Any

from fray.api.jobs.job_group import JobGroup as NativeGroup
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import Portal
from fray.blocking.jobs import Job, wait_stopped
from fray.model.job_groups import JobGroupInfo


class JobGroup(list[Job]):
    """The list of the jobs of a group, in the order of the request; and the group as a whole. As `fray.JobGroup`."""

    def __init__(self, portal: Portal, group: NativeGroup) -> None:
        super().__init__(Job(portal, job) for job in group)
        self._portal, self._native = portal, group

    def __reduce__(self) -> tuple[Any, ...]:
        """Where it arrives it is the list of its jobs."""
        return list, (list(self),)

    @property
    def id(self) -> str:
        return self._native.id

    @property
    def name(self) -> str:
        return self._native.name

    def wait(self, timeout: float | None = None) -> list[Any]:
        """What its jobs returned, in order; None of one that the group did not need. Raises as `fray.JobGroup.wait`.

        Args:
            timeout: seconds; after them TimeoutError, and the group runs on. Default: no end.
        """
        return self._portal.call_within(timeout, f"job group {self.id} has not ended", self._native.wait)

    def wait_ended(self, timeout: float | None = None) -> JobGroupInfo:
        """Wait for the end of all its jobs, whatever it is. Raises TimeoutError, ConnectionFailed."""
        return self._portal.call_within(timeout, f"job group {self.id} has not ended", self._native.wait_ended)

    info = make_blocking(NativeGroup.info)

    def terminate(self, reason: str = "terminated by its owner") -> None:
        """Ask for the end of all its jobs; returns when the controller has noted it. As `Job.terminate`."""
        self._portal.call(self._native.terminate, reason)
        wait_stopped(self._portal, self._native.wait_ended)

    def __repr__(self) -> str:
        return repr(self._native)
