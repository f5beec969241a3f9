"""The channel as conversations on the virtual clock: cuts at every message, forgetting, freezing, refusing, ending."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock

from fray.errors import (
    ActorDied,
    ChannelClosed,
    ChannelFull,
    ConnectionFailed,
    FrayError,
    MessageTooLarge,
    NoSuchActor,
    ProtocolMismatch,
    Refused,
    Unauthorized,
    Unreachable,
)
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from fray.model.messages.session import Goodbye, Hello, Refuse, Welcome
from fray.net import codec
from fray.net.buffers.chunks import COUNTED_BYTES
from fray.net.channel import channel as channel_module
from fray.net.channel import session
from fray.net.channel.connection import FINISH_READING_S, STREAM_BYTES
from fray.net.channel.dialer import Failure, decide_outcome
from fray.net.channel.public import (
    MESSAGE_LIMIT_BYTES,
    Acceptor,
    Channel,
    HandlerFactory,
    RedialPolicy,
    run_dialed,
)
from fray.net.channel.session import (
    HEARTBEAT_S,
    PROTOCOL,
    SILENT_PERIODS,
    FragmentBudget,
    make_transfer_budget,
)
from fray.net.codec import ACK, MORE, Bytes, Kind, encode_frame
from fray.net.transport import Credential, PeerIdentity, Transport
from fray.net.transports.memory import (
    PIPE_LIMIT_BYTES,
    InFlightMessage,
    MemoryHost,
    MemoryNetwork,
    MemoryTransport,
    MessageFault,
)
from fray.net.transports.websocket import WebSocketNetwork

CREDENTIAL = Credential("cluster", "key")
PATIENT = RedialPolicy(refused_is_final=False, give_up_s=None)
CALLER = RedialPolicy(refused_is_final=True, give_up_s=None)
HOST = "memory:host"


@define(eq=False)
class Recorder:
    """Handler that records its callbacks."""

    channel: Channel
    events: list[str] = field(factory=list)
    bodies: list[bytes] = field(factory=list)
    frames: list[tuple[int, int, int, int]] = field(factory=list)
    error: FrayError | None = None
    on_body: Callable[[Recorder, bytes], None] = lambda recorder, body: None
    at_reset: Callable[[Recorder], None] = lambda recorder: None
    changed: trio.Event = field(factory=trio.Event)
    rng: random.Random = field(factory=lambda: random.Random(0))

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        self.frames.append((kind, flags, target, ref))
        self.bodies.append(bytes(body))
        self.on_body(self, bytes(body))

    def on_batch(self) -> None:
        self._notify()

    def on_reset(self, greeting: bytes) -> None:
        self.events.append(f"reset {greeting.decode()}")
        self.at_reset(self)
        self._notify()

    def on_suspended(self, why: str) -> None:
        self.events.append("suspended")
        self._notify()

    def on_resumed(self) -> None:
        self.events.append("resumed")
        self._notify()

    def on_end(self, error: FrayError) -> None:
        assert self.error is None, "on_end came twice"
        self.error = error
        self.events.append(f"end {type(error).__name__}")
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def wait_bodies(self, count: int) -> None:
        while len(self.bodies) < count:
            await self.changed.wait()

    async def wait_event(self, what: str, count: int = 1) -> None:
        while sum(word.startswith(what) for word in self.events) < count:
            await self.changed.wait()


@define
class Harness:
    """A network, a listening host, and all handlers made on it."""

    network: MemoryNetwork
    nursery: trio.Nursery
    acceptor: Acceptor
    recorders: list[Recorder] = field(factory=list)
    stop: Callable[[], None] = lambda: None
    make: Callable[[Channel], Recorder] = Recorder
    refusal: FrayError | None = None
    greeted: list[tuple[str, bytes]] = field(factory=list)
    seed: int = 0
    dials: int = 0

    def greet(self, claim: PeerIdentity, greeting: bytes) -> tuple[bytes, HandlerFactory]:
        self.greeted.append((claim.key_id, greeting))
        if self.refusal is not None:
            raise self.refusal
        return b"host", self._record

    def _record(self, channel: Channel) -> Recorder:
        self.recorders.append(self.make(channel))
        return self.recorders[-1]

    async def dial(
        self,
        *,
        policy: RedialPolicy = PATIENT,
        make: Callable[[Channel], Recorder] = Recorder,
        credential: Credential = CREDENTIAL,
        expects: str | None = None,
        addresses: tuple[str, ...] = (HOST,),
        session: str | None = None,
        incarnation: str = "driver-1",
    ) -> Recorder:
        """A dialed channel's handler, after its first welcome."""
        made: list[Recorder] = []
        self.dials += 1

        def factory(channel: Channel) -> Recorder:
            made.append(make(channel))
            return made[0]

        await self.nursery.start(
            partial(
                run_dialed,
                self.network.at("driver"),
                addresses,
                credential,
                greeting=lambda: b"driver",
                handler=factory,
                incarnation=incarnation,
                expects=expects,
                policy=policy,
                session=session,
                rng=random.Random(f"{self.seed} {self.dials}"),
            )
        )
        return made[0]


async def serve(harness: Harness, incarnation: str = "host-1", address: str = HOST, keep_s: float = 60.0) -> Acceptor:
    """Let a (new) incarnation of the host listen; the old one has crashed before."""
    harness.acceptor = Acceptor(
        incarnation, harness.greet, keep_s=keep_s, rng=random.Random(f"{harness.seed} {incarnation}")
    )
    scope = trio.CancelScope()

    async def listen(task_status: trio.TaskStatus[str]) -> None:
        with scope:
            await harness.network.listen(
                address, lambda key_id: "key", harness.acceptor.handle, task_status=task_status
            )

    await harness.nursery.start(listen)
    harness.stop = scope.cancel
    return harness.acceptor


@asynccontextmanager
async def open_harness(seed: int = 0, **options: Any) -> AsyncIterator[Harness]:
    async with trio.open_nursery() as nursery:
        rng = random.Random(seed)
        harness = Harness(network=MemoryNetwork(rng), nursery=nursery, acceptor=None, seed=seed)  # type: ignore[arg-type]
        await serve(harness, **options)
        with trio.fail_after(3600):
            yield harness
        nursery.cancel_scope.cancel()


# Frames, once and in order -------------------------------------------------------------------------------------------


async def test_frames_pass_both_ways_with_all_their_fields(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        far = harness.recorders[0]
        near.channel.send_nowait(Kind.CALL, 2**63, b"abc", target=2**31, flags=2)
        far.channel.send_nowait(Kind.RESULT, 1)
        await far.wait_bodies(1)
        await near.wait_bodies(1)
        assert (far.frames, far.bodies) == ([(Kind.CALL, 2, 2**31, 2**63)], [b"abc"])
        assert (near.frames, near.bodies) == ([(Kind.RESULT, 0, 0, 1)], [b""])
        assert (near.events, far.events) == (["reset host"], ["reset driver"])
        assert (near.channel.incarnation, far.channel.incarnation) == ("host-1", "driver-1")
        assert harness.acceptor.channels == {near.channel.session: far.channel}


@pytest.mark.parametrize("size", [4095, 4096, codec.FRAGMENT_BYTES, codec.FRAGMENT_BYTES + 1, 3_000_000])
async def test_a_large_body_arrives_whole_between_its_neighbours(size: int, autojump_clock: MockClock) -> None:
    body = random.Random(size).randbytes(size)
    async with open_harness() as harness:
        near = await harness.dial()
        for piece in (b"before", body, bytearray(body), memoryview(body), b"after"):
            near.channel.send_nowait(Kind.CALL, 1, piece, flags=2)
        far = harness.recorders[0]
        await far.wait_bodies(5)
        assert far.bodies == [b"before", body, body, body, b"after"]
        assert {flags for _, flags, _, _ in far.frames} == {2}


async def test_one_byte_over_the_limit_is_refused_and_the_channel_continues(
    autojump_clock: MockClock,
) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        with pytest.raises(MessageTooLarge) as caught:
            near.channel.send_nowait(Kind.CALL, 1, bytes(MESSAGE_LIMIT_BYTES + 1))
        assert caught.value.details == {"size_bytes": MESSAGE_LIMIT_BYTES + 1, "limit_bytes": MESSAGE_LIMIT_BYTES}
        near.channel.send_nowait(Kind.CALL, 1, bytes(MESSAGE_LIMIT_BYTES))
        await harness.recorders[0].wait_bodies(1)
        assert len(harness.recorders[0].bodies[0]) == MESSAGE_LIMIT_BYTES


async def test_a_burst_travels_in_few_messages(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        for n in range(1000):
            near.channel.send_nowait(Kind.CALL, n, b"x" * 60)
        far = harness.recorders[0]
        await far.wait_bodies(1000)
        assert far.channel.stats.messages_received <= 2 + 80_000 // STREAM_BYTES


async def test_a_long_burst_goes_out_before_it_ends(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        await trio.testing.wait_all_tasks_blocked()
        for n in range(1000):
            near.channel.send_nowait(Kind.CALL, n, b"x" * 60)
        assert near.channel.outbox.unsent_bytes <= STREAM_BYTES, "the peer has most of it, and no task has run since"
        await harness.recorders[0].wait_bodies(1000)


async def test_answers_given_while_a_batch_is_dispatched_travel_together(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        harness.make = lambda channel: Recorder(channel, on_body=lambda me, body: me.channel.send_nowait(33, 0, body))
        near = await harness.dial()
        for n in range(1000):
            near.channel.send_nowait(Kind.CALL, n, b"x" * 60)
        await near.wait_bodies(1000)
        assert near.channel.stats.messages_received <= 2 + 80_000 // STREAM_BYTES


# Cuts ----------------------------------------------------------------------------------------------------------------


def chatter(count: int, seed: int) -> Callable[[Channel], Recorder]:
    """A handler that sends ``count`` numbered bodies of all sizes, some at once, some as answers."""
    rng = random.Random(seed)
    todo = [b"%d " % n * rng.choice((1, 1, 1, 10, 3000, 150_000)) for n in range(count)]

    def more(me: Recorder, how_many: int) -> None:
        for _ in range(min(how_many, len(todo))):
            me.channel.send_nowait(Kind.CALL, 0, todo.pop(0))

    return lambda channel: Recorder(
        channel, on_body=lambda me, body: more(me, rng.choice((0, 1, 2))), at_reset=lambda me: more(me, 3)
    )


def numbers(recorder: Recorder) -> list[int]:
    return [int(body[:8].partition(b" ")[0]) for body in recorder.bodies]


async def converse(seed: int, on_hop: Callable[[InFlightMessage], MessageFault]) -> int:
    """A conversation with faults, which must not be noticeable; how many messages it took."""
    count, nudges, hops = 12, 15, 0

    def counted(hop: InFlightMessage) -> MessageFault:
        nonlocal hops
        hops += 1
        return on_hop(hop)

    async with open_harness(seed) as harness:
        harness.network.set_delay("driver", "host", 0.0, 0.01)
        harness.network.on_message_sent = counted
        harness.make = chatter(count, seed)
        near = await harness.dial(make=chatter(count, seed + 1))
        far = harness.recorders[0]
        for n in range(nudges):  # nudges: the chatter may die out while both wait for the other's next word
            near.channel.send_nowait(Kind.CALL, 0, b"%d" % (1000 + n))
            far.channel.send_nowait(Kind.CALL, 0, b"%d" % (1000 + n))
            await trio.sleep(0.003)
        await near.wait_bodies(count + nudges)
        await far.wait_bodies(count + nudges)
        await near.channel.close()
        await far.wait_event("end")
        for end in (near, far):
            assert [n for n in numbers(end) if n < 1000] == list(range(count))
            assert [n for n in numbers(end) if n >= 1000] == list(range(1000, 1000 + nudges))
            assert sum(word.startswith("reset") for word in end.events) == 1
            assert end.events.count("suspended") >= end.events.count("resumed")
        assert len(harness.recorders) == len(harness.greeted) == 1
    return hops


@pytest.mark.parametrize("fate", [MessageFault.LOSE, MessageFault.LAST])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_cut_at_any_message_loses_nothing_and_repeats_nothing(
    seed: int, fate: MessageFault, autojump_clock: MockClock
) -> None:
    total = await converse(seed, lambda hop: MessageFault.DELIVER)
    for k in range(1, total + 1):
        left = k

        def cut(hop: InFlightMessage) -> MessageFault:
            nonlocal left
            left -= 1
            return fate if left == 0 else MessageFault.DELIVER

        await converse(seed, cut)


@pytest.mark.parametrize("fate", [MessageFault.LOSE, MessageFault.LAST])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("source", ["driver", "host"])
async def test_every_early_connection_may_die_at_its_kth_message(
    source: str, k: int, fate: MessageFault, autojump_clock: MockClock
) -> None:
    await converse(
        3,
        lambda hop: fate if hop.connection <= 12 and (hop.source, hop.number) == (source, k) else MessageFault.DELIVER,
    )


@pytest.mark.parametrize("seed", range(10, 40))
async def test_random_cuts_lose_nothing_and_repeat_nothing(seed: int, autojump_clock: MockClock) -> None:
    rng = random.Random(seed)
    fates = random.Random(seed).choices(list(MessageFault), [8, 1, 1], k=400)
    await converse(seed, lambda hop: fates.pop() if fates and rng.random() < 0.9 else MessageFault.DELIVER)


async def test_the_same_seed_gives_the_same_frames(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING", True)
    shuffle = random.Random()
    monkeypatch.setattr("trio._core._run._r", shuffle)

    async def record(seed: int) -> list[InFlightMessage]:
        hops: list[InFlightMessage] = []
        shuffle.seed(seed)

        def note(hop: InFlightMessage) -> MessageFault:
            hops.append(hop)
            return MessageFault.LOSE if len(hops) % 7 == 0 else MessageFault.DELIVER

        await converse(seed, note)
        return hops

    assert await record(5) == await record(5)
    assert await record(5) != await record(6)


# Forgetting ----------------------------------------------------------------------------------------------------------


async def test_a_host_without_the_session_resets_the_dialer_and_drops_unacknowledged_frames(
    autojump_clock: MockClock,
) -> None:
    async with open_harness(keep_s=10) as harness:
        near = await harness.dial()
        harness.network.cut("driver", "host")
        near.channel.send_nowait(Kind.CALL, 1, b"never seen")
        harness.network.drop("driver")
        await trio.sleep(30)
        harness.network.heal("driver", "host")
        await near.wait_event("reset", 2)
        near.channel.send_nowait(Kind.CALL, 2, b"seen")
        old, new = harness.recorders
        await new.wait_bodies(1)
        assert old.events == ["reset driver", "suspended", "end Unreachable"]
        assert new.bodies == [b"seen"]
        assert near.events == ["reset host", "suspended", "reset host"]
        assert near.error is None


async def test_a_restarted_host_resets_a_dialer_that_redials(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        harness.network.crash("host")
        harness.stop()
        await near.wait_event("suspended")
        await trio.sleep(60)
        await serve(harness, "host-2")
        await near.wait_event("reset", 2)
        assert near.channel.incarnation == "host-2"
        assert near.events == ["reset host", "suspended", "reset host"]


async def test_a_lost_welcome_of_a_new_instance_is_sent_again_with_all_its_frames(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        harness.make = lambda channel: Recorder(
            channel, at_reset=lambda me: me.channel.send_nowait(19, 0, b"first word")
        )
        near = await harness.dial()
        await near.wait_bodies(1)
        harness.network.crash("host")
        harness.stop()
        await near.wait_event("suspended")
        lost = 0

        def lose_three_welcomes(hop: InFlightMessage) -> MessageFault:
            nonlocal lost
            if hop.source == "host" and hop.number == 1 and lost < 3:
                lost += 1
                return MessageFault.LOSE
            return MessageFault.DELIVER

        harness.network.on_message_sent = lose_three_welcomes
        await serve(harness, "host-2")
        await near.wait_bodies(2)
        assert lost == 3
        assert near.bodies == [b"first word"] * 2
        assert near.events == ["reset host", "suspended", "reset host"]
        assert len(harness.recorders) == 2


async def test_a_restarted_dialer_of_the_same_session_name_ends_the_old_session(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        await harness.dial(session="same", incarnation="driver-1")
        await harness.dial(session="same", incarnation="driver-2")
        old, new = harness.recorders
        await old.wait_event("end")
        assert old.events == ["reset driver", "end ChannelClosed"]
        assert harness.acceptor.channels == {"same": new.channel}


async def test_a_session_belongs_to_the_key_that_opened_it(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        await harness.dial(session="same")
        with pytest.raises(Unauthorized, match="another key"):
            await harness.dial(session="same", credential=Credential("attempt:x", "key"))
        assert harness.recorders[0].error is None


# Superseding ---------------------------------------------------------------------------------------------------------


async def test_a_newer_connection_takes_over_from_one_that_still_seems_alive(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        far = harness.recorders[0]
        harness.network.cut("driver", "host")
        near.channel._connection.transport.abort()  # type: ignore[union-attr]
        near.channel.send_nowait(Kind.CALL, 1, b"by the new one")
        await near.wait_event("suspended")
        assert far.channel.connected
        harness.network.cut("host", "driver", both=False)
        far.channel.send_nowait(Kind.CALL, 1, b"into the old one")
        hold_old_connection(harness)
        await far.wait_bodies(1)
        await near.wait_bodies(1)
        assert far.events == ["reset driver", "suspended", "resumed"]
        assert near.events == ["reset host", "suspended", "resumed"]


def hold_old_connection(harness: Harness) -> None:
    """Heal the network, except that the end of the first connection stays unknown to the host."""
    for (number, side), transport in harness.network._living.items():
        if (number, side) == (1, "listener"):
            transport._back.ended_at = float("inf")
    harness.network.heal("driver", "host")


async def test_a_hello_that_arrives_late_does_not_take_over(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        stale = await harness.network.at("driver").dial(HOST, CREDENTIAL, timeout_s=1)
        hello = Hello(protocol=PROTOCOL, session=near.channel.session, incarnation="driver-1", dial=0)
        await stale.send([ACK.pack(0), encode_frame(Kind.HELLO, 0, codec.encode_message(hello, [b""]))])
        with pytest.raises(FrayError):
            await stale.receive()
        assert near.events == ["reset host"]
        assert harness.recorders[0].events == ["reset driver"]


# Silence -------------------------------------------------------------------------------------------------------------


async def test_a_frozen_peer_is_dropped_by_the_heartbeat_and_may_reconnect(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        harness.network.freeze("host")
        near.channel.send_nowait(Kind.CALL, 1, b"when you wake")
        await near.wait_event("suspended")
        assert HEARTBEAT_S * SILENT_PERIODS <= trio.current_time() <= HEARTBEAT_S * SILENT_PERIODS + 1
        await trio.sleep(15)
        harness.network.thaw("host")
        await near.wait_event("resumed")
        await harness.recorders[0].wait_bodies(1)
        assert harness.recorders[0].bodies == [b"when you wake"]


async def test_an_idle_channel_pings_each_period_and_stays(autojump_clock: MockClock) -> None:
    hops = 0

    def count(hop: InFlightMessage) -> MessageFault:
        nonlocal hops
        hops += 1
        return MessageFault.DELIVER

    async with open_harness() as harness:
        near = await harness.dial()
        harness.network.on_message_sent = count
        await trio.sleep(1000)
        assert near.events == ["reset host"]
        period_s = session.WAITING_HEARTBEAT_S
        assert 1000 / period_s <= hops <= 4 * 1000 / period_s


async def test_a_channel_that_waits_for_nothing_pings_rarely(autojump_clock: MockClock) -> None:
    hops = 0

    def count(hop: InFlightMessage) -> MessageFault:
        nonlocal hops
        hops += 1
        return MessageFault.DELIVER

    async with open_harness() as harness:
        near = await harness.dial(make=make_idle_recorder)
        harness.network.on_message_sent = count
        await trio.sleep(1000)
        assert near.events == ["reset host"]
        assert 1000 / HEARTBEAT_S <= hops <= 4 * 1000 / HEARTBEAT_S


def make_idle_recorder(channel: Channel) -> Recorder:
    channel.is_waiting = lambda: False
    return Recorder(channel)


async def test_a_silent_connection_is_replaced_within_seconds(autojump_clock: MockClock) -> None:
    """Kill the connection without notice to either side, like a change of the address of one."""
    async with open_harness() as harness:
        near = await harness.dial()
        await trio.sleep(3)
        lose_first_connection(harness)
        near.channel.send_nowait(Kind.CALL, 1, b"over the next one")
        with trio.fail_after(3.1):
            await harness.recorders[0].wait_bodies(1)
        assert harness.recorders[0].bodies == [b"over the next one"]
        assert near.events == ["reset host", "suspended", "resumed"]


async def test_a_listener_whose_dialer_has_moved_is_heard_again_within_ten_seconds(autojump_clock: MockClock) -> None:
    """Only the dialer can dial; it notices by its own pings, although it has nothing to send."""
    async with open_harness() as harness:
        near = await harness.dial()
        await trio.sleep(3)
        lose_first_connection(harness)
        harness.recorders[0].channel.send_nowait(Kind.CALL, 1, b"where are you?")
        with trio.fail_after(10):
            await near.wait_bodies(1)
        assert harness.recorders[0].events == ["reset driver", "suspended", "resumed"]


async def test_a_busy_peer_is_not_taken_for_lost(autojump_clock: MockClock) -> None:
    """Block the peer for 50 s: the connection stays, and what it sends then arrives there."""
    async with open_harness() as harness:
        near = await harness.dial()
        silence: list[bool] = []
        near.channel.silence_changed = silence.append
        harness.network.freeze("host")
        near.channel.send_nowait(Kind.CALL, 1, b"when you are done")
        await trio.sleep(50)
        assert (near.events, silence) == (["reset host"], [True])
        harness.network.thaw("host")
        await harness.recorders[0].wait_bodies(1)
        await trio.sleep(100)
        assert harness.recorders[0].bodies == [b"when you are done"]
        assert silence == [True, False] or near.events == ["reset host", "suspended", "resumed"]


@pytest.mark.parametrize("cut_s", [1, 4, 10, 20, 50])
async def test_a_cut_costs_a_second_more_than_it_lasts(cut_s: int, autojump_clock: MockClock) -> None:
    """The old connection does not recover by itself here: TCP would wait for its next retransmission."""
    async with open_harness() as harness:
        near = await harness.dial()
        await trio.sleep(3)
        harness.network.cut("driver", "host")
        began = trio.current_time()
        near.channel.send_nowait(Kind.CALL, 1, b"over the next one")
        await trio.sleep(cut_s)
        lose_first_connection(harness)
        harness.network.heal("driver", "host")
        await harness.recorders[0].wait_bodies(1)
        assert harness.recorders[0].bodies == [b"over the next one"]
        assert trio.current_time() - began <= max(cut_s + 1.5, 3.1)


def lose_first_connection(harness: Harness) -> None:
    """Let every message of the first connection vanish, without an error at either end."""
    for (number, _), transport in harness.network._living.items():
        if number == 1:
            transport._out.queue = Hole()


class Hole(deque[Any]):
    """Queue that takes everything and keeps nothing."""

    def append(self, item: Any) -> None:
        pass


async def test_a_deferred_frame_is_sent_with_the_next_frame_or_within_a_second(
    autojump_clock: MockClock,
) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        await trio.testing.wait_all_tasks_blocked()
        far = harness.recorders[0]
        near.channel.send_later(Kind.CALL, 1, b"later")
        await trio.testing.wait_all_tasks_blocked()
        assert far.bodies == []
        near.channel.send_nowait(Kind.CALL, 2, b"now")
        await far.wait_bodies(2)
        assert (far.bodies, far.channel.stats.messages_received) == ([b"later", b"now"], 1)
        near.channel.send_later(Kind.CALL, 3, b"alone")
        began = trio.current_time()
        await far.wait_bodies(3)
        assert trio.current_time() - began <= session.ACK_AFTER_S + 0.1


async def test_a_large_frame_after_a_deferred_one_is_sent_at_once(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        await trio.testing.wait_all_tasks_blocked()  # its writer sleeps: what is sent goes straight to the transport
        began = trio.current_time()
        near.channel.send_later(Kind.CALL, 1, b"later")
        near.channel.send_nowait(Kind.CALL, 2, bytes(session.BATCH_BYTES))  # the two are more than one message
        await harness.recorders[0].wait_bodies(2)
        assert trio.current_time() - began < session.ACK_AFTER_S / 2


async def test_frames_are_acknowledged_within_a_second(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        near.channel.send_nowait(Kind.CALL, 1, b"x" * 100)
        assert near.channel.outbox.size_bytes > 0
        await trio.sleep(1.1)
        assert near.channel.outbox.size_bytes == 0


# Ending --------------------------------------------------------------------------------------------------------------


async def test_close_delivers_queued_frames_and_both_ends_get_the_reason(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        for n in range(300):
            near.channel.send_nowait(Kind.CALL, n, b"%d " % n * 500)
        await near.channel.close("all done")
        far = harness.recorders[0]
        await far.wait_event("end")
        assert numbers(far) == list(range(300))
        for end in (near, far):
            assert isinstance(end.error, ChannelClosed)
            assert (str(end.error), end.error.details) == ("all done", {"reason": "all done"})
        with pytest.raises(ChannelClosed, match="all done"):
            near.channel.send_nowait(Kind.CALL, 1)
        assert not harness.acceptor.channels


async def test_close_takes_two_seconds_at_most_without_an_answer(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        harness.network.freeze("host")
        began = trio.current_time()
        await near.channel.close("bye")
        assert trio.current_time() - began <= 2.0
        assert near.events == ["reset host", "end ChannelClosed"]


async def test_close_while_suspended_waits_for_a_redial_but_not_long(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        harness.network.cut("driver", "host")
        harness.network.drop("driver")
        await near.wait_event("suspended")
        began = trio.current_time()
        await near.channel.close("bye")
        assert trio.current_time() - began <= 2.0
        assert near.events == ["reset host", "suspended", "end ChannelClosed"]


async def test_the_acceptor_says_goodbye_to_all(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        ends = [await harness.dial() for _ in range(3)]
        await harness.acceptor.close("maintenance")
        for near in ends:
            await near.wait_event("end")
            assert str(near.error) == "maintenance"
        assert not harness.acceptor.channels


async def test_abort_ends_both_ends_with_its_error(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        near.channel.abort(NoSuchActor("wrong authenticator_with", actor="x"))
        far = harness.recorders[0]
        await far.wait_event("end")
        for end in (near, far):
            assert isinstance(end.error, NoSuchActor)
            assert end.error.details == {"actor": "x"}


async def test_the_reason_of_the_end_is_read_though_a_send_fails_before(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def receive_late(self: MemoryTransport) -> Bytes:
        # As on a socket: the task that reads runs some time after the message has arrived.
        await trio.sleep(0.01)
        return await receive(self)

    receive = MemoryTransport.receive
    monkeypatch.setattr(MemoryTransport, "receive", receive_late)
    async with open_harness() as harness:
        near = await harness.dial()
        await trio.sleep(1)
        far = harness.recorders[0]
        near.channel.send_nowait(Kind.CALL, 1, b"before the end")
        near.channel.abort(NoSuchActor("its host has ended"))
        far.channel.send_nowait(Kind.CALL, 2, b"fails")
        await trio.sleep(5)
        assert far.bodies == [b"before the end"]
        assert far.events == ["reset driver", "end NoSuchActor"]


async def test_a_failed_send_ends_the_connection_soon_if_the_reader_learns_of_no_end(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send_or_fail(self: MemoryTransport, parts: Any) -> None:
        if is_failing:
            raise ConnectionFailed("no buffer space")
        await send(self, parts)

    is_failing, send = False, MemoryTransport.send
    monkeypatch.setattr(MemoryTransport, "send", send_or_fail)
    monkeypatch.setattr(MemoryTransport, "send_now", lambda self, parts: False)
    async with open_harness() as harness:
        near = await harness.dial()
        await trio.sleep(1)
        is_failing, began = True, trio.current_time()
        near.channel.send_nowait(Kind.CALL, 1, b"fails at first")
        await near.wait_event("suspended")
        assert trio.current_time() - began <= FINISH_READING_S
        is_failing = False
        await harness.recorders[0].wait_bodies(1)


async def test_a_handler_that_fails_ends_the_channel_with_that_reason(autojump_clock: MockClock) -> None:
    def fail(me: Recorder, body: bytes) -> None:
        raise NoSuchActor("no actor of that name")

    async with open_harness() as harness:
        harness.make = lambda channel: Recorder(channel, on_body=fail)
        near = await harness.dial()
        near.channel.send_nowait(Kind.CALL, 1, b"x")
        near.channel.send_nowait(Kind.CALL, 2, b"y")
        await near.wait_event("end")
        far = harness.recorders[0]
        assert isinstance(near.error, NoSuchActor)
        assert isinstance(far.error, NoSuchActor)
        assert len(far.bodies) == 1


async def test_a_bug_in_a_handler_ends_the_channel_and_names_it(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    def fail(me: Recorder, body: bytes) -> None:
        raise ZeroDivisionError("a bug")

    async with open_harness() as harness:
        harness.make = lambda channel: Recorder(channel, on_body=fail)
        near = await harness.dial()
        near.channel.send_nowait(Kind.CALL, 1, b"x")
        await near.wait_event("end")
        far = harness.recorders[0]
        assert isinstance(far.error, ChannelClosed)
        assert isinstance(far.error.__cause__, ZeroDivisionError)
        assert "ZeroDivisionError" in caplog.text


async def test_a_cancelled_dialer_delivers_queued_frames_and_says_goodbye(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        async with trio.open_nursery() as inner:
            outer, harness.nursery = harness.nursery, inner
            near = await harness.dial()
            harness.nursery = outer
            near.channel.send_nowait(Kind.CALL, 1, b"last words")
            near.channel.send_nowait(Kind.CALL, 1, b"and more")
            inner.cancel_scope.cancel()
        far = harness.recorders[0]
        await far.wait_event("end")
        assert far.bodies == [b"last words", b"and more"]
        assert isinstance(far.error, ChannelClosed)
        assert near.events == ["reset host", "end ChannelClosed"]


async def test_a_stopped_listener_ends_its_channels_without_goodbye(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        harness.stop()
        await harness.recorders[0].wait_event("end")
        await near.wait_event("suspended")
        assert near.error is None
        assert isinstance(harness.recorders[0].error, ChannelClosed)


# Verdicts of the dialer ---------------------------------------------------------------------------------------------


async def test_a_refused_redial_ends_the_channel_as_dead(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial(policy=CALLER)
        harness.network.crash("host")
        await near.wait_event("end")
        assert near.events == ["reset host", "suspended", "end Refused"]
        assert trio.current_time() < 1


async def test_a_dialer_gives_up_after_its_limit(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial(policy=RedialPolicy(refused_is_final=False, give_up_s=30))
        harness.network.crash("host")
        await near.wait_event("end")
        assert isinstance(near.error, Unreachable)
        assert isinstance(near.error.__cause__, Refused)
        assert 30 <= trio.current_time() <= 31


async def test_the_limit_of_a_dialer_includes_unanswered_dials(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial(policy=RedialPolicy(refused_is_final=True, give_up_s=7, dial_timeout_s=5))
        harness.network.cut("driver", "host")
        harness.network.drop("driver")
        await near.wait_event("end")
        assert isinstance(near.error, Unreachable)
        assert 7 <= trio.current_time() <= 7.5


async def test_a_listener_slower_than_the_first_time_out_is_reached(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        harness.network.set_delay("driver", "host", 4.0)  # 12 s from the dial to the welcome
        near = await harness.dial(policy=PATIENT)
        assert near.events == ["reset host"]
        assert 12 <= trio.current_time() < 5 + 10 + 20 + 2


@pytest.mark.parametrize(("late", "timeout_s"), [(0, 5), (1, 10), (3, 40), (4, 60), (1000, 60)])
def test_each_round_that_times_out_doubles_the_time_out(late: int, timeout_s: float) -> None:
    assert PATIENT.timeout_s(late) == timeout_s


@pytest.mark.parametrize("policy", [PATIENT, CALLER])
async def test_a_key_that_is_not_accepted_any_more_ends_the_channel_at_once(
    policy: RedialPolicy, autojump_clock: MockClock
) -> None:
    async with open_harness() as harness:
        near = await harness.dial(policy=policy)
        harness.network._listeners[HOST].authenticator.authorize = lambda key_id: None
        harness.network.drop("driver")
        await near.wait_event("end")
        assert isinstance(near.error, Unauthorized)
        assert trio.current_time() < 0.1


async def test_an_impostor_at_the_address_does_not_end_a_channel_to_the_controller(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_harness() as harness:
        near = await harness.dial(policy=PATIENT)
        dial, met = MemoryHost.dial, 0

        async def meet_impostor(host: MemoryHost, *args: Any, **named: Any) -> Transport:
            nonlocal met
            met += 1
            if met <= 3:
                raise Unauthorized("a different certificate", impostor=True)
            return await dial(host, *args, **named)

        monkeypatch.setattr(MemoryHost, "dial", meet_impostor)
        harness.network.drop("driver")
        await near.wait_event("resumed")
        assert met == 4
        assert near.error is None


@pytest.mark.parametrize("policy", [PATIENT, CALLER])
async def test_another_incarnation_at_the_address_ends_the_channel(
    policy: RedialPolicy, autojump_clock: MockClock
) -> None:
    async with open_harness() as harness:
        near = await harness.dial(policy=policy, expects="host-1")
        harness.network.crash("host")
        harness.stop()
        await serve(harness, "host-2")
        await near.wait_event("end")
        assert isinstance(near.error, ActorDied)
        assert near.error.details == {"expects": "host-1", "found": "host-2"}
        assert len(harness.greeted) == 1


async def test_a_failed_first_dial_raises_its_error_and_calls_no_handler(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        with pytest.raises(Refused):
            await harness.dial(policy=CALLER, addresses=("memory:none",))
        with pytest.raises(Unauthorized):
            await harness.dial(credential=Credential("cluster", "wrong"))
        with pytest.raises(ActorDied):
            await harness.dial(expects="host-0")
        harness.refusal = NoSuchActor("not here")
        with pytest.raises(NoSuchActor, match="not here"):
            await harness.dial()
        assert harness.recorders == []


async def test_a_listener_whose_greeting_fails_refuses(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with open_harness() as harness:
        harness.acceptor._on_greeting = lambda claim, greeting: 1 / 0  # type: ignore[return-value, assignment]
        with pytest.raises(FrayError, match="ZeroDivisionError"):
            await harness.dial()


async def test_a_dialer_may_start_before_the_listener(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        harness.network.crash("host")
        harness.stop()
        async with trio.open_nursery() as nursery:

            async def later() -> None:
                await trio.sleep(20)
                await serve(harness, "host-2")

            nursery.start_soon(later)
            near = await harness.dial()
        assert near.channel.incarnation == "host-2"
        assert trio.current_time() < 20 + PATIENT.most_s


async def test_addresses_are_tried_in_order_and_one_listener_suffices(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial(policy=CALLER, addresses=("memory:none", HOST))
        assert near.channel.remote == HOST


def test_a_round_of_dials_ends_only_by_proof() -> None:
    refused, silent = Failure(Refused("r"), False, proves_end=True), Failure(Unreachable("u"), False)
    rejected, ended = Failure(Refused("r"), False), Failure(Refused("r"), False, by_controller=True)
    denied = Failure(Unauthorized("a"), True)
    assert decide_outcome([refused, refused], True).final
    assert not decide_outcome([refused, refused], False).final
    assert not decide_outcome([refused, rejected], True).final, "by a firewall, perhaps"
    assert decide_outcome([rejected, ended], True).final, "says the controller"
    assert not decide_outcome([refused, silent], True).final
    assert isinstance(decide_outcome([silent, refused], True).error, Unreachable)
    assert decide_outcome([silent, denied, refused], False) is denied


def test_pauses_grow_to_their_limit_with_jitter() -> None:
    rng = random.Random(1)
    pauses = [PATIENT.pause_s(n, rng) for n in range(1, 2000)]
    assert 0.025 <= pauses[0] <= 0.05
    assert all(1.0 <= pause <= 2.0 for pause in pauses[6:])
    assert len(set(pauses)) > 1900


# Back-pressure -------------------------------------------------------------------------------------------------------


async def test_a_peer_that_does_not_read_fills_a_bounded_outbox(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        harness.network.freeze("host")
        with pytest.raises(ChannelFull) as caught:
            for _ in range(200):
                near.channel.send_nowait(Kind.CALL, 1, bytes(1_000_000))
        assert caught.value.details["held_bytes"] <= caught.value.details["limit_bytes"]
        held = near.channel.outbox.size_bytes
        with trio.move_on_after(5) as scope:
            await near.channel.wait_room()
        assert scope.cancelled_caught
        harness.network.thaw("host")
        await near.channel.wait_room()
        assert near.channel.outbox.size_bytes <= session.HIGH_WATER_BYTES < held


async def test_small_frames_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    monkeypatch.setattr("fray.net.channel.channel.BUFFER_LIMIT_FRAMES", 1000)
    monkeypatch.setattr("fray.net.channel.session.BUFFER_LIMIT_FRAMES", 1000)
    async with open_harness() as harness:
        near = await harness.dial()
        harness.network.drop("driver")
        await near.wait_event("suspended")
        with pytest.raises(ChannelFull):
            for _ in range(1001):
                near.channel.send_nowait(Kind.CALL, 1)


async def test_waiting_for_room_ends_with_the_channel(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        harness.network.freeze("host")
        for _ in range(20):
            near.channel.send_nowait(Kind.CALL, 1, bytes(1_000_000))

        async def abort_later() -> None:
            await trio.sleep(1)
            near.channel.abort(ChannelClosed("enough", reason="enough"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(abort_later)
            with pytest.raises(ChannelClosed, match="enough"):
                await near.channel.wait_room()


async def test_both_sides_may_send_much_without_reading_first(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        far = harness.recorders[0]
        for _ in range(40):
            near.channel.send_nowait(Kind.CALL, 1, bytes(PIPE_LIMIT_BYTES))
            far.channel.send_nowait(Kind.CALL, 1, bytes(PIPE_LIMIT_BYTES))
        await near.wait_bodies(40)
        await far.wait_bodies(40)


# Strangers -----------------------------------------------------------------------------------------------------------


async def introduce(harness: Harness, *frames: bytes, ack: int = 0) -> Transport:
    """A connection of someone who says this."""
    transport = await harness.network.at("stranger").dial(HOST, CREDENTIAL, timeout_s=1)
    await transport.send([ACK.pack(ack), *frames])
    return transport


def hello(**changes: Any) -> bytes:
    fields = {"protocol": PROTOCOL, "session": "s", "incarnation": "i", **changes}
    return encode_frame(Kind.HELLO, 0, codec.encode_message(Hello(**fields), [b"hi"]))


async def answer(transport: Transport) -> object:
    message = await transport.receive()
    (frame,) = codec.read_frames(message)
    return codec.decode_message(frame[4])[0]


async def test_another_major_version_is_a_protocol_mismatch_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with open_harness() as harness:
        refuse = await answer(await introduce(harness, hello(protocol=(1, 0))))
        assert isinstance(refuse, Refuse)
        assert refuse.error["error"] == "ProtocolMismatch"
        message = refuse.error["message"]
        assert "peer uses protocol version 1.0 and this process 2.0: install the same version of fray" in message
        assert "\n" not in message
        assert message in caplog.text
        monkeypatch.setattr("fray.net.channel.dialer.PROTOCOL", (1, 0))
        with pytest.raises(ProtocolMismatch, match=r"version 1.0"):
            await harness.dial()
        monkeypatch.setattr("fray.net.channel.dialer.PROTOCOL", PROTOCOL)
        monkeypatch.setattr("fray.net.channel.acceptor.PROTOCOL", (3, 1))
        with pytest.raises(ProtocolMismatch, match=r"version 3.1"):
            await harness.dial()


def control(name: str, blobs: list[bytes], **fields: Any) -> bytes:
    """Return a control body of a class as another version writes it."""
    text = json.dumps({"t": name, "b": [len(blob) for blob in blobs], **fields}).encode()
    return len(text).to_bytes(4, "little") + text + b"".join(blobs)


async def test_peers_of_version_1_are_refused_as_they_are_written(autojump_clock: MockClock) -> None:
    """Version 1 called the instance of a session its life; both sides still understand the refusal."""
    hello_1 = control("Hello", [b"hi"], protocol=[1, 0], session="s", incarnation="i", resume=True, life="x", dial=3)
    refuse_1 = control("Refuse", [], protocol=[1, 0], incarnation="h", error={"error": "FrayError", "message": "no"})
    async with open_harness() as harness:
        refuse = await answer(await introduce(harness, encode_frame(Kind.HELLO, 0, hello_1)))
        assert isinstance(refuse, Refuse)
        assert refuse.error["details"] == {"theirs": [1, 0], "ours": [2, 0]}

        async def serve_version_1(transport: Transport) -> None:
            await transport.receive()
            await transport.send([ACK.pack(0), encode_frame(Kind.REFUSE, 0, refuse_1)])
            await transport.receive()

        await harness.nursery.start(harness.network.listen, "memory:old", lambda key_id: "key", serve_version_1)
        with pytest.raises(ProtocolMismatch, match=r"version 1\.0 and this process 2\.0") as info:
            await harness.dial(addresses=("memory:old",))
        assert "\n" not in str(info.value)


async def test_a_later_minor_version_with_unknown_fields_is_welcome(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        body = codec.encode_message(Hello(protocol=(2, 7), session="s", incarnation="i", dial=7), [b"hi"])
        assert b'"dial"' in body
        body = body.replace(b'"dial"', b'"news"')
        welcome = await answer(await introduce(harness, encode_frame(Kind.HELLO, 0, body)))
        assert isinstance(welcome, Welcome)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"short",
        ACK.pack(0),
        ACK.pack(0) + b"\xff" * 20,
        ACK.pack(0) + encode_frame(Kind.CALL, 1, b"no hello"),
        ACK.pack(0) + encode_frame(Kind.HELLO, 0, b"no message"),
        ACK.pack(0) + hello()[:-1],
        ACK.pack(0) + hello() + hello(),
        ACK.pack(0) + encode_frame(Kind.HELLO, 0, codec.encode_message(Goodbye(), [b""])),
        ACK.pack(0)
        + encode_frame(Kind.HELLO, 0, codec.encode_message(Hello(protocol=PROTOCOL, session="s", incarnation=""))),
    ],
)
async def test_garbage_instead_of_a_hello_is_refused_and_the_listener_continues(
    first: bytes, autojump_clock: MockClock
) -> None:
    async with open_harness() as harness:
        transport = await harness.network.at("stranger").dial(HOST, CREDENTIAL, timeout_s=1)
        await transport.send([first])
        refuse = await answer(transport)
        assert isinstance(refuse, Refuse)
        assert refuse.error["error"] == "ProtocolMismatch"
        await harness.dial()


async def test_a_dialer_that_says_nothing_is_dropped(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        transport = await harness.network.at("stranger").dial(HOST, CREDENTIAL, timeout_s=1)
        with pytest.raises(FrayError):
            await transport.receive()
        assert trio.current_time() == pytest.approx(10)


@pytest.mark.parametrize(
    "message",
    [
        b"short",
        ACK.pack(99),
        ACK.pack(0) + encode_frame(Kind.CALL, 1, b"cut short")[:-1],
        ACK.pack(0) + encode_frame(Kind.CALL, 1)[:-1],
        ACK.pack(0) + encode_frame(Kind.GOODBYE, 1, b"nonsense"),
    ],
    ids=["no batch", "acknowledges too much", "truncated body", "truncated header", "unreadable goodbye"],
)
async def test_garbage_in_a_channel_ends_only_that_connection(message: bytes, autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        transport = await introduce(harness, hello())
        assert isinstance(await answer(transport), Welcome)
        await transport.send([ACK.pack(0), encode_frame(Kind.CALL, 1, b"sound")])
        await transport.send([message])
        with pytest.raises(FrayError):
            while True:
                await transport.receive()
        stranger = harness.recorders[1]
        await stranger.wait_event("suspended")
        assert stranger.bodies == [b"sound"]
        near.channel.send_nowait(Kind.CALL, 1, b"and on")
        await harness.recorders[0].wait_bodies(1)


async def test_fragments_without_end_are_bounded(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    monkeypatch.setattr("fray.net.channel.channel.MESSAGE_LIMIT_BYTES", 1_000_000)
    async with open_harness() as harness:
        transport = await introduce(harness, hello())
        for _ in range(5):
            await transport.send([ACK.pack(0), encode_frame(Kind.CALL, 1, bytes(250_000), flags=MORE)])
        far = harness.recorders[0]
        await far.wait_event("end")
        assert isinstance(far.error, MessageTooLarge)
        assert far.bodies == []


async def test_incomplete_bodies_of_all_sessions_have_one_limit(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        budget = FragmentBudget(limit_bytes=700_000, key_limit_bytes=500_000)
        channel_module._budget.set(budget)

        async def begin(session: str, key_id: str, size: int) -> Transport:
            dialed = await harness.network.at(session).dial(HOST, Credential(key_id, "key"), timeout_s=1)
            part = encode_frame(Kind.CALL, 1, bytes(size), flags=MORE)
            await dialed.send([ACK.pack(0), hello(session=session)])
            await dialed.send([ACK.pack(0), part])
            await trio.testing.wait_all_tasks_blocked()
            return dialed

        first = await begin("a", "attempt:one", 250_001)
        second = await begin("b", "attempt:one", 249_999)
        await begin("c", "attempt:two", 200_000)
        assert budget.size_bytes == 700_000
        assert [each.error for each in harness.recorders] == [None] * 3
        fourth = await begin("d", "attempt:three", 1)
        ended, *others = harness.recorders
        assert isinstance(ended.error, ChannelFull), "the largest of the key with the most, and not the newest"
        assert [each.error for each in others] == [None] * 3
        assert ended.bodies == []
        for dialed in (second, fourth):
            await dialed.send([ACK.pack(0), encode_frame(Kind.CALL, 1, b"end")])
        await trio.testing.wait_all_tasks_blocked()
        assert [len(body) for each in others for body in each.bodies] == [250_002, 4]
        assert budget.size_bytes == 200_000
        first.abort()


@pytest.mark.parametrize("over", ["session", "all"])
async def test_incomplete_transfers_of_all_sessions_have_one_limit(over: str, autojump_clock: MockClock) -> None:
    size = COUNTED_BYTES // 2
    async with open_harness() as harness:
        budget = FragmentBudget(limit_bytes=3 * size, key_limit_bytes=2 * size)
        channel_module._transfer_budget.set(budget)
        landed: list[tuple[str, int]] = []

        async def announce(session: str, *numbers: int) -> Recorder:
            near = await harness.dial(session=session)
            far = harness.recorders[-1]
            for number in numbers:
                far.channel.bulk_in.expect(number, size, lambda buffer: landed.append((session, len(buffer))))
            return near

        def send(near: Recorder, count: int, whole: int = 0) -> None:
            """Begin so many transfers, and complete the first ones."""
            for number in range(1, count + 1):
                view = memoryview(bytes(size if number <= whole else size - 1))
                near.channel.mark_announced([near.channel.bulk_out.add(number, view)])

        first, second = await announce("a", 1, 2, 3), await announce("b", 1)
        send(first, 2)
        send(second, 1, whole=1)
        await trio.testing.wait_all_tasks_blocked()
        assert landed == [("b", size)]
        assert budget.size_bytes == harness.recorders[0].channel.bulk_in.held_bytes == 2 * size
        if over == "session":
            send(first, 1)
        else:
            third = await announce("c", 1, 2)
            send(third, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert budget.size_bytes == 3 * size
            assert [each.error for each in harness.recorders] == [None] * 3
            send(third, 1)
        await trio.testing.wait_all_tasks_blocked()
        ended, *others = harness.recorders
        assert isinstance(ended.error, ChannelFull)
        assert "incomplete transfers of large buffers of all sessions are over the limit" in str(ended.error)
        assert f"({3 * size} bytes, {2 * size} of one session), and this session has the most" in str(ended.error)
        assert isinstance(first.error, ChannelFull), "its peer hears why"
        assert [each.error for each in others] == [None] * len(others)
        assert budget.size_bytes == sum(each.channel.bulk_in.held_bytes for each in others)
        second.channel.send_nowait(Kind.CALL, 1, b"and on")
        await others[0].wait_bodies(1)


def test_the_limits_of_transfers_grow_with_the_memory_of_the_machine() -> None:
    small, large = make_transfer_budget(2**30), make_transfer_budget(64 * 2**30)
    assert SIZE_LIMIT_BYTES < small.key_limit_bytes < small.limit_bytes
    assert (large.limit_bytes, large.key_limit_bytes) == (48 * 2**30, 32 * 2**30)


async def test_a_listener_that_answers_nonsense_is_a_protocol_mismatch(autojump_clock: MockClock) -> None:
    async def nonsense(transport: Transport) -> None:
        await transport.receive()
        await transport.send([b"\xff" * 30])
        await trio.sleep_forever()

    async with open_harness() as harness:
        await harness.nursery.start(harness.network.listen, "memory:odd", lambda key_id: "key", nonsense)
        with pytest.raises(ProtocolMismatch):
            await harness.dial(addresses=("memory:odd",))


async def test_a_listener_that_keeps_sending_nonsense_ends_the_channel(autojump_clock: MockClock) -> None:
    """A connection that breaks by nonsense is dialed again, but not for ever."""
    dials = 0

    async def nonsense(transport: Transport) -> None:
        nonlocal dials
        dials += 1
        await transport.receive()
        welcome = Welcome(protocol=PROTOCOL, incarnation="odd", instance="l", resumed=dials > 1)
        await transport.send([ACK.pack(0), encode_frame(Kind.WELCOME, 0, codec.encode_message(welcome, [b""]))])
        await transport.send([b"nonsense" * 4])
        await trio.sleep_forever()

    async with open_harness() as harness:
        await harness.nursery.start(harness.network.listen, "memory:odd", lambda key_id: "key", nonsense)
        near = await harness.dial(addresses=("memory:odd",))
        await near.wait_event("end")
        assert isinstance(near.error, ProtocolMismatch)
        assert dials == 3


# Over real sockets ---------------------------------------------------------------------------------------------------


async def test_a_channel_survives_lost_real_connections(tmp_path: Path) -> None:
    rng = random.Random(1)
    made: list[Recorder] = []
    network = WebSocketNetwork(rng)

    def record(channel: Channel) -> Recorder:
        made.append(Recorder(channel))
        return made[-1]

    acceptor = Acceptor("host", lambda claim, greeting: (b"host", record), rng=rng)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(network.listen, f"unix:{tmp_path}/s", lambda key_id: "key", acceptor.handle)
        options: dict[str, Any] = {"greeting": lambda: b"", "handler": record, "incarnation": "d", "policy": CALLER}
        channel = await nursery.start(partial(run_dialed, network, [address], CREDENTIAL, rng=rng, **options))
        far, near = made
        for n in range(60):
            channel.send_nowait(Kind.CALL, n, b"%d " % n * 20_000)
            far.channel.send_nowait(Kind.CALL, n, b"%d " % n * 20_000)
            if n % 15 == 5:
                link = (near if n % 2 else far).channel._connection
                assert link is not None
                link.transport.abort()
                await near.wait_event("resumed", n // 15 + 1)
        await near.wait_bodies(60)
        await far.wait_bodies(60)
        assert numbers(near) == numbers(far) == list(range(60))
        assert far.events.count("resumed") == 4
        await channel.close("done")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
async def test_the_reason_of_the_end_is_read_from_a_socket_that_refuses_a_message(kind: str, tmp_path: Path) -> None:
    rng, made = random.Random(1), list[Recorder]()
    network = WebSocketNetwork(rng)

    def end_and_answer(me: Recorder, body: bytes) -> None:
        # The goodbye of the other end and its close are in the socket before this end writes the next time. TCP and TLS
        # refuse only the second message after that.
        far = next(each for each in made if each is not me)
        far.channel.abort(NoSuchActor("its host has ended"))
        for _ in range(2):
            me.channel.send_nowait(Kind.RESULT, 1, b"too late")
            connection = me.channel._connection
            assert connection is not None
            connection._stream()
            time.sleep(0.01)

    def record(channel: Channel) -> Recorder:
        made.append(Recorder(channel, on_body=end_and_answer))
        return made[-1]

    acceptor = Acceptor("host", lambda claim, greeting: (b"host", record), rng=rng)
    async with trio.open_nursery() as nursery:
        where = f"unix:{tmp_path}/s" if kind == "unix" else f"{kind}:127.0.0.1:0"
        address = await nursery.start(network.listen, where, lambda key_id: "key", acceptor.handle)
        options: dict[str, Any] = {"greeting": lambda: b"", "handler": record, "incarnation": "d", "policy": PATIENT}
        channel = await nursery.start(partial(run_dialed, network, [address], CREDENTIAL, rng=rng, **options))
        far, near = made
        far.channel.send_nowait(Kind.CALL, 1, b"x")
        with trio.fail_after(10):
            error = await channel.wait_ended()
        assert isinstance(error, NoSuchActor)
        assert near.events == ["reset host", "end NoSuchActor"]
        nursery.cancel_scope.cancel()


async def test_a_transfer_over_the_limit_ends_its_channel_in_the_middle_of_a_message(tmp_path: Path) -> None:
    """Chunks are received from sockets straight into their place."""
    rng, made = random.Random(1), list[Recorder]()
    network = WebSocketNetwork(rng)

    def record(channel: Channel) -> Recorder:
        made.append(Recorder(channel))
        return made[-1]

    channel_module._transfer_budget.set(FragmentBudget(2 * COUNTED_BYTES, 2 * COUNTED_BYTES))
    acceptor = Acceptor("host", lambda claim, greeting: (b"host", record), rng=rng)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(network.listen, f"unix:{tmp_path}/s", lambda key_id: "key", acceptor.handle)
        options: dict[str, Any] = {"greeting": lambda: b"", "handler": record, "incarnation": "d", "policy": CALLER}
        channel = await nursery.start(partial(run_dialed, network, [address], CREDENTIAL, rng=rng, **options))
        far, near = made
        landed: list[int] = []
        for number, size in ((1, 2 * COUNTED_BYTES), (2, 3 * COUNTED_BYTES)):
            far.channel.bulk_in.expect(number, size, lambda buffer: landed.append(len(buffer)))
            channel.mark_announced([channel.bulk_out.add(number, memoryview(bytes(size)))])
            with trio.fail_after(60):
                while len(landed) < number and near.error is None:
                    await (far if number == 1 else near).changed.wait()
        assert landed == [2 * COUNTED_BYTES], "one of exactly the limit arrives"
        assert isinstance(far.error, ChannelFull)
        assert isinstance(near.error, ChannelFull)
        nursery.cancel_scope.cancel()
