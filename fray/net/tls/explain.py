"""Failed TLS handshakes as errors: what was wrong, and what an operator does about it."""

from __future__ import annotations

import ssl
import time

from fray.errors import ConnectionFailed, ProtocolMismatch, Unauthorized, Unreachable

_NOT_YET_VALID, _EXPIRED = 9, 10
"""Codes of OpenSSL (X509_V_ERR_…)."""
_WRONG_NAME = 62


def explain_dial(error: ssl.SSLError, address: str, certificate: bytes | None = None) -> ConnectionFailed:
    """Return what a dialer reports of its failed handshake.

    Args:
        certificate: of the listener (DER), to say when it is valid.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_verification(error, address, certificate)
    reason = error.reason or ""
    if reason in ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return ProtocolMismatch(
            f"{address} does not speak TLS 1.3, so it is not a listener of this cluster", address=address
        )
    if "ALERT" in reason:
        why = _alert_text(reason)
        return Unreachable(f"{address} refused the TLS connection: {why}", address=address, alert=why)
    return Unreachable(f"{address}: the connection was lost during the TLS handshake", address=address)


def wrong_authority(address: str, pins: tuple[str, ...], shown: str) -> Unauthorized:
    """Return the error of a listener whose certificates have none of the expected fingerprints."""
    expected = " or ".join(f"{pin[:16]}…" for pin in pins)
    return Unauthorized(
        f"{address} is not the expected server: it shows the certificate {shown[:16]}…; expected {expected}, or one "
        "that it has issued. If the certificate authority was replaced, get its fingerprint with `fray ca show`; "
        "otherwise another machine answers at this address",
        address=address,
        impostor=True,
    )


def explain_serve(error: ssl.SSLError) -> str:
    """Return what a listener logs about a dialer's failed handshake."""
    reason = error.reason or ""
    if reason == "HTTP_REQUEST":
        return "it does not use TLS, which this listener requires"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if "ALERT" in reason:
        return f"it does not accept the certificate of this listener: {_alert_text(reason)}"
    return f"no TLS 1.3 handshake: {reason.replace('_', ' ').lower() or error}"


def _explain_verification(
    error: ssl.SSLCertVerificationError, address: str, certificate: bytes | None
) -> ConnectionFailed:
    if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
        # Not Unauthorized, which ends a channel: the clock of one side is wrong, and nothing is proven by that.
        return Unreachable(
            f"{address}: {_validity_text(error, certificate)}", address=address, certificate="not valid now"
        )
    if error.verify_code == _WRONG_NAME:
        return Unauthorized(
            f"{address} is not a controller: its certificate is of this cluster's authority, but of another kind",
            address=address,
            impostor=True,
        )
    return Unauthorized(
        f"{address}: its certificate was not issued by the expected authority ({error.verify_message}). If the "
        "authority was replaced, get its fingerprint with `fray ca show`",
        address=address,
        impostor=True,
    )


def _validity_text(error: ssl.SSLCertVerificationError, certificate: bytes | None) -> str:
    if certificate is None:
        return error.verify_message
    try:
        from fray.net.tls.certificates import read_certificate, validity_text  # 45 ms, after an error only
    except ImportError:  # a job of another Python than the node's
        return error.verify_message
    info, now = read_certificate(certificate), time.time()
    if info.not_before_s <= now <= info.not_after_s:
        return f"the certificate of the authority is not valid now ({error.verify_message})"
    return validity_text(info, now)


def _alert_text(reason: str) -> str:
    return reason.partition("ALERT_")[2].replace("_", " ").lower()
