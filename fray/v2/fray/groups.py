"""Actor groups of `FrayClient`: each member is a separate job, ``{name}-{i}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from fray.api.actors import group as native
from fray.api.actors.handle import actor_id_of, label_of
from fray.blocking import ActorGroup, Cluster
from fray.errors import ConnectionFailed, FrayError, GroupFailed
from fray.model.actors import ActorStatus
from fray.type_variables import A_co
from fray.v2.fray.actors import FrayActorHandle, handle_of
from fray.v2.fray.current_cluster import cluster_here
from fray.v2.fray.jobs import FrayJobHandle
from fray.v2.interface import ActorHandle
from fray.v2.job import JobHandle, JobStatus
from fray.v2.types import ActorConfig

SHUTDOWN_S = 30.0
"""Seconds that `FrayActorGroup.shutdown` waits for running calls before it ends the members' processes."""


class FrayActorGroup(Generic[A_co]):
    """Actor group on a cluster of Fray; picklable. See `fray.v2.ActorGroup`."""

    def __init__(
        self,
        name: str,
        handles: Sequence[FrayActorHandle[A_co]],
        jobs: Sequence[FrayJobHandle],
        cluster: Cluster | None = None,
    ) -> None:
        self._name, self._handles, self._jobs = name, list(handles), list(jobs)
        self._cluster = cluster
        self._group: ActorGroup | None = None
        self._returned: set[int] = set()

    @property
    def _job_id(self) -> str:
        """Id of the first member's job: Marin's Zephyr shows the id of its group of workers."""
        return self._jobs[0].job_id if self._jobs else self._name

    @property
    def ready_count(self) -> int:
        """Number of members that can be called, as far as this process has heard."""
        return self._members().ready_count

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle[A_co]]:
        """Wait until ``count`` members (default all) can be called; return that many, in order of index.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
            RuntimeError: so many members have ended that ``count`` can never be reached.
            BaseException: the same, because a constructor raised this error.
            ValueError: the group has fewer members.
        """
        wanted = len(self._handles) if count is None else count
        try:
            ready = self._members().wait_ready(wanted, timeout)
        except GroupFailed as failed:
            if failed.__cause__ is not None and not isinstance(failed.__cause__, FrayError):
                raise failed.__cause__  # noqa: B904 (the error is the caller's own, with its remote traceback as cause)
            raise
        # The members that are ready first may be any; callers expect the order of index.
        by_native = {handle._native: index for index, handle in enumerate(self._members())}
        return self._handles_of([by_native[handle._native] for handle in ready][:wanted])

    def discover_new(self, target: int | None = None) -> list[ActorHandle[A_co]]:
        """Return members that can be called and that neither `wait_ready` nor this method has returned before; with
        ``target``, no more than make that number in all."""
        ready = [index for index, status in enumerate(self._members().statuses()) if status is ActorStatus.READY]
        new = [index for index in ready if index not in self._returned]
        return self._handles_of(new if target is None else new[: max(0, target - len(self._returned))])

    def _handles_of(self, indices: Sequence[int]) -> list[ActorHandle[A_co]]:
        self._returned.update(indices)
        return [self._handles[index] for index in indices]

    def is_done(self) -> bool:
        """Return whether all members have ended for good."""
        return all(map(JobStatus.finished, self.statuses()))

    @property
    def jobs(self) -> list[JobHandle]:
        """Job of each member."""
        return list(self._jobs)

    def statuses(self) -> list[JobStatus]:
        """Return the status of each member's job: RUNNING also while its constructor runs."""
        return [job.status() for job in self._jobs]

    def shutdown(self) -> None:
        """End all members: they accept no more calls, and running calls have `SHUTDOWN_S` seconds to finish. Return
        when all have ended. May be repeated."""
        # It waits, so that the names are free and no process is left when it returns.
        for job in self._jobs:
            job.mark_stopped()
        try:
            self._members().shutdown(SHUTDOWN_S)
        except ConnectionFailed:
            pass  # the members have ended with the connection

    def _members(self) -> ActorGroup:
        if self._group is None:
            cluster = self._cluster = self._cluster or cluster_here(f"actor group {self._name!r}")
            members = [handle._native for handle in self._handles]
            self._group = ActorGroup(native.ActorGroup(self._name, members, cluster._runtime))
        return self._group

    def __reduce__(self) -> tuple[Any, ...]:
        return FrayActorGroup, (self._name, self._handles, self._jobs)

    def __repr__(self) -> str:
        return f"<FrayActorGroup {self._name!r} of {len(self._handles)}>"


def group_of(cluster: Cluster, members: ActorGroup, cls: type, config: ActorConfig) -> FrayActorGroup:
    """Return the group of actors that were just launched, each a job of the same name."""
    names = [(label_of(member._native), actor_id_of(member._native)) for member in members]
    handles = [handle_of(cluster, name, actor_id, cls, config) for name, actor_id in names]
    # One request for all members, instead of one for each handle at its first use.
    followed = cluster.follow_jobs([actor_id for _, actor_id in names])
    return FrayActorGroup(members.name, handles, [FrayJobHandle(job.id, job=job) for job in followed], cluster)
