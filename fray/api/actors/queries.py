"""Queries about actors by name, answered by the controller."""

from __future__ import annotations

from fray.api.actors.handle import ActorHandle, actor_id_of
from fray.errors import NoSuchActor
from fray.model.actors import ActorInfo, ActorStatus
from fray.model.ids import Namespace, check_name
from fray.model.messages.client import Actors, FindActor, ListActors
from fray.runtime.runtime import Runtime


class ActorQueries:
    """Queries of a `Cluster` about actors."""

    _runtime: Runtime

    @property
    def namespace(self) -> Namespace:
        """Namespace of this connection: names of jobs and actors are unique among its living; child jobs inherit it."""
        return self._runtime.namespace

    async def get_actor(self, name: str, namespace: Namespace | None = None) -> ActorHandle:
        """Return a handle of the living actor of this name, also while it is being created or restarted.

        Args:
            namespace: default the own one, then that of a detached actor of this name whose driver had no namespace.

        Raises:
            NoSuchActor: no actor of this name lives; the message says how the last one ended.
        """
        info = await self._living_actor(name, namespace)
        # Only the actor's process has its class: the handle offers any method, and that process refuses wrong ones.
        return ActorHandle(info.actor_id, info.name, None, self._runtime)

    async def list_actors(
        self, prefix: str = "", namespace: Namespace | None = None, *, ended: bool = False
    ) -> list[ActorInfo]:
        """Return living actors whose names start with ``prefix``, oldest first. ``namespace``: default the own;
        ``"*"``: all. With ``ended`` before them the last 1,000 that have ended and are on record, with what their
        processes last reported of their calls.
        """
        reply = await self._runtime.client.request(ListActors(prefix=prefix, namespace=namespace, ended=ended))
        assert isinstance(reply, Actors)
        return list(reply.actors)

    async def actor_info(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> ActorInfo:
        """Return the controller's record of an actor, given its handle or name; ended actors are remembered for a
        while.

        Raises:
            NoSuchActor: there is none, and none has ended recently.
        """
        if isinstance(actor, ActorHandle):
            found = await self._find(FindActor(actor_id=actor_id_of(actor)))
        else:
            found = await self._find_name(check_name(actor, "an actor"), namespace)
        if not found:
            raise NoSuchActor(f"no actor {actor_error_text(actor, namespace or self.namespace)}")
        return found[0]

    async def actor_status(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> ActorStatus:
        """Return the `ActorStatus` of an actor, given its handle or name. Raises as `actor_info`."""
        return (await self.actor_info(actor, namespace)).status

    async def _living_actor(self, name: str, namespace: Namespace | None) -> ActorInfo:
        found = await self._find_name(check_name(name, "an actor"), namespace)
        living = [info for info in found if info.status not in (ActorStatus.FAILED, ActorStatus.ENDED)]
        if living:
            return living[0]
        raise no_such_actor(name, namespace or self.namespace, found[0] if found else None)

    async def _find_name(self, name: str, namespace: Namespace | None) -> tuple[ActorInfo, ...]:
        """Return the actors of this name; without a namespace, also a detached actor that is in the namespace of its
        own name.
        """
        found = await self._find(FindActor(name=name, namespace=namespace))
        if namespace is not None or any(info.ended is None for info in found):
            return found
        roots = await self._find(FindActor(name=name, namespace=name))
        return (*roots, *found) if any(info.ended is None for info in roots) else (*found, *roots)

    async def _find(self, query: FindActor) -> tuple[ActorInfo, ...]:
        reply = await self._runtime.client.request(query)
        assert isinstance(reply, Actors)
        return reply.actors


def actor_error_text(actor: ActorHandle | str, namespace: Namespace) -> str:
    return f"{actor!r} in namespace {namespace!r}" if isinstance(actor, str) else repr(actor)


def no_such_actor(name: str, namespace: Namespace, last: ActorInfo | None) -> NoSuchActor:
    end = f" (the last one {last.status.value}: {last.reason or 'in order'})" if last else ""
    return NoSuchActor(
        f"no actor {actor_error_text(name, namespace)} lives{end}; create_actor(..., name={name!r}) makes one"
    )
