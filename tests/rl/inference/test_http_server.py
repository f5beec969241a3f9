"""HTTP server of Starlette apps: addresses, connections that are kept, and an end within its limit."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

pytest.importorskip("hypercorn", reason="needs hypercorn: make test-rl")

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from trio.testing import wait_all_tasks_blocked

from fray import http_server
from fray.http_server import HttpAddress, serve_http

pytestmark = pytest.mark.torch


class Pages:
    """An app with a page that answers, one that waits to be cancelled, and one without end."""

    def __init__(self) -> None:
        self.waiting, self.cancelled, self.ended = trio.Event(), trio.Event(), trio.Event()
        self.answering = trio.Event()
        hello = Route("/", self.hello, methods=["GET", "POST"])
        routes = [hello, Route("/wait", self.wait), Route("/endless", self.endless)]
        self.app = Starlette(routes=routes, lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.ended.set()

    async def hello(self, request: Request) -> PlainTextResponse:
        self.answering.set()
        return PlainTextResponse("hello")

    async def wait(self, request: Request) -> PlainTextResponse:
        self.waiting.set()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()
        raise AssertionError

    async def endless(self, request: Request) -> StreamingResponse:
        async def items() -> Any:
            while True:
                yield b"x" * 65_536
                self.waiting.set()

        return StreamingResponse(items())


async def test_the_address_is_reported_once_connections_are_accepted(nursery: trio.Nursery) -> None:
    address: HttpAddress = await nursery.start(serve_http, Pages().app)
    assert address.port > 0
    assert address.url == f"http://127.0.0.1:{address.port}"
    async with httpx.AsyncClient(base_url=address.url) as client:
        answer = await client.get("/")
    assert answer.text == "hello"
    assert "server" not in answer.headers


async def test_a_connection_serves_more_requests_than_hypercorn_allows_by_default(nursery: trio.Nursery) -> None:
    address = await nursery.start(serve_http, Pages().app)
    stream = await trio.open_tcp_stream(address.host, address.port)
    await stream.send_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 1_005)
    received = b""
    while received.count(b"hello") < 1_005:
        part = await stream.receive_some()
        assert part, f"the connection was closed after {received.count(b'hello')} answers"
        received += part


async def test_a_request_whose_body_is_not_read_does_not_end_its_connection(nursery: trio.Nursery) -> None:
    pages = Pages()
    address = await nursery.start(serve_http, pages.app)
    stream = await trio.open_tcp_stream(address.host, address.port)
    await stream.send_all(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n")
    await pages.answering.wait()
    await wait_all_tasks_blocked()
    await stream.send_all(b"{}GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    received = b""
    while received.count(b"hello") < 2:
        part = await stream.receive_some()
        assert part, f"the connection was closed after {received!r}"
        received += part
    assert b"connection: close" not in received.lower()


@pytest.mark.parametrize("sent", [0, 101])
async def test_what_is_not_read_has_limits_and_then_the_client_learns_that_its_connection_ends(
    sent: int, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "UNREAD_LIMIT_BYTES", 100)
    monkeypatch.setattr(http_server, "UNREAD_S", 0.05 if not sent else 60.0)
    address = await nursery.start(serve_http, Pages().app)
    stream = await trio.open_tcp_stream(address.host, address.port)
    await stream.send_all(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 200\r\n\r\n" + b"x" * sent)
    received = b""
    while part := await stream.receive_some():
        received += part
    assert b"connection: close" in received.lower()
    assert received.endswith(b"hello")


async def test_a_streamed_answer_does_not_wait_for_the_body_of_a_request_that_has_none(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "UNREAD_S", float("inf"))
    address = await nursery.start(serve_http, Pages().app)
    stream = await trio.open_tcp_stream(address.host, address.port)
    await stream.send_all(b"GET /endless HTTP/1.1\r\nHost: here\r\n\r\n")
    assert await stream.receive_some()
    await stream.aclose()


async def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port}: "):
            await serve_http(Pages().app, port=port)


async def test_cancelled_it_ends_idle_connections_at_once_and_then_the_lifespan() -> None:
    pages = Pages()
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(serve_http, pages.app, end_s=60))
        async with httpx.AsyncClient(base_url=address.url) as client:
            await client.get("/")
            nursery.cancel_scope.cancel()
    assert pages.ended.is_set()
    with pytest.raises(OSError, match="all attempts to connect"):
        await trio.open_tcp_stream(address.host, address.port)


@pytest.mark.parametrize("path", ["/wait", "/endless"])
async def test_requests_under_way_are_ended_after_their_limit_whatever_the_client_does(path: str) -> None:
    pages = Pages()
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(serve_http, pages.app, end_s=0.05))
        stream = await trio.open_tcp_stream(address.host, address.port)  # which reads nothing
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        await pages.waiting.wait()
        nursery.cancel_scope.cancel()
    assert pages.cancelled.is_set() or path == "/endless"
    assert pages.ended.is_set()


async def test_connections_above_the_limit_are_closed(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS_LIMIT", 1)
    address = await nursery.start(serve_http, Pages().app)
    first = await trio.open_tcp_stream(address.host, address.port)
    await first.send_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    assert b"200" in await first.receive_some()
    second = await trio.open_tcp_stream(address.host, address.port)
    assert await second.receive_some() == b""
    await first.aclose()
    await wait_all_tasks_blocked()
    third = await trio.open_tcp_stream(address.host, address.port)
    await third.send_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    assert b"200" in await third.receive_some()


GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.mark.parametrize("path", [b"/", b"/endless"])
@pytest.mark.parametrize("closes", ["after its answer", "at once", "one way"])
async def test_a_connection_that_its_client_has_closed_is_open_no_longer(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, path: bytes, closes: str
) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS_LIMIT", 2)
    address = await nursery.start(serve_http, Pages().app)
    for _ in range(5):
        stream = await trio.open_tcp_stream(address.host, address.port)
        await stream.send_all(GET.replace(b"/ ", path + b" ", 1))
        if closes == "after its answer":
            assert b"200" in await stream.receive_some()
            await wait_all_tasks_blocked()
        if closes == "one way":
            await stream.send_eof()
            await stream.receive_some()
        await stream.aclose()
        # The reset of a connection may take a moment.
        await trio.sleep(0.05)
    stream = await trio.open_tcp_stream(address.host, address.port)
    await stream.send_all(GET)
    with trio.fail_after(5):
        assert b"200" in await stream.receive_some()
