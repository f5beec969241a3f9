"""Verbs about people: ``fray login``, ``user``, ``key``, ``namespace`` and ``audit``."""

from __future__ import annotations

import argparse
import getpass
import random
import sys

from fray.api.cluster import Cluster, cluster_of
from fray.cli.formatting import span_of, table
from fray.cli.output import clock, note, say, say_json, width
from fray.deploy.cluster_spec import parse_spec, spec_text
from fray.deploy.login import login as make_key
from fray.deploy.login import logout as remove_key
from fray.deploy.remote import secure_address
from fray.deploy.stored_keys import default_spec, directory, find_key
from fray.errors import InvalidRequest, Unauthorized
from fray.model.access.user_keys import read_invitation
from fray.model.messages.client import Role
from fray.model.messages.people import KeyInfo
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.open import RuntimeConfig, open_runtime


async def login(options: argparse.Namespace) -> int:
    """Run ``fray login``."""
    spec = parse_spec(options.spec)
    if spec.kind != "fray":
        raise InvalidRequest(f"a {spec.kind!r} cluster has no users: write fray login fray://host:port")
    text = getpass.getpass("Invitation: ") if sys.stdin.isatty() else sys.stdin.readline()
    address = secure_address(spec.address, read_invitation(text).pins)
    key = await make_key(options.spec, address, text, WebSocketNetwork(), random.SystemRandom())
    if options.json:
        say_json({"cluster": key.spec, "user": key.user, "role": key.role, "expires_at": key.expires_at})
    else:
        say([f"logged in to {key.spec} as {key.user} ({key.role}) until {clock(key.expires_at)}"])
        note(f"the key is in {directory()}; `fray` and open_cluster() use this cluster now if nothing else is given")
    return 0


async def logout(options: argparse.Namespace) -> int:
    """Run ``fray logout``."""
    spec = options.spec or default_spec()
    if not spec:
        raise InvalidRequest("no cluster given, and there was no login: write fray logout fray://host:port")
    if options.revoke:
        # First: without the key it could not be revoked any more.
        await _revoke_own(spec)
    key = remove_key(spec)
    if options.json:
        say_json({"cluster": key.spec, "user": key.user, "revoked": options.revoke})
    else:
        what = "revoked" if options.revoke else f"valid until {clock(key.expires_at)} where it was copied to"
        say([f"logged out from {key.spec}: the key of {key.user} is removed from this machine; it is {what}"])
        if not options.revoke:
            note(f"`fray key revoke {key.credential.key_id}`, by {key.user} on another machine or an admin, ends it")
    return 0


async def _revoke_own(spec: str) -> None:
    address = parse_spec(spec).address
    key = find_key(address)
    if key is None:
        raise InvalidRequest(f"there is no key for {spec} in {directory()}: nothing to revoke")
    # With this key, whatever FRAY_TOKEN says.
    runtime = open_runtime(
        WebSocketNetwork(),
        [secure_address(address, key.pins)],
        key.credential,
        RuntimeConfig(role=Role.TOOL),
        rng=random.SystemRandom(),
    )
    try:
        async with runtime as connected:
            await cluster_of(connected).revoke_keys(key.credential.key_id)
    except Unauthorized:
        # That is how the controller ends the connection of a key that it has just revoked, and refuses one that it
        # does not know any more.
        note("the controller accepts this key no longer")


async def add_user(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray user add``."""
    life_s, key_life_s = span_of(options.life, "--life"), span_of(options.key_life, "--key-life")
    assert life_s is not None
    assert key_life_s is not None
    invitation = await cluster.add_user(options.user, options.role, life_s=life_s, key_life_s=key_life_s)
    if options.json:
        say_json({"user": options.user, "role": options.role, "invitation": invitation})
    else:
        say([invitation])
        # Without the fingerprint of the certificate authority, which is in the invitation.
        command = f"fray login {spec_text(cluster.address)}"
        note(f"send this invitation to {options.user}, who runs `{command}` and pastes it")
    return 0


async def list_users(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray user list``."""
    found = await cluster.list_users()
    if options.json:
        say_json(found)
    else:
        rows = [[one.user, one.role, str(one.keys), clock(one.created_at), clock(one.seen_at)] for one in found]
        say(table(["USER", "ROLE", "KEYS", "ADDED", "LAST SEEN"], rows, width(), optional=("KEYS", "ADDED")))
    return 0


async def remove_user(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray user remove``."""
    await cluster.remove_user(options.user)
    if options.json:
        say_json({"user": options.user})
    return 0


async def list_keys(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray key list``."""
    found = await cluster.list_keys(options.user)
    if options.json:
        say_json(found)
    else:
        heads = ["KEY", "USER", "MACHINE", "MADE", "EXPIRES", "LAST SEEN"]
        say(table(heads, list(map(_key_row, found)), width(), optional=("MADE", "MACHINE", "LAST SEEN")))
    for user in await cluster.previous_token_users():
        note(f"the previous token of the cluster is used by {user}")
    return 0


def _key_row(key: KeyInfo) -> list[str]:
    label = "(open invitation)" if key.open_invitation else key.label
    return [key.key_id, key.user, label, clock(key.created_at), clock(key.expires_at), clock(key.seen_at)]


async def revoke_keys(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray key revoke``."""
    if not options.keys and not options.user:
        raise InvalidRequest("no key given: write its id (`fray key list`), or --user NAME for all keys of a user")
    found = await cluster.revoke_keys(*options.keys, user=options.user)
    if options.json:
        say_json(found)
    else:
        say(f"revoked {key.key_id} of {key.user}" for key in found)
    return 0


async def list_namespaces(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray namespace list``."""
    found = await cluster.list_namespaces()
    if options.json:
        say_json(found)
    else:
        rows = [[one.namespace, one.owner, ", ".join(one.shared_with)] for one in found]
        say(table(["NAMESPACE", "OWNER", "SHARED WITH"], rows, width()))
    return 0


async def share_namespace(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray namespace share`` and ``fray namespace unshare``."""
    info = await cluster.share_namespace(options.name, options.users, on=options.on)
    if options.json:
        say_json(info)
    else:
        say([f"{info.namespace} of {info.owner} is shared with {', '.join(info.shared_with) or 'no other user'}"])
    return 0


async def audit(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray audit``."""
    found = await cluster.audit_records(since_s=span_of(options.since, "--since"), limit=options.limit)
    if options.json:
        say_json(found)
    else:
        rows = [
            [clock(one.at), one.user, one.role, one.action, one.target, one.outcome, one.remote or one.key]
            for one in found
        ]
        heads = ["TIME", "USER", "ROLE", "ACTION", "TARGET", "OUTCOME", "FROM"]
        say(table(heads, rows, width(), optional=("ROLE", "FROM", "OUTCOME", "TIME")))
    return 0
