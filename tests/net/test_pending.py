"""Connections that do not complete their handshake keep no place from those that do."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from fray.net import limited_log
from fray.net.limited_log import LimitedLog
from fray.net.transport import Transport
from fray.net.transports import pending, websocket
from fray.net.transports.http_upgrade import HandshakeLost
from fray.net.transports.pending import PendingConnections, origin_of
from fray.net.transports.websocket import WebSocketNetwork
from fray.testing.conformance import CREDENTIAL, NetworkUnderTest, authorize, listener
from tests.support.silent_connections import silent

# The limits, one past their edge -------------------------------------------------------------------------------------


class Held:
    """Handshakes that stay open, and those of them that were dropped."""

    def __init__(self, limit: int, share: int) -> None:
        self.connections = PendingConnections(limit=limit, share=share)
        self.dropped: list[str] = []
        self._stack = ExitStack()

    def hold(self, name: str, remote: str) -> None:
        self._stack.enter_context(self.connections.holding(remote, lambda: self.dropped.append(name)))

    def end(self) -> None:
        self._stack.close()


def test_one_more_than_its_share_drops_the_oldest_of_an_address() -> None:
    held = Held(limit=100, share=3)
    for number in range(3):
        held.hold(f"a{number}", f"tcp:10.0.0.1:{number}")
    held.hold("b0", "tcp:10.0.0.2:1")
    assert held.dropped == []
    held.hold("a3", "tcp:10.0.0.1:9")
    held.hold("a4", "tcp:10.0.0.1:9")
    assert held.dropped == ["a0", "a1"]
    assert len(held.connections) == 4
    held.end()
    assert len(held.connections) == 0


def test_one_more_than_the_limit_drops_the_oldest_of_the_address_with_the_most() -> None:
    held = Held(limit=5, share=4)
    held.hold("b0", "tcp:10.0.0.2:1")
    for number in range(4):
        held.hold(f"a{number}", f"tcp:10.0.0.1:{number}")
    assert held.dropped == []
    held.hold("c0", "tcp:10.0.0.3:1")
    held.hold("d0", "tcp:10.0.0.4:1")
    assert held.dropped == ["a0", "a1"]
    assert len(held.connections) == 5


def test_a_handshake_that_ends_leaves_its_place() -> None:
    held = Held(limit=2, share=1)
    for number in range(5):
        with held.connections.holding(f"tcp:10.0.0.{number}:1", lambda: held.dropped.append("early")):
            assert len(held.connections) == 1
    held.hold("a", "tcp:10.0.0.1:1")
    held.hold("b", "tcp:10.0.0.2:1")
    assert held.dropped == []
    held.hold("c", "tcp:10.0.0.3:1")
    assert held.dropped == ["a"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("tcp:10.0.0.1:5", "tcp:10.0.0.1:6", True),
        ("tcp:10.0.0.1:5", "tcp:10.0.0.2:5", False),
        ("tcp:2001:db8::1:5", "tcp:2001:db8::ffff:9:6", True),
        ("tcp:2001:db8::1:5", "tcp:2001:db8:0:1::1:5", False),
        ("tcp:::ffff:10.0.0.1:5", "tcp:::ffff:10.0.0.2:5", False),
        ("tcp:fe80::1%eth0:5", "tcp:fe80::2%eth0:5", True),
        ("unix:pid=7", "unix:pid=7", True),
        ("unix:pid=7", "unix:pid=8", False),
    ],
)
def test_who_shares_a_limit(one: str, other: str, same: bool) -> None:
    assert (origin_of(one) == origin_of(other)) is same


# Real sockets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_dialer_gets_in_while_one_more_than_all_places_are_held_in_silence(kind: str, tmp_path: Path) -> None:
    """All of them come from its own address, as behind a router."""
    at = "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/socket"
    bench = NetworkUnderTest(WebSocketNetwork(), at)
    async with listener(bench) as (address, accepted), silent(address, pending.PENDING_LIMIT + 1):
        for _ in range(3):
            (await bench.network.dial(address, CREDENTIAL, timeout_s=5)).abort()
            (await accepted.receive()).abort()


@pytest.mark.parametrize(("limit", "sent"), [("GREETING_S", b""), ("HANDSHAKE_S", b"GET /fray HTTP/1.1\r\n")])
async def test_a_connection_that_does_not_continue_is_closed(
    limit: str, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, limit, 0.01)
    bench = NetworkUnderTest(WebSocketNetwork(), "tcp:127.0.0.1:0")
    async with listener(bench) as (address, _), silent(address, 1) as (stream,):
        await stream.send_all(sent)
        assert await stream.receive_some() == b""


async def test_a_dialer_of_another_machine_has_two_seconds_for_its_first_bytes(autojump_clock: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        sock, _ = server.accept()
        with sock, pytest.raises(HandshakeLost, match="it sent nothing within 2 s"):
            await websocket.wait_greeting(sock)
    assert trio.current_time() == 2.0


# Log lines -----------------------------------------------------------------------------------------------------------


@contextmanager
def lines_of(logger: logging.Logger) -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_lines_past_the_limit_are_counted() -> None:
    logger, now = logging.getLogger("fray.tests.limited"), [100.0]
    log = LimitedLog(logger, clock=lambda: now[0])
    with lines_of(logger) as lines:
        for number in range(limited_log.LINES_LIMIT + 3):
            log.write("failed: %d", number)
        assert lines == [f"failed: {number}" for number in range(limited_log.LINES_LIMIT)]
        lines.clear()
        now[0] += limited_log.PERIOD_S
        log.write("failed: %s", "again")
        log.write("failed: %s", "and again")
        assert lines == ["failed: again (and 3 more of this kind before)", "failed: and again"]


async def test_lines_past_the_limit_are_counted_although_none_follows(autojump_clock: object) -> None:
    logger = logging.getLogger("fray.tests.limited")
    log = LimitedLog(logger)
    with lines_of(logger) as lines:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.run)
            for number in range(limited_log.LINES_LIMIT + 3):
                log.write("failed: %d", number)
            await trio.sleep(limited_log.PERIOD_S + 1)
            assert lines[-1] == "3 more lines like the last ones were left out"
            log.write("failed: %s", "again")
            assert lines[-1] == "failed: again"
            await trio.sleep(10 * limited_log.PERIOD_S)
            assert lines[-1] == "failed: again"
            nursery.cancel_scope.cancel()


async def test_connections_that_fail_fill_no_log() -> None:
    async def handler(transport: Transport) -> None:
        await trio.sleep_forever()

    with lines_of(logging.getLogger("fray.net")) as lines:
        async with trio.open_nursery() as nursery:
            address = await nursery.start(WebSocketNetwork().listen, "tcp:127.0.0.1:0", authorize, handler)
            for _ in range(3 * limited_log.LINES_LIMIT):
                async with silent(address, 1) as (stream,):
                    await stream.send_all(b"SSH-2.0-OpenSSH_9\r\n")
                    with pytest.raises(trio.BrokenResourceError):
                        while await stream.receive_some():
                            pass
                        raise trio.BrokenResourceError
            nursery.cancel_scope.cancel()
    assert len(lines) == limited_log.LINES_LIMIT
    assert all("failed: " in line for line in lines)
