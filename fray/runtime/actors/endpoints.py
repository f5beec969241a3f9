"""Endpoints of the actors that this process serves, as they are registered with the controller."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve

from fray.errors import FrayError
from fray.model.ids import ActorId
from fray.model.messages.client import ActorEndpoint, Register, Unregister
from fray.model.service_key import ServiceKey
from fray.runtime.actors.server import host_of
from fray.runtime.runtime import Runtime


def make_endpoint(
    runtime: Runtime, actor_id: ActorId, name: str, number: int, metadata: Mapping[str, str] | None = None
) -> ActorEndpoint:
    """Return the endpoint of the actor with this number on the host of ``runtime``, at the host's present addresses."""
    return ActorEndpoint(
        actor_id=actor_id,
        name=name,
        job_id=runtime.job_id or "",
        namespace=runtime.namespace,
        metadata=dict(metadata or {}),
        incarnation=runtime.session,
        number=number,
        addresses=tuple(host_of(runtime).addresses),
        key=host_of(runtime).key,
    )


class Registrations:
    """Actors that this process has registered; registered again when its addresses have changed. In the loop."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[ActorId, Register] = {}
        self._moved = trio.Event()
        runtime.client.on_moved = self._on_moved
        runtime.nursery.start_soon(self._follow_address)

    async def add(self, endpoint: ActorEndpoint, *, exclusive: bool = False) -> None:
        """Register an actor. Raises FrayError: the controller refuses it, or the connection to it has ended."""
        actor_id = endpoint.actor_id
        # Before the request: its address may change until the answer.
        self._known[actor_id] = message = Register(endpoint=endpoint, exclusive=exclusive)
        try:
            await self._runtime.client.request(message)
        except BaseException:
            self._known.pop(actor_id, None)
            raise

    async def remove(self, actor_id: ActorId) -> None:
        """Remove an actor from the registry. Raises FrayError: the connection to the controller has ended."""
        self._known.pop(actor_id, None)
        await self._runtime.client.request(Unregister(actor_id=actor_id))

    def _on_moved(self) -> None:
        self._moved.set()

    async def _follow_address(self) -> None:
        """Register again what the registry has with other addresses than the present ones, whenever they change."""
        while True:
            await self._moved.wait()
            self._moved = trio.Event()
            addresses = host_of(self._runtime).addresses
            for actor_id in list(self._known):
                try:
                    await self._register_again(actor_id, addresses)
                except FrayError:
                    pass  # the actor or the session has ended, and the registration with it

    async def _register_again(self, actor_id: ActorId, addresses: tuple[str, ...]) -> None:
        known = self._known.get(actor_id)
        if known is None or known.endpoint.addresses == addresses:
            return
        self._known[actor_id] = message = evolve(known, endpoint=evolve(known.endpoint, addresses=addresses))
        await self._runtime.client.request(message)
        # The request of `remove` may have been faster than this one.
        if actor_id not in self._known:
            await self._runtime.client.request(Unregister(actor_id=actor_id))


REGISTRATIONS: ServiceKey[Registrations] = ServiceKey("registrations")


def registrations_of(runtime: Runtime) -> Registrations:
    """Return the registrations of a runtime, made at the first call. In its loop."""
    return runtime.services.get_or_make(REGISTRATIONS, lambda: Registrations(runtime))
