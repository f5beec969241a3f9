"""Names of actors in the tables: where they lead, and which actors are known to be dead."""

from __future__ import annotations

from fray.model.ids import ActorId, Namespace
from fray.scheduler.state.base import TableBase, discard
from fray.scheduler.state.rows import ActorRegistration, ActorTombstone


def name_key(namespace: Namespace, name: str) -> str:
    return f"name:{namespace}/{name}"


def actor_key(actor_id: ActorId) -> str:
    return f"actor:{actor_id}"


def registration_key(binding: ActorRegistration) -> str:
    return name_key(binding.endpoint.namespace, binding.endpoint.name)


class NameTables(TableBase):
    """What `Tables` knows of names."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.registrations_by_key: dict[str, dict[ActorId, None]] = {}
        self.registrations_by_incarnation: dict[str, dict[ActorId, None]] = {}
        """Bindings by incarnation."""

    def put_registration(self, binding: ActorRegistration) -> None:
        self.registrations[binding.endpoint.actor_id] = binding
        self._index_registration(binding)
        self.touch("name", binding.endpoint.actor_id)

    def _index_registration(self, binding: ActorRegistration) -> None:
        actor_id = binding.endpoint.actor_id
        self.registrations_by_key.setdefault(registration_key(binding), {})[actor_id] = None
        self.registrations_by_incarnation.setdefault(binding.endpoint.incarnation, {})[actor_id] = None

    def drop_registration(self, binding: ActorRegistration) -> None:
        actor_id = binding.endpoint.actor_id
        del self.registrations[actor_id]
        discard(self.registrations_by_key, registration_key(binding), actor_id)
        discard(self.registrations_by_incarnation, binding.endpoint.incarnation, actor_id)
        self.touch("name", actor_id)

    def put_actor_tombstone(self, grave: ActorTombstone) -> None:
        self.actor_tombstones.pop(grave.actor_id, None)
        self.actor_tombstones[grave.actor_id] = grave
        self.touch("grave", grave.actor_id)

    def drop_actor_tombstone(self, actor_id: ActorId) -> None:
        if self.actor_tombstones.pop(actor_id, None) is not None:
            self.touch("grave", actor_id)
