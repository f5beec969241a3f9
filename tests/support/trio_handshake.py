"""Reference implementation of `fray.net.transports.handshake`: the handshake by trio-websocket.

The challenge in front of it is that of `fray.net.transports.handshake`, since trio-websocket ends a connection with the
first request that it rejects.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import trio
import trio_websocket
from trio_websocket import ConnectionRejected, WebSocketConnection

from fray.net import auth
from fray.net.transport import Credential
from fray.net.transports.handshake import offer_challenge, request_challenge
from fray.net.transports.http_upgrade import (
    BODIES,
    CHALLENGE,
    PROOF,
    RESOURCE,
    UpgradeRejected,
)
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES
from fray.net.transports.sockets import Address

# The stream that trio-websocket sees ---------------------------------------------------------------------------------


class SocketStream(trio.abc.Stream):
    """Non-blocking socket as a stream. `aclose` leaves the socket open for its owner."""

    def __init__(self, sock: socket.socket) -> None:
        # A socket of the standard library and not `trio.SocketStream`: the transport uses it directly after the
        # handshake.
        self.sock = sock
        self.received = b""
        """Bytes that were received already."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all bytes."""
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
        """Receive some bytes; none at the end."""
        if self.received:
            data, self.received = self.received, b""
            return data
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                return self.sock.recv(max_bytes or 65536)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        """Do nothing but a checkpoint: the socket belongs to its owner."""
        await trio.lowlevel.checkpoint()


# Handshakes ----------------------------------------------------------------------------------------------------------


async def upgrade_as_client(
    nursery: trio.Nursery,
    stream: SocketStream,
    address: Address,
    names: Collection[str],
    credential: Credential | None,
    rng: random.Random,
    binding: str = "",
) -> WebSocketConnection:
    """Return an upgraded connection whose listener has proven its key.

    Raises:
        Unauthorized: it has not. Errors of trio-websocket are raised by ``nursery``.
        ProtocolMismatch, UpgradeRejected, HandshakeLost: see `request_challenge`.
    """
    challenge = await request_challenge(stream.sock, address, credential, rng)
    headers, proof = [], None
    if credential is not None:
        proof = auth.DialerProof(credential.key_id, credential.key, names, binding)
        headers = [(b"Authorization", auth.write_request(proof.answer(challenge, rng)).encode())]
    # The sizes below matter to tests only, which let trio-websocket carry messages as well.
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
    if proof is not None:
        proof.verify(auth.read_response(_header(connection.handshake_headers, PROOF.encode())))
    return connection


async def upgrade_as_server(
    nursery: trio.Nursery, stream: SocketStream, challenge: auth.Challenge
) -> tuple[WebSocketConnection, str] | None:
    """Return an upgraded connection and the key id its dialer has proven; None if it was rejected."""
    stream.received = await offer_challenge(stream.sock, challenge)
    request = await trio_websocket.wrap_server_stream(
        nursery, stream, max_message_size=TRANSPORT_LIMIT_BYTES, message_queue_size=16, receive_buffer_size=65536
    )
    answered = auth.read_request(_header(request.headers, b"authorization"))
    response = challenge.authenticate(answered)
    if isinstance(response, auth.Rejection):
        await request.reject(
            response.value, extra_headers=[(CHALLENGE.encode(), b"Fray")], body=BODIES[response.value].encode()
        )
        return None
    connection = await request.accept(extra_headers=[(PROOF.encode(), auth.write_response(response).encode())])
    return connection, answered.key_id


def _header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> str | None:
    for key, value in headers:
        # Names of headers are case-insensitive.
        if key.lower() == name:
            return value.decode("latin-1")
    return None


@contextmanager
def translate_rejection() -> Iterator[None]:
    """Raise `UpgradeRejected` for trio-websocket's own error, which is inside its nursery's group."""
    try:
        yield
    # The nursery wraps errors of its tasks in groups, one inside another.
    except* ConnectionRejected as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise UpgradeRejected(cast(ConnectionRejected, first).status_code) from None
