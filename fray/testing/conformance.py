"""Conformance suite for implementations of `fray.net.transport.Network`.

Each case takes a `NetworkUnderTest` and fails by an exception. In pytest::

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    async def test_my_network(case):
        await case(NetworkUnderTest(network=MyNetwork(), address="my:address"))
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import trio
import trio.testing
from attrs import frozen

from fray.errors import ConnectionFailed, FrayError, MessageTooLarge, Refused, Unauthorized
from fray.net.transport import Bytes, Credential, Network, Transport
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES

CREDENTIAL = Credential("cluster", "the right key")
TIMEOUT_S = 10.0
CLOSE_LIMIT_S = 1.5
"""Time limit of `Transport.aclose`, which promises 1 s; the rest is for a busy machine."""


@frozen
class NetworkUnderTest:
    """A network and one of its addresses that is free when a case begins."""

    network: Network
    address: str


@frozen
class ConnectionPair:
    """Both ends of one connection."""

    near: Transport
    far: Transport


Case: TypeAlias = Callable[[NetworkUnderTest], Awaitable[None]]
CASES: list[Case] = []


def case(fn: Case) -> Case:
    """Add a function to the suite."""
    CASES.append(fn)
    return fn


def authorize(key_id: str) -> str | None:
    """Return the key of a key id, for the suite's listeners."""
    return {"cluster": "the right key", "attempt:a:1:0": "another key"}.get(key_id)


@asynccontextmanager
async def listener(bench: NetworkUnderTest) -> AsyncIterator[tuple[str, trio.MemoryReceiveChannel[Transport]]]:
    """Run a listener; the accepted transports are received from the channel, and stay open until the end."""
    send, receive = trio.open_memory_channel[Transport](100)

    async def handler(transport: Transport) -> None:
        send.send_nowait(transport)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        address = await nursery.start(bench.network.listen, bench.address, authorize, handler)
        with trio.fail_after(6 * TIMEOUT_S):
            yield address, receive
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(bench: NetworkUnderTest, credential: Credential = CREDENTIAL) -> AsyncIterator[ConnectionPair]:
    """Open one connection."""
    async with listener(bench) as (address, accepted):
        near = await bench.network.dial(address, credential, timeout_s=TIMEOUT_S)
        try:
            yield ConnectionPair(near, await accepted.receive())
        finally:
            near.abort()


async def fails(awaitable: Awaitable[object], *kinds: type[FrayError]) -> FrayError:
    """Return the error that the awaitable raises, which must be of one of these kinds."""
    try:
        result = await awaitable
    except kinds as error:
        return error
    raise AssertionError(f"it returned {result!r} instead of raising {kinds}")


async def receive_all(transport: Transport, count: int) -> list[bytes]:
    """Return the next messages."""
    return [bytes(await transport.receive()) for _ in range(count)]


async def send_all(transport: Transport, messages: Sequence[bytes]) -> None:
    """Send messages in order."""
    for message in messages:
        await transport.send([message])


@case
async def messages_arrive_whole_and_in_order_both_ways(bench: NetworkUnderTest) -> None:
    rng = random.Random(1)
    messages = [rng.randbytes(rng.choice((0, 1, 20, 125, 126, 127, 1000, 65535, 65536, 70000))) for _ in range(200)]
    async with connected(bench) as pair:
        for source, target in ((pair.near, pair.far), (pair.far, pair.near)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_all, source, messages)
                assert await receive_all(target, len(messages)) == messages


@case
async def parts_of_a_message_are_joined(bench: NetworkUnderTest) -> None:
    parts: list[Bytes] = [
        b"abc",
        bytearray(b"def"),
        memoryview(b"xghix")[1:4],
        b"",
        b"j" * 100_000,
        memoryview(b"k" * 100_000),
    ]
    async with connected(bench) as pair:
        await pair.near.send(parts)
        await pair.near.send([b"x"] * 3000)
        assert await receive_all(pair.far, 2) == [b"".join(parts), b"x" * 3000]


@case
async def a_message_at_the_limit_passes_and_one_byte_more_is_refused_at_the_door(bench: NetworkUnderTest) -> None:
    largest = random.Random(2).randbytes(TRANSPORT_LIMIT_BYTES)
    async with connected(bench) as pair:
        for source, target in ((pair.near, pair.far), (pair.far, pair.near)):
            error = await fails(source.send([largest, b"!"]), MessageTooLarge)
            assert error.details == {"size_bytes": TRANSPORT_LIMIT_BYTES + 1, "limit_bytes": TRANSPORT_LIMIT_BYTES}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_all, source, [largest, b"and on"])
                assert await receive_all(target, 2) == [largest, b"and on"]


@case
async def what_is_sent_is_a_copy(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair:
        buffer = bytearray(b"before")
        await pair.near.send([buffer])
        buffer[:] = b"after!"
        assert await receive_all(pair.far, 1) == [b"before"]


@case
async def a_sender_waits_for_a_peer_that_does_not_read(bench: NetworkUnderTest) -> None:
    messages = [bytes([n]) * 250_000 for n in range(128)]
    async with connected(bench) as pair, trio.open_nursery() as nursery:
        sent = trio.Event()

        async def send() -> None:
            await send_all(pair.near, messages)
            sent.set()

        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not sent.is_set()
        assert await receive_all(pair.far, len(messages)) == messages


@case
async def both_sides_may_send_much_at_once(bench: NetworkUnderTest) -> None:
    messages = [bytes([n]) * 200_000 for n in range(100)]
    async with connected(bench) as pair, trio.open_nursery() as nursery:
        for source, target in ((pair.near, pair.far), (pair.far, pair.near)):
            nursery.start_soon(send_all, source, messages)
            nursery.start_soon(expect, target, messages)


async def expect(transport: Transport, messages: list[bytes]) -> None:
    """Check that the next messages are these."""
    assert await receive_all(transport, len(messages)) == messages


@case
async def a_cancelled_receive_loses_nothing(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.far.receive)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await pair.near.send([b"still there"])
        assert await receive_all(pair.far, 1) == [b"still there"]


@case
async def a_cancelled_send_leaves_the_connection_unusable(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all, pair.near, [b"x" * 250_000] * 200)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
        await fails(pair.near.send([b"too late"]), ConnectionFailed)
        pair.near.abort()


@case
async def closing_delivers_what_was_sent_before(bench: NetworkUnderTest) -> None:
    messages = [b"%d" % n * 1000 for n in range(50)]
    async with connected(bench) as pair:
        await send_all(pair.near, messages)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.near.aclose)
            assert await receive_all(pair.far, len(messages)) == messages
            await fails(pair.far.receive(), ConnectionFailed)
            pair.far.abort()
        await fails(pair.near.send([b"x"]), ConnectionFailed)
        await fails(pair.near.receive(), ConnectionFailed)


@case
async def closing_against_a_frozen_peer_takes_a_second_at_most(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair:
        began = trio.current_time()
        await pair.near.aclose()
        assert trio.current_time() - began <= CLOSE_LIMIT_S


@case
async def closing_while_a_task_receives_ends_its_wait(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(fails, pair.near.receive(), ConnectionFailed)
        nursery.start_soon(fails, pair.far.receive(), ConnectionFailed)
        await trio.testing.wait_all_tasks_blocked()
        await pair.near.aclose()


@case
async def abort_is_idempotent_and_both_ends_learn_of_it(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(fails, pair.near.receive(), ConnectionFailed)
        nursery.start_soon(fails, pair.far.receive(), ConnectionFailed)
        await trio.testing.wait_all_tasks_blocked()
        pair.near.abort()
        pair.near.abort()
        await fails(pair.near.send([b"x"]), ConnectionFailed)
        await fails(pair.near.receive(), ConnectionFailed)


@case
async def a_sender_learns_that_its_peer_is_gone(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair:
        pair.far.abort()
        await fails(send_all(pair.near, [b"x" * 100_000] * 200), ConnectionFailed)


@case
async def a_failed_send_leaves_what_has_arrived_to_be_received(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair:
        await pair.far.send([b"before"])
        await pair.far.send([b"the reason"])
        # An abort drops what a tunnel has not passed on yet.
        await trio.testing.wait_all_tasks_blocked(0.05)
        pair.far.abort()
        # The sender learns of the end only after some messages: they are small, so that none has to wait for room.
        with trio.fail_after(TIMEOUT_S):
            while await sends(pair.near):  # noqa: ASYNC110 - only a send shows the end
                await trio.sleep(0.001)
        assert await receive_all(pair.near, 2) == [b"before", b"the reason"]
        await fails(pair.near.receive(), ConnectionFailed)
        assert not await sends(pair.near)


async def sends(transport: Transport) -> bool:
    """Send a small message; return whether that succeeded."""
    try:
        await transport.send([b"x"])
    except ConnectionFailed:
        return False
    return True


@case
async def a_blocked_sender_is_woken_by_abort(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(fails, send_all(pair.near, [b"x" * 250_000] * 200), ConnectionFailed)
        await trio.testing.wait_all_tasks_blocked(0.05)
        pair.near.abort()


@case
async def an_address_without_listener_is_refused(bench: NetworkUnderTest) -> None:
    async with listener(bench) as (address, _):
        pass
    await fails(bench.network.dial(address, CREDENTIAL, timeout_s=TIMEOUT_S), Refused)


@case
async def the_end_of_a_listener_ends_its_connections(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair:
        pass
    await fails(pair.near.receive(), ConnectionFailed)


@case
async def an_address_is_free_again_after_its_listener(bench: NetworkUnderTest) -> None:
    for _ in range(3):
        async with connected(bench) as pair:
            await pair.near.send([b"x"])
            assert await receive_all(pair.far, 1) == [b"x"]


@case
async def a_wrong_key_is_rejected(bench: NetworkUnderTest) -> None:
    async with listener(bench) as (address, accepted):
        for wrong in (Credential("cluster", "guess"), Credential("unknown", "the right key"), Credential("", ""), None):
            error = await fails(bench.network.dial(address, wrong, timeout_s=TIMEOUT_S), Unauthorized)
            assert "key" in str(error)
            assert "guess" not in str(error)
            assert "right" not in str(error)
        assert accepted.statistics().current_buffer_used == 0


@case
async def the_listener_knows_which_key_was_proven(bench: NetworkUnderTest) -> None:
    async with connected(bench, Credential("attempt:a:1:0", "another key")) as pair:
        assert pair.far.peer.key_id == "attempt:a:1:0"
        assert pair.far.peer.remote
        assert pair.near.peer.remote


@case
async def a_failing_handler_ends_only_its_connection(bench: NetworkUnderTest) -> None:
    async def handler(transport: Transport) -> None:
        if bytes(await transport.receive()) == b"fail":
            raise ValueError("on purpose")
        await transport.send([b"well"])

    async with trio.open_nursery() as nursery:
        address = await nursery.start(bench.network.listen, bench.address, authorize, handler)
        bad = await bench.network.dial(address, CREDENTIAL, timeout_s=TIMEOUT_S)
        good = await bench.network.dial(address, CREDENTIAL, timeout_s=TIMEOUT_S)
        await bad.send([b"fail"])
        await fails(bad.receive(), ConnectionFailed)
        await good.send([b"work"])
        assert await receive_all(good, 1) == [b"well"]
        bad.abort()
        good.abort()
        nursery.cancel_scope.cancel()


@case
async def many_connections_live_side_by_side(bench: NetworkUnderTest) -> None:
    async with listener(bench) as (address, accepted):
        ends = []
        for n in range(30):
            near = await bench.network.dial(address, CREDENTIAL, timeout_s=TIMEOUT_S)
            ends.append(near)
            await near.send([b"%d" % n])
        greetings = [await receive_all(await accepted.receive(), 1) for _ in ends]
        assert sorted(greetings) == sorted([b"%d" % n] for n in range(30))
        for near in ends:
            near.abort()


@case
async def a_direct_send_keeps_its_place(bench: NetworkUnderTest) -> None:
    async with connected(bench) as pair, trio.open_nursery() as nursery:
        send_now = getattr(pair.near, "send_now", None)
        if send_now is None:
            return
        messages = [b"%d" % n * 40_000 for n in range(100)]
        nursery.start_soon(expect, pair.far, messages)
        for message in messages:
            if not send_now([message]):
                await pair.near.send([message])
