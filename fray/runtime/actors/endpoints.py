"""Endpoints of the actors that this process serves, as they are registered with the controller."""

from __future__ import annotations

from collections.abc import Mapping

from fray.model.ids import ActorId
from fray.model.messages.client import ActorEndpoint
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
