"""Dial and listen over TCP and Unix sockets: trio-websocket shakes hands, then the lean transport takes over.

trio-websocket is given a stream that ends for it at the blank line of the HTTP head; what was received behind that line
is kept for `LeanTransport`, which owns the socket from then on. `PlainWebSocketNetwork` stays on trio-websocket all the
way, for comparison.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, cast

import trio
import trio_websocket
from trio_websocket import ConnectionClosed, ConnectionRejected, WebSocketConnection

from fray.errors import ConnectionFailed, FrayError, MessageTooLarge, ProtocolMismatch, Unauthorized, Unreachable
from fray.net import auth, sockets
from fray.net.lean import CLOSE_S, LeanTransport
from fray.net.memory import TRANSPORT_LIMIT_BYTES, too_large
from fray.net.sockets import Address
from fray.net.transport import Authorize, Bytes, Claim, Credential, Transport

logger = logging.getLogger("fray.net")

HANDSHAKE_S = 10.0
"""How long a dialler may take to shake hands."""
PENDING_LIMIT = 1024
"""Handshakes under way at one listener; more are dropped."""
HEAD_LIMIT_BYTES = 16 * 1024
RESOURCE = "/fray"
_BLANK_LINE = b"\r\n\r\n"
_PROOF = b"fray-proof"


class HandshakeLost(Exception):
    """The connection ended, or says something else, before the handshake was over."""

    def __init__(self, why: str, *, foreign: bool) -> None:
        super().__init__(why)
        self.foreign = foreign
        """Somebody is there and speaks no HTTP."""


# The stream that trio-websocket sees ---------------------------------------------------------------------------------


class SocketStream(trio.abc.Stream):
    """A non-blocking socket as a stream. `aclose` leaves the socket to its owner."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.sock)
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room."""
        await trio.lowlevel.wait_writable(self.sock)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Some bytes; none at the end."""
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                return self.sock.recv(max_bytes or 65536)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        """Only a checkpoint: see the class."""
        await trio.lowlevel.checkpoint()


class HeadStream(SocketStream):
    """Ends (by silence) at the blank line of the peer's HTTP head, unless a client is being turned away."""

    def __init__(self, sock: socket.socket, *, client: bool) -> None:
        super().__init__(sock)
        self.surplus = b""
        self._begins = b"HTTP/1.1 " if client else b"GET "
        self._client = client
        self._head = b""
        self._over = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Bytes of the head.

        Raises:
            HandshakeLost: end of stream, no HTTP, or more than 16 KiB without a blank line.
        """
        if self._over:
            await trio.sleep_forever()
        data = await super().receive_some(4096)
        before = len(self._head)
        self._head += data
        if not data:
            raise HandshakeLost("the connection was closed during the handshake", foreign=False)
        if not self._head.startswith(self._begins[: len(self._head)]):
            raise HandshakeLost("what answers speaks no HTTP", foreign=True)
        at = self._head.find(_BLANK_LINE)
        if at < 0 and len(self._head) > HEAD_LIMIT_BYTES:
            raise HandshakeLost("the HTTP head is too long", foreign=True)
        if at < 0 or (self._client and not self._head.startswith(b"HTTP/1.1 101")):
            return data
        end = at + len(_BLANK_LINE)
        self._over = True
        self.surplus = self._head[end:]
        return self._head[before:end]

    async def aclose(self) -> None:
        """trio-websocket closes when the head made no sense to it."""
        raise HandshakeLost("what answers breaks the rules of HTTP", foreign=True)


# Handshakes ----------------------------------------------------------------------------------------------------------


async def _shake_as_client(
    nursery: trio.Nursery, stream: SocketStream, address: Address, credential: Credential | None, rng: random.Random
) -> WebSocketConnection:
    """An upgraded connection whose listener has proven itself.

    Raises:
        Unauthorized: it has not. What trio-websocket raises comes out of ``nursery``.
    """
    key_id, key = (credential.key_id, credential.key) if credential else ("", "")
    asked = auth.ask(key_id, key, rng)
    headers = [(b"Authorization", auth.write_ask(asked).encode())] if credential else []
    connection = await trio_websocket.wrap_client_stream(
        nursery,
        cast(Any, stream),
        address.host_header,
        RESOURCE,
        extra_headers=headers,
        max_message_size=TRANSPORT_LIMIT_BYTES,
        message_queue_size=16,
        receive_buffer_size=65536,
    )
    if credential is not None:
        auth.confirm(asked, key, auth.read_answer(_header(connection.handshake_headers, _PROOF)))
    return connection


async def _shake_as_server(
    nursery: trio.Nursery, stream: SocketStream, door: auth.Doorkeeper
) -> tuple[WebSocketConnection, str] | None:
    """An upgraded connection and the key id its dialler has proven; None if it was turned away with 401."""
    request = await trio_websocket.wrap_server_stream(
        nursery, stream, max_message_size=TRANSPORT_LIMIT_BYTES, message_queue_size=16, receive_buffer_size=65536
    )
    asked = auth.read_ask(_header(request.headers, b"authorization"))
    answer = door.admit(asked)
    if answer is None:
        body = b"A valid key is needed: see FRAY_TOKEN.\n"
        await request.reject(401, extra_headers=[(b"WWW-Authenticate", auth.SCHEME.encode())], body=body)
        return None
    connection = await request.accept(extra_headers=[(_PROOF, auth.write_answer(answer).encode())])
    return connection, asked.key_id


def _header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> str | None:
    for key, value in headers:
        if key.lower() == name:
            return value.decode("latin-1")
    return None


def _explain(error: BaseException, address: str) -> FrayError:
    """What a failed handshake means to the dialler; the first telling leaf of a group counts."""
    if isinstance(error, BaseExceptionGroup):
        return _explain(error.exceptions[0], address)
    if isinstance(error, FrayError):
        return error
    if isinstance(error, ConnectionRejected) and error.status_code in (401, 403):
        return Unauthorized(f"{address} does not accept the key: check the token", address=address)
    if isinstance(error, ConnectionRejected):
        return ProtocolMismatch(f"{address} answers HTTP {error.status_code}: it is no Fray listener", address=address)
    if (isinstance(error, HandshakeLost) and not error.foreign) or isinstance(error, trio.BrokenResourceError):
        return Unreachable(f"{address}: the connection was lost during the handshake", address=address)
    return ProtocolMismatch(f"something else than Fray answers at {address}: {error}", address=address)


# The networks --------------------------------------------------------------------------------------------------------


class WebSocketNetwork:
    """`Network` over ``tcp:`` and ``unix:``.

    Args:
        rng: for nonces; the system's by default.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng or random.SystemRandom()

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        """See `Network.dial`."""
        target = sockets.parse(address)
        with trio.move_on_after(timeout_s):
            sock = await sockets.connect(target)
            try:
                return await self._upgrade(sock, target, credential)
            except BaseException as error:
                sock.close()
                if isinstance(error, Exception):
                    raise _explain(error, address) from error
                raise
        raise Unreachable(f"no answer from {address} within {timeout_s:.3g} s", address=address)

    async def _upgrade(self, sock: socket.socket, target: Address, credential: Credential | None) -> Transport:
        stream = HeadStream(sock, client=True)
        async with trio.open_nursery() as nursery:
            await _shake_as_client(nursery, stream, target, credential, self.rng)
            nursery.cancel_scope.cancel()
        claim = Claim(credential.key_id if credential else "", target.text)
        return LeanTransport(sock, claim, client=True, surplus=stream.surplus)

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `Network.listen`."""
        listener = _Listener(auth.Doorkeeper(authorize, self.rng), handler, self._serve)
        await listener.run(sockets.parse(address), task_status)

    async def _serve(self, sock: socket.socket, remote: str, listener: _Listener) -> None:
        stream = HeadStream(sock, client=False)
        shaken = None
        with listener.shaking(), trio.move_on_after(HANDSHAKE_S):
            async with trio.open_nursery() as nursery:
                shaken = await _shake_as_server(nursery, stream, listener.door)
                nursery.cancel_scope.cancel()
        if shaken is not None:
            claim = Claim(shaken[1], remote)
            await listener.serve(LeanTransport(sock, claim, client=False, surplus=stream.surplus))


class _Listener:
    """Accepts, and runs one task a connection."""

    def __init__(
        self,
        door: auth.Doorkeeper,
        handler: Callable[[Transport], Awaitable[None]],
        serve: Callable[[socket.socket, str, _Listener], Awaitable[None]],
    ) -> None:
        self.door = door
        self._pending = 0
        self._handler = handler
        self._serve = serve

    async def run(self, address: Address, task_status: trio.TaskStatus[str]) -> None:
        with sockets.listening(address) as (listener, bound):
            async with trio.open_nursery() as nursery:
                task_status.started(bound)
                while True:
                    sock, remote = await sockets.accept(listener)
                    if self._pending < PENDING_LIMIT:
                        nursery.start_soon(self._guard, sock, remote)
                    else:
                        sock.close()

    @contextlib.contextmanager
    def shaking(self) -> Iterator[None]:
        """Count a handshake that is under way."""
        self._pending += 1
        try:
            yield
        finally:
            self._pending -= 1

    async def _guard(self, sock: socket.socket, remote: str) -> None:
        try:
            await self._serve(sock, remote, self)
        except Exception as error:  # noqa: BLE001 (it ends this connection; the listener goes on)
            why = _explain(error, remote)
            logger.info("a connection from %s came to nothing: %s", remote, why)
        finally:
            sock.close()

    async def serve(self, transport: Transport) -> None:
        """Run the handler; afterwards the connection is gone."""
        try:
            await self._handler(transport)
        except Exception:
            logger.exception("the handler of a connection from %s failed", transport.claim.remote)
        finally:
            transport.abort()


# For comparison ------------------------------------------------------------------------------------------------------


class PlainWebSocketTransport:
    """The same `Transport` straight on trio-websocket's connection."""

    def __init__(self, connection: WebSocketConnection, sock: socket.socket, claim: Claim) -> None:
        self.claim = claim
        self.over = trio.Event()
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
            raise ProtocolMismatch("a text message came; only binary ones are spoken here")
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
        if not self.over.is_set():
            self.over.set()
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
            sock = await sockets.connect(target)
            transport: Transport = await self._nursery.start(self._hold, sock, target, credential)
            return transport
        raise Unreachable(f"no answer from {address} within {timeout_s:.3g} s", address=address)

    async def _hold(
        self,
        sock: socket.socket,
        target: Address,
        credential: Credential | None,
        task_status: trio.TaskStatus[Transport],
    ) -> None:
        transport = None
        try:
            async with trio.open_nursery() as nursery:
                connection = await _shake_as_client(nursery, SocketStream(sock), target, credential, self.rng)
                claim = Claim(credential.key_id if credential else "", target.text)
                transport = PlainWebSocketTransport(connection, sock, claim)
                task_status.started(transport)
                await transport.over.wait()
                nursery.cancel_scope.cancel()
        except Exception as error:
            if transport is None:
                raise _explain(error, target.text) from error
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
        listener = _Listener(auth.Doorkeeper(authorize, self.rng), handler, self._serve)
        await listener.run(sockets.parse(address), task_status)

    async def _serve(self, sock: socket.socket, remote: str, listener: _Listener) -> None:
        async with trio.open_nursery() as nursery:
            shaken = None
            with listener.shaking(), trio.move_on_after(HANDSHAKE_S):
                shaken = await _shake_as_server(nursery, SocketStream(sock), listener.door)
            if shaken is not None:
                await listener.serve(PlainWebSocketTransport(shaken[0], sock, Claim(shaken[1], remote)))
            nursery.cancel_scope.cancel()
