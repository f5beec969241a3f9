"""Proofs that both ends of a connection know a key, without sending it. Pure.

The dialer's request carries its key id, a fresh nonce and ``prove(key, "dial", nonce, "")``. The listener finds the
key by its id, checks the proof, and answers with a nonce of its own and ``prove(key, "listen", nonce, own_nonce)``:
so an impostor that took over an address is found out before a frame is sent. A listener takes a nonce once, so that a
recorded request opens nothing while that listener lives. What travels is readable on the way unless there is TLS.
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
"""Characters of 5 random bits."""
HEADER_LIMIT_BYTES = 2048
SCHEME = "Fray"


def prove(key: str, role: str, nonce_a: str, nonce_b: str) -> str:
    """HMAC-SHA256 of the role and both nonces under ``key``, hexadecimal."""
    text = "\n".join((role, nonce_a, nonce_b))
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def matches(proof: str, expected: str) -> bool:
    """Compare without telling by the time taken where they differ."""
    return hmac.compare_digest(proof.encode(), expected.encode())


@frozen
class AuthRequest:
    """What a dialer says: its key id, its nonce, its proof."""

    key_id: str = ""
    nonce: str = ""
    proof: str = ""


@frozen
class AuthResponse:
    """What a listener says back."""

    nonce: str
    proof: str


def make_request(key_id: str, key: str, rng: random.Random) -> AuthRequest:
    """The dialer's words, with a fresh nonce."""
    nonce = mint(rng, NONCE_LENGTH)
    return AuthRequest(key_id, nonce, prove(key, "dial", nonce, ""))


def verify_listener(asked: AuthRequest, key: str, answer: AuthResponse | None) -> None:
    """The dialer's check of the listener.

    Raises:
        Unauthorized: it cannot prove that it knows the key.
    """
    if answer is None or not matches(answer.proof, prove(key, "listen", asked.nonce, answer.nonce)):
        raise Unauthorized(
            f"whoever listens there does not know the key {asked.key_id!r}: it is no peer of this cluster",
            impostor=True,
        )


@define
class Authenticator:
    """The listener's side: checks an `Ask`, takes each nonce once (the last ``limit`` are remembered)."""

    authorize: Callable[[str], str | None]
    rng: random.Random
    limit: int = 65536
    _seen: set[str] = field(factory=set, init=False)
    _order: deque[str] = field(factory=deque, init=False)

    def authenticate(self, asked: AuthRequest) -> AuthResponse | None:
        """The answer to a dialer that knows its key; None turns it away.

        Where ``authorize("")`` is the empty string the door is open: a dialer without any proof may enter.
        """
        key = self.authorize(asked.key_id)
        if key is None:
            return None
        if not (key == "" and asked.key_id == "" and asked.proof == ""):
            if not matches(asked.proof, prove(key, "dial", asked.nonce, "")) or asked.nonce in self._seen:
                return None
            self._remember(asked.nonce)
        nonce = mint(self.rng, NONCE_LENGTH)
        return AuthResponse(nonce, prove(key, "listen", asked.nonce, nonce))

    def _remember(self, nonce: str) -> None:
        self._seen.add(nonce)
        self._order.append(nonce)
        if len(self._order) > self.limit:
            self._seen.discard(self._order.popleft())


# As HTTP headers -----------------------------------------------------------------------------------------------------


def write_request(asked: AuthRequest) -> str:
    """Value of the request's ``Authorization`` header."""
    return f"{SCHEME} id={quote(asked.key_id, safe='')} nonce={asked.nonce} proof={asked.proof}"


def read_request(header: str | None) -> AuthRequest:
    """Inverse of `write_ask`; anything else reads as a dialer that proves nothing."""
    fields = _fields(header, SCHEME)
    return AuthRequest(unquote(fields.get("id", "")), fields.get("nonce", ""), fields.get("proof", ""))


def write_response(answer: AuthResponse) -> str:
    """Value of the response's ``Fray-Proof`` header."""
    return f"{SCHEME} nonce={answer.nonce} proof={answer.proof}"


def read_response(header: str | None) -> AuthResponse | None:
    """Inverse of `write_answer`; None if the listener proved nothing."""
    fields = _fields(header, SCHEME)
    return AuthResponse(fields["nonce"], fields["proof"]) if fields.keys() >= {"nonce", "proof"} else None


def _fields(header: str | None, scheme: str) -> dict[str, str]:
    words = (header or "")[:HEADER_LIMIT_BYTES].split(" ")
    return dict(word.split("=", 1) for word in words[1:] if "=" in word) if words[0] == scheme else {}
