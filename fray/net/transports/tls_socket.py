"""TLS on a non-blocking socket, with the methods and errors of a plain one.

OpenSSL works on records in memory, and `TlsSocket` moves them between there and the kernel: one system call takes all
that has arrived, where OpenSSL itself needs two for each record, and one sends many records. BlockingIOError is raised
where a plain socket does, so `fray.net.transports.websocket_transport` and the handshakes work on it as on any socket:
calls that need not wait cost no task switch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import trio

from fray.net.tls.identity import SESSION_CHALLENGE

RECORD_BYTES = 16 * 1024
"""Content of one TLS record at most."""
SEALED_BYTES = 128 * 1024
"""Encrypted bytes that are taken from the kernel, or gathered for it, by one system call. OpenSSL keeps memory of this
size for a connection in each direction in which so much has gone."""
URIS_LIMIT = 1024
"""Certificates whose URIs are remembered."""
_uris: dict[bytes, tuple[str, ...]] = {}
"""URIs by certificate (DER)."""


_receive, _send = socket.socket.recv, socket.socket.send


class TlsSocket(socket.socket):
    """A TLS connection. Make it with `wrap`, which takes over the socket."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None) -> None:
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.setblocking(False)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        # The object behind it: methods of `SSLObject` around it cost 0.2 µs a call.
        self._openssl: Any = self.tls._sslobj  # type: ignore[attr-defined]
        self.binding = ""
        """SHA-256 fingerprint of the listener's certificate, on both sides."""
        self.has_received = False
        """Set while there may be content in memory, where the kernel does not report it."""
        self._sealed: memoryview | None = None
        """Encrypted bytes that the kernel has not taken yet."""
        self._begun = b""
        """Content of the last record among them."""

    # Sending

    def send(self, data: Any, flags: int = 0) -> int:
        """Send as `socket.socket.send` does."""
        # The usual message, without the generator of records.
        if self._sealed is None and len(data) <= RECORD_BYTES:
            self._openssl.write(data)
            if self._pass_on(data):
                return len(data)
            raise _blocked()
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Any]) -> int:  # type: ignore[override]  # the standard library has none
        """Send as `socket.socket.sendmsg` does: return how many bytes were taken.

        Raises:
            BlockingIOError: none.
        """
        # It is encrypted and has its place among the records, also if the caller has given it up.
        if self._sealed is not None:
            self._flush(self._sealed)
        begun, self._begun = self._begun, b""
        taken, record = 0, begun
        for number, record in enumerate(_records(buffers)):
            taken += len(record)
            # Callers repeat what was not taken, from the same byte on, and then these are the bytes just sent. Only a
            # control frame is not repeated, and no other message begins with the same byte as one.
            if number == 0 and begun and record == begun:
                continue
            self._openssl.write(record)
            if self._outgoing.pending >= SEALED_BYTES and not self._pass_on(record):
                break
        else:
            self._pass_on(record)
        # The last record counts when all of it has gone: so callers wait for that as for any socket.
        taken -= len(self._begun)
        if not taken and self._begun:
            raise _blocked()
        return taken

    def _pass_on(self, last: Any) -> bool:
        """Send what is encrypted, of which ``last`` is the last content; return whether the kernel took all of it."""
        sealed = self._outgoing.read()
        try:
            count = _send(self, sealed)
        except BlockingIOError:
            count = 0
        if count == len(sealed):
            return True
        self._sealed, self._begun = memoryview(sealed)[count:], bytes(last)
        return False

    def _flush(self, sealed: memoryview) -> None:
        """Send what the kernel has not taken before.

        Raises:
            BlockingIOError: it does not take all of it now.
        """
        count = _send(self, sealed)
        self._sealed = sealed[count:] or None
        if self._sealed is not None:
            raise _blocked()

    # Receiving

    def recv(self, buflen: int = RECORD_BYTES, flags: int = 0) -> bytes:
        """Receive as `socket.socket.recv` does, also the content of several records."""
        # One read returns the content of one record at most.
        part = buflen if buflen < RECORD_BYTES else RECORD_BYTES
        while True:
            if not self.has_received:
                self._take(part if part < RECORD_BYTES else SEALED_BYTES)
            try:
                data: bytes = self._openssl.read(part)
                break
            except ssl.SSLWantReadError:
                # Part of a record; the rest may have arrived.
                self.has_received = False
            except ssl.SSLError as error:
                return self._end(error)
        # The usual message is the only record that was there, and smaller than a record may be: nothing is left of it.
        if len(data) < part and not self._incoming.pending:
            self.has_received = False
            return data
        parts, size = [data], len(data)
        while data and size < buflen:
            try:
                data = self._openssl.read(min(part, buflen - size))
            except ssl.SSLWantReadError:
                self.has_received = False
                break
            except OSError:
                break  # raised again by the next call, after what has arrived
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive as `socket.socket.recv_into` does, also the content of several records."""
        view = memoryview(buffer)[:nbytes]
        filled = 0
        while filled < len(view):
            try:
                if not self.has_received:
                    self._take(SEALED_BYTES)
                count = self._openssl.read(len(view) - filled, view[filled:])
            except ssl.SSLWantReadError:
                self.has_received = False
                continue
            except OSError as error:
                if filled:
                    break  # raised again by the next call, after what has arrived
                if isinstance(error, ssl.SSLError):
                    return len(self._end(error))
                raise
            if not count:
                break
            filled += count
        return filled

    def _take(self, size: int) -> None:
        """Move encrypted bytes from the kernel into memory.

        Raises:
            BlockingIOError: none have arrived.
        """
        sealed = _receive(self, size)
        if sealed:
            self._incoming.write(sealed)
        else:
            self._incoming.write_eof()
        self.has_received = True

    def _end(self, error: ssl.SSLError) -> bytes:
        # The end without a close_notify: frames say themselves whether they are complete.
        if error.args[0] == ssl.SSL_ERROR_EOF:
            return b""
        raise error

    # Beginning and ending

    async def handshake(self) -> None:
        """Complete the TLS handshake; the caller limits the time.

        Raises:
            ssl.SSLError: it failed, see `fray.net.tls.explain`.
            OSError: the connection broke.
        """
        while True:
            try:
                self.tls.do_handshake()
                await self._send_handshake()
                # What the peer sends behind its part of the handshake may have arrived with it.
                self.has_received = self._incoming.pending > 0
                return
            except ssl.SSLWantReadError:
                await self._send_handshake()
            except ssl.SSLError:
                # The reason, for the peer.
                with contextlib.suppress(OSError):
                    self._pass_on(b"")
                raise
            try:
                self._take(RECORD_BYTES)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self)

    async def _send_handshake(self) -> None:
        if not self._outgoing.pending or self._pass_on(b""):
            return
        while self._sealed is not None:
            await trio.lowlevel.wait_writable(self)
            with contextlib.suppress(BlockingIOError):
                self._flush(self._sealed)

    def close(self) -> None:
        """Say that nothing follows (close_notify), if the kernel takes that now, and close the socket."""
        if self.fileno() >= 0:
            try:
                if self._sealed is not None:
                    self._flush(self._sealed)
                self._say_end()
            except (OSError, ValueError):
                pass  # broken, or the kernel does not take it: nothing waits for that here
        super().close()

    def _say_end(self) -> None:
        # It raises that the peer has not said so too, or that there was no handshake yet.
        with contextlib.suppress(ssl.SSLError):
            self._openssl.shutdown()
        if self._outgoing.pending:
            self._pass_on(b"")


def wrap(sock: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None) -> TlsSocket:
    """Return a connected, non-blocking socket with TLS; the given one must not be used any more.

    Args:
        server_name: that the listener's certificate must have. None: this is the listener's end.
    """
    return TlsSocket(sock, context, server_name)


def shown_certificate(sock: TlsSocket) -> bytes:
    """Return the certificate that the peer has shown, in DER; empty if none."""
    return sock.tls.getpeercert(binary_form=True) or b""


def shown_chain(sock: TlsSocket) -> list[bytes]:
    """Return all certificates that the peer has shown, in DER, its own first. Nothing about them is verified."""
    # A method of `SSLObject` from Python 3.13 on; before that only of the object behind it.
    if hasattr(sock.tls, "get_unverified_chain"):
        return list(sock.tls.get_unverified_chain())
    chain = sock.tls._sslobj.get_unverified_chain() or ()  # type: ignore[attr-defined]
    return [ssl.PEM_cert_to_DER_cert(each.public_bytes()) for each in chain]


def shown_uris(sock: TlsSocket) -> tuple[str, ...]:
    """Return the URIs in the certificate that the peer has shown, if it was verified."""
    certificate = shown_certificate(sock)
    if not certificate:
        return ()
    found = _uris.get(certificate)
    if found is None:
        names: Any = (sock.tls.getpeercert() or {}).get("subjectAltName", ())
        found = _uris[certificate] = tuple(text for kind, text in names if kind == "URI")
        # OpenSSL reads a certificate in some 0.2 ms; a node dials again with the same one.
        if len(_uris) > URIS_LIMIT:
            del _uris[next(iter(_uris))]
    return found


def session_challenge(sock: TlsSocket) -> str:
    """Return the challenge that both sides have from the TLS handshake, see `fray.net.auth`; empty if the listener
    sends one."""
    if sock.tls.selected_alpn_protocol() != SESSION_CHALLENGE:
        return ""
    # The dialer's Finished message: a MAC over all of the handshake, with random numbers and key shares of both sides
    # and the certificate, under a key that is of this session. So no two connections have the same, not even the two
    # of one in the middle who has the listener's key. (Python calls it by its name in TLS 1.2, where two sessions that
    # were resumed or renegotiated could be made to share it. TLS 1.3 cannot renegotiate, and no session is resumed.)
    return (sock.tls.get_channel_binding("tls-unique") or b"").hex()


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
