"""The handshake by trio-websocket, for connections between machines.

It is given a stream that ends for it at the blank line of the HTTP head; what was received behind that line is kept
for the transport that owns the socket from then on. Importing this costs 40 ms, so a process that only connects to
peers on its own machine never does.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import trio
import trio_websocket
from trio_websocket import ConnectionRejected, WebSocketConnection

from fray.net import auth
from fray.net.transport import Credential
from fray.net.transports.http_upgrade import (
    CHALLENGE,
    HEAD_LIMIT_BYTES,
    NO_ENTRY,
    PROOF,
    RESOURCE,
    HandshakeLost,
    UpgradeRejected,
)
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES
from fray.net.transports.sockets import Address

_BLANK_LINE = b"\r\n\r\n"


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


async def shake_as_client(
    nursery: trio.Nursery, stream: SocketStream, address: Address, credential: Credential | None, rng: random.Random
) -> WebSocketConnection:
    """An upgraded connection whose listener has proven itself.

    Raises:
        Unauthorized: it has not. What trio-websocket raises comes out of ``nursery``.
    """
    key_id, key = (credential.key_id, credential.key) if credential else ("", "")
    asked = auth.make_request(key_id, key, rng)
    headers = [(b"Authorization", auth.write_request(asked).encode())] if credential else []
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
        auth.verify_listener(asked, key, auth.read_response(_header(connection.handshake_headers, PROOF.encode())))
    return connection


async def shake_as_server(
    nursery: trio.Nursery, stream: SocketStream, door: auth.Authenticator
) -> tuple[WebSocketConnection, str] | None:
    """An upgraded connection and the key id its dialer has proven; None if it was turned away with 401."""
    request = await trio_websocket.wrap_server_stream(
        nursery, stream, max_message_size=TRANSPORT_LIMIT_BYTES, message_queue_size=16, receive_buffer_size=65536
    )
    asked = auth.read_request(_header(request.headers, b"authorization"))
    answer = door.authenticate(asked)
    if answer is None:
        await request.reject(401, extra_headers=_bytes(CHALLENGE), body=NO_ENTRY.encode())
        return None
    connection = await request.accept(extra_headers=[(PROOF.encode(), auth.write_response(answer).encode())])
    return connection, asked.key_id


def _header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> str | None:
    for key, value in headers:
        if key.lower() == name:
            return value.decode("latin-1")
    return None


def _bytes(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def client_handshake(
    sock: socket.socket, address: Address, credential: Credential | None, rng: random.Random
) -> bytes:
    """See `fray.net.transports.local_handshake.client_handshake`."""
    stream = HeadStream(sock, client=True)
    with translate_rejection():
        async with trio.open_nursery() as nursery:
            await shake_as_client(nursery, stream, address, credential, rng)
            nursery.cancel_scope.cancel()
    return stream.surplus


@contextmanager
def translate_rejection() -> Iterator[None]:
    """trio-websocket's word for being turned away, out of its nursery's group, in ours."""
    try:
        yield
    except* ConnectionRejected as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise UpgradeRejected(cast(ConnectionRejected, first).status_code) from None


async def server_handshake(sock: socket.socket, door: auth.Authenticator) -> tuple[str, bytes] | None:
    """See `fray.net.transports.local_handshake.server_handshake`."""
    stream = HeadStream(sock, client=False)
    async with trio.open_nursery() as nursery:
        shaken = await shake_as_server(nursery, stream, door)
        nursery.cancel_scope.cancel()
    return None if shaken is None else (shaken[1], stream.surplus)
