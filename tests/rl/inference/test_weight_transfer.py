"""Weights over HTTP: a real port of a server, what it refuses, and a sender that gives up."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from attrs import evolve

pytest.importorskip("hypercorn", reason="needs hypercorn: make test-rl")

from fray.rl.core.versions import VersionName
from fray.rl.inference.http_port import serve_weight_port
from fray.rl.inference.http_settings import WeightAddress
from fray.rl.inference.server import InferenceServer
from fray.rl.inference.weight_transfer import post_weights
from fray.rl.weights_table import WeightTable
from tests.support.counting_engine import CountingEngine, request

pytestmark = pytest.mark.torch
TABLE = WeightTable.of_tensors([("bias", (3,), "bfloat16"), ("w", (700, 1024), "float32")])
"""Table with a gap between its tensors, sent in several parts."""
CONTENT = bytes(TABLE.places["w"].offset) + bytes(range(256)) * (700 * 16)


class TensorEngine(CountingEngine):
    """Keeps the bytes of its tensors, which have the names of `TABLE`."""

    def load(self, version: VersionName, table: Any, buffer: Any) -> None:
        if list(table.places) != list(TABLE.places):
            raise ValueError(f"the weights are not those of this model: {sorted(table.places)}")
        places = table.places.items()
        self.tensors = {name: bytes(buffer[one.offset : one.offset + one.byte_count]) for name, one in places}
        super().load(version, None, buffer)


@asynccontextmanager
async def serving(
    host: str | None = None, **options: Any
) -> AsyncIterator[tuple[TensorEngine, InferenceServer, WeightAddress]]:
    engine, addresses, listens = TensorEngine(**options), list[WeightAddress](), trio.Event()
    server = InferenceServer(lambda: engine)

    def started(address: WeightAddress) -> None:
        addresses.append(address)
        listens.set()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_weight_port, server, started, host=host))
            await listens.wait()
            yield engine, server, addresses[0]
            nursery.cancel_scope.cancel()
    finally:
        await server.aclose()


@pytest.mark.parametrize(("host", "scheme"), [(None, "http"), ("127.0.0.1", "https")])
async def test_a_server_has_the_weights_that_were_posted(
    host: str | None, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving(host) as (engine, server, address):
        assert address.url.startswith(f"{scheme}://127.0.0.1:")
        assert address.key not in repr(address)
        await post_weights(address, VersionName(1, 3), TABLE, CONTENT)
        assert (await server.status())["version"] == VersionName(1, 3)
        assert engine.tensors == {"bias": bytes(6), "w": CONTENT[-700 * 4096 :]}


async def test_weights_of_another_model_and_older_ones_are_refused() -> None:
    other = WeightTable.of_tensors([("other", (2,), "uint8")])
    async with serving() as (_, server, address):
        with pytest.raises(ValueError, match=r"not those of this model: \['other'\]"):
            await post_weights(address, VersionName(0, 1), other, b"ab")
        await post_weights(address, VersionName(0, 2), TABLE, CONTENT)
        with pytest.raises(ValueError, match=r"version 0\.1 is older than 0\.2"):
            await post_weights(address, VersionName(0, 1), TABLE, CONTENT)
        assert (await server.status())["version"] == VersionName(0, 2)


WRONG: dict[str, Callable[[WeightAddress], WeightAddress]] = {
    "another key": lambda address: evolve(address, key="x"),
    "a closed port": lambda address: evolve(address, url="http://127.0.0.1:1"),
    "no TLS": lambda address: evolve(address, url=address.url.replace("https", "http"), certificate=""),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_process_that_is_not_the_server_of_the_address_gets_no_weights(what: str) -> None:
    async with serving("127.0.0.1") as (_, server, address):
        with pytest.raises(ConnectionError):
            await post_weights(WRONG[what](address), VersionName(0, 1), TABLE, CONTENT)
        assert (await server.status())["version"] == VersionName(0, 0)


async def test_a_server_with_another_certificate_gets_no_weights() -> None:
    async with serving("127.0.0.1") as (_, _, first), serving("127.0.0.1") as (_, server, second):
        with pytest.raises(ConnectionError, match="certificate"):
            await post_weights(evolve(second, certificate=first.certificate), VersionName(0, 1), TABLE, CONTENT)
        assert (await server.status())["version"] == VersionName(0, 0)


async def test_a_transfer_that_was_given_up_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Semaphore(0)
    # Of the commands to the decoding thread: a request, an update that waits for it, and its withdrawal.
    sent = [trio.Event() for _ in range(3)]
    async with serving(gate=gate) as (_, server, address), trio.open_nursery() as nursery:
        send = server._thread.send

        def note_and_send(command: Any) -> None:
            next(event for event in sent if not event.is_set()).set()
            send(command)

        monkeypatch.setattr(server._thread, "send", note_and_send)
        nursery.start_soon(server.generate, request("r"))
        await sent[0].wait()
        async with trio.open_nursery() as sending:
            sending.start_soon(partial(post_weights, address, VersionName(0, 1), TABLE, CONTENT, mode="wait"))
            await sent[1].wait()
            sending.cancel_scope.cancel()
        with trio.fail_after(5.0):
            await sent[2].wait()
        gate.release(100)
        await server._requests.wait_empty()
        assert (await server.status())["version"] == VersionName(0, 0)
