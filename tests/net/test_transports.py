"""All transports through one suite; then what is particular to WebSockets: strangers, impostors, broken rules."""

from __future__ import annotations

import random
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
import trio_websocket
import websockets.exceptions
import websockets.sync.client
import websockets.sync.server

from fray.errors import (
    ConnectionFailed,
    InvalidRequest,
    MessageTooLarge,
    ProtocolMismatch,
    Refused,
    Unauthorized,
    Unreachable,
)
from fray.net.channel.session import HEARTBEAT_S, SILENT_PERIODS
from fray.net.transport import Credential, Network, Transport
from fray.net.transports import sockets, websocket_frames
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES, MemoryNetwork, MessageFault
from fray.net.transports.websocket import WebSocketNetwork, named
from fray.net.transports.websocket_frames import Control, Reader
from fray.testing.conformance import (
    CASES,
    CREDENTIAL,
    Case,
    NetworkUnderTest,
    authorize,
    connected,
    listener,
    receive_all,
)
from tests.support.forwarded_port import forward_port
from tests.support.plain_websocket import PlainWebSocketNetwork

KINDS = ["memory", "tcp", "tls", "unix", "plain tcp", "plain unix"]


@asynccontextmanager
async def bench_of(kind: str, tmp_path: Path) -> AsyncIterator[NetworkUnderTest]:
    address = "tcp:127.0.0.1:0" if kind.endswith("tcp") else f"unix:{tmp_path}/socket"
    async with trio.open_nursery() as nursery:
        if kind == "memory":
            yield NetworkUnderTest(MemoryNetwork(random.Random(0)), "memory:host")
        elif kind.startswith("plain"):
            yield NetworkUnderTest(PlainWebSocketNetwork(nursery), address)
        elif kind == "tls":
            yield NetworkUnderTest(WebSocketNetwork(), "tls:127.0.0.1:0")
        else:
            yield NetworkUnderTest(WebSocketNetwork(), address)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_transport_conforms(case: Case, kind: str, tmp_path: Path) -> None:
    async with bench_of(kind, tmp_path) as bench:
        await case(bench)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize(("dialing", "listening"), [("lean", "plain"), ("plain", "lean")])
async def test_both_websocket_transports_understand_each_other(
    dialing: str, listening: str, kind: str, tmp_path: Path
) -> None:
    at = "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/socket"
    rng = random.Random(3)
    messages = [rng.randbytes(rng.choice((0, 1, 125, 126, 65535, 65536, 300_000))) for _ in range(50)]
    async with trio.open_nursery() as nursery:
        networks: dict[str, Network] = {"lean": WebSocketNetwork(), "plain": PlainWebSocketNetwork(nursery)}

        async def echo(transport: Transport) -> None:
            while True:
                await transport.send([await transport.receive()])

        address = await nursery.start(networks[listening].listen, at, authorize, ends_quietly(echo))
        near = await networks[dialing].dial(address, CREDENTIAL, timeout_s=5)
        for message in messages:
            await near.send([message])
            assert await receive_all(near, 1) == [message]
        await near.aclose()
        nursery.cancel_scope.cancel()


def ends_quietly(handler: Callable[[Transport], object]) -> Callable[[Transport], object]:
    async def quiet(transport: Transport) -> None:
        try:
            await handler(transport)  # type: ignore[misc]
        except ConnectionFailed:
            return

    return quiet


# Strangers that speak WebSocket --------------------------------------------------------------------------------------


@contextmanager
def websockets_server(handler: Callable[[websockets.sync.server.ServerConnection], None]) -> Iterator[int]:
    with websockets.sync.server.serve(handler, "127.0.0.1", 0, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


def echo_sync(connection: websockets.sync.server.ServerConnection) -> None:
    connection.ping(b"are you there?")
    for message in connection:
        connection.send(message)
    connection.close()


async def test_the_dialer_connects_to_a_server_of_the_websockets_library() -> None:
    with websockets_server(echo_sync) as port:
        transport = await WebSocketNetwork().dial(f"tcp:127.0.0.1:{port}", None, timeout_s=5)
        for size in (0, 1, 125, 126, 65535, 65536, 1_000_000):
            await transport.send([b"x" * size])
            assert len(await transport.receive()) == size
        await transport.aclose()


async def test_a_server_without_proof_is_an_impostor() -> None:
    with websockets_server(echo_sync) as port, pytest.raises(Unauthorized, match="does not have the key"):
        await WebSocketNetwork().dial(f"tcp:127.0.0.1:{port}", CREDENTIAL, timeout_s=5)


def accept_all(key_id: str) -> str | None:
    return "" if key_id == "" else None


async def test_the_listener_accepts_a_client_of_the_websockets_library() -> None:
    seen: list[int] = []

    def talk(port: int) -> None:
        with websockets.sync.client.connect(f"ws://127.0.0.1:{port}", max_size=None) as client:
            for size in (0, 1, 125, 126, 65535, 65536, 1_000_000):
                client.send(b"x" * size)
                seen.append(len(client.recv()))
            client.send([b"in ", b"three ", b"frames"])
            assert client.recv() == b"in three frames"
            assert client.ping(b"hello?").wait(5)

    async def echo(transport: Transport) -> None:
        while True:
            await transport.send([await transport.receive()])

    async with trio.open_nursery() as nursery:
        address = await nursery.start(WebSocketNetwork().listen, "tcp:127.0.0.1:0", accept_all, ends_quietly(echo))
        await trio.to_thread.run_sync(talk, int(address.rsplit(":", 1)[1]))
        nursery.cancel_scope.cancel()
    assert seen == [0, 1, 125, 126, 65535, 65536, 1_000_000]


async def test_the_listener_accepts_a_client_of_trio_websocket() -> None:
    async def echo(transport: Transport) -> None:
        while True:
            await transport.send([await transport.receive()])

    async with trio.open_nursery() as nursery:
        address = await nursery.start(WebSocketNetwork().listen, "tcp:127.0.0.1:0", accept_all, ends_quietly(echo))
        port = int(address.rsplit(":", 1)[1])
        async with trio_websocket.open_websocket("127.0.0.1", port, "/", use_ssl=False) as connection:
            for size in (0, 1, 125, 126, 65535, 65536, 500_000):
                await connection.send_message(b"x" * size)
                assert len(await connection.get_message()) == size
            await connection.ping(b"there?")
        nursery.cancel_scope.cancel()


# Strangers that do not -----------------------------------------------------------------------------------------------


async def say(port: int, data: bytes) -> bytes:
    """Return the answer of a listener to these bytes, until it closes."""
    answer = b""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        await stream.send_all(data)
        with trio.fail_after(5):
            try:
                while more := await stream.receive_some():
                    answer += more
            except trio.BrokenResourceError:
                pass
    return answer


UPGRADE = (
    b"GET /fray HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


async def test_an_unauthenticated_peer_gets_401_before_a_frame_is_read() -> None:
    async with listener(NetworkUnderTest(WebSocketNetwork(), "tcp:127.0.0.1:0")) as (address, accepted):
        port = int(address.rsplit(":", 1)[1])
        frame = websocket_frames.head(websocket_frames.BINARY, 5, True) + b"hello"
        answer = await say(port, UPGRADE + b"\r\n" + frame)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert accepted.statistics().current_buffer_used == 0


@pytest.mark.parametrize("names", ["127.0.0.1:PORT", "localhost:PORT", "other.example", "127.0.0.1"])
async def test_a_forwarded_port_is_dialed_by_the_names_that_the_listener_was_given(names: str) -> None:
    async with trio.open_nursery() as nursery:
        own: list[str] = []
        network = WebSocketNetwork(names=own)
        address = await nursery.start(network.listen, "tcp:127.0.0.1:0", authorize, ends_quietly(Transport.receive))
        port = await nursery.start(forward_port, lambda: address, [])
        own.append(names.replace("PORT", str(port)))
        dialed = f"tcp:{'localhost' if names.startswith('localhost') else '127.0.0.1'}:{port}"
        if "PORT" in names:
            (await WebSocketNetwork().dial(dialed, CREDENTIAL, timeout_s=5)).abort()
        else:
            with pytest.raises(Unauthorized, match="start that server with --advertise HOST:PORT"):
                await WebSocketNetwork().dial(dialed, CREDENTIAL, timeout_s=5)
        (await WebSocketNetwork().dial(address, CREDENTIAL, timeout_s=5)).abort()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("bound", "dialed"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.9"),
        ("0.0.0.0", "localhost"),
        ("[::]", "[::1]"),
        ("[::]", "127.0.0.1"),
    ],
)
async def test_a_listener_at_all_addresses_knows_each_of_them(bound: str, dialed: str) -> None:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(
            WebSocketNetwork().listen, f"tcp:{bound}:0", authorize, ends_quietly(Transport.receive)
        )
        port = address.rpartition(":")[2]
        (await WebSocketNetwork().dial(f"tcp:{dialed}:{port}", CREDENTIAL, timeout_s=5)).abort()
        nursery.cancel_scope.cancel()


async def test_a_unix_socket_may_be_dialed_by_any_path_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "socket")
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    async with listener(NetworkUnderTest(WebSocketNetwork(), f"unix:{tmp_path}/socket")):
        for path in ("socket", "link", "elsewhere/socket"):
            (await WebSocketNetwork().dial(f"unix:{tmp_path}/{path}", CREDENTIAL, timeout_s=5)).abort()


@pytest.mark.parametrize(
    ("host", "port", "name"),
    [
        ("LOCALHOST", 1, "tcp:localhost:1"),
        ("[::1]", 1, "tcp:[::1]:1"),
        ("0:0:0:0:0:0:0:1", 1, "tcp:[::1]:1"),
        ("::ffff:10.0.0.5", 1, "tcp:10.0.0.5:1"),
        ("fe80::1%eth0", 1, "tcp:[fe80::1]:1"),
    ],
)
def test_a_tcp_address_has_one_spelling(host: str, port: int, name: str) -> None:
    assert sockets.tcp_name(host, port) == name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("lab.example", "tcp:lab.example:7"),
        ("lab.example:443", "tcp:lab.example:443"),
        ("::1", "tcp:[::1]:7"),
        ("[::1]:443", "tcp:[::1]:443"),
        ("[::1]", "tcp:[::1]:7"),
    ],
)
def test_a_name_of_this_machine_has_the_port_of_the_listener_by_default(given: str, name: str) -> None:
    assert named(given, 7) == name


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 64, b"SSH-2.0-OpenSSH_9\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET " + b"x" * 20_000, b"", UPGRADE],
    ids=["zeros", "ssh", "no upgrade", "endless head", "nothing", "half a head"],
)
async def test_garbage_ends_only_its_own_connection(garbage: bytes) -> None:
    bench = NetworkUnderTest(WebSocketNetwork(), "tcp:127.0.0.1:0")
    async with listener(bench) as (address, accepted):
        port = int(address.rsplit(":", 1)[1])
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(garbage)
        await stream.send_eof()
        with trio.fail_after(5):
            try:
                while await stream.receive_some():
                    pass
            except trio.BrokenResourceError:
                pass
        await stream.aclose()
        near = await bench.network.dial(address, CREDENTIAL, timeout_s=5)
        await near.send([b"still here"])
        assert await receive_all(await accepted.receive(), 1) == [b"still here"]
        near.abort()


@asynccontextmanager
async def stranger(answer: bytes) -> AsyncIterator[str]:
    """A TCP server that says this and then waits for the end."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(answer)
        try:
            while await stream.receive_some():
                pass
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        yield f"tcp:127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"\xff" * 100,
    ],
    ids=["ssh", "a web page", "wrong accept key", "noise"],
)
async def test_a_different_server_is_a_protocol_mismatch(answer: bytes) -> None:
    async with stranger(answer) as address:
        with pytest.raises(ProtocolMismatch):
            await WebSocketNetwork().dial(address, CREDENTIAL, timeout_s=5)


async def test_a_silent_listener_is_unreachable(tmp_path: Path) -> None:
    async with stranger(b"") as address:
        with pytest.raises(Unreachable, match=r"within 0\.05 s"):
            await WebSocketNetwork().dial(address, CREDENTIAL, timeout_s=0.05)


async def test_a_connection_that_is_not_established_is_tried_beside_the_first(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """The kernel repeats a lost SYN after growing pauses; another attempt begins with one of its own."""
    near, far = socket.socketpair()
    attempts: dict[socket.socket, float] = {}

    async def established(started: tuple[socket.socket, int, str]) -> tuple[socket.socket, str]:
        attempts.setdefault(started[0], trio.current_time())
        if len(attempts) < 7:
            await trio.sleep_forever()
        started[0].close()
        return near, "tcp:127.0.0.1:1"

    monkeypatch.setattr(sockets, "_established", established)
    with near, far:
        assert await sockets.connect(sockets.parse("tcp:127.0.0.1:1")) == (near, "tcp:127.0.0.1:1")
    first = min(attempts.values())
    assert [round(at - first) for at in attempts.values()] == [0, 1, 2, 3, 4, 5, 6]
    assert all(sock.fileno() < 0 for sock in attempts), "those that were given up are closed"


async def test_a_connection_retransmits_each_second_at_least() -> None:
    """Let a connection continue at most a second after a cut, however long that was."""
    option = sockets._TCP_RTO_MAX_MS
    with socket.socket() as probe:
        try:
            probe.getsockopt(socket.IPPROTO_TCP, option)
        except OSError:
            pytest.skip("this kernel has no TCP_RTO_MAX_MS (Linux 6.15)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        near, _ = await sockets.connect(sockets.parse(f"tcp:127.0.0.1:{server.getsockname()[1]}"))
        far, _ = await sockets.accept(server)
        with near, far:
            assert [sock.getsockopt(socket.IPPROTO_TCP, option) for sock in (near, far)] == [1000, 1000]
            # Else the kernel gives up after 15 retransmissions, and a cut looks like a closed connection.
            user_timeouts = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for sock in (near, far)]
            assert min(user_timeouts) > 1000 * SILENT_PERIODS * HEARTBEAT_S


async def test_a_host_without_a_name_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="no such host"):
        await WebSocketNetwork().dial("tcp:no-such-host.invalid:1", CREDENTIAL, timeout_s=30)


@pytest.mark.parametrize("address", ["", "tcp:", "tcp:host", "tcp::1", "tcp:h:99999", "unix:relative", "http://x"])
async def test_the_error_of_an_invalid_address_shows_valid_ones(address: str) -> None:
    with pytest.raises(InvalidRequest, match="tcp:HOST:PORT or unix:/path"):
        await WebSocketNetwork().dial(address, CREDENTIAL, timeout_s=1)


# Broken rules after the handshake ------------------------------------------------------------------------------------

MASK = b"\x01\x02\x03\x04"


def client_frame(first: int, payload: bytes, *, masked: bool = True) -> bytes:
    head = bytes([first, (0x80 if masked else 0) | len(payload)])
    return head + MASK + websocket_frames.unmask(payload, MASK) if masked else head + payload


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (client_frame(0x82, b"x", masked=False), 1002),
        (client_frame(0xC2, b"x"), 1002),
        (client_frame(0x81, b"text"), 1003),
        (client_frame(0x80, b"continues nothing"), 1002),
        (client_frame(0x02, b"begins") + client_frame(0x82, b"again"), 1002),
        (client_frame(0x09, b"ping in pieces"), 1002),
        (client_frame(0x83, b"unknown"), 1002),
        (b"\x82\xff" + (TRANSPORT_LIMIT_BYTES + 1).to_bytes(8, "big") + MASK, 1009),
        (b"\x82\xff" + b"\xff" * 8 + MASK, 1009),
    ],
)
async def test_a_protocol_violation_ends_the_connection_with_its_code(data: bytes, code: int) -> None:
    errors: list[Exception] = []

    async def handler(transport: Transport) -> None:
        try:
            await transport.receive()
        except (ProtocolMismatch, MessageTooLarge) as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        address = await nursery.start(WebSocketNetwork().listen, "tcp:127.0.0.1:0", accept_all, handler)
        answer = await say(int(address.rsplit(":", 1)[1]), UPGRADE + b"\r\n" + data)
        nursery.cancel_scope.cancel()
    frames = answer.split(b"\r\n\r\n", 1)[1]
    assert frames[0] == 0x88
    assert int.from_bytes(frames[2:4], "big") == code
    assert isinstance(errors[0], MessageTooLarge if code == 1009 else ProtocolMismatch)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100, 10_000])
def test_the_reader_parses_a_stream_in_any_parts(step: int) -> None:
    rng = random.Random(step)
    sent: list[bytes | Control] = []
    stream = bytearray()
    for _ in range(60):
        payload = rng.randbytes(rng.choice((0, 1, 125, 126, 1000, 65535, 65536, 100_000)) if step > 3 else 130)
        if rng.random() < 0.2:
            payload = payload[:125]
            stream += client_frame(0x89, payload)
            sent.append(Control(websocket_frames.PING, payload))
        elif rng.random() < 0.3:
            third = len(payload) // 3
            for first, piece in ((2, payload[:third]), (0, payload[third : 2 * third]), (0x80, payload[2 * third :])):
                stream += bytes([first]) + websocket_frames.head(2, len(piece), True)[1:] + piece
            sent.append(payload)
        else:
            head = websocket_frames.head(websocket_frames.BINARY, len(payload), True)
            stream += head[:-4] + MASK + websocket_frames.unmask(payload, MASK)
            sent.append(payload)
    assert read_in_pieces(bytes(stream), step) == sent


def test_a_message_may_be_cut_into_more_frames_than_a_stack_is_deep() -> None:
    def frame(first: int, payload: bytes) -> bytes:
        return bytes([first]) + websocket_frames.head(2, len(payload), True)[1:] + payload

    stream = frame(2, b"a") + frame(0, b"") * 10_000 + frame(0x80, b"z")
    assert read_in_pieces(stream, len(stream)) == [b"az"]


def test_empty_frames_of_a_message_take_no_memory() -> None:
    reader = Reader(masked=True, limit_bytes=TRANSPORT_LIMIT_BYTES)
    reader.feed(client_frame(2, b"a"))
    assert reader.next() is None
    many = client_frame(0, b"") * 10_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            reader.feed(many)
            assert reader.next() is None
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
    reader.feed(client_frame(0x80, b"z"))
    assert reader.next() == b"az"


def test_a_message_in_frames_has_the_same_limit() -> None:
    for more, fits in ((b"", True), (b"!", False)):
        reader = Reader(masked=True, limit_bytes=20)
        reader.feed(client_frame(2, b"x" * 10) + client_frame(0, b"") + client_frame(0x80, b"y" * 10 + more))
        if fits:
            assert reader.next() == b"x" * 10 + b"y" * 10
        else:
            with pytest.raises(MessageTooLarge):
                reader.next()


async def test_a_thousand_empty_frames_arrive_as_one_message() -> None:
    received: list[bytes] = []

    async def handler(transport: Transport) -> None:
        received.append(bytes(await transport.receive()))

    async with trio.open_nursery() as nursery:
        address = await nursery.start(WebSocketNetwork().listen, "tcp:127.0.0.1:0", accept_all, handler)
        frames = client_frame(2, b"") + client_frame(0, b"") * 1_000 + client_frame(0x80, b"end")
        assert (await say(int(address.rsplit(":", 1)[1]), UPGRADE + b"\r\n" + frames)).startswith(b"HTTP/1.1 101 ")
        nursery.cancel_scope.cancel()
    assert received == [b"end"]


def read_in_pieces(stream: bytes, step: int) -> list[object]:
    reader = Reader(masked=True, limit_bytes=TRANSPORT_LIMIT_BYTES)
    got: list[object] = []
    at = 0
    while at < len(stream):
        target = reader.direct()
        piece = stream[at : at + (step if target is None else min(step, len(target)))]
        at += len(piece)
        if target is None:
            reader.feed(piece)
        else:
            target[: len(piece)] = piece
            reader.filled(len(piece))
        while (message := reader.next()) is not None:
            got.append(message if isinstance(message, Control) else bytes(message))
    return got


# The memory network's faults -----------------------------------------------------------------------------------------


@asynccontextmanager
async def memory_pair() -> AsyncIterator[tuple[MemoryNetwork, Transport, Transport]]:
    network = MemoryNetwork(random.Random(0))
    async with connected(NetworkUnderTest(network, "memory:host")) as pair:
        yield network, pair.near, pair.far


async def test_a_delay_keeps_the_order(autojump_clock: trio.testing.MockClock) -> None:
    async with memory_pair() as (network, near, far):
        network.set_delay("", "host", 0.1, 5.0)
        for n in range(20):
            await near.send([b"%d" % n])
        assert await receive_all(far, 20) == [b"%d" % n for n in range(20)]
        assert 0.1 < trio.current_time() < 5.1


async def test_a_delayed_message_wakes_its_receiver_once(autojump_clock: trio.testing.MockClock) -> None:
    async with memory_pair() as (network, near, far):
        network.set_delay("", "host", 1.0)
        steps = 0

        class Steps(trio.abc.Instrument):
            def before_task_step(self, task: trio.lowlevel.Task) -> None:
                nonlocal steps
                steps += task is receiver

        receiver = trio.lowlevel.current_task()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.send, [b"first"])
            trio.lowlevel.add_instrument(instrument := Steps())
            assert await far.receive() == b"first"
            trio.lowlevel.remove_instrument(instrument)
        assert steps == 1


async def test_a_partition_delays_messages_until_it_is_healed(autojump_clock: trio.testing.MockClock) -> None:
    async with memory_pair() as (network, near, far):
        network.cut("", "host")
        await near.send([b"x"])
        with trio.move_on_after(20) as scope:
            await far.receive()
        assert scope.cancelled_caught
        with pytest.raises(Unreachable):
            await network.dial("memory:host", CREDENTIAL, timeout_s=5)
        network.heal("", "host")
        assert await receive_all(far, 1) == [b"x"]


async def test_a_frozen_host_receives_nothing_and_does_not_see_an_end(autojump_clock: trio.testing.MockClock) -> None:
    async with memory_pair() as (network, near, far):
        network.freeze("host")
        near.abort()
        with trio.move_on_after(20) as scope:
            await far.receive()
        assert scope.cancelled_caught
        network.thaw("host")
        with pytest.raises(ConnectionFailed):
            await far.receive()


async def test_a_crashed_host_refuses_and_its_peers_see_the_end(autojump_clock: trio.testing.MockClock) -> None:
    async with memory_pair() as (network, near, far):
        network.crash("host")
        with pytest.raises(ConnectionFailed):
            await near.receive()
        with pytest.raises(ConnectionFailed):
            await far.send([b"x"])
        with pytest.raises(Refused):
            await network.dial("memory:host", CREDENTIAL, timeout_s=5)


@pytest.mark.parametrize(
    ("fate", "arrives"), [(MessageFault.LOSE, [b"0", b"1"]), (MessageFault.LAST, [b"0", b"1", b"2"])]
)
async def test_a_fault_hook_drops_a_connection_at_a_message(fate: MessageFault, arrives: list[bytes]) -> None:
    async with memory_pair() as (network, near, far):
        network.on_message_sent = lambda hop: fate if hop.number == 3 else MessageFault.DELIVER
        await near.send([b"0"])
        await near.send([b"1"])
        with pytest.raises(ConnectionFailed):
            await near.send([b"2"])
        assert await receive_all(far, len(arrives)) == arrives
        with pytest.raises(ConnectionFailed):
            await far.receive()


async def test_the_same_seed_gives_the_same_traffic(autojump_clock: trio.testing.MockClock) -> None:
    assert await _traffic(5) == await _traffic(5)
    assert await _traffic(5) != await _traffic(6)


async def _traffic(seed: int) -> list[float]:
    network = MemoryNetwork(random.Random(seed))
    began = trio.current_time()
    network.set_delay("", "host", 0.0, 1.0)
    async with connected(NetworkUnderTest(network, "memory:host")) as pair:
        arrivals = []
        for _ in range(10):
            await pair.near.send([b"x"])
            await pair.far.receive()
            arrivals.append(round(trio.current_time() - began, 9))
        return arrivals


def test_a_credential_does_not_show_its_key() -> None:
    assert "secret" not in repr(Credential("id", "secret"))
