"""Job groups: jobs that are launched, placed and ended together."""

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
    """The jobs of a group, in the order of the request; and the group as a whole. Made by `Scope.launch_group`."""

    def __init__(self, runtime: Runtime, spec: JobGroupSpec, jobs: Sequence[Job]) -> None:
        self._runtime, self._spec, self._jobs = runtime, spec, tuple(jobs)

    @property
    def id(self) -> str:
        return self._spec.group_id

    @property
    def name(self) -> str:
        return self._spec.config.name

    async def wait(self) -> list[Any]:
        """What its jobs returned, in order; None of one that the group did not need.

        Raises:
            BaseException: of a group that failed: what `Job.wait` raises of the member that decided it.
            JobStopped: somebody ended it.
            ConnectionFailed: the conversation with the controller has ended.
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
        """Wait for the end of all its jobs, whatever it is."""
        for job in self._jobs:
            await job.wait_ended()
        return await self.info()

    async def wait_running(self) -> None:
        """Wait until all processes of all its jobs run, or those that do not have ended."""
        for job in self._jobs:
            await job.wait_running()

    async def info(self) -> JobGroupInfo:
        """Its state now.

        Raises:
            NoSuchJob: it ended so long ago that the cluster does not know it any more.
        """
        found = await find_groups(self._runtime, ListGroups(name=self.id))
        if not found:
            raise NoSuchJob(f"the cluster knows no job group {self.id!r} (it may be long over)", name=self.name)
        return found[0]

    async def terminate(self, reason: str = "terminated by its owner") -> None:
        """Ask for the end of all its jobs; returns when the controller has noted it."""
        for job in self._jobs:
            job._record.asked_to_end = True
        await self._runtime.link.request(Terminate(jobs=tuple(job.id for job in self._jobs), reason=reason))

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


async def find_groups(runtime: Runtime, asked: ListGroups) -> list[JobGroupInfo]:
    """Job groups on record."""
    reply = await runtime.link.request(asked)
    assert isinstance(reply, JobGroups)
    return list(reply.groups)
