"""Handshake between processes of one machine: one message each way, and both ends have proven their key.

It is the WebSocket handshake of `fray.net.transports.http_upgrade` without a library: trio-websocket needs 8 ms and 2
MB of copied pages for it in a process that has just been forked, and this a tenth of that.
"""

from __future__ import annotations

import random
import socket

import trio

from fray.net import auth
from fray.net.transport import Credential
from fray.net.transports import http_upgrade
from fray.net.transports.sockets import Address

RECEIVE_BYTES = 4096


async def client_handshake(
    sock: socket.socket, address: Address, credential: Credential | None, rng: random.Random
) -> bytes:
    """Upgrade a dialed connection and verify its listener; return the bytes received after its head.

    Raises:
        Unauthorized: the listener does not have the key.
        UpgradeRejected, HandshakeLost: see `fray.net.transports.http_upgrade`.
        OSError: the connection broke.
    """
    key_id, secret = (credential.key_id, credential.key) if credential else ("", "")
    offered, key = auth.make_request(key_id, secret, rng), http_upgrade.make_key(rng)
    headers = {"Authorization": auth.write_request(offered)} if credential else {}
    await _send(sock, http_upgrade.write_request(address.host_header, key, headers))
    head, surplus = await _receive_head(sock, b"HTTP/1.1 ")
    answered = http_upgrade.read_response(head, key)
    # Before a frame is sent: whatever took over the path of the socket gets the hello only if it has the key.
    if credential is not None:
        auth.verify_listener(offered, secret, auth.read_response(answered.get(http_upgrade.PROOF)))
    return surplus


async def server_handshake(sock: socket.socket, authenticator: auth.Authenticator) -> tuple[str, bytes] | None:
    """Upgrade an accepted connection; return the key id its dialer has proven, and the bytes received after its head.

    None: rejected with 401.

    Raises:
        HandshakeLost: see `fray.net.transports.http_upgrade`.
        OSError: the connection broke.
    """
    head, surplus = await _receive_head(sock, b"GET ")
    key, headers = http_upgrade.read_request(head)
    offered = auth.read_request(headers.get("authorization"))
    answer = authenticator.authenticate(offered)
    # Answered and not just closed, so that the dialer reports a wrong token and not a lost connection.
    if answer is None:
        await _send(sock, http_upgrade.write_refusal(401, http_upgrade.CHALLENGE, http_upgrade.UNAUTHORIZED_BODY))
        return None
    await _send(sock, http_upgrade.write_response(key, {http_upgrade.PROOF: auth.write_response(answer)}))
    return offered.key_id, surplus


async def _send(sock: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


async def _receive_head(sock: socket.socket, first_bytes: bytes) -> tuple[bytes, bytes]:
    data = b""
    while (found := http_upgrade.split_head(data, first_bytes)) is None:
        # First without waiting: with TLS it may be here already, where the kernel does not see it.
        try:
            # May include the first frames behind the head, which are returned as the surplus.
            more = sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)
            continue
        if not more:
            # Not foreign: a listener that ends while connections wait in its queue closes them like this.
            raise http_upgrade.HandshakeLost("the connection was closed during the handshake", foreign=False)
        data += more
    return found
