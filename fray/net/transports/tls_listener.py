"""Certificates that a listener shows to its TLS dialers, replaced at any time, without a restart."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence

from fray.net.tls.identity import TlsIdentity, server_context
from fray.net.transports import http_upgrade
from fray.net.transports.tls_socket import TlsSocket, wrap


class TlsServer:
    """Certificates of the ``tls:`` listeners of one process.

    Args:
        identity: default: made with the first listener, signed by itself; callers pin its fingerprint.
        authorities: in DER; dialers may show a certificate of one of them.
        pins: fingerprints that dialers pin. Default: that of the certificate.
    """

    def __init__(
        self, identity: TlsIdentity | None = None, authorities: Sequence[bytes] = (), pins: Sequence[str] = ()
    ) -> None:
        self._made: tuple[ssl.SSLContext, str] | None = None
        self.pins: tuple[str, ...] = ()
        if identity is not None:
            self.replace(identity, authorities, pins)

    def replace(self, identity: TlsIdentity, authorities: Sequence[bytes] = (), pins: Sequence[str] = ()) -> None:
        """Show other certificates from the next handshake on."""
        self._made = server_context(identity, authorities), identity.fingerprint
        self.pins = tuple(pins) or (identity.fingerprint,)

    def prepare(self) -> None:
        """Make a certificate if there is none: about 50 ms, mostly for an import."""
        if self._made is None:
            from fray.net.tls.certificates import make_host

            self.replace(make_host(time.time()))

    async def accept(self, sock: socket.socket) -> TlsSocket:
        """Return an accepted connection with TLS.

        Raises:
            ssl.SSLError, OSError: the handshake failed.
        """
        assert self._made is not None, "prepare() was not called"
        context, binding = self._made
        wrapped = wrap(sock, context)
        wrapped.binding = binding
        try:
            await wrapped.handshake()
        except BaseException as error:
            # In the words of HTTP, which is what a dialer without TLS has begun to speak.
            if isinstance(error, ssl.SSLError) and error.reason == "HTTP_REQUEST":
                _send_plainly(wrapped, http_upgrade.write_refusal(426))
            wrapped.close()
            raise
        return wrapped

    def accept_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> tuple[ssl.SSLObject, str]:
        """Return the listener's end of a connection in memory, and the fingerprint of the certificate it shows."""
        assert self._made is not None, "prepare() was not called"
        context, binding = self._made
        return context.wrap_bio(incoming, outgoing, server_side=True), binding


def warm_up() -> None:
    """Import what makes certificates, for processes that are forked from this one."""
    # Missing in an environment of another Python: there the node makes the certificate.
    with contextlib.suppress(ImportError):
        from fray.net.tls import certificates  # noqa: F401


def _send_plainly(sock: TlsSocket, data: bytes) -> None:
    try:
        socket.socket.send(sock, data)
    except OSError:
        pass  # the dialer sees a lost connection, as it would anyway
