"""Questions over a channel: answered once each, asked again of a peer that forgot, ended with the channel."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock

from fray.errors import (
    ChannelClosed,
    DeadlineExceeded,
    FrayError,
    MessageTooLarge,
    NoSuchJob,
    ProtocolMismatch,
    Refused,
)
from fray.model.messages.client import Explain, Text
from fray.net import codec
from fray.net.channel.channel import NullHandler
from fray.net.channel.public import (
    MESSAGE_LIMIT_BYTES,
    Acceptor,
    Channel,
    RedialPolicy,
    run_dialed,
)
from fray.net.channel.requests import Requests
from fray.net.codec import Bytes, Kind
from fray.net.transport import Credential
from fray.net.transports.memory import MemoryNetwork


@define(eq=False)
class Asker(NullHandler):
    channel: Channel
    requests: Requests = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.requests = Requests(self.channel)

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        assert self.requests.on_frame(kind, flags, target, ref, body)

    def on_reset(self, greeting: bytes) -> None:
        self.requests.on_reset()

    def on_end(self, error: FrayError) -> None:
        self.requests.on_end(error)


@define(eq=False)
class Answerer(NullHandler):
    """Answers requests, unless the harness is silent."""

    channel: Channel
    harness: Harness

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        assert kind == Kind.REQUEST
        message, blobs = codec.decode_message(body)
        self.harness.asked.append((ref, message.job))
        if message.job == "unknown":
            self.channel.fail(ref, NoSuchJob("no such job", job="unknown"))
        elif message.job == "nonsense":
            self.channel.send_nowait(Kind.REPLY, ref, b"nonsense")
        elif not self.harness.silent:
            self.channel.reply(ref, Text(text=f"because of {message.job}"), blobs[::-1])
        self.harness.changed.set()


@define(eq=False)
class Harness:
    network: MemoryNetwork
    silent: bool = False
    asked: list[tuple[int, str]] = field(factory=list)
    changed: trio.Event = field(factory=trio.Event)
    requests: Requests = None  # type: ignore[assignment]

    async def wait_asked(self, count: int) -> None:
        while len(self.asked) < count:
            await self.changed.wait()
            self.changed = trio.Event()


@asynccontextmanager
async def open_harness(keep_s: float = 60.0, refused_ends: bool = False) -> AsyncIterator[Harness]:
    rng = random.Random(1)
    harness = Harness(MemoryNetwork(rng))
    acceptor = Acceptor("h", lambda claim, greeting: (b"", answerer), keep_s=keep_s, rng=rng)
    made: list[Asker] = []

    def answerer(channel: Channel) -> Answerer:
        return Answerer(channel, harness)

    def make(channel: Channel) -> Asker:
        made.append(Asker(channel))
        return made[0]

    async with trio.open_nursery() as nursery:
        await nursery.start(harness.network.listen, "memory:h", lambda key_id: "key", acceptor.handle)
        policy = RedialPolicy(refused_is_final=refused_ends, give_up_s=None)
        who = {"handler": make, "incarnation": "d", "greeting": lambda: b""}
        near, credential = harness.network.at("d"), Credential("k", "key")
        dialed = partial(run_dialed, near, ["memory:h"], credential, policy=policy, rng=rng, **who)
        await nursery.start(dialed)
        harness.requests = made[0].requests
        with trio.fail_after(1000):
            yield harness
        nursery.cancel_scope.cancel()


async def test_an_answer_comes_with_its_attachments(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        reply, blobs = await harness.requests.request(Explain(job="x"), [b"a", b"bc"])
        assert reply == Text(text="because of x")
        assert [bytes(blob) for blob in blobs] == [b"bc", b"a"]
        assert len(harness.requests) == 0


async def test_concurrent_requests_get_their_own_answers(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        replies: dict[str, str] = {}

        async def ask(job: str) -> None:
            replies[job] = (await harness.requests.request(Explain(job=job)))[0].text

        async with trio.open_nursery() as nursery:
            for n in range(100):
                nursery.start_soon(ask, str(n))
        assert replies == {str(n): f"because of {n}" for n in range(100)}


async def test_the_error_of_the_peer_is_raised(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        with pytest.raises(NoSuchJob, match="no such job") as caught:
            await harness.requests.request(Explain(job="unknown"))
        assert caught.value.details == {"job": "unknown"}


async def test_a_malformed_answer_is_a_protocol_mismatch_of_that_request_only(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        with pytest.raises(ProtocolMismatch):
            await harness.requests.request(Explain(job="nonsense"))
        await harness.requests.request(Explain(job="x"))


async def test_a_late_answer_is_a_deadline_exceeded_and_dropped(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        harness.network.set_delay("d", "h", 5.0)
        with pytest.raises(DeadlineExceeded, match="did not answer Explain within 3 s"):
            await harness.requests.request(Explain(job="x"), timeout_s=3)
        assert len(harness.requests) == 0
        await trio.sleep(20)
        assert (await harness.requests.request(Explain(job="y")))[0].text == "because of y"


async def test_a_lost_connection_repeats_no_request(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        harness.network.set_delay("d", "h", 0.1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.requests.request, Explain(job="x"))
            await harness.wait_asked(1)
            harness.network.drop("d")
        assert harness.asked == [(1, "x")]


async def test_requests_are_sent_again_in_order_under_the_same_refs_to_a_peer_without_the_session(
    autojump_clock: MockClock,
) -> None:
    async with open_harness(keep_s=1) as harness:
        harness.silent = True
        async with trio.open_nursery() as nursery:
            for n in range(5):
                nursery.start_soon(harness.requests.request, Explain(job=str(n)))
                await harness.wait_asked(n + 1)
            harness.network.cut("d", "h")
            harness.network.drop("d")
            await trio.sleep(5)
            harness.silent = False
            harness.network.heal("d", "h")
        assert harness.asked == [(n + 1, str(n)) for n in range(5)] * 2


async def test_requests_end_with_the_channel(autojump_clock: MockClock) -> None:
    async with open_harness(refused_ends=True) as harness:
        harness.silent = True
        errors: list[FrayError] = []

        async def ask() -> None:
            try:
                await harness.requests.request(Explain(job="x"))
            except FrayError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await harness.wait_asked(2)
            harness.network.crash("h")
        assert [type(error) for error in errors] == [Refused, Refused]
        assert errors[0] is not errors[1]
        with pytest.raises((Refused, ChannelClosed)):
            await harness.requests.request(Explain(job="x"))


async def test_a_request_that_is_too_large_is_refused_before_it_is_sent(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        with pytest.raises(MessageTooLarge):
            await harness.requests.request(Explain(job="x"), [bytes(MESSAGE_LIMIT_BYTES)])
        assert len(harness.requests) == 0
        await harness.requests.request(Explain(job="x"))
