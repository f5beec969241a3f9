"""People of a cluster: users, keys, shared namespaces, and the audit log."""

from __future__ import annotations

from collections.abc import Sequence

from fray.model.ids import Namespace
from fray.model.messages.people import (
    AddUser,
    AuditRecord,
    AuditRecords,
    GetLaunchUsers,
    Invitation,
    KeyInfo,
    LaunchUsers,
    ListKeys,
    ListNamespaces,
    ListUsers,
    NamespaceInfo,
    Namespaces,
    ReadAudit,
    RemoveUser,
    RevokeKeys,
    ShareNamespace,
    UserInfo,
    UserKeys,
    Users,
)
from fray.runtime.runtime import Runtime


class PeopleAdmin:
    """Part of a `Cluster` that administers people. All methods raise Unauthorized if the role of the caller's key does
    not allow them: see docs/security.md.
    """

    _runtime: Runtime

    async def add_user(
        self, user: str, role: str, *, life_s: float = 86_400.0, key_life_s: float = 30 * 86_400.0
    ) -> str:
        """Add a user, or give a known one another role; return an invitation, with which ``fray login`` makes one key.

        Args:
            role: ``viewer``, ``user``, ``operator`` or ``admin``.
            life_s: seconds until the invitation expires; default a day, at most 30 days.
            key_life_s: seconds until the key that it makes expires; default 30 days, at most 366.

        Raises:
            InvalidRequest: an invalid name, role or time, or too many users or keys.
        """
        reply = await self._runtime.client.request(AddUser(user=user, role=role, life_s=life_s, key_life_s=key_life_s))
        assert isinstance(reply, Invitation)
        return reply.text

    async def remove_user(self, user: str) -> None:
        """Remove a user with all keys; its connections end, with what its drivers own. Its detached jobs continue.

        Raises:
            InvalidRequest: there is no such user.
        """
        await self._runtime.client.request(RemoveUser(user=user))

    async def list_users(self) -> list[UserInfo]:
        """Return the users, by name."""
        reply = await self._runtime.client.request(ListUsers())
        assert isinstance(reply, Users)
        return list(reply.users)

    async def launch_users(self) -> dict[str, float] | None:
        """Return for whom the caller may launch jobs (`JobRequest.on_behalf_of`), with the weights of their shares.

        None: the cluster has no users of its own: no one has a key, and no user has a table in the policy.
        """
        reply = await self._runtime.client.request(GetLaunchUsers())
        assert isinstance(reply, LaunchUsers)
        return reply.weights if reply.has_users else None

    async def list_keys(self, user: str = "") -> list[KeyInfo]:
        """Return valid keys and open invitations, oldest first; those of other users only to an admin.

        Args:
            user: only those of this user.
        """
        reply = await self._runtime.client.request(ListKeys(user=user))
        assert isinstance(reply, UserKeys)
        return list(reply.keys)

    async def previous_token_users(self) -> list[str]:
        """Return the connections that use the cluster's previous token (``fray key rotate-token``), as text: those of
        ``node alpha (tcp:10.0.0.7:4711)`` and ``driver of ada (…)``. To others than admins an empty list.
        """
        reply = await self._runtime.client.request(ListKeys())
        assert isinstance(reply, UserKeys)
        return list(reply.previous_token)

    async def revoke_keys(self, *keys: str, user: str = "") -> list[KeyInfo]:
        """Revoke keys and invitations; their connections end. Return them.

        Args:
            user: also all keys of this user.

        Raises:
            InvalidRequest: there is no such valid key.
        """
        reply = await self._runtime.client.request(RevokeKeys(keys=keys, user=user))
        assert isinstance(reply, UserKeys)
        return list(reply.keys)

    async def share_namespace(self, namespace: Namespace, users: Sequence[str], *, on: bool = True) -> NamespaceInfo:
        """Let users use a namespace (``"*"``: all users), or with ``on=False`` no more.

        Raises:
            InvalidRequest: an invalid name, or too many users.
        """
        reply = await self._runtime.client.request(
            ShareNamespace(namespace=namespace, users=tuple(users), on=on),
        )
        assert isinstance(reply, Namespaces)
        return reply.namespaces[0]

    async def list_namespaces(self) -> list[NamespaceInfo]:
        """Return the namespaces that belong to a user, by name; to a user those it may use."""
        reply = await self._runtime.client.request(ListNamespaces())
        assert isinstance(reply, Namespaces)
        return list(reply.namespaces)

    async def audit_records(self, *, since_s: float | None = None, limit: int = 1000) -> list[AuditRecord]:
        """Return the newest records of the audit log, oldest first.

        Args:
            since_s: only of the last so many seconds.
            limit: maximum number, at most 10,000.
        """
        reply = await self._runtime.client.request(ReadAudit(since_s=since_s, limit=limit))
        assert isinstance(reply, AuditRecords)
        return list(reply.records)
