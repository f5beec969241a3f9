"""TLS inside tunnels: the relay reads nothing, and what it changes, leaves out or answers itself is noticed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import evolve

from fray.controller.connections import relay
from fray.errors import ConnectionFailed, FrayError, ProtocolMismatch, Unauthorized
from fray.model.messages.tunnels import OpenTunnel
from fray.net import auth
from fray.net.codec import Bytes
from fray.net.transport import Credential, PeerIdentity, Transport
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES
from fray.net.transports.tls_listener import TlsServer
from fray.net.tunnels.multiplexer import PART, WINDOW_BYTES
from fray.net.tunnels.tls import TunnelTls, accept_tls, dial_tls
from fray.net.tunnels.transport import Tunnels, TunnelTransport
from fray.runtime.actors.server import host_of
from fray.testing.conformance import CASES, Case, NetworkUnderTest
from tests.support.actors import Counter
from tests.support.relay import Split, TwoEnds, open_split

SECRET = b"a secret of eighteen thousand parts" * 1000


def make_server() -> TlsServer:
    server = TlsServer()
    server.prepare()
    return server


@asynccontextmanager
async def open_secure_split() -> AsyncIterator[Split]:
    async with open_split() as split:
        split.tunnels("far").tls = make_server()
        yield split


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_tunnel_with_tls_conforms_as_a_transport(case: Case, autojump_clock: Any) -> None:
    async with open_secure_split() as split:
        address = f"relay:{split.places['far'].session}"
        await case(NetworkUnderTest(TwoEnds(split.tunnels("near"), split.tunnels("far")), address))


# What a relay sees ---------------------------------------------------------------------------------------------------


class Spy(relay.RelayEndpoint):
    """Relay that keeps what passes through it."""

    seen = bytearray()

    def on_data(self, flags: int, body: Bytes) -> None:
        self.seen.extend(body)
        super().on_data(flags, body)


@pytest.mark.parametrize("has_tls", [True, False])
async def test_the_relay_reads_calls_only_in_a_cluster_without_tls(
    has_tls: bool, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "RelayEndpoint", Spy)
    monkeypatch.setattr(Spy, "seen", bytearray())
    async with open_split() as split:
        if has_tls:
            split.tunnels("far").tls = make_server()
        endpoint = await split.serve("far", Counter())
        server = split.tunnels("far").tls
        assert endpoint.addresses[-1] == f"relay:{endpoint.incarnation}" + (f"#{server.pins[0]}" if server else "")
        way = split.way("near", endpoint)
        assert await way.call("echo", SECRET) == SECRET
        assert (SECRET[:100] in Spy.seen) == (not has_tls)
        assert len(Spy.seen) > 2 * len(SECRET)


# What a relay changes ------------------------------------------------------------------------------------------------


def ends() -> tuple[TunnelTls, TunnelTls]:
    """Both ends of an established connection."""
    server = make_server()
    near, far = dial_tls("relay:far"), accept_tls(server, "relay:near")
    near.finish(far.begin(near.begin()), server.pins)
    assert far.open(near.seal(b"proof")) == b"proof"
    assert near.open(far.seal(b"answer")) == b"answer"
    return near, far


def flip(sealed: list[bytes]) -> list[bytes]:
    return [sealed[0][:40] + bytes([sealed[0][40] ^ 1]) + sealed[0][41:], *sealed[1:]]


LIES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "changed": flip,
    "left out": lambda sealed: sealed[1:],
    "repeated": lambda sealed: [sealed[0], *sealed],
    "in another order": lambda sealed: sealed[::-1],
    "invented": lambda sealed: [b"\x17\x03\x03\x00\x20" + bytes(32), *sealed],
    "joined": lambda sealed: [b"".join(sealed)],
    "cut": lambda sealed: [sealed[0][:30], sealed[0][30:], *sealed[1:]],
    "cut between two records": lambda sealed: [sealed[0][: 16384 + 22], sealed[0][16384 + 22 :], *sealed[1:]],
}


@pytest.mark.parametrize("lie", LIES)
def test_messages_that_were_tampered_with_on_the_way_are_refused(lie: str) -> None:
    near, far = ends()
    messages = [SECRET, b"pay", b""]
    received: list[bytes] = []
    with pytest.raises(
        ConnectionFailed, match=r"came through relay:near was changed|through relay:near was cut or joined"
    ):
        received.extend(far.open(sealed) for sealed in LIES[lie]([near.seal(each) for each in messages]))
    assert received == messages[: len(received)]


def test_the_largest_message_of_a_tunnel_passes() -> None:
    near, far = ends()
    largest = bytes(TRANSPORT_LIMIT_BYTES)
    assert far.open(near.seal(largest)) == largest


@pytest.mark.parametrize("seed", range(20))
def test_each_changed_byte_of_a_handshake_is_noticed(seed: int) -> None:
    rng = random.Random(seed)
    server = make_server()
    near, far = dial_tls("relay:far"), accept_tls(server, "relay:near")
    which = seed % 3

    def damaged(data: bytes, part: int) -> bytes:
        # The version of a TLS record says nothing, and is ignored (RFC 8446, 5.1).
        at = rng.randrange(5, len(data))
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :] if part == which else data

    with pytest.raises(ConnectionFailed) as caught:
        near.finish(damaged(far.begin(damaged(near.begin(), 0)), 1), server.pins)
        assert far.open(damaged(near.seal(b"proof"), 2)) != b"proof"
    assert "failed" in str(caught.value) or "changed on the way" in str(caught.value)


class Liar(relay.RelayEndpoint):
    """Relay that changes one byte of the n-th part it passes on."""

    remaining = 0

    def on_data(self, flags: int, body: Bytes) -> None:
        Liar.remaining -= 1
        if Liar.remaining == 0:
            at = len(body) // 2
            body = bytes(body[:at]) + bytes([body[at] ^ 1]) + bytes(body[at + 1 :])
        super().on_data(flags & PART, body)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 9, 12])
async def test_a_call_is_answered_once_although_the_relay_changes_a_message(
    at: int, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "RelayEndpoint", Liar)
    monkeypatch.setattr(Liar, "remaining", at)
    async with open_secure_split() as split:
        way = split.way("near", await split.serve("far", Counter()))
        assert [await way.call("add", 5) for _ in range(5)] == [5, 10, 15, 20, 25]
        assert Liar.remaining <= 0


# Who answers ---------------------------------------------------------------------------------------------------------


async def refused(split: Split, address: str, key: str, *, match: str, kind: type[FrayError] = Unauthorized) -> None:
    with pytest.raises(kind, match=match):
        await split.tunnels("near").dial(address, Credential("caller", key), timeout_s=5)


async def enter_impostor(split: Split, monkeypatch: pytest.MonkeyPatch, tls: TlsServer | None) -> list[Transport]:
    """A process that knows even the host's key, and to which the relay leads all tunnels; returns what it accepts."""
    await split.enter("impostor")
    accepted: list[Transport] = []

    async def take(transport: Transport) -> None:
        accepted.append(transport)

    host = host_of(split.places["far"])
    tunnels = split.tunnels("impostor")
    tunnels.tls = tls
    await split.nursery.start(tunnels.listen, f"relay:{host.incarnation}", lambda _: host.key, take)
    gateway: Any = split.controller.gateway if split.controller else None
    impostor = gateway.client_tunnels(split.places["impostor"].session)
    original = relay.splice

    def splice(flow: Any, target: Any, *rest: Any) -> relay.RelayEndpoint:
        return original(flow, impostor, *rest)

    monkeypatch.setattr(relay, "splice", splice)
    return accepted


async def test_a_relay_that_answers_itself_with_the_right_key_is_refused_by_its_certificate(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_secure_split() as split:
        instance = Counter()
        endpoint = await split.serve("far", instance)
        accepted = await enter_impostor(split, monkeypatch, make_server())
        await refused(
            split,
            endpoint.addresses[-1],
            endpoint.key,
            match=r"relay:session-\w+ is not the expected process: it shows the certificate [0-9a-f]{16}…, but its "
            r"address has the fingerprint [0-9a-f]{16}…: the relay, or another process, answers in its place",
        )
        with pytest.raises(Unauthorized, match="is not the expected process"):
            await split.way("near", endpoint).call("add", 5)
        assert (accepted, instance.n) == ([], 0)


async def test_a_relay_that_leaves_tls_out_is_refused_by_both_ends(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_secure_split() as split:
        endpoint = await split.serve("far", Counter())
        address, key = endpoint.addresses[-1], endpoint.key
        plain = address.partition("#")[0]
        await refused(
            split, plain, key, kind=ProtocolMismatch, match=f"{plain} accepts only TLS; dial it as .*#FINGERPRINT"
        )
        accepted = await enter_impostor(split, monkeypatch, None)
        await refused(split, address, key, match="answers without TLS, although its address has the fingerprint")
        assert accepted == []


async def dial_as_the_previous_release(tunnels: Tunnels, address: str, key: str) -> TunnelTransport:
    """Dial without TLS to the whole address, and prove the whole address."""
    credential = Credential("caller", key)
    transport = TunnelTransport(PeerIdentity(credential.key_id, address))
    greeting = auth.write_request(auth.AuthRequest(credential.key_id)).encode()
    message = OpenTunnel(to=address.removeprefix("relay:"))
    assert tunnels._multiplexer is not None
    transport.begin(tunnels._multiplexer.open(message, greeting, transport, window_bytes=WINDOW_BYTES, counted=True))
    challenge = auth.read_challenge((await transport.wait_accepted()).decode("latin-1"))
    await tunnels._prove(transport, challenge, credential, address)
    return transport


async def test_a_caller_of_the_previous_release_is_accepted_without_tls(autojump_clock: Any) -> None:
    async with open_secure_split() as split:
        endpoint = await split.serve("far", Counter())
        address, key, near = endpoint.addresses[-1], endpoint.key, split.tunnels("near")
        (await dial_as_the_previous_release(near, address, key)).abort()
        with pytest.raises(Unauthorized, match="does not accept the key 'caller'"):
            await dial_as_the_previous_release(near, address, "guess")
        with pytest.raises(ProtocolMismatch, match="accepts only TLS"):
            await dial_as_the_previous_release(near, address[:-4] + "0000", key)


async def test_a_wrong_key_inside_of_tls_is_refused(autojump_clock: Any) -> None:
    async with open_secure_split() as split:
        endpoint = await split.serve("far", Counter())
        await refused(split, endpoint.addresses[-1], "guess", match="does not accept the key 'caller'")
        with pytest.raises(Unauthorized, match="does not accept the key ''"):
            await split.tunnels("near").dial(endpoint.addresses[-1], None, timeout_s=5)


async def test_a_host_of_an_old_registry_entry_is_refused(autojump_clock: Any) -> None:
    """The process behind an incarnation is one; another certificate in its place is never accepted."""
    async with open_secure_split() as split:
        endpoint = await split.serve("far", Counter())
        stale = evolve(endpoint, addresses=(*endpoint.addresses[:-1], endpoint.addresses[-1][:-4] + "0000"))
        with pytest.raises(Unauthorized, match="is not the expected process"):
            await split.way("near", stale).call("add", 5)
        with trio.fail_after(5):
            assert await split.way("far", endpoint).call("add", 5) == 5
