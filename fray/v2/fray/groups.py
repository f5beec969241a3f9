"""Actor groups of `FrayClient`: each member a job of its own, ``{name}-{i}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fray.api.actors import group as native
from fray.api.actors.handle import actor_id_of, label_of
from fray.blocking import ActorGroup, Cluster
from fray.errors import ConnectionFailed, FrayError, GroupFailed
from fray.model.actors import ActorStatus
from fray.v2.fray.actors import FrayActorHandle, handle_of
from fray.v2.fray.current_cluster import cluster_here
from fray.v2.fray.jobs import FrayJobHandle
from fray.v2.interface import ActorHandle
from fray.v2.job import JobHandle, JobStatus
from fray.v2.types import ActorConfig

SHUTDOWN_S = 30.0
"""How long `FrayActorGroup.shutdown` lets running calls finish before it ends the members' processes."""


class FrayActorGroup:
    """Members on a cluster of Fray; picklable. As `fray.v2.ActorGroup`."""

    def __init__(
        self,
        name: str,
        handles: Sequence[FrayActorHandle],
        jobs: Sequence[FrayJobHandle],
        cluster: Cluster | None = None,
    ) -> None:
        self._name, self._handles, self._jobs = name, list(handles), list(jobs)
        self._cluster = cluster
        self._group: ActorGroup | None = None
        self._given: set[int] = set()

    @property
    def ready_count(self) -> int:
        """Members that can be called, as far as is known here."""
        return self._members().ready_count

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle]:
        """Wait until ``count`` members (default all) can be called; so many of them, in order of index.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
            RuntimeError: so many have ended that it can never be.
            BaseException: and that is so because a constructor raised this.
            ValueError: there are not so many members.
        """
        wanted = len(self._handles) if count is None else count
        try:
            ready = self._members().wait_ready(wanted, timeout)
        except GroupFailed as failed:
            if failed.__cause__ is not None and not isinstance(failed.__cause__, FrayError):
                raise failed.__cause__  # noqa: B904 (it is the caller's own, and has its remote traceback as cause)
            raise
        by_native = {handle._native: index for index, handle in enumerate(self._members())}
        return self._give([by_native[handle._native] for handle in ready][:wanted])

    def discover_new(self) -> list[ActorHandle]:
        """Members that can be called and that neither `wait_ready` nor this gave before."""
        ready = [index for index, status in enumerate(self._members().statuses()) if status is ActorStatus.READY]
        return self._give([index for index in ready if index not in self._given])

    def _give(self, indices: Sequence[int]) -> list[ActorHandle]:
        self._given.update(indices)
        return [self._handles[index] for index in indices]

    def is_done(self) -> bool:
        """Whether all members have ended for good."""
        return all(map(JobStatus.finished, self.statuses()))

    @property
    def jobs(self) -> list[JobHandle]:
        """The job of each member."""
        return list(self._jobs)

    def statuses(self) -> list[JobStatus]:
        """How the job of each member stands; RUNNING also while its constructor runs."""
        return [job.status() for job in self._jobs]

    def shutdown(self) -> None:
        """End all members: they take no more calls, and those that run have `SHUTDOWN_S` seconds to finish. Returns
        when all have ended; may be repeated."""
        for job in self._jobs:
            job.mark_stopped()
        try:
            self._members().shutdown(SHUTDOWN_S)
        except ConnectionFailed:
            pass  # and with the conversation what belongs to it

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


def made(cluster: Cluster, members: ActorGroup, cls: type, config: ActorConfig) -> FrayActorGroup:
    """Of actors that have just been launched, each a job called as itself."""
    names = [(label_of(member._native), actor_id_of(member._native)) for member in members]
    handles = [handle_of(cluster, name, actor_id, cls, config) for name, actor_id in names]
    followed = cluster.follow_jobs([actor_id for _, actor_id in names])
    return FrayActorGroup(members.name, handles, [FrayJobHandle(job.id, job=job) for job in followed], cluster)
