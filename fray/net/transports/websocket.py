"""Dial and listen over TCP and Unix sockets: a WebSocket handshake, then `WebSocketTransport`.

With TLS all of it is inside TLS.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator

import trio

from fray.errors import FrayError, InvalidRequest, ProtocolMismatch, Unauthorized, Unreachable
from fray.net import auth
from fray.net.auth import Authorize
from fray.net.limited_log import LimitedLog
from fray.net.process_identity import peer_uid, process_behind
from fray.net.tls.explain import explain_dial, explain_serve
from fray.net.transport import Credential, PeerIdentity, Transport
from fray.net.transports import handshake, sockets
from fray.net.transports.http_upgrade import HandshakeLost, UpgradeRejected
from fray.net.transports.listener import HANDSHAKE_S
from fray.net.transports.pending import GREETING_S, PendingConnections
from fray.net.transports.sockets import Address
from fray.net.transports.tls_dialer import TlsDialer
from fray.net.transports.tls_listener import TlsServer
from fray.net.transports.tls_socket import TlsSocket, session_challenge, shown_uris
from fray.net.transports.websocket_transport import WebSocketTransport

logger = logging.getLogger("fray.net")


class WebSocketNetwork:
    """`Network` over ``tcp:`` and ``unix:``.

    Args:
        rng: generator of nonces; the system's by default.
        names: names of this machine besides its own addresses, for TCP listeners whose address is translated on the
            way: ``HOST`` or ``HOST:PORT`` (default: the port of the listener). See `fray.net.auth`.
        tls_server: what ``tls:`` listeners show. Default: a certificate of this process alone.
        tls_dialer: dials ``tls:`` addresses.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        names: Collection[str] = (),
        tls_server: TlsServer | None = None,
        tls_dialer: TlsDialer | None = None,
    ) -> None:
        self.rng = rng or random.SystemRandom()
        self.names = names
        self.tls_server = tls_server or TlsServer()
        self._tls_dialer = tls_dialer

    @property
    def tls_dialer(self) -> TlsDialer:
        """Dialer of ``tls:`` addresses, made with the first one: most processes dial Unix sockets only."""
        if self._tls_dialer is None:
            self._tls_dialer = TlsDialer()
        return self._tls_dialer

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        """See `Network.dial`."""
        target = sockets.parse(address)
        # Connecting and handshake together: the kernel accepts for a process that is suspended.
        with trio.move_on_after(timeout_s):
            try:
                return await self._dial(target, credential)
            except Unreachable:
                if not target.is_tls or self.tls_dialer.identity is None:
                    raise
            # A listener that does not accept this process's certificate, which may have expired or be of an authority
            # that was replaced, closes after the dialer's handshake. The key opens the connection, and a new
            # certificate can be requested over it.
            transport = await self._dial(target, credential, shows_identity=False)
            self.tls_dialer.identity = None
            return transport
        raise Unreachable(f"no answer from {address} within {timeout_s:.3g} s", address=address)

    async def _dial(
        self, target: Address, credential: Credential | None, *, shows_identity: bool = True
    ) -> WebSocketTransport:
        sock, name = await self._connect(target, shows_identity)
        try:
            return await self._upgrade(sock, target, name, credential)
        except BaseException as error:
            # A transport owns its socket only after the handshake.
            sock.close()
            # A cancellation must stay what it is.
            if isinstance(error, Exception):
                raise explain(error, target.text) from error
            raise

    async def _connect(self, target: Address, shows_identity: bool) -> tuple[socket.socket, str]:
        if not target.is_tls:
            return await sockets.connect(target)
        # Never without: any machine that answers at the address would be accepted.
        if not target.pins:
            raise InvalidRequest(
                f"{target.text} has no fingerprint of a certificate; expected tls:HOST:PORT#FINGERPRINT"
            )
        try:
            sock = await self.tls_dialer.connect(target, shows_identity=shows_identity)
            return sock, sockets.tcp_name(*sock.getpeername()[:2])
        # A reset at any moment from the established connection on, also within `wrap_socket`: it is dialed again.
        except OSError as error:
            raise explain(error, target.text) from error

    async def _upgrade(
        self, sock: socket.socket, target: Address, name: str, credential: Credential | None
    ) -> WebSocketTransport:
        names = dialed_names(target, name)
        nonce = session_challenge(sock) if isinstance(sock, TlsSocket) else ""
        surplus = await handshake.client_handshake(sock, target, names, credential, self.rng, binding_of(sock), nonce)
        identity = PeerIdentity(credential.key_id if credential else "", target.text)
        return WebSocketTransport(sock, identity, client=True, surplus=surplus)

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `Network.listen`."""
        target = sockets.parse(address)
        tls = self.tls_server if target.is_tls else None
        if tls is not None:
            tls.prepare()
        listener = Listener(auth.Authenticator(authorize, self.rng), handler, self._serve, self.names, tls)
        await listener.run(target, task_status)

    async def _serve(self, sock: socket.socket, remote: str, listener: Listener) -> None:
        upgraded = None
        try:
            with listener.handshaking(remote):
                await listener.check_account(sock, remote)
                await wait_greeting(sock)
                if listener.tls is not None:
                    sock = await listener.tls.accept(sock)
                upgraded = await handshake.server_handshake(sock, listener.challenge(sock, remote))
            if upgraded is not None:
                key_id, surplus = upgraded
                uris = shown_uris(sock) if isinstance(sock, TlsSocket) else ()
                # Looked up after the proof of the key: an unauthenticated peer causes no reads of /proc.
                identity = PeerIdentity(key_id, remote, process_behind(sock), uris)
                await listener.serve(WebSocketTransport(sock, identity, client=False, surplus=surplus))
        finally:
            # With TLS this is another object than the one that was accepted.
            sock.close()


def dialed_names(target: Address, name: str) -> tuple[str, ...]:
    """Return the names under which a dialer knows a listener: that of the connection, and the address as dialed."""
    return (name,) if target.path else (name, sockets.tcp_name(target.host, target.port))


def binding_of(sock: socket.socket) -> str:
    """Return the fingerprint of the listener's certificate; empty without TLS."""
    return sock.binding if isinstance(sock, TlsSocket) else ""


async def wait_greeting(sock: socket.socket) -> None:
    """Wait for the first bytes of a dialer on another machine.

    Raises:
        HandshakeLost: it has sent nothing within `GREETING_S`.
    """
    # On this machine the listener speaks first, and a busy machine may keep an honest process waiting for longer.
    if sock.family == socket.AF_UNIX:
        return
    with trio.move_on_after(GREETING_S):
        await trio.lowlevel.wait_readable(sock)
        return
    raise HandshakeLost(f"it sent nothing within {GREETING_S:g} s", foreign=False)


class Listener:
    """Accepts connections and runs one task for each.

    Args:
        names: see `WebSocketNetwork`.
    """

    def __init__(
        self,
        authenticator: auth.Authenticator,
        handler: Callable[[Transport], Awaitable[None]],
        serve: Callable[[socket.socket, str, Listener], Awaitable[None]],
        names: Collection[str] = (),
        tls: TlsServer | None = None,
    ) -> None:
        self._authenticator = authenticator
        self.tls = tls
        self._pending = PendingConnections()
        self._log = LimitedLog(logger)
        self._handler = handler
        self._serve = serve
        self._names = names
        self._file_name = ""

    def challenge(self, sock: socket.socket, remote: str = "") -> auth.Challenge:
        """Return the challenge for an accepted connection, after its TLS handshake."""
        if self._file_name:
            return self._authenticator.challenge({self._file_name}, remote=remote)
        # Of the connection and not of the listener, which may be bound to all addresses.
        own = sockets.local_name(sock)
        port = int(own.rpartition(":")[2])
        names = {own, *(named(name, port) for name in self._names)}
        nonce = session_challenge(sock) if isinstance(sock, TlsSocket) else ""
        return self._authenticator.challenge(names, binding_of(sock), remote, nonce=nonce)

    async def check_account(self, sock: socket.socket, remote: str) -> None:
        """Refuse a dialer of another account of this machine at a Unix socket.

        Its mode keeps them out already, but can be changed. Root can open every key and every process.

        Raises:
            Unauthorized: it was refused, and has been sent the reason.
        """
        if not self._file_name or (uid := peer_uid(sock)) in (0, os.geteuid()):
            return
        self._authenticator.on_account_refused(remote, uid)
        await handshake.refuse(sock, auth.Rejection.ACCOUNT)
        raise Unauthorized(f"it runs under uid {uid}, and this socket admits {os.geteuid()} and root alone")

    async def run(self, address: Address, task_status: trio.TaskStatus[str]) -> None:
        with sockets.listening(address) as (listener, bound):
            self._file_name = sockets.file_name(os.stat(address.path)) if address.path else ""
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._log.run)
                task_status.started(bound if self.tls is None else f"{bound}#{','.join(self.tls.pins)}")
                while True:
                    nursery.start_soon(self._guard, *await sockets.accept(listener))

    @contextlib.contextmanager
    def handshaking(self, remote: str) -> Iterator[None]:
        """Limit a handshake in time, and the number of them.

        Raises:
            HandshakeLost: it took too long, or was dropped for another one.
        """
        # Only the handshake is limited in time: a peer that sends a byte now and then must not hold its place for ever.
        with trio.move_on_after(HANDSHAKE_S) as scope, self._pending.holding(remote, scope.cancel):
            yield
        if scope.cancelled_caught:
            raise HandshakeLost("it was not completed in time", foreign=False)

    async def _guard(self, sock: socket.socket, remote: str) -> None:
        try:
            await self._serve(sock, remote, self)
        except Exception as error:  # noqa: BLE001 (it ends this connection; the listener continues)
            why = explain_serve(error) if isinstance(error, ssl.SSLError) else explain(error, remote)
            self._log.write("handshake with %s failed: %s", remote, why)
        finally:
            # Also the way in which a rejected or late handshake ends.
            sock.close()

    async def serve(self, transport: Transport) -> None:
        """Run the handler, then close the connection."""
        try:
            await self._handler(transport)
        except Exception:
            logger.exception("the handler of a connection from %s failed", transport.peer.remote)
        finally:
            # Whatever the handler did: a connection without a handler would keep its peer waiting.
            transport.abort()


def named(name: str, port: int) -> str:
    """Return the TCP name of ``HOST`` (at this port) or ``HOST:PORT``."""
    host, colon, given = name.rpartition(":")
    if colon and given.isdecimal() and (":" not in host or host.endswith("]")):
        return sockets.tcp_name(host, int(given))
    return sockets.tcp_name(name, port)


def explain(error: BaseException, address: str) -> FrayError:
    """Return the error that a failed handshake means to the dialer; of a group, the first one counts."""
    if isinstance(error, BaseExceptionGroup):
        return explain(error.exceptions[0], address)
    if isinstance(error, FrayError):
        return error
    if isinstance(error, UpgradeRejected) and error.status == 403 and address.startswith("unix:"):
        # As for a socket whose mode does not admit this account: another address of the peer may.
        return Unreachable(
            f"{address} cannot be reached: it belongs to another account, and admits that one and root alone",
            address=address,
        )
    if isinstance(error, UpgradeRejected) and error.status in (401, 403):
        return Unauthorized(
            f"{address} does not accept the key: check the token, which may have been replaced, or the key, which may "
            "have expired or been revoked",
            address=address,
            key_refused=True,
        )
    if isinstance(error, UpgradeRejected) and error.status == auth.Rejection.ADDRESS.value:
        return Unauthorized(
            f"{address} leads to a server that does not know itself by this address: if a router or a forwarded port "
            "is between, start that server with --advertise HOST:PORT as dialed here; else it may be an impostor",
            address=address,
        )
    if isinstance(error, UpgradeRejected) and error.status == 426:
        return ProtocolMismatch(
            f"{address} requires TLS, and this side has no fingerprint of its certificate authority: `fray ca show` on "
            "the controller prints it, for FRAY_CA_FINGERPRINT",
            address=address,
        )
    if isinstance(error, UpgradeRejected):
        return ProtocolMismatch(f"{address} answers HTTP {error.status}: not a Fray server", address=address)
    if isinstance(error, ssl.SSLError):
        return explain_dial(error, address)
    # Lost and not understood are different: the first is dialed again, the second is final.
    if isinstance(error, HandshakeLost) and not error.foreign:
        return Unreachable(f"{address}: {error}", address=address)
    if isinstance(error, OSError | trio.BrokenResourceError):
        return Unreachable(f"{address}: the connection was lost during the handshake", address=address)
    return ProtocolMismatch(f"a different server is listening on {address}: {error}", address=address)
