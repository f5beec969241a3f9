"""Two processes that cannot dial one another talk through the controller, which opens nothing of what they say."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from fray.errors import (
    ActorDied,
    ChannelFull,
    ConnectionFailed,
    OutcomeUnknown,
    ProtocolMismatch,
    Refused,
    Unauthorized,
    Unreachable,
)
from fray.model.messages.client import ListNodes
from fray.net.channel.dialer import RELAY_AFTER_S
from fray.net.transport import Credential, PeerIdentity, Transport
from fray.net.tunnels import multiplexer
from fray.net.tunnels.multiplexer import WINDOW_BYTES
from fray.testing.conformance import CASES, CREDENTIAL, Case, NetworkUnderTest, authorize, connected
from tests.support.actors import Counter
from tests.support.relay import Split, TwoEnds, open_split


@asynccontextmanager
async def bench() -> AsyncIterator[tuple[Split, NetworkUnderTest]]:
    async with open_split() as split:
        address = f"relay:{split.places['far'].session}"
        yield split, NetworkUnderTest(TwoEnds(split.tunnels("near"), split.tunnels("far")), address)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_tunnel_conforms_as_a_transport(case: Case, autojump_clock: Any) -> None:
    async with bench() as (split, tunnels):
        await case(tunnels)
        await trio.testing.wait_all_tasks_blocked()
        assert split.relayed_tunnels() == len(split.tunnels("near")) == len(split.tunnels("far")) == 0


# Calls ---------------------------------------------------------------------------------------------------------------


async def test_an_actor_that_cannot_be_dialed_is_called_through_the_controller(autojump_clock: Any) -> None:
    async with open_split() as split:
        way = split.way("near", await split.serve("far", Counter()))
        before = trio.current_time()
        assert await way.call("add", 5) == 5
        assert trio.current_time() - before == pytest.approx(RELAY_AFTER_S)
        assert [await call for call in [way.start("add") for _ in range(100)]] == list(range(6, 106))
        assert await way.call("echo", b"x" * 3_000_000) == b"x" * 3_000_000
        assert "connected at relay:" in repr(way.route)


async def test_a_direct_address_is_preferred_without_a_wait(autojump_clock: Any) -> None:
    async with open_split() as split:
        split.network.heal("near", "far")
        way = split.way("near", await split.serve("far", Counter()))
        before = trio.current_time()
        assert await way.call("add", 5) == 5
        assert trio.current_time() == before
        assert split.relayed_tunnels() == 0


async def test_both_places_may_host_and_call_one_another(autojump_clock: Any) -> None:
    async with open_split() as split:
        there = split.way("near", await split.serve("far", Counter()))
        here = split.way("far", await split.serve("near", Counter()))
        assert [await there.call("add"), await here.call("add")] == [1, 1]


async def test_a_call_in_flight_survives_the_restart_of_the_controller_that_relays_it(autojump_clock: Any) -> None:
    async with open_split() as split:
        instance = Counter()
        way = split.way("near", await split.serve("far", instance))
        call = way.start("wait_for_gate")
        assert await way.call("add") == 1
        split.kill_controller()
        more = [way.start("add") for _ in range(3)]
        await trio.sleep(3)
        assert not any(one.done() for one in more)
        await split.start_controller()
        assert [await one for one in more] == [2, 3, 4]
        instance.gate.set()
        assert await call == "open"
        assert instance.log == ["waiting"]


@pytest.mark.parametrize("seed", range(10))
async def test_relayed_calls_continue_within_three_seconds_after_the_controller_is_back(
    seed: int, autojump_clock: Any
) -> None:
    async with open_split(seed) as split:
        way = split.way("near", await split.serve("far", Counter()))
        assert await way.call("add") == 1
        split.kill_controller()
        call = way.start("add")
        await trio.sleep(8)
        await split.start_controller()
        with trio.fail_after(3):
            assert await call == 2


@pytest.mark.parametrize("host", ["near", "far"])
async def test_a_lost_connection_of_either_side_to_the_controller_loses_and_repeats_no_call(
    host: str, autojump_clock: Any
) -> None:
    async with open_split() as split:
        instance = Counter()
        way = split.way("near", await split.serve("far", instance))
        for number in range(1, 40):
            made = [way.start("add") for _ in range(5)]
            split.network.drop(host)
            assert [await call for call in made] == list(range(5 * number - 4, 5 * number + 1))


async def test_calls_use_the_direct_address_once_the_relayed_one_is_lost(autojump_clock: Any) -> None:
    async with open_split() as split:
        way = split.way("near", await split.serve("far", Counter()))
        await way.call("add")
        split.network.heal("near", "far")
        split.kill_controller()
        await split.start_controller()
        assert await way.call("add") == 2
        await trio.testing.wait_all_tasks_blocked()
        assert split.relayed_tunnels() == 0


# Who is dead ---------------------------------------------------------------------------------------------------------


async def test_an_unreachable_host_is_not_dead_until_the_controller_reports_it(autojump_clock: Any) -> None:
    async with open_split() as split:
        instance = Counter()
        way = split.way("near", await split.serve("far", instance))
        await way.call("add")
        split.network.cut("far", "controller")
        split.network.drop("far")
        call = way.start("add")
        await trio.sleep(20)
        assert not call.done()
        split.network.heal("far", "controller")
        assert await call == 2


async def test_a_report_of_the_controller_ends_calls_of_an_unreachable_host(autojump_clock: Any) -> None:
    async with open_split() as split:
        way = split.way("near", await split.serve("far", Counter()))
        call = way.start("wait_for_gate")
        await way.call("add")
        split.network.freeze("far")
        before = trio.current_time()
        split.network.drop("far", "controller")
        with pytest.raises(OutcomeUnknown, match="according to the controller"):
            await call
        assert trio.current_time() - before < 40, "the grace of a driver (30 s), and a dial"
        with pytest.raises(ActorDied):
            await way.call("add")


async def test_a_refusal_by_a_different_server_proves_nothing(autojump_clock: Any) -> None:
    """127.0.0.1 is another machine from there: nothing is listening on that port, and the actor lives."""
    async with open_split() as split:
        endpoint = await split.serve("far", Counter())
        wrong = ("memory:near/none", *endpoint.addresses[1:])
        way = split.way("near", type(endpoint)(**{**_fields(endpoint), "addresses": wrong}))
        before = trio.current_time()
        assert await way.call("add") == 1
        assert trio.current_time() == before, "the relay was tried at once"


def _fields(endpoint: Any) -> dict[str, Any]:
    return {name: getattr(endpoint, name) for name in endpoint.__slots__ if not name.startswith("__")}


async def test_a_host_that_has_answered_before_and_now_refuses_is_dead(
    autojump_clock: Any,
) -> None:
    async with open_split() as split:
        split.network.heal("near", "far")
        way = split.way("near", await split.serve("far", Counter()))
        call = way.start("wait_for_gate")
        await way.call("add")
        split.network.cut("near", "controller")
        before = trio.current_time()
        split.network.crash("far")
        with pytest.raises(OutcomeUnknown):
            await call
        assert trio.current_time() - before < 0.1


# Who may -------------------------------------------------------------------------------------------------------------


async def test_a_host_requires_its_own_key_inside_the_tunnel(autojump_clock: Any) -> None:
    async with open_split() as split:
        endpoint = await split.serve("far", Counter())
        address = endpoint.addresses[-1]
        assert address == f"relay:{endpoint.incarnation}"
        with pytest.raises(Unauthorized, match="does not accept the key"):
            await split.tunnels("near").dial(address, Credential("caller", "guess"), timeout_s=5)
        await trio.testing.wait_all_tasks_blocked()
        assert split.relayed_tunnels() == 0


async def test_unknown_name_missing_listener_and_missing_connection_are_different_errors(autojump_clock: Any) -> None:
    async with open_split() as split:
        near, far = split.tunnels("near"), split.places["far"].session
        with pytest.raises(Refused, match="no process registered"):
            await near.dial("relay:session-unknown", None, timeout_s=5)
        with pytest.raises(Refused, match="nothing is listening"):
            await near.dial(f"relay:{far}", None, timeout_s=5)
        split.network.cut("far", "controller")
        split.network.drop("far")
        await trio.testing.wait_all_tasks_blocked()  # the controller has noticed
        with pytest.raises(Unreachable, match="no connection to the controller"):
            await near.dial(f"relay:{far}", None, timeout_s=5)


async def test_one_tunnel_past_the_limit_is_refused_with_what_to_do(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplexer, "TUNNELS_LIMIT", 3)
    async with bench() as (_, tunnels), connected(tunnels):
        open_ = [await tunnels.network.dial(tunnels.address, CREDENTIAL, timeout_s=5) for _ in range(2)]
        with pytest.raises(ChannelFull, match="release some actors"):
            await tunnels.network.dial(tunnels.address, CREDENTIAL, timeout_s=5)
        open_[0].abort()
        await trio.testing.wait_all_tasks_blocked()
        await tunnels.network.dial(tunnels.address, CREDENTIAL, timeout_s=5)


async def test_the_limit_of_the_host_holds_for_all_dialers(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench() as (split, tunnels):
        await split.enter("third")
        monkeypatch.setattr(multiplexer, "TUNNELS_LIMIT", 2)
        async with connected(tunnels):
            await split.tunnels("third").dial(tunnels.address, CREDENTIAL, timeout_s=5)
            with pytest.raises(ChannelFull):
                await split.tunnels("third").dial(tunnels.address, CREDENTIAL, timeout_s=5)


# Bounds --------------------------------------------------------------------------------------------------------------


async def flood(transport: Transport, sent: list[int]) -> None:
    try:
        while True:
            await transport.send([b"x" * 50_000])
            sent.append(50_000)
    except ConnectionFailed:
        pass


async def test_unread_data_is_bounded_by_the_window_at_every_hop(autojump_clock: Any) -> None:
    async with bench() as (split, tunnels), connected(tunnels) as pair, trio.open_nursery() as nursery:
        sent: list[int] = []
        nursery.start_soon(flood, pair.near, sent)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert WINDOW_BYTES < sum(sent) < WINDOW_BYTES + 400_000
        gateway: Any = split.controller.gateway if split.controller else None
        assert all(link.tunnels.queued_bytes < WINDOW_BYTES for link in gateway._clients.values())
        pair.near.abort()


async def test_a_disconnected_host_leaves_at_most_one_window_at_the_relay(autojump_clock: Any) -> None:
    async with bench() as (split, tunnels), connected(tunnels) as pair, trio.open_nursery() as nursery:
        split.network.cut("far", "controller")
        sent: list[int] = []
        nursery.start_soon(flood, pair.near, sent)
        await trio.testing.wait_all_tasks_blocked(0.01)
        gateway: Any = split.controller.gateway if split.controller else None
        held = [link.tunnels.queued_bytes + link.channel.outbox.size_bytes for link in gateway._clients.values()]
        assert max(held) < WINDOW_BYTES + 200_000
        pair.near.abort()


async def test_a_busy_tunnel_delays_neither_a_quiet_one_nor_the_channel(autojump_clock: Any) -> None:
    """The way to the controller takes a second for each message; the busy tunnel always has more to say."""
    async with bench() as (split, tunnels), connected(tunnels) as busy:
        quiet = await tunnels.network.dial(tunnels.address, CREDENTIAL, timeout_s=30)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood, busy.near, [])
            await trio.testing.wait_all_tasks_blocked(0.01)
            near = split.tunnels("near")
            assert near._multiplexer is not None
            outbox = near._multiplexer.channel.outbox
            assert outbox.unsent_bytes <= multiplexer.BATCH_BYTES + multiplexer.PART_BYTES + 100
            await quiet.send([b"quiet"])
            nursery.cancel_scope.cancel()


async def test_sending_more_than_the_credit_ends_the_tunnel_but_not_the_channel(autojump_clock: Any) -> None:
    async with bench() as (split, tunnels), connected(tunnels) as pair:
        flow = pair.near._flow  # type: ignore[attr-defined]
        flow.credit = 1 << 40
        for _ in range(80):
            flow.put(b"x" * multiplexer.PART_BYTES)
        with pytest.raises((ConnectionFailed, ProtocolMismatch), match="more than its credit"):
            await pair.near.receive()
        with pytest.raises(ConnectionFailed):
            while True:
                await pair.far.receive()
        await split.places["near"].client.wait_ready(1)
        assert split.places["near"].client.ended is None


async def test_granting_more_credit_than_a_window_ends_the_tunnel(autojump_clock: Any) -> None:
    async with bench() as (split, tunnels), connected(tunnels) as pair:
        pair.far._flow.grant(WINDOW_BYTES)  # type: ignore[attr-defined]
        with pytest.raises(ConnectionFailed, match="the credit of a tunnel is limited"):
            await pair.near.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert split.relayed_tunnels() == 0


async def test_invalid_tunnel_frames_end_only_their_senders_channel(
    autojump_clock: Any,
) -> None:
    async with bench() as (split, tunnels), connected(tunnels):
        third = await split.enter("third")
        channel = third.client._channel
        assert channel is not None
        channel.send_nowait(multiplexer.DATA, 4711, b"of a tunnel that never was")
        channel.send_nowait(multiplexer.CREDIT, 4711, b"", target=5)
        channel.send_nowait(multiplexer.CLOSE, 4711)
        assert await third.client.request(ListNodes()) is not None
        channel.send_nowait(multiplexer.OPEN, 2, b"an even number, and no message")
        with pytest.raises(ProtocolMismatch):
            raise await channel.wait_ended()
        assert split.places["near"].client.ended is None
        assert split.places["far"].client.ended is None


async def test_concurrent_tunnels_deliver_all_data(autojump_clock: Any) -> None:
    rng = random.Random(7)
    async with bench() as (_, tunnels), trio.open_nursery() as nursery:

        async def echo(transport: Transport) -> None:
            try:
                while True:
                    await transport.send([await transport.receive()])
            except ConnectionFailed:
                pass

        async def talk() -> None:
            transport = await tunnels.network.dial(tunnels.address, CREDENTIAL, timeout_s=5)
            assert isinstance(transport.peer, PeerIdentity)
            for _ in range(20):
                message = rng.randbytes(rng.choice((0, 1, 1000, 40_000, 700_000)))
                await transport.send([message])
                assert await transport.receive() == message
            await transport.aclose()

        await nursery.start(tunnels.network.listen, tunnels.address, authorize, echo)
        async with trio.open_nursery() as talks:
            for _ in range(20):
                talks.start_soon(talk)
        nursery.cancel_scope.cancel()
