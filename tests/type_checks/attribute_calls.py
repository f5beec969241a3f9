"""Attribute calls of handles that are right, with the types that mypy finds with the plugin; pyright sees Any."""

from __future__ import annotations

from typing import assert_type

import fray
import fray.blocking
from fray import ActorHandle, v2
from tests.type_checks.right_lines import Counter


async def async_code(counter: ActorHandle[Counter], pool: fray.ActorPool[Counter]) -> None:
    assert_type(await counter.add(3), int)
    assert_type(await counter.slow_add(3, delay_s=0.1), str)
    assert_type(await counter.where(3), bytes)
    assert_type(await counter.add.start(3), int)
    assert_type(await counter.slow_add.options(timeout_s=5)(3), str)
    async with counter.countdown.stream(3) as countdown:
        assert_type([item async for item in countdown], list[int])
    assert_type(countdown.result(), str)
    async with counter.ticks.stream(0.1) as ticks:
        assert_type([item async for item in ticks], list[float])
    async with counter.talk.open(count=3) as stream:
        await stream.send("word")
    assert_type(stream.result(), int)
    assert_type(await pool.call().add(3), int)
    assert_type(await pool.broadcast().slow_add(3)[0], str)


def sync_code(counter: fray.blocking.ActorHandle[Counter]) -> None:
    assert_type(counter.add(3), int)
    assert_type(counter.slow_add(3), str)
    assert_type(counter.add.remote(3), fray.blocking.ActorFuture[int])
    with counter.countdown.stream(3) as items:
        assert_type(list(items), list[int])


def lite_code(client: v2.Client, on_fray: v2.FrayClient, on_threads: v2.LocalClient) -> None:
    counter = client.create_actor(Counter, 10, name="counter")
    assert_type(counter.add(3), int)
    assert_type(counter.add.remote(3), v2.ActorFuture[int])
    assert_type(counter.slow_add.remote(3).result(), str)
    assert_type(on_fray.create_actor(Counter, 10, name="counter").add.remote(3).result(), int)
    assert_type(on_threads.create_actor(Counter, 10, name="counter").add.submit(3).result(), int)
    assert_type(client.host_actor(Counter, 10, name="counter").handle.add(3), int)
