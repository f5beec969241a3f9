"""A server that is dialed in place of the controller records proofs, and can open nothing with them."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import define, field

from fray.controller.serve import RunningController, run_controller
from fray.controller.store import Store
from fray.errors import FrayError, Unauthorized
from fray.net import auth
from fray.net.transport import Credential
from fray.net.transports import handshake, http_upgrade, sockets
from fray.net.transports.tls_dialer import TlsDialer
from fray.net.transports.tls_listener import TlsServer
from fray.net.transports.websocket import WebSocketNetwork
from tests.support.forwarded_port import forward_port

TOKEN = "the token of the cluster"
CREDENTIAL = Credential("cluster", TOKEN)
END = http_upgrade.BLANK_LINE


async def head_of(stream: trio.abc.Stream) -> bytes:
    """Return the next HTTP head; empty at the end of the stream."""
    head = b""
    while not head.endswith(END) and (byte := await stream.receive_some(1)):
        head += byte
    return head


async def open_stream(address: str) -> trio.SocketStream:
    if address.startswith("unix:"):
        return await trio.open_unix_socket(address.removeprefix("unix:"))
    return await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))


def is_challenge(head: bytes) -> bool:
    return head.startswith(b"HTTP/1.1 401 ") and b"Fray nonce=" in head


@define(eq=False)
class Impostor:
    """Listens on a port, challenges those who dial it, and keeps what they answer.

    Args:
        victim: address whose living challenge is passed on. Default: a challenge of its own.
    """

    victim: str = ""
    requests: list[bytes] = field(factory=list)
    answers: list[bytes] = field(factory=list)
    """First head of the victim's answer to each forwarded proof."""
    address: str = ""

    async def serve(self, task_status: trio.TaskStatus[None]) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = f"tcp:127.0.0.1:{listener.socket.getsockname()[1]}"
        await trio.serve_listeners(self._converse, [listener], task_status=task_status)

    async def _converse(self, stream: trio.SocketStream) -> None:
        announced = await head_of(stream)
        own = http_upgrade.write_challenge(auth.write_challenge("0" * 2 * auth.NONCE_BYTES))
        if not self.victim:
            await stream.send_all(own)
            self.requests.append(await head_of(stream))
            return
        async with await open_stream(self.victim) as real:
            if self.victim.startswith("tcp:"):
                await real.send_all(announced)
            await stream.send_all(await head_of(real))
            proof = await head_of(stream)
            self.requests.append(proof)
            await real.send_all(proof)
            self.answers.append(await head_of(real))


@asynccontextmanager
async def controller(
    store: Store, *addresses: str, tls_server: TlsServer | None = None
) -> AsyncIterator[RunningController]:
    async with trio.open_nursery() as nursery:
        network = WebSocketNetwork(tls_server=tls_server)
        running = await nursery.start(run_controller, store, network, addresses, TOKEN)
        yield running
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def impostor(victim: str = "") -> AsyncIterator[Impostor]:
    async with trio.open_nursery() as nursery:
        found = Impostor(victim)
        await nursery.start(found.serve)
        yield found
        nursery.cancel_scope.cancel()


async def dial_once(address: str) -> FrayError:
    with pytest.raises(FrayError) as caught:
        await WebSocketNetwork().dial(address, CREDENTIAL, timeout_s=5)
    return caught.value


async def replay(request: bytes, address: str, *, asks_first: bool) -> bytes:
    """Return the head with which a listener answers a recorded request."""
    async with await open_stream(address) as stream:
        if address.startswith("unix:"):
            assert is_challenge(await head_of(stream))
        elif asks_first:
            announced = auth.write_request(auth.AuthRequest("cluster"))
            key = http_upgrade.make_key(random.Random(1))
            await stream.send_all(http_upgrade.write_request("x", key, {"Authorization": announced}))
            assert is_challenge(await head_of(stream))
        await stream.send_all(request)
        with trio.fail_after(5):
            return await head_of(stream)


@pytest.fixture(params=["tcp", "unix"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], str]:
    return lambda number: f"unix:{tmp_path}/{number}" if request.param == "unix" else "tcp:127.0.0.1:0"


async def test_a_recorded_proof_opens_neither_listener_of_the_living_controller_nor_of_the_next(
    listen: Callable[[int], str], tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    try:
        async with impostor() as recorder:
            await dial_once(recorder.address)
            (proof,) = recorder.requests
            assert b"proof=" in proof
            for _ in range(2):
                async with controller(store, listen(1), listen(2)) as running:
                    for address in running.addresses:
                        for asks_first in (True, False):
                            answer = await replay(proof + END, address, asks_first=asks_first)
                            assert answer.startswith(b"HTTP/1.1 401 "), answer
                            assert not is_challenge(answer)
                        (await WebSocketNetwork().dial(address, CREDENTIAL, timeout_s=5)).abort()
    finally:
        store.close()


async def test_a_proof_made_for_a_certificate_opens_one_connection_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both listeners have one certificate, also after a restart: in TLS a proof is for that and not for an address. The
    proof of an honest dialer was read within TLS.
    """
    store, certificate, send, sent = Store(tmp_path / "store"), TlsServer(), handshake._send, list[bytes]()

    async def recorded_send(sock: socket.socket, data: bytes) -> None:
        sent.append(bytes(data))
        await send(sock, data)

    try:
        for life in range(2):
            async with controller(store, *["tls:127.0.0.1:0"] * 2, tls_server=certificate) as running:
                assert len({address.partition("#")[2] for address in running.addresses}) == 1
                if life == 0:
                    with monkeypatch.context() as recording:
                        recording.setattr(handshake, "_send", recorded_send)
                        (await WebSocketNetwork().dial(running.addresses[0], CREDENTIAL, timeout_s=5)).abort()
                    (proof,) = [data for data in sent if data.startswith(b"GET ")]
                    assert b"proof=" in proof
                for address in running.addresses:
                    with trio.fail_after(5), await TlsDialer().connect(sockets.parse(address)) as sock:
                        await send(sock, proof)
                        answer, _ = await handshake._receive_head(sock, b"HTTP/1.1 ")
                    assert answer.startswith(b"HTTP/1.1 401 "), answer
                    assert not is_challenge(answer)
                    (await WebSocketNetwork().dial(address, CREDENTIAL, timeout_s=5)).abort()
    finally:
        store.close()


async def test_a_proof_taken_from_the_wire_opens_no_second_connection(tmp_path: Path) -> None:
    """The recorder forwards everything, as a router does: what it has seen is of no use afterwards."""
    async with controller(Store.memory(), "tcp:127.0.0.1:0", "tcp:127.0.0.1:0") as running:
        async with trio.open_nursery() as nursery:
            seen: list[bytes] = []
            port = await nursery.start(forward_port, lambda: running.addresses[0], seen)
            # Refused as misdirected, although the proof and the challenge are those of this very connection.
            with pytest.raises(Unauthorized, match="--advertise"):
                await WebSocketNetwork().dial(f"tcp:127.0.0.1:{port}", CREDENTIAL, timeout_s=5)
            nursery.cancel_scope.cancel()
        _, proof, _ = b"".join(seen).split(END)
        for address in running.addresses:
            assert (await replay(proof + END, address, asks_first=True)).startswith(b"HTTP/1.1 401 ")


async def test_a_living_challenge_that_is_passed_on_is_answered_for_another_address(
    listen: Callable[[int], str],
) -> None:
    async with controller(Store.memory(), listen(1), listen(2)) as running:
        for address in running.addresses:
            async with impostor(victim=address) as relaying:
                await dial_once(relaying.address)
                assert [answer[:13] for answer in relaying.answers] == [b"HTTP/1.1 421 "]


async def test_with_tls_a_challenge_that_is_passed_on_is_answered_for_another_certificate() -> None:
    """Both listeners are known by their own certificates, and addresses are not compared."""
    answers: list[bytes] = []
    own = TlsServer()
    own.prepare()

    async def pass_on(sock: socket.socket, real: str) -> None:
        near, far = await own.accept(sock), await TlsDialer().connect(sockets.parse(real))
        with near, far:
            request, _ = await handshake._receive_head(near, b"GET ")
            await handshake._send(far, request + END)
            answer, _ = await handshake._receive_head(far, b"HTTP/1.1 ")
            answers.append(answer)
            await handshake._send(near, answer + END)

    async with controller(Store.memory(), "tls:127.0.0.1:0") as running:
        (address,) = running.addresses
        (await WebSocketNetwork().dial(address, CREDENTIAL, timeout_s=5)).abort()
        with sockets.listening(sockets.parse("tcp:127.0.0.1:0")) as (listener, bound):
            async with trio.open_nursery() as nursery:

                async def serve() -> None:
                    sock, _ = await sockets.accept(listener)
                    await pass_on(sock, address)

                nursery.start_soon(serve)
                refused = await dial_once(f"{bound.replace('tcp:', 'tls:')}#{own.pins[0]}")
        assert isinstance(refused, Unauthorized)
        (answer,) = answers
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert not is_challenge(answer + END)
