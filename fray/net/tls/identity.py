"""Certificates with their keys, fingerprints, and the contexts of both sides of a TLS connection."""

from __future__ import annotations

import hashlib
import json
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import field, frozen

from fray.errors import InvalidRequest

CONTROLLER_NAME = "controller.fray"
"""DNS name in the certificate of every controller. Dialers require it, so that a node, whose certificate is of the same
authority, cannot pass for the controller. The DNS does not have it: the address of a controller may change."""
HOST_NAME = "actors.fray"
"""DNS name in the certificates that hosts of actors make for themselves; callers pin their fingerprint."""
NODE_URI = "fray:node/"
"""Prefix of the URI in the certificate of a node; the node's name follows."""

SESSION_CHALLENGE = "fray-session-challenge"
"""ALPN name by which both sides of a connection agree to take the challenge of `fray.net.auth` from the TLS handshake,
which saves a round trip. The release before does not offer it: there the listener sends a challenge."""

IDENTITY_VARIABLE = "FRAY_HOST_IDENTITY"
"""Variable with the certificate of a process that cannot make it itself, see `take_identity`."""

PINS_LIMIT = 2
"""Fingerprints that a dialer accepts at a time: while an authority is replaced there are two."""
FINGERPRINT_LENGTH = 64


@frozen
class TlsIdentity:
    """A certificate, with what peers need to verify it, and its key; all in PEM.

    Args:
        chain: the certificate, followed by those of its authorities.
    """

    chain: bytes
    key: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, hexadecimal."""
        return fingerprint(read_pem(self.chain)[0])


def identity_text(identity: TlsIdentity) -> str:
    """Return the value of `IDENTITY_VARIABLE`, one line."""
    return json.dumps([identity.chain.decode(), identity.key.decode()])


def take_identity() -> TlsIdentity | None:
    """Return the certificate that the node has made for this process, and remove it from the environment; None: this
    process makes its own.

    A job may run in another Python than its node, or in a container. Packages that are written in Python alone are
    shared with the node; the compiled ones of `cryptography` fit one Python.
    """
    text = os.environ.pop(IDENTITY_VARIABLE, "")
    if not text:
        return None
    chain, key = json.loads(text)
    return TlsIdentity(chain.encode(), key.encode())


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate in DER, hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def check_fingerprint(text: str, where: str) -> str:
    """Return the fingerprint in lower case and without the colons that other tools write.

    Raises:
        InvalidRequest: not a SHA-256.
    """
    plain = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if len(plain) != FINGERPRINT_LENGTH or not all(character in "0123456789abcdef" for character in plain):
        raise InvalidRequest(
            f"{where}: {text!r} is not a fingerprint: expected the 64 hexadecimal digits that `fray ca show` prints"
        )
    return plain


def read_pem(text: bytes) -> list[bytes]:
    """Return the certificates in a PEM text as DER, in order.

    Raises:
        InvalidRequest: there is none, or one is damaged.
    """
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        parts = text.decode("ascii").split(begin)[1:]
        found = [ssl.PEM_cert_to_DER_cert(begin + part.split(end)[0] + end) for part in parts]
    except ValueError as error:
        raise InvalidRequest(f"a damaged certificate: {error}; expected PEM text") from None
    if not found:
        raise InvalidRequest(f"no certificate found; expected PEM text with {begin}")
    return found


def write_pem(certificates: Sequence[bytes]) -> bytes:
    """Inverse of `read_pem`."""
    return "".join(map(ssl.DER_cert_to_PEM_cert, certificates)).encode()


# Contexts ------------------------------------------------------------------------------------------------------------


def server_context(identity: TlsIdentity, client_authorities: Sequence[bytes] = ()) -> ssl.SSLContext:
    """Return the context of a listener.

    Args:
        client_authorities: certificates in DER. A dialer may show a certificate that one of them has issued; any other
            is refused. None: dialers are not asked for one.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    # Sessions are not resumed: a ticket costs each connection a message, and connections here are long.
    context.num_tickets = 0
    if client_authorities:
        context.verify_mode = ssl.CERT_OPTIONAL
        _trust(context, client_authorities)
    return context


def client_context(authorities: Sequence[bytes], identity: TlsIdentity | None = None) -> ssl.SSLContext:
    """Return the context of a dialer that accepts controllers with a certificate of one of these authorities (DER)."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    _trust(context, authorities)
    return context


def unverified_context() -> ssl.SSLContext:
    """Return the context of a dialer that compares fingerprints itself, after the handshake."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, None)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(protocol: int, identity: TlsIdentity | None) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Both sides are Fray: older versions would only be ways to a weaker connection.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if "tls-unique" in ssl.CHANNEL_BINDING_TYPES:
        context.set_alpn_protocols([SESSION_CHALLENGE])
    if identity is not None:
        with _as_file(identity.key + b"\n" + identity.chain) as path:
            context.load_cert_chain(path)
    return context


def _trust(context: ssl.SSLContext, authorities: Sequence[bytes]) -> None:
    # An authority of the lab may itself be issued by another one, which need not be here.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=b"".join(authorities))


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield the path of a file in memory, since `ssl` reads keys from files only, and keys should be on no disk."""
    descriptor = os.memfd_create("fray-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
