"""Fuzzer of real listeners, before authentication: changed handshakes on TCP and Unix sockets."""

from __future__ import annotations

import contextlib
import logging
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from fray.errors import FrayError
from fray.net.transport import Credential, Transport
from fray.net.transports.websocket import WebSocketNetwork
from tests.fuzz.corpus_file import read_examples
from tests.fuzz.mutation import mutate

KEY = "a-long-random-token"
BATCH = 40
"""Handshakes at once, after which a dialer with the key must be accepted."""
ANSWER_S = 5.0
PROGRAMMING_ERRORS = (
    "AttributeError",
    "IndexError",
    "KeyError",
    "TypeError",
    "ValueError",
    "UnicodeError",
    "Recursion",
)


class _Log(logging.Handler):
    """Collector of records that name an error that no peer should be able to cause."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info or any(name in text for name in PROGRAMMING_ERRORS):
            self.texts.append(f"{text} {record.exc_info[1]!r}" if record.exc_info else text)


def fuzz_listener(seconds: float, seed: int) -> tuple[int, dict[bytes, str]]:
    """Return how many handshakes were tried, and what was found."""
    log, logger = _Log(), logging.getLogger("fray")
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(log)
    try:
        with tempfile.TemporaryDirectory() as folder:
            tried, broken = trio.run(_run, seconds, seed, Path(folder))
    finally:
        logger.removeHandler(log)
        logger.setLevel(before[0])
        logger.propagate = before[1]
    return tried, {**broken, **{text.encode(): text for text in log.texts}}


async def _run(seconds: float, seed: int, folder: Path) -> tuple[int, dict[bytes, str]]:
    rng, tried, broken = random.Random(seed), 0, {}

    async def handler(transport: Transport) -> None:
        await transport.send([b"welcome"])
        with contextlib.suppress(FrayError):
            await transport.receive()  # closing at once could overtake the welcome

    network = WebSocketNetwork()
    async with trio.open_nursery() as nursery:
        addresses: list[str] = [
            await nursery.start(network.listen, address, lambda key_id: KEY, handler)
            for address in ("tcp:127.0.0.1:0", f"unix:{folder}/socket")
        ]
        pool = [*read_examples("listener"), *[await _record(address, folder) for address in addresses]]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            batch = [mutate(rng.choice(pool), pool, rng) for _ in range(BATCH)]
            async with trio.open_nursery() as dials:
                for data in batch:
                    dials.start_soon(_send, rng.choice(addresses), data, rng.random() < 0.5)
            tried += len(batch)
            for address in addresses:
                try:
                    with trio.fail_after(ANSWER_S):
                        transport = await network.dial(address, Credential("cluster", KEY), timeout_s=ANSWER_S)
                        assert bytes(await transport.receive()) == b"welcome"
                        transport.abort()
                except (FrayError, trio.TooSlowError, AssertionError) as error:
                    why = f"a dialer with the key is refused at {address.partition(':')[0]}: {error!r}"
                    broken[b"\n".join(batch)] = why
            if broken:
                break
        nursery.cancel_scope.cancel()
    return tried, broken


async def _send(address: str, data: bytes, ends: bool) -> None:
    """Send bytes, in two pieces, and read what comes until the listener closes."""
    try:
        async with await _connect(address) as stream:
            await stream.send_all(data[: len(data) // 2])
            await stream.send_all(data[len(data) // 2 :])
            if ends:
                await stream.send_eof()
            with trio.move_on_after(0.2):
                while await stream.receive_some(4096):
                    pass
    except (OSError, trio.BrokenResourceError):
        pass


async def _connect(address: str) -> trio.SocketStream:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return await trio.open_unix_socket(rest)
    host, _, port = rest.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


async def _record(address: str, folder: Path) -> bytes:
    """Return the first bytes of a real dialer."""
    heard = bytearray()

    async def listen(stream: trio.SocketStream) -> None:
        async for data in stream:
            heard.extend(data)

    async with trio.open_nursery() as nursery:
        if address.startswith("unix:"):
            sock = trio.socket.socket(trio.socket.AF_UNIX)
            await sock.bind(f"{folder}/recorder")
            sock.listen()
            listeners: Sequence[trio.SocketListener] = [trio.SocketListener(sock)]
            target = f"unix:{folder}/recorder"
        else:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            target = f"tcp:127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        await nursery.start(trio.serve_listeners, listen, listeners)
        try:
            await WebSocketNetwork().dial(target, Credential("cluster", KEY), timeout_s=0.3)
        except FrayError:
            pass  # the recorder does not answer
        nursery.cancel_scope.cancel()
    return bytes(heard)
