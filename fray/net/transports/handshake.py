"""Handshake of a connection: challenge, request, answer, and both ends have proven their key.

It is the WebSocket handshake of `fray.net.transports.http_upgrade` without a library: trio-websocket needs 8 ms and 2
MB of copied pages for it in a process that has just been forked, and twice the time of this one in any other. The tests
use it as the reference (`tests/support/trio_handshake.py`).

Between machines the dialer asks for the challenge, so that the whole is HTTP; on a Unix socket the listener sends it at
once, which saves a message; with TLS both sides have it from the handshake of TLS, which saves an exchange.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

import trio

from fray.errors import ProtocolMismatch
from fray.net import auth
from fray.net.transport import Credential
from fray.net.transports import http_upgrade
from fray.net.transports.http_upgrade import HandshakeLost, UpgradeRejected
from fray.net.transports.sockets import Address

RECEIVE_BYTES = 4096
_REQUEST, _ANSWER = b"GET ", b"HTTP/1.1 "


async def client_handshake(
    sock: socket.socket,
    address: Address,
    names: Collection[str],
    credential: Credential | None,
    rng: random.Random,
    binding: str = "",
    nonce: str = "",
) -> bytes:
    """Upgrade a dialed connection and verify its listener; return the bytes received after its head.

    Args:
        names: under which the dialer knows the listener, see `fray.net.auth`.
        binding: SHA-256 fingerprint of the certificate that the listener has shown, empty without TLS.
        nonce: challenge that both sides have from the TLS handshake. Default: the listener sends one.

    Raises:
        Unauthorized: the listener does not have the key.
        ProtocolMismatch: the listener does not challenge.
        UpgradeRejected, HandshakeLost: see `fray.net.transports.http_upgrade`.
        OSError: the connection broke.
    """
    challenge = nonce or await request_challenge(sock, address, credential, rng)
    key = http_upgrade.make_key(rng)
    if credential is None:
        await _send(sock, http_upgrade.write_request(address.host_header, key, {}))
        head, surplus = await _receive_head(sock, _ANSWER)
        http_upgrade.read_response(head, key)
        return surplus
    proof = auth.DialerProof(credential.key_id, credential.key, names, binding)
    headers = {"Authorization": auth.write_request(proof.answer(challenge, rng))}
    await _send(sock, http_upgrade.write_request(address.host_header, key, headers))
    head, surplus = await _receive_head(sock, _ANSWER)
    answered = http_upgrade.read_response(head, key)
    # Before a frame is sent: whatever took over the path of the socket gets the hello only if it has the key.
    proof.verify(auth.read_response(answered.get(http_upgrade.PROOF)))
    return surplus


async def server_handshake(sock: socket.socket, challenge: auth.Challenge) -> tuple[str, bytes] | None:
    """Upgrade an accepted connection; return the key id its dialer has proven, and the bytes received after its head.

    None: rejected, and the dialer has been sent the reason.

    Raises:
        HandshakeLost: see `fray.net.transports.http_upgrade`.
        OSError: the connection broke.
    """
    head, surplus = await _receive_head(sock, _REQUEST, await offer_challenge(sock, challenge))
    key, headers = http_upgrade.read_request(head)
    request = auth.read_request(headers.get("authorization"))
    response = challenge.authenticate(request)
    # Answered and not just closed, so that the dialer reports a wrong token and not a lost connection.
    if isinstance(response, auth.Rejection):
        await refuse(sock, response)
        return None
    await _send(sock, http_upgrade.write_response(key, {http_upgrade.PROOF: auth.write_response(response)}))
    return request.key_id, surplus


async def refuse(sock: socket.socket, rejection: auth.Rejection) -> None:
    """Send a dialer the reason why it is rejected. Raises OSError."""
    await _send(sock, http_upgrade.write_refusal(rejection.value))


# Challenges ----------------------------------------------------------------------------------------------------------


async def request_challenge(
    sock: socket.socket, address: Address, credential: Credential | None, rng: random.Random
) -> str:
    """Return the nonce with which the listener challenges a dialer that has this credential.

    Raises:
        Unauthorized: the listener asks for no proof, so it does not have the key.
        ProtocolMismatch: the listener does not challenge.
        UpgradeRejected, HandshakeLost, OSError: see `client_handshake`.
    """
    key = http_upgrade.make_key(rng)
    if sock.family != socket.AF_UNIX:
        if credential is None:
            return ""
        announced = auth.write_request(auth.AuthRequest(credential.key_id))
        await _send(sock, http_upgrade.write_request(address.host_header, key, {"Authorization": announced}))
    head, surplus = await _receive_head(sock, _ANSWER)
    try:
        http_upgrade.read_response(head, key)
    except UpgradeRejected as rejected:
        if rejected.status != 401:
            raise
        nonce = auth.read_challenge(rejected.headers.get(http_upgrade.CHALLENGE.lower()))
        if not nonce or surplus:
            raise ProtocolMismatch(
                f"{address.text} does not challenge: it runs an older version of fray; install the same version there",
                address=address.text,
            ) from None
        return nonce
    # Upgraded without a proof, of which it has none either.
    raise auth.impostor(credential.key_id if credential else "")


async def offer_challenge(sock: socket.socket, challenge: auth.Challenge) -> bytes:
    """Send the challenge; return what was received already of a request that does not ask for it.

    Raises:
        HandshakeLost, OSError: see `server_handshake`.
    """
    if sock.family == socket.AF_UNIX:
        await _send(sock, http_upgrade.write_challenge(auth.write_challenge(challenge.nonce)))
        return b""
    head, surplus = await _receive_head(sock, _REQUEST)
    _, headers = http_upgrade.read_request(head)
    # A dialer without a key, a client of another make, or a recorded proof: this request is the last one, and decides.
    if not auth.is_challenge_wanted(headers.get("authorization")):
        return head + http_upgrade.BLANK_LINE + surplus
    await _send(sock, http_upgrade.write_challenge(auth.write_challenge(challenge.nonce)))
    return surplus


async def _send(sock: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


async def _receive_head(sock: socket.socket, first_bytes: bytes, data: bytes = b"") -> tuple[bytes, bytes]:
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
            raise HandshakeLost("the connection was closed during the handshake", foreign=False)
        data += more
    return found
