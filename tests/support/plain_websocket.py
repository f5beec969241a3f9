"""Reference implementation of `fray.net.transport.Network`: trio-websocket from the handshake to the last frame."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection

from fray.errors import ConnectionFailed, MessageTooLarge, ProtocolMismatch, Unreachable
from fray.net import auth
from fray.net.auth import Authorize
from fray.net.transport import Bytes, Credential, PeerIdentity, Transport
from fray.net.transports import sockets
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES, too_large
from fray.net.transports.sockets import Address
from fray.net.transports.websocket import Listener, dialed_names, explain
from fray.net.transports.websocket_transport import CLOSE_S
from tests.support.trio_handshake import (
    SocketStream,
    translate_rejection,
    upgrade_as_client,
    upgrade_as_server,
)

logger = logging.getLogger("fray.net")


class PlainWebSocketTransport:
    """The same `Transport` straight on trio-websocket's connection."""

    def __init__(self, connection: WebSocketConnection, sock: socket.socket, peer: PeerIdentity) -> None:
        self.peer = peer
        self.ended = trio.Event()
        self._connection = connection
        self._sock = sock
        self._broken = False

    async def send(self, parts: Sequence[Bytes]) -> None:
        """See `Transport.send`."""
        message = b"".join(parts)
        if len(message) > TRANSPORT_LIMIT_BYTES:
            raise too_large(len(message))
        if self._broken:
            raise ConnectionFailed("a cancelled send left this connection unusable")
        self._broken = True
        try:
            await self._connection.send_message(message)
        except ConnectionClosed as error:
            raise ConnectionFailed(f"the connection is closed: {error.reason}") from None
        self._broken = False

    async def receive(self) -> Bytes:
        """See `Transport.receive`."""
        try:
            message = await self._connection.get_message()
        except ConnectionClosed as error:
            if error.reason is not None and error.reason.code == 1009:
                raise MessageTooLarge(str(error.reason.reason), limit_bytes=TRANSPORT_LIMIT_BYTES) from None
            raise ConnectionFailed(f"the connection is closed: {error.reason}") from None
        if isinstance(message, str):
            self.abort()
            raise ProtocolMismatch("a text message was received; only binary ones are supported")
        return message

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        try:
            with trio.move_on_after(CLOSE_S):
                await self._connection.aclose()
        finally:
            self.abort()

    def abort(self) -> None:
        """See `Transport.abort`."""
        if not self.ended.is_set():
            self.ended.set()
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()


class PlainWebSocketNetwork:
    """`Network` that stays on trio-websocket. Its connections' tasks live in ``nursery``."""

    def __init__(self, nursery: trio.Nursery, rng: random.Random | None = None) -> None:
        self.rng = rng or random.SystemRandom()
        self._nursery = nursery

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        """See `Network.dial`."""
        target = sockets.parse(address)
        with trio.move_on_after(timeout_s):
            sock, name = await sockets.connect(target)
            names = dialed_names(target, name)
            transport: Transport = await self._nursery.start(self._hold, sock, target, names, credential)
            return transport
        raise Unreachable(f"no answer from {address} within {timeout_s:.3g} s", address=address)

    async def _hold(
        self,
        sock: socket.socket,
        target: Address,
        names: Sequence[str],
        credential: Credential | None,
        task_status: trio.TaskStatus[Transport],
    ) -> None:
        transport = None
        try:
            with translate_rejection():
                async with trio.open_nursery() as nursery:
                    connection = await upgrade_as_client(
                        nursery, SocketStream(sock), target, names, credential, self.rng
                    )
                    claim = PeerIdentity(credential.key_id if credential else "", target.text)
                    transport = PlainWebSocketTransport(connection, sock, claim)
                    task_status.started(transport)
                    await transport.ended.wait()
                    nursery.cancel_scope.cancel()
        except Exception as error:
            if transport is None:
                raise explain(error, target.text) from error
            logger.exception("a plain connection to %s failed", target.text)
        finally:
            sock.close()

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `Network.listen`."""
        listener = Listener(auth.Authenticator(authorize, self.rng), handler, self._serve)
        await listener.run(sockets.parse(address), task_status)

    async def _serve(self, sock: socket.socket, remote: str, listener: Listener) -> None:
        async with trio.open_nursery() as nursery:
            upgraded = None
            with listener.handshaking(remote):
                upgraded = await upgrade_as_server(nursery, SocketStream(sock), listener.challenge(sock))
            if upgraded is not None:
                await listener.serve(PlainWebSocketTransport(upgraded[0], sock, PeerIdentity(upgraded[1], remote)))
            nursery.cancel_scope.cancel()
