"""Dialer of TLS connections: connects, and accepts the listener by its fingerprint or that of its authority.

An address has the fingerprints: ``tls:HOST:PORT#FINGERPRINT``. If it is that of the certificate that the listener
shows, that is all. If it is that of an authority among the certificates that the listener sends along, this authority
is remembered, and OpenSSL verifies the listener's certificate with it in a second handshake. So a fingerprint is all
that a dialer has to know of an authority, and later dials of the process need one handshake.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from attrs import define, field

from fray.errors import Unauthorized
from fray.net.tls import explain
from fray.net.tls.identity import (
    CONTROLLER_NAME,
    TlsIdentity,
    client_context,
    fingerprint,
    unverified_context,
)
from fray.net.transports import sockets
from fray.net.transports.sockets import Address
from fray.net.transports.tls_socket import TlsSocket, shown_certificate, shown_chain, wrap


@define(eq=False)
class TlsDialer:
    """Dialer of one process. ``identity`` is shown to controllers; replace it at any time."""

    identity: TlsIdentity | None = None
    _successors: dict[str, tuple[str, ...]] = field(factory=dict, init=False)
    """Fingerprint of an address: those of the authorities that its controller has named since."""
    _authorities: dict[str, bytes] = field(factory=dict, init=False)
    """Authorities (DER) by fingerprint, that listeners have shown and addresses named."""
    _unverified: ssl.SSLContext = field(factory=unverified_context, init=False)
    _verified: dict[tuple[str, ...], tuple[TlsIdentity | None, ssl.SSLContext]] = field(factory=dict, init=False)

    def learn(self, pins: Sequence[str], authorities: Sequence[bytes]) -> None:
        """Accept these authorities (DER), too, at addresses with one of these fingerprints.

        The caller has them from the controller itself, over a connection that both sides have authenticated.
        """
        found = {fingerprint(each): each for each in authorities}
        self._authorities.update(found)
        self._successors.update(dict.fromkeys(pins, tuple(found)))

    def pins_of(self, pins: Sequence[str]) -> tuple[str, ...]:
        """Return the fingerprints that are accepted at an address with these."""
        return tuple(dict.fromkeys([*pins, *(new for pin in pins for new in self._successors.get(pin, ()))]))

    async def connect(self, target: Address, *, shows_identity: bool = True) -> TlsSocket:
        """Return a connection whose listener is the one that the address names.

        Raises:
            Unauthorized: it is a different one.
            Unreachable: no connection, or a certificate that is not valid at this time.
            ProtocolMismatch: it does not speak TLS 1.3.
        """
        identity = self.identity if shows_identity else None
        pins = self.pins_of(target.pins)
        known = tuple(pin for pin in pins if pin in self._authorities)
        if known:
            try:
                return await self._connect_verified(target, known, identity)
            except Unauthorized:
                # Replaced while this process ran: the other fingerprint of the address may be that of its successor.
                if len(known) == len(pins):
                    raise
        sock = await self._handshake(target, self._unverified)
        # By the certificate itself, and not by the first of the chain, which is the same but nothing depends on it.
        own = fingerprint(shown_certificate(sock))
        if own in pins:
            sock.binding = own
            return sock
        chain = shown_chain(sock)
        shown = [fingerprint(certificate) for certificate in chain]
        found = [at for at, each in enumerate(shown) if each in pins]
        if found:
            self._authorities.update((shown[at], chain[at]) for at in found)
        sock.close()
        if not found:
            raise explain.wrong_authority(target.text.partition("#")[0], pins, own)
        return await self._connect_verified(target, tuple(shown[at] for at in found), identity)

    async def _connect_verified(
        self, target: Address, pins: tuple[str, ...], identity: TlsIdentity | None
    ) -> TlsSocket:
        of, context = self._verified.get(pins, (None, None))
        if context is None or of is not identity:
            context = client_context([self._authorities[pin] for pin in pins], identity)
            self._verified[pins] = identity, context
        sock = await self._handshake(target, context)
        sock.binding = fingerprint(shown_certificate(sock))
        return sock

    async def _handshake(self, target: Address, context: ssl.SSLContext) -> TlsSocket:
        sock = wrap((await sockets.connect(target))[0], context, server_name=CONTROLLER_NAME)
        try:
            await sock.handshake()
        except BaseException as error:
            sock.close()
            if isinstance(error, ssl.SSLError):
                address = target.text.partition("#")[0]
                raise explain.explain_dial(error, address, await self._shown(target, error)) from error
            raise
        return sock

    async def _shown(self, target: Address, error: ssl.SSLError) -> bytes | None:
        """Return the certificate of a listener that was not accepted, for the message: OpenSSL does not keep it."""
        if not isinstance(error, ssl.SSLCertVerificationError):
            return None
        sock = wrap((await sockets.connect(target))[0], self._unverified, server_name=CONTROLLER_NAME)
        try:
            await sock.handshake()
            return shown_certificate(sock)
        except OSError:
            return None
        finally:
            sock.close()
