"""Join tokens, which each host of a machine redeems once, and the keys that hosts use from then on.

Invariants:
    No key is stored: all are derived from the store's secret and a key id.
    What is stored, before the host is answered, is who has used the token of a unit: the node's name and a digest of
    the claim that the host made up. A host that presents the token again with the same claim is the same machine, whose
    answer got lost, and gets the same answer; any other is refused.
    Uses are counted by unit, not by token: a unit that is created twice has two tokens and no more hosts.
    A revoked unit is remembered until its last token has expired.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
from collections.abc import Mapping
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
    write_token,
)
from fray.model.messages.node import JoinGrant, JoinRequest, NodeHello
from fray.net.channel.channel import NullHandler
from fray.net.channel.public import Channel
from fray.net.transport import Bytes
from fray.scheduler.state.unit_rows import CloudUnit

UNITS_LIMIT = 100_000
"""Units that are remembered at a time."""
CLAIM_LIMIT = 100
LEAVE_S = 10.0
"""A host that has been given its key has nothing else to say; so long may it take to leave."""
_META = "join:"
"""How the keys of what is stored begin; the unit's name follows."""

_log = logging.getLogger("fray.controller")


class JoinTokenStore(Protocol):
    """What is asked of the store."""

    def save(self, *, meta: dict[str, Any]) -> None: ...


@define(eq=False)
class JoinTokens:
    """Who may come in as which machine.

    Args:
        secret: of the store.
        record: what `stored` found at the start.
    """

    _secret: bytes = field(repr=False)
    _store: JoinTokenStore = field(repr=False)
    _units: dict[str, dict[str, Any]] = field(repr=False)

    @staticmethod
    def load_units(meta: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The units among what a store has record."""
        return {key.removeprefix(_META): value for key, value in meta.items() if key.startswith(_META)}

    # Keys

    def mint(self, unit: str, hosts: int, now: float, life_s: float = JOIN_LIFE_S) -> str:
        """A join token of the machine ``unit``, for so many hosts, each of which may use it once within ``life_s``.

        Raises:
            InvalidRequest: an impossible name, number or life.
        """
        check_join(unit, hosts, life_s)
        key = JoinKey(unit, hosts, math.ceil(now + life_s))
        return write_token(key.key_id, self._derive(key.key_id))

    def key_of(self, key_id: str) -> str | None:
        """The key behind the key id of a token or of a host; None if it is neither, or the unit was given up."""
        key = read_join_key(key_id) or read_machine_key(key_id)
        if key is None or self._is_revoked(key.unit):
            return None
        return self._derive(key_id)

    def _derive(self, key_id: str) -> str:
        return hmac.new(self._secret, key_id.encode(), hashlib.sha256).hexdigest()

    # Coming in

    def redeem(self, key_id: str, asked: JoinRequest, remote: str, now: float) -> JoinGrant:
        """A host shows its token: it is spent for this host, and that is saved, when this returns.

        Raises:
            Unauthorized: the token has expired, or somebody else has used it.
            InvalidRequest: the node's name or worker cannot be.
            ChannelFull: too many units are remembered.
        """
        token = read_join_key(key_id)
        if token is None:
            raise Unauthorized(f"key {key_id!r} is no join token: it lets nobody join as a machine")
        check_name(asked.node, "a node")
        self._check_token(token, asked, now)
        own = MachineKey(token.unit, asked.worker, asked.node)
        record = self._units.get(token.unit, {})
        used = {**record.get("used", {})}
        use = [asked.node, _digest(asked.claim), remote]
        first = used.setdefault(str(asked.worker), use)
        if first[:2] != use[:2]:
            raise _already_used(token.unit, asked, first, remote)
        if first is use:
            self._check_limit(now)
            self._save_unit(token.unit, {"until": max(token.expires_s, record.get("until", 0)), "used": used})
            _log.info("machine %s has joined as node %s", token.unit, asked.node, extra={"worker": asked.worker})
        return JoinGrant(key_id=own.key_id, key=self._derive(own.key_id))

    def _check_token(self, token: JoinKey, asked: JoinRequest, now: float) -> None:
        if now > token.expires_s:
            raise Unauthorized(
                f"the join token of machine {token.unit!r} expired {now - token.expires_s:.0f} s ago: ask for another "
                "one (`fray token --for-machine`)"
            )
        if not 1 <= len(asked.claim) <= CLAIM_LIMIT or not asked.claim.isascii():
            raise InvalidRequest(f"a claim has 1 to {CLAIM_LIMIT} characters of ASCII")
        if not 0 <= asked.worker < token.hosts:
            raise InvalidRequest(
                f"machine {token.unit!r} has {token.hosts} hosts, and node {asked.node!r} says that it is host "
                f"{asked.worker} (its attribute tpu_worker, from 0)"
            )

    def check_member(self, key_id: str, hello: NodeHello) -> None:
        """May whoever has proven ``key_id`` be this node?

        Raises:
            Unauthorized: the key is no host's, or another one's.
        """
        own = read_machine_key(key_id)
        if own is None:
            raise Unauthorized("a node needs the token of the cluster, or a key of its own for a join token")
        first = self._units.get(own.unit, {}).get("used", {}).get(str(own.worker))
        if first is None or first[0] != own.node:
            raise Unauthorized(f"no host of machine {own.unit!r} is known as node {own.node!r}")
        machine = hello.capacity.attributes.get(MACHINE_ATTRIBUTE)
        if hello.node != own.node or machine != own.unit:
            raise Unauthorized(
                f"key {key_id!r} lets one be node {own.node!r} with the attribute machine={own.unit}, "
                f"not node {hello.node!r} with machine={machine}"
            )

    # What is remembered

    def revoke(self, unit: str, now: float, life_s: float = JOIN_LIFE_S) -> None:
        """The unit is not wanted any more: nobody joins as it, and its hosts do not come back.

        Args:
            life_s: for how long a token of it may still be about that nobody has used.
        """
        record = self._units.get(unit, {})
        self._forget_expired(now)
        self._save_unit(unit, {"until": max(record.get("until", 0), math.ceil(now + life_s)), "revoked": True})

    def _is_revoked(self, unit: str) -> bool:
        return bool(self._units.get(unit, {}).get("revoked"))

    def _check_limit(self, now: float) -> None:
        if len(self._units) >= UNITS_LIMIT:
            self._forget_expired(now)
        if len(self._units) >= UNITS_LIMIT:
            raise ChannelFull(f"the controller remembers {UNITS_LIMIT} machines, its limit", limit=UNITS_LIMIT)

    def _forget_expired(self, now: float) -> None:
        """Units that were given up, whose tokens have all expired."""
        old = [unit for unit, record in self._units.items() if record.get("revoked") and record["until"] < now]
        if old:
            self._store.save(meta={_META + unit: None for unit in old})
            for unit in old:
                del self._units[unit]

    def _save_unit(self, unit: str, record: dict[str, Any]) -> None:
        self._store.save(meta={_META + unit: record})
        self._units[unit] = record


def check_unit_attributes(hello: NodeHello, units: Mapping[str, CloudUnit]) -> None:
    """A host of a unit that was asked for is of the unit's group and slice.

    Raises:
        Unauthorized: it says something else of itself.
    """
    attributes = hello.capacity.attributes
    unit = units.get(attributes.get(MACHINE_ATTRIBUTE, ""))
    if unit is None:
        return
    for key, expected in (("group", unit.group), ("slice", unit.name)):
        if attributes.get(key, expected) != expected:
            raise Unauthorized(
                f"node {hello.node!r} says {key}={attributes[key]}, and machine {unit.name!r} is of {expected}"
            )


class GreetingOnlyHandler(NullHandler):
    """Handler of a conversation in which nothing is said after the greetings."""

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        raise Unauthorized("a join token is good for joining only")


async def close_after_grace(channel: Channel) -> None:
    """End the conversation soon, if the host does not."""
    with trio.move_on_after(LEAVE_S):
        await channel.wait_ended()
    channel.end(ChannelClosed("a machine that has its key says no more", reason="stopped"))


async def raise_error(error: Exception) -> None:
    """End the controller: its nursery has this task."""
    raise error


def _digest(claim: str) -> str:
    return hashlib.sha256(claim.encode()).hexdigest()


def _already_used(unit: str, asked: JoinRequest, first: list[str], remote: str) -> Unauthorized:
    _log.error(
        "the join token of machine %s was shown twice", unit, extra={"first": first[0], "at": first[2], "now": remote}
    )
    return Unauthorized(
        f"the join token of machine {unit!r} is spent: node {first[0]!r} at {first[2]} has used it as host "
        f"{asked.worker}. If that was not your machine, somebody has read its token: delete the machine"
    )
