"""Names of actors in the tables: where they lead, and which actors are known to be dead."""

from __future__ import annotations

from fray.model.ids import ActorId, Namespace
from fray.scheduler.state.base import TableBase, discard
from fray.scheduler.state.rows import ActorRegistration, ActorTombstone


def name_key(namespace: Namespace, name: str) -> str:
    return f"name:{namespace}/{name}"


def actor_key(actor_id: ActorId) -> str:
    return f"actor:{actor_id}"


def binding_key(binding: ActorRegistration) -> str:
    return name_key(binding.endpoint.namespace, binding.endpoint.name)


class NameTables(TableBase):
    """What `Tables` knows of names."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.by_key: dict[str, dict[ActorId, None]] = {}
        self.hosted: dict[str, dict[ActorId, None]] = {}
        """Bindings by incarnation."""

    def put_binding(self, binding: ActorRegistration) -> None:
        self.bindings[binding.endpoint.actor_id] = binding
        self._index_binding(binding)
        self.touch("name", binding.endpoint.actor_id)

    def _index_binding(self, binding: ActorRegistration) -> None:
        actor_id = binding.endpoint.actor_id
        self.by_key.setdefault(binding_key(binding), {})[actor_id] = None
        self.hosted.setdefault(binding.endpoint.incarnation, {})[actor_id] = None

    def drop_binding(self, binding: ActorRegistration) -> None:
        actor_id = binding.endpoint.actor_id
        del self.bindings[actor_id]
        discard(self.by_key, binding_key(binding), actor_id)
        discard(self.hosted, binding.endpoint.incarnation, actor_id)
        self.touch("name", actor_id)

    def put_grave(self, grave: ActorTombstone) -> None:
        self.graves.pop(grave.actor_id, None)
        self.graves[grave.actor_id] = grave
        self.touch("grave", grave.actor_id)

    def drop_grave(self, actor_id: ActorId) -> None:
        if self.graves.pop(actor_id, None) is not None:
            self.touch("grave", actor_id)
