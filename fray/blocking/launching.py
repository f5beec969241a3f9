"""What scopes and clusters have in common for sync code: jobs and actors are launched through either."""

from __future__ import annotations

from typing import Any, overload

from fray.api.on_failure import OnFailure
from fray.blocking.actors import ActorHandle
from fray.blocking.bridge.portal import Portal
from fray.blocking.groups import ActorGroup
from fray.blocking.hosts import ActorHost
from fray.blocking.jobs import Job, launched
from fray.blocking.reservations import Reservation
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
        reservation_id: ReservationId | Reservation | None = None,
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
        reservation_id: ReservationId | Reservation | None = None,
        on_failure: OnFailure = ...,
    ) -> list[Job]: ...

    def launch(self, request: JobRequest, **how: Any) -> Job | list[Job]:
        """Launch a job, or ``count`` of them. As `fray.Scope.launch`; at a cluster, as `fray.Cluster.launch`.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameInUse: nothing was launched.
            ConnectionFailed: the conversation with the controller has ended.
        """
        return launched(self._portal, self._portal.call(lambda: self._native.launch(request, **how)))

    def create_actor(self, cls: type, *args: Any, **kwargs: Any) -> ActorHandle:
        """Create ``cls(*args, **kwargs)`` in a process of its own. As `fray.Scope.create_actor`."""
        return ActorHandle(self._portal.call(lambda: self._native.create_actor(cls, *args, **kwargs)))

    def create_actor_group(self, cls: type, *args: Any, count: int, **kwargs: Any) -> ActorGroup:
        """Create the same actor ``count`` times, all or none. As `fray.Scope.create_actor_group`."""
        return ActorGroup(self._portal.call(lambda: self._native.create_actor_group(cls, *args, count=count, **kwargs)))

    def launch_actors(self, request: JobRequest, count: int | None, *what: Any, **how: Any) -> ActorGroup:
        """Actors whose jobs are described by a request. As `fray.Scope.launch_actors`."""
        made = self._portal.call(lambda: self._native.launch_actors(request, count, *what, **how))
        return ActorGroup(made)

    def create_host(self, name: str | None = None, **kwargs: Any) -> ActorHost:
        """Launch a process for light actors. As `fray.Scope.create_host`."""
        return ActorHost(self._portal, self._portal.call(lambda: self._native.create_host(name, **kwargs)))
