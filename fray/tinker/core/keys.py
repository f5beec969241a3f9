"""Ids and keys of users: how they look, and how a key is compared."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TypeAlias

from attrs import frozen

USER_NAME_LIMIT = 64
"""Characters of a name."""
OPENTINKER_PREFIX, TINKER_PREFIX = "otk_", "tml-"
"""Prefixes of a key. What follows is the same in both spellings, so that they are one key: revoked together."""
RandomHex: TypeAlias = Callable[[int], str]
"""Call such as ``secrets.token_hex``: so many random bytes as hexadecimal digits."""


@frozen
class ServiceUser:
    """User of the service."""

    user_id: str
    name: str
    key_hash: str
    """Hash of the key; empty: it was revoked, and the user has none."""
    created_at: float
    is_admin: bool = False


def new_key(token_hex: RandomHex) -> str:
    """Return a key for OpenTinker's clients: ``otk_`` and 32 hexadecimal digits."""
    return f"{OPENTINKER_PREFIX}{token_hex(16)}"


def tinker_key_of(key: str) -> str:
    """Return the other spelling of a key, ``tml-`` and the same digits: the Tinker SDK accepts no other prefix."""
    return TINKER_PREFIX + key.removeprefix(OPENTINKER_PREFIX)


def new_user_id(token_hex: RandomHex) -> str:
    """Return an id: ``user_`` and 8 hexadecimal digits."""
    return f"user_{token_hex(4)}"


def hash_of(key: str) -> str:
    """Return what is kept of a key, in either spelling: it has 128 random bits, so a plain hash cannot be reversed."""
    if key.startswith(TINKER_PREFIX):
        key = OPENTINKER_PREFIX + key.removeprefix(TINKER_PREFIX)
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def user_of_key(users: Mapping[str, ServiceUser], key: str) -> ServiceUser | None:
    """Return the user of a key, in either spelling; None if it belongs to none.

    All are compared, each in constant time.
    """
    wanted, found = hash_of(key), None
    for user in users.values():
        if hmac.compare_digest(user.key_hash, wanted):
            found = user
    return found
