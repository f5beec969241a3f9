"""Small random scenarios of calls, streams and callbacks, while connections break and a host dies."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from fray import Stream
from fray.errors import ActorDied, CallCycle, FrayError
from fray.net.transports.memory import MessageFault
from fray.runtime.calls.streams import DuplexStream
from fray.runtime.current_call import current_actor
from tests.support.calls import Stage, Way, open_stage

LIVES = 3
WITHIN_S = 600.0
"""Longest virtual duration of a scenario."""


class EchoActor:
    """Actor that echoes, calls others back, and records its calls."""

    def __init__(self, ways: list[Way]) -> None:
        self.ways = ways

    async def echo(self, stream: Stream, pause_s: float) -> int:
        count = 0
        async for item in stream:
            await trio.sleep(pause_s)
            await stream.send(item)
            count += 1
        return count

    async def walk(self, path: list[int]) -> int:
        assert current_actor().chain.count(current_actor().actor_id) < 5
        return 1 + (await self.ways[path[0]].call("walk", path[1:]) if path else 0)


async def talk(way: Way, rng: random.Random) -> None:
    """Check that the answers are what was sent, in order, and complete unless an error says otherwise."""
    count, pause_s, sent = rng.randrange(300), rng.choice([0, 0.01, 0.5]), 0
    seen: list[int] = []
    stream = way.route.open("echo", (pause_s,))

    async def send() -> None:
        nonlocal sent
        for number in range(count):
            await stream.send(number)
            sent += 1
        await stream.done_sending()

    try:
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(send)
            with trio.move_on_after(rng.uniform(0, 60)) as patience:
                await take(stream, seen)
            nursery.cancel_scope.cancel()
            assert patience.cancelled_caught or stream.result() == count == len(seen)
    except* ActorDied:
        pass
    assert seen == list(range(len(seen)))
    assert len(seen) <= sent


async def take(stream: DuplexStream, seen: list[int]) -> None:
    try:
        while True:
            seen.append(await stream.receive())
    except trio.EndOfChannel:
        pass


async def wander(way: Way, rng: random.Random) -> None:
    """Check that every walk ends: with its length, as a cycle, with the death of an actor on the way, or cancelled."""
    path = [rng.randrange(LIVES) for _ in range(rng.randrange(5))]
    with trio.move_on_after(rng.uniform(0, 90)):
        try:
            assert await way.call("walk", path) == 1 + len(path)
        except CallCycle as error:
            cycle = error.details["cycle"]
            assert cycle[0] == cycle[-1]
        except ActorDied:
            pass


async def trouble(stage: Stage, rng: random.Random) -> None:
    def on_hop(hop: Any) -> MessageFault:
        return rng.choice([MessageFault.LOSE, MessageFault.LAST]) if rng.random() < 0.003 else MessageFault.DELIVER

    stage.network.on_message_sent = on_hop
    for _ in range(rng.randrange(4)):
        await trio.sleep(rng.uniform(0, 20))
        stage.network.drop(rng.choice(["driver", "h0", "h1", "h2"]))
    if rng.random() < 0.5:
        await trio.sleep(rng.uniform(0, 10))
        stage.kill("h2")


@pytest.mark.parametrize("seed", range(12))
async def test_every_conversation_ends_and_says_the_truth(seed: int, autojump_clock: Any) -> None:
    rng = random.Random(seed)
    async with open_stage(seed) as stage:
        ways: list[Way] = []
        for number in range(LIVES):
            host = await stage.host(f"h{number}")
            limit = rng.choice([None, 1, 2, 4])
            place = host.register(EchoActor(ways), f"t{number}", actor_id=f"t{number}", max_concurrency=limit)
            ways.append(stage.way(stage.caller.route_to(stage.endpoint(host, place, f"t{number}"))))
        with trio.fail_after(WITHIN_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trouble, stage, rng)
                for _ in range(15):
                    nursery.start_soon(rng.choice([talk, wander]), rng.choice(ways), random.Random(rng.random()))
        stage.network.on_message_sent = lambda hop: MessageFault.DELIVER
        await trio.sleep(200)
        left = {name: actor.active_calls for name, host in stage.hosts.items() for actor in host.actors.values()}
        assert not any(left.values()), "calls that are not awaited have ended"
        for number in range(2):
            try:
                assert await ways[number].call("walk", []) == 1
            except FrayError as error:
                raise AssertionError(f"seed {seed}: t{number} is not well") from error
