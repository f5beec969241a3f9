"""``fray login``: makes a key for a cluster with an invitation.

Invariant: the secret of the key is made here, is never sent, and is stored before the invitation is presented: if the
answer is lost, the same invitation gives the same key.
"""

from __future__ import annotations

import random
import socket
import time

from attrs import asdict, evolve

from fray.deploy import stored_keys
from fray.deploy.cluster_spec import parse_spec
from fray.deploy.stored_keys import StoredKey
from fray.errors import FrayError, InvalidRequest, ProtocolMismatch, Unauthorized
from fray.model.access.user_keys import LABEL_LIMIT, SECRET_LENGTH, derive_verifier, read_invitation
from fray.model.ids import mint
from fray.model.messages.people import KeyGrant, RedeemInvitation
from fray.net.channel.public import RedialPolicy
from fray.net.transport import Credential, Network
from fray.node.joining import ask_by_greeting

LOGIN_S = 15.0
"""Seconds that a login waits for the controller."""


async def login(spec: str, address: str, invitation_text: str, network: Network, rng: random.Random) -> StoredKey:
    """Make a key with an invitation, store it, and make its cluster the default.

    Args:
        spec: cluster spec, as people write it.
        address: of its controller, in the notation of `fray.net`.

    Raises:
        InvalidRequest: the text is not an invitation.
        Unauthorized: the invitation has expired, was revoked or used, or is for another cluster.
        ConnectionFailed: the controller cannot be reached.
        OSError: the key cannot be stored.
    """
    invitation = read_invitation(invitation_text)
    stored = stored_keys.read()
    record = stored.get("pending", {}).get(invitation.invitation_id)
    key = (
        stored_keys.parse(record)
        if record is not None
        else StoredKey(
            spec=spec,
            invitation_id=invitation.invitation_id,
            secret=mint(rng, SECRET_LENGTH),
            pins=invitation.pins,
        )
    )
    # Beside the present key, which stays valid if this login fails. Only one login is pending at a time.
    stored_keys.write({**stored, "pending": {key.invitation_id: asdict(key)}})
    verifier = derive_verifier(key.secret, invitation.key_id)
    message = RedeemInvitation(verifier=verifier, label=socket.gethostname()[:LABEL_LIMIT])
    own = Credential(invitation.key_id, derive_verifier(invitation.secret, invitation.key_id))
    grant = await _request_grant(network, address, own, message, rng)
    key = evolve(key, spec=spec, user=grant.user, role=grant.role, expires_at=time.time() + grant.life_s)
    stored_keys.write(
        {"default": spec, "clusters": {**stored.get("clusters", {}), stored_keys.place_of(address): asdict(key)}}
    )
    return key


def logout(spec: str) -> StoredKey:
    """Remove the stored key of a cluster, and its cluster as the default; return it.

    Raises:
        InvalidRequest: there is none.
        OSError: the file cannot be written.
    """
    stored = stored_keys.read()
    clusters = dict(stored.get("clusters", {}))
    record = clusters.pop(stored_keys.place_of(parse_spec(spec).address), None)
    if record is None:
        known = ", ".join(one["spec"] for one in clusters.values())
        raise InvalidRequest(
            f"there is no key for {spec} in {stored_keys.directory()}"
            + (f"; there are keys for {known}" if known else ": nothing to log out from")
        )
    key = stored_keys.parse(record)
    kept = {name: value for name, value in stored.items() if name != "default" or value != key.spec}
    stored_keys.write({**kept, "clusters": clusters})
    return key


async def _request_grant(
    network: Network, address: str, own: Credential, message: RedeemInvitation, rng: random.Random
) -> KeyGrant:
    policy = RedialPolicy(refused_is_final=True, give_up_s=LOGIN_S)
    answer = await ask_by_greeting(network, address, own, message, policy, rng)
    # The refusal of the key says less than this; that of an impostor, by this side, says what is wrong.
    if isinstance(answer, Unauthorized) and answer.details.get("key_refused"):
        raise Unauthorized("the invitation has expired, was revoked, or is for another cluster; ask for another one")
    if isinstance(answer, FrayError):
        raise answer
    if not isinstance(answer, KeyGrant):
        raise ProtocolMismatch(f"the controller answered an invitation with {type(answer).__name__}")
    return answer
