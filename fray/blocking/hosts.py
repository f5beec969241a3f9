"""Hosts of light actors for sync code: one process, many actors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple, overload

from fray.api.actors import host as native
from fray.blocking.actors import ActorHandle, actor_handle
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import Portal
from fray.blocking.groups import ActorGroup, actor_group
from fray.model.specs import ActorConfig

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
First = TypeVar("First")


class ActorHost:
    """Process for light actors; made by `Scope.create_host`. It ends with its scope. As `fray.ActorHost`."""

    def __init__(self, portal: Portal, host: native.ActorHost) -> None:
        self._portal, self._native = portal, host

    @property
    def name(self) -> str:
        return self._native.name

    if TYPE_CHECKING:  # `make_blocking` loses overloads

        @overload
        def create_actor(self, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[T]: ...
        @overload
        def create_actor(
            self,
            cls: Callable[[*Ts], T],
            /,
            *args: *Ts,
            name: str | None = None,
            actor_config: ActorConfig | None = None,
        ) -> ActorHandle[T]: ...
        @overload
        def create_actor(self, cls: Callable[..., T], /, *, name: str | None, **kwargs: Any) -> ActorHandle[T]: ...  # type: ignore[overload-cannot-match]
        @overload
        def create_actor(  # type: ignore[overload-cannot-match]
            self, cls: Callable[..., T], /, *, actor_config: ActorConfig | None, **kwargs: Any
        ) -> ActorHandle[T]: ...
        @overload
        def create_actor(
            self, cls: Callable[Concatenate[First, ...], T], arg: First, /, *, name: str | None, **kwargs: Any
        ) -> ActorHandle[T]: ...

        def create_actor(self, /, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[misc]

    else:
        create_actor = make_blocking(native.ActorHost.create_actor, actor_handle)
    if TYPE_CHECKING:  # `make_blocking` loses overloads

        @overload
        def create_actors(
            self,
            cls: Callable[[*Ts], T],
            /,
            *args: *Ts,
            count: int,
            name: str | None = None,
            actor_config: ActorConfig | None = None,
        ) -> ActorGroup[T]: ...
        @overload
        def create_actors(self, cls: Callable[..., T], /, *, count: int, **kwargs: Any) -> ActorGroup[T]: ...
        @overload
        def create_actors(
            self, cls: Callable[Concatenate[First, ...], T], arg: First, /, *, count: int, **kwargs: Any
        ) -> ActorGroup[T]: ...

        def create_actors(self, /, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[misc]

    else:
        create_actors = make_blocking(native.ActorHost.create_actors, actor_group)

    def __repr__(self) -> str:
        return repr(self._native)
