"""Makes and reads certificates (X.509): of authorities, controllers, nodes, and hosts of actors.

Keys are ECDSA P-256. Importing this takes 45 ms, for `cryptography`: do it where a certificate is made or read. Times
are seconds since the epoch, by the clock of the caller.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from typing import TypeAlias

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fray.errors import InvalidRequest
from fray.net.tls.identity import CONTROLLER_NAME, HOST_NAME, NODE_URI, TlsIdentity, fingerprint, read_pem

SKEW_S = 600.0
"""A certificate is valid from so long before it was issued: the tolerated difference of two machines' clocks."""
LIFE_S = 24 * 3600.0
"""Validity of the certificates of controllers and nodes, which are renewed at half of it."""
AUTHORITY_LIFE_S = 10 * 365 * 86400.0
HOST_LIFE_S = 10 * 365 * 86400.0
"""Validity of the certificate of an actor host. Callers pin it and its process ends sooner, so no date ends it."""
REQUEST_LIMIT_BYTES = 8192

PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@frozen
class CertificateInfo:
    """Content of a certificate.

    Args:
        names: its DNS names and URIs.
        not_before_s, not_after_s: first and last second of its validity.
    """

    subject: str
    issuer: str
    names: tuple[str, ...]
    not_before_s: float
    not_after_s: float
    fingerprint: str
    is_authority: bool

    @property
    def half_life_s(self) -> float:
        """Time of its renewal, when half of its validity has passed since it was issued."""
        issued_s = self.not_before_s + SKEW_S
        return issued_s + (self.not_after_s - issued_s) / 2


# Making --------------------------------------------------------------------------------------------------------------


def make_key() -> bytes:
    """Return a new key, in PEM."""
    return _key_text(ec.generate_private_key(ec.SECP256R1()))


def make_authority(name: str, now: float, life_s: float = AUTHORITY_LIFE_S) -> TlsIdentity:
    """Return a new authority, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _sign_authority(_name(name), key.public_key(), _name(name), key, now, life_s)
    return TlsIdentity(_text(certificate), _key_text(key))


def cross_sign(new: TlsIdentity, old: TlsIdentity, now: float) -> bytes:
    """Return a certificate (PEM) by which those that trust the old authority only accept certificates of the new one,
    until the old one expires."""
    one, other = _read(new.chain), _read(old.chain)
    life_s = other.not_valid_after_utc.timestamp() - now
    public: ec.EllipticCurvePublicKey = one.public_key()  # type: ignore[assignment]
    return _text(_sign_authority(one.subject, public, other.subject, _read_key(old.key), now, life_s))


def has_same_key(one: bytes, other: bytes) -> bool:
    """Return whether two certificates (PEM; of a chain the first) are for the same public key."""
    return bool(_read(one).public_key() == _read(other).public_key())


def make_request(key: bytes) -> bytes:
    """Return a signing request (PEM) for the key. It names nothing: the authority knows who has sent it."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(_read_key(key), _hash(key))
    return request.public_bytes(Encoding.PEM)


def issue_controller(authority: TlsIdentity, now: float, life_s: float = LIFE_S) -> TlsIdentity:
    """Return a controller's certificate with a key of its own; the authority's certificate is in its chain."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(CONTROLLER_NAME)]
    certificate = _issue(
        authority, "fray controller", names, key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH, now, life_s
    )
    return TlsIdentity(certificate + authority.chain, _key_text(key))


def issue_node(authority: TlsIdentity, node: str, request: bytes, now: float, life_s: float = LIFE_S) -> bytes:
    """Return a certificate (PEM) for the node that has sent the signing request.

    Raises:
        InvalidRequest: the request is damaged, too long, or not signed by its key.
    """
    # For clients only: what it opens is the controller, and it cannot pass for one.
    names = [x509.UniformResourceIdentifier(NODE_URI + node)]
    public = _read_request(request)
    return _issue(authority, "fray node", names, public, ExtendedKeyUsageOID.CLIENT_AUTH, now, life_s)


def issue_server(authority: TlsIdentity, hosts: Sequence[str], now: float, life_s: float = HOST_LIFE_S) -> TlsIdentity:
    """Return a certificate with a key of its own for a server that is reached by these names and IP addresses.

    Clients verify it as on the web; the authority's certificate is in its chain.

    Raises:
        InvalidRequest: a name cannot be in a certificate.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_server_name(host) for host in hosts]
    certificate = _issue(authority, "fray", names, key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH, now, life_s)
    return TlsIdentity(certificate + authority.chain, _key_text(key))


def _server_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host.encode("idna").decode())
    except ValueError as error:
        raise InvalidRequest(f"invalid host {host!r}: {error}") from None


def make_host(now: float, life_s: float = HOST_LIFE_S) -> TlsIdentity:
    """Return a certificate for the actors of one process, signed by itself, which callers know by its fingerprint."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name("fray actors"), key.public_key(), _name("fray actors"), now, life_s)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST_NAME)]), critical=False)
    return TlsIdentity(_text(builder.sign(key, hashes.SHA256())), _key_text(key))


def _issue(
    authority: TlsIdentity,
    subject: str,
    names: Sequence[x509.GeneralName],
    public: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey,
    usage: x509.ObjectIdentifier,
    now: float,
    life_s: float,
) -> bytes:
    issuer = _read(authority.chain)
    # Not longer than the authority itself is valid, which would only be a worse error later.
    life_s = min(life_s, issuer.not_valid_after_utc.timestamp() - now)
    builder = (
        _builder(_name(subject), public, issuer.subject, now, life_s)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(_issuer_id(issuer), critical=False)
    )
    return _text(builder.sign(_read_key(authority.key), _hash(authority.key)))


def _sign_authority(
    subject: x509.Name,
    public: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    key: PrivateKey,
    now: float,
    life_s: float,
) -> x509.Certificate:
    own = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    builder = (
        _builder(subject, public, issuer, now, life_s)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(own, critical=False)
    )
    return builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())


def _builder(
    subject: x509.Name,
    public: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey,
    issuer: x509.Name,
    now: float,
    life_s: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now - SKEW_S))
        .not_valid_after(_time(now + life_s))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _issuer_id(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    # By the identifier that the issuer's certificate has, which need not be computed in the same way elsewhere.
    try:
        own = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())  # type: ignore[arg-type]
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _hash(key: bytes) -> hashes.SHA256 | None:
    # Ed25519 has a hash of its own.
    return None if isinstance(_read_key(key), ed25519.Ed25519PrivateKey) else hashes.SHA256()


# Reading -------------------------------------------------------------------------------------------------------------


def read_certificate(certificate: bytes) -> CertificateInfo:
    """Return the content of a certificate in DER, or of the first one in a PEM text.

    Raises:
        InvalidRequest: it is damaged.
    """
    found = _read(certificate)
    return CertificateInfo(
        subject=found.subject.rfc4514_string(),
        issuer=found.issuer.rfc4514_string(),
        names=_names(found),
        not_before_s=found.not_valid_before_utc.timestamp(),
        not_after_s=found.not_valid_after_utc.timestamp(),
        fingerprint=fingerprint(found.public_bytes(Encoding.DER)),
        is_authority=_is_authority(found),
    )


def check_identity(identity: TlsIdentity, where: str, now: float, *, authority: bool) -> CertificateInfo:
    """Return the content of a certificate that an operator has given, after checking that it can be used.

    Args:
        where: names the files, for the message.

    Raises:
        InvalidRequest: it is damaged, of another key, not valid now, or not (or only) an authority.
    """
    try:
        found, key = _read(identity.chain), _read_key(identity.key)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}") from None
    if found.public_key() != key.public_key():
        raise InvalidRequest(f"{where}: the key does not belong to the certificate {found.subject.rfc4514_string()}")
    info = read_certificate(identity.chain)
    if info.is_authority != authority:
        what = (
            "an authority: its basicConstraints must have CA:TRUE" if authority else "for one server, but for signing"
        )
        raise InvalidRequest(f"{where}: the certificate {info.subject} is not {what}")
    if not info.not_before_s <= now <= info.not_after_s:
        raise InvalidRequest(f"{where}: {validity_text(info, now)}")
    return info


def validity_text(info: CertificateInfo, now: float) -> str:
    """Return the sentence that says why a certificate is not valid now, with the difference of the clocks."""
    clock = f"this machine's clock says {_clock_text(now)}"
    if now < info.not_before_s:
        # Its issuer's clock was at least so far ahead when it was issued.
        least = duration_text(info.not_before_s + SKEW_S - now)
        return (
            f"the certificate is not valid before {_clock_text(info.not_before_s)}, but {clock}: the clocks differ by "
            f"{least} or more (up to {SKEW_S / 60:.0f} min are tolerated); set them, for example with NTP"
        )
    return (
        f"the certificate expired at {_clock_text(info.not_after_s)}, and {clock}, "
        f"{duration_text(now - info.not_after_s)} later: if the clocks are right it has not been renewed"
    )


def _clock_text(seconds: float) -> str:
    return _time(seconds).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration_text(seconds: float) -> str:
    """Return a duration such as ``45 s``, ``25 min``, ``3 h`` or ``2 days``."""
    for unit_s, unit in ((2 * 86400, "days"), (7200, "h"), (120, "min")):
        if seconds >= unit_s:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.0f} s"


def _read(certificate: bytes) -> x509.Certificate:
    der = certificate if certificate.startswith(b"\x30\x82") else read_pem(certificate)[0]
    try:
        return x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise InvalidRequest(f"a damaged certificate: {error}") from None


def _read_key(text: bytes) -> PrivateKey:
    try:
        key = serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidRequest(f"the key cannot be read: {error}; expected PEM without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
        raise InvalidRequest("the key must be ECDSA (P-256) or Ed25519")
    return key


def _read_request(text: bytes) -> ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey:
    if len(text) > REQUEST_LIMIT_BYTES:
        raise InvalidRequest(f"a signing request of {len(text)} bytes is over the limit of {REQUEST_LIMIT_BYTES}")
    try:
        request = x509.load_pem_x509_csr(text)
        public = request.public_key()
        valid = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise InvalidRequest(f"a damaged signing request: {error}") from None
    # The signature shows that the sender has the key.
    if not valid or not isinstance(public, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
        raise InvalidRequest("a signing request must be signed by its own key, ECDSA or Ed25519")
    return public


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(
        str(name.value) for name in names if isinstance(name.value, str | ipaddress.IPv4Address | ipaddress.IPv6Address)
    )


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _text(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _key_text(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
