"""Keys of people and invitations to make one: their format and checks. Pure.

A key is a secret that never leaves the machine of its person. The controller stores its *verifier*, which is derived
from the secret and the id of the invitation; both sides prove the verifier to each other in the handshake. Invitations
are made by the controller, in the form ``fray-invite:ID:SECRET``, with ``#FINGERPRINT`` of the cluster's certificate
authority if it has one, as in join tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from attrs import field, frozen

from fray.errors import InvalidRequest
from fray.model.access.roles import PEOPLE, AccessRole
from fray.model.ids import check_name
from fray.model.join_tokens import split_pins, with_pins

USER_KEY = "user:"
"""Prefix of the key ids of people."""
INVITATION_KEY = "invitation:"
"""Prefix of the key ids of invitations."""
INVITATION_SCHEME = "fray-invite:"
SECRET_LENGTH = 40
"""Characters of 5 random bits each."""
INVITATION_LIFE_LIMIT_S = 30 * 86_400.0
KEY_LIFE_LIMIT_S = 366 * 86_400.0
LABEL_LIMIT = 100

_PART = re.compile(r"[A-Za-z0-9]{1,80}\Z")
_VERIFIER = re.compile(r"[0-9a-f]{64}\Z")


@frozen
class InvitationText:
    """Parts of an invitation."""

    invitation_id: str
    secret: str = field(repr=False)
    pins: tuple[str, ...] = ()
    """Fingerprints of the cluster's certificate authority; empty: it has none."""

    @property
    def key_id(self) -> str:
        return f"{INVITATION_KEY}{self.invitation_id}"

    @property
    def text(self) -> str:
        return with_pins(f"{INVITATION_SCHEME}{self.invitation_id}:{self.secret}", self.pins)


def read_invitation(text: str) -> InvitationText:
    """Return the parts of an invitation.

    Raises:
        InvalidRequest: it has another form. The message does not repeat the text: it may be another secret.
    """
    secret, pins = split_pins(text)
    parts = secret.removeprefix(INVITATION_SCHEME).split(":")
    if not secret.startswith(INVITATION_SCHEME) or len(parts) != 2 or not all(map(_PART.match, parts)):
        raise InvalidRequest(
            f"not an invitation: it starts with {INVITATION_SCHEME} and is printed by `fray user add NAME --role ROLE`"
        )
    return InvitationText(parts[0], parts[1], pins)


def derive_verifier(secret: str, label: str) -> str:
    """Return what the controller stores of a secret, hexadecimal."""
    # HMAC with a label: the verifier of one key says nothing about another that is made of the same secret. The secret
    # is random, so that a slow hash (scrypt) would add nothing: there is no list of likely secrets to try.
    return hmac.new(secret.encode(), f"fray user key 1\n{label}".encode(), hashlib.sha256).hexdigest()


def check_verifier(text: str) -> str:
    """Return the verifier if it is one. Raises InvalidRequest."""
    if not _VERIFIER.match(text):
        raise InvalidRequest("a verifier must be 64 hexadecimal digits")
    return text


def check_user(user: str) -> str:
    """Return the name of a user if it is valid. Raises InvalidRequest."""
    return check_name(user, "a user")


def read_role(role: str) -> AccessRole:
    """Return the role of a person. Raises InvalidRequest for anything else."""
    if role not in PEOPLE:
        raise InvalidRequest(f"invalid role {role!r}; expected one of {', '.join(PEOPLE)}")
    return AccessRole(role)


def check_lives(life_s: float, key_life_s: float) -> None:
    """Raise InvalidRequest unless an invitation and its key may live so long."""
    for what, seconds, limit_s in (
        ("an invitation", life_s, INVITATION_LIFE_LIMIT_S),
        ("a key", key_life_s, KEY_LIFE_LIMIT_S),
    ):
        if not 1 <= seconds <= limit_s:
            raise InvalidRequest(f"{what} is valid for 1 to {limit_s:.0f} seconds, not {seconds:g}")
