"""Groups of actors for sync code."""

from __future__ import annotations

from typing import Any, TypeVar

from fray.api.actors import group as native
from fray.blocking.actors import ActorHandle
from fray.blocking.bridge.background_loop import current_runtime, portal_of
from fray.blocking.bridge.mirror import make_blocking, make_threadsafe
from fray.blocking.bridge.portal import Portal
from fray.type_variables import A_co

T = TypeVar("T")


class ActorGroup(native.Members[ActorHandle[A_co]]):
    """Actors of one class ``A_co``, in order; made by `Scope.create_actor_group`; picklable. As `fray.ActorGroup`."""

    def __init__(self, group: native.ActorGroup[A_co]) -> None:
        self._native = group
        self._handles = tuple(ActorHandle(handle) for handle in group.handles)

    @property
    def _portal(self) -> Portal:
        return portal_of(self._native._runtime or current_runtime())

    @property
    def name(self) -> str:
        return self._native.name

    statuses = make_threadsafe(native.ActorGroup.statuses)

    @property
    def ready_count(self) -> int:
        """Number of members that are ready now, as far as is known here."""
        return self._portal.run(lambda: self._native.ready_count)

    is_done = make_threadsafe(native.ActorGroup.is_done)

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle[A_co]]:
        """Wait until ``count`` members (default: all) are ready at once; return all that are, in order of their index.

        Raises:
            GroupFailed: so many members have ended for good that this is impossible.
            DeadlineExceeded: (a TimeoutError) not within ``timeout`` seconds.
            InvalidRequest: ``count`` is above the number of members, or negative.
        """
        return self._own_handles(self._portal.call(self._native.wait_ready, count, timeout))

    def discover_new(self) -> list[ActorHandle[A_co]]:
        """Return the members that are ready now and that neither `wait_ready` nor this method has returned before."""
        return self._own_handles(self._portal.run(self._native.discover_new))

    shutdown = make_blocking(native.ActorGroup.shutdown)

    def _own_handles(self, handles: list[Any]) -> list[ActorHandle[A_co]]:
        by_native = {handle._native: handle for handle in self._handles}
        return [by_native[handle] for handle in handles]

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorGroup, (self._native,))

    def __repr__(self) -> str:
        return repr(self._native)


def actor_group(portal: Portal, group: native.ActorGroup[T]) -> ActorGroup[T]:
    """Return the group for sync code. The portal is that of the group's runtime."""
    return ActorGroup(group)
