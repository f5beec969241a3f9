"""People of a cluster: users with their roles, keys and invitations, and who owns which namespace.

Invariants: every change is on disk when its method returns, in a transaction of its own, as for join tokens: it is
rare, and must hold before it is answered. Of keys the store has only verifiers (`fray.model.access.user_keys`). A
namespace belongs to the user that used it first; others may use it once it is shared with them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from attrs import define, field

from fray.errors import InvalidRequest, Unauthorized
from fray.model.access.roles import AccessRole
from fray.model.access.user_keys import (
    INVITATION_KEY,
    LABEL_LIMIT,
    SECRET_LENGTH,
    USER_KEY,
    InvitationText,
    check_lives,
    check_user,
    check_verifier,
    derive_verifier,
    read_role,
)
from fray.model.ids import ANONYMOUS_PREFIX, Namespace, check_name, mint
from fray.model.messages.people import KeyGrant, KeyInfo, NamespaceInfo, RedeemInvitation, UserInfo
from fray.model.policy.policy import EVERYONE

USERS_LIMIT = 10_000
KEYS_LIMIT = 100
"""Valid keys and open invitations of one user."""
NAMESPACES_LIMIT = 1_000
"""Namespaces of one user."""
SHARES_LIMIT = 1_000
"""Users with whom one namespace is shared."""

_log = logging.getLogger("fray.controller")

Record = dict[str, Any]


class PeopleStore(Protocol):
    """The part of the store that is used here."""

    def save(self, *, meta: dict[str, Any]) -> None: ...


@define(eq=False)
class People:
    """Users, keys, invitations and namespaces. Times are the scheduler's, in seconds since the epoch."""

    _store: PeopleStore = field(repr=False)
    _rng: random.Random = field(repr=False)
    pins: Callable[[], tuple[str, ...]] = tuple
    """Function that returns the fingerprints of the cluster's certificate authority, which invitations carry."""
    _users: dict[str, Record] = field(factory=dict, repr=False)
    _keys: dict[str, Record] = field(factory=dict, repr=False)
    _invitations: dict[str, Record] = field(factory=dict, repr=False)
    _namespaces: dict[Namespace, Record] = field(factory=dict, repr=False)
    _seen: dict[str, float] = field(factory=dict, repr=False)
    """Last use of each key. Not saved, as it would be a write for each connection."""

    @classmethod
    def load(cls, meta: Mapping[str, Any], store: PeopleStore, rng: random.Random) -> People:
        """Return the people among the meta values of a store."""
        people = cls(store, rng)
        for table, records in people._tables().items():
            records |= {key.removeprefix(table): value for key, value in meta.items() if key.startswith(table)}
        return people

    def _tables(self) -> dict[str, dict[str, Record]]:
        return {
            "people.user:": self._users,
            "people.key:": self._keys,
            "people.invitation:": self._invitations,
            "people.namespace:": self._namespaces,
        }

    def _save(self, changes: Mapping[str, Mapping[str, Record | None]]) -> None:
        """Save records by table and key, then keep them in memory; None deletes."""
        self._store.save(meta={table + key: value for table, some in changes.items() for key, value in some.items()})
        tables = self._tables()
        for table, some in changes.items():
            for key, value in some.items():
                if value is None:
                    tables[table].pop(key, None)
                else:
                    tables[table][key] = value

    # Users

    def add_user(self, user: str, role: str, life_s: float, key_life_s: float, now: float) -> InvitationText:
        """Add a user, or set the role of a known one; return an invitation to make a key.

        Raises:
            InvalidRequest: an invalid name, role or time, or too many users or keys.
        """
        check_user(user)
        read_role(role)
        check_lives(life_s, key_life_s)
        self._forget_expired(now)
        if user not in self._users and len(self._users) >= USERS_LIMIT:
            raise InvalidRequest(f"a cluster has at most {USERS_LIMIT:,} users; remove some with `fray user remove`")
        if len(self._ids_of(user)) >= KEYS_LIMIT:
            raise InvalidRequest(f"user {user!r} has {KEYS_LIMIT} keys and invitations; revoke some: `fray key list`")
        invitation = InvitationText(mint(self._rng), mint(self._rng, SECRET_LENGTH), self.pins())
        record = {
            "user": user,
            "verifier": derive_verifier(invitation.secret, invitation.key_id),
            "created": now,
            "expires": now + life_s,
            "key_life": key_life_s,
        }
        known = self._users.get(user, {"created": now})
        self._save(
            {"people.user:": {user: {**known, "role": role}}, "people.invitation:": {invitation.invitation_id: record}}
        )
        return invitation

    def remove_user(self, user: str) -> list[str]:
        """Remove a user with keys, invitations and namespaces; return the key ids.

        Raises:
            InvalidRequest: there is no such user.
        """
        if user not in self._users:
            raise InvalidRequest(f"there is no user {user!r}; `fray user list` lists them")
        keys = self._ids_of(user)
        self._save(
            {
                "people.user:": {user: None},
                "people.namespace:": {name: None for name, one in self._namespaces.items() if one["owner"] == user},
                **self._deletions(keys),
            }
        )
        return keys

    @property
    def names(self) -> Collection[str]:
        """Names of all users."""
        return self._users.keys()

    def users(self, now: float) -> tuple[UserInfo, ...]:
        """Return all users, by name."""
        return tuple(
            UserInfo(
                user=user,
                role=record["role"],
                created_at=record["created"],
                keys=sum(one["user"] == user and one["expires"] > now for one in self._keys.values()),
                seen_at=max((at for key, at in self._seen.items() if self._keys[key]["user"] == user), default=None),
            )
            for user, record in sorted(self._users.items())
        )

    # Keys

    def key_of(self, key_id: str, now: float) -> str | None:
        """Return the verifier behind a key id; None if it is not of a person, has expired or was revoked."""
        record = self._record(key_id)
        return None if record is None or record["expires"] <= now else str(record["verifier"])

    def owner_of(self, key_id: str) -> str:
        """Return the user of a key or invitation, also of one that has expired; empty: there is none."""
        record = self._record(key_id)
        return "" if record is None else str(record["user"])

    def identify(self, key_id: str, now: float) -> tuple[AccessRole, str]:
        """Return role and user of a key that was proven, and note that it is used.

        Raises:
            Unauthorized: it has expired or was revoked since.
        """
        record = self._keys.get(key_id.removeprefix(USER_KEY)) if key_id.startswith(USER_KEY) else None
        if record is None or record["user"] not in self._users:
            raise Unauthorized("this key was revoked: ask an admin for an invitation (`fray user add`)")
        if record["expires"] <= now:
            raise Unauthorized("this key has expired: ask an admin for an invitation (`fray user add`)")
        self._seen[key_id.removeprefix(USER_KEY)] = now
        return AccessRole(self._users[record["user"]]["role"]), record["user"]

    def redeem(self, key_id: str, message: RedeemInvitation, remote: str, now: float) -> KeyGrant:
        """Make the key of an invitation; the same one if it is repeated.

        Raises:
            Unauthorized: the invitation is unknown, has expired, or was used by another machine.
            InvalidRequest: the message is invalid.
        """
        check_verifier(message.verifier)
        if len(message.label) > LABEL_LIMIT or not message.label.isprintable():
            raise InvalidRequest(f"a label has at most {LABEL_LIMIT} printable characters")
        name = key_id.removeprefix(INVITATION_KEY)
        invitation = self._invitations.get(name) if key_id.startswith(INVITATION_KEY) else None
        if invitation is None or invitation["expires"] <= now:
            raise Unauthorized("the invitation has expired or was revoked: ask for another one (`fray user add`)")
        # The key has the name of its invitation, so that one invitation cannot make two.
        key = self._keys.get(name)
        if key is not None and key["verifier"] != message.verifier:
            _log.error("an invitation of user %s was presented twice", key["user"], extra={"now": remote})
            raise Unauthorized(
                f"the invitation was already used, on {key['label'] or 'another machine'} at {key['remote']}: if that "
                "was not you, have the key revoked (`fray key revoke`)"
            )
        if key is None:
            key = {
                "user": invitation["user"],
                "verifier": message.verifier,
                "created": now,
                "expires": now + invitation["key_life"],
                "label": message.label,
                "remote": remote,
            }
            self._save({"people.key:": {name: key}})
        return KeyGrant(
            key_id=USER_KEY + name,
            user=key["user"],
            role=self._users[key["user"]]["role"],
            life_s=key["expires"] - now,
        )

    def keys(self, now: float, user: str = "") -> tuple[KeyInfo, ...]:
        """Return keys and open invitations (of one user), oldest first."""
        unused = {name: one for name, one in self._invitations.items() if name not in self._keys}
        found = [(USER_KEY + name, one, False) for name, one in self._keys.items()]
        found += [(INVITATION_KEY + name, one, True) for name, one in unused.items()]
        return tuple(
            KeyInfo(
                key_id=key_id,
                user=one["user"],
                created_at=one["created"],
                expires_at=one["expires"],
                label=one.get("label", ""),
                seen_at=self._seen.get(key_id.removeprefix(USER_KEY)),
                open_invitation=is_open,
            )
            for key_id, one, is_open in sorted(found, key=lambda each: float(each[1]["created"]))
            if user in ("", one["user"]) and one["expires"] > now
        )

    def revoke(self, key_ids: Iterable[str]) -> None:
        """Revoke keys and invitations. A key goes with its invitation, which could make it again."""
        names = {one.removeprefix(USER_KEY).removeprefix(INVITATION_KEY) for one in key_ids}
        self._save(self._deletions([USER_KEY + name for name in names]))

    def _deletions(self, key_ids: Iterable[str]) -> dict[str, dict[str, Record | None]]:
        names = {one.removeprefix(USER_KEY).removeprefix(INVITATION_KEY) for one in key_ids}
        for name in names:
            self._seen.pop(name, None)
        return {
            "people.key:": {name: None for name in names if name in self._keys},
            "people.invitation:": {name: None for name in names if name in self._invitations},
        }

    def _ids_of(self, user: str) -> list[str]:
        found = [USER_KEY + name for name, one in self._keys.items() if one["user"] == user]
        return found + [INVITATION_KEY + name for name, one in self._invitations.items() if one["user"] == user]

    def _record(self, key_id: str) -> Record | None:
        if key_id.startswith(USER_KEY):
            return self._keys.get(key_id.removeprefix(USER_KEY))
        return self._invitations.get(key_id.removeprefix(INVITATION_KEY)) if key_id.startswith(INVITATION_KEY) else None

    def _forget_expired(self, now: float) -> None:
        expired = [USER_KEY + name for name, one in self._keys.items() if one["expires"] <= now]
        expired += [
            INVITATION_KEY + name
            for name, one in self._invitations.items()
            if one["expires"] <= now and name not in self._keys
        ]
        if expired:
            self._save(self._deletions(expired))

    # Namespaces

    def owner(self, namespace: Namespace) -> str | None:
        """Return the user that owns a namespace; None: no one has claimed it."""
        record = self._namespaces.get(namespace)
        return None if record is None else str(record["owner"])

    def may_use(self, user: str, namespace: Namespace) -> bool:
        """Return whether a namespace is this user's, or shared with it."""
        record = self._namespaces.get(namespace)
        return record is not None and (record["owner"] == user or not {user, EVERYONE}.isdisjoint(record["shared"]))

    def claim(self, user: str, namespace: Namespace) -> None:
        """Make a namespace this user's, if it is not claimed.

        Raises:
            InvalidRequest: it is another user's, or this user has too many.
        """
        check_name(namespace, "a namespace")
        if self.owner(namespace) is not None:
            return
        if sum(one["owner"] == user for one in self._namespaces.values()) >= NAMESPACES_LIMIT:
            raise InvalidRequest(f"user {user!r} has {NAMESPACES_LIMIT:,} namespaces, the limit")
        self._save({"people.namespace:": {namespace: {"owner": user, "shared": []}}})

    def share(self, namespace: Namespace, users: Iterable[str], *, on: bool, owner: str) -> NamespaceInfo:
        """Share a namespace with users, or stop that; one that is not claimed gets this owner first.

        Raises:
            InvalidRequest: an invalid name, or too many users.
        """
        check_name(namespace, "a namespace")
        if namespace.startswith(ANONYMOUS_PREFIX):
            raise InvalidRequest(f"namespace {namespace!r} is that of one driver; share one with a name of its own")
        names = [user if user == EVERYONE else check_user(user) for user in users]
        record = self._namespaces.get(namespace, {"owner": owner, "shared": []})
        shared = dict.fromkeys(record["shared"])
        for name in names:
            if on:
                shared[name] = None
            else:
                shared.pop(name, None)
        if len(shared) > SHARES_LIMIT:
            raise InvalidRequest(f"a namespace is shared with at most {SHARES_LIMIT:,} users; share it with '*'")
        self._save({"people.namespace:": {namespace: {**record, "shared": list(shared)}}})
        return self._namespace_info(namespace)

    def namespaces(self, user: str | None = None) -> tuple[NamespaceInfo, ...]:
        """Return the claimed namespaces (that a user may use), by name."""
        names = sorted(name for name in self._namespaces if user is None or self.may_use(user, name))
        return tuple(map(self._namespace_info, names))

    def _namespace_info(self, name: Namespace) -> NamespaceInfo:
        record = self._namespaces[name]
        return NamespaceInfo(namespace=name, owner=record["owner"], shared_with=tuple(record["shared"]))
