"""Resource manager of the guide: actors of roles, several of them in one process where they shall be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from fray import blocking
from fray.errors import InvalidRequest
from fray.model.text import near_text
from fray.rl.nexrl_types import NexRLRole


@frozen
class _RoleActors:
    cls: type
    config: Mapping[str, Any] | None
    count: int
    group: str | None


class ActorWrapper:
    """Actor of a role, with the methods of its class: ``wrapper.method(...)`` waits, ``execute_async`` does not.

    Args:
        actor: handle of the actor.
        actor_class: its class.
        role: of the actor.
        is_colocated: whether other roles are in its process. Methods have their own names in any case.
    """

    def __init__(self, actor: Any, actor_class: type, role: NexRLRole, is_colocated: bool = True) -> None:
        self.actor, self.actor_class, self.role, self.is_colocated = actor, actor_class, role, is_colocated

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("actor", "actor_class"):  # while it is unpickled
            raise AttributeError(name)
        if not hasattr(self.actor_class, name):
            near = near_text(name, dir(self.actor_class))
            raise AttributeError(f"{self.actor_class.__name__} has no method {name!r}{near}")
        return getattr(self.actor, name)

    def __repr__(self) -> str:
        return f"<ActorWrapper of {self.role.value}: {self.actor!r}>"


class ResourceManager:
    """Actors by role. ``with`` ends them; else the end of the cluster does.

    Args:
        cluster: for the actors. Default: `fray.blocking.current_cluster`.
    """

    def __init__(self, cluster: blocking.Cluster | None = None) -> None:
        self._cluster = cluster
        self._roles: dict[NexRLRole, _RoleActors] = {}
        self._wrappers: dict[NexRLRole, list[ActorWrapper]] = {}
        self._scope: Any = None

    def register_role(
        self,
        role: NexRLRole,
        cls: type,
        config: Mapping[str, Any] | None,
        count: int,
        colocation_group: str | None = None,
    ) -> None:
        """Add a role.

        Args:
            role: which.
            cls: of its actors; constructed with ``config``, or without arguments if that is None.
            config: as ``cls`` takes it.
            count: number of actors.
            colocation_group: number k of all roles of a group are in one process. Default None: one of its own.

        Raises:
            InvalidRequest: ``count`` is below 1, the role is registered, or the actors exist.
        """
        if self._scope is not None:
            raise InvalidRequest(
                f"role {role.value}: the actors exist already; register roles before create_all_actors"
            )
        if role in self._roles:
            raise InvalidRequest(f"role {role.value} is registered already")
        if count < 1:
            raise InvalidRequest(f"role {role.value}: invalid count {count}: expected 1 or more")
        self._roles[role] = _RoleActors(cls, config, count, colocation_group)

    def create_all_actors(self) -> None:
        """Create the actors of all roles.

        Raises:
            InvalidRequest: roles of one group have unequal counts; nothing was created.
            BaseException: the error of a constructor.
        """
        check_groups({role.value: (one.group, one.count) for role, one in self._roles.items()})
        cluster = blocking.current_cluster() if self._cluster is None else self._cluster
        self._scope = cluster.open_scope("nexrl").__enter__()
        hosts: dict[tuple[str, int], Any] = {}
        for role, one in self._roles.items():
            self._wrappers[role] = []
            for index in range(one.count):
                place = self._scope
                if one.group is not None:
                    key = (one.group, index)
                    if key not in hosts:
                        hosts[key] = self._scope.create_host(f"{one.group}-{index}")
                    place = hosts[key]
                arguments = () if one.config is None else (one.config,)
                actor = place.create_actor(one.cls, *arguments)
                wrapper = ActorWrapper(actor, one.cls, role, is_colocated=one.group is not None)
                if hasattr(one.cls, "set_module_name"):
                    wrapper.set_module_name(f"{role.value}-{index}")
                self._wrappers[role].append(wrapper)

    def get_actor_wrapper(self, role: NexRLRole) -> list[ActorWrapper]:
        """Return the actors of a role; none if it is not registered."""
        return list(self._wrappers.get(role, ()))

    def close(self) -> None:
        """End all actors."""
        scope, self._scope = self._scope, None
        self._wrappers.clear()
        if scope is not None:
            scope.__exit__(None, None, None)

    def __enter__(self) -> ResourceManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_groups(roles: Mapping[str, tuple[str | None, int]]) -> None:
    """Refuse groups whose roles have unequal counts.

    Args:
        roles: name: group (None: without one), count.

    Raises:
        InvalidRequest: the message has the roles of the group, with their counts.
    """
    groups: dict[str, dict[str, int]] = {}
    for name, (group, count) in roles.items():
        if group is not None:
            groups.setdefault(group, {})[name] = count
    for group, counts in groups.items():
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise InvalidRequest(
                f"roles of colocation group {group!r} have unequal counts: {text}; expected one number"
            )


RayResourceManager = ResourceManager
"""Name of the guide; there is no Ray."""
RayActorWrapper = ActorWrapper
"""Name of the guide; there is no Ray."""
