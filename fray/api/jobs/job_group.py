"""Handle of a job group: jobs that are launched, placed and ended together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from fray.api.jobs.job import Job, error_of
from fray.errors import JobFailed, NoSuchJob
from fray.model.job_groups import JobGroupInfo, JobGroupSpec
from fray.model.messages.client import JobGroups, ListGroups, Terminate
from fray.model.specs import JobState
from fray.runtime.controller_client.large_results import fetch
from fray.runtime.runtime import Runtime


class JobGroup(Sequence[Job]):
    """Jobs of a group, in the order of the request, and the group as a whole. Made by `Scope.launch_group`."""

    def __init__(self, runtime: Runtime, spec: JobGroupSpec, jobs: Sequence[Job]) -> None:
        self._runtime, self._spec, self._jobs = runtime, spec, tuple(jobs)

    @property
    def id(self) -> str:
        return self._spec.group_id

    @property
    def name(self) -> str:
        return self._spec.config.name

    async def wait(self) -> list[Any]:
        """Return the results of its jobs, in order; None for a job that the group did not need.

        Raises:
            BaseException: the group failed: as `Job.wait` of the member that decided its end.
            JobStopped: it was ended on request.
            ConnectionFailed: the connection to the controller has ended.
        """
        info = await self.wait_ended()
        if info.state == JobState.SUCCEEDED:
            return [await job.wait() if job.info.state is JobState.SUCCEEDED else None for job in self._jobs]
        for job in self._jobs:
            if job.id == info.decided_by:
                if job.info.stored is not None:
                    await fetch(job._record)
                raise error_of(job._record)
        raise JobFailed(f"job group {self.id} ended: {info.error_message}", job_id=info.decided_by, name=self.name)

    async def wait_ended(self) -> JobGroupInfo:
        """Wait for the end of all its jobs, however it came."""
        for job in self._jobs:
            await job.wait_ended()
        return await self.info()

    async def wait_running(self) -> None:
        """Wait until all processes of all its jobs run; jobs that have ended count as running."""
        for job in self._jobs:
            await job.wait_running()

    async def info(self) -> JobGroupInfo:
        """Return its present state.

        Raises:
            NoSuchJob: it ended so long ago that the cluster has forgotten it.
        """
        found = await find_groups(self._runtime, ListGroups(name=self.id))
        if not found:
            raise NoSuchJob(f"no such job group: {self.id!r} (it may have ended long ago)", name=self.name)
        return found[0]

    async def terminate(self, reason: str = "terminated by its owner") -> None:
        """Request the end of all its jobs; returns when the controller has recorded the request."""
        for job in self._jobs:
            job._record.end_requested = True
        await self._runtime.client.request(Terminate(jobs=tuple(job.id for job in self._jobs), reason=reason))

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Job]: ...

    def __getitem__(self, index: int | slice) -> Job | Sequence[Job]:
        return self._jobs[index]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __repr__(self) -> str:
        return f"<JobGroup {self.id} of {', '.join(job.name for job in self._jobs)}>"


async def find_groups(runtime: Runtime, query: ListGroups) -> list[JobGroupInfo]:
    """Return the job groups that match the query."""
    reply = await runtime.client.request(query)
    assert isinstance(reply, JobGroups)
    return list(reply.groups)
