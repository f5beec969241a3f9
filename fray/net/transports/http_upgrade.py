"""The opening handshake of a WebSocket (RFC 6455, section 4) as bytes. Pure.

Only what Fray's own processes say to one another; a stranger that speaks correctly is understood too.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Mapping

HEAD_LIMIT_BYTES = 16 * 1024
RESOURCE = "/fray"
PROOF = "fray-proof"
"""Header of the listener's proof."""
CHALLENGE = {"WWW-Authenticate": "Fray"}
NO_ENTRY = "A valid key is needed: see FRAY_TOKEN.\n"
_BLANK_LINE = b"\r\n\r\n"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_REASONS = {101: "Switching Protocols", 400: "Bad Request", 401: "Unauthorized"}


class HandshakeLost(Exception):
    """The connection ended, or says something else, before the handshake was over."""

    def __init__(self, why: str, *, foreign: bool) -> None:
        super().__init__(why)
        self.foreign = foreign
        """Somebody is there and speaks no HTTP, or breaks its rules."""


class UpgradeRejected(Exception):
    """The listener has answered, and not with an upgrade."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


def make_key(rng: random.Random) -> str:
    """The dialer's nonce."""
    return base64.b64encode(rng.randbytes(16)).decode()


def accept_of(key: str) -> str:
    """What the listener must answer to the dialer's nonce."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest()).decode()


def write_request(host: str, key: str, headers: Mapping[str, str]) -> bytes:
    """The dialer's head."""
    fixed = {"Host": host, "Upgrade": "websocket", "Connection": "Upgrade"}
    shake = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}
    return _write(f"GET {RESOURCE} HTTP/1.1", {**fixed, **shake, **headers})


def write_response(key: str, headers: Mapping[str, str]) -> bytes:
    """The listener's head; from here on there are frames."""
    fixed = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept_of(key)}
    return _write(_status(101), {**fixed, **headers})


def write_refusal(status: int, headers: Mapping[str, str], body: str) -> bytes:
    """A whole answer that turns the dialer away."""
    more = {"Content-Type": "text/plain", "Content-Length": str(len(body.encode())), "Connection": "close"}
    return _write(_status(status), {**headers, **more}) + body.encode()


def _status(code: int) -> str:
    return f"HTTP/1.1 {code} {_REASONS[code]}"


def _write(first: str, headers: Mapping[str, str]) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + _BLANK_LINE


def split_head(data: bytes, begins: bytes) -> tuple[bytes, bytes] | None:
    """The head in ``data`` and what came behind it; None while it is not whole.

    Args:
        begins: how a head of this kind begins.

    Raises:
        HandshakeLost: this will never be such a head.
    """
    if not data.startswith(begins[: len(data)]):
        raise HandshakeLost("what answers speaks no HTTP", foreign=True)
    head, blank, surplus = data.partition(_BLANK_LINE)
    if not blank and len(data) > HEAD_LIMIT_BYTES:
        raise HandshakeLost("the HTTP head is too long", foreign=True)
    return (head, surplus) if blank else None


def read_request(head: bytes) -> tuple[str, dict[str, str]]:
    """The dialer's nonce and its headers, names in lower case.

    Raises:
        HandshakeLost: it does not ask for a WebSocket of version 13.
    """
    _, headers = _read(head)
    key = headers.get("sec-websocket-key", "")
    if not _upgrades(headers) or not key or headers.get("sec-websocket-version") != "13":
        raise HandshakeLost("the request asks for no WebSocket of version 13", foreign=True)
    return key, headers


def read_response(head: bytes, key: str) -> dict[str, str]:
    """The listener's headers, names in lower case.

    Raises:
        Rejected: it has answered something else.
        HandshakeLost: it has not answered to ``key``.
    """
    first, headers = _read(head)
    status = first.split(" ")[1]
    if status != "101":
        raise UpgradeRejected(int(status) if status.isdecimal() else 0)
    if not _upgrades(headers) or headers.get("sec-websocket-accept") != accept_of(key):
        raise HandshakeLost("what answers has not understood the handshake", foreign=True)
    return headers


def _upgrades(headers: Mapping[str, str]) -> bool:
    tokens = [token.strip().lower() for token in headers.get("connection", "").split(",")]
    return headers.get("upgrade", "").lower() == "websocket" and "upgrade" in tokens


def _read(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise HandshakeLost("what answers breaks the rules of HTTP", foreign=True)
        headers[name.lower()] = value.strip()
    return first, headers
