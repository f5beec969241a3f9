"""TLS on a non-blocking socket, with the methods and errors of a plain one.

`TlsSocket` raises BlockingIOError where OpenSSL wants to wait, so `fray.net.transports.websocket_transport` and the
handshakes work on it as on any socket: calls that need not wait cost no task switch and no second buffer.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import trio

from fray.net.tls.identity import SESSION_CHALLENGE, fingerprint

RECORD_BYTES = 16 * 1024
"""Content of one TLS record at most."""
_WANTS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
URIS_LIMIT = 1024
"""Certificates whose URIs are remembered."""
_uris: dict[bytes, tuple[str, ...]] = {}
"""URIs by certificate (DER)."""


class TlsSocket(ssl.SSLSocket):
    """A TLS connection. Make it with `wrap`, which takes over the socket."""

    _begun: bytes = b""
    """Content of the record that the kernel did not take."""
    binding: str = ""
    """SHA-256 fingerprint of the listener's certificate, on both sides."""

    # Sending

    def send(self, data: Any, flags: int = 0) -> int:
        """Send as `socket.socket.send` does."""
        # The usual message, without the generator of records.
        if not self._begun and len(data) <= RECORD_BYTES:
            try:
                return int(self._sslobj.write(data))  # type: ignore[attr-defined]
            except _WANTS:
                self._begun = bytes(data)
                raise _blocked() from None
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Any]) -> int:  # type: ignore[override]  # the standard library has none
        """Send as `socket.socket.sendmsg` does: return how many bytes were taken.

        Raises:
            BlockingIOError: none.
        """
        begun, sent = self._begun, 0
        if begun:
            # OpenSSL has encrypted it and accepts nothing else before it, also if the caller has given it up.
            self._write(begun)
            self._begun = b""
        for number, record in enumerate(_records(buffers)):
            # Callers repeat what was not taken, from the same byte on, and then these are the bytes just sent. Only a
            # control frame is not repeated, and no other message begins with the same byte as one.
            if number == 0 and begun and record == begun:
                sent += len(begun)
                continue
            try:
                sent += self._write(record)
            except BlockingIOError:
                self._begun = bytes(record)
                break
        if sent == 0 and self._begun:
            raise _blocked()
        return sent

    def _write(self, record: Any) -> int:
        # The object behind the socket, here and elsewhere: methods of `SSLSocket` around it cost 0.5 µs a call.
        try:
            return int(self._sslobj.write(record))  # type: ignore[attr-defined]
        except _WANTS:
            raise _blocked() from None

    # Receiving

    def recv(self, buflen: int = RECORD_BYTES, flags: int = 0) -> bytes:
        """Receive as `socket.socket.recv` does, also the content of several records."""
        data: bytes = self._read(min(buflen, RECORD_BYTES))
        if len(data) < RECORD_BYTES or buflen == RECORD_BYTES:
            return data
        # A full record is rarely the last one.
        parts, size = [data], len(data)
        while size < buflen and len(data) == RECORD_BYTES:
            try:
                data = self._read(min(RECORD_BYTES, buflen - size))
            except OSError:
                break  # raised again by the next call, after what has arrived
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive as `socket.socket.recv_into` does, also the content of several records."""
        view = memoryview(buffer)[:nbytes]
        filled, count = 0, RECORD_BYTES
        while filled < len(view) and count == RECORD_BYTES:
            try:
                count = self._read(len(view) - filled, view[filled:])
            except OSError:
                if filled:
                    break
                raise
            filled += count
        return filled

    def _read(self, size: int, *into: memoryview) -> Any:
        """Return bytes, or their number if they are read into a buffer."""
        try:
            return self._sslobj.read(size, *into)  # type: ignore[attr-defined]
        except _WANTS:
            raise _blocked() from None
        except ssl.SSLError as error:
            # The end without a close_notify: frames say themselves whether they are complete.
            if error.args[0] == ssl.SSL_ERROR_EOF:
                return 0 if into else b""
            raise

    # Ending

    def close(self) -> None:
        """Say that nothing follows (close_notify), if the kernel takes that now, and close the socket."""
        if self.fileno() >= 0:
            try:
                self.unwrap()
            except (OSError, ValueError):
                pass  # broken, or the peer has not said so too: nothing waits for that here
        super().close()


def wrap(sock: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None) -> TlsSocket:
    """Return a connected, non-blocking socket with TLS; the given one must not be used any more.

    Args:
        server_name: that the listener's certificate must have. None: this is the listener's end.

    Raises:
        OSError: the connection broke.
    """
    context.sslsocket_class = TlsSocket
    try:
        wrapped = context.wrap_socket(
            sock, server_side=server_name is None, server_hostname=server_name, do_handshake_on_connect=False
        )
    # It has been reset: `wrap_socket` reads from it then, when there is no object yet that could decrypt.
    except (ValueError, AttributeError) as error:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from error
    assert isinstance(wrapped, TlsSocket)
    return wrapped


async def handshake(sock: TlsSocket) -> None:
    """Complete the TLS handshake; the caller limits the time.

    Raises:
        ssl.SSLError: it failed, see `fray.net.tls.explain`.
        OSError: the connection broke.
    """
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(sock)
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(sock)


def shown_certificate(sock: TlsSocket) -> bytes:
    """Return the certificate that the peer has shown, in DER; empty if none."""
    return sock.getpeercert(binary_form=True) or b""


def shown_chain(sock: TlsSocket) -> list[bytes]:
    """Return all certificates that the peer has shown, in DER, its own first. Nothing about them is verified."""
    # A method of the socket from Python 3.13 on; before that only of the object behind it.
    if hasattr(sock, "get_unverified_chain"):
        return list(sock.get_unverified_chain())
    chain = sock._sslobj.get_unverified_chain() or ()  # type: ignore[attr-defined]
    return [ssl.PEM_cert_to_DER_cert(each.public_bytes()) for each in chain]


def shown_uris(sock: TlsSocket) -> tuple[str, ...]:
    """Return the URIs in the certificate that the peer has shown, if it was verified."""
    certificate = shown_certificate(sock)
    if not certificate:
        return ()
    found = _uris.get(certificate)
    if found is None:
        names: Any = (sock.getpeercert() or {}).get("subjectAltName", ())
        found = _uris[certificate] = tuple(text for kind, text in names if kind == "URI")
        # OpenSSL reads a certificate in some 0.2 ms; a node dials again with the same one.
        if len(_uris) > URIS_LIMIT:
            del _uris[next(iter(_uris))]
    return found


def pin_of(sock: TlsSocket) -> str:
    """Return the fingerprint of the certificate that the listener has shown."""
    return fingerprint(shown_certificate(sock))


def session_challenge(sock: TlsSocket) -> str:
    """Return the challenge that both sides have from the TLS handshake, see `fray.net.auth`; empty if the listener
    sends one."""
    if sock.selected_alpn_protocol() != SESSION_CHALLENGE:
        return ""
    # The dialer's Finished message: a MAC over all of the handshake, with random numbers and key shares of both sides
    # and the certificate, under a key that is of this session. So no two connections have the same, not even the two
    # of one in the middle who has the listener's key. (Python calls it by its name in TLS 1.2, where two sessions that
    # were resumed or renegotiated could be made to share it. TLS 1.3 cannot renegotiate, and no session is resumed.)
    return (sock.get_channel_binding("tls-unique") or b"").hex()


def _blocked() -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _records(buffers: Sequence[Any]) -> Iterator[Any]:
    """Yield the content of all buffers in pieces of one record each; they depend on the bytes alone."""
    gathered: list[memoryview] = []
    room = RECORD_BYTES
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view):
            part = view[:room]
            view = view[len(part) :]
            gathered.append(part)
            room -= len(part)
            if not room:
                yield part if len(gathered) == 1 else b"".join(gathered)
                gathered, room = [], RECORD_BYTES
    if gathered:
        yield gathered[0] if len(gathered) == 1 else b"".join(gathered)
