"""Actors and calls of them."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve

from fray import ActorDied, DeadlineExceeded
from fray.runtime.calls.streams import DuplexStream
from tests.simulation.operations.context import (
    DEADLINE_SLACK_S,
    Act,
    KnownActor,
    OperationContext,
    add,
    make_actor,
    pick,
)
from tests.simulation.workloads import SMALL, Boom, Counter

SILENT_S = 200.0
"""Longest time that a machine is silent and its actors are kept."""


async def calls(b: OperationContext) -> str:
    """Calls one after another count up."""
    known = pick(b)
    if known is None:
        return await make_actor(b)
    texts = [await add(b, known, f"{b.token}.{number}") for number in range(b.rng.randint(1, 4))]
    return texts[-1]


async def pipelined_calls(b: OperationContext) -> str:
    """Calls at once are executed in the order they were made."""
    known = pick(b)
    if known is None:
        return await make_actor(b)
    futures = []
    for number in range(b.rng.randint(2, 8)):
        b.op("call")
        futures.append(known.handle.add.start(f"{b.token}.{number}"))
    results = [await future for future in futures]
    b.check("P4", results == sorted(set(results)), f"{b.token}: pipelined calls counted {results}")
    return f"counted {results}"


async def cancelled_call(b: OperationContext) -> str:
    """A cancelled await cancels the method."""
    known = pick(b, has_async=True)
    if known is None:
        return await make_actor(b)
    with trio.move_on_after(b.rng.choice((0.0, 0.001, 0.01, 0.5, 2.0))):
        b.op("call")
        await known.handle.slow_add(b.token, 60.0)
    b.over_soon(b.token)
    return "cancelled"


async def call_with_deadline(b: OperationContext) -> str:
    """A deadline ends the call, whatever the callee does."""
    known = pick(b, has_async=True)
    if known is None:
        return await make_actor(b)
    timeout_s, began = b.rng.choice((0.001, 0.1, 1.0, 5.0)), trio.current_time()
    b.op("call")
    try:
        await known.handle.slow_add.options(timeout_s=timeout_s)(b.token, 60.0)
    except DeadlineExceeded:
        late_s = trio.current_time() - max(began + timeout_s, b.continued_at())
        b.check("P3", late_s <= DEADLINE_SLACK_S, f"{b.token} ended {late_s:.1f} s after its deadline")
        b.over_soon(b.token)
        return "deadline"
    b.check("P3", False, f"{b.token} came back before its work was done")
    return "came back"


async def relayed_call(b: OperationContext) -> str:
    """Actors that call actors."""
    chain = [known.handle for known in b.desk.actors[-6:] if known.has_async]
    b.rng.shuffle(chain)
    if not chain:
        return await make_actor(b)
    b.op("call")
    cancelled = b.rng.random() < 0.3
    with trio.move_on_after(b.rng.uniform(0, 3) if cancelled else float("inf")):
        got = await chain[0].relay(b.token, chain[1:], 30.0 if cancelled else b.rng.uniform(0, 2))
        b.check("P4", got == len(chain), f"{b.token} passed {got} of {len(chain)} actors")
        return f"{got} actors"
    for depth in range(len(chain)):
        b.over_soon(b.token + "+" * depth)
    return "cancelled"


async def call_between_machines(b: OperationContext) -> str:
    """An actor calls an actor on another machine. However long its own machine is stopped, the call runs once."""
    zones = b.rng.sample("ab", 2)
    names = [f"{b.token}.{zone}" for zone in zones]
    actors = []
    for name, zone in zip(names, zones, strict=True):
        b.op("create_actor")
        resources = evolve(SMALL, zones=(zone,))
        actors.append(await b.cluster.create_actor(Counter, name=name, resources=resources))
    b.op("call")
    try:
        got = await actors[0].relay(b.token, actors[1:], b.rng.uniform(30, 150))
        b.check("P4", got == 2, f"{b.token} passed {got} of 2 actors")
        text = f"{got} actors"
    except ActorDied as error:
        # The actor on the silent machine may live, and send its call again.
        await trio.sleep(SILENT_S)
        text = type(error).__name__
    for actor in actors:
        b.op("delete_actor")
        await b.cluster.delete_actor(actor)
    b.doomed(*names)
    return text


async def both_ways(b: OperationContext) -> str:
    """Items of streams arrive once and in order: from a generator, or each answered by a method."""
    known = pick(b, has_async=True)
    if known is None:
        return await make_actor(b)
    count = b.rng.choice((0, 1, 20, 200))
    b.op("stream")
    if b.rng.random() < 0.5:
        async with known.handle.numbers.stream(b.token, count, b.rng.choice((0.0, 0.01))) as items:
            got = [item async for item in items]
        b.check("P4", got == list(range(count)), f"{b.token}: of {count} items came {got}")
        return f"{len(got)} items"
    async with known.handle.doubled.open(b.token) as stream, trio.open_nursery() as nursery:
        nursery.start_soon(_send_all, stream, count)
        got = [item async for item in stream]
        b.check("P4", got == [2 * number for number in range(count)], f"{b.token}: {count} items, answers {got}")
        answered = await stream
    b.check("P4", answered == count, f"{b.token}: {answered} items arrived of {count}")
    return f"{len(got)} items there and back"


async def _send_all(stream: DuplexStream, count: int) -> None:
    for number in range(count):
        await stream.send(number)
    await stream.done_sending()


async def failing_call(b: OperationContext) -> str:
    """A method's error keeps its type, and the actor continues."""
    known = pick(b)
    if known is None:
        return await make_actor(b)
    b.op("call")
    try:
        await known.handle.boom(b.token)
    except Boom as boom:
        b.check("P2", boom.token == b.token, f"{b.token} raised the error of {boom.token}")
        return "its own error"
    b.check("P2", False, f"{b.token} did not raise")
    return "no error"


async def repeatable_call(b: OperationContext) -> str:
    """A call that may be repeated is answered as long as there is an incarnation."""
    known = pick(b)
    if known is None:
        return await make_actor(b)
    # Its session with the host ends with a long silence, and with it the host's record of the call: the same
    # incarnation may execute it again.
    b.repeatable(b.token)
    return await add(b, known, b.token, idempotent=True)


async def scoped_actor(b: OperationContext) -> str:
    """An actor ends with its scope, after the jobs."""
    name = f"{b.token}.actor"
    async with b.cluster.open_scope(b.token) as scope:
        b.op("create_actor")
        handle = await scope.create_actor(Counter, name=name)
        text = await add(b, KnownActor(handle, True, 0), f"{b.token}.call")
    b.doomed(name)
    return text


ACTS: Mapping[str, Act] = {
    "make an actor": make_actor,
    "calls": calls,
    "pipelined calls": pipelined_calls,
    "cancelled call": cancelled_call,
    "call with deadline": call_with_deadline,
    "relayed call": relayed_call,
    "call between machines": call_between_machines,
    "both ways": both_ways,
    "failing call": failing_call,
    "repeatable call": repeatable_call,
    "scoped actor": scoped_actor,
}
