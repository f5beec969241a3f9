"""Join tokens, which each host of a machine redeems once, and the keys that hosts use from then on.

Invariants:
    No key is stored: all are derived from the store's secret and a key id.
    What is stored, before the host is answered, is who has used the token of a unit: the node's name and a digest of
    the claim that the host made up. A host that presents the token again with the same claim is the same machine, whose
    answer got lost, and gets the same answer; any other is refused.
    Uses are counted by unit, not by token: a unit that is created twice has two tokens, but not more hosts.
    A revoked unit is remembered until its last token has expired.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import trio
from attrs import define, field

from fray.errors import ChannelClosed, ChannelFull, InvalidRequest, Unauthorized
from fray.model.ids import check_name
from fray.model.join_tokens import (
    JOIN_LIFE_S,
    MACHINE_ATTRIBUTE,
    JoinKey,
    MachineKey,
    check_join,
    read_join_key,
    read_machine_key,
    with_pins,
    write_token,
)
from fray.model.messages.node import JoinGrant, JoinRequest, NodeHello
from fray.net.auth import derive_key
from fray.net.channel.channel import NullHandler
from fray.net.channel.public import Channel
from fray.net.transport import Bytes
from fray.scheduler.state.unit_rows import CloudUnit

UNITS_LIMIT = 100_000
"""Units remembered at a time."""
CLAIM_LIMIT = 100
LEAVE_S = 10.0
"""Seconds after which the connection of a host that has received its key is closed; it has nothing else to say."""
_META = "join:"
"""Prefix of the stored keys; the unit's name follows."""

_log = logging.getLogger("fray.controller")


class JoinTokenStore(Protocol):
    """The part of the store that is used here."""

    def save(self, *, meta: dict[str, Any]) -> None: ...


@define(eq=False)
class JoinTokens:
    """Issuer and record of join tokens.

    A token is its own key id (unit, hosts, expiry) and a key derived from it and the store's secret. It opens one
    connection, which answers with a key for one node name of that unit; the node authenticates with this key from then
    on. The second key cannot be derived from the token, which others may have seen (metadata of a VM, a command line).

    Args:
        secret: of the store.
        units: what `load_units` found at the start.
    """

    _secret: bytes = field(repr=False)
    _store: JoinTokenStore = field(repr=False)
    _units: dict[str, dict[str, Any]] = field(repr=False)
    pins: Callable[[], tuple[str, ...]] = field(default=tuple, init=False, repr=False)
    """Returns the fingerprints of the certificate authority, which tokens carry: the first dial is pinned."""

    @staticmethod
    def load_units(meta: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the units among the meta values of a store."""
        return {key.removeprefix(_META): value for key, value in meta.items() if key.startswith(_META)}

    # Keys

    def mint(self, unit: str, hosts: int, now: float, life_s: float = JOIN_LIFE_S) -> str:
        """Return a join token of the machine ``unit``, for so many hosts, each of which may use it once within
        ``life_s``.

        Raises:
            InvalidRequest: an impossible name, number or lifetime.
        """
        check_join(unit, hosts, life_s)
        # Unit, hosts and expiry are in the id, which the derived key authenticates like a signature: nothing of a token
        # is stored.
        key = JoinKey(unit, hosts, math.ceil(now + life_s))
        return with_pins(write_token(key.key_id, self._derive(key.key_id)), self.pins())

    def key_of(self, key_id: str) -> str | None:
        """Return the key behind the key id of a token or of a host; None if it is neither, or the unit was revoked."""
        # Derived for any well-formed id, also of hosts that never joined: only who was granted a key knows it, and
        # `check_member` asks the record.
        key = read_join_key(key_id) or read_machine_key(key_id)
        if key is None or self._is_revoked(key.unit):
            return None
        return self._derive(key_id)

    def _derive(self, key_id: str) -> str:
        # One label for tokens and keys of hosts: their ids begin with the kind.
        return derive_key(self._secret, "join", key_id)

    # Joining

    def redeem(self, key_id: str, join_request: JoinRequest, remote: str, now: float) -> JoinGrant:
        """Redeem a token for a host. That it is used is saved when this returns.

        It is a save of its own and not an event of the loop, since a greeting must be answered at once. Measured: 4 ms
        with SQLite's fsync on a busy disk, 0.03 ms in memory, and 8 to 12 ms for the 3,000th host of one unit, whose
        record is written whole.

        Raises:
            Unauthorized: the token has expired, or another machine has used it.
            InvalidRequest: the node's name or worker is invalid.
            ChannelFull: too many units are remembered.
        """
        token = read_join_key(key_id)
        if token is None:
            raise Unauthorized(f"key {key_id!r} is not a join token")
        check_name(join_request.node, "a node")
        self._check_token(token, join_request, now)
        own = MachineKey(token.unit, join_request.worker, join_request.node)
        record = self._units.get(token.unit, {})
        # A copy: if the save fails, the record in memory must not say more than the one on disk.
        used = {**record.get("used", {})}
        use = [join_request.node, _digest(join_request.claim), remote]
        # By host number and not by token: a unit that was requested twice has two tokens.
        first = used.setdefault(str(join_request.worker), use)
        # Without the remote address: a host that repeats its request may come by another route.
        if first[:2] != use[:2]:
            raise _already_used(token.unit, join_request, first, remote)
        if first is use:
            # Only for a first use, so that a host whose answer was lost is never refused for lack of room.
            self._check_limit(now)
            # Saved before the host is answered: after a crash in between, the repeated claim is recognized; in the
            # other order a second machine could use the token with the next controller.
            self._save_unit(token.unit, {"until": max(token.expires_s, record.get("until", 0)), "used": used})
            _log.info(
                "machine %s has joined as node %s", token.unit, join_request.node, extra={"worker": join_request.worker}
            )
        return JoinGrant(key_id=own.key_id, key=self._derive(own.key_id))

    def _check_token(self, token: JoinKey, join_request: JoinRequest, now: float) -> None:
        # By the scheduler's clock, which does not step with the wall clock.
        if now > token.expires_s:
            raise Unauthorized(
                f"the join token of machine {token.unit!r} expired {now - token.expires_s:.0f} s ago: create another "
                "one (`fray token --for-machine`)"
            )
        if not 1 <= len(join_request.claim) <= CLAIM_LIMIT or not join_request.claim.isascii():
            raise InvalidRequest(f"a claim must have 1 to {CLAIM_LIMIT} ASCII characters")
        if not 0 <= join_request.worker < token.hosts:
            raise InvalidRequest(
                f"machine {token.unit!r} has {token.hosts} hosts, but node {join_request.node!r} claims to be host "
                f"{join_request.worker} (its attribute tpu_worker, from 0)"
            )

    def check_member(self, key_id: str, hello: NodeHello) -> None:
        """Check that the host that has proven ``key_id`` may be this node.

        Raises:
            Unauthorized: the key is not a host's, or belongs to another host.
        """
        # The key proves which host of which unit the peer is; the hello may not claim to be another one.
        own = read_machine_key(key_id)
        if own is None:
            raise Unauthorized("a node must present the cluster token, or the key it got for a join token")
        first = self._units.get(own.unit, {}).get("used", {}).get(str(own.worker))
        # The record, since a restored older store may know a key's host no longer.
        if first is None or first[0] != own.node:
            raise Unauthorized(f"no host of machine {own.unit!r} has joined as node {own.node!r}")
        machine = hello.capacity.attributes.get(MACHINE_ATTRIBUTE)
        if hello.node != own.node or machine != own.unit:
            raise Unauthorized(
                f"key {key_id!r} is for node {own.node!r} with the attribute machine={own.unit}, "
                f"not for node {hello.node!r} with machine={machine}"
            )

    # Records

    def revoke(self, unit: str, now: float, life_s: float = JOIN_LIFE_S) -> None:
        """Revoke all tokens and keys of a unit: no host joins as it, and its hosts do not come back.

        Args:
            life_s: longest remaining lifetime of a token that has not been used.
        """
        record = self._units.get(unit, {})
        self._forget_expired(now)
        # The uses go: no host of a revoked unit is let in. The record itself must outlive every token, or they would be
        # valid again.
        self._save_unit(unit, {"until": max(record.get("until", 0), math.ceil(now + life_s)), "revoked": True})

    def _is_revoked(self, unit: str) -> bool:
        return bool(self._units.get(unit, {}).get("revoked"))

    def _check_limit(self, now: float) -> None:
        if len(self._units) >= UNITS_LIMIT:
            self._forget_expired(now)
        if len(self._units) >= UNITS_LIMIT:
            raise ChannelFull(f"too many machines have joined (limit {UNITS_LIMIT})", limit=UNITS_LIMIT)

    def _forget_expired(self, now: float) -> None:
        """Forget revoked units whose tokens have all expired."""
        old = [unit for unit, record in self._units.items() if record.get("revoked") and record["until"] < now]
        if old:
            self._store.save(meta={_META + unit: None for unit in old})
            for unit in old:
                del self._units[unit]

    def _save_unit(self, unit: str, record: dict[str, Any]) -> None:
        self._store.save(meta={_META + unit: record})
        self._units[unit] = record


def check_unit_attributes(hello: NodeHello, units: Mapping[str, CloudUnit]) -> None:
    """Check that a host of a unit that was requested belongs to the unit's group and slice, whatever else it claims.

    Raises:
        Unauthorized: its attributes say something else.
    """
    attributes = hello.capacity.attributes
    # Otherwise one host could enter itself into another unit's slice, and a slice with a host too many is not used.
    unit = units.get(attributes.get(MACHINE_ATTRIBUTE, ""))
    if unit is None:
        return
    for key, expected in (("group", unit.group), ("slice", unit.name)):
        # A missing attribute is accepted: only a contradiction shows that the host is another one.
        if attributes.get(key, expected) != expected:
            raise Unauthorized(
                f"node {hello.node!r} claims {key}={attributes[key]}, but machine {unit.name!r} is of {expected}"
            )


class GreetingOnlyHandler(NullHandler):
    """Handler of a connection that carries nothing after the greetings."""

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        raise Unauthorized("a join token is only for joining")


async def close_after_grace(channel: Channel) -> None:
    """Close the connection after `LEAVE_S`, if the host does not."""
    # Not closed at once: the answer is still to be sent and read.
    with trio.move_on_after(LEAVE_S):
        await channel.wait_ended()
    channel.end(ChannelClosed("the host has its key", reason="stopped"))


async def raise_error(error: Exception) -> None:
    """Raise the error in the nursery of the controller, which ends it."""
    raise error


def _digest(claim: str) -> str:
    return hashlib.sha256(claim.encode()).hexdigest()


def _already_used(unit: str, join_request: JoinRequest, first: list[str], remote: str) -> Unauthorized:
    _log.error(
        "join token of unit %s was presented twice", unit, extra={"first": first[0], "at": first[2], "now": remote}
    )
    return Unauthorized(
        f"the join token of machine {unit!r} was already used: by node {first[0]!r} at {first[2]}, as host "
        f"{join_request.worker}. If that was not your machine, its token was stolen: delete the machine"
    )
