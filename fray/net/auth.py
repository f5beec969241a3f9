"""Mutual authentication by a shared key, without sending it. Pure.

The dialer's request carries its key id, a fresh nonce and ``prove(key, "dial", nonce, "")``. The listener finds the
key by its id, checks the proof, and answers with a nonce of its own and ``prove(key, "listen", nonce, own_nonce)``:
so an impostor that took over an address is detected before a frame is sent. A listener accepts a nonce once, so that a
recorded request cannot be replayed while that listener lives. Frames are readable on the network unless there is TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import random
from collections import deque
from collections.abc import Callable
from urllib.parse import quote, unquote

from attrs import define, field, frozen

from fray.errors import Unauthorized
from fray.model.ids import mint

NONCE_LENGTH = 26
"""Number of characters, of 5 random bits each."""
HEADER_LIMIT_BYTES = 2048
SCHEME = "Fray"


def prove(key: str, role: str, nonce_a: str, nonce_b: str) -> str:
    """Return the HMAC-SHA256 of the role and both nonces under ``key``, hexadecimal."""
    # The role is part of the text, so that neither side's proof can be sent back as the other's.
    text = "\n".join((role, nonce_a, nonce_b))
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def matches(proof: str, expected: str) -> bool:
    """Compare in constant time."""
    # As bytes: for text that is not ASCII, which a peer may send, compare_digest raises TypeError.
    return hmac.compare_digest(proof.encode(), expected.encode())


@frozen
class AuthRequest:
    """Authentication of a dialer: its key id, its nonce, its proof."""

    key_id: str = ""
    nonce: str = ""
    proof: str = ""


@frozen
class AuthResponse:
    """Authentication of a listener."""

    nonce: str
    proof: str


def make_request(key_id: str, key: str, rng: random.Random) -> AuthRequest:
    """Return the dialer's request, with a fresh nonce."""
    # The dialer speaks first and does not know a nonce of the listener, which saves a round trip for each connection.
    # So its proof covers its own nonce only, and the listener has to remember the nonces it has seen.
    nonce = mint(rng, NONCE_LENGTH)
    return AuthRequest(key_id, nonce, prove(key, "dial", nonce, ""))


def verify_listener(request: AuthRequest, key: str, answer: AuthResponse | None) -> None:
    """Check the listener's proof, for the dialer.

    Raises:
        Unauthorized: no valid proof of the key.
    """
    if answer is None or not matches(answer.proof, prove(key, "listen", request.nonce, answer.nonce)):
        raise Unauthorized(
            f"server failed authentication: it does not have the key {request.key_id!r}",
            impostor=True,
        )


@define
class Authenticator:
    """Listener's side: checks requests and accepts each nonce once (the last ``limit`` are remembered)."""

    authorize: Callable[[str], str | None]
    rng: random.Random
    limit: int = 65536
    _seen: set[str] = field(factory=set, init=False)
    _order: deque[str] = field(factory=deque, init=False)

    def authenticate(self, request: AuthRequest) -> AuthResponse | None:
        """Return the answer to a dialer with a valid proof; None rejects it.

        If ``authorize("")`` is the empty string, dialers without any proof are accepted.
        """
        # Jobs never hold the cluster's token: each attempt has a key of its own, derived from its id and the store's
        # secret, so that no key is stored and a leaked one opens one attempt only.
        key = self.authorize(request.key_id)
        if key is None:
            return None
        if not (key == "" and request.key_id == "" and request.proof == ""):
            # Proof first: without the key, the memory of nonces can be neither filled nor probed.
            if not matches(request.proof, prove(key, "dial", request.nonce, "")) or request.nonce in self._seen:
                return None
            self._remember(request.nonce)
        nonce = mint(self.rng, NONCE_LENGTH)
        return AuthResponse(nonce, prove(key, "listen", request.nonce, nonce))

    def _remember(self, nonce: str) -> None:
        self._seen.add(nonce)
        self._order.append(nonce)
        if len(self._order) > self.limit:
            self._seen.discard(self._order.popleft())


# As HTTP headers -----------------------------------------------------------------------------------------------------


def write_request(request: AuthRequest) -> str:
    """Return the value of the request's ``Authorization`` header."""
    return f"{SCHEME} id={quote(request.key_id, safe='')} nonce={request.nonce} proof={request.proof}"


def read_request(header: str | None) -> AuthRequest:
    """Inverse of `write_request`; anything else is read as a dialer without a proof."""
    fields = _fields(header, SCHEME)
    return AuthRequest(unquote(fields.get("id", "")), fields.get("nonce", ""), fields.get("proof", ""))


def write_response(answer: AuthResponse) -> str:
    """Return the value of the response's ``Fray-Proof`` header."""
    return f"{SCHEME} nonce={answer.nonce} proof={answer.proof}"


def read_response(header: str | None) -> AuthResponse | None:
    """Inverse of `write_response`; None without a proof."""
    fields = _fields(header, SCHEME)
    return AuthResponse(fields["nonce"], fields["proof"]) if fields.keys() >= {"nonce", "proof"} else None


def _fields(header: str | None, scheme: str) -> dict[str, str]:
    # Cut before it is split: the header comes from an unauthenticated peer.
    parts = (header or "")[:HEADER_LIMIT_BYTES].split(" ")
    return dict(part.split("=", 1) for part in parts[1:] if "=" in part) if parts[0] == scheme else {}
