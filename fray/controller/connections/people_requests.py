"""Requests about people: users, keys, shared namespaces and the audit log.

One function for each kind, as in `fray.controller.connections.client_requests`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fray.controller.connections.access import scope_for
from fray.controller.connections.client import Answer, ClientConnection
from fray.errors import FrayError, InvalidRequest
from fray.model.messages import people
from fray.model.messages.client import Done
from fray.net.transport import Bytes


def add_user(client: ClientConnection, ref: int, message: people.AddUser, blobs: Sequence[Bytes]) -> Answer:
    now = client.context.inbox.current_time()
    invitation = client.context.people.add_user(message.user, message.role, message.life_s, message.key_life_s, now)
    return people.Invitation(text=invitation.text), ()


def remove_user(client: ClientConnection, ref: int, message: people.RemoveUser, blobs: Sequence[Bytes]) -> Answer:
    keys = client.context.people.remove_user(message.user)
    # After the reply: it may be oneself.
    client.reply(ref, Done())
    client.hub.drop_keys(keys, "its user was removed")
    return None


def list_users(client: ClientConnection, ref: int, message: people.ListUsers, blobs: Sequence[Bytes]) -> Answer:
    return people.Users(users=client.context.people.users(client.context.inbox.current_time())), ()


def launch_users(client: ClientConnection, ref: int, message: people.GetLaunchUsers, blobs: Sequence[Bytes]) -> Answer:
    users = client.scope.launch_users()
    return people.LaunchUsers(has_users=users is not None, weights=users or {}), ()


def list_keys(client: ClientConnection, ref: int, message: people.ListKeys, blobs: Sequence[Bytes]) -> Answer:
    keys = client.context.people.keys(client.context.inbox.current_time(), message.user)
    users = client.hub.previous_token_users() if scope_for(client, people.ListKeys) is None else ()
    return people.UserKeys(keys=keys, previous_token=users), ()


def revoke_keys(client: ClientConnection, ref: int, message: people.RevokeKeys, blobs: Sequence[Bytes]) -> Answer:
    known = {key.key_id: key for key in client.context.people.keys(client.context.inbox.current_time())}
    if unknown := [key for key in message.keys if key not in known]:
        raise InvalidRequest(f"there is no valid key {unknown[0]!r}; `fray key list` lists them")
    found = tuple(key for key in known.values() if key.key_id in message.keys or key.user == (message.user or None))
    client.context.people.revoke(key.key_id for key in found)
    # After the reply: it may be one's own key.
    client.reply(ref, people.UserKeys(keys=found))
    client.hub.drop_keys([key.key_id for key in found], "its key was revoked")
    return None


def share_namespace(
    client: ClientConnection, ref: int, message: people.ShareNamespace, blobs: Sequence[Bytes]
) -> Answer:
    known = client.context.people
    owner = known.owner(message.namespace) or client.identity.user
    if not owner:
        raise InvalidRequest(f"namespace {message.namespace!r} is not claimed yet: share it as the user that owns it")
    info = known.share(message.namespace, message.users, on=message.on, owner=owner)
    return people.Namespaces(namespaces=(info,)), ()


def list_namespaces(
    client: ClientConnection, ref: int, message: people.ListNamespaces, blobs: Sequence[Bytes]
) -> Answer:
    scope = scope_for(client, people.ListNamespaces)
    return people.Namespaces(namespaces=client.context.people.namespaces(scope.user if scope else None)), ()


def read_audit(client: ClientConnection, ref: int, message: people.ReadAudit, blobs: Sequence[Bytes]) -> Answer:
    client.hub.start_soon(_read_audit, client, ref, message)
    return None


async def _read_audit(client: ClientConnection, ref: int, message: people.ReadAudit) -> None:
    try:
        now = client.context.inbox.current_time()
        client.reply(ref, people.AuditRecords(records=await client.context.audit.read(message, now)))
    except FrayError as error:
        client.refuse(ref, error)
