"""What scopes and clusters have in common for sync code: jobs and actors are launched through either."""

from __future__ import annotations

from typing import Any, overload

from fray.api.jobs.job_spec import ReservationHandle
from fray.api.on_failure import OnFailure
from fray.api.scope import Scope
from fray.blocking.actors import actor_handle
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import Portal
from fray.blocking.groups import actor_group
from fray.blocking.hosts import ActorHost
from fray.blocking.job_groups import JobGroup
from fray.blocking.jobs import Job, launched
from fray.model.ids import JobId
from fray.model.requests import JobRequest
from fray.model.reservations import ReservationId


class LaunchMixin:
    """Launches what belongs to it: to a scope, or to the connection."""

    _portal: Portal
    _native: Any

    @overload
    def launch(
        self,
        request: JobRequest,
        *,
        count: None = None,
        name: str | None = None,
        job_id: JobId | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationId | ReservationHandle | None = None,
        on_failure: OnFailure = ...,
    ) -> Job: ...
    @overload
    def launch(
        self,
        request: JobRequest,
        *,
        count: int,
        name: str | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationId | ReservationHandle | None = None,
        on_failure: OnFailure = ...,
    ) -> list[Job]: ...

    def launch(self, request: JobRequest, **how: Any) -> Job | list[Job]:
        """Launch a job, or ``count`` of them. As `fray.Scope.launch`; at a cluster, as `fray.Cluster.launch`.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameInUse: nothing was launched.
            ConnectionFailed: the conversation with the controller has ended.
        """
        return launched(self._portal, self._portal.call(lambda: self._native.launch(request, **how)))

    create_actor = make_blocking(Scope.create_actor, actor_handle)
    create_actor_group = make_blocking(Scope.create_actor_group, actor_group)
    launch_actors = make_blocking(Scope.launch_actors, actor_group)
    create_host = make_blocking(Scope.create_host, ActorHost)
    launch_group = make_blocking(Scope.launch_group, JobGroup)
