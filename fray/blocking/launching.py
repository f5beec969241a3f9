"""Launch methods that scopes and clusters share."""

from __future__ import annotations

from typing import Any, overload

from fray.api.jobs.job_spec import ReservationRef
from fray.api.on_failure import OnFailure
from fray.api.scope import Scope
from fray.blocking.actors import actor_handle
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import Portal
from fray.blocking.groups import actor_group
from fray.blocking.hosts import ActorHost
from fray.blocking.job_groups import JobGroup
from fray.blocking.jobs import Job, launch_result
from fray.model.ids import JobId
from fray.model.requests import JobRequest


class LaunchMixin:
    """Launch methods; the owner of what is launched is a scope, or the connection."""

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
        reservation_id: ReservationRef | None = None,
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
        reservation_id: ReservationRef | None = None,
        on_failure: OnFailure = ...,
    ) -> list[Job]: ...

    def launch(self, request: JobRequest, *extra: Any, **how: Any) -> Job | list[Job]:
        """Launch a job, or ``count`` of them. As `fray.Scope.launch`; of a cluster, as `fray.Cluster.launch`.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameInUse: nothing was launched.
            ConnectionFailed: the connection to the controller has ended.
        """
        return launch_result(self._portal, self._portal.call(lambda: self._native.launch(request, *extra, **how)))

    create_actor = make_blocking(Scope.create_actor, actor_handle)
    create_actor_group = make_blocking(Scope.create_actor_group, actor_group)
    launch_actors = make_blocking(Scope.launch_actors, actor_group)
    create_host = make_blocking(Scope.create_host, ActorHost)
    launch_group = make_blocking(Scope.launch_group, JobGroup)
