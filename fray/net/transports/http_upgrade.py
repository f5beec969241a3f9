"""Opening handshake of a WebSocket (RFC 6455, section 4) as bytes. Pure.

Only the parts that Fray's own processes use; other correct implementations are understood too.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Mapping
from types import MappingProxyType

HEAD_LIMIT_BYTES = 16 * 1024
RESOURCE = "/fray"
PROOF = "fray-proof"
"""Name of the header with the listener's proof."""
CHALLENGE = "WWW-Authenticate"
"""Name of the header with the listener's challenge."""
BODIES = {
    401: "authentication required: set FRAY_TOKEN or pass token=\n",
    403: "this socket admits its own account and root alone\n",
    421: "reached at an address that is not known here: start this listener with --advertise HOST:PORT\n",
    426: "this listener requires TLS: write its address with the fingerprint of its certificate authority\n",
}
BLANK_LINE = b"\r\n\r\n"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_REASONS = {
    101: "Switching Protocols",
    401: "Unauthorized",
    403: "Forbidden",
    421: "Misdirected Request",
    426: "Upgrade Required",
}


class HandshakeLost(Exception):
    """The connection ended, or the peer sent something else, before the handshake was complete."""

    def __init__(self, why: str, *, foreign: bool) -> None:
        super().__init__(why)
        self.foreign = foreign
        """The peer does not speak HTTP, or violates it."""


class UpgradeRejected(Exception):
    """The listener has answered with another status than the upgrade."""

    def __init__(self, status: int, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.headers = headers
        """Names in lower case."""


def make_key(rng: random.Random) -> str:
    """Return the dialer's nonce."""
    return base64.b64encode(rng.randbytes(16)).decode()


def accept_of(key: str) -> str:
    """Return the listener's answer to the dialer's nonce."""
    # SHA-1 is prescribed by RFC 6455 and protects nothing here; builds for FIPS refuse it without this flag.
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest()).decode()


def write_request(host: str, key: str, headers: Mapping[str, str]) -> bytes:
    """Return the dialer's head."""
    fixed = {"Host": host, "Upgrade": "websocket", "Connection": "Upgrade"}
    shake = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}
    return _write(f"GET {RESOURCE} HTTP/1.1", {**fixed, **shake, **headers})


def write_response(key: str, headers: Mapping[str, str]) -> bytes:
    """Return the listener's head, after which frames follow."""
    fixed = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept_of(key)}
    return _write(_status(101), {**fixed, **headers})


def write_challenge(challenge: str) -> bytes:
    """Return a whole answer after which the dialer may send another request, with its proof."""
    return _write(_status(401), {CHALLENGE: challenge, "Content-Length": "0"})


def write_refusal(status: int) -> bytes:
    """Return a whole answer that rejects the dialer."""
    body = BODIES[status].encode()
    headers = {"Content-Type": "text/plain", "Content-Length": str(len(body)), "Connection": "close"}
    return _write(_status(status), {CHALLENGE: "Fray", **headers} if status == 401 else headers) + body


def _status(code: int) -> str:
    return f"HTTP/1.1 {code} {_REASONS[code]}"


def _write(first: str, headers: Mapping[str, str]) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + BLANK_LINE


def split_head(data: bytes, first_bytes: bytes) -> tuple[bytes, bytes] | None:
    """Return the head in ``data`` and the bytes after it; None while it is incomplete.

    Args:
        first_bytes: beginning of every head of this kind.

    Raises:
        HandshakeLost: not such a head.
    """
    # Tested from the first byte on: a different protocol is recognized at once, not at the limit or by a time-out.
    if not data.startswith(first_bytes[: len(data)]):
        raise HandshakeLost("the answer is not HTTP", foreign=True)
    head, blank, surplus = data.partition(BLANK_LINE)
    if not blank and len(data) > HEAD_LIMIT_BYTES:
        raise HandshakeLost("the HTTP head is too long", foreign=True)
    return (head, surplus) if blank else None


def read_request(head: bytes) -> tuple[str, dict[str, str]]:
    """Return the dialer's nonce and its headers, names in lower case.

    Raises:
        HandshakeLost: not a request for a WebSocket of version 13.
    """
    # The path is not checked: nothing else is served here.
    _, headers = _read(head)
    key = headers.get("sec-websocket-key", "")
    if not _upgrades(headers) or not key or headers.get("sec-websocket-version") != "13":
        raise HandshakeLost("not a request for a WebSocket of version 13", foreign=True)
    return key, headers


def read_response(head: bytes, key: str) -> dict[str, str]:
    """Return the listener's headers, names in lower case.

    Raises:
        UpgradeRejected: another status.
        HandshakeLost: the answer does not belong to ``key``.
    """
    first, headers = _read(head)
    status = first.split(" ")[1]
    # Status 0 for anything that is not a number: still an HTTP server, and not one of Fray.
    if status != "101":
        raise UpgradeRejected(int(status) if status.isdecimal() else 0, headers)
    if not _upgrades(headers) or headers.get("sec-websocket-accept") != accept_of(key):
        raise HandshakeLost("invalid answer to the handshake", foreign=True)
    return headers


def _upgrades(headers: Mapping[str, str]) -> bool:
    # A list: proxies and browsers also send "keep-alive, Upgrade".
    tokens = [token.strip().lower() for token in headers.get("connection", "").split(",")]
    return headers.get("upgrade", "").lower() == "websocket" and "upgrade" in tokens


def _read(head: bytes) -> tuple[str, dict[str, str]]:
    # Latin-1 decodes every byte, so no head fails here.
    first, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        # A name with spaces is a folded line or an attempt at request smuggling; implementations disagree about both.
        if not colon or not name or name != name.strip():
            raise HandshakeLost("the answer is not valid HTTP", foreign=True)
        headers[name.lower()] = value.strip()
    return first, headers
