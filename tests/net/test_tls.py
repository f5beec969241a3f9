"""TLS: certificates and their validity, whom a dialer accepts, rotation, and the non-blocking socket."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import pytest
import trio
import trustme

from fray.errors import InvalidRequest, ProtocolMismatch, Unauthorized, Unreachable
from fray.net.tls import certificates
from fray.net.tls.certificates import SKEW_S, check_identity, read_certificate
from fray.net.tls.identity import (
    CONTROLLER_NAME,
    TlsIdentity,
    check_fingerprint,
    read_pem,
    server_context,
    unverified_context,
    write_pem,
)
from fray.net.transport import Transport
from fray.net.transports import handshake as client_server
from fray.net.transports import http_upgrade, sockets
from fray.net.transports.tls_dialer import TlsDialer
from fray.net.transports.tls_listener import TlsServer
from fray.net.transports.tls_socket import RECORD_BYTES, TlsSocket, session_challenge, wrap
from fray.net.transports.websocket import WebSocketNetwork
from fray.testing.conformance import CREDENTIAL, NetworkUnderTest, listener, receive_all

T = TypeVar("T")
NOW = 1_800_000_000.0


def pin(identity: TlsIdentity) -> str:
    return identity.fingerprint


def der(identity: TlsIdentity) -> bytes:
    return read_pem(identity.chain)[0]


def controller_server(*authorities: TlsIdentity, now: float | None = None, cross: bytes = b"") -> TlsServer:
    """Certificates of a controller whose current authority is the first one."""
    identity = certificates.issue_controller(authorities[0], time.time() if now is None else now)
    own = read_pem(identity.chain)[0]
    chain = write_pem([own]) + cross + b"".join(each.chain for each in authorities)
    pins = [pin(each) for each in authorities]
    return TlsServer(TlsIdentity(chain, identity.key), [der(each) for each in authorities], pins)


@asynccontextmanager
async def listening(server: TlsServer) -> AsyncIterator[tuple[str, trio.MemoryReceiveChannel[Transport]]]:
    """A listener of this certificate; yields its address without fingerprints, and the accepted transports."""
    bench = NetworkUnderTest(WebSocketNetwork(tls_server=server), "tls:127.0.0.1:0")
    async with listener(bench) as (address, accepted):
        yield address.partition("#")[0], accepted


# Certificates --------------------------------------------------------------------------------------------------------


def test_a_certificate_says_what_it_is_for_and_until_when() -> None:
    authority = certificates.make_authority("lab", NOW)
    controller = read_certificate(certificates.issue_controller(authority, NOW).chain)
    assert controller.names == (CONTROLLER_NAME,)
    assert controller.issuer == "CN=lab"
    assert (controller.not_before_s, controller.not_after_s) == (NOW - SKEW_S, NOW + 86400)
    assert controller.half_life_s == NOW + 43200
    assert not controller.is_authority
    node = certificates.issue_node(authority, "gpu-7/a", certificates.make_request(certificates.make_key()), NOW)
    assert read_certificate(node).names == ("fray:node/gpu-7/a",)
    assert read_certificate(authority.chain).is_authority
    assert read_certificate(authority.chain).fingerprint == authority.fingerprint


def test_a_certificate_does_not_outlive_its_authority() -> None:
    authority = certificates.make_authority("lab", NOW, life_s=3600)
    assert read_certificate(certificates.issue_controller(authority, NOW).chain).not_after_s == NOW + 3600


def test_keys_are_not_shown() -> None:
    authority = certificates.make_authority("lab", NOW)
    assert "PRIVATE" in authority.key.decode()
    assert "PRIVATE" not in repr(authority)


@pytest.mark.parametrize(
    ("request_text", "message"),
    [(b"x", "damaged signing request"), (b"x" * 9000, "over the limit of 8192")],
)
def test_a_signing_request_that_cannot_be_read_is_refused(request_text: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        certificates.issue_node(certificates.make_authority("lab", NOW), "n1", request_text, NOW)


def test_a_signing_request_that_was_changed_is_refused() -> None:
    request = certificates.make_request(certificates.make_key())
    lines = request.splitlines()
    # The last line before the end is of the signature.
    lines[-2] = bytes(reversed(lines[-2].rstrip(b"="))) + b"=" * lines[-2].count(b"=")
    with pytest.raises(InvalidRequest, match="signing request"):
        certificates.issue_node(certificates.make_authority("lab", NOW), "n1", b"\n".join(lines), NOW)


def test_an_operators_authority_is_checked_before_it_is_used() -> None:
    one, other = certificates.make_authority("one", NOW), certificates.make_authority("other", NOW)
    check_identity(one, "--ca-cert", NOW, authority=True)
    with pytest.raises(InvalidRequest, match="--ca-cert: the key does not belong to the certificate CN=one"):
        check_identity(TlsIdentity(one.chain, other.key), "--ca-cert", NOW, authority=True)
    with pytest.raises(InvalidRequest, match=r"must have CA:TRUE"):
        check_identity(certificates.issue_controller(one, NOW), "--ca-cert", NOW, authority=True)
    with pytest.raises(InvalidRequest, match=r"PEM"):
        check_identity(TlsIdentity(b"nothing", one.key), "--ca-cert", NOW, authority=True)
    with pytest.raises(InvalidRequest, match="without a password"):
        check_identity(TlsIdentity(one.chain, b"nothing"), "--ca-cert", NOW, authority=True)


def test_clocks_that_differ_are_named_with_the_difference() -> None:
    authority = certificates.make_authority("lab", NOW)
    # Ten minutes are tolerated.
    check_identity(authority, "ca", NOW - SKEW_S, authority=True)
    with pytest.raises(InvalidRequest, match="the clocks differ by 60 min or more"):
        check_identity(authority, "ca", NOW - 3600, authority=True)
    info = read_certificate(certificates.issue_controller(authority, NOW).chain)
    text = certificates.validity_text(info, NOW + 86400 + 3 * 3600)
    assert "expired at 2027-01-16 08:00:00 UTC" in text
    assert "3 h later: if the clocks are right it has not been renewed" in text


@pytest.mark.parametrize("written", ["AB" * 32, "sha256:" + "ab" * 32, ":".join(["AB"] * 32), " " + "ab" * 32 + "\n"])
def test_fingerprints_of_other_tools_are_read(written: str) -> None:
    assert check_fingerprint(written, "here") == "ab" * 32


def test_what_is_not_a_fingerprint_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="FRAY_CA_FINGERPRINT: 'abc' is not a fingerprint: expected the 64"):
        check_fingerprint("abc", "FRAY_CA_FINGERPRINT")


# Whom a dialer accepts -----------------------------------------------------------------------------------------------


async def dial(address: str, network: WebSocketNetwork | None = None) -> Transport:
    return await (network or WebSocketNetwork()).dial(address, CREDENTIAL, timeout_s=10)


async def test_a_listener_is_known_by_the_fingerprint_of_its_authority() -> None:
    authority, network = certificates.make_authority("lab", time.time()), WebSocketNetwork()
    async with listening(controller_server(authority)) as (address, accepted):
        # The second dial knows the authority already.
        for _ in range(2):
            near = await dial(f"{address}#{pin(authority)}", network)
            far = await accepted.receive()
            await near.send([b"well"])
            assert await receive_all(far, 1) == [b"well"]
            near.abort()


async def test_a_listener_of_another_authority_is_an_impostor() -> None:
    ours, other = (certificates.make_authority(name, time.time()) for name in ("ours", "other"))
    async with listening(controller_server(other)) as (address, _):
        with pytest.raises(Unauthorized, match="is not the expected server") as caught:
            await dial(f"{address}#{pin(ours)}")
    assert caught.value.details["impostor"]


async def test_an_impostor_that_sends_along_the_right_authority_is_found_out() -> None:
    ours, other = (certificates.make_authority(name, time.time()) for name in ("ours", "other"))
    false = certificates.issue_controller(other, time.time())
    async with listening(TlsServer(TlsIdentity(false.chain + ours.chain, false.key))) as (address, _):
        with pytest.raises(Unauthorized, match="was not issued by the expected authority"):
            await dial(f"{address}#{pin(ours)}")


async def test_a_certificate_of_a_foreign_authority_is_refused() -> None:
    lab, ours = trustme.CA(), certificates.make_authority("ours", time.time())
    leaf = lab.issue_cert(CONTROLLER_NAME)
    chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    server = TlsServer(TlsIdentity(chain + ours.chain, leaf.private_key_pem.bytes()))
    async with listening(server) as (address, _):
        with pytest.raises(Unauthorized, match="was not issued by the expected authority"):
            await dial(f"{address}#{pin(ours)}")


async def test_an_authority_of_the_lab_issues_certificates_too() -> None:
    # Of RSA or ECDSA, issued by another one: what counts is its own certificate.
    lab = trustme.CA(key_type=trustme.KeyType.ECDSA)
    authority = TlsIdentity(lab.cert_pem.bytes(), lab.private_key_pem.bytes())
    check_identity(authority, "--ca-cert", time.time(), authority=True)
    async with listening(controller_server(authority)) as (address, accepted):
        near = await dial(f"{address}#{pin(authority)}")
        await accepted.receive()
        near.abort()


async def test_a_node_cannot_pass_for_the_controller() -> None:
    authority, key = certificates.make_authority("lab", time.time()), certificates.make_key()
    node = certificates.issue_node(authority, "n1", certificates.make_request(key), time.time())
    async with listening(TlsServer(TlsIdentity(node + authority.chain, key))) as (address, _):
        with pytest.raises(Unauthorized, match="certificate") as caught:
            await dial(f"{address}#{pin(authority)}")
    assert caught.value.details["impostor"]


async def test_a_host_of_actors_is_known_by_its_own_fingerprint() -> None:
    network = WebSocketNetwork()
    async with listener(NetworkUnderTest(network, "tls:127.0.0.1:0")) as (address, accepted):
        assert address.endswith(f"#{network.tls_server.pins[0]}")
        near = await dial(address)
        await accepted.receive()
        near.abort()
        with pytest.raises(Unauthorized, match="is not the expected server"):
            await dial(address.partition("#")[0] + "#" + "ab" * 32)


async def test_an_address_without_a_fingerprint_is_not_dialed() -> None:
    with pytest.raises(InvalidRequest, match="expected tls:HOST:PORT#FINGERPRINT"):
        await dial("tls:127.0.0.1:1")


@pytest.mark.parametrize(
    ("issued_s_ago", "message"),
    [(-3600.0, r"the clocks differ by 60 min or more"), (2 * 86400.0, r"expired at .* 24 h later")],
)
async def test_a_certificate_that_is_not_valid_now_names_the_difference_of_the_clocks(
    issued_s_ago: float, message: str
) -> None:
    authority = certificates.make_authority("lab", time.time() - 3 * 86400)
    async with listening(controller_server(authority, now=time.time() - issued_s_ago)) as (address, _):
        # Unreachable, which is dialed again: it proves nothing about the peer.
        with pytest.raises(Unreachable, match=message):
            await dial(f"{address}#{pin(authority)}")


async def test_clocks_nine_minutes_apart_are_tolerated() -> None:
    authority = certificates.make_authority("lab", time.time() + 540)
    async with listening(controller_server(authority, now=time.time() + 540)) as (address, accepted):
        near = await dial(f"{address}#{pin(authority)}")
        await accepted.receive()
        near.abort()


async def test_both_ends_know_the_fingerprint_of_the_listener() -> None:
    server = TlsServer()
    async with listening(server) as (address, accepted):
        near = await dial(f"{address}#{server.pins[0]}")
        far = await accepted.receive()
        assert near._sock.binding == far._sock.binding == server.pins[0]  # type: ignore[attr-defined]
        near.abort()


# Rotation ------------------------------------------------------------------------------------------------------------


async def test_dialers_of_the_old_and_the_new_authority_connect_while_it_is_replaced() -> None:
    old, new = (certificates.make_authority(name, time.time()) for name in ("old", "new"))
    server, network = controller_server(old), WebSocketNetwork()
    async with listening(server) as (address, accepted):
        before = await dial(f"{address}#{pin(old)}", network)
        both = controller_server(new, old, cross=certificates.cross_sign(new, old, time.time()))
        server._made = both._made
        # A process that has known the old authority for long, one that begins with it, and one that has the new one.
        for dialer, pins in (
            (network, pin(old)),
            (None, pin(old)),
            (None, pin(new)),
            (network, f"{pin(old)},{pin(new)}"),
        ):
            near = await dial(f"{address}#{pins}", dialer)
            await accepted.receive()
            near.abort()
        # What was open before is not disturbed.
        await before.send([b"still here"])
        before.abort()


async def test_a_dialer_with_two_fingerprints_follows_when_the_old_authority_has_gone() -> None:
    old, new = (certificates.make_authority(name, time.time()) for name in ("old", "new"))
    server, network = controller_server(old), WebSocketNetwork()
    async with listening(server) as (address, accepted):
        (await dial(f"{address}#{pin(old)},{pin(new)}", network)).abort()
        server._made = controller_server(new)._made
        near = await dial(f"{address}#{pin(old)},{pin(new)}", network)
        near.abort()
        with pytest.raises(Unauthorized):
            await dial(f"{address}#{pin(old)}", network)
        assert accepted.statistics().current_buffer_used == 2


async def test_three_fingerprints_are_too_many() -> None:
    pins = ",".join(["ab" * 32, "cd" * 32, "ef" * 32])
    with pytest.raises(InvalidRequest, match="at most 2 fingerprints"):
        await dial(f"tls:127.0.0.1:1#{pins}")


# Certificates of nodes -----------------------------------------------------------------------------------------------


def node_identity(authority: TlsIdentity, node: str, now: float) -> TlsIdentity:
    key = certificates.make_key()
    return TlsIdentity(certificates.issue_node(authority, node, certificates.make_request(key), now), key)


async def test_the_controller_knows_a_node_by_its_certificate() -> None:
    authority = certificates.make_authority("lab", time.time())
    network = WebSocketNetwork(tls_dialer=TlsDialer(node_identity(authority, "n1", time.time())))
    async with listening(controller_server(authority)) as (address, accepted):
        (await dial(f"{address}#{pin(authority)}", network)).abort()
        assert (await accepted.receive()).peer.uris == ("fray:node/n1",)
        (await dial(f"{address}#{pin(authority)}")).abort()
        assert (await accepted.receive()).peer.uris == ()


@pytest.mark.parametrize("kind", ["expired", "of another authority"])
async def test_a_node_whose_certificate_is_not_accepted_still_connects_with_its_key(kind: str) -> None:
    authority, other = (certificates.make_authority(name, time.time() - 5 * 86400) for name in ("lab", "other"))
    issuer, issued = (authority, time.time() - 3 * 86400) if kind == "expired" else (other, time.time())
    dialer = TlsDialer(node_identity(issuer, "n1", issued))
    async with listening(controller_server(authority)) as (address, accepted):
        near = await dial(f"{address}#{pin(authority)}", WebSocketNetwork(tls_dialer=dialer))
        far = await accepted.receive()
        await near.send([b"a new certificate, please"])
        assert await receive_all(far, 1) == [b"a new certificate, please"]
        assert far.peer.uris == ()
        assert dialer.identity is None
        near.abort()


# Peers that speak something else -------------------------------------------------------------------------------------


async def test_a_dialer_without_tls_learns_what_is_missing() -> None:
    async with listening(TlsServer()) as (address, _):
        with pytest.raises(ProtocolMismatch, match=r"requires TLS.*FRAY_CA_FINGERPRINT"):
            await dial(address.replace("tls:", "tcp:"))


async def test_a_listener_without_tls_is_not_accepted() -> None:
    async with listener(NetworkUnderTest(WebSocketNetwork(), "tcp:127.0.0.1:0")) as (address, _):
        with pytest.raises((ProtocolMismatch, Unreachable), match="TLS"):
            await dial(address.replace("tcp:", "tls:") + "#" + "ab" * 32)


@pytest.mark.parametrize("moment", ["connected", "during the handshake"])
async def test_a_connection_that_is_reset_before_it_is_encrypted_is_a_lost_one(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen()
        is_connected, is_reset = trio.Event(), trio.Event()

        async def reset() -> None:
            sock, _ = await listener.accept()
            await is_connected.wait()
            if moment != "connected":
                await sock.recv(1)
            # Closed like this, the kernel sends a reset.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            is_reset.set()

        connect = sockets.connect

        async def connect_late(address: sockets.Address) -> tuple[socket.socket, str]:
            found = await connect(address)
            is_connected.set()
            if moment == "connected":
                await is_reset.wait()
            return found

        monkeypatch.setattr(sockets, "connect", connect_late)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reset)
            with pytest.raises(Unreachable, match="the connection was lost during the handshake"):
                await dial(f"tls:127.0.0.1:{listener.getsockname()[1]}#{'0' * 64}")


async def test_older_versions_of_tls_are_refused() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(TlsServer()) as (address, _):
        stream = await trio.open_ssl_over_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]), ssl_context=context)
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        await trio.aclose_forcefully(stream)


async def test_a_peer_that_stops_in_its_handshake_holds_up_only_itself() -> None:
    server = TlsServer()
    async with listening(server) as (address, accepted):
        silent = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
        await silent.send_all(b"\x16\x03\x01")
        near = await dial(f"{address}#{server.pins[0]}")
        await accepted.receive()
        near.abort()
        await silent.aclose()


# The challenge -------------------------------------------------------------------------------------------------------


def without_session_challenge(monkeypatch: pytest.MonkeyPatch, make: Callable[[], T]) -> T:
    """Return what ``make`` makes as the release before made it: without the ALPN name."""
    with monkeypatch.context() as patch:
        patch.setattr(ssl, "CHANNEL_BINDING_TYPES", [])
        return make()


@pytest.mark.parametrize("older", ["neither", "dialer", "listener"])
async def test_the_challenge_is_in_the_tls_handshake_or_sent_as_in_the_release_before(
    older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    original = http_upgrade.write_challenge
    monkeypatch.setattr(http_upgrade, "write_challenge", lambda nonce: sent.append(nonce) or original(nonce))
    server, dialer = TlsServer(), TlsDialer()
    if older == "listener":
        without_session_challenge(monkeypatch, server.prepare)
    if older == "dialer":
        dialer = without_session_challenge(monkeypatch, TlsDialer)
    async with listening(server) as (address, accepted):
        near = await dial(f"{address}#{server.pins[0]}", WebSocketNetwork(tls_dialer=dialer))
        await near.send([b"hello"])
        far = await accepted.receive()
        assert await far.receive() == b"hello"
        near.abort()
    assert len(sent) == (older != "neither")


async def test_both_ends_have_the_same_challenge_and_each_connection_another() -> None:
    async with tls_pair() as first, tls_pair() as second:
        found = [session_challenge(sock) for sock in (*first, *second)]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]
    assert min(map(len, found)) >= 64


async def test_a_proof_that_is_passed_on_by_one_with_the_certificates_key_is_refused() -> None:
    """The connections to the dialer and to the listener have different challenges."""
    server = TlsServer()
    answers: list[bytes] = []
    async with listening(server) as (real, _):
        with sockets.listening(sockets.parse("tcp:127.0.0.1:0")) as (between, bound):

            async def pass_on() -> None:
                near = await server.accept((await sockets.accept(between))[0])
                far = await TlsDialer().connect(sockets.parse(f"{real}#{server.pins[0]}"))
                with near, far:
                    request, _ = await client_server._receive_head(near, b"GET ")
                    await client_server._send(far, request + http_upgrade.BLANK_LINE)
                    answer, _ = await client_server._receive_head(far, b"HTTP/1.1 ")
                    answers.append(answer)
                    await client_server._send(near, answer + http_upgrade.BLANK_LINE)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(pass_on)
                with pytest.raises(Unauthorized):
                    await dial(f"{bound.replace('tcp:', 'tls:')}#{server.pins[0]}")
    assert answers[0].startswith(b"HTTP/1.1 401 ")


# The socket ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def tls_pair() -> AsyncIterator[tuple[TlsSocket, TlsSocket]]:
    """Both ends of a TLS connection, with small buffers."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    near = wrap(ends[0], unverified_context(), server_name=CONTROLLER_NAME)
    far = wrap(ends[1], server_context(certificates.make_host(time.time())))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.handshake)
            nursery.start_soon(far.handshake)
        yield near, far
    finally:
        near.close()
        far.close()


def read_all(sock: TlsSocket) -> bytes:
    """Read until nothing is there."""
    data = b""
    while True:
        try:
            data += sock.recv(100_000)
        except BlockingIOError:
            return data


async def test_a_full_socket_takes_part_of_the_buffers_and_continues_there() -> None:
    rng = random.Random(5)
    parts = [rng.randbytes(rng.choice((1, 14, 300, 16384, 40_000))) for _ in range(60)]
    expected, received, blocked = b"".join(parts), b"", 0
    async with tls_pair() as (near, far):
        rest = expected
        while rest:
            # As one buffer or cut differently than the last time: only the bytes are the same.
            cut = rng.randrange(len(rest))
            try:
                count = near.sendmsg([rest[:cut], memoryview(rest)[cut:]] if rng.random() < 0.5 else [rest])
                rest = rest[count:]
            except BlockingIOError:
                blocked += 1
                received += read_all(far)
        assert received + read_all(far) == expected
        assert blocked > 10


async def test_a_control_frame_that_did_not_go_out_does_not_hinder_what_follows() -> None:
    async with tls_pair() as (near, far):
        with pytest.raises(BlockingIOError):
            while True:
                near.send(b"\x8a pong")
        # Given up by the sender, but OpenSSL has begun it.
        received = b""
        while True:
            try:
                near.send(b"\x82 message")
                break
            except BlockingIOError:
                received += read_all(far)
        received += read_all(far)
        assert received.endswith(b"\x8a pong\x82 message")
        assert received.count(b"\x82 message") == 1


async def test_records_that_have_arrived_together_are_received_together() -> None:
    async with tls_pair() as (near, far):
        for word in (b"one, ", b"two, ", b"three"):
            near.send(word)
        assert far.recv(100) == b"one, two, three"
        assert not far.has_received
        near.send(b"in two parts")
        assert far.recv(6) == b"in two"
        # The kernel has nothing to report.
        assert far.has_received
        assert far.recv(100) == b" parts"


async def test_the_rest_of_a_record_is_waited_for() -> None:
    async with tls_pair() as (near, far):
        record = b"x" * RECORD_BYTES
        near.send(b"first")
        with pytest.raises(BlockingIOError):
            near.send(record)
        assert far.recv(RECORD_BYTES) == b"first"
        with pytest.raises(BlockingIOError):
            far.recv(RECORD_BYTES)
        assert not far.has_received
        # What was not taken is repeated; the kernel takes another part of it here.
        while True:
            try:
                assert near.send(record) == RECORD_BYTES
                break
            except BlockingIOError:
                with pytest.raises(BlockingIOError):
                    far.recv(RECORD_BYTES)
        assert far.recv(RECORD_BYTES) == record


async def test_the_end_is_announced_before_the_socket_closes() -> None:
    async with tls_pair() as (near, far):
        near.send(b"last words")
        near.close()
        assert far.recv(100) == b"last words"
        assert far.recv(100) == b""
        # Without the announcement the end could have been made by any router.
        assert far.tls.read(100) == b""


async def test_content_of_a_record_that_was_read_in_part_is_not_waited_for() -> None:
    server = TlsServer()
    async with listening(server) as (address, accepted):
        near = await dial(f"{address}#{server.pins[0]}")
        far = await accepted.receive()
        # Received into its place, all of which is in records that are in memory when the first part is read.
        far.place_into(8, lambda first, size: memoryview(bytearray(size)))  # type: ignore[attr-defined]
        messages = [bytes([n]) * 50_000 for n in range(50)]
        async with trio.open_nursery() as nursery:
            for message in messages:
                nursery.start_soon(partial(near.send, [message]))
                with trio.fail_after(10):
                    await far.receive()
        near.abort()
