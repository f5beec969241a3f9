"""Job groups: jobs that are launched, placed and ended together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from attrs import evolve

from fray.api.jobs.job import Job, build_spec, error_of
from fray.errors import InvalidRequest, JobFailed, NoSuchJob
from fray.model.ids import ANONYMOUS_PREFIX, mint_job_id, mint_name
from fray.model.job_groups import JobGroupConfig, JobGroupInfo, JobGroupSpec
from fray.model.messages.client import JobGroups, ListGroups, Terminate
from fray.model.requests import JobRequest
from fray.model.specs import JobSpec, JobState
from fray.runtime.controller_client.large_results import fetch
from fray.runtime.runtime import Runtime

__all__ = ["JobGroup", "build_job_group", "find_groups"]


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


def build_job_group(
    requests: Sequence[JobRequest], group: JobGroupConfig | None, runtime: Runtime, reservation_id: str | None
) -> tuple[JobGroupSpec, list[JobSpec], list[bytes]]:
    """What travels of a group: its own word, its jobs and their payloads.

    Raises:
        InvalidRequest, NotPicklable, MessageTooLarge: as for a job; or no jobs, or what is no `JobGroupConfig`.
    """
    config = JobGroupConfig() if group is None else group
    if not isinstance(config, JobGroupConfig):
        raise InvalidRequest(f"launch_group(group={group!r}) needs a JobGroupConfig")
    requests = list(requests)
    if not requests:
        raise InvalidRequest("launch_group needs at least one JobRequest")
    config = evolve(config, name=config.name or mint_name("group", runtime.rng))
    spec = JobGroupSpec(group_id=mint_job_id(config.name, runtime.rng), config=config)
    built = [build_spec(request, runtime) for request in requests]
    more: dict[str, Any] = {"job_group": spec.group_id}
    if reservation_id:
        more["reservation_id"] = reservation_id
    specs = [evolve(job, namespace=_namespace(job, config, runtime), **more) for job, _ in built]
    return spec, specs, [content for _, content in built if content is not None]


def _namespace(spec: JobSpec, config: JobGroupConfig, runtime: Runtime) -> str:
    """A detached group of a driver without a namespace is a root, and its jobs have one of its name."""
    if config.namespace is not None:
        return config.namespace
    is_root = spec.detached and (not runtime.namespace or runtime.namespace.startswith(ANONYMOUS_PREFIX))
    return config.name if is_root else spec.namespace
