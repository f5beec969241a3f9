"""WebSocket frames (RFC 6455, section 5) to messages and back. Pure.

Only the parts that Fray needs: binary messages, control frames, no extensions. A client's frames carry a masking key of
zero, which is legal and leaves the payload as it is: the key protects proxies from scripts in browsers, which are not
involved here. Frames of other clients are read with any key.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias

from attrs import frozen

from fray.errors import MessageTooLarge, ProtocolMismatch

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
FIN = 0x80
MASKED = 0x80
NO_KEY = b"\0\0\0\0"
DIRECT_FROM_BYTES = 16 * 1024
"""Missing bytes from which on the rest of a frame is received straight into its place."""
_SHORT = struct.Struct("!BB")
_MIDDLE = struct.Struct("!BBH")
_LONG = struct.Struct("!BBQ")

TOO_LARGE, PROTOCOL_ERROR, NOT_BINARY, NORMAL = 1009, 1002, 1003, 1000


@frozen
class Control:
    """A ping, pong or close frame."""

    opcode: int
    payload: bytes


UNFINISHED = Control(CONTINUATION, b"")
"""Result for a frame that does not complete its message."""


def head(opcode: int, size: int, masked: bool) -> bytes:
    """Return the bytes in front of a payload of ``size`` bytes in a frame of its own."""
    mask = MASKED if masked else 0
    if size < 126:
        start = _SHORT.pack(FIN | opcode, mask | size)
    elif size < 65536:
        start = _MIDDLE.pack(FIN | opcode, mask | 126, size)
    else:
        start = _LONG.pack(FIN | opcode, mask | 127, size)
    return start + NO_KEY if masked else start


def close_frame(code: int, reason: str, masked: bool) -> bytes:
    """Return a whole close frame; ``reason`` is truncated to 123 bytes."""
    # A control frame has at most 125 bytes of payload, two of which are the code.
    payload = code.to_bytes(2, "big") + reason.encode()[:123]
    return head(CLOSE, len(payload), masked) + payload


def read_close(payload: bytes) -> tuple[int, str]:
    """Return code and reason of a close frame (1005 without a code)."""
    if len(payload) < 2:
        return 1005, ""
    # The reason may have been cut within a character.
    return int.from_bytes(payload[:2], "big"), payload[2:].decode(errors="replace")


def unmask(payload: bytes | bytearray | memoryview, key: bytes) -> bytes:
    """Return ``payload`` without the mask ``key`` (four bytes)."""
    size = len(payload)
    # Two large integers instead of a loop over bytes: only clients that are not Fray's own mask with a key.
    stream = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")).to_bytes(size, "big")


class PrefixOnly(bytes):
    """First bytes of a message whose rest was received into the buffer of `Reader.place`."""

    __slots__ = ()


Place: TypeAlias = Callable[[bytes, int], memoryview | None]
"""Callback with the first bytes and the size of a large message: returns the buffer for the rest; None: no buffer."""


class Reader:
    """Incremental parser of a byte stream.

    Args:
        masked: whether the other side must mask (it is the client).
        limit_bytes: limit of one message.
    """

    def __init__(self, *, masked: bool, limit_bytes: int, data: bytes = b"") -> None:
        self._masked = masked
        self._limit_bytes = limit_bytes
        self._data = data
        self._at = 0
        self._gathered: bytearray | None = None
        """Beginning of an incomplete message; None between messages."""
        self.place: Place | None = None
        self.place_bytes = 0
        """Number of bytes that `place` needs."""
        self._direct: bytearray | memoryview | None = None
        self._start: bytes | None = None
        """First bytes of the message whose rest is received into `_direct`, if `place` returned a buffer."""
        self._filled = 0
        self._direct_head = (0, NO_KEY)

    def feed(self, data: bytes) -> None:
        """Add more bytes of the stream."""
        # Only the beginning of a frame is copied again; the rest of a large one is received directly (`_go_direct`).
        if self._at < len(self._data):
            self._data = self._data[self._at :] + data
        else:
            self._data = data
        self._at = 0

    def direct(self) -> memoryview | None:
        """Return where to receive the next bytes of an incomplete large frame (then call `filled`); None: into a new
        buffer."""
        return None if self._direct is None else memoryview(self._direct)[self._filled :]

    def take_hint(self) -> bool:
        """Return once whether the last large message was received into its place: another one may follow at once."""
        start, self._start = self._start, None
        return start is not None

    def filled(self, count: int) -> None:
        """Record that ``count`` bytes were received into `direct`."""
        self._filled += count

    def next(self) -> bytes | bytearray | Control | None:
        """Return the next message or control frame; None when more bytes are needed.

        Raises:
            ProtocolMismatch: a protocol violation (``details['code']`` is the close code).
            MessageTooLarge: a message over the limit.
        """
        message: bytes | bytearray | Control | None = UNFINISHED
        while message is UNFINISHED:
            if self._direct is not None:
                message = self._next_direct()
                continue
            data, at = self._data, self._at
            have = len(data)
            if have - at < 2:
                return None
            first, second = data[at], data[at + 1]
            body = at + 2
            size = second & 127
            if size >= 126:
                body += 2 if size == 126 else 8
                # The extended size itself is not complete yet.
                if have < body:
                    return None
                size = int.from_bytes(data[at + 2 : body], "big")
            if second & MASKED:
                body += 4
            # One test for the usual frame, a whole binary message; all others are checked in detail.
            if first != FIN | BINARY or self._gathered is not None or (second >= MASKED) is not self._masked:
                self._check(first, second, size)
            # By the announced size, before memory is allocated for it.
            if size > self._limit_bytes:
                raise self._too_large(size)
            end = body + size
            if have < end:
                self._go_direct(first, body, end)
                return None
            self._at = end
            payload = data[body:end]
            # With Fray's key of zero the payload is used as it is, without a pass over it.
            if second & MASKED and (key := data[body - 4 : body]) != NO_KEY:
                payload = unmask(payload, key)
            if first == FIN | BINARY:
                return payload
            message = self._assemble(first, payload)
            # A loop: a peer may cut a message into more frames than a stack is deep.
        return message

    def _go_direct(self, first: int, body: int, end: int) -> None:
        have = len(self._data)
        # For a small rest, appending it costs less than another buffer. With an incomplete head the key is not known
        # yet.
        if end - have < DIRECT_FROM_BYTES or body > have:
            return
        self._start = None
        key = self._data[body - 4 : body] if self._masked else NO_KEY
        if self.place is not None and first == FIN | BINARY and self._gathered is None:
            if have - body < self.place_bytes:
                return
            # A masked payload would have to be copied anyway.
            if key == NO_KEY:
                start = self._data[body : body + self.place_bytes]
                self._direct = self.place(start, end - body)
                if self._direct is not None:
                    self._start = start
                    body += self.place_bytes
        if self._direct is None:
            self._direct = bytearray(end - body)
        self._filled = have - body
        self._direct[: self._filled] = memoryview(self._data)[body:]
        self._direct_head = first, key
        # Reads now end with this frame, so nothing of the next one has to be moved.
        self._data, self._at = b"", 0

    def _next_direct(self) -> bytes | bytearray | Control | None:
        payload = self._direct
        if payload is None or self._filled < len(payload):
            return None
        self._direct = None
        # A place that the callback chose: its owner knows what it holds, so only the beginning is returned.
        if isinstance(payload, memoryview):
            return PrefixOnly(self._start or b"")
        return self._whole(payload)

    def _whole(self, payload: bytes | bytearray) -> bytes | bytearray | Control | None:
        first, key = self._direct_head
        if key != NO_KEY:
            payload = unmask(payload, key)
        return payload if first == FIN | BINARY and self._gathered is None else self._assemble(first, payload)

    def _assemble(self, first: int, payload: bytes | bytearray) -> bytes | bytearray | Control | None:
        opcode = first & 15
        # Control frames may stand between the frames of a message (section 5.4).
        if opcode >= CLOSE:
            return Control(opcode, bytes(payload))
        if self._gathered is None:
            self._gathered = bytearray()
        # The limit holds for the message, not for its frames.
        if len(self._gathered) + len(payload) > self._limit_bytes:
            raise self._too_large(len(self._gathered) + len(payload))
        # Not a list of frames: any number of them may be empty.
        self._gathered += payload
        if not first & FIN:
            return UNFINISHED
        message, self._gathered = self._gathered, None
        return message

    def _check(self, first: int, second: int, size: int) -> None:
        opcode = first & 15
        # RFC 6455 demands masks of clients and forbids them to servers; section 5.1 closes the connection otherwise.
        if bool(second & MASKED) is not self._masked:
            raise protocol_violation("a frame is masked" if second & MASKED else "a frame of the client is not masked")
        if first & 0x70:
            raise protocol_violation("a frame uses an extension that was not negotiated")
        if opcode >= CLOSE:
            if opcode > PONG or not first & FIN or size > 125:
                raise protocol_violation("a control frame is malformed")
        elif opcode == TEXT:
            raise protocol_violation("a text message was received; only binary ones are supported", NOT_BINARY)
        elif opcode not in (CONTINUATION, BINARY) or (opcode == CONTINUATION) is (self._gathered is None):
            raise protocol_violation("a frame is out of order")

    def _too_large(self, size: int) -> MessageTooLarge:
        return MessageTooLarge(
            f"the peer sent a transport message of {size} bytes, the limit is {self._limit_bytes}",
            size_bytes=size,
            limit_bytes=self._limit_bytes,
        )


def protocol_violation(what: str, code: int = PROTOCOL_ERROR) -> ProtocolMismatch:
    """Return the error for a violation of the WebSocket protocol."""
    return ProtocolMismatch(f"the peer violates the WebSocket protocol: {what}", code=code)
