"""Mutual authentication by a shared key, without sending it. Pure.

The listener speaks first: it sends a fresh nonce, its *challenge*, which is made for one connection and answered once.
With TLS both sides have the challenge from the handshake, which has a random number and a key share of the listener in
it, and nothing is sent. The dialer answers with its key id, a nonce of its own and a proof; the listener finds the key
by its id, checks the proof and answers with one of its own, so an impostor that took over an address is detected before
a frame is sent.

Both proofs are HMAC-SHA256 under the key of the role, both nonces, the key id, the names under which the dialer knows
the listener, and the binding: the SHA-256 fingerprint of the listener's certificate, empty without TLS. So a recorded
proof is of no use: not later or at another listener, whose nonce is another, and not while it is recorded, since a
listener refuses a proof that names none of its own addresses or another certificate. Nothing has to be remembered, and
a restart forgets nothing. Frames are readable on the network, and can be altered there, unless there is TLS.

Names of a listener:
    ``tcp:IP:PORT`` is the far end of the dialer's socket, and must be the near end of the listener's. That holds for a
    listener bound to all addresses as well, and does not depend on any resolver.
    ``tcp:HOST:PORT`` is the address as it was dialed. It counts only if the listener was started with that name
    (``--advertise``), for addresses that a router translates, where the two ends of a socket differ.
    ``unix:DEVICE:INODE`` is the socket file, which is the same in every mount namespace.
    ``memory:NAME`` and ``relay:INCARNATION`` are addresses within a process or of the relay.
    With TLS no name is compared: the certificate identifies the listener, and translated addresses need no settings.
"""

from __future__ import annotations

import hashlib
import hmac
import random
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import TypeAlias
from urllib.parse import quote, unquote

from attrs import define, field, frozen

from fray.errors import Unauthorized

NONCE_BYTES = 16
HEADER_LIMIT_BYTES = 2048
SCHEME = "Fray"
DIAL, LISTEN = "fray handshake 3, dialer", "fray handshake 3, listener"
"""Roles: neither side's proof can be sent back as the other's, nor taken for anything else made with the key."""


def derive_key(secret: bytes, label: str, text: str) -> str:
    """Return the key for ``text`` of the kind ``label``, hexadecimal: the HMAC-SHA256 of both under ``secret``.

    Keys of different kinds differ even if their texts are equal, so an id that a user chose never makes the key of
    something else.
    """
    return hmac.new(secret, _join(label, text), hashlib.sha256).hexdigest()


def prove(key: str, role: str, *subjects: str) -> str:
    """Return the HMAC-SHA256 of the role and all subjects under ``key``, hexadecimal."""
    return hmac.new(key.encode(), _join(role, *subjects), hashlib.sha256).hexdigest()


def _join(*parts: str) -> bytes:
    # With lengths, so that no text can be cut into other parts: some of them come from the peer.
    return b"".join(b"%d:%b" % (len(data), data) for data in (part.encode() for part in parts))


def make_nonce(rng: random.Random) -> str:
    """Return a random number that is used once."""
    # One system call. A token of `fray.model.ids` needs one for each character, half of the time of both sides' proofs.
    return rng.randbytes(NONCE_BYTES).hex()


def matches(proof: str, expected: str) -> bool:
    """Compare in constant time."""
    # As bytes: for text that is not ASCII, which a peer may send, compare_digest raises TypeError.
    return hmac.compare_digest(proof.encode(), expected.encode())


@frozen
class AuthRequest:
    """Authentication of a dialer."""

    key_id: str = ""
    nonce: str = ""
    names: str = ""
    """Names under which it knows the listener, as written by `write_names`."""
    proof: str = ""


@frozen
class AuthResponse:
    """Authentication of a listener."""

    proof: str


class Rejection(Enum):
    """Reason why a listener rejects a dialer; the value is the HTTP status."""

    KEY = 401
    ACCOUNT = 403
    """The dialer runs under another account of the machine."""
    ADDRESS = 421
    """The proof is valid, but was made for another address (HTTP: misdirected request)."""


def write_names(names: Collection[str]) -> str:
    """Return names of a listener as one text without spaces."""
    return ",".join(quote(name, safe=":") for name in names)


def read_names(text: str) -> frozenset[str]:
    """Inverse of `write_names`."""
    return frozenset(unquote(name) for name in text.split(","))


# The dialer ----------------------------------------------------------------------------------------------------------


@define
class DialerProof:
    """Dialer's side of one handshake.

    Args:
        names: of the listener, see the module.
        binding: SHA-256 fingerprint of the certificate that the listener has shown, empty without TLS.
    """

    key_id: str
    _key: str = field(repr=False)
    _names: Collection[str]
    _binding: str = ""
    _subjects: tuple[str, ...] = field(default=(), init=False)

    def answer(self, challenge: str, rng: random.Random) -> AuthRequest:
        """Return the answer to a listener's challenge."""
        nonce, names = make_nonce(rng), write_names(self._names)
        self._subjects = (challenge, nonce, self.key_id, names, self._binding)
        return AuthRequest(self.key_id, nonce, names, prove(self._key, DIAL, *self._subjects))

    def verify(self, response: AuthResponse | None) -> None:
        """Check the listener's proof, after `answer`.

        Raises:
            Unauthorized: no valid proof of the key.
        """
        if response is None or not matches(response.proof, prove(self._key, LISTEN, *self._subjects)):
            raise impostor(self.key_id)


def impostor(key_id: str) -> Unauthorized:
    """Return the error for a listener that has not proven the key."""
    return Unauthorized(f"server failed authentication: it does not have the key {key_id!r}", impostor=True)


# The listener --------------------------------------------------------------------------------------------------------

Authorize: TypeAlias = Callable[[str], str | Sequence[str] | None]
"""Key behind a key id, or all that count, while one is being replaced. None refuses the dialer."""


class KeyRegister:
    """Keys by their ids, an `Authorize` that is also informed of the outcome of each handshake."""

    def __call__(self, key_id: str) -> str | Sequence[str] | None:
        """Return the keys that count."""
        raise NotImplementedError

    def on_outcome(self, key_id: str, remote: str, key: str | None) -> None:
        """Take the key that a dialer at ``remote`` has proven; None: it has proven none and was refused."""

    def on_account_refused(self, remote: str, uid: int) -> None:
        """Take that a dialer at a Unix socket was refused, before any proof, for its account."""


@define
class Challenge:
    """Listener's side of one handshake; see `Authenticator.challenge`."""

    nonce: str
    _authorize: Authorize
    _names: Collection[str]
    _binding: str
    _remote: str
    _answered: bool = field(default=False, init=False)

    def authenticate(self, request: AuthRequest) -> AuthResponse | Rejection:
        """Return the response to a dialer whose answer to this challenge is valid.

        If ``authorize("")`` is the empty string, dialers without any proof are accepted.
        """
        # Jobs never hold the cluster's token: each attempt has a key of its own, derived from its id and the store's
        # secret, so that no key is stored and a leaked one opens one attempt only.
        found = self._authorize(request.key_id)
        # One answer for each challenge, so a connection is one guess.
        if self._answered:
            return Rejection.KEY
        self._answered = True
        subjects = (self.nonce, request.nonce, request.key_id, request.names, self._binding)
        # A string without characters is a key, too, so that `or` would be wrong.
        keys = () if found is None else (found,) if isinstance(found, str) else found
        is_open = found == "" and request.key_id == "" and request.proof == ""
        proven = (key for key in keys if is_open or matches(request.proof, prove(key, DIAL, *subjects)))
        key = next(proven, None)
        if isinstance(self._authorize, KeyRegister):
            self._authorize.on_outcome(request.key_id, self._remote, key)
        if key is None:
            return Rejection.KEY
        # After the proof: without the key, the names of this listener cannot be probed.
        if not is_open and not self._binding and read_names(request.names).isdisjoint(self._names):
            return Rejection.ADDRESS
        return AuthResponse(prove(key, LISTEN, *subjects))


@define
class Authenticator:
    """Listener's side: makes the challenges of its connections."""

    authorize: Authorize
    rng: random.Random

    def challenge(self, names: Collection[str], binding: str = "", remote: str = "", *, nonce: str = "") -> Challenge:
        """Return the challenge for one connection.

        Args:
            names: of this listener, see the module.
            binding: SHA-256 fingerprint of the certificate that it shows there, empty without TLS.
            remote: origin of the connection, for `KeyRegister`.
            nonce: that both sides have from its TLS handshake. Default: a random number, which has to be sent.
        """
        return Challenge(nonce or make_nonce(self.rng), self.authorize, names, binding, remote)

    def on_account_refused(self, remote: str, uid: int) -> None:
        """Report a dialer that gets no challenge, see `KeyRegister.on_account_refused`."""
        if isinstance(self.authorize, KeyRegister):
            self.authorize.on_account_refused(remote, uid)


# As HTTP headers -----------------------------------------------------------------------------------------------------


def write_challenge(nonce: str) -> str:
    """Return the value of the listener's ``WWW-Authenticate`` header."""
    return f"{SCHEME} nonce={nonce}"


def read_challenge(header: str | None) -> str:
    """Inverse of `write_challenge`; empty without a challenge."""
    return _fields(header).get("nonce", "")


def is_challenge_wanted(header: str | None) -> bool:
    """Return whether an ``Authorization`` header announces a proof and does not contain one yet."""
    return (header or "").startswith(SCHEME) and not read_request(header).proof


def write_request(request: AuthRequest) -> str:
    """Return the value of the dialer's ``Authorization`` header."""
    key_id = quote(request.key_id, safe="")
    return f"{SCHEME} id={key_id} nonce={request.nonce} names={request.names} proof={request.proof}"


def read_request(header: str | None) -> AuthRequest:
    """Inverse of `write_request`; anything else is read as a dialer without a proof."""
    fields = _fields(header)
    nonce, names, proof = (fields.get(name, "") for name in ("nonce", "names", "proof"))
    return AuthRequest(unquote(fields.get("id", "")), nonce, names, proof)


def write_response(response: AuthResponse) -> str:
    """Return the value of the listener's ``Fray-Proof`` header."""
    return f"{SCHEME} proof={response.proof}"


def read_response(header: str | None) -> AuthResponse | None:
    """Inverse of `write_response`; None without a proof."""
    fields = _fields(header)
    return AuthResponse(fields["proof"]) if "proof" in fields else None


def _fields(header: str | None) -> dict[str, str]:
    # Cut before it is split: the header comes from an unauthenticated peer.
    parts = (header or "")[:HEADER_LIMIT_BYTES].split(" ")
    return dict(part.split("=", 1) for part in parts[1:] if "=" in part) if parts[0] == SCHEME else {}
