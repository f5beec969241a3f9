"""Launch methods that scopes and clusters share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple, Unpack, overload

from fray.api.jobs.job_spec import ReservationRef
from fray.api.launch_options import ActorOptions, GroupOptions
from fray.api.on_failure import OnFailure
from fray.api.scope import Scope
from fray.blocking.actors import ActorHandle, actor_handle
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import Portal
from fray.blocking.groups import ActorGroup, actor_group
from fray.blocking.hosts import ActorHost
from fray.blocking.job_groups import JobGroup
from fray.blocking.jobs import Job, launch_result
from fray.missing_names import ExplainsMissing
from fray.model.ids import JobId
from fray.model.requests import JobRequest
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig
from fray.tracebacks import short_tracebacks

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
First = TypeVar("First")


@short_tracebacks
class LaunchMixin(ExplainsMissing):
    """Launch methods; the owner of what is launched is a scope, or the connection."""

    _portal: Portal
    _native: Any

    @overload
    def launch(
        self,
        request: JobRequest[Coroutine[Any, Any, T]],
        *,
        count: None = None,
        name: str | None = None,
        job_id: JobId | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationRef | None = None,
        on_failure: OnFailure = ...,
    ) -> Job[T]: ...
    @overload
    def launch(
        self,
        request: JobRequest[T],
        *,
        count: None = None,
        name: str | None = None,
        job_id: JobId | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationRef | None = None,
        on_failure: OnFailure = ...,
    ) -> Job[T]: ...
    @overload
    def launch(
        self,
        request: JobRequest[T],
        *,
        count: int,
        name: str | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationRef | None = None,
        on_failure: OnFailure = ...,
    ) -> list[Job[T]]: ...

    def launch(self, request: JobRequest, *extra: Any, **how: Any) -> Job | list[Job]:
        """Launch a job, or ``count`` of them. As `fray.Scope.launch`; of a cluster, as `fray.Cluster.launch`.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameInUse: nothing was launched.
            ConnectionFailed: the connection to the controller has ended.
        """
        return launch_result(self._portal, self._portal.call(lambda: self._native.launch(request, *extra, **how)))

    if TYPE_CHECKING:  # `make_blocking` loses overloads

        @overload
        def create_actor(self, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[T]: ...
        @overload
        def create_actor(
            self, cls: Callable[[*Ts], T], /, *args: *Ts, **options: Unpack[ActorOptions]
        ) -> ActorHandle[T]: ...
        @overload
        def create_actor(self, cls: Callable[..., T], /, *, name: str | None, **kwargs: Any) -> ActorHandle[T]: ...  # type: ignore[overload-cannot-match]
        @overload
        def create_actor(  # type: ignore[overload-cannot-match]
            self, cls: Callable[..., T], /, *, resources: ResourceConfig | None, **kwargs: Any
        ) -> ActorHandle[T]: ...
        @overload
        def create_actor(  # type: ignore[overload-cannot-match]
            self, cls: Callable[..., T], /, *, actor_config: ActorConfig | None, **kwargs: Any
        ) -> ActorHandle[T]: ...
        @overload
        def create_actor(  # type: ignore[overload-cannot-match]
            self, cls: Callable[..., T], /, *, max_restarts: int | None, **kwargs: Any
        ) -> ActorHandle[T]: ...
        @overload
        def create_actor(
            self, cls: Callable[Concatenate[First, ...], T], arg: First, /, *, name: str | None, **kwargs: Any
        ) -> ActorHandle[T]: ...

        def create_actor(self, /, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[misc]

    else:
        create_actor = make_blocking(Scope.create_actor, actor_handle)
    if TYPE_CHECKING:  # `make_blocking` loses overloads

        @overload
        def create_actor_group(
            self, cls: Callable[[*Ts], T], /, *args: *Ts, count: int, **options: Unpack[GroupOptions]
        ) -> ActorGroup[T]: ...
        @overload
        def create_actor_group(self, cls: Callable[..., T], /, *, count: int, **kwargs: Any) -> ActorGroup[T]: ...
        @overload
        def create_actor_group(
            self, cls: Callable[Concatenate[First, ...], T], arg: First, /, *, count: int, **kwargs: Any
        ) -> ActorGroup[T]: ...

        def create_actor_group(self, /, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[misc]

    else:
        create_actor_group = make_blocking(Scope.create_actor_group, actor_group)
    launch_actors = make_blocking(Scope.launch_actors, actor_group)
    create_host = make_blocking(Scope.create_host, ActorHost)
    launch_group = make_blocking(Scope.launch_group, JobGroup)
