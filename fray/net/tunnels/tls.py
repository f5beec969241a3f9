"""TLS inside a tunnel, so that the relay can neither read nor change what it passes on. Pure: bytes in, bytes out.

The opening of the tunnel carries the dialer's first message of the TLS handshake and its acceptance the listener's
answer, so TLS adds no round trip. The dialer accepts the one certificate whose fingerprint the address has.

Contract: a message is sealed when its place among the others is decided, and opened in that order. TLS protects a
stream of bytes, and the relay decides where a message of the tunnel ends: so the length of each message is inside.
"""

from __future__ import annotations

import ssl
import struct

from fray.errors import ConnectionFailed, ProtocolMismatch, Unauthorized
from fray.net.codec import Bytes
from fray.net.tls.identity import HOST_NAME, fingerprint, unverified_context
from fray.net.transports.tls_listener import TlsServer
from fray.net.transports.tls_socket import RECORD_BYTES

_LENGTH = struct.Struct("<I")


class TunnelTls:
    """TLS of one end of a tunnel; see `dial_tls` and `accept_tls`.

    Args:
        remote: address of the far end, for messages.
    """

    def __init__(self, remote: str) -> None:
        self._remote = remote
        self.binding = ""
        """SHA-256 fingerprint of the listener's certificate."""
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls: ssl.SSLObject
        self._is_established = False
        self._unsent = b""
        """End of the dialer's handshake, until its first message."""

    def begin(self, received: Bytes = b"") -> bytes:
        """Take the far end's part of the handshake, and return this end's.

        Raises:
            ConnectionFailed: the handshake failed.
        """
        self.incoming.write(received)
        try:
            self.tls.do_handshake()
            self._is_established = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise self._broken(error) from None
        return self.outgoing.read()

    def finish(self, received: Bytes, pins: tuple[str, ...]) -> None:
        """Complete the dialer's handshake. What it still has to send goes along with the first message.

        Raises:
            Unauthorized: another process, or the relay itself, has answered.
            ConnectionFailed: the handshake failed.
        """
        # Never without TLS: the relay could have left it out.
        if not received:
            raise Unauthorized(
                f"{self._remote} answers without TLS, although its address has the fingerprint {pins[0][:16]}…: "
                "the relay, or another process, answers in its place",
                impostor=True,
            )
        last = self.begin(received)
        if not self._is_established:
            raise ConnectionFailed(f"the TLS handshake through {self._remote} failed: its answer is incomplete")
        shown = fingerprint(self.tls.getpeercert(binary_form=True) or b"")
        if shown not in pins:
            raise Unauthorized(
                f"{self._remote} is not the expected process: it shows the certificate {shown[:16]}…, but its address "
                f"has the fingerprint {pins[0][:16]}…: the relay, or another process, answers in its place",
                impostor=True,
            )
        self.binding, self._unsent = shown, last

    def seal(self, message: bytes) -> bytes:
        """Return what to send for a message.

        Raises:
            ConnectionFailed: the connection is broken.
        """
        view = memoryview(message)
        first = RECORD_BYTES - _LENGTH.size
        try:
            # The length is in the first record, with as much of the message as fits beside it.
            self.tls.write(_LENGTH.pack(len(view)) + message[:first])
            at = first
            while at < len(view):
                at += self.tls.write(view[at:])
        except ssl.SSLError as error:
            raise self._broken(error) from None
        last, self._unsent = self._unsent, b""
        return last + self.outgoing.read()

    def open(self, sealed: Bytes) -> bytes:
        """Return the message that the far end has sealed.

        Raises:
            ConnectionFailed: it was changed on the way.
        """
        if not self._is_established:
            # The listener's handshake ends with the dialer's first message.
            self.begin(sealed)
            if not self._is_established:
                raise ConnectionFailed(f"the TLS handshake through {self._remote} failed: its end is missing")
        else:
            self.incoming.write(sealed)
        # What is inside is a little shorter.
        plain = memoryview(bytearray(len(sealed)))
        size = 0
        try:
            while count := self.tls.read(len(plain) - size, plain[size:]):
                size += int(count)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise self._broken(error) from None
        if size < _LENGTH.size or _LENGTH.unpack_from(plain)[0] != size - _LENGTH.size:
            raise ConnectionFailed(f"a message through {self._remote} was cut or joined with another on the way")
        return bytes(plain[_LENGTH.size : size])

    def _broken(self, error: ssl.SSLError) -> ConnectionFailed:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if self._is_established:
            return ConnectionFailed(f"what came through {self._remote} was changed on the way ({reason})")
        return ConnectionFailed(f"the TLS handshake through {self._remote} failed: {reason}")


def dial_tls(remote: str) -> TunnelTls:
    """Return the dialer's end."""
    end = TunnelTls(remote)
    # Each time: a context takes a fraction of a millisecond, and tunnels are rare.
    end.tls = unverified_context().wrap_bio(end.incoming, end.outgoing, server_hostname=HOST_NAME)
    return end


def accept_tls(server: TlsServer, remote: str) -> TunnelTls:
    """Return the listener's end."""
    end = TunnelTls(remote)
    end.tls, end.binding = server.accept_bio(end.incoming, end.outgoing)
    return end


def missing_tls(address: str) -> ProtocolMismatch:
    """Return the refusal of a dialer that has not begun a TLS handshake."""
    return ProtocolMismatch(
        f"{address} accepts only TLS; dial it as its registry entry names it, {address}#FINGERPRINT", address=address
    )
